//! Explains how a cluster has ended, from the files in its run directory.
//!
//! *Invariant:* nothing is made up: unknown facts are reported as unknown.

use std::io::{BufRead, BufReader};
use std::time::Duration;

use cuda_cluster_machine::os::owners::Owners;
use cuda_cluster_machine::os::reading;
use cuda_cluster_machine::os::run_directory::{Paths, RunDirectory, RunDirectoryError};
use cuda_cluster_model::ids::ClusterName;
use cuda_cluster_supervise::record::What;
use cuda_cluster_supervise::{Cause, ClusterPhase, ClusterState, ProcessPhase, Record};

/// How long to wait for readers that hold the run directory's lock.
const LOOKERS: Duration = Duration::from_millis(500);

/// A cluster that has ended, and whose name has not been used again.
#[derive(Clone, Debug)]
pub struct Ended {
    /// Its name.
    pub name: ClusterName,
    /// Paths of its files: logs, records, crash bundles.
    pub paths: Paths,
    /// Its last state, including outcome and cause; `None` if it ended before it wrote one, or
    /// this program cannot read it.
    pub state: Option<ClusterState>,
    /// Why its last state cannot be read: another version of the program has written it.
    unreadable: Option<String>,
}

impl Ended {
    /// The remains of the cluster of this name, which is not running; `None` if there are none.
    pub(super) fn read(name: &ClusterName) -> Option<Self> {
        let paths = Paths::of(name);
        let traces = [paths.state(), paths.events(), paths.owners()];
        if !traces.iter().any(|trace| trace.exists()) {
            return None;
        }
        let owners = Owners::read(&paths.owners());
        let text = reading::bytes(&paths.state()).ok();
        let (state, unreadable) = match text.map(|text| serde_json::from_slice(&text)) {
            None => (None, None),
            Some(Err(error)) => (None, Some(error.to_string())),
            Some(Ok(state @ ClusterState { .. })) if state.state.is_end() => (Some(state), None),
            // A copy of a running cluster's directory tells of no end.
            Some(Ok(_)) if owners.is_some_and(|owners| owners.have_a_guardian()) => return None,
            Some(Ok(state)) => (Some(vanished(state, &paths)), None),
        };
        Some(Self { name: name.clone(), paths, state, unreadable })
    }

    /// How, when and why it ended, such as `failed at 2026-01-31T12:00:00.000Z: gpu1 ended with
    /// status 3`.
    pub fn summary(&self) -> String {
        let state = match (&self.state, &self.unreadable) {
            (Some(state), _) => state,
            (None, Some(reason)) => {
                return format!("ended; its last state is unreadable: {reason}");
            }
            (None, None) => return "ended before it started a process".to_owned(),
        };
        let mut text = state.state.to_string();
        if let Some(at) = &state.ended_at {
            text.push_str(&format!(" at {at}"));
        }
        if let Some(cause) = &state.cause {
            text.push_str(&format!(": {}", cause.text));
        }
        text
    }

    /// Kills processes that it has left running. Keeps the files that explain its end.
    ///
    /// # Errors
    /// If a system call fails.
    pub fn sweep(&self) -> Result<(), RunDirectoryError> {
        sweep(&self.name, &self.paths)
    }
}

/// Kills processes that an ended cluster has left running; keeps the files that explain its end.
pub(super) fn sweep(name: &ClusterName, paths: &Paths) -> Result<(), RunDirectoryError> {
    match RunDirectory::left_over(name, paths, LOOKERS) {
        Ok(left) => left.iter().for_each(RunDirectory::sweep),
        // If the name is in use again, its new owner has already cleaned up.
        Err(RunDirectoryError::Taken { .. }) => {}
        Err(error) => return Err(error),
    }
    Ok(())
}

/// The last state of a cluster whose supervisor has not written it. Either the supervisor was
/// killed, and the guardian, or the kernel, has ended all of its processes. Or it could not write
/// any more, because the run directory had become read-only; its records are in an open file.
fn vanished(mut state: ClusterState, paths: &Paths) -> ClusterState {
    let last = last_record(paths).filter(|last| last.at >= state.started_at);
    match last {
        Some(Record { at, what: What::Cluster { state: end, cause }, .. }) if end.is_end() => {
            (state.ended_at, state.state, state.cause) = (Some(at), end, cause);
        }
        last => {
            // The guardian has recorded the time, unless it was killed too.
            state.ended_at = reading::text(&paths.orphaned()).ok();
            let mut text =
                format!("the supervisor (process {}) ended without a word", state.supervisor_pid);
            if state.ended_at.is_none() {
                let last = last.map_or_else(|| state.started_at.clone(), |last| last.at);
                text.push_str(&format!(" some time after {last}, and the guardian with it"));
            }
            state.cause = Some(Cause::of_cluster(text));
            state.state = ClusterPhase::Failed;
        }
    }
    state.guardian_not_answering_since = None;
    for process in state.processes_mut() {
        process.pid = None;
        process.not_answering_since = None;
        if process.state != ProcessPhase::Failed {
            process.state = ProcessPhase::Stopped;
        }
    }
    state
}

fn last_record(paths: &Paths) -> Option<Record> {
    let lines = BufReader::new(reading::open(&paths.events()).ok()?).lines();
    // The last line may be incomplete.
    lines.map_while(Result::ok).filter_map(|line| serde_json::from_str(&line).ok()).last()
}
