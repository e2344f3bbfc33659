//! Which NUMA nodes a worker's memory is on, and how much host and device memory it may use.
//!
//! Does not apply a policy; the shim does.
//!
//! *Invariant:* memory nodes are allowed, have host memory, and are near the worker's GPU.

use crate::cpuset::NodeSet;
use crate::spec::{EngineKind, Limit};
use crate::topology::{Gpu, Note, NumaNode, Topology};

/// Default fraction of a GPU's memory at which a worker spills; the same as dask-cuda's.
const DEVICE_SHARE: f64 = 0.8;

/// Percentage of its memory limit at which a process is killed and started again, unless it is
/// configured otherwise: as a Dask nanny does. A Dask worker spills and pauses before.
pub const KILL_PERCENT: u64 = 95;

/// The key of Dask's configuration for that, as a fraction or `false` for never.
pub(super) const TERMINATE: &str = "distributed.worker.memory.terminate";

/// The variable of the same meaning.
pub const TERMINATE_VARIABLE: &str = "DASK_DISTRIBUTED__WORKER__MEMORY__TERMINATE";

/// Percentage of its memory limit that a native worker fills, all resident memory counted, before
/// it spills to disk. Well below [`KILL_PERCENT`], because memory that a function allocates itself
/// is noticed only afterwards.
pub const HOST_FILL_PERCENT: u64 = 75;

/// The lowest memory limit of a native worker, in bytes: several times what it occupies without any
/// data (about 30 MB).
pub(super) const LEAST_HOST_LIMIT: u64 = 64 << 20;

/// How a native worker divides its limit, as text for a plan's reasons.
pub(super) fn host_division(bytes: u64) -> String {
    let filled = crate::units::HumanBytes(bytes / 100 * HOST_FILL_PERCENT);
    format!("; beyond {filled} in use, data go to the disk")
}

/// The allowed NUMA nodes with host memory; empty if the topology lists none.
pub(super) fn host_nodes(topology: &Topology) -> NodeSet {
    let has_memory = |node: &&NumaNode| !node.gpu_memory && node.memory_bytes != Some(0);
    let all: NodeSet = topology.numa.iter().filter(has_memory).map(|node| node.id.0).collect();
    match &topology.allowed {
        Some(allowed) => allowed.mems.intersection(&all),
        None => all,
    }
}

/// The nodes near a GPU, with the reason; `None` for no memory policy.
pub(super) fn nodes_near(
    topology: &Topology,
    gpu: &Gpu,
    notes: &mut Vec<Note>,
) -> (Option<NodeSet>, String) {
    let near: NodeSet = match (&gpu.numa_set, gpu.numa) {
        (Some(set), _) if !set.is_empty() => set.clone(),
        (_, Some(numa)) => std::iter::once(numa.0).collect(),
        _ => return (None, "the GPU's NUMA node is unknown, so memory is left alone".to_owned()),
    };
    let host = host_nodes(topology);
    let about = format!("GPU {}", gpu.index);
    // If the source lists no nodes, the GPU's own node is taken as it is.
    if topology.numa.is_empty() && topology.allowed.is_none() {
        return (Some(near.clone()), format!("NUMA node {near} is nearest to GPU {}", gpu.index));
    }
    let usable = near.intersection(&host);
    if !usable.is_empty() {
        return (
            Some(usable.clone()),
            format!("NUMA node {usable} is nearest to GPU {}", gpu.index),
        );
    }
    let package =
        topology.numa.iter().filter(|node| near.contains(node.id.0)).find_map(|node| node.package);
    let beside: NodeSet = topology
        .numa
        .iter()
        .filter(|node| package.is_some() && node.package == package && host.contains(node.id.0))
        .map(|node| node.id.0)
        .collect();
    let text = format!("no host memory may be had on its NUMA node {near}");
    if beside.is_empty() {
        notes.push(Note::new(about, format!("{text}: memory is left alone")));
        return (None, format!("{text}, so memory is left alone"));
    }
    notes.push(Note::new(about, format!("{text}: node {beside} of its package is taken")));
    (Some(beside), format!("{text}; the other nodes of its package are next"))
}

