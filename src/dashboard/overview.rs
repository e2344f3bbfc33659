//! All clusters of this user, the hosts that have joined them, and this machine's GPUs and NICs
//! with who holds them.
//!
//! *Invariant:* nothing is asked, read or measured unless a page asks, and one cluster that does
//! not answer keeps no other from being shown.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use nix::unistd::{Uid, User};
use serde::Serialize;
use serde_json::json;

use super::measure;
use crate::cluster::{self, ClusterPhase, Ended, Handle, ProcessPhase};
use crate::ids::GpuUuid;
use crate::os::process;
use crate::plan::Plan;
use crate::probe::{self, GpuGauges, Holder, OccupancyError, Options};
use crate::supervise::state::JoinedPhase;
use crate::supervise::{ClusterState, ProcessState};
use crate::text::in_full;
use crate::topology::{Gpu, Nic, Topology};

/// Longest time for a cluster's answer.
const ANSWER: Duration = Duration::from_secs(3);

/// How long the machine is taken for what it was: it is rarely changed, and probing takes a second.
const PROBED: Duration = Duration::from_secs(300);

/// Most generations between a process that computes and the worker that it belongs to.
const GENERATIONS: usize = 64;

/// A cluster, as the overview shows it.
#[derive(Debug, Default, Serialize)]
struct Row {
    name: String,
    is_running: bool,
    /// Its phase; `None` if it is unknown.
    state: Option<ClusterPhase>,
    engine: Option<String>,
    simulated: bool,
    started_at: Option<String>,
    ended_at: Option<String>,
    ready: usize,
    workers: usize,
    /// How many different GPUs its workers have.
    gpus: usize,
    /// What is wrong, or how it ended.
    cause: Option<String>,
    hosts: Vec<Host>,
}

/// Another machine whose workers have joined a cluster, or are to.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
struct Host {
    name: String,
    ready: usize,
    lost: usize,
    left: usize,
    gpus: usize,
    /// Since when its first worker is what it is; empty without any.
    since: String,
    /// The process that brings up its workers over ssh.
    process: Option<HostProcess>,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
struct HostProcess {
    name: String,
    state: ProcessPhase,
    /// What it does while it starts, or how it ended last.
    why: Option<String>,
}

impl HostProcess {
    fn of(process: &ProcessState) -> Self {
        let step = process.step.clone().filter(|_| process.state == ProcessPhase::Starting);
        let end = || process.last_exit.as_ref().map(|exit| exit.reason.clone());
        Self { name: process.name.clone(), state: process.state, why: step.or_else(end) }
    }
}

impl Row {
    fn of(state: &ClusterState, is_running: bool) -> Self {
        let gpus = state.workers.iter().filter_map(|worker| Some(worker.gpu.as_ref()?.index));
        let gpus: std::collections::BTreeSet<u32> = gpus.collect();
        let wanted = |phase: &ProcessPhase| *phase != ProcessPhase::Stopped;
        let phases = || state.workers.iter().map(|worker| worker.state);
        Self {
            name: state.name.to_string(),
            is_running,
            state: Some(state.state),
            engine: Some(state.engine.to_string()),
            simulated: state.simulated,
            started_at: Some(state.started_at.clone()),
            ended_at: state.ended_at.clone(),
            ready: phases().filter(|phase| *phase == ProcessPhase::Ready).count(),
            workers: phases().filter(|phase| !is_running || wanted(phase)).count(),
            gpus: gpus.len(),
            cause: state.cause.as_ref().map(|cause| cause.text.clone()),
            hosts: hosts(state),
        }
    }

    fn of_ended(ended: &Ended) -> Self {
        let row = ended.state.as_ref().map(|state| Self::of(state, false));
        let mut row = row.unwrap_or_default();
        row.name = ended.name.to_string();
        // How it ended, where no state tells.
        row.cause = row.cause.or_else(|| ended.state.is_none().then(|| ended.summary()));
        row
    }

