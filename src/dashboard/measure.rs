//! What a cluster's processes, GPUs and NICs do now, measured by this process.
//!
//! *Invariant:* the supervisor is not asked; its state may be given.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::os::process::{age, cpu_time, is_stopped, resident_bytes};
use crate::probe::{GpuGauges, GpuMeter, Options, Traffic, nics, traffic};
use crate::supervise::{ClusterState, ProcessState};
use crate::topology::{Nic, Topology};
use crate::wire::tasks::Overview;

/// The figures of one moment.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Figures {
    /// Milliseconds since 1970.
    pub at: u64,
    /// By name.
    pub processes: BTreeMap<String, ProcessFigures>,
    /// By index.
    pub gpus: BTreeMap<u32, GpuGauges>,
    /// By name: bytes per second, sent and received.
    pub nics: BTreeMap<String, [f64; 2]>,
    /// The native scheduler's counters.
    pub tasks: Option<Overview>,
}

impl Figures {
    /// What a process does; nothing is known of one that has ended.
    pub fn of(&self, process: &ProcessState) -> ProcessFigures {
        let known = self.processes.get(&process.name).filter(|_| process.pid.is_some());
        known.copied().unwrap_or_default()
    }

    /// The processes that are stopped.
    pub(super) fn stopped(&self) -> BTreeSet<&str> {
        let stopped = self.processes.iter().filter(|(_, figures)| figures.is_stopped);
        stopped.map(|(name, _)| name.as_str()).collect()
    }

    /// What its GPU does.
    pub fn gauges(&self, process: &ProcessState) -> Option<&GpuGauges> {
        self.gpus.get(&process.gpu.as_ref()?.index)
    }
}

/// All processes of a cluster, by name and process id.
pub fn processes_of(state: &ClusterState) -> Vec<(String, u32)> {
    let all = state.processes();
    let mut processes: Vec<(String, u32)> =
        all.filter_map(|process| Some((process.name.clone(), process.pid?))).collect();
    processes.push(("supervisor".to_owned(), state.supervisor_pid));
    processes.extend(state.guardian_pid.map(|pid| ("guardian".to_owned(), pid)));
    processes
}

/// The figures of a process.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct ProcessFigures {
    /// CPUs in use since the last reading; `None` at the first.
    pub cpus: Option<f64>,
    /// Its resident memory.
    pub resident_bytes: Option<u64>,
    /// Milliseconds since its start.
    pub age_ms: Option<u64>,
    /// Whether it is stopped, by a signal or a debugger.
    #[serde(default)]
    pub is_stopped: bool,
}

/// The age in milliseconds below which what a process has used since its start is what it uses now:
/// the supervisor reads every ten seconds.
const YOUNG: u64 = 15_000;

/// Reads figures; rates are those since the last reading.
#[derive(Debug)]
pub struct Meter {
    gpus: Option<GpuMeter>,
    nics: Vec<Nic>,
    sysfs: PathBuf,
    processes: BTreeMap<u32, (Instant, Duration)>,
    traffic: BTreeMap<String, (Instant, Traffic)>,
}

impl Meter {
    /// For a cluster on this machine; without it, GPUs and NICs are not there to be read.
    pub fn new(machine: Option<&Topology>) -> Self {
        let options = Options::from_environment().unwrap_or_default();
        Self {
            gpus: machine.and_then(|_| GpuMeter::open(&options)),
            nics: machine.map(|machine| machine.nics.clone()).unwrap_or_default(),
            sysfs: options.sysfs,
            processes: BTreeMap::new(),
            traffic: BTreeMap::new(),
        }
    }

    /// Takes the supervisor's readings of the processes for the first, so that there are rates at
    /// once. Returns whether it has one of each; of a young process its start is one.
    pub fn begin(&mut self, state: &ClusterState) -> bool {
        let now = Instant::now();
        let reading = |process: &ProcessState, pid| {
            let (ago, used) = match process.cpu_before {
                Some(before) => (before.ago_ms, before.cpu_ms),
                None => (u64::try_from(age(pid)?.as_millis()).ok().filter(|age| *age < YOUNG)?, 0),
            };
            Some((now.checked_sub(Duration::from_millis(ago))?, Duration::from_millis(used)))
        };
        let mut all = true;
        for process in state.processes() {
            let Some(pid) = process.pid else { continue };
            match reading(process, pid) {
                Some(reading) => drop(self.processes.insert(pid, reading)),
                None => all = false,
            }
        }
        all
    }

