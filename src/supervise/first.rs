//! What a supervisor begins with: its first state, and its luck.
//!
//! *Invariant:* the first state has every process of the launch, none of them started.

use std::time::SystemTime;

use super::state::{self, ClusterState, ProcessState, Timings};
use super::{ClusterPhase, Launch, ProcessPhase, ProcessSpec};
use crate::os::guardian::Guardian;
use crate::os::run_directory::Paths;

/// A number nobody can guess, in hexadecimal; only its being unlike any other matters here.
pub(super) fn random_token() -> String {
    format!("{:016x}{:016x}", seed(), seed())
}

pub(super) fn seed() -> u64 {
    // Without the system's randomness the clock is unlike enough.
    getrandom::u64().unwrap_or_else(|_| {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        now.as_secs() ^ u64::from(now.subsec_nanos()) << 32
    })
}

pub(super) fn state(
    launch: &Launch,
    paths: &Paths,
    guardian: &Guardian,
    began: SystemTime,
) -> ClusterState {
    let containment = guardian.containment();
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
        cpus: spec.binding.cpus.clone(),
        mems: spec.binding.mems.clone(),
        asked: spec.binding.clone(),
        containment,
        last_exit: None,
        step: None,
        peers: Vec::new(),
        ucx: None,
        log: paths.log(&spec.name),
        timings: Timings::default(),
        notes: Vec::new(),
        observed: None,
        resident_bytes: None,
    };
    ClusterState {
        version: state::VERSION,
        name: launch.name.clone(),
        engine: launch.engine,
        simulated: launch.simulated,
        state: ClusterPhase::Starting,
        supervisor_pid: std::process::id(),
        guardian_pid: Some(guardian.pid()),
        guardian_not_answering_since: None,
        started_at: humantime::format_rfc3339_millis(began).to_string(),
        ready_after_ms: None,
        run_directory: paths.root().to_owned(),
        containment,
        scheduler: launch.scheduler.as_ref().map(process),
        workers: launch.workers.iter().map(process).collect(),
        cause: None,
        notes: launch.notes.clone(),
        ended_at: None,
    }
}
