//! Keeps a cluster's processes running: start, READY, restart, drain, stop, kill.
//!
//! Knows no engine: it runs what a [`Launch`] says. Decides nothing about hardware.
//!
//! *Invariant:* every process it started is either in its state or reaped.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::ids::{ClusterName, GpuUuid, PciAddress};
use crate::plan::{Binding, EngineKind, Supervision};

/// Names the environment variable with the run directory's path, set for every process.
pub const RUN_DIRECTORY_VARIABLE: &str = "CUDA_CLUSTER_RUN_DIR";

/// Names the environment variable with the process's own name (`scheduler`, `gpu3`).
pub const PROCESS_VARIABLE: &str = "CUDA_CLUSTER_PROCESS";

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
}

/// One process to run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProcessSpec {
    /// `scheduler`, `gpu3`; unique in its cluster, also the log file's name.
    pub name: String,
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Its environment, on top of the supervisor's own.
    pub env: BTreeMap<String, String>,
    /// Variables of the supervisor's environment that it must not inherit.
    #[serde(default)]
    pub env_remove: Vec<String>,
    /// Working directory; `None` for the supervisor's.
    pub directory: Option<PathBuf>,
    /// CPUs and memory nodes, applied before its first instruction.
    pub binding: Binding,
    /// What makes it READY.
    pub ready: ReadyWhen,
    /// It is stopped and restarted when its resident memory reaches this many bytes.
    pub memory_limit_bytes: Option<u64>,
    /// Its GPU, whose memory must be free again before a restart.
    pub gpu: Option<ProcessGpu>,
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
