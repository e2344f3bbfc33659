//! Shows a cluster's processes as a table, and its events as sentences.

use std::collections::BTreeSet;
use std::time::Duration;

use super::output;
use super::sanitize::plain;
use crate::dashboard::{Figures, ProcessFigures};
use crate::plan::{Binding, EngineKind, Plan, WorkerPlan};
use crate::probe::GpuGauges;
use crate::supervise::record::What;
use crate::supervise::state::{Joined, JoinedPhase};
use crate::supervise::{ClusterState, ProcessPhase, ProcessState, Record, state};
use crate::units::{HumanBytes, HumanSpan};
use crate::wire::native::ALL_PAIRS;
use crate::wire::status::{DevicePool, PeerLanes};

/// A column: its heading, and its cell for a process.
type Column = (&'static str, fn(&Row<'_>) -> String);

/// A process's state, with its plan.
struct Row<'a> {
    process: &'a ProcessState,
    binding: Option<&'a Binding>,
    worker: Option<&'a WorkerPlan>,
    figures: ProcessFigures,
    gauges: Option<&'a GpuGauges>,
}

const FIRST: [Column; 1] = [("worker", |row| row.process.name.clone())];

/// Of a job with several; otherwise left out.
const PROGRAM: [Column; 1] = [("program", |row| some(row.process.program.as_ref()))];

const PLACE: [Column; 2] = [
    ("gpu", |row| gpu(row.worker)),
    ("pci", |row| some(row.worker.and_then(|worker| worker.gpu.as_ref()?.pci))),
];

/// CPUs and memory nodes in effect, where the planned machine is this one.
const BOUND: [Column; 2] = [
    ("cpus", |row| some(row.process.cpus.as_ref())),
    ("mems", |row| some(row.process.mems.as_ref())),
];

/// On a simulated machine: the planned CPUs and memory nodes, and the CPUs used here.
const SIMULATED: [Column; 3] = [
    ("cpus", |row| some(row.binding.and_then(|binding| binding.cpus.as_ref()))),
    ("mems", |row| some(row.binding.and_then(|binding| binding.mems.as_ref()))),
    ("cpus here", |row| some(row.process.cpus.as_ref())),
];

const LAST: [Column; 4] = [
    ("nic", |row| nics(row)),
    ("pid", |row| some(row.process.pid)),
    ("state", |row| row.process.standing()),
    ("restarts", |row| row.process.restarts.to_string()),
];

/// What the process and its GPU do; a column without a figure is left out.
const FIGURES: [Column; 5] = [
    ("uptime", |row| {
        let age = row.figures.age_ms.map(Duration::from_millis);
        some(age.map(|age| format!("{:#}", HumanSpan(age))))
    }),
    ("cpu", |row| some(row.figures.cpus.map(|cpus| format!("{:.0} %", cpus * 100.0)))),
    ("memory", |row| some(row.figures.resident_bytes.map(HumanBytes))),
    ("gpu memory", |row| some(row.gauges.and_then(|gpu| gpu.used_bytes).map(HumanBytes))),
    ("use", |row| {
        some(row.gauges.and_then(|gpu| gpu.busy_percent).map(|busy| format!("{busy} %")))
    }),
];

/// What a narrow terminal does without, first to last.
const LESS: [&str; 8] = ["mems", "cpus", "pci", "pid", "nic", "cpus here", "uptime", "gpu memory"];

const WIDE: [Column; 8] = [
    ("memory limit", |row| some(row.process.memory_limit_bytes.map(HumanBytes))),
    ("gpu limit", |row| {
        some(row.worker.and_then(|worker| worker.device_memory_limit_bytes).map(HumanBytes))
    }),
    ("held by", |row| row.process.containment.to_string()),
    ("bound ms", |row| some(row.process.timings.bound_ms)),
    ("ready ms", |row| some(row.process.timings.ready_ms)),
    ("lanes", |row| lanes(row.process)),
    ("device pool", |row| some(row.process.device_pool.map(pool))),
    ("last exit", |row| some(row.process.last_exit.as_ref().map(|exit| &exit.reason))),
];

