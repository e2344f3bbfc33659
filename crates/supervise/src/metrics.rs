//! The state as metrics in Prometheus's text format, and how families of metrics are written.
//!
//! *Invariant:* each family has its help once, and before its samples. Every series has the
//! cluster's name or that of a device; those of a process also the process's.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::UNIX_EPOCH;

use super::{ClusterPhase, ClusterState, ProcessPhase, ProcessState};
use cuda_cluster_machine::os::process::{cpu_time, resident_bytes};
use cuda_cluster_wire::status::DevicePool;

/// A figure that each of several things may have: name, kind, help, and how it is read.
pub type Figure<T> = (&'static str, &'static str, &'static str, fn(&T) -> Option<f64>);

/// Families of metrics as text.
#[derive(Debug, Default)]
pub struct Families(String);

impl Families {
    /// Writes a family and its samples, by their labels.
    pub fn family(
        &mut self,
        name: &str,
        kind: &str,
        help: &str,
        samples: impl IntoIterator<Item = (String, f64)>,
    ) {
        // Writing to a string can't fail.
        let _ = writeln!(self.0, "# HELP cuda_cluster_{name} {help}");
        let _ = writeln!(self.0, "# TYPE cuda_cluster_{name} {kind}");
        for (labels, value) in samples {
            let _ = writeln!(self.0, "cuda_cluster_{name}{{{labels}}} {value}");
        }
    }

    /// Writes a family for each figure, with samples of the things that have it.
    pub fn figures<T>(&mut self, figures: &[Figure<T>], all: &[(String, &T)]) {
        for (name, kind, help, of) in figures {
            let had = all.iter().filter_map(|(labels, thing)| Some((labels.clone(), of(thing)?)));
            self.family(name, kind, help, had);
        }
    }

    /// The text.
    pub fn into_text(self) -> String {
        self.0
    }
}

/// A label of a sample.
pub fn label(name: &str, value: &str) -> String {
    let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    format!("{name}=\"{value}\"")
}

/// Renders the state, and the current memory use of its processes.
pub(super) fn render(state: &ClusterState) -> String {
    let mut families = Families::default();
    let cluster = label("cluster", state.name.as_str());
    families.figures(&CLUSTER, &[(cluster.clone(), state)]);
    let all = state.processes();
    let labelled =
        all.map(|process| (format!("{cluster},{}", label("process", &process.name)), process));
    families.figures(&PROCESS, &labelled.collect::<Vec<_>>());
    families.family("joined_workers", "gauge", JOINED, joined(&cluster, state));
    families.into_text()
}

const JOINED: &str =
    "Workers of other machines, by their machine and whether the scheduler has them.";

/// How many there are in each state on each machine.
fn joined(cluster: &str, state: &ClusterState) -> Vec<(String, f64)> {
    let mut counts: BTreeMap<String, f64> = BTreeMap::new();
    for one in &state.joined {
        let (host, phase) =
            (label("host", &one.worker.host), label("state", &one.state.to_string()));
        *counts.entry(format!("{cluster},{host},{phase}")).or_default() += 1.0;
    }
    counts.into_iter().collect()
}

const READY: &str = "Whether every wanted process is READY.";

const ANSWERS: &str = "Whether its supervisor answers.";

const FAILED: &str =
    "Whether it has ended because of a failure; also told of one that has left a run directory.";

/// What is told of a cluster whose supervisor does not answer.
pub fn unanswered(cluster: &str) -> String {
    let mut families = Families::default();
    for (name, help) in [("ready", READY), ("supervisor_answers", ANSWERS)] {
        families.family(name, "gauge", help, [(label("cluster", cluster), 0.0)]);
    }
    families.into_text()
}

/// What is told of a cluster that has ended, by the last that is known of it.
pub fn ended(state: &ClusterState) -> String {
    let mut families = Families::default();
    families.figures(&ENDED, &[(label("cluster", state.name.as_str()), state)]);
    families.into_text()
}

const ENDED: [Figure<ClusterState>; 2] = [
    ("failed", "gauge", FAILED, |cluster| one_if(cluster.state == ClusterPhase::Failed)),
    ("ended_timestamp_seconds", "gauge", "When it ended, since 1970.", |cluster| {
        let at = humantime::parse_rfc3339_weak(cluster.ended_at.as_deref()?).ok()?;
        Some(at.duration_since(UNIX_EPOCH).ok()?.as_secs_f64())
    }),
];

const CLUSTER: [Figure<ClusterState>; 4] = [
    ("ready", "gauge", READY, |cluster| one_if(cluster.state == ClusterPhase::Ready)),
    ("supervisor_answers", "gauge", ANSWERS, |_| one_if(true)),
    ("failed", "gauge", FAILED, |cluster| one_if(cluster.state == ClusterPhase::Failed)),
    ("start_seconds", "gauge", "From the begin to the first READY.", |cluster| {
        cluster.ready_after_ms.map(seconds)
    }),
];

const PROCESS: [Figure<ProcessState>; 16] = [
    ("process_ready", "gauge", "Whether the process is READY.", |process| {
        one_if(process.state == ProcessPhase::Ready)
    }),
    ("process_wanted", "gauge", "Whether it is to run: it is started and not ended.", |process| {
        use ProcessPhase::{Stopped, Stopping, Waiting};
        one_if(!matches!(process.state, Waiting | Stopping | Stopped))
    }),
    ("process_unresponsive", "gauge", "Whether it was READY and does not answer.", |process| {
        one_if(process.state == ProcessPhase::Unresponsive)
    }),
    ("process_failed", "gauge", "Whether the process is not tried again.", |process| {
        one_if(process.state == ProcessPhase::Failed)
    }),
    ("process_restarts_total", "counter", "How often it was started again.", |process| {
        Some(f64::from(process.restarts))
    }),
    ("process_start_seconds", "gauge", "From its last start to READY.", |process| {
        process.timings.ready_ms.map(seconds)
    }),
    ("process_resident_bytes", "gauge", "Its resident memory.", |process| {
        process.pid.and_then(resident_bytes).map(|bytes| bytes as f64)
    }),
    (
        "process_cpu_seconds_total",
        "counter",
        "Processor time that its present process has used.",
        |process| process.pid.and_then(cpu_time).map(|time| time.as_secs_f64()),
    ),
    (
        "process_gpu_errors",
        "gauge",
        "Errors (Xid) that the driver reported for its GPU before its last end.",
        |process| Some(process.last_exit.as_ref().map_or(0.0, |exit| exit.gpu_errors.len() as f64)),
    ),
    ("process_missing_ports", "gauge", "Planned NIC ports that it can't use.", |process| {
        Some(process.missing_ports.len() as f64)
    }),
    ("device_pool_slabs", "gauge", "Allocations of the pool of device memory.", |process| {
        pool(process, |pool| pool.slabs)
    }),
    ("device_pool_held_bytes", "gauge", "Their bytes.", |process| {
        pool(process, |pool| pool.held_bytes)
    }),
    ("device_pool_used_bytes", "gauge", "Bytes of them that are in use.", |process| {
        pool(process, |pool| pool.used_bytes)
    }),
    (
        "device_pool_largest_free_bytes",
        "gauge",
        "The largest piece that can be taken without another allocation.",
        |process| pool(process, |pool| pool.largest_free_bytes),
    ),
    (
        "device_pool_mapped_by_peers_bytes",
        "gauge",
        "Most bytes that peers have mapped, summed over the peers.",
        |process| pool(process, |pool| pool.mapped_by_peers_bytes),
    ),
    (
        "device_pool_freed_but_mapped_bytes",
        "gauge",
        "Bytes that were given back to the driver, but that peers may still have mapped.",
        |process| pool(process, |pool| pool.freed_but_mapped_bytes),
    ),
];

fn pool(process: &ProcessState, of: fn(&DevicePool) -> u64) -> Option<f64> {
    process.device_pool.as_ref().map(|pool| of(pool) as f64)
}

#[allow(clippy::unnecessary_wraps, reason = "it is a figure's value")]
fn one_if(holds: bool) -> Option<f64> {
    Some(f64::from(u8::from(holds)))
}

fn seconds(millis: u64) -> f64 {
    millis as f64 / 1e3
}
