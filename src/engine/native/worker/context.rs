//! What a worker's tasks and fetches run with.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Mutex, Semaphore};

use super::objects::Store;
use super::registry::Registry;
use crate::engine::native::plane::Plane;
use crate::os::run_directory::Paths;
use crate::wire::peer::Member;
use crate::wire::secret::Secret;

/// What a worker runs with, shared by its event loop and its threads.
pub(super) struct WorkerContext {
    pub(super) me: Member,
    pub(super) registry: Registry,
    pub(super) store: Arc<Store>,
    pub(super) plane: Plane,
    /// Links that are slowed down, by peer.
    pub(super) links: BTreeMap<String, SimulatedLink>,
    /// Has the sockets of the peers, which give what they have on disk to whoever knows the secret.
    pub(super) paths: Paths,
    pub(super) secret: Secret,
    /// As many fetches as run at one time.
    pub(super) fetches: Semaphore,
}

/// A link of a simulated machine: as slow as that machine's, one transfer after the other.
pub(super) struct SimulatedLink {
    bytes_per_second: f64,
    busy: Mutex<()>,
}

impl SimulatedLink {
    pub(super) fn new(bytes_per_second: f64) -> Self {
        Self { bytes_per_second: bytes_per_second.max(1.0), busy: Mutex::default() }
    }

    /// Lasts as long as the transfer would, less what it took in truth.
    pub(super) async fn carry(&self, bytes: u64, took: Duration) -> Duration {
        let _busy = self.busy.lock().await;
        let whole = Duration::from_secs_f64(bytes as f64 / self.bytes_per_second);
        tokio::time::sleep(whole.saturating_sub(took)).await;
        whole.max(took)
    }
}
