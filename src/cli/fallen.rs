//! Says which ranks of a run have failed, and what their programs have said of it.
//!
//! *Invariant:* the first failure comes first; what another rank says is told as its own.

use std::path::{Path, PathBuf};

use super::output;
use super::sanitize::plain;
use crate::os::run_directory::Paths;
use crate::supervise::{ClusterState, ProcessState, read_error};

/// So many other ranks are named.
const OTHERS: usize = 8;

/// Says it.
pub(super) fn tell(state: &ClusterState, text: &str, paths: &Paths) {
    let (root, crashes) = (root(state, text), paths.crashes());
    output::status(&format!("run: {root}; the other ranks were stopped"));
    let first = state.workers.iter().find(|worker| began_at(state, worker));
    let kept = first.and_then(|worker| newest(worker, &crashes));
    for line in kept.as_deref().and_then(error).iter().flat_map(|text| text.lines()) {
        output::status(&format!("run: | {line}"));
    }
    let others = others(state, paths);
    for (rank, last) in others.iter().take(OTHERS) {
        output::status(&format!("run: rank {rank} failed, too: {}", plain(last)));
    }
    if others.len() > OTHERS {
        output::status(&format!("run: and {} more ranks failed, too", others.len() - OTHERS));
    }
    if let Some(kept) = kept.or_else(|| crashes.is_dir().then_some(crashes)) {
        output::status(&format!("run: what is known of it is in {}", kept.display()));
    }
}

/// The rank that failed first, and what happened to it.
fn root(state: &ClusterState, text: &str) -> String {
    let found = (0..).zip(&state.workers).find(|(_, worker)| began_at(state, worker));
    let Some((place, worker)) = found else { return text.to_owned() };
    let program = worker.program.as_ref().map_or_else(String::new, |name| format!(" ({name})"));
    format!("rank {}{program}: {text}", worker.rank.unwrap_or(place))
}

/// The last line of what each other rank has said of its own failure.
fn others(state: &ClusterState, paths: &Paths) -> Vec<(u32, String)> {
    let said = |(place, worker): (u32, &ProcessState)| {
        let rank = worker.rank.unwrap_or(place);
        // One that had been told to end before it failed has no bundle.
        let kept = worker.last_exit.as_ref()?.bundle.as_deref().and_then(error);
        let text = kept.or_else(|| read_error(&paths.rank_error(rank)))?;
        let last = text.lines().rev().find(|line| !line.trim().is_empty())?;
        Some((rank, last.trim().to_owned()))
    };
    let others = (0..).zip(&state.workers).filter(|(_, worker)| !began_at(state, worker));
    others.filter_map(said).collect()
}

/// The crash bundle of the rank that failed first. It may have been written after the last state.
fn newest(worker: &ProcessState, crashes: &Path) -> Option<PathBuf> {
    worker.last_exit.as_ref()?.bundle.clone().or_else(|| {
        let bundles = std::fs::read_dir(crashes).ok()?.flatten().map(|entry| entry.path());
        let of = |path: &PathBuf| {
            let name = path.file_name().and_then(|name| name.to_str()?.split_once('-'));
            name.is_some_and(|(_, name)| name == worker.name)
        };
        bundles.filter(of).max()
    })
}

/// What the rank has written of its failure itself.
fn error(bundle: &Path) -> Option<String> {
    let crash = std::fs::read_to_string(bundle.join("crash.json")).ok()?;
    let crash: serde_json::Value = serde_json::from_str(&crash).ok()?;
    crash["error"].as_str().map(str::to_owned)
}

fn began_at(state: &ClusterState, worker: &ProcessState) -> bool {
    let process = state.cause.as_ref().and_then(|cause| cause.process.as_ref());
    process == Some(&worker.name)
}
