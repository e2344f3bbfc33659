//! Combines the answers of NVML, hwloc and the kernel into one topology.
//!
//! Reads only the PCI positions of devices that the sources have listed.
//!
//! *Invariant:* a device's position comes from its own PCI address, never from another number.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use super::hwloc::Processors;
use super::locality::{HostNodes, NvmlAffinity};
use super::nvml::{Findings, Seen};
use super::nvml_library::Absent;
use super::sysfs::{Host, Place, Role};
use cuda_cluster_model::cpuset::CpuSet;
use cuda_cluster_model::ids::{GpuIndex, NumaId, PciAddress};
use cuda_cluster_model::topology::{
    Bridge, Device, DmaFunction, Gpu, LinkKind, Nic, Note, NumaNode, NvLinkPeer, Topology, VERSION,
};

/// The topology of the machine.
pub(super) fn topology(
    mut findings: Findings,
    processors: Option<Processors>,
    mut host: Host,
) -> Topology {
    let mut notes = std::mem::take(&mut findings.notes);
    notes.append(&mut host.notes);
    notes.extend(driver_notes(&findings, &host));
    if processors.is_none() {
        let text = "hwloc cannot load this machine: cores and packages are unknown";
        notes.push(Note::new("hwloc", text));
    }
    if host.allowed.is_none() {
        notes
            .push(Note::new("allowed", "the kernel does not tell which CPUs this process may use"));
    }

    let processors = processors.unwrap_or_default();
    let numa = numa_nodes(&processors, &mut findings.gpus, &host);
    let near = HostNodes::new(&numa);
    let mut bridges = Bridges::default();
    resolve_far_ends(&mut findings.gpus, &host);
    notes.extend(findings.gpus.iter().filter_map(unknown_far_ends));
    let nvswitch = nvswitches(&findings.gpus, &host);
    let gpus = findings.gpus.into_iter();
    let gpus = gpus.map(|seen| placed_gpu(seen, &host, &near, &mut bridges, &mut notes)).collect();
    let nics = std::mem::take(&mut host.nics).into_iter();
    let nics = nics.map(|nic| placed_nic(nic, &host, &near, &mut bridges, &mut notes)).collect();

    let mut machine = Topology {
        version: VERSION,
        name: host.name,
        source: Some("live".to_owned()),
        driver: findings.driver,
        cuda: findings.cuda,
        gpus,
        nics,
        bridges: bridges.with_packages(&numa),
        numa,
        cores: processors.cores,
        nvswitch,
        allowed: host.allowed,
        notes,
        ..Topology::default()
    };
    machine.links = machine.derive_links();
    paths_by_nvml(&mut machine, &findings.paths);
    machine.notes.extend(refused_nvlinks(&machine));
    machine
}

/// Notes NVLinks that are up and cannot be used, about the GPUs that most pairs have in common.
fn refused_nvlinks(machine: &Topology) -> Vec<Note> {
    let mut pairs = machine.refused_nvlinks();
    let mut notes = Vec::new();
    while !pairs.is_empty() {
        let count = |gpu: GpuIndex| pairs.iter().filter(|(a, b)| *a == gpu || *b == gpu).count();
        let all = machine.gpus.iter().map(|gpu| gpu.index);
        let Some(gpu) = all.max_by_key(|gpu| (count(*gpu), Reverse(*gpu))) else { break };
        let others: Vec<GpuIndex> = pairs
            .extract_if(.., |(a, b)| *a == gpu || *b == gpu)
            .map(|(a, b)| if a == gpu { b } else { a })
            .collect();
        let named: Vec<String> = others.iter().map(|gpu| format!("GPU{gpu}")).collect();
        let text = format!(
            "the driver refuses peer access over NVLinks that are up, to {}: is \
             nvidia-fabricmanager well?",
            some_of(&named)
        );
        notes.push(Note::new(format!("GPU{gpu}"), text));
    }
    notes
}

