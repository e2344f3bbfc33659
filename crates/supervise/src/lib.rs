//! Keeps a cluster's processes running: start, READY, restart, drain, stop, kill.
//!
//! Knows no engines: it runs the processes of a [`Launch`]. Decides nothing about hardware.
//!
//! *Invariant:* every process that it has started is in its state or has been reaped.

#![allow(missing_docs, reason = "a part of the house; what users see is documented there")]

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use cuda_cluster_model::ids::{ClusterName, GpuUuid, PciAddress};
use cuda_cluster_model::plan::{EngineKind, Program, Supervision};

// Decisions and values, without effects.
mod core;
mod phase;
pub mod record;
pub mod state;

// Effects.
mod actor;
pub mod control;
mod crash;
pub mod gpu;
mod handle;
mod history;
mod memory;
pub mod metrics;
mod pairs;
mod readings;
mod ring_file;
mod service;
pub use crash::read_error;
pub use handle::{Input, Meet, Meeting, Options, OutputPipe, RequestError, StartError};
pub use phase::{ClusterPhase, ProcessPhase};
pub use record::{Cause, Outcome, Record, Stall};
pub use service::{Stopper, Supervisor};
pub use state::{ClusterState, ProcessState};

pub use cuda_cluster_wire::status::{PROCESS_VARIABLE, RUN_DIRECTORY_VARIABLE};

/// Name of the environment variable whose value all processes of a supervisor share, and no others:
/// the last resort to find them.
pub const MARK_VARIABLE: &str = "CUDA_CLUSTER_MARK";

/// What a supervisor is to run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Launch {
    /// The cluster's name.
    pub name: ClusterName,
    /// The engine, for display.
    pub engine: EngineKind,
    /// Whether the machine is simulated, for display.
    pub simulated: bool,
    /// How to handle deaths and delays.
    pub supervision: Supervision,
    /// Whether to fail if a binding can't be applied.
    pub strict: bool,
    /// Started first; the workers start when it is READY.
    pub scheduler: Option<ProcessSpec>,
    /// Started together.
    pub workers: Vec<ProcessSpec>,
    /// Processes that each bring up the workers of another machine. They start at once, and `scale`
    /// does not concern them.
    #[serde(default)]
    pub hosts: Vec<ProcessSpec>,
    /// How many of them, the last ones, are started only when `scale` or a restart asks for them.
    #[serde(default)]
    pub standby: usize,
    /// Whether the scheduler keeps running when all workers have failed, because clients may still
    /// query it, and users may restart workers.
    #[serde(default)]
    pub scheduler_stays: bool,
    /// Whether the workers start together with the scheduler instead of after it is READY, because
    /// they wait for it themselves after loading. A scheduler that forks them says when they may
    /// start ([`Status::Forks`](cuda_cluster_wire::status::Status::Forks)). Applies to the first
    /// start only.
    #[serde(default)]
    pub workers_wait: bool,
    /// Whether the first worker starts alone, and the others when it is READY, because they are
    /// forked from it. Applies to the first start only.
    #[serde(default)]
    pub first_alone: bool,
    /// Whether the workers are expected to end (`run`): status 0 is success, the first failure
    /// stops the others, and the cluster has finished when all have ended.
    #[serde(default)]
    pub run_to_completion: bool,
    /// How often the workers are started again when one fails, all of them together; `None`: each
    /// for itself. Those of `standby` are then spares for workers whose GPU is lost.
    #[serde(default)]
    pub together: Option<u32>,
    /// Whether the cluster, once every process is READY for the first time, waits for verification
    /// ([`Supervisor::verified`]).
    #[serde(default)]
    pub to_be_verified: bool,
    /// Directory that also gets what each worker writes.
    #[serde(default)]
    pub output_dir: Option<PathBuf>,
    /// Requests that could not be satisfied, for display.
    #[serde(default)]
    pub notes: Vec<String>,
}

