//! Keeps a cluster's processes running: start, READY, restart, drain, stop, kill.
//!
//! Knows no engine: it runs what a [`Launch`] says. Decides nothing about hardware.
//!
//! *Invariant:* every process it started is either in its state or reaped.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::ids::{ClusterName, GpuUuid, PciAddress};
use crate::plan::{EngineKind, Program, Supervision};

// Decisions and values: they need nothing but themselves.
mod core;
pub mod record;
pub mod state;

// What acts.
#[cfg(feature = "launch")]
mod actor;
#[cfg(feature = "launch")]
mod aftermath;
#[cfg(feature = "launch")]
mod contact;
#[cfg(feature = "launch")]
pub mod control;
#[cfg(feature = "launch")]
mod crash;
#[cfg(feature = "launch")]
mod directory;
#[cfg(feature = "launch")]
pub mod gpu;
#[cfg(feature = "launch")]
mod memory;
#[cfg(feature = "launch")]
mod metrics;
#[cfg(feature = "launch")]
mod service;
#[cfg(feature = "launch")]
mod teardown;

pub use record::{Cause, Outcome, Record};
#[cfg(feature = "launch")]
pub use service::{Options, OutputPipe, RequestError, StartError, Stopper, Supervisor};
pub use state::{ClusterPhase, ClusterState, ProcessPhase, ProcessState};

pub use crate::wire::status::{PROCESS_VARIABLE, RUN_DIRECTORY_VARIABLE};

/// Names the environment variable with a value that every process of one supervisor carries, and
/// no other: the last means to find them.
pub const MARK_VARIABLE: &str = "CUDA_CLUSTER_MARK";

/// What a supervisor runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Launch {
    /// The cluster's name.
    pub name: ClusterName,
    /// The engine, for display.
    pub engine: EngineKind,
    /// Whether the machine is simulated, for display.
    pub simulated: bool,
    /// How deaths and slowness are dealt with.
    pub supervision: Supervision,
    /// Whether a binding that cannot be applied is refused.
    pub strict: bool,
    /// Started first; the workers start when it is READY.
    pub scheduler: Option<ProcessSpec>,
    /// Started together.
    pub workers: Vec<ProcessSpec>,
    /// Whether the scheduler goes on when every worker is failed, because clients may still ask it
    /// for what it knows, and people may start workers again.
    #[serde(default)]
    pub scheduler_stays: bool,
    /// Whether the workers are started beside the scheduler, and not when it is READY, because they
    /// wait for it themselves when they have loaded what they need. Only at the first start.
    #[serde(default)]
    pub workers_wait: bool,
    /// Whether the first worker is started alone, and the others when it is READY, because they
    /// are forked from what it has loaded. Only at the first start.
    #[serde(default)]
    pub first_alone: bool,
    /// Whether the workers are expected to end (`run`): status 0 is done, the first failure stops
    /// the others, and when all are done the cluster has finished.
    #[serde(default)]
    pub run_to_completion: bool,
    /// Whether the cluster, when every process is READY for the first time, waits until somebody
    /// has verified it ([`Supervisor::verified`]).
    #[serde(default)]
    pub to_be_verified: bool,
    /// What could not be had, for display.
    #[serde(default)]
    pub notes: Vec<String>,
}

impl Launch {
    /// All processes, the scheduler first if there is one.
    pub(crate) fn processes(&self) -> impl Iterator<Item = &ProcessSpec> {
        self.scheduler.iter().chain(&self.workers)
    }
}

/// One process to run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProcessSpec {
    /// `scheduler`, `gpu3`; unique in its cluster, also the log file's name.
    pub name: String,
    /// What it runs, bound to what.
    pub program: Program,
    /// What makes it READY.
    pub ready: ReadyWhen,
    /// It is stopped and restarted when its resident memory reaches this many bytes.
    pub memory_limit_bytes: Option<u64>,
    /// Its GPU, whose memory must be free again before a restart.
    pub gpu: Option<ProcessGpu>,
    /// The socket of a server that forks processes like it, which is quicker than executing them;
    /// it is executed when there is none.
    #[serde(default)]
    pub fork_server: Option<PathBuf>,
}

/// The GPU of a process, by identity and place.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProcessGpu {
    /// NVML index, for people.
    pub index: u32,
    /// Identity.
    pub uuid: Option<GpuUuid>,
    /// Place.
    pub pci: Option<PciAddress>,
}

/// What makes a process READY.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReadyWhen {
    /// Its own word: `wire::status::Status::Ready`.
    Said,
    /// The shim has executed it.
    Executed,
}

/// How hard a cluster is stopped. Each further Ctrl-C asks for the next.
///
/// Displayed as the control API spells it.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, strum::Display,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Escalation {
    /// SIGTERM to everything, and SIGKILL after the grace.
    Graceful,
    /// SIGKILL at once, to everything and everything that it started.
    Kill,
    /// As [`Escalation::Kill`], and nobody waits for it: the guardian finishes alone.
    Abandon,
}

impl Escalation {
    /// What the `count`-th request (from 1) asks for.
    pub fn of_request(count: u32) -> Self {
        match count {
            0 | 1 => Escalation::Graceful,
            2 => Escalation::Kill,
            _ => Escalation::Abandon,
        }
    }
}