/// The processes: the scheduler, then the workers by rank. The wide form adds limits, containment,
/// connections and last exits.
pub(super) fn table(state: &ClusterState, plan: &Plan, figures: &Figures, is_wide: bool) -> String {
    let bound: &[Column] = if state.simulated { &SIMULATED } else { &BOUND };
    let wide: &[Column] = if is_wide { &WIDE } else { &[] };
    let row = |process, binding, worker| Row {
        process,
        binding,
        worker,
        figures: figures.of(process),
        gauges: figures.gauges(process),
    };
    let scheduler = state.scheduler.iter().map(|process| {
        row(process, plan.scheduler.as_ref().map(|scheduler| &scheduler.binding), None)
    });
    let workers = state.workers.iter().map(|process| {
        let worker = plan.workers.iter().find(|worker| worker.name == process.name);
        row(process, worker.map(|worker| &worker.binding), worker)
    });
    let rows: Vec<Row<'_>> = scheduler.chain(workers).collect();
    let told = |column: &&Column| rows.iter().any(|row| column.1(row) != NOTHING);
    let measured: Vec<Column> = FIGURES.iter().filter(told).copied().collect();
    let program: Vec<Column> = PROGRAM.iter().filter(told).copied().collect();
    let columns = [&FIRST[..], &program, &PLACE, bound, &LAST, &measured, wide].concat();
    let headings: Vec<&str> = columns.iter().map(|(heading, _)| *heading).collect();
    let cells = |row: &Row<'_>| columns.iter().map(|(_, cell)| cell(row)).collect();
    let rows: Vec<Vec<String>> = rows.iter().map(cells).collect();
    // Who asks for all columns gets them, however wide.
    let less = if is_wide { &[][..] } else { &LESS };
    output::fitted(&headings, &rows, less, "-o wide shows all")
}

/// What stands for a value that is not known.
const NOTHING: &str = "-";

/// The text of a value, or `-`.
fn some(value: Option<impl ToString>) -> String {
    let text = value.map(|value| value.to_string()).filter(|text| !text.is_empty());
    text.unwrap_or_else(|| NOTHING.to_owned())
}

/// The planned ports; those that the worker can't use in parentheses.
fn nics(row: &Row<'_>) -> String {
    let missing = |port: &str| row.process.missing_ports.iter().any(|one| one.port == port);
    let planned = row.worker.into_iter().flat_map(|worker| &worker.nics).map(|port| {
        let port = port.to_string();
        if missing(&port) { format!("({port})") } else { port }
    });
    some(Some(planned.collect::<Vec<_>>().join(",")))
}

/// Use and fragmentation of a pool of device memory, and what its peers have mapped.
fn pool(pool: DevicePool) -> String {
    let bytes = |bytes| HumanBytes(bytes).to_string();
    let mut text = format!("{} of {} used", bytes(pool.used_bytes), bytes(pool.held_bytes));
    let slabs = if pool.slabs == 1 { "slab" } else { "slabs" };
    text.push_str(&format!(" in {} {slabs}", pool.slabs));
    if let Some(maximum) = pool.maximum_bytes {
        text.push_str(&format!(", at most {}", bytes(maximum)));
    }
    if pool.held_bytes > pool.used_bytes {
        text.push_str(&format!(", {:.0} % fragmented", 100.0 * pool.fragmentation()));
    }
    if pool.mapped_by_peers_bytes > 0 {
        text.push_str(&format!(", {} mapped by peers", bytes(pool.mapped_by_peers_bytes)));
    }
    if pool.freed_but_mapped_bytes > 0 {
        let freed = bytes(pool.freed_but_mapped_bytes);
        text.push_str(&format!(", {freed} freed but perhaps still mapped"));
    }
    text
}

/// The distinct lanes of all connections.
fn lanes(process: &ProcessState) -> String {
    let all = process.peers.iter().flat_map(|peer| peer.lanes.iter().map(String::as_str));
    some(Some(all.collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>().join(" ")))
}

fn gpu(planned: Option<&WorkerPlan>) -> String {
    some(planned.and_then(|worker| worker.gpu.as_ref()).map(|gpu| match &gpu.mig {
        Some(profile) => format!("{} {profile}", gpu.index),
        None => gpu.index.to_string(),
    }))
}

