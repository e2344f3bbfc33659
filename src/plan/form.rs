//! A plan as a value: what each process is given, and why.
//!
//! Decides nothing; its text form is JSON or YAML, which `text` reads.
//!
//! *Invariant:* whatever a process is given (CPUs, memory nodes, NICs, variables) stands here.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

use super::engine::EnginePlan;
use super::error::PlanTextError;
use crate::cpuset::{CpuSet, NodeSet};
use crate::ids::{ClusterName, GpuIndex, GpuUuid, NicPort, PciAddress};
use crate::spec::{MemoryPolicy, Origin, RestartWhen, SchedulerDeath, Unresponsive};
use crate::topology::{Note, Occupant};
use crate::units::Span;

/// The version of the plan's JSON form.
pub const VERSION: u32 = 2;

/// Everything that `up` does, as a value: printed by `plan` and `up --dry-run`, kept as
/// `plan.json`. [`Plan::parse`] reads it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Version of this form: [`VERSION`].
    #[serde(deserialize_with = "readable")]
    pub version: u32,
    /// The cluster's name.
    pub name: ClusterName,
    /// What runs in the processes, and what it is told.
    #[serde(with = "serde_yaml::with::singleton_map")]
    pub engine: EnginePlan,
    /// The machine that was planned for.
    pub machine: Machine,
    /// The scheduler, for engines that have one.
    pub scheduler: Option<SchedulerPlan>,
    /// The workers, in rank order.
    pub workers: Vec<WorkerPlan>,
    /// Variables that a client of this cluster needs (`client.env`).
    pub client_env: BTreeMap<String, String>,
    /// What must hold once the cluster runs, because the user asked for it.
    pub requirements: Requirements,
    /// How deaths and slowness are dealt with.
    pub supervision: Supervision,
    /// Who set each value that is not a default: key → `flag`, `spec`, or `environment`.
    pub origins: BTreeMap<String, Origin>,
    /// What could not be had, or was assumed.
    pub notes: Vec<Note>,
}

/// Reads the version, and refuses another one before anything else is understood wrongly.
fn readable<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    let found = u64::deserialize(deserializer)?;
    if found == u64::from(VERSION) {
        return Ok(VERSION);
    }
    Err(D::Error::custom(PlanTextError::Version { found: Some(found), readable: VERSION }))
}

impl Plan {
    /// Its workers, as the topology's forms for people show them.
    pub fn occupants(&self) -> Vec<Occupant> {
        let occupant = |worker: &WorkerPlan| Occupant {
            name: worker.name.clone(),
            gpu: worker.gpu.as_ref().map(|gpu| gpu.index),
            cpus: worker.binding.cpus.clone(),
            nics: worker.nics.iter().map(|port| port.nic.clone()).collect(),
        };
        self.workers.iter().map(occupant).collect()
    }
}

/// The machine that a plan is for.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// Its name.
    pub name: Option<String>,
    /// Where its topology came from.
    pub source: Option<String>,
    /// Whether its GPUs are only simulated here.
    pub simulated: bool,
}

/// The scheduler process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SchedulerPlan {
    /// What it is bound to.
    #[serde(flatten)]
    pub binding: Binding,
    /// Its environment, on top of the caller's.
    pub env: BTreeMap<String, String>,
    /// The reasons.
    #[serde(default)]
    pub why: Vec<Why>,
}

/// One worker process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerPlan {
    /// `gpu3`; with several workers a GPU `gpu3.1`; a CPU worker `cpu0`.
    pub name: String,
    /// Position among the workers, from 0.
    pub rank: u32,
    /// Its GPU; `None` for a CPU worker.
    pub gpu: Option<WorkerGpu>,
    /// What it is bound to.
    #[serde(flatten)]
    pub binding: Binding,
    /// NIC ports for its traffic, nearest first; empty when UCX may choose or none is used.
    pub nics: Vec<NicPort>,
    /// Threads that run tasks.
    pub threads: u32,
    /// Host memory limit in bytes; `None` for none.
    pub memory_limit_bytes: Option<u64>,
    /// Device memory limit in bytes; `None` for none.
    pub device_memory_limit_bytes: Option<u64>,
    /// Its RMM pool; `None` for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rmm: Option<RmmPlan>,
    /// Its environment, on top of the caller's.
    pub env: BTreeMap<String, String>,
    /// The reasons.
    pub why: Vec<Why>,
}

/// A worker's GPU, by identity, place and number.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerGpu {
    /// NVML order.
    pub index: GpuIndex,
    /// Identity; that of the MIG instance when the worker has one.
    pub uuid: Option<GpuUuid>,
    /// Place.
    pub pci: Option<PciAddress>,
    /// Its memory (the instance's for MIG).
    pub memory_bytes: Option<u64>,
    /// MIG profile, like `3g.40gb`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig: Option<String>,
}