/// Uses NVML's answers for pairs of GPUs that the PCI tree does not join.
///
/// Sandboxes have no sysfs, and virtual machines may give each GPU a root of its own, so that only
/// NUMA nodes are left to go by. The driver knows of switches that the tree does not show.
fn paths_by_nvml(machine: &mut Topology, paths: &[(GpuIndex, GpuIndex, LinkKind)]) {
    let numa: BTreeMap<GpuIndex, NumaId> =
        machine.gpus.iter().filter_map(|gpu| Some((gpu.index, gpu.numa?))).collect();
    let apart = |a, b| matches!((numa.get(a), numa.get(b)), (Some(a), Some(b)) if a != b);
    let (mut taken, mut nearer, mut contradicted) = (0, Vec::new(), Vec::new());
    for (a, b, kind) in paths {
        let ends = (Device::Gpu(*a), Device::Gpu(*b));
        match machine.links.between(ends.0, ends.1) {
            None => taken += 1,
            Some(ours @ (LinkKind::Node | LinkKind::Sys)) if *kind <= LinkKind::Phb => {
                nearer.push(format!("{} to {} {kind} instead of {ours}", ends.0, ends.1));
            }
            Some(_) => continue,
        }
        machine.links.set(ends.0, ends.1, *kind);
        if *kind <= LinkKind::Node && apart(a, b) {
            contradicted.push(format!("{} to {}", ends.0, ends.1));
        }
    }
    let mut note = |text| machine.notes.push(Note::new("links", text));
    if taken > 0 {
        note(format!("the PCI paths of {taken} pairs of GPUs are those that NVML names"));
    }
    if !nearer.is_empty() {
        let pairs = some_of(&nearer);
        note(format!("NVML names nearer PCI paths than sysfs shows, which are taken: {pairs}"));
    }
    if !contradicted.is_empty() {
        let pairs = some_of(&contradicted);
        note(format!("NVML's PCI paths stand, though the NUMA nodes differ: {pairs}"));
    }
}

/// The first few of many, and how many there are more.
fn some_of(all: &[String]) -> String {
    const SHOWN: usize = 3;
    let more = all.len().saturating_sub(SHOWN);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{}{more}", all.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", "))
}

/// Notes a missing driver, and GPUs on the bus that the driver does not serve.
fn driver_notes(findings: &Findings, host: &Host) -> Vec<Note> {
    let listed: BTreeSet<PciAddress> =
        findings.gpus.iter().filter_map(|seen| seen.gpu.pci).collect();
    let on_bus = || host.pci.gpus().filter(|(place, _)| !listed.contains(place));
    let Some(absent) = findings.absent else {
        let unserved = on_bus().filter_map(|(place, driver)| match driver {
            // The driver's own list distinguishes a failed GPU from one that is hidden from a
            // container.
            Some("nvidia") => host.driver_gpus.contains(&place).then(|| {
                Note::new("nvml", format!("NVML does not list {place}, though the driver has it"))
            }),
            Some(other) => Some(Note::new(
                "nvml",
                format!("{place} is an NVIDIA GPU that the driver {other} holds"),
            )),
            None => Some(Note::new("nvml", format!("{place} is an NVIDIA GPU without a driver"))),
        });
        return unserved.collect();
    };
    let why = match absent {
        Absent::NotAsked => return Vec::new(),
        Absent::NoLibrary => "there is no NVIDIA driver: no libnvidia-ml.so.1 was found",
        Absent::NotLoaded => "there is no NVIDIA driver: its kernel module is not loaded",
    };
    let places: Vec<String> = on_bus().map(|(place, _)| place.to_string()).collect();
    let text = match places.len() {
        0 => why.to_owned(),
        count => format!("{why}, but {count} NVIDIA GPUs are on the bus ({})", places.join(", ")),
    };
    vec![Note::new("nvml", text)]
}

