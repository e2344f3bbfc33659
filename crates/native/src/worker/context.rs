//! What tasks and fetches of a worker share.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Mutex, Semaphore};

use super::objects::Store;
use super::registry::Registry;
use super::views::Views;
use crate::plane::Plane;
use cuda_cluster_machine::os::run_directory::Paths;
use cuda_cluster_wire::peer::Member;
use cuda_cluster_wire::secret::Secret;

/// State shared by the worker's event loop and its threads.
pub(super) struct WorkerContext {
    pub(super) me: Member,
    pub(super) registry: Registry,
    pub(super) store: Arc<Store>,
    pub(super) plane: Plane,
    /// Simulated slow links, by peer.
    pub(super) links: BTreeMap<String, SimulatedLink>,
    /// Where the peers' sockets are, over which spilled objects are fetched.
    pub(super) paths: Paths,
    pub(super) secret: Secret,
    /// Objects that are read where peers have them.
    pub(super) views: Views,
    /// Limits how many fetches run at the same time.
    pub(super) fetches: Semaphore,
}

/// A link of a simulated machine: it has that machine's bandwidth, and carries one transfer at a
/// time.
pub(super) struct SimulatedLink {
    bytes_per_second: f64,
    busy: Mutex<()>,
}

impl SimulatedLink {
    pub(super) fn new(bytes_per_second: f64) -> Self {
        Self { bytes_per_second: bytes_per_second.max(1.0), busy: Mutex::default() }
    }

    /// Waits as long as the transfer would take, minus the time that it really took.
    pub(super) async fn carry(&self, bytes: u64, took: Duration) -> Duration {
        let _busy = self.busy.lock().await;
        let whole = Duration::from_secs_f64(bytes as f64 / self.bytes_per_second);
        tokio::time::sleep(whole.saturating_sub(took)).await;
        whole.max(took)
    }
}
