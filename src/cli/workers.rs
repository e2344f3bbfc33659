//! A cluster's processes as a table, and what happens to them as sentences.

use std::collections::BTreeSet;

use super::output;
use crate::plan::{Plan, WorkerPlan};
use crate::supervise::record::What;
use crate::supervise::{ClusterState, ProcessState, Record};

const HEADINGS: [&str; 8] = ["worker", "gpu", "cpus", "mems", "nic", "pid", "state", "restarts"];

/// The processes: the scheduler, then the workers in rank order.
pub(super) fn table(state: &ClusterState, plan: &Plan) -> String {
    let scheduler = state.scheduler.iter().map(|process| row(process, None));
    let workers = state.workers.iter().map(|process| row(process, planned(process, plan)));
    output::table(&HEADINGS, scheduler.chain(workers))
}

/// The processes with how they are kept together and connected, and how they last ended.
pub(super) fn wide_table(state: &ClusterState, plan: &Plan) -> String {
    let headings =
        [&HEADINGS[..], &["held by", "bound ms", "READY ms", "lanes", "last exit"]].concat();
    let wide = |process: &ProcessState, planned| {
        let ms = |ms: Option<u64>| ms.map_or_else(|| "-".to_owned(), |ms| ms.to_string());
        let lanes: BTreeSet<&str> =
            process.peers.iter().flat_map(|peer| peer.lanes.iter().map(String::as_str)).collect();
        let lanes = lanes.into_iter().collect::<Vec<_>>().join(" ");
        let mut cells = row(process, planned);
        cells.extend([
            process.containment.to_string(),
            ms(process.timings.bound_ms),
            ms(process.timings.ready_ms),
            if lanes.is_empty() { "-".to_owned() } else { lanes },
            process.last_exit.as_ref().map_or_else(|| "-".to_owned(), |exit| exit.reason.clone()),
        ]);
        cells
    };
    let scheduler = state.scheduler.iter().map(|process| wide(process, None));
    let workers = state.workers.iter().map(|process| wide(process, planned(process, plan)));
    output::table(&headings, scheduler.chain(workers))
}

fn planned<'a>(process: &ProcessState, plan: &'a Plan) -> Option<&'a WorkerPlan> {
    plan.workers.iter().find(|worker| worker.name == process.name)
}

fn row(process: &ProcessState, planned: Option<&WorkerPlan>) -> Vec<String> {
    let unknown = || "-".to_owned();
    let nics = planned
        .map(|worker| worker.nics.iter().map(ToString::to_string).collect::<Vec<_>>().join(","));
    vec![
        process.name.clone(),
        gpu(planned),
        process.cpus.as_ref().map_or_else(unknown, ToString::to_string),
        process
            .mems
            .as_ref()
            .map(ToString::to_string)
            .filter(|mems| !mems.is_empty())
            .unwrap_or_else(unknown),
        nics.filter(|nics| !nics.is_empty()).unwrap_or_else(unknown),
        process.pid.map_or_else(unknown, |pid| pid.to_string()),
        process.state.to_string(),
        process.restarts.to_string(),
    ]
}

fn gpu(planned: Option<&WorkerPlan>) -> String {
    let Some(gpu) = planned.and_then(|worker| worker.gpu.as_ref()) else { return "-".to_owned() };
    let mut text = gpu.index.to_string();
    if let Some(profile) = &gpu.mig {
        text.push_str(&format!(" {profile}"));
    }
    if let Some(place) = gpu.pci {
        text.push_str(&format!(" {place}"));
    }
    text
}

/// What a person who watches a running cluster wants to know of; `None` for the rest.
pub(super) fn remark(record: &Record) -> Option<String> {
    let ordinary =
        matches!(record.what, What::Started { .. } | What::Step { .. } | What::Stopping { .. });
    (!ordinary).then(|| sentence(record))
}

/// An event in a sentence, without its time.
pub(super) fn sentence(record: &Record) -> String {
    let who = record.process.as_deref().unwrap_or("cluster");
    let what = match &record.what {
        What::Cluster { state, cause: Some(cause) } => format!("{state}: {}", cause.text),
        What::Cluster { state, cause: None } => state.to_string(),
        What::Started { pid, restarts: 0 } => format!("started as process {pid}"),
        What::Started { pid, restarts } => format!("started as process {pid}, restart {restarts}"),
        What::Step { step } => step.clone(),
        What::Ready { after_ms } => format!("READY after {after_ms} ms"),
        What::Stopping { reason } => format!("told to end: {reason}"),
        What::Killed { reason } => format!("killed: {reason}"),
        What::Exited { reason, .. } => reason.clone(),
        What::Restarting { in_ms } => format!("starts again in {in_ms} ms"),
        What::Failed { reason } => format!("failed: {reason}"),
        What::Note { text } => text.clone(),
    };
    format!("{who}: {what}")
}