/// The processes that bring up workers of other machines, as a table.
pub(super) fn hosts(state: &ClusterState) -> String {
    if state.hosts.is_empty() {
        return String::new();
    }
    let headings = ["over ssh", "host", "pid", "state", "restarts", "last end"];
    let row =
        |process: &ProcessState| {
            let phase = match (process.state, &process.step) {
                (ProcessPhase::Starting, Some(step)) => format!("starting: {}", plain(step)),
                _ => process.standing(),
            };
            vec![
                process.name.clone(),
                some(process.host.as_deref().map(plain)),
                some(process.pid),
                phase,
                process.restarts.to_string(),
                some(process.last_exit.as_ref().map(|exit| {
                    format!("{} {}", state::time_of_day(&exit.at), plain(&exit.reason))
                })),
            ]
        };
    let rows: Vec<Vec<String>> = state.hosts.iter().map(row).collect();
    format!("\n{}", output::fitted(&headings, &rows, &["pid"], "-o json has all"))
}

/// How many workers have joined the scheduler from elsewhere, and who was lost last.
pub(super) fn who_joined(state: &ClusterState) -> Option<String> {
    let there = state.joined.iter().filter(|one| one.state == JoinedPhase::Ready);
    let hosts: BTreeSet<&str> = there.clone().map(|one| one.worker.host.as_str()).collect();
    let lost = state.joined.iter().filter(|one| one.state == JoinedPhase::Lost);
    let last = lost.clone().max_by(|a, b| a.since.cmp(&b.since)).map(|one| {
        let (name, since) = (plain(&one.worker.name), state::time_of_day(&one.since));
        format!("; {} lost, the last {name} at {since}", lost.count())
    });
    let (count, machines) = (there.count(), hosts.len());
    let machines =
        if machines == 1 { "1 machine".to_owned() } else { format!("{machines} machines") };
    let text = || format!("joined: {count} of {machines}{}", last.unwrap_or_default());
    (!state.joined.is_empty()).then(text)
}

/// The workers that have joined the scheduler from elsewhere, as a table.
pub(super) fn joined(state: &ClusterState) -> String {
    if state.joined.is_empty() {
        return String::new();
    }
    let headings = ["joined", "host", "cluster", "gpu", "cpus", "nic", "state", "since"];
    let row = |one: &Joined| {
        let worker = &one.worker;
        let text = |value: &Option<String>| some(value.as_deref().map(plain));
        let phase = match &one.reason {
            Some(reason) => format!("{}: {}", one.state, plain(reason)),
            None => one.state.to_string(),
        };
        vec![
            plain(&worker.name).into_owned(),
            plain(&worker.host).into_owned(),
            text(&worker.cluster),
            some(worker.gpu),
            some(worker.cpus.as_ref()),
            some(Some(plain(&worker.nics.join(",")))),
            phase,
            state::time_of_day(&one.since).to_owned(),
        ]
    };
    let rows: Vec<Vec<String>> = state.joined.iter().map(row).collect();
    format!("\n{}", output::fitted(&headings, &rows, &["nic", "cpus"], "-o json has all"))
}

/// The addresses of a Dask cluster's scheduler and dashboard, and the scheduler's notes.
pub(super) fn addresses(state: &ClusterState) -> Vec<String> {
    let scheduler = state.scheduler.iter().filter(|_| state.engine == EngineKind::Dask);
    let mut lines = Vec::new();
    for process in scheduler {
        let dashboard = process.dashboard.iter().map(|link| format!(", dashboard at {link}"));
        let address = process.address.iter().map(|at| format!("scheduler at {at}"));
        lines.extend(address.map(|at| at + &dashboard.clone().collect::<String>()));
        lines.extend(process.notes.iter().map(|note| format!("note: scheduler: {note}")));
    }
    lines
}

/// What the workers noted at their start.
pub(super) fn notes(state: &ClusterState) -> Vec<String> {
    let noted = |worker: &ProcessState| {
        let name = worker.name.clone();
        worker.notes.clone().into_iter().map(move |note| format!("note: {name}: {note}"))
    };
    state.workers.iter().flat_map(noted).collect()
}

/// How many pairs of workers are connected, where not all have to be.
pub(super) fn connections(state: &ClusterState) -> Option<String> {
    let workers = state.workers.len();
    if state.engine != EngineKind::Native || workers <= ALL_PAIRS {
        return None;
    }
    let of = |worker: &ProcessState| {
        let pair = |peer: &PeerLanes| match (worker.name.clone(), peer.peer.clone()) {
            (one, other) if one < other => (one, other),
            (one, other) => (other, one),
        };
        worker.peers.iter().map(pair).collect::<Vec<_>>()
    };
    let connected = state.workers.iter().flat_map(of).collect::<BTreeSet<_>>().len();
    let all = workers * (workers - 1) / 2;
    let rest = "the others connect on first use";
    (connected < all)
        .then(|| format!("{connected} of {all} pairs of workers are connected, {rest}"))
}