impl Launch {
    /// All processes: the scheduler if there is one, workers, hosts.
    pub(crate) fn processes(&self) -> impl Iterator<Item = &ProcessSpec> {
        self.scheduler.iter().chain(&self.workers).chain(&self.hosts)
    }
}

/// One process to run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProcessSpec {
    /// `scheduler`, `gpu3`; unique in its cluster, also the log file's name.
    pub name: String,
    /// What to run, and its binding.
    pub program: Program,
    /// What makes it READY.
    pub ready: ReadyWhen,
    /// Its memory limit. It is killed and restarted at
    /// [`kill_percent`](cuda_cluster_model::plan::Supervision::kill_percent) of it.
    pub memory_limit_bytes: Option<u64>,
    /// Its GPU, whose memory must be free again before a restart.
    pub gpu: Option<ProcessGpu>,
    /// The other machine whose workers it brings up, for display.
    #[serde(default)]
    pub host: Option<String>,
    /// The socket of a fork server for such processes, which is faster than executing them; without
    /// it the process is executed.
    #[serde(default)]
    pub fork_server: Option<PathBuf>,
}

/// The GPU of a process, by identity and place.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProcessGpu {
    /// NVML index, for display.
    pub index: u32,
    /// As NVML names it: `GPU-…`, `MIG-…`.
    pub uuid: Option<GpuUuid>,
    /// PCI address.
    pub pci: Option<PciAddress>,
}

/// What makes a process READY.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReadyWhen {
    /// The process reports it: `wire::status::Status::Ready`.
    Said,
    /// The shim has executed the program.
    Executed,
}

/// How a cluster is stopped. Each further Ctrl-C selects the next level.
///
/// Displayed as in the control API.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, strum::Display,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Escalation {
    /// SIGTERM to all processes, and SIGKILL after the grace period.
    Graceful,
    /// SIGKILL at once, to all processes and their descendants.
    Kill,
    /// Like [`Escalation::Kill`], without waiting: the guardian finishes alone.
    Abandon,
}

impl Escalation {
    /// The level for the `count`-th request, counted from 1.
    pub fn of_request(count: u32) -> Self {
        match count {
            0 | 1 => Escalation::Graceful,
            2 => Escalation::Kill,
            _ => Escalation::Abandon,
        }
    }
}

/// For so long after a SIGTERM another one is the same request: at a time limit, Slurm sends it to
/// the processes of a step and again to those of its job.
const SAME: Duration = Duration::from_secs(10);

/// The signals so far that ask for an end.
#[derive(Debug, Default)]
pub struct Requests {
    count: u32,
    /// When the last SIGTERM came that counted.
    terminated: Option<Instant>,
}

impl Requests {
    /// Counts a signal that comes now, and returns what it asks for; `None` if it repeats the last
    /// one.
    pub fn hear(&mut self, is_terminate: bool, now: Instant) -> Option<Escalation> {
        if is_terminate && self.terminated.is_some_and(|at| now - at < SAME) {
            return None;
        }
        self.terminated = is_terminate.then_some(now);
        self.count += 1;
        Some(Escalation::of_request(self.count))
    }

    /// How many have counted.
    pub fn count(&self) -> u32 {
        self.count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_sigterm_soon_is_the_same_request_and_any_other_signal_is_not() {
        let (mut requests, began) = (Requests::default(), Instant::now());
        let mut hear = |seconds: u64, is_terminate| {
            requests.hear(is_terminate, began + Duration::from_secs(seconds))
        };
        assert_eq!(hear(0, true), Some(Escalation::Graceful));
        assert_eq!(hear(9, true), None);
        assert_eq!(hear(11, true), Some(Escalation::Kill), "the first that counted is longer ago");
        assert_eq!(hear(11, false), Some(Escalation::Abandon));
        assert_eq!(hear(11, true), Some(Escalation::Abandon), "between them was another");
        assert_eq!(requests.count(), 4);
    }
}
