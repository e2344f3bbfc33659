//! What is: the state of a cluster and its processes, as `ps -o json` prints it.
//!
//! Holds the value and its JSON form; who changes it is `core`.
//!
//! *Invariant:* the JSON keys of [`ClusterState`] and [`ProcessState`] are relied on by outside
//! programs; keys are added, never renamed or removed, within one [`VERSION`].

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::record::GpuError;
use super::{Cause, Launch, ProcessGpu, ProcessSpec};
use crate::cpuset::{CpuSet, NodeSet};
use crate::ids::ClusterName;
use crate::plan::{Binding, EngineKind};
use crate::wire::process::{Containment, Exit, Observed};
use crate::wire::status::PeerLanes;

/// The version of the JSON form.
pub const VERSION: u32 = 1;

/// A cluster, as it is now.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClusterState {
    /// Version of this form: [`VERSION`].
    pub version: u32,
    /// The cluster's name.
    pub name: ClusterName,
    /// What runs in the processes.
    pub engine: EngineKind,
    /// Whether its GPUs are only simulated.
    pub simulated: bool,
    /// Where the whole stands.
    pub state: ClusterPhase,
    /// Process id of the supervisor.
    pub supervisor_pid: u32,
    /// Process id of the guardian, the parent of every process of the cluster.
    pub guardian_pid: Option<u32>,
    /// Since when the guardian has not answered, RFC 3339; only while it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guardian_not_answering_since: Option<String>,
    /// When the supervisor began, RFC 3339.
    pub started_at: String,
    /// From the supervisor's begin to the first READY, in milliseconds.
    pub ready_after_ms: Option<u64>,
    /// Where its files are.
    pub run_directory: PathBuf,
    /// What keeps its processes together.
    pub containment: Containment,
    /// The scheduler, for engines that have one.
    pub scheduler: Option<ProcessState>,
    /// The workers, in rank order.
    pub workers: Vec<ProcessState>,
    /// Why it is `degraded` or `failed`.
    pub cause: Option<Cause>,
    /// What could not be had.
    pub notes: Vec<String>,
    /// When it ended, RFC 3339; `None` while it lives, or where nobody saw it end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_at: Option<String>,
}

impl ClusterState {
    /// The state of a launch before anything of it is started. `log` names a process's log file.
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
            containment,
            last_exit: None,
            step: None,
            peers: Vec::new(),
            ucx: None,
            log: log(&spec.name),
            timings: Timings::default(),
            notes: Vec::new(),
            observed: None,
            resident_bytes: None,
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
            cause: None,
            notes: launch.notes.clone(),
            ended_at: None,
        }
    }
}

/// Where a cluster stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, strum::Display)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum ClusterPhase {
    /// Not everything is READY for the first time yet.
    Starting,
    /// Everything is READY for the first time, and whether it is as it should be is looked at.
    Verifying,
    /// Every wanted process is READY.
    #[strum(to_string = "READY")]
    Ready,
    /// It was READY; some process is on its way back, or does not answer.
    Recovering,
    /// It was READY; some worker is failed and is not tried again.
    Degraded,
    /// Everything is being ended.
    Stopping,
    /// Ended because somebody asked, or because its work is done.
    Stopped,
    /// Ended because it had to.
    Failed,
}

impl ClusterPhase {
    /// Whether it has not been READY yet, and is on its way.
    pub fn is_first(self) -> bool {
        matches!(self, ClusterPhase::Starting | ClusterPhase::Verifying)
    }

    /// Whether nothing follows any more.
    pub fn is_end(self) -> bool {
        matches!(self, ClusterPhase::Stopped | ClusterPhase::Failed)
    }
}

/// One process, as it is now.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProcessState {
    /// `scheduler`, `gpu3`.
    pub name: String,
    /// Its process id, while there is a process.
    pub pid: Option<u32>,
    /// Where it stands.
    pub state: ProcessPhase,
    /// Since when it has not answered, RFC 3339; only while it is `unresponsive`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_answering_since: Option<String>,
    /// Where it can be reached, once it said so.
    pub address: Option<String>,
    /// The page that shows it, for a scheduler that has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dashboard: Option<String>,
    /// How often it was started again.
    pub restarts: u32,
    /// How often in a row, without a healthy while between, it died while it was READY.
    #[serde(default)]
    pub deaths_at_work: u32,
    /// When it is to be started again, RFC 3339, while it waits for that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub starts_at: Option<String>,
    /// Its GPU.
    pub gpu: Option<ProcessGpu>,
    /// CPUs in force as read back before its first instruction; those asked for until then.
    pub cpus: Option<CpuSet>,
    /// NUMA nodes of the memory policy in force, read back likewise.
    pub mems: Option<NodeSet>,
    /// What was asked for.
    pub asked: Binding,
    /// What keeps its descendants together.
    pub containment: Containment,
    /// How its last process ended.
    pub last_exit: Option<LastExit>,
    /// The step of its start that it is in, or was in when it ended.
    pub step: Option<String>,
    /// Lanes of its connections to its peers.
    pub peers: Vec<PeerLanes>,
    /// The UCX that it uses, in its own words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ucx: Option<String>,
    /// Its log file.
    pub log: PathBuf,
    /// How long each step of its last start took.
    pub timings: Timings,
    /// What could not be applied.
    pub notes: Vec<String>,
    /// Where its threads and its memory really are; only where it was asked for (`wide`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed: Option<Observed>,
    /// Its resident memory in bytes; only where it was asked for (`wide`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resident_bytes: Option<u64>,
}

impl ClusterState {
    /// The processes that do not answer, the scheduler first.
    pub fn unresponsive(&self) -> impl Iterator<Item = &ProcessState> {
        let all = self.scheduler.iter().chain(&self.workers);
        all.filter(|process| process.state == ProcessPhase::Unresponsive)
    }
}

/// The time of day of an RFC 3339 time, for people: `12:00:03`.
pub fn time_of_day(at: &str) -> &str {
    at.get(11..19).unwrap_or(at)
}

impl ProcessState {
    /// Where it stands, for people.
    pub fn standing(&self) -> String {
        match &self.not_answering_since {
            Some(since) => format!("{} since {}", self.state, time_of_day(since)),
            None => self.state.to_string(),
        }
    }
}

/// Where a process stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, strum::Display)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum ProcessPhase {
    /// Not started: the scheduler is not READY, or the cluster was not told to start it.
    Waiting,
    /// Started, not READY.
    Starting,
    /// It does its work.
    #[strum(to_string = "READY")]
    Ready,
    /// It did its work, and does not answer: it is stopped, hangs, or has ended unnoticed.
    #[strum(to_string = "not answering")]
    Unresponsive,
    /// Told to end.
    Stopping,
    /// Dead, and waiting for its next start.
    Restarting,
    /// Dead, and not tried again.
    Failed,
    /// Ended as wished.
    Stopped,
}

/// How a process ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastExit {
    /// Status or signal.
    #[serde(flatten)]
    pub exit: Exit,
    /// The process id that it had.
    pub pid: Option<u32>,
    /// In a sentence, with the reason where one is known.
    pub reason: String,
    /// When, RFC 3339.
    pub at: String,
    /// Its crash bundle, when it ended abnormally.
    pub bundle: Option<PathBuf>,
    /// What the GPU's driver reported while it ran (Xid events).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpu_errors: Vec<GpuError>,
}

/// How long each step of a start took, in milliseconds from its spawning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timings {
    /// Until the binding was in force.
    pub bound_ms: Option<u64>,
    /// Until READY.
    pub ready_ms: Option<u64>,
}