/// Processes that are not READY and why, those that keep dying, and planned ports that are not in
/// use.
pub(super) fn troubles(state: &ClusterState) -> Vec<String> {
    let without = |process: &ProcessState| {
        let name = process.name.clone();
        let ports = process.missing_ports.clone().into_iter();
        ports.map(move |missing| format!("{name}: {} is not in use: {}", missing.port, missing.why))
    };
    let trouble = |process: &ProcessState| {
        let (exit, deaths) = (process.last_exit.as_ref()?, process.deaths_at_work);
        let next = match (process.state, &process.starts_at) {
            (ProcessPhase::Failed, _) => {
                let again = format!("cuda-cluster restart {} {}", state.name, process.name);
                format!("; not tried again, but by '{again}'")
            }
            (ProcessPhase::Restarting, Some(at)) => format!("; starts again at {at}"),
            _ if deaths > 1 => format!(" at {}", exit.at),
            _ => return None,
        };
        let task = if deaths > 1 { format!("; {}", by_a_task(deaths)) } else { String::new() };
        Some(format!("{}: {}{next}{task}", process.name, exit.reason))
    };
    let all = || state.processes();
    all().filter_map(trouble).chain(all().flat_map(without)).collect()
}

/// The likely cause of repeated deaths.
fn by_a_task(deaths: u32) -> String {
    format!("it died {deaths} times in a row while READY, perhaps of a task")
}

/// The event as a sentence if it matters to someone watching the cluster, otherwise `None`.
pub(super) fn remark(record: &Record) -> Option<String> {
    let ordinary =
        matches!(record.what, What::Started { .. } | What::Step { .. } | What::Stopping { .. });
    (!ordinary).then(|| sentence(record))
}

/// An event as a sentence, without its time.
pub(super) fn sentence(record: &Record) -> String {
    let of_guardian = matches!(record.what, What::NotAnswering { .. } | What::Answers { .. });
    let nobody = if of_guardian { "guardian" } else { "cluster" };
    let who = record.process.as_deref().unwrap_or(nobody);
    let what = match &record.what {
        What::Cluster { state, cause: Some(cause) } => format!("{state}: {}", cause.text),
        What::Cluster { state, cause: None } => state.to_string(),
        What::Started { pid, restarts: 0 } => format!("started as process {pid}"),
        What::Started { pid, restarts } => format!("started as process {pid}, restart {restarts}"),
        What::Step { step } => step.clone(),
        What::Ready { after_ms } => format!("READY after {after_ms} ms"),
        What::NotAnswering { since, reason } => {
            format!("not answering since {}: {reason}", state::time_of_day(since))
        }
        What::Answers { after_ms } => format!("answers again, after {after_ms} ms"),
        What::Stopping { reason } => format!("told to end: {reason}"),
        What::Killed { reason } => format!("killed: {reason}"),
        What::Exited { reason, .. } => reason.clone(),
        What::Restarting { in_ms, deaths_at_work: 0 | 1 } => format!("starts again in {in_ms} ms"),
        What::Restarting { in_ms, deaths_at_work } => {
            format!("starts again in {in_ms} ms: {}", by_a_task(*deaths_at_work))
        }
        What::Regrouping { restart, limit, .. } => {
            format!("all ranks are started again together ({restart} of {limit})")
        }
        What::Replaced { by: Some(spare) } => format!("replaced by {spare}"),
        What::Replaced { by: None } => "left out: the job has one rank less".to_owned(),
        What::Failed { reason } => format!("failed: {reason}"),
        What::NotCopied { path, reason } => {
            format!("{} is not written any more: {reason}", path.display())
        }
        What::Stalled(stall) => stall.text.clone(),
        What::GoesOn => "its processes go on".to_owned(),
        What::Joined { worker } => {
            format!("{} of {} has joined", plain(&worker.name), plain(&worker.host))
        }
        What::Parted { name, host, lost, reason } => {
            let how = if *lost { "is lost" } else { "has left" };
            format!("{} of {} {how}: {}", plain(name), plain(host), plain(reason))
        }
        What::Note { text } => text.clone(),
    };
    format!("{who}: {what}")
}
