//! The embedded API for programs without an event loop of their own.

use tokio::runtime::Runtime;

use super::{Builder, ControlError, LaunchFailure, UpError};
use crate::os::event_loop;
use crate::plan::Plan;
use crate::supervise::ClusterState;

/// A running cluster, owned by this program; as [`super::Cluster`], with calls that block.
#[derive(Debug)]
pub struct Cluster {
    cluster: super::Cluster,
    runtime: Runtime,
}

pub(super) fn launch(builder: Builder) -> Result<Cluster, LaunchFailure> {
    let runtime = event_loop::new().map_err(UpError::Runtime)?;
    let cluster = runtime.block_on(builder.launch())?;
    Ok(Cluster { cluster, runtime })
}

impl Cluster {
    /// What was decided, with reasons.
    pub fn plan(&self) -> &Plan {
        self.cluster.plan()
    }

    /// The phase of the cluster and of each process, as `ps -o json` prints them.
    ///
    /// # Errors
    /// If the supervisor cannot be asked.
    pub fn state(&self) -> Result<ClusterState, ControlError> {
        self.runtime.block_on(self.cluster.state())
    }

    /// Starts a worker again, or, with the scheduler's name, the whole cluster.
    ///
    /// # Errors
    /// If no process has that name, or the supervisor cannot be asked.
    pub fn restart(&self, process: &str) -> Result<(), ControlError> {
        self.runtime.block_on(self.cluster.restart(process))
    }

    /// Has this many workers run: the first ones of the plan.
    ///
    /// # Errors
    /// If the plan has fewer, or the supervisor cannot be asked.
    pub fn scale(&self, workers: usize) -> Result<(), ControlError> {
        self.runtime.block_on(self.cluster.scale(workers))
    }

    /// Takes it down, and returns when nothing of it is left.
    pub fn stop(self) {
        self.runtime.block_on(self.cluster.stop());
    }
}
