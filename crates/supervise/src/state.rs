//! The state of a cluster and its processes, as `ps -o json` prints it.
//!
//! Only holds the value and its JSON form; `core` changes it.
//!
//! *Invariant:* other programs rely on the JSON keys of [`ClusterState`] and [`ProcessState`]: keys
//! are added, never renamed or removed, within one [`VERSION`].

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

use super::record::GpuError;
use super::{Cause, ClusterPhase, Launch, ProcessGpu, ProcessPhase, ProcessSpec};
use cuda_cluster_model::cpuset::{CpuSet, NodeSet};
use cuda_cluster_model::ids::ClusterName;
use cuda_cluster_model::plan::{Binding, EngineKind};
use cuda_cluster_wire::process::{Containment, Exit, Observed};
use cuda_cluster_wire::status::{DevicePool, JoinedWorker, MissingPort, PeerLanes, Work};

/// The version of the JSON form.
pub const VERSION: u32 = 1;

/// The current state of a cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClusterState {
    /// Version of this format: [`VERSION`].
    #[serde(deserialize_with = "readable")]
    pub version: u32,
    /// The cluster's name.
    pub name: ClusterName,
    /// The engine that runs the workers.
    pub engine: EngineKind,
    /// Whether its GPUs are simulated.
    pub simulated: bool,
    /// The cluster's phase.
    pub state: ClusterPhase,
    /// Process id of the supervisor.
    pub supervisor_pid: u32,
    /// Process id of the guardian, the parent of every process of the cluster.
    pub guardian_pid: Option<u32>,
    /// Since when the guardian has not answered, as RFC 3339; only while it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guardian_not_answering_since: Option<String>,
    /// When the supervisor started, as RFC 3339.
    pub started_at: String,
    /// Milliseconds from the supervisor's start to the first READY.
    pub ready_after_ms: Option<u64>,
    /// The directory of its sockets, plan, logs and events.
    pub run_directory: PathBuf,
    /// How its processes are contained.
    pub containment: Containment,
    /// The scheduler, for engines that have one.
    pub scheduler: Option<ProcessState>,
    /// The workers, in rank order.
    pub workers: Vec<ProcessState>,
    /// The processes that each bring up the workers of another machine.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<ProcessState>,
    /// Workers of other supervisors, or of none, that have joined its scheduler; also the last ones
    /// that have gone.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub joined: Vec<Joined>,
    /// Why it is `degraded` or `failed`.
    pub cause: Option<Cause>,
    /// Requests that could not be satisfied, and what is wrong with its run directory.
    pub notes: Vec<String>,
    /// When it ended, as RFC 3339; `None` while it is running, or if the time is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_at: Option<String>,
}

/// A worker that has joined the scheduler from elsewhere.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Joined {
    /// What it says of itself.
    #[serde(flatten)]
    pub worker: JoinedWorker,
    /// Whether it is there.
    pub state: JoinedPhase,
    /// Since when, as RFC 3339.
    pub since: String,
    /// Why it has gone, as far as known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// Whether a worker that has joined is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, strum::Display)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum JoinedPhase {
    /// The scheduler has it.
    Ready,
    /// It has gone as was wished.
    Left,
    /// It has gone, and nobody wished that.
    Lost,
}

/// Refuses another version before anything else is read, so that nothing is misunderstood.
fn readable<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    let found = u32::deserialize(deserializer)?;
    if found == VERSION {
        return Ok(VERSION);
    }
    let reason = format!("it has version {found}, and this program reads version {VERSION}");
    Err(D::Error::custom(reason))
}

impl ClusterState {
    /// The state of a launch before anything is started. `log` names a process's log file.
    pub(super) fn initial(
        launch: &Launch,
        guardian_pid: u32,
        containment: Containment,
        run_directory: &Path,
        log: impl Fn(&str) -> PathBuf,
        began: SystemTime,
    ) -> Self {
        let process = |spec: &ProcessSpec| ProcessState {
            name: spec.name.clone(),
            rank: None,
            program: spec.program.role.clone(),
            host: spec.host.clone(),
            pid: None,
            state: ProcessPhase::Waiting,
            not_answering_since: None,
            address: None,
            dashboard: None,
            restarts: 0,
            deaths_at_work: 0,
            starts_at: None,
            gpu: spec.gpu.clone(),
            cpus: spec.program.binding.cpus.clone(),
            mems: spec.program.binding.mems.clone(),
            asked: spec.program.binding.clone(),
            memory_limit_bytes: spec.memory_limit_bytes,
            containment,
            last_exit: None,
            step: None,
            peers: Vec::new(),
            ucx: None,
            missing_ports: Vec::new(),
            device_pool: None,
            work: None,
            received_from: BTreeMap::new(),
            log: log(&spec.name),
            timings: Timings::default(),
            notes: Vec::new(),
            observed: None,
            resident_bytes: None,
            cpu_ms: None,
            cpu_before: None,
            age_ms: None,
            gpu_use: None,
        };
        Self {
            version: VERSION,
            name: launch.name.clone(),
            engine: launch.engine,
            simulated: launch.simulated,
            state: ClusterPhase::Starting,
            supervisor_pid: std::process::id(),
            guardian_pid: Some(guardian_pid),
            guardian_not_answering_since: None,
            started_at: humantime::format_rfc3339_millis(began).to_string(),
            ready_after_ms: None,
            run_directory: run_directory.to_owned(),
            containment,
            scheduler: launch.scheduler.as_ref().map(process),
            workers: launch.workers.iter().map(process).collect(),
            hosts: launch.hosts.iter().map(process).collect(),
            joined: Vec::new(),
            cause: None,
            notes: launch.notes.clone(),
            ended_at: None,
        }
    }
}

