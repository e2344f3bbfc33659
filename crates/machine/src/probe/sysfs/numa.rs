//! NUMA nodes: their CPUs, their memory, and which of them are a GPU's.
//!
//! Does not report packages and cores; hwloc does.
//!
//! *Invariant:* a node without CPUs is listed with an empty set.

use std::collections::BTreeMap;
use std::path::Path;

use super::{Root, first_line, names};
use cuda_cluster_model::cpuset::CpuSet;
use cuda_cluster_model::ids::{NumaId, PciAddress};

/// A NUMA node in `/sys/devices/system/node`.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::probe) struct Node {
    /// The kernel's number.
    pub(in crate::probe) id: NumaId,
    /// Its CPUs; empty for memory-only nodes.
    pub(in crate::probe) cpus: CpuSet,
    pub(in crate::probe) memory_bytes: Option<u64>,
}

/// All nodes in numerical order.
pub(super) fn nodes(root: &Root) -> Vec<Node> {
    let all = root.join("devices/system/node");
    let ids = names(&all).into_iter().filter_map(|name| name.strip_prefix("node")?.parse().ok());
    let mut nodes: Vec<Node> = ids.filter_map(|id| node(&all, NumaId(id))).collect();
    nodes.sort_by_key(|node| node.id);
    nodes
}

fn node(all: &Path, id: NumaId) -> Option<Node> {
    let path = all.join(format!("node{id}"));
    // The file exists but is empty for a node without CPUs.
    let cpus = std::fs::read_to_string(path.join("cpulist")).ok()?.trim().parse().ok()?;
    Some(Node { id, cpus, memory_bytes: memory(&path) })
}

/// `Node 0 MemTotal:       131894312 kB`
fn memory(node: &Path) -> Option<u64> {
    let text = std::fs::read_to_string(node.join("meminfo")).ok()?;
    let line = text.lines().find(|line| line.contains("MemTotal:"))?;
    let kibibytes: u64 = line.split_whitespace().rev().nth(1)?.parse().ok()?;
    kibibytes.checked_mul(1024)
}

/// The NUMA node of each GPU's memory, from the driver's `numa_status`, whose first line is `Node:
/// 255`. Only drivers on POWER9 have the file; newer ones report the node through NVML.
pub(super) fn gpu_memory(procfs: &Path) -> BTreeMap<PciAddress, NumaId> {
    let gpus = procfs.join("driver/nvidia/gpus");
    let node = |name: &str| {
        let place: PciAddress = name.parse().ok()?;
        let line = first_line(&gpus.join(name).join("numa_status"))?;
        let node = line.strip_prefix("Node:")?.trim().parse().ok()?;
        Some((place, NumaId(node)))
    };
    names(&gpus).iter().filter_map(|name| node(name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_read_with_their_memory_and_without_cpus_where_there_are_none() {
        let dir = tempfile::tempdir().unwrap();
        for (id, cpus, kib) in [(8, "64-127\n", 1024), (0, "0-63\n", 2048), (255, "\n", 16)] {
            let node = dir.path().join(format!("devices/system/node/node{id}"));
            std::fs::create_dir_all(&node).unwrap();
            std::fs::write(node.join("cpulist"), cpus).unwrap();
            let meminfo = format!("\nNode {id} MemTotal:   {kib} kB\nNode {id} MemFree:  1 kB\n");
            std::fs::write(node.join("meminfo"), meminfo).unwrap();
        }
        let nodes = nodes(&Root(dir.path().to_owned()));
        let shown: Vec<_> =
            nodes.iter().map(|n| (n.id.0, n.cpus.to_string(), n.memory_bytes)).collect();
        assert_eq!(
            shown,
            [
                (0, "0-63".to_owned(), Some(2 << 20)),
                (8, "64-127".to_owned(), Some(1 << 20)),
                (255, String::new(), Some(16 << 10)),
            ]
        );
    }

    #[test]
    fn the_drivers_procfs_names_the_node_that_a_gpus_memory_is() {
        let dir = tempfile::tempdir().unwrap();
        let gpu = dir.path().join("driver/nvidia/gpus/0004:04:00.0");
        std::fs::create_dir_all(&gpu).unwrap();
        std::fs::write(gpu.join("numa_status"), "Node:         255\nNUMA Status:  online\n")
            .unwrap();
        let place = "0004:04:00.0".parse().unwrap();
        assert_eq!(gpu_memory(dir.path()), BTreeMap::from([(place, NumaId(255))]));
    }
}