/// hwloc's membership with the kernel's sizes; marks nodes that are GPU memory.
fn numa_nodes(processors: &Processors, gpus: &mut [Seen], host: &Host) -> Vec<NumaNode> {
    let kernel = |id: NumaId| host.nodes.iter().find(|node| node.id == id);
    let hwloc_ids = processors.cpus.iter().flat_map(|(_, nodes)| nodes.iter()).map(NumaId);
    let ids: BTreeSet<NumaId> = hwloc_ids.chain(host.nodes.iter().map(|node| node.id)).collect();
    // The package that contains all of a node's CPUs; for a memory-only node, of the CPUs near it.
    let package = |cpus: &CpuSet| {
        let around = |(_, all): &&(u32, CpuSet)| !cpus.is_empty() && cpus.is_subset(all);
        processors.packages.iter().find(around).map(|(id, _)| *id)
    };
    let mut nodes: Vec<NumaNode> = ids
        .into_iter()
        .map(|id| {
            let members = processors.cpus.iter().filter(|(_, nodes)| nodes.contains(id.0));
            let members: CpuSet = members.map(|(cpu, _)| *cpu).collect();
            // hwloc reports a memory-only node for the CPUs that are near it.
            let cpus = match kernel(id) {
                Some(node) if node.cpus.is_empty() || members.is_empty() => node.cpus.clone(),
                _ => members.clone(),
            };
            let package = package(&members.union(&cpus));
            let memory_bytes = kernel(id).and_then(|node| node.memory_bytes);
            NumaNode { id, package, cpus: Some(cpus), memory_bytes, gpu_memory: false }
        })
        .collect();
    for seen in gpus {
        let told = seen.gpu.memory_numa.or_else(|| host.gpu_memory.get(&seen.gpu.pci?).copied());
        let node = nodes.iter_mut().find(|node| Some(node.id) == told);
        // A node with CPUs is host memory, whatever the driver reports.
        let node = node.filter(|node| node.cpus.as_ref().is_none_or(CpuSet::is_empty));
        seen.gpu.memory_numa = node.map(|node| {
            node.gpu_memory = true;
            node.id
        });
    }
    nodes
}

/// Resolves NVLink ends for which NVML gave only a PCI address.
fn resolve_far_ends(gpus: &mut [Seen], host: &Host) {
    for seen in gpus {
        for link in seen.gpu.nvlinks.iter_mut().filter(|link| link.peer == NvLinkPeer::Unknown) {
            let Some(remote) = seen.remotes.iter().find(|remote| remote.link == link.link) else {
                continue;
            };
            link.peer = match host.pci.role(remote.pci) {
                Some(Role::Gpu) => NvLinkPeer::Gpu(remote.pci),
                Some(Role::NvSwitch) => NvLinkPeer::Switch,
                Some(Role::Cpu) => NvLinkPeer::Cpu,
                Some(Role::Other) | None => NvLinkPeer::Unknown,
            };
        }
    }
}

/// A note if active NVLinks have unknown ends, so that they connect no known devices.
fn unknown_far_ends(seen: &Seen) -> Option<Note> {
    let links = seen.gpu.nvlinks.iter();
    let unknown = links.filter(|link| link.active && link.peer == NvLinkPeer::Unknown).count();
    (unknown > 0).then(|| {
        let text = format!("NVML does not tell what {unknown} of its NVLinks end in");
        Note::new(format!("GPU{}", seen.gpu.index), text)
    })
}

/// Counts the NVSwitches at which NVLinks end; `None` if an end is unknown.
///
/// The addresses at the far ends have priority: switches of other machines (NVL72) are not on this
/// bus.
fn nvswitches(gpus: &[Seen], host: &Host) -> Option<u32> {
    let mut places = BTreeSet::new();
    let mut hidden = false;
    for seen in gpus {
        for link in &seen.gpu.nvlinks {
            let remote = seen.remotes.iter().find(|remote| remote.link == link.link);
            match link.peer {
                NvLinkPeer::Switch => {
                    hidden |= remote.is_none();
                    places.extend(remote.map(|remote| remote.pci));
                }
                NvLinkPeer::Unknown if link.active => return None,
                _ => {}
            }
        }
    }
    let on_bus = || Some(host.pci.nvswitches()).filter(|count| *count > 0);
    let count = if hidden { on_bus()? } else { places.len() };
    u32::try_from(count).ok().filter(|_| !gpus.is_empty())
}