    /// The figures of these processes, and of all GPUs and NICs. Blocks for some milliseconds.
    pub fn read(&mut self, processes: &[(String, u32)]) -> Figures {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let before = std::mem::take(&mut self.processes);
        let mut figures = Figures {
            at: u64::try_from(since.as_millis()).unwrap_or(u64::MAX),
            gpus: self.gpus.as_mut().map(GpuMeter::read).unwrap_or_default(),
            nics: self.nic_rates(),
            ..Figures::default()
        };
        for (name, pid) in processes {
            let Some(used) = cpu_time(*pid) else { continue };
            let now = Instant::now();
            let cpus = before.get(pid).and_then(|(then, before)| {
                Some(used.checked_sub(*before)?.as_secs_f64() / seconds(*then, now)?)
            });
            self.processes.insert(*pid, (now, used));
            let age_ms = age(*pid).and_then(|age| u64::try_from(age.as_millis()).ok());
            let is_stopped = is_stopped(*pid) == Some(true);
            let resident_bytes = resident_bytes(*pid);
            let own = ProcessFigures { cpus, resident_bytes, age_ms, is_stopped };
            figures.processes.insert(name.clone(), own);
        }
        figures
    }

    fn nic_rates(&mut self) -> BTreeMap<String, [f64; 2]> {
        let mut rates = BTreeMap::new();
        for nic in &self.nics {
            let Some(read) = traffic(&self.sysfs, nic) else { continue };
            let now = Instant::now();
            let before = self.traffic.insert(nic.name.clone(), (now, read));
            let rate = before.and_then(|(then, before)| {
                let seconds = seconds(then, now)?;
                let sent = read.sent_bytes.checked_sub(before.sent_bytes)?;
                let received = read.received_bytes.checked_sub(before.received_bytes)?;
                Some([sent as f64 / seconds, received as f64 / seconds])
            });
            rates.extend(rate.map(|rate| (nic.name.clone(), rate)));
        }
        rates
    }
}

/// The time between two readings; `None` if it is too short for a rate.
fn seconds(then: Instant, now: Instant) -> Option<f64> {
    Some(now.duration_since(then).as_secs_f64()).filter(|seconds| *seconds > 0.01)
}

/// The GPUs' and NICs' figures of this machine, for counters that someone else compares. Blocks.
pub(super) fn devices() -> (BTreeMap<u32, GpuGauges>, BTreeMap<String, Traffic>) {
    let options = Options::from_environment().unwrap_or_default();
    let gpus = GpuMeter::open(&options).map(|mut meter| meter.read()).unwrap_or_default();
    let rdma = nics(&options.sysfs);
    let read = |nic: &Nic| Some((nic.name.clone(), traffic(&options.sysfs, nic)?));
    (gpus, rdma.iter().filter_map(read).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A cluster with this process for a worker.
    fn with(cpu_before: serde_json::Value) -> ClusterState {
        let worker = json!({
            "name": "gpu0", "pid": std::process::id(), "state": "ready", "address": null,
            "restarts": 0, "gpu": null, "cpus": null, "mems": null,
            "asked": { "cpus": null, "mems": null }, "containment": "cgroup", "last_exit": null,
            "step": null, "peers": [], "log": "/run/log",
            "timings": { "bound_ms": 2, "ready_ms": 30 }, "notes": [], "cpu_before": cpu_before,
        });
        serde_json::from_value(json!({
            "version": 1, "name": "demo", "engine": "native", "simulated": false, "state": "ready",
            "supervisor_pid": 10, "guardian_pid": 11, "started_at": "2026-01-31T11:56:00.000Z",
            "ready_after_ms": 100, "run_directory": "/run", "containment": "cgroup",
            "scheduler": null, "workers": [worker], "cause": null, "notes": [],
        }))
        .expect("a state")
    }

    fn rate(before: serde_json::Value) -> Option<f64> {
        let mut meter = Meter::new(None);
        let state = with(before);
        meter.begin(&state);
        meter.read(&processes_of(&state)).processes["gpu0"].cpus
    }

    #[test]
    fn there_is_a_rate_at_once_if_the_supervisor_has_read_before_or_the_process_is_young() {
        let own = || cpu_time(std::process::id()).expect("this process").as_secs_f64();
        let least = own();
        let since = rate(json!({ "cpu_ms": 0, "ago_ms": 100_000 })).expect("a rate");
        // The time passes and is used meanwhile.
        assert!((least / 101.0..=own() / 100.0).contains(&since), "{since}: all that was used");
        while age(std::process::id()).is_none_or(|age| age < Duration::from_millis(20)) {
            std::thread::yield_now();
        }
        assert!(rate(json!(null)).is_some(), "this process is young");
        let later = json!({ "cpu_ms": u64::MAX, "ago_ms": 100_000 });
        assert_eq!(rate(later), None, "of another process, which had this number before");
        assert!(Meter::new(None).begin(&with(json!({ "cpu_ms": 0, "ago_ms": 1000 }))));
    }
}
