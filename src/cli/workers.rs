//! A cluster's processes as a table, and what happens to them as sentences.

use super::output;
use crate::plan::{Plan, WorkerPlan};
use crate::supervise::record::What;
use crate::supervise::{ClusterState, ProcessState, Record};

const HEADINGS: [&str; 8] =
    ["worker", "gpu", "cpus", "mems", "nic", "pid", "state", "restarts"];

/// The processes: the scheduler, then the workers in rank order.
pub(super) fn table(state: &ClusterState, plan: &Plan) -> String {
    let scheduler = state.scheduler.iter().map(|process| row(process, None));
    let workers = state.workers.iter().map(|process| {
        row(process, plan.workers.iter().find(|worker| worker.name == process.name))
    });
    output::table(&HEADINGS, scheduler.chain(workers))
}

fn row(process: &ProcessState, planned: Option<&WorkerPlan>) -> Vec<String> {
    let unknown = || "-".to_owned();
    let nics = planned.map(|worker| {
        worker.nics.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
    });
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

/// A sentence about an event that a person who watches a running cluster wants to know of.
pub(super) fn remark(record: &Record) -> Option<String> {
    let who = record.process.as_deref().unwrap_or("cluster");
    let what = match &record.what {
        What::Exited { reason, .. } => reason.clone(),
        What::Restarting { in_ms } => format!("starts again in {in_ms} ms"),
        What::Ready { after_ms } => format!("READY after {after_ms} ms"),
        What::Failed { reason } => format!("failed: {reason}"),
        What::Killed { reason } => format!("killed: {reason}"),
        What::Cluster { state, cause: Some(cause) } => format!("{state}: {}", cause.text),
        What::Cluster { state, cause: None } => state.to_string(),
        What::Note { text } => text.clone(),
        What::Started { .. } | What::Step { .. } | What::Stopping { .. } => return None,
    };
    Some(format!("{who}: {what}"))
}
