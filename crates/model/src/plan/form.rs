//! A plan as a value: what each process gets, and why.
//!
//! Decides nothing; its text form is JSON or YAML, which `text` reads.
//!
//! *Invariant:* everything that a process gets (CPUs, memory nodes, NICs, variables) is in here.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

use super::engine::EnginePlan;
use super::error::PlanTextError;
use crate::cpuset::{CpuSet, NodeSet};
use crate::ids::{ClusterName, GpuIndex, GpuUuid, NicPort, PciAddress};
use crate::spec::{
    MemoryPolicy, Origin, RestartWhen, SchedulerDeath, UcxPreset, UcxVersion, Unresponsive,
};
use crate::topology::{Note, Occupant};
use crate::units::Span;

/// The version of the plan's JSON form.
pub const VERSION: u32 = 2;

/// Everything that `up` will do. `plan` and `up --dry-run` print it, the run directory keeps it as
/// `plan.json`, and [`Plan::parse`] reads it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Plan {
    /// Version of this form: [`VERSION`].
    #[serde(deserialize_with = "readable")]
    pub version: u32,
    /// The cluster's name, `default` if nobody named it.
    pub name: ClusterName,
    /// The engine with all its settings, including defaults.
    #[serde(with = "serde_yaml::with::singleton_map")]
    pub engine: EnginePlan,
    /// The machine that was planned for.
    pub machine: Machine,
    /// `None` for the command engine, and for workers that join a scheduler elsewhere.
    pub scheduler: Option<SchedulerPlan>,
    /// The workers, in rank order.
    pub workers: Vec<WorkerPlan>,
    /// Variables that a client of this cluster needs (`client.env`).
    pub client_env: BTreeMap<String, String>,
    /// What the user requires of the running cluster.
    pub requirements: Requirements,
    /// What the choice of UCX's variables depends on; `None` if UCX is not used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ucx: Option<UcxPlan>,
    /// What is done about processes that die or hang.
    pub supervision: Supervision,
    /// Who set each value that is not a default: key → `flag`, `spec`, or `environment`.
    pub origins: BTreeMap<String, Origin>,
    /// Requests that could not be satisfied, and assumptions.
    pub notes: Vec<Note>,
}

/// Refuses another version before anything else is read, so that nothing is misunderstood.
fn readable<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    let found = u64::deserialize(deserializer)?;
    if found == u64::from(VERSION) {
        return Ok(VERSION);
    }
    Err(D::Error::custom(PlanTextError::Version { found: Some(found), readable: VERSION }))
}

impl Plan {
    /// The workers as the topology's tables and pictures show them.
    pub fn occupants(&self) -> Vec<Occupant> {
        let occupant = |worker: &WorkerPlan| Occupant {
            name: worker.name.clone(),
            gpu: worker.gpu.as_ref().map(|gpu| gpu.index),
            cpus: worker.binding.cpus.clone(),
            nics: worker.nics.iter().map(|port| port.nic.clone()).collect(),
        };
        self.workers.iter().map(occupant).collect()
    }

    /// What each native worker has to know of it: no reasons, no notes, and no rates of links,
    /// which the scheduler alone weighs. Each of many workers reads it, so it has to be short.
    pub fn for_native_workers(&self) -> Self {
        let mut plan = self.clone();
        plan.workers.iter_mut().for_each(|worker| worker.why.clear());
        plan.scheduler.iter_mut().for_each(|scheduler| scheduler.why.clear());
        plan.notes.clear();
        if let EnginePlan::Native(native) = &mut plan.engine {
            native.gb_per_s.clear();
        }
        plan
    }
}

/// What a plan says of its machine; the topology is not in it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Machine {
    /// `dgx-h100`, a host's name, or what a topology file says.
    pub name: Option<String>,
    /// Where its topology came from.
    pub source: Option<String>,
    /// Whether its GPUs are only simulated here.
    pub simulated: bool,
}

/// The process of the scheduler. Its memory is left to the kernel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct SchedulerPlan {
    /// Its CPUs and memory nodes.
    #[serde(flatten)]
    pub binding: Binding,
    /// Its environment, on top of the caller's.
    pub env: BTreeMap<String, String>,
    /// What was decided about it, and why; `plan --explain` prints this.
    #[serde(default)]
    pub why: Vec<Why>,
}

/// One worker process; under the command engine, a rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct WorkerPlan {
    /// `gpu3`; with several workers a GPU `gpu3.1`; a CPU worker `cpu0`.
    pub name: String,
    /// Position among the workers, from 0.
    pub rank: u32,
    /// Which of several programs it runs; `None` if there is one, or for a spare.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
    /// Its GPU; `None` for a CPU worker.
    pub gpu: Option<WorkerGpu>,
    /// Its CPUs and memory nodes.
    #[serde(flatten)]
    pub binding: Binding,
    /// NIC ports for its traffic, nearest first; empty if UCX chooses or no NIC is used.
    pub nics: Vec<NicPort>,
    /// Threads that run tasks.
    pub threads: u32,
    /// Host memory limit in bytes; `None` for no limit.
    pub memory_limit_bytes: Option<u64>,
    /// Device memory limit in bytes; `None` for no limit.
    pub device_memory_limit_bytes: Option<u64>,
    /// Its pool of device memory; `None` for the engine's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rmm: Option<RmmPlan>,
    /// Its environment, on top of the caller's.
    pub env: BTreeMap<String, String>,
    /// What was decided about it, and why; `plan --explain` prints this.
    pub why: Vec<Why>,
}

