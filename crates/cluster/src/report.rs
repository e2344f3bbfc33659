//! A report about a cluster, to attach to an issue: machine, plan, state, events, logs, crashes.
//!
//! Reads files of the run directory, also of an ended cluster.
//!
//! *Invariant:* the cluster's secret is not read, and what has a secret's name is masked.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::Serialize;
use serde_json::Value;

use super::{Paths, recorded_history, recorded_pairs};
use cuda_cluster_machine::os::log_file;
use cuda_cluster_model::ids::ClusterName;
use cuda_cluster_model::plan::Plan;
use cuda_cluster_model::preflight::Finding;
use cuda_cluster_model::text::{masked_json, masked_line};
use cuda_cluster_model::topology::Topology;
use cuda_cluster_supervise::ClusterState;
use cuda_cluster_why::audit::Audit;
use cuda_cluster_wire::history::Curves;
use cuda_cluster_wire::history::pairs::Flows;

/// The version of the JSON form.
const VERSION: u32 = 1;

/// Number of last lines of each log.
const LINES: usize = 500;

/// Number of last events.
const EVENTS: usize = 2000;

/// Number of last crash bundles.
const CRASHES: usize = 8;

/// Number of points of the history.
const POINTS: usize = 240;

/// What is known about a cluster. What is missing was not in its run directory.
#[derive(Debug, Serialize)]
pub struct BugReport {
    version: u32,
    program: &'static str,
    name: ClusterName,
    kernel: Option<String>,
    machine: Option<Topology>,
    plan: Option<Value>,
    /// What preflight had found before the start.
    preflight: Option<Vec<Finding>>,
    state: Option<Value>,
    events: Vec<Value>,
    logs: BTreeMap<String, Vec<String>>,
    crashes: BTreeMap<String, Value>,
    /// What was seen when its processes could last not go on, for `why --bundle`.
    stall: Option<Value>,
    /// Which wires the bytes between its processes took.
    audit: Option<Audit>,
    /// What its processes used over time.
    history: Option<Curves>,
    /// What went between its workers meanwhile.
    pairs: Option<Flows>,
}

impl BugReport {
    /// Collects a report; `state` is the cluster's present or last one.
    pub fn collect(name: &ClusterName, paths: &Paths, state: Option<&ClusterState>) -> Self {
        let text = |path: &Path| fs::read_to_string(path).ok();
        let json = |path: &Path| serde_json::from_str::<Value>(&text(path)?).ok();
        let events = text(&paths.events()).unwrap_or_default();
        let events = events.lines().filter_map(|line| serde_json::from_str(line).ok());
        let mut events: Vec<Value> = events.map(masked_json).collect();
        events.drain(..events.len().saturating_sub(EVENTS));
        let state = state.and_then(|state| serde_json::to_value(state).ok());
        Self {
            version: VERSION,
            program: env!("CARGO_PKG_VERSION"),
            name: name.clone(),
            kernel: text(Path::new("/proc/version")).map(|text| text.trim().to_owned()),
            machine: recorded_machine(paths).map(|machine| machine.anonymized()),
            plan: json(&paths.plan()).map(masked_json),
            preflight: recorded_preflight(paths),
            state: state.map(masked_json),
            events,
            logs: logs(paths),
            crashes: crashes(paths),
            stall: json(&paths.stall()),
            audit: recorded_audit(paths),
            history: recorded_history(paths).ok().map(|all| all.curves(None, None, POINTS)),
            pairs: recorded_pairs(paths).ok().map(|all| all.flows(None, None)),
        }
    }
}

/// The plan of a cluster, as its run directory keeps it; `None` if this program cannot read it.
pub fn recorded_plan(paths: &Paths) -> Option<Plan> {
    Plan::parse(&fs::read_to_string(paths.plan()).ok()?).ok()
}

/// The machine that a cluster was planned for, as its run directory keeps it.
pub fn recorded_machine(paths: &Paths) -> Option<Topology> {
    serde_json::from_str(&fs::read_to_string(paths.topology()).ok()?).ok()
}

/// What preflight had found when a cluster was started, as its run directory keeps it; `None` for
/// a simulated one.
pub fn recorded_preflight(paths: &Paths) -> Option<Vec<Finding>> {
    serde_json::from_str(&fs::read_to_string(paths.preflight()).ok()?).ok()
}

/// The last audit of the bytes between a cluster's processes, as its run directory keeps it.
pub fn recorded_audit(paths: &Paths) -> Option<Audit> {
    serde_json::from_str(&fs::read_to_string(paths.audit()).ok()?).ok()
}

fn logs(paths: &Paths) -> BTreeMap<String, Vec<String>> {
    let log = |path: &Path| {
        let name = path.file_name()?.to_str()?.strip_suffix(".log")?.to_owned();
        let lines = log_file::last_lines(path, LINES);
        Some((name, lines.iter().map(|line| masked_line(line)).collect()))
    };
    entries(&paths.logs()).iter().filter_map(|path| log(path)).collect()
}

/// The last crash bundles by their directories' names, which begin with a number. Their logs are
/// parts of the processes' logs.
pub fn crashes(paths: &Paths) -> BTreeMap<String, Value> {
    let bundle = |path: &Path| {
        let text = fs::read_to_string(path.join("crash.json")).ok()?;
        let name = path.file_name()?.to_str()?.to_owned();
        Some((name, masked_json(serde_json::from_str(&text).ok()?)))
    };
    let bundles = entries(&paths.crashes());
    bundles.iter().rev().take(CRASHES).filter_map(|path| bundle(path)).collect()
}

/// What is in a folder, in order.
pub(crate) fn entries(folder: &Path) -> Vec<std::path::PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut paths: Vec<_> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    paths
}
