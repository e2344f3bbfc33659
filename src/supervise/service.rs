//! Acts: starts and ends processes as `core` decides, and tells whoever listens.
//!
//! *Invariant:* dropping a [`Supervisor`] leaves no process of its cluster.

use std::path::PathBuf;

use tokio::sync::{broadcast, watch};

use super::{Cause, ClusterState, Escalation, Launch, Record};
use crate::os::run_directory::RunDirectory;

/// How a supervisor does its work.
#[derive(Clone, Debug)]
pub struct Options {
    /// The program with the hidden subcommands `__guard` and `__shim`: `cuda-cluster`, or any
    /// program whose `main` begins with [`crate::os::dispatch`].
    pub helper: PathBuf,
}

impl Default for Options {
    fn default() -> Self {
        Self { helper: PathBuf::from("/proc/self/exe") }
    }
}

/// How a cluster ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// Somebody asked. With the cause, if it was `degraded` then.
    Stopped {
        /// Why it was `degraded`.
        degraded: Option<Cause>,
    },
    /// All workers of a [`Launch::run_to_completion`] ended with status 0.
    Finished,
    /// It did not become READY in time; everything is torn down.
    NotReady(Cause),
    /// It could not start, or could not go on; everything is torn down.
    Failed(Cause),
}

/// Why a supervisor could not begin.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The guardian could not be started.
    #[error("cannot start the guardian process {}", helper.display())]
    Guardian {
        /// The program.
        helper: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

/// A running cluster's supervisor.
#[derive(Debug)]
pub struct Supervisor {}

impl Supervisor {
    /// Begins: starts the guardian, the control API and the first process, and returns at once.
    ///
    /// Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// If the guardian or the control socket cannot be had.
    pub async fn start(
        _launch: Launch,
        _directory: RunDirectory,
        _options: Options,
    ) -> Result<Self, StartError> {
        unreachable!("the service follows its contract")
    }

    /// The state, and every change of it.
    pub fn state(&self) -> watch::Receiver<ClusterState> {
        unreachable!("the service follows its contract")
    }

    /// What happens from now on.
    pub fn events(&self) -> broadcast::Receiver<Record> {
        unreachable!("the service follows its contract")
    }

    /// Waits until the cluster is READY.
    ///
    /// # Errors
    /// How it ended, if it ended before that.
    pub async fn ready(&self) -> Result<(), Outcome> {
        unreachable!("the service follows its contract")
    }

    /// Asks for the end; returns at once.
    pub fn stop(&self, _how: Escalation) {
        unreachable!("the service follows its contract")
    }

    /// Starts a worker again, or the whole cluster for the scheduler's name.
    pub fn restart(&self, _process: &str) {
        unreachable!("the service follows its contract")
    }

    /// Waits until everything is gone and the run directory is removed or kept.
    pub async fn wait(self) -> Outcome {
        unreachable!("the service follows its contract")
    }
}