/// The current state of a process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProcessState {
    /// `scheduler`, `gpu3`.
    pub name: String,
    /// The number by which its program knows it, if that may differ from its place here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// Which of several programs it runs; a spare none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
    /// The other machine whose workers it brings up, as it was named; only of `hosts`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Its process id, while it is running.
    pub pid: Option<u32>,
    /// What it does: waits, starts, works, stops.
    pub state: ProcessPhase,
    /// Since when it has not answered, as RFC 3339; only while it is `unresponsive`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_answering_since: Option<String>,
    /// Its address, once it has reported it.
    pub address: Option<String>,
    /// The URL of its dashboard, for a scheduler that has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dashboard: Option<String>,
    /// Number of restarts.
    pub restarts: u32,
    /// Number of deaths in a row while it was READY, without a healthy period in between.
    #[serde(default)]
    pub deaths_at_work: u32,
    /// When it will be restarted, as RFC 3339, while it waits for that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub starts_at: Option<String>,
    /// The GPU that it is bound to; `None` for a worker without one.
    pub gpu: Option<ProcessGpu>,
    /// CPUs in effect, read back before its first instruction; until then the requested ones.
    pub cpus: Option<CpuSet>,
    /// NUMA nodes of the memory policy in effect, read back likewise.
    pub mems: Option<NodeSet>,
    /// The requested binding.
    pub asked: Binding,
    /// The limit of its memory that holds here; the plan's may be for another machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_limit_bytes: Option<u64>,
    /// How its descendants are contained.
    pub containment: Containment,
    /// How its last process ended.
    pub last_exit: Option<LastExit>,
    /// The current step of its start, or the step in which it ended.
    pub step: Option<String>,
    /// Lanes of its connections to its peers.
    pub peers: Vec<PeerLanes>,
    /// The UCX that it uses, as reported by UCX.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ucx: Option<String>,
    /// Planned NIC ports that it can't use, as of its last answer.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing_ports: Vec<MissingPort>,
    /// Its pool of device memory, as of its last answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_pool: Option<DevicePool>,
    /// What it has done and what it keeps where, as of its last answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub work: Option<Work>,
    /// The bytes of `work` that it has received, by sender, for the history: of all pairs they
    /// would be most of what this says.
    #[serde(skip)]
    pub(crate) received_from: BTreeMap<String, u64>,
    /// Its log file.
    pub log: PathBuf,
    /// How long each step of its last start took.
    pub timings: Timings,
    /// Bindings that could not be applied.
    pub notes: Vec<String>,
    /// The actual placement of its threads and memory; only on request (`wide`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed: Option<Observed>,
    /// Its resident memory in bytes; only on request (`fresh`, `wide`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resident_bytes: Option<u64>,
    /// Processor time that it has used, in milliseconds; only on request likewise. The difference
    /// of two readings is what it used in between.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_ms: Option<u64>,
    /// The same some time ago, if it was running then: the supervisor reads it every ten seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_before: Option<CpuReading>,
    /// Milliseconds since its start; only on request likewise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub age_ms: Option<u64>,
    /// What its GPU does; added by `ps`, where NVML tells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_use: Option<GpuUse>,
}

/// Processor time that a process had used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuReading {
    /// In milliseconds.
    pub cpu_ms: u64,
    /// How many milliseconds ago; at least 1000.
    pub ago_ms: u64,
}

/// What a GPU does, whoever uses it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuUse {
    /// Device memory in use, in bytes.
    pub used_bytes: Option<u64>,
    /// All of its memory, in bytes.
    pub total_bytes: Option<u64>,
    /// Share of the time in which a kernel ran, in percent.
    pub busy_percent: Option<u32>,
}

impl ClusterState {
    /// All processes: the scheduler if there is one, workers, hosts.
    pub fn processes(&self) -> impl Iterator<Item = &ProcessState> {
        self.scheduler.iter().chain(&self.workers).chain(&self.hosts)
    }

    /// As [`Self::processes`].
    pub fn processes_mut(&mut self) -> impl Iterator<Item = &mut ProcessState> {
        self.scheduler.iter_mut().chain(&mut self.workers).chain(&mut self.hosts)
    }

    /// The processes that do not answer, the scheduler first.
    pub fn unresponsive(&self) -> impl Iterator<Item = &ProcessState> {
        self.processes().filter(|process| process.state == ProcessPhase::Unresponsive)
    }
}

/// The time of day of an RFC 3339 time, for display: `12:00:03`.
pub fn time_of_day(at: &str) -> &str {
    at.get(11..19).unwrap_or(at)
}

impl ProcessState {
    /// The phase, for display.
    pub fn standing(&self) -> String {
        match &self.not_answering_since {
            Some(since) => format!("{} since {}", self.state, time_of_day(since)),
            None => self.state.to_string(),
        }
    }
}

/// How a process ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastExit {
    /// Status or signal.
    #[serde(flatten)]
    pub exit: Exit,
    /// Its process id.
    pub pid: Option<u32>,
    /// A description, with the reason if known.
    pub reason: String,
    /// When, as RFC 3339.
    pub at: String,
    /// Its crash bundle, if it ended abnormally.
    pub bundle: Option<PathBuf>,
    /// Errors that the GPU's driver reported while it ran (Xid events).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpu_errors: Vec<GpuError>,
}

/// Duration of the steps of a start, in milliseconds since it was spawned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timings {
    /// Until the binding was in effect.
    pub bound_ms: Option<u64>,
    /// Until READY.
    pub ready_ms: Option<u64>,
}