fn placed_gpu(
    seen: Seen,
    host: &Host,
    near: &HostNodes<'_>,
    bridges: &mut Bridges,
    notes: &mut Vec<Note>,
) -> Gpu {
    let about = format!("GPU{}", seen.gpu.index);
    let place = seen.gpu.pci.and_then(|address| host.pci.place(address));
    let affinity = NvmlAffinity { cpus: seen.cpus.as_ref(), nodes: seen.nodes.as_ref() };
    let locality = near.of_gpu(&about, place.as_ref(), affinity, notes);
    let place = place.unwrap_or_default();
    notes.extend(slow_link(&about, &place, Idle::LowersSpeed));
    Gpu {
        numa: locality.numa,
        numa_set: locality.numa_set,
        cpus: locality.cpus,
        pcie: place.link.or(seen.pcie),
        parent: bridges.add(place.above),
        ..seen.gpu
    }
}

fn placed_nic(
    nic: Nic,
    host: &Host,
    near: &HostNodes<'_>,
    bridges: &mut Bridges,
    notes: &mut Vec<Note>,
) -> Nic {
    let dma = nic.dma.map(|dma| {
        let place = dma.pci.and_then(|address| host.pci.place(address)).unwrap_or_default();
        DmaFunction { parent: bridges.add(place.above), ..dma }
    });
    let nic = Nic { dma, ..nic };
    let Some(place) = nic.pci.and_then(|address| host.pci.place(address)) else { return nic };
    notes.extend(slow_link(&nic.name, &place, Idle::KeepsSpeed));
    let numa = near.of_device(&place);
    if numa.is_none() {
        let text = match place.numa {
            None => "sysfs does not tell its NUMA node".to_owned(),
            Some(node) => format!("sysfs puts it on NUMA node {node}, which is a GPU's memory"),
        };
        notes.push(Note::new(&nic.name, text));
    }
    Nic { numa, pcie: place.link, parent: bridges.add(place.above), ..nic }
}

/// How an idle device uses its PCIe link.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Idle {
    /// GPUs reduce the speed when idle; only fewer lanes and a slower slot are a loss.
    LowersSpeed,
    /// NICs keep the speed; any speed below the best is a loss.
    KeepsSpeed,
}

/// A note if a device's PCIe link is slower than the device supports.
fn slow_link(about: &str, place: &Place, idle: Idle) -> Option<Note> {
    let link = place.link?;
    let (now, lanes) = (link.gt_per_s?, link.width?);
    let (best, best_lanes) = (link.max_gt_per_s?, link.max_width?);
    let slot = place.slot.and_then(|slot| slot.max_gt_per_s).filter(|slot| *slot < best);
    let slow = now < best && idle == Idle::KeepsSpeed;
    if lanes >= best_lanes && slot.is_none() && !slow {
        return None;
    }
    let mut text = format!(
        "its PCIe link runs at {now} GT/s ×{lanes} now; it can do {best} GT/s ×{best_lanes}"
    );
    if let Some(slot) = slot {
        text.push_str(&format!(", its slot {slot} GT/s"));
    }
    if now < best && idle == Idle::LowersSpeed {
        text.push_str(" (an idle GPU lowers the speed, not the lanes)");
    }
    Some(Note::new(about, text))
}

/// The bridges above all devices, each once, parents first.
#[derive(Default)]
struct Bridges {
    bridges: Vec<Bridge>,
}

impl Bridges {
    /// Adds the bridges above a device and returns the nearest one's id.
    fn add(&mut self, above: Vec<Bridge>) -> Option<String> {
        let nearest = above.last().map(|bridge| bridge.id.clone());
        for bridge in above {
            if !self.bridges.iter().any(|known| known.id == bridge.id) {
                self.bridges.push(bridge);
            }
        }
        nearest
    }

    /// All bridges, with the packages of the host bridges' NUMA nodes.
    ///
    /// Other bridges have a NUMA node of their own only if it differs from that of their parent.
    fn with_packages(self, numa: &[NumaNode]) -> Vec<Bridge> {
        let above = |bridge: &Bridge| {
            let parent = bridge.parent.as_ref()?;
            self.bridges.iter().find(|known| known.id == *parent)?.numa
        };
        let package = |bridge: &Bridge| {
            let id = bridge.numa.filter(|_| bridge.parent.is_none())?;
            numa.iter().find(|node| node.id == id)?.package
        };
        let finished = self.bridges.iter().map(|bridge| Bridge {
            numa: bridge.numa.filter(|node| above(bridge) != Some(*node)),
            package: package(bridge),
            ..bridge.clone()
        });
        finished.collect()
    }
}
