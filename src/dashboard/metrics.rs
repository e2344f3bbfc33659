//! The metrics of all clusters for Prometheus, which can't read Unix sockets, with those of GPUs,
//! NICs and lanes, which no supervisor has.
//!
//! *Invariant:* each family has its help once, and before its samples.

use std::collections::BTreeMap;

use crate::probe::{GpuGauges, Traffic};
use crate::supervise::ClusterState;
use crate::supervise::metrics::{Families, Figure, label};

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

const GPU: [Figure<GpuGauges>; 10] = [
    ("gpu_memory_used_bytes", "gauge", "Device memory in use.", |gpu| Some(gpu.used_bytes? as f64)),
    ("gpu_memory_size_bytes", "gauge", "All of its memory.", |gpu| Some(gpu.total_bytes? as f64)),
    ("gpu_busy_ratio", "gauge", "Share of the time in which a kernel ran.", |gpu| {
        Some(f64::from(gpu.busy_percent?) / 100.0)
    }),
    ("gpu_temperature_celsius", "gauge", "Its temperature.", |gpu| Some(f64::from(gpu.celsius?))),
    ("gpu_power_watts", "gauge", "Its power.", |gpu| gpu.watts),
    (
        "gpu_uncorrected_errors",
        "gauge",
        "Errors of its memory that could not be corrected, since the driver was loaded.",
        |gpu| Some(gpu.ecc_uncorrected? as f64),
    ),
    ("gpu_nvlink_sent_bytes_total", "counter", "Bytes sent over its NVLinks.", |gpu| {
        Some(gpu.nvlink_bytes[0]? as f64)
    }),
    ("gpu_nvlink_received_bytes_total", "counter", "Bytes received over its NVLinks.", |gpu| {
        Some(gpu.nvlink_bytes[1]? as f64)
    }),
    ("gpu_pcie_sent_bytes_total", "counter", "Bytes sent over PCIe.", |gpu| {
        Some(gpu.pcie_bytes[0]? as f64)
    }),
    ("gpu_pcie_received_bytes_total", "counter", "Bytes received over PCIe.", |gpu| {
        Some(gpu.pcie_bytes[1]? as f64)
    }),
];

const NIC: [Figure<Traffic>; 2] = [
    ("nic_sent_bytes_total", "counter", "Bytes that it sent.", |traffic| {
        Some(traffic.sent_bytes as f64)
    }),
    ("nic_received_bytes_total", "counter", "Bytes that it received.", |traffic| {
        Some(traffic.received_bytes as f64)
    }),
];

/// The GPUs' figures, by index, and the NICs' traffic, by name.
pub(super) fn devices(gpus: &BTreeMap<u32, GpuGauges>, nics: &BTreeMap<String, Traffic>) -> String {
    let mut families = Families::default();
    let gpus = gpus.iter().map(|(index, gpu)| (label("gpu", &index.to_string()), gpu));
    families.figures(&GPU, &gpus.collect::<Vec<_>>());
    let nics = nics.iter().map(|(name, traffic)| (label("nic", name), traffic));
    families.figures(&NIC, &nics.collect::<Vec<_>>());
    families.into_text()
}

/// How many connections between workers use each lane, and how many lack what should carry them.
pub(super) fn lanes(state: &ClusterState, missing: usize) -> String {
    let mut used: BTreeMap<&str, usize> = BTreeMap::new();
    for lane in state.workers.iter().flat_map(|worker| &worker.peers).flat_map(|peer| &peer.lanes) {
        *used.entry(lane).or_default() += 1;
    }
    let mut families = Families::default();
    let cluster = label("cluster", state.name.as_str());
    let of_lane = |(lane, count)| (format!("{cluster},{}", label("lane", lane)), count as f64);
    let help = "Connections of workers that use the lane.";
    families.family("lane_connections", "gauge", help, used.into_iter().map(of_lane));
    let help = "Connections of workers without the lane that should carry their data.";
    families.family("downgraded_connections", "gauge", help, [(cluster, missing as f64)]);
    families.into_text()
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
        let text = merged(&[devices(&BTreeMap::from([(3, told)]), &BTreeMap::new())]);
        assert!(text.ends_with("cuda_cluster_gpu_temperature_celsius{gpu=\"3\"} 40\n"), "{text}");
        assert_eq!(text.lines().count(), 3, "{text}");
    }
}