/// A worker's GPU, by identity, place and number.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct WorkerGpu {
    /// NVML order.
    pub index: GpuIndex,
    /// Identity; that of the MIG instance when the worker has one.
    pub uuid: Option<GpuUuid>,
    /// Its PCI address, which `lspci` shows.
    pub pci: Option<PciAddress>,
    /// Its memory (the instance's for MIG).
    pub memory_bytes: Option<u64>,
    /// MIG profile, like `3g.40gb`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig: Option<String>,
}

/// A worker's pool of device memory, in the words of the RAPIDS memory manager. Native workers use
/// the first two sizes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct RmmPlan {
    /// Initial size of the pool in bytes; `None` for the allocator's own choice.
    pub pool_bytes: Option<u64>,
    /// Largest size of the pool in bytes.
    pub maximum_pool_bytes: Option<u64>,
    /// The asynchronous pool returns memory beyond this many bytes to the device.
    pub release_threshold_bytes: Option<u64>,
    /// Managed (unified) memory.
    pub managed: bool,
    /// CUDA's stream-ordered allocator.
    pub asynchronous: bool,
    /// Directory of the allocation logs; `None` for no logs.
    pub log_directory: Option<String>,
    /// Whether allocations are counted, for Dask's dashboard.
    pub track_allocations: bool,
    /// Libraries whose allocations go through RMM.
    pub set_allocator_for: Vec<String>,
}

/// The CPUs and memory nodes that a process is bound to before its first instruction.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Binding {
    /// CPUs; `None` for those of the supervisor.
    pub cpus: Option<CpuSet>,
    /// NUMA nodes for its memory; `None` leaves the policy as it is.
    pub mems: Option<NodeSet>,
    /// The memory policy that uses `mems`.
    #[serde(default)]
    pub memory_policy: MemoryPolicy,
}

/// A program with the environment and the binding of its process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Program {
    /// Program and arguments, as `os::argument` writes them; the program is looked up in
    /// `PATH`.
    pub argv: Vec<String>,
    /// Its environment, on top of the supervisor's own.
    pub env: BTreeMap<String, String>,
    /// Variables of the supervisor's that it does not have.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub without: Vec<String>,
    /// CPUs and memory nodes.
    pub binding: Binding,
    /// Its name among several programs of a job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<String>,
    /// Connections that it finds open, by the variable that tells the descriptor's number.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub connections: BTreeMap<String, Connection>,
}

/// A connection that is made for a program before it begins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Connection {
    /// The Unix socket.
    pub socket: PathBuf,
    /// What is said there first: who the program is.
    pub greeting: String,
}

/// One decision with its reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Why {
    /// What was decided: `gpu`, `cpus`, `mems`, `nic`, `device_memory_limit`, `env.UCX_TLS`, …
    pub choice: String,
    /// What was chosen, as text.
    pub chosen: String,
    /// The reason, as an expert would say it.
    pub reason: String,
    /// The alternatives, and why they were not chosen.
    pub rejected: Vec<Rejected>,
}

impl Why {
    /// A decision without alternatives.
    pub fn new(
        choice: impl Into<String>,
        chosen: impl Into<String>,
        reason: impl Into<String>,
    ) -> Self {
        let (choice, chosen, reason) = (choice.into(), chosen.into(), reason.into());
        Self { choice, chosen, reason, rejected: Vec::new() }
    }
}

/// A candidate that was not chosen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Rejected {
    /// The candidate, like `mlx5_4:1`.
    pub what: String,
    /// Why not, like `PIX, but port 1 is DOWN`.
    pub why: String,
}

/// What the user requires of the running cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Requirements {
    /// GPU pairs joined by NVLink must use it.
    pub nvlink: bool,
    /// Notes are errors.
    pub strict: bool,
    /// The cluster is READY only after every pair of workers has moved data over the expected
    /// lanes.
    pub verify: bool,
}

/// What UCX's variables were chosen for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct UcxPlan {
    /// The version that was requested, or else is installed; `None` if it is unknown.
    pub version: Option<UcxVersion>,
    /// Whether there are settings for the machine's architecture and this version.
    pub preset: UcxPreset,
}

