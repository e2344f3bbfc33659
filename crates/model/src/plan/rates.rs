//! The expected bandwidth between workers, before anything is measured.
//!
//! Does not estimate latency. Ignores NICs between workers, which are all on one machine.
//!
//! *Invariant:* only links that the topology describes get a rate; other pairs are left out.

use std::collections::BTreeMap;

use super::context::{Chosen, Context, Slot};
use crate::topology::{Device, Gpu, LinkKind, Nic, PcieLink, Topology};

/// Bandwidth of the host's shared memory between two processes, in 10⁹ bytes per second.
const SHARED_MEMORY: f64 = 10.0;

/// Bandwidth of a PCIe link of unknown generation, taken as the third, in 10⁹ bytes per second.
const PCIE: f64 = 12.0;

/// The usable part of a PCIe link's raw bandwidth: 12.5 of 15.75 GB/s, 26 of 31.5, 55 of 63.
const PCIE_SHARE: f64 = 0.83;

/// Upper limit between NUMA nodes: what the interconnect of a common server leaves.
const BETWEEN_NUMA_NODES: f64 = 10.0;

/// Bandwidth from each worker to each other, in 10⁹ bytes per second.
pub(super) fn between(context: &Context<'_>) -> BTreeMap<String, BTreeMap<String, f64>> {
    let others = |from: &Slot<'_>| {
        let others = context.slots.iter().filter(|to| to.name != from.name);
        others.filter_map(|to| Some((to.name.clone(), rate(context, from, to)?))).collect()
    };
    context.slots.iter().map(|from| (from.name.clone(), others(from))).collect()
}

fn rate(context: &Context<'_>, from: &Slot<'_>, to: &Slot<'_>) -> Option<f64> {
    let (Some(a), Some(b)) = (&from.chosen, &to.chosen) else { return Some(SHARED_MEMORY) };
    if a.mig.is_some() || b.mig.is_some() || a.gpu.index == b.gpu.index {
        // Instances have no CUDA IPC; two processes on one GPU copy within it, at some distance
        // from any link.
        return Some(SHARED_MEMORY);
    }
    let ends = (Device::Gpu(a.gpu.index), Device::Gpu(b.gpu.index));
    let kind = context.topology.links.between(ends.0, ends.1)?;
    Some(between_gpus(a.gpu, b.gpu, kind))
}

fn between_gpus(a: &Gpu, b: &Gpu, kind: LinkKind) -> f64 {
    let pcie = pcie_of(a).min(pcie_of(b));
    match kind {
        LinkKind::X => SHARED_MEMORY,
        LinkKind::Nv(links) => f64::from(links) * per_nvlink(a).min(per_nvlink(b)),
        LinkKind::Pix | LinkKind::Pxb | LinkKind::Phb => pcie,
        LinkKind::Node | LinkKind::Sys => pcie.min(BETWEEN_NUMA_NODES),
    }
}

/// A pair of GPUs that may access each other's memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Peers {
    /// The majors of their compute capabilities, if known.
    pub(super) majors: [Option<u32>; 2],
    /// The bandwidth of the link between them, in 10⁹ bytes per second.
    pub(super) gb_per_s: f64,
}

/// All such pairs among the chosen GPUs.
pub(super) fn between_peers(topology: &Topology, chosen: &[Chosen<'_>]) -> Vec<Peers> {
    let links = topology.known_links();
    let whole = || chosen.iter().filter(|one| one.mig.is_none()).map(|one| one.gpu);
    let pairs = whole().flat_map(|a| whole().map(move |b| (a, b)));
    let peers = pairs.filter(|(a, b)| {
        a.index < b.index && a.peers.as_ref().is_none_or(|peers| peers.contains(&b.index))
    });
    let rate = |(a, b): (&Gpu, &Gpu)| {
        let kind = links.between(Device::Gpu(a.index), Device::Gpu(b.index))?;
        let majors = [a, b].map(|gpu| gpu.compute_capability.map(|known| known.major));
        Some(Peers { majors, gb_per_s: between_gpus(a, b, kind) })
    };
    peers.filter_map(rate).collect()
}

/// Usable bandwidth of one NVLink by the GPU's generation, in 10⁹ bytes per second; less where the
/// link is slower than its generation's, as those of graphics cards are.
fn per_nvlink(gpu: &Gpu) -> f64 {
    let (usable, whole) = match gpu.compute_capability.map(|capability| capability.major) {
        Some(6) => (18.0, 20.0),
        Some(10..) => (40.0, 50.0),
        _ => (20.0, 25.0),
    };
    let slowest = gpu.slowest_nvlink_gb_per_s();
    usable * slowest.map_or(1.0, |rate| (rate / whole).min(1.0))
}

/// Bandwidth between a GPU and a NIC at this distance, ports not counted, in 10⁹ bytes per second.
pub(super) fn to_nic(gpu: &Gpu, nic: &Nic, kind: LinkKind) -> f64 {
    let way = pcie_of(gpu).min(carried(nic.pcie.as_ref()).unwrap_or(f64::INFINITY));
    match kind {
        LinkKind::Node | LinkKind::Sys => way.min(BETWEEN_NUMA_NODES),
        _ => way,
    }
}

fn pcie_of(gpu: &Gpu) -> f64 {
    carried(gpu.pcie.as_ref()).unwrap_or(PCIE)
}

/// Usable bandwidth of a PCIe link; `None` if its speed or width is unknown.
fn carried(link: Option<&PcieLink>) -> Option<f64> {
    let link = link?;
    let speed = link.max_gt_per_s.or(link.gt_per_s)?;
    let width = link.max_width.or(link.width)?;
    Some(PCIE_SHARE * speed / 8.0 * f64::from(width))
}
