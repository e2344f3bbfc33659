//! The embedded API for programs without an event loop of their own.

use tokio::runtime::Runtime;

use super::{Builder, ControlError, LaunchFailure, UpError};
use crate::os::event_loop;
use crate::plan::Plan;
use crate::supervise::ClusterState;

/// A running cluster, owned by this program; like [`super::Cluster`], with blocking calls.
#[derive(Debug)]
pub struct Cluster {
    cluster: super::Cluster,
    runtime: Runtime,
}

impl Builder {
    /// Like [`Builder::launch`], for a program without an event loop.
    ///
    /// # Errors
    /// As there.
    pub fn launch_blocking(self) -> Result<Cluster, LaunchFailure> {
        let runtime = event_loop::new().map_err(UpError::Runtime)?;
        let cluster = runtime.block_on(self.launch())?;
        Ok(Cluster { cluster, runtime })
    }
}

impl Cluster {
    /// The plan with its reasons.
    pub fn plan(&self) -> &Plan {
        self.cluster.plan()
    }

    /// The phase of the cluster and of each process, as `ps -o json` prints them.
    ///
    /// # Errors
    /// If the supervisor can't be reached.
    pub fn state(&self) -> Result<ClusterState, ControlError> {
        self.runtime.block_on(self.cluster.state())
    }

    /// Restarts a worker or, given the scheduler's name, the whole cluster.
    ///
    /// # Errors
    /// If no process has that name, or the supervisor can't be reached.
    pub fn restart(&self, process: &str) -> Result<(), ControlError> {
        self.runtime.block_on(self.cluster.restart(process))
    }

    /// Changes the number of running workers: the first ones of the plan.
    ///
    /// # Errors
    /// If the plan has fewer, or the supervisor can't be reached.
    pub fn scale(&self, workers: usize) -> Result<(), ControlError> {
        self.runtime.block_on(self.cluster.scale(workers))
    }

    /// Stops the cluster, and returns when nothing of it is left.
    pub fn stop(self) {
        self.runtime.block_on(self.cluster.stop());
    }
}