    fn silent(one: &Handle, why: String) -> Self {
        let name = one.name.to_string();
        Self { name, is_running: true, cause: Some(why), ..Self::default() }
    }
}

/// The machines whose workers have joined or are to, by name. One that ssh knows by another name
/// than its workers is there by both: nothing says that it is the same.
fn hosts(state: &ClusterState) -> Vec<Host> {
    let mut hosts: BTreeMap<&str, Host> = BTreeMap::new();
    for process in &state.hosts {
        let Some(name) = &process.host else { continue };
        let own = Some(HostProcess::of(process));
        hosts.insert(name, Host { name: name.clone(), process: own, ..Host::default() });
    }
    for one in &state.joined {
        let host = hosts.entry(&one.worker.host).or_default();
        host.name.clone_from(&one.worker.host);
        match one.state {
            JoinedPhase::Ready => host.ready += 1,
            JoinedPhase::Left => host.left += 1,
            JoinedPhase::Lost => host.lost += 1,
        }
        host.gpus += usize::from(one.state == JoinedPhase::Ready && one.worker.gpu.is_some());
        if host.since.is_empty() || one.since < host.since {
            host.since.clone_from(&one.since);
        }
    }
    hosts.into_values().collect()
}

/// A worker of one of this user's clusters.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
struct Worker {
    cluster: String,
    worker: String,
}

/// A process of nobody's cluster, as far as this user's clusters go.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Other {
    /// 0 for one in another PID namespace.
    pid: u32,
    name: Option<String>,
    user: Option<String>,
    bytes: Option<u64>,
}

#[derive(Debug, Serialize)]
struct GpuRow {
    index: u32,
    name: Option<String>,
    pci: Option<String>,
    gauges: Option<GpuGauges>,
    workers: Vec<Worker>,
    others: Vec<Other>,
    /// Why it is unknown who else uses it.
    unseen: Option<String>,
}

#[derive(Debug, Serialize)]
struct NicRow {
    name: String,
    ports: Vec<String>,
    workers: Vec<Worker>,
}

/// What the clusters say of the devices of this machine.
#[derive(Debug, Default)]
struct Claims {
    /// Who a process belongs to.
    processes: BTreeMap<u32, Worker>,
    /// Who has a GPU or an instance of it, and runs.
    gpus: BTreeMap<GpuUuid, Vec<Worker>>,
    nics: BTreeMap<String, Vec<Worker>>,
}

impl Claims {
    fn add(&mut self, state: &ClusterState, plan: Option<&Plan>) {
        let cluster = state.name.to_string();
        for process in state.processes() {
            let Some(pid) = process.pid else { continue };
            let worker = Worker { cluster: cluster.clone(), worker: process.name.clone() };
            let uuid = process.gpu.as_ref().and_then(|gpu| gpu.uuid.clone());
            // Simulated ones are not this machine's.
            if let Some(uuid) = uuid.filter(|_| !state.simulated) {
                self.gpus.entry(uuid).or_default().push(worker.clone());
            }
            self.processes.insert(pid, worker);
        }
        let planned = plan.filter(|_| !state.simulated).into_iter().flat_map(|plan| &plan.workers);
        for planned in planned {
            let worker = Worker { cluster: cluster.clone(), worker: planned.name.clone() };
            let runs =
                state.workers.iter().any(|one| one.name == planned.name && one.pid.is_some());
            for port in planned.nics.iter().filter(|_| runs) {
                let users = self.nics.entry(port.nic.clone()).or_default();
                if !users.contains(&worker) {
                    users.push(worker.clone());
                }
            }
        }
    }

    /// The worker that a process is, or comes from.
    fn owner(&self, pid: u32) -> Option<&Worker> {
        let ancestors = std::iter::successors(Some(pid), |pid| process::parent(*pid));
        let mut ancestors = ancestors.take(GENERATIONS).take_while(|pid| *pid > 1);
        ancestors.find_map(|pid| self.processes.get(&pid))
    }
}

/// What can be seen of a process that is of no cluster.
fn other(pid: u32, bytes: Option<u64>) -> Other {
    // NVML tells ids of this process's namespace, whose files are here.
    let seen = probe::seen(Path::new("/proc"), pid, bytes);
    let named = |uid: u32| match User::from_uid(Uid::from_raw(uid)) {
        Ok(Some(user)) => user.name,
        _ => uid.to_string(),
    };
    Other { pid, name: seen.name, user: seen.uid.map(named), bytes }
}

/// A GPU and its instances.
fn uuids(gpu: &Gpu) -> impl Iterator<Item = &GpuUuid> {
    gpu.uuid.iter().chain(gpu.mig.iter().map(|instance| &instance.uuid))
}