/// What is done about processes that die or hang.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Supervision {
    /// When a dead worker is started again.
    pub restart: RestartWhen,
    /// Failed restarts allowed per worker within `window`: those that do not end in READY.
    pub limit: u32,
    /// Deaths allowed per worker within `window` while it is READY; `None` for any number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_at_work: Option<u32>,
    /// The time in which deaths count for both limits.
    pub window: Span,
    /// First delay before a restart; it doubles with each further restart. A worker that was READY
    /// is restarted at once the first time, and always if it had begun a task.
    pub backoff: Span,
    /// Longest delay.
    pub backoff_max: Span,
    /// After being READY this long a worker's delay and its count for `limit` start over.
    pub healthy_after: Span,
    /// Time from start to READY of the whole cluster.
    pub ready_within: Span,
    /// Time between SIGTERM and SIGKILL.
    pub grace: Span,
    /// Percentage of its memory limit at which a worker is killed and started again; `None` for
    /// never.
    #[serde(default = "kill_percent")]
    pub kill_percent: Option<f64>,
    /// What happens when the scheduler dies.
    pub scheduler_death: SchedulerDeath,
    /// A process that does not answer for this long is not READY until it answers again.
    #[serde(default = "answer_within")]
    pub answer_within: Span,
    /// What happens to a process that has not answered for `answer_within`.
    #[serde(default)]
    pub unresponsive: Unresponsive,
    /// Longest wait for a dead worker's GPU memory to be free before its restart.
    pub gpu_free_within: Span,
    /// For how long processes that can't go on are not said to be stalled; `None` for ever.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stalled_after: Option<Span>,
    /// Whether the cluster then ends.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub end_when_stalled: bool,
    /// Whether the bytes between the processes are counted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub audit: bool,
    /// A log file is rotated at this size, in bytes.
    pub log_rotate_bytes: u64,
    /// Rotated log files kept per process.
    pub log_keep: u32,
    /// File that holds the supervisor's process id while it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid_file: Option<PathBuf>,
    /// Resource limits of every process, by the name of `RLIMIT_…` in lower case.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub ulimits: BTreeMap<String, LimitPlan>,
}

/// A resource limit of a process; `None` is unlimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
#[allow(missing_docs, reason = "a field that says nothing more has its name")]
pub enum LimitPlan {
    /// The soft limit; the hard one is raised if that is lower.
    One(#[serde(with = "most")] Option<u64>),
    /// A soft limit and a hard one, which is at least as high.
    Both {
        /// In force; `None` is unlimited.
        #[serde(with = "most")]
        soft: Option<u64>,
        /// As far as a process may raise it; `None` is unlimited.
        #[serde(with = "most")]
        hard: Option<u64>,
    },
}

/// A limit as a number or the word `unlimited`; `null` is read, too, as plans had it before.
mod most {
    use std::fmt;

    use serde::de::{self, Visitor};
    use serde::{Deserializer, Serializer};

    const UNLIMITED: &str = "unlimited";

    #[allow(clippy::trivially_copy_pass_by_ref, reason = "serde calls it with a reference")]
    pub(super) fn serialize<S: Serializer>(
        most: &Option<u64>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match most {
            Some(most) => serializer.serialize_u64(*most),
            None => serializer.serialize_str(UNLIMITED),
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<u64>, D::Error> {
        struct Most;
        impl Visitor<'_> for Most {
            type Value = Option<u64>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number, or 'unlimited'")
            }

            fn visit_u64<E: de::Error>(self, most: u64) -> Result<Option<u64>, E> {
                Ok(Some(most))
            }

            fn visit_str<E: de::Error>(self, word: &str) -> Result<Option<u64>, E> {
                let wrong = || E::invalid_value(de::Unexpected::Str(word), &self);
                (word == UNLIMITED).then_some(None).ok_or_else(wrong)
            }

            fn visit_unit<E: de::Error>(self) -> Result<Option<u64>, E> {
                Ok(None)
            }
        }
        deserializer.deserialize_any(Most)
    }
}

impl LimitPlan {
    /// The limit in force.
    pub fn soft(self) -> Option<u64> {
        match self {
            LimitPlan::One(soft) | LimitPlan::Both { soft, .. } => soft,
        }
    }
}

/// Long enough for a very busy machine, and for most tasks that block their event loop.
fn answer_within() -> Span {
    Span::secs(30)
}

fn kill_percent() -> Option<f64> {
    Some(super::memory::KILL_PERCENT as f64)
}

impl Default for Supervision {
    fn default() -> Self {
        Self {
            restart: RestartWhen::default(),
            limit: 5,
            limit_at_work: None,
            window: Span::secs(60),
            backoff: Span::millis(100),
            backoff_max: Span::secs(30),
            healthy_after: Span::secs(30),
            ready_within: Span::secs(60),
            grace: Span::secs(5),
            kill_percent: kill_percent(),
            scheduler_death: SchedulerDeath::default(),
            answer_within: answer_within(),
            unresponsive: Unresponsive::default(),
            gpu_free_within: Span::secs(10),
            audit: false,
            stalled_after: None,
            end_when_stalled: false,
            log_rotate_bytes: 64 << 20,
            log_keep: 3,
            pid_file: None,
            ulimits: BTreeMap::new(),
        }
    }
}
