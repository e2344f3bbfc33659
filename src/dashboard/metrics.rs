//! The metrics of all clusters for Prometheus, which can't read Unix sockets, with those of GPUs,
//! NICs and lanes, which no supervisor has.
//!
//! *Invariant:* each family has its help once, and before its samples.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::probe::{GpuGauges, Traffic};
use crate::supervise::ClusterState;

/// Texts in Prometheus's format as one: samples of the same family come together.
pub(super) fn merged(texts: &[String]) -> String {
    let mut families: BTreeMap<String, (Vec<&str>, Vec<&str>)> = BTreeMap::new();
    for line in texts.iter().flat_map(|text| text.lines()) {
        let comment = line.strip_prefix("# ").and_then(|text| text.split(' ').nth(1));
        let name = comment.unwrap_or_else(|| line.split(['{', ' ']).next().unwrap_or_default());
        let (heads, samples) = families.entry(name.to_owned()).or_default();
        match comment {
            Some(_) if heads.len() < 2 => heads.push(line),
            Some(_) => {}
            None => samples.push(line),
        }
    }
    let families = families.into_values().filter(|(_, samples)| !samples.is_empty());
    let lines = families.flat_map(|(heads, samples)| heads.into_iter().chain(samples));
    lines.fold(String::new(), |text, line| text + line + "\n")
}

/// A figure of a GPU: name, kind, help, and how it is read.
type GpuFigure = (&'static str, &'static str, &'static str, fn(&GpuGauges) -> Option<f64>);

const GPU: [GpuFigure; 9] = [
    ("memory_used_bytes", "gauge", "Device memory in use.", |gpu| Some(gpu.used_bytes? as f64)),
    ("memory_size_bytes", "gauge", "All of its memory.", |gpu| Some(gpu.total_bytes? as f64)),
    ("busy_ratio", "gauge", "Share of the time in which a kernel ran.", |gpu| {
        Some(f64::from(gpu.busy_percent?) / 100.0)
    }),
    ("temperature_celsius", "gauge", "Its temperature.", |gpu| Some(f64::from(gpu.celsius?))),
    ("power_watts", "gauge", "Its power.", |gpu| gpu.watts),
    ("nvlink_sent_bytes_total", "counter", "Bytes sent over its NVLinks.", |gpu| {
        Some(gpu.nvlink_bytes[0]? as f64)
    }),
    ("nvlink_received_bytes_total", "counter", "Bytes received over its NVLinks.", |gpu| {
        Some(gpu.nvlink_bytes[1]? as f64)
    }),
    ("pcie_sent_bytes_total", "counter", "Bytes sent over PCIe.", |gpu| {
        Some(gpu.pcie_bytes[0]? as f64)
    }),
    ("pcie_received_bytes_total", "counter", "Bytes received over PCIe.", |gpu| {
        Some(gpu.pcie_bytes[1]? as f64)
    }),
];

/// The GPUs' figures, by index.
pub(super) fn gpus(gpus: &BTreeMap<u32, GpuGauges>) -> String {
    let mut text = String::new();
    for (name, kind, help, of) in GPU {
        let name = format!("gpu_{name}");
        family(&mut text, &name, kind, help);
        for (index, value) in gpus.iter().filter_map(|(index, gpu)| Some((index, of(gpu)?))) {
            sample(&mut text, &name, &format!("gpu=\"{index}\""), value);
        }
    }
    text
}

/// A figure's name, what it counts, and where it stands.
type Figure = (&'static str, &'static str, fn(&Traffic) -> u64);

/// The NICs' traffic, by name.
pub(super) fn nics(nics: &BTreeMap<String, Traffic>) -> String {
    let mut text = String::new();
    let figures: [Figure; 2] = [
        ("nic_sent_bytes_total", "Bytes that it sent.", |traffic| traffic.sent_bytes),
        ("nic_received_bytes_total", "Bytes that it received.", |traffic| traffic.received_bytes),
    ];
    for (name, help, of) in figures {
        family(&mut text, name, "counter", help);
        for (nic, traffic) in nics {
            sample(&mut text, name, &format!("nic=\"{}\"", escaped(nic)), of(traffic) as f64);
        }
    }
    text
}

/// How many connections between workers use each lane, and how many lack what should carry them.
pub(super) fn lanes(state: &ClusterState, missing: usize) -> String {
    let mut used: BTreeMap<&str, usize> = BTreeMap::new();
    for lane in state.workers.iter().flat_map(|worker| &worker.peers).flat_map(|peer| &peer.lanes) {
        *used.entry(lane).or_default() += 1;
    }
    let mut text = String::new();
    let cluster = &state.name;
    family(&mut text, "lane_connections", "gauge", "Connections of workers that use the lane.");
    for (lane, count) in used {
        let labels = format!("cluster=\"{cluster}\",lane=\"{}\"", escaped(lane));
        sample(&mut text, "lane_connections", &labels, count as f64);
    }
    let help = "Connections of workers without the lane that should carry their data.";
    family(&mut text, "downgraded_connections", "gauge", help);
    let labels = format!("cluster=\"{cluster}\"");
    sample(&mut text, "downgraded_connections", &labels, missing as f64);
    text
}

fn family(text: &mut String, name: &str, kind: &str, help: &str) {
    // Writing to a string can't fail.
    let _ = writeln!(text, "# HELP cuda_cluster_{name} {help}");
    let _ = writeln!(text, "# TYPE cuda_cluster_{name} {kind}");
}

fn sample(text: &mut String, name: &str, labels: &str, value: f64) {
    let _ = writeln!(text, "cuda_cluster_{name}{{{labels}}} {value}");
}

fn escaped(label: &str) -> String {
    label.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_of_two_clusters_come_below_one_help() {
        let one = "# HELP x What it is.\n# TYPE x gauge\nx{cluster=\"a\"} 1\n\
                   # HELP y Nothing.\n# TYPE y gauge\n";
        let two = "# HELP x What it is.\n# TYPE x gauge\nx{cluster=\"b\"} 2\n";
        assert_eq!(
            merged(&[one.to_owned(), two.to_owned()]),
            "# HELP x What it is.\n# TYPE x gauge\nx{cluster=\"a\"} 1\nx{cluster=\"b\"} 2\n"
        );
    }

    #[test]
    fn what_a_driver_does_not_tell_has_no_sample() {
        let told = GpuGauges { celsius: Some(40), ..GpuGauges::default() };
        let text = merged(&[gpus(&BTreeMap::from([(3, told)]))]);
        assert!(text.ends_with("cuda_cluster_gpu_temperature_celsius{gpu=\"3\"} 40\n"), "{text}");
        assert_eq!(text.lines().count(), 3, "{text}");
    }
}