/// Who computes on each GPU and instance.
type Holders<'a> =
    Result<BTreeMap<&'a GpuUuid, Result<Vec<Holder>, OccupancyError>>, OccupancyError>;

/// A GPU with those who use it: those that compute on it, and workers that are there for it.
fn gpu_row(gpu: &Gpu, claims: &Claims, gauges: Option<GpuGauges>, holders: &Holders<'_>) -> GpuRow {
    let (mut workers, mut others, mut unseen) = (Vec::new(), Vec::new(), None);
    for uuid in uuids(gpu) {
        workers.extend(claims.gpus.get(uuid).into_iter().flatten().cloned());
        let found = holders.as_ref().map(|all| all.get(uuid).map(Result::as_ref).transpose());
        match found.and_then(|found| found) {
            Ok(holders) => {
                for holder in holders.into_iter().flatten() {
                    match claims.owner(holder.pid) {
                        Some(worker) => workers.push(worker.clone()),
                        None => others.push(other(holder.pid, holder.bytes)),
                    }
                }
            }
            Err(error) => unseen = Some(in_full(error)),
        }
    }
    workers.sort();
    workers.dedup();
    // An instance's processes are also its GPU's.
    others.sort_by_key(|one| one.pid);
    others.dedup_by_key(|one| one.pid);
    let pci = gpu.pci.as_ref().map(ToString::to_string);
    GpuRow { index: gpu.index.0, name: gpu.name.clone(), pci, gauges, workers, others, unseen }
}

fn nic_row(nic: &Nic, claims: &Claims) -> NicRow {
    let port = |port: &crate::topology::Port| {
        let state = port.state.map_or("state unknown".to_owned(), |state| state.to_string());
        let rate = port.rate_gbps.map(|rate| format!("{rate} Gbit/s"));
        let words = [Some(state), rate, port.netdev.clone()];
        format!("{}: {}", port.port, words.into_iter().flatten().collect::<Vec<_>>().join(", "))
    };
    let mut workers = claims.nics.get(&nic.name).cloned().unwrap_or_default();
    workers.sort();
    NicRow { name: nic.name.clone(), ports: nic.ports.iter().map(port).collect(), workers }
}

/// This machine as it was probed last; an error says why it can't be.
fn machine(options: &Options) -> Result<Arc<Topology>, String> {
    static LAST: Mutex<Option<(Instant, Arc<Topology>)>> = Mutex::new(None);
    // Held while probing: who comes meanwhile wants the same.
    let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((at, machine)) = &*last
        && at.elapsed() < PROBED
    {
        return Ok(Arc::clone(machine));
    }
    let probed = probe::probe(options).map_err(|error| in_full(&error))?;
    let machine = Arc::new(probed.topology);
    *last = Some((Instant::now(), Arc::clone(&machine)));
    Ok(machine)
}

/// The devices of this machine. Blocks.
fn devices(claims: &Claims) -> serde_json::Value {
    let options = Options::from_environment().unwrap_or_default();
    let machine = match machine(&options) {
        Ok(machine) => machine,
        Err(error) => return json!({ "unseen": error, "gpus": [], "nics": [] }),
    };
    let (mut gauges, _) = measure::devices();
    let holders = probe::holders_of_each(&options, machine.gpus.iter().flat_map(uuids));
    let mut row = |gpu: &Gpu| gpu_row(gpu, claims, gauges.remove(&gpu.index.0), &holders);
    let gpus: Vec<GpuRow> = machine.gpus.iter().map(&mut row).collect();
    let nics: Vec<NicRow> = machine.nics.iter().map(|nic| nic_row(nic, claims)).collect();
    json!({ "name": machine.name, "driver": machine.driver, "gpus": gpus, "nics": nics })
}

/// A running cluster, and its state if it tells.
async fn asked(one: Handle) -> (Row, Option<(ClusterState, Option<Plan>)>) {
    match tokio::time::timeout(ANSWER, one.state()).await {
        Ok(Ok(state)) => (Row::of(&state, true), Some((state, cluster::recorded_plan(&one.paths)))),
        Ok(Err(error)) => (Row::silent(&one, in_full(&error)), None),
        Err(_) => (Row::silent(&one, "its supervisor does not answer".to_owned()), None),
    }
}