/// A worker's RAPIDS memory manager.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RmmPlan {
    /// First size of the pool in bytes; `None` for RMM's own choice.
    pub pool_bytes: Option<u64>,
    /// Most that the pool may grow to, in bytes.
    pub maximum_pool_bytes: Option<u64>,
    /// The asynchronous pool gives memory beyond this many bytes back.
    pub release_threshold_bytes: Option<u64>,
    /// Managed (unified) memory.
    pub managed: bool,
    /// CUDA's stream-ordered allocator.
    pub asynchronous: bool,
    /// Directory of the allocation logs.
    pub log_directory: Option<String>,
    /// Count allocations.
    pub track_allocations: bool,
    /// Libraries whose allocations go through RMM.
    pub set_allocator_for: Vec<String>,
}

/// CPUs and memory that a process is given before its first instruction.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Binding {
    /// CPUs; `None` leaves them as the supervisor's.
    pub cpus: Option<CpuSet>,
    /// NUMA nodes for its memory; `None` leaves the policy as it is.
    pub mems: Option<NodeSet>,
    /// How `mems` is meant.
    #[serde(default)]
    pub memory_policy: MemoryPolicy,
}

/// A program, and what its process is before the program's first instruction.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Program {
    /// Program and arguments, as `os::argument` writes them; the program is looked up in
    /// `PATH`.
    pub argv: Vec<String>,
    /// Its environment, on top of the supervisor's own.
    pub env: BTreeMap<String, String>,
    /// CPUs and memory nodes.
    pub binding: Binding,
}

/// One decision with its reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Why {
    /// What was decided: `gpu`, `cpus`, `mems`, `nic`, `device_memory_limit`, `env.UCX_TLS`, …
    pub choice: String,
    /// What was chosen, as text.
    pub chosen: String,
    /// Because of what.
    pub reason: String,
    /// What else there was, and why not.
    pub rejected: Vec<Rejected>,
}

/// A candidate that was not chosen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rejected {
    /// The candidate, like `mlx5_4:1`.
    pub what: String,
    /// Why not, like `PIX, but port 1 is DOWN`.
    pub why: String,
}

/// What the user asked to be true of the running cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Requirements {
    /// GPU pairs joined by NVLink must use it.
    pub nvlink: bool,
    /// Notes are errors.
    pub strict: bool,
    /// READY also means that every pair of workers has moved data over what should carry it.
    pub verify: bool,
}

/// How deaths and slowness are dealt with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Supervision {
    /// When a dead worker is started again.
    pub restart: RestartWhen,
    /// Restarts allowed per worker within `window` that do not end in READY. A worker that dies
    /// while it is READY always comes back.
    pub limit: u32,
    /// The window of `limit`.
    pub window: Span,
    /// First delay before a restart; doubles with each further one. What was READY is started again
    /// at once the first time.
    pub backoff: Span,
    /// Longest delay.
    pub backoff_max: Span,
    /// A worker that ran this long starts afresh with delay and count.
    pub healthy_after: Span,
    /// Time from start to READY of the whole cluster.
    pub ready_within: Span,
    /// Time between SIGTERM and SIGKILL.
    pub grace: Span,
    /// What a dead scheduler means.
    pub scheduler_death: SchedulerDeath,
    /// A process that does not answer for this long is not READY until it does.
    #[serde(default = "answer_within")]
    pub answer_within: Span,
    /// What follows when a process has not answered for `answer_within`.
    #[serde(default)]
    pub unresponsive: Unresponsive,
    /// Longest wait for a dead worker's GPU memory to be free before its restart.
    pub gpu_free_within: Span,
    /// A log file is rotated at this size, in bytes.
    pub log_rotate_bytes: u64,
    /// Rotated log files kept per process.
    pub log_keep: u32,
    /// Where the supervisor's process id stands while it is at work.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid_file: Option<PathBuf>,
    /// Resource limits of every process, by the name of `RLIMIT_…` in lower case; `None` is
    /// unlimited.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub ulimits: BTreeMap<String, Option<u64>>,
}

/// Long enough for a machine that is very busy, and for the tasks of most programs that hold up
/// their event loop.
fn answer_within() -> Span {
    Span::secs(30)
}

impl Default for Supervision {
    fn default() -> Self {
        Self {
            restart: RestartWhen::default(),
            limit: 5,
            window: Span::secs(60),
            backoff: Span::millis(100),
            backoff_max: Span::secs(30),
            healthy_after: Span::secs(30),
            ready_within: Span::secs(60),
            grace: Span::secs(5),
            scheduler_death: SchedulerDeath::default(),
            answer_within: answer_within(),
            unresponsive: Unresponsive::default(),
            gpu_free_within: Span::secs(10),
            log_rotate_bytes: 64 << 20,
            log_keep: 3,
            pid_file: None,
            ulimits: BTreeMap::new(),
        }
    }
}