/// The limits of host and device memory if the spec sets none.
pub(super) fn usual_limit(engine: EngineKind) -> Limit {
    // A user's own program must not be ended because of a limit that was never requested.
    if engine == EngineKind::Command { Limit::None } else { Limit::Auto }
}

/// Bytes of host memory of all NUMA nodes; `None` if it is not known of each.
pub fn machine_bytes(topology: &Topology) -> Option<u64> {
    let nodes = topology.numa.iter().filter(|node| !node.gpu_memory);
    nodes.map(|node| node.memory_bytes).sum::<Option<u64>>().filter(|bytes| *bytes > 0)
}

/// Host memory of one worker.
///
/// `sharers[node]` counts the workers that use a node. The cgroup's limit is shared by all.
pub(super) fn host_limit(
    topology: &Topology,
    mems: Option<&NodeSet>,
    sharers: &dyn Fn(u32) -> usize,
    workers: usize,
    cgroup_bytes: Option<u64>,
    limit: Limit,
) -> (Option<u64>, String) {
    let machine = machine_bytes(topology);
    let all = workers.max(1) as u64;
    match limit {
        Limit::None => (None, "no limit is asked for".to_owned()),
        Limit::Size(crate::units::Size::Bytes(bytes)) => (Some(bytes), "as asked for".to_owned()),
        Limit::Size(size) => match machine {
            Some(bytes) => (Some(size.of(bytes)), format!("{size} of the machine's memory")),
            None => {
                (None, "the machine's memory is unknown, so a fraction of it is too".to_owned())
            }
        },
        Limit::Auto => {
            let by_node = mems.and_then(|mems| node_share(topology, mems, sharers));
            let (share, reason) = match by_node {
                Some(bytes) => (Some(bytes), "its share of the memory of its NUMA nodes"),
                None => match machine {
                    Some(bytes) => (Some(bytes / all), "its share of the machine's memory"),
                    None => (None, "the machine's memory is unknown"),
                },
            };
            match (share, cgroup_bytes.map(|bytes| bytes / all)) {
                (Some(share), Some(cap)) if cap < share => {
                    (Some(cap), "its share of the cgroup's memory limit".to_owned())
                }
                (None, Some(cap)) => {
                    (Some(cap), "its share of the cgroup's memory limit".to_owned())
                }
                (share, _) => (share, reason.to_owned()),
            }
        }
    }
}

fn node_share(topology: &Topology, mems: &NodeSet, sharers: &dyn Fn(u32) -> usize) -> Option<u64> {
    let mut total = 0u64;
    for id in mems.iter() {
        let node = topology.numa.iter().find(|node| node.id.0 == id)?;
        total += node.memory_bytes? / sharers(id).max(1) as u64;
    }
    (total > 0).then_some(total)
}

/// Device memory of one of `workers` workers on a GPU (or instance) of `memory_bytes`.
pub(super) fn device_limit(
    memory_bytes: Option<u64>,
    workers: u32,
    limit: Limit,
) -> (Option<u64>, String) {
    let each = |whole: u64| whole / u64::from(workers.max(1));
    let shared = if workers > 1 { format!(", shared by {workers} workers") } else { String::new() };
    match (limit, memory_bytes) {
        (Limit::None, _) => (None, "no limit is asked for".to_owned()),
        (Limit::Size(crate::units::Size::Bytes(bytes)), _) => {
            (Some(bytes), "as asked for".to_owned())
        }
        (_, None) => {
            (None, "the GPU tells no memory of its own (on GB10 it is the host's)".to_owned())
        }
        (Limit::Auto, Some(whole)) => {
            let bytes = crate::units::Size::Fraction(DEVICE_SHARE).of(each(whole));
            (Some(bytes), format!("{DEVICE_SHARE} of this GPU's own memory{shared}"))
        }
        (Limit::Size(size), Some(whole)) => {
            (Some(size.of(each(whole))), format!("{size} of this GPU's own memory{shared}"))
        }
    }
}
