//! The state as metrics in Prometheus's text format.
//!
//! *Invariant:* every series has the cluster's name; those of a process also the process's.

use std::fmt::Write;

use super::{ClusterPhase, ClusterState, ProcessPhase, ProcessState};
use cuda_cluster_machine::os::process::resident_bytes;
use cuda_cluster_wire::status::DevicePool;

/// Renders the state, and the current memory use of its processes.
pub(super) fn render(state: &ClusterState) -> String {
    let mut text = String::new();
    let cluster = &state.name;
    let ready = u8::from(state.state == ClusterPhase::Ready);
    family(&mut text, "ready", "gauge", "Whether every wanted process is READY.");
    sample(&mut text, "ready", &format!("cluster=\"{cluster}\""), f64::from(ready));
    if let Some(millis) = state.ready_after_ms {
        family(&mut text, "start_seconds", "gauge", "From the begin to the first READY.");
        sample(&mut text, "start_seconds", &format!("cluster=\"{cluster}\""), seconds(millis));
    }
    let processes: Vec<&ProcessState> = state.scheduler.iter().chain(&state.workers).collect();
    let labels = |process: &ProcessState| {
        format!("cluster=\"{cluster}\",process=\"{}\"", escaped(&process.name))
    };
    family(&mut text, "process_ready", "gauge", "Whether the process is READY.");
    for process in &processes {
        let ready = u8::from(process.state == ProcessPhase::Ready);
        sample(&mut text, "process_ready", &labels(process), f64::from(ready));
    }
    family(&mut text, "process_unresponsive", "gauge", "Whether it was READY and does not answer.");
    for process in &processes {
        let silent = u8::from(process.state == ProcessPhase::Unresponsive);
        sample(&mut text, "process_unresponsive", &labels(process), f64::from(silent));
    }
    family(&mut text, "process_failed", "gauge", "Whether the process is not tried again.");
    for process in &processes {
        let failed = u8::from(process.state == ProcessPhase::Failed);
        sample(&mut text, "process_failed", &labels(process), f64::from(failed));
    }
    family(&mut text, "process_restarts_total", "counter", "How often it was started again.");
    for process in &processes {
        sample(&mut text, "process_restarts_total", &labels(process), f64::from(process.restarts));
    }
    family(&mut text, "process_start_seconds", "gauge", "From its last start to READY.");
    for process in &processes {
        if let Some(millis) = process.timings.ready_ms {
            sample(&mut text, "process_start_seconds", &labels(process), seconds(millis));
        }
    }
    family(&mut text, "process_resident_bytes", "gauge", "Its resident memory.");
    for process in &processes {
        if let Some(bytes) = process.pid.and_then(resident_bytes) {
            sample(&mut text, "process_resident_bytes", &labels(process), bytes as f64);
        }
    }
    family(&mut text, "process_missing_ports", "gauge", "Planned NIC ports that it can't use.");
    for process in &processes {
        let missing = process.missing_ports.len() as f64;
        sample(&mut text, "process_missing_ports", &labels(process), missing);
    }
    for (name, help, of) in DEVICE_POOL {
        family(&mut text, name, "gauge", help);
        for (process, pool) in processes.iter().filter_map(|one| Some((one, one.device_pool?))) {
            sample(&mut text, name, &labels(process), of(&pool) as f64);
        }
    }
    text
}

/// A figure of a worker's pool of device memory: name, help, and how it is read.
type PoolFigure = (&'static str, &'static str, fn(&DevicePool) -> u64);

const DEVICE_POOL: [PoolFigure; 5] = [
    ("device_pool_slabs", "Allocations of the pool of device memory.", |pool| pool.slabs),
    ("device_pool_held_bytes", "Their bytes.", |pool| pool.held_bytes),
    ("device_pool_used_bytes", "Bytes of them that are in use.", |pool| pool.used_bytes),
    (
        "device_pool_largest_free_bytes",
        "The largest piece that can be taken without another allocation.",
        |pool| pool.largest_free_bytes,
    ),
    (
        "device_pool_mapped_by_peers_bytes",
        "Most bytes that peers have mapped, summed over the peers.",
        |pool| pool.mapped_by_peers_bytes,
    ),
];

fn family(text: &mut String, name: &str, kind: &str, help: &str) {
    // Writing to a string can't fail.
    let _ = writeln!(text, "# HELP cuda_cluster_{name} {help}");
    let _ = writeln!(text, "# TYPE cuda_cluster_{name} {kind}");
}

fn sample(text: &mut String, name: &str, labels: &str, value: f64) {
    let _ = writeln!(text, "cuda_cluster_{name}{{{labels}}} {value}");
}

fn seconds(millis: u64) -> f64 {
    millis as f64 / 1e3
}

fn escaped(label: &str) -> String {
    label.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}