/// Answers what there is.
pub(super) async fn overview() -> Response {
    let found = match cluster::clusters() {
        Ok(found) => found,
        Err(error) => {
            let error = json!({ "error": in_full(&error) });
            return (StatusCode::INTERNAL_SERVER_ERROR, Json(error)).into_response();
        }
    };
    let mut asking = tokio::task::JoinSet::new();
    found.running.into_iter().for_each(|one| drop(asking.spawn(asked(one))));
    let (mut rows, mut claims) = (Vec::new(), Claims::default());
    for (row, state) in asking.join_all().await {
        rows.push(row);
        if let Some((state, plan)) = &state {
            claims.add(state, plan.as_ref());
        }
    }
    rows.sort_by(|a, b| a.name.cmp(&b.name));
    rows.extend(found.ended.iter().map(Row::of_ended));
    let unreadable: Vec<String> = found.unreadable.iter().map(|error| in_full(error)).collect();
    let machine = tokio::task::spawn_blocking(move || devices(&claims)).await;
    let machine = machine.unwrap_or_else(|error| json!({ "unseen": error.to_string() }));
    let told = json!({
        "clusters": rows, "unreadable": unreadable, "machine": machine, "version": env!("CARGO_PKG_VERSION"),
    });
    Json(told).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_there_before_its_workers_and_once_where_both_have_its_name() {
        let process = |host: &str, phase: &str, reason: Option<&str>| {
            let end = reason.map(|reason| {
                json!({ "code": 1, "signal": null, "core_dumped": false, "pid": 9,
                    "reason": reason, "at": "2026-01-31T12:00:00.000Z", "bundle": null })
            });
            json!({ "name": format!("host-{host}"), "host": host, "pid": null, "state": phase,
                "address": null, "restarts": 0, "gpu": null, "cpus": null, "mems": null,
                "asked": { "cpus": null, "mems": null }, "containment": "cgroup",
                "last_exit": end, "step": null, "peers": [], "log": "/run/log",
                "timings": { "bound_ms": null, "ready_ms": null }, "notes": [] })
        };
        let state = json!({
            "version": 1, "name": "demo", "engine": "dask", "simulated": false,
            "state": "degraded", "supervisor_pid": 10, "guardian_pid": 11,
            "started_at": "2026-01-31T11:56:00.000Z", "ready_after_ms": 100,
            "run_directory": "/run", "containment": "cgroup", "scheduler": null, "workers": [],
            "hosts": [process("b", "ready", None), process("me@c:22", "failed", Some("no key"))],
            "joined": [{ "name": "b-demo-gpu0", "host": "b", "address": "tcp://b:1", "gpu": 0,
                "state": "ready", "since": "2026-01-31T11:57:00.000Z" }],
            "cause": null, "notes": [],
        });
        let state: ClusterState = serde_json::from_value(state).expect("a state");
        let hosts = hosts(&state);
        let told = |host: &Host| {
            let process = host.process.as_ref().expect("its process");
            (host.name.clone(), host.ready, process.state, process.why.clone())
        };
        let [b, c] = &hosts[..] else { panic!("{hosts:?}") };
        assert_eq!(told(b), ("b".to_owned(), 1, ProcessPhase::Ready, None));
        let why = Some("no key".to_owned());
        assert_eq!(told(c), ("me@c:22".to_owned(), 0, ProcessPhase::Failed, why));
    }

    #[test]
    fn a_process_belongs_to_the_worker_that_it_comes_from() {
        let own = Worker { cluster: "demo".to_owned(), worker: "gpu0".to_owned() };
        let mut claims = Claims::default();
        claims.processes.insert(std::process::id(), own.clone());
        let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("a process");
        let owner = claims.owner(child.id()).cloned();
        let seen = other(child.id(), Some(1));
        child.kill().expect("killed");
        child.wait().expect("its end");
        assert_eq!(owner, Some(own));
        assert!(seen.user.is_some_and(|user| !user.is_empty()));
        assert_eq!(claims.owner(1), None, "the machine's first process");
        let gone = other(u32::MAX, None);
        assert_eq!((gone.name, gone.user), (None, None), "nothing is made up");
    }
}
