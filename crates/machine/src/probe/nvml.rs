//! GPUs as reported by NVML: identity, position, memory, MIG instances, peer access.
//!
//! Does not determine locality (see `locality`) or the PCI tree (see `sysfs`). `nvlink` reads
//! NVLinks.
//!
//! *Invariant:* a GPU that NVML lists is in the answer or in a note.

use std::collections::BTreeSet;

use nvml_wrapper::Device;
use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::{P2pCapabilitiesIndex, P2pStatus, TopologyLevel};
use nvml_wrapper::error::NvmlError;

use super::evidence::{self, States};
use super::fabric;
use super::nvlink::{self, Remote};
use super::nvml_library::{self, Absent, DriverFault, Libraries, Opened};
use super::questions::Questions;
use cuda_cluster_model::cpuset::{CpuSet, IdSet, NodeSet};
use cuda_cluster_model::ids::{GpuIndex, GpuUuid, NumaId, PciAddress};
use cuda_cluster_model::topology::{
    ComputeCapability, ComputeMode, Gpu, LinkKind, MigInstance, Note, PcieLink,
};

/// NVML's answers.
#[derive(Debug, Default)]
pub(super) struct Findings {
    /// Why there is no driver; `None` if there is one.
    pub(super) absent: Option<Absent>,
    /// Driver version.
    pub(super) driver: Option<String>,
    /// Highest CUDA version that the driver supports.
    pub(super) cuda: Option<String>,
    /// GPUs that answer, in NVML order.
    pub(super) gpus: Vec<Seen>,
    /// PCIe paths between pairs of GPUs, where the driver reports them.
    pub(super) paths: Vec<(GpuIndex, GpuIndex, LinkKind)>,
    /// What could not be read.
    pub(super) notes: Vec<Note>,
    /// The state of each GPU, if that is asked for.
    pub(super) states: States,
}

/// NVML's answers about a GPU.
#[derive(Debug)]
pub(super) struct Seen {
    /// Its properties, without locality and PCI ancestry.
    pub(super) gpu: Gpu,
    /// Host CPUs near it; empty if NVML returns an empty mask.
    pub(super) cpus: Option<CpuSet>,
    /// Host NUMA nodes near it.
    pub(super) nodes: Option<NodeSet>,
    /// Its PCIe link.
    pub(super) pcie: Option<PcieLink>,
    /// Far ends of its NVLinks, where NVML gives their addresses.
    pub(super) remotes: Vec<Remote>,
}

/// Queries NVML about every GPU, on request about its state, too.
pub(super) fn look(libraries: &Libraries, states: bool) -> Result<Findings, DriverFault> {
    let nvml = match nvml_library::open(libraries)? {
        Opened::Absent(why) => return Ok(Findings { absent: Some(why), ..Findings::default() }),
        Opened::Working(nvml) => nvml,
    };
    let failed = |call| move |source| DriverFault::Nvml { call, source };
    let mut findings = Findings {
        driver: nvml.sys_driver_version().ok(),
        cuda: nvml
            .sys_cuda_driver_version()
            .ok()
            .map(|v| format!("{}.{}", v / 1000, v % 1000 / 10)),
        ..Findings::default()
    };
    let count = nvml.device_count().map_err(failed("nvmlDeviceGetCount"))?;
    let mut devices = Vec::new();
    for index in (0..count).map(GpuIndex) {
        let mut asked = Questions::about(format!("GPU{index}"), &mut findings.notes);
        match device(&nvml, index, &mut asked) {
            Ok((device, seen)) => {
                devices.push(device);
                findings.gpus.push(seen);
            }
            Err(error) => asked.note(format!("left out: {error}")),
        }
    }
    if states {
        let of = |(device, seen): (&Device<'_>, &Seen)| (seen.gpu.index.0, evidence::state(device));
        findings.states.gpus = devices.iter().zip(&findings.gpus).map(of).collect();
        findings.states.confidential = evidence::confidential(&nvml);
    }
    peer_access(&devices, &mut findings.gpus);
    findings.paths = paths(&devices, &findings.gpus);
    Ok(findings)
}

fn device<'nvml>(
    nvml: &'nvml Nvml,
    index: GpuIndex,
    asked: &mut Questions<'_>,
) -> Result<(Device<'nvml>, Seen), NvmlError> {
    let device = nvml.device_by_index(index.0)?;
    let uuid = asked.must("UUID", device.uuid())?;
    let pci = asked.must("PCI address", device.pci_info())?;
    let capability = asked.must("compute capability", device.cuda_compute_capability())?;
    // A GPU that has no memory of its own but the host's (GB10) does not support the question;
    // dask-cuda knows such GPUs by the same answer.
    let memory = match device.memory_info() {
        Err(NvmlError::NotSupported) => None,
        told => asked.must("memory", told)?,
    };
    let mig_mode = asked.may("MIG mode", device.mig_mode())?.map(|mode| mode.current == 1);
    let memory_bytes = memory.map(|memory| memory.total);
    let mig = match mig_mode {
        Some(true) => mig_instances(&device, memory_bytes, asked)?,
        _ => Vec::new(),
    };
    let wires = nvlink::read(&device, asked)?;
    let gpu = Gpu {
        index,
        uuid: uuid.and_then(|text| parsed(&text, asked)),
        name: asked.must("name", device.name())?,
        pci: pci.and_then(|pci| parsed::<PciAddress>(&pci.bus_id, asked)),
        memory_bytes,
        bar1_bytes: asked.may("BAR1", device.bar1_memory_info())?.map(|bar1| bar1.total),
        compute_capability: capability.and_then(|capability| {
            let (major, minor) = (capability.major.try_into(), capability.minor.try_into());
            Some(ComputeCapability { major: major.ok()?, minor: minor.ok()? })
        }),
        memory_numa: asked.may("memory's NUMA node", device.numa_node_id())?.map(NumaId),
        compute_mode: asked.may("compute mode", device.compute_mode())?.map(compute_mode),
        mig,
        mig_mode,
        nvlinks: wires.links,
        c2c: wires.c2c,
        fabric: fabric::read(&device, asked)?,
        display: display(&device, asked)?,
        processes: processes(&device, asked)?,
        ..Gpu::default()
    };
    let cpus = device.cpu_affinity(AFFINITY_WORDS).ok().map(|words| set(&words));
    let nodes = device.memory_affinity(NODE_WORDS, NEAREST_NODE).ok().map(|words| set(&words));
    let remotes = wires.remotes;
    let pcie = pcie(&device);
    Ok((device, Seen { gpu, cpus, nodes, pcie, remotes }))
}

/// The mode of threads, which no driver has had since CUDA 8, is that of processes.
fn compute_mode(mode: nvml_wrapper::enum_wrappers::device::ComputeMode) -> ComputeMode {
    use nvml_wrapper::enum_wrappers::device::ComputeMode as Nvml;
    match mode {
        Nvml::Default => ComputeMode::Default,
        Nvml::ExclusiveThread | Nvml::ExclusiveProcess => ComputeMode::ExclusiveProcess,
        Nvml::Prohibited => ComputeMode::Prohibited,
    }
}

/// Room for 8192 CPUs, the kernel's largest `NR_CPUS`.
const AFFINITY_WORDS: usize = 128;
/// Room for 1024 NUMA nodes, the kernel's largest `MAX_NUMNODES`.
const NODE_WORDS: usize = 16;
/// `NVML_AFFINITY_SCOPE_NODE`.
const NEAREST_NODE: u32 = 0;

/// Decodes NVML's masks: lowest word first, lowest bit first.
fn set<Kind>(words: &[u64]) -> IdSet<Kind> {
    let bits = (0u32..).step_by(64).zip(words);
    bits.flat_map(|(base, word)| {
        (0..64).filter(move |bit| word & (1 << bit) != 0).map(move |bit| base + bit)
    })
    .collect()
}

fn parsed<T: std::str::FromStr<Err = cuda_cluster_model::ids::IdError>>(
    text: &str,
    asked: &mut Questions<'_>,
) -> Option<T> {
    text.parse().inspect_err(|error| asked.note(format!("NVML says {error}"))).ok()
}

/// Whether a display is connected or active. Newer drivers no longer report it for headless GPUs.
fn display(device: &Device<'_>, asked: &mut Questions<'_>) -> Result<Option<bool>, NvmlError> {
    let connected = asked.may("display", device.is_display_connected())?;
    let active = asked.may("display", device.is_display_active())?;
    Ok(connected.into_iter().chain(active).reduce(|a, b| a || b))
}

/// Process ids with a compute context. Those in other PID namespaces are not reported.
fn processes(device: &Device<'_>, asked: &mut Questions<'_>) -> Result<Vec<u32>, NvmlError> {
    let told = asked.may("processes", device.running_compute_processes())?;
    let mut ids: Vec<u32> = told.into_iter().flatten().map(|process| process.pid).collect();
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

fn mig_instances(
    device: &Device<'_>,
    whole_bytes: Option<u64>,
    asked: &mut Questions<'_>,
) -> Result<Vec<MigInstance>, NvmlError> {
    let slots = asked.must("number of MIG instances", device.mig_device_count())?.unwrap_or(0);
    let mut instances = Vec::new();
    for slot in 0..slots {
        // Slots may be empty: `NVML_ERROR_NOT_FOUND`.
        let told = asked.may("MIG instances", device.mig_device_by_index(slot))?;
        let Some(mig) = told else { continue };
        let uuid = asked.must("MIG instance's UUID", mig.uuid())?;
        let Some(uuid) = uuid.and_then(|text| parsed::<GpuUuid>(&text, asked)) else { continue };
        let attributes = asked.may("MIG instance's size", mig.attributes())?;
        let memory = asked.may("MIG instance's memory", mig.memory_info())?;
        let name = asked.may("MIG instance's name", mig.name())?;
        let named = name.as_deref().and_then(|name| name.rsplit_once("MIG ")).map(|(_, p)| p);
        let sized = || {
            let sizes = attributes.as_ref()?;
            Some(mig_profile(
                sizes.compute_instance_slice_count,
                sizes.gpu_instance_slice_count,
                sizes.memory_size_mb << 20,
                whole_bytes?,
            ))
        };
        let Some(profile) = named.map(str::to_owned).or_else(sized) else {
            asked.note(format!("NVML does not tell the profile of {uuid}; it is left out"));
            continue;
        };
        let mebibytes = attributes.as_ref().map(|sizes| sizes.memory_size_mb);
        let memory_bytes = memory.map(|memory| memory.total).or(mebibytes.map(|mib| mib << 20));
        instances.push(MigInstance { uuid, profile, memory_bytes });
    }
    Ok(instances)
}

/// A MIG profile's name from its sizes: eighths of the GPU's memory, and compute slices if they are
/// fewer than the instance has.
fn mig_profile(compute: u32, slices: u32, bytes: u64, whole_bytes: u64) -> String {
    let eighths = (bytes * 8).div_ceil(whole_bytes.max(1));
    let gigabytes = (eighths * whole_bytes.div_ceil(1 << 30) + 4) / 8;
    if compute == slices {
        format!("{slices}g.{gigabytes}gb")
    } else {
        format!("{compute}c.{slices}g.{gigabytes}gb")
    }
}

/// The GPU's PCIe link; `None` if the driver reports nothing about it.
fn pcie(device: &Device<'_>) -> Option<PcieLink> {
    let link = PcieLink {
        gt_per_s: device.current_pcie_link_gen().ok().and_then(transfer_rate),
        width: device.current_pcie_link_width().ok().filter(|lanes| *lanes > 0),
        max_gt_per_s: device.max_pcie_link_gen().ok().and_then(transfer_rate),
        max_width: device.max_pcie_link_width().ok().filter(|lanes| *lanes > 0),
    };
    (link != PcieLink::default()).then_some(link)
}

/// GT/s of a PCIe generation.
fn transfer_rate(generation: u32) -> Option<f64> {
    Some(match generation {
        1 => 2.5,
        2 => 5.0,
        3 => 8.0,
        4 => 16.0,
        5 => 32.0,
        6 => 64.0,
        _ => return None,
    })
}

/// The nearest common ancestor of each pair of GPUs, as `nvidia-smi topo -m` shows it with the same
/// query (`nvmlGpuTopologyLevel_t`).
fn paths(devices: &[Device<'_>], seen: &[Seen]) -> Vec<(GpuIndex, GpuIndex, LinkKind)> {
    let mut paths = Vec::new();
    for (a, device) in devices.iter().enumerate() {
        for (b, other) in devices.iter().enumerate().skip(a + 1) {
            // The wrapper's method takes ownership of the other device.
            let Ok(other) = other.nvml().device_by_index(seen[b].gpu.index.0) else { continue };
            let kind = match device.topology_common_ancestor(other) {
                Ok(TopologyLevel::Internal | TopologyLevel::Single) => LinkKind::Pix,
                Ok(TopologyLevel::Multiple) => LinkKind::Pxb,
                Ok(TopologyLevel::HostBridge) => LinkKind::Phb,
                Ok(TopologyLevel::Node) => LinkKind::Node,
                Ok(TopologyLevel::System) => LinkKind::Sys,
                Err(_) => continue,
            };
            paths.push((seen[a].gpu.index, seen[b].gpu.index, kind));
        }
    }
    paths
}

/// Sets which GPUs can access each other's memory, where the driver reports it: UCX reads over
/// NVLink, and writes where there is none. Virtual machines' drivers may not know it of a pair,
/// which is no refusal; nothing is then known of its GPUs.
fn peer_access(devices: &[Device<'_>], seen: &mut [Seen]) {
    let mut untold = BTreeSet::new();
    for a in 0..devices.len() {
        for b in a + 1..devices.len() {
            let status = |kind| devices[a].p2p_status(&devices[b], kind);
            let Ok(read) = status(P2pCapabilitiesIndex::Read) else { continue };
            // A driver that does not tell of writing does not make a difference.
            let write = status(P2pCapabilitiesIndex::Write).unwrap_or(P2pStatus::Ok);
            let Some(access) = access(read, write) else {
                untold.extend([a, b]);
                continue;
            };
            for (one, other) in [(a, b), (b, a)] {
                let index = seen[other].gpu.index;
                let peers = seen[one].gpu.peers.get_or_insert_default();
                if access {
                    peers.push(index);
                }
            }
        }
    }
    for (at, seen) in seen.iter_mut().enumerate() {
        let peers = seen.gpu.peers.take().filter(|_| !untold.contains(&at));
        seen.gpu.peers = peers.map(|mut peers| {
            peers.sort_unstable();
            peers
        });
    }
}

/// Whether a pair has peer access; `None` if the driver does not know.
fn access(read: P2pStatus, write: P2pStatus) -> Option<bool> {
    match (read, write) {
        (P2pStatus::Ok, P2pStatus::Ok) => Some(true),
        (P2pStatus::Unknown, P2pStatus::Ok | P2pStatus::Unknown)
        | (P2pStatus::Ok, P2pStatus::Unknown) => None,
        _ => Some(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mig_profiles_are_named_as_nvidia_names_them() {
        const MIB: u64 = 1 << 20;
        let a100 = 40 * 1024 * MIB;
        assert_eq!(mig_profile(1, 1, 4864 * MIB, a100), "1g.5gb");
        assert_eq!(mig_profile(3, 3, 19968 * MIB, a100), "3g.20gb");
        assert_eq!(mig_profile(1, 3, 19968 * MIB, a100), "1c.3g.20gb");
        assert_eq!(mig_profile(7, 7, 81050 * MIB, 81559 * MIB), "7g.80gb");
        assert_eq!(mig_profile(1, 1, 16384 * MIB, 143_771 * MIB), "1g.18gb");
    }

    #[test]
    fn peer_access_that_the_driver_does_not_know_is_not_refused() {
        use P2pStatus::{ChipsetNotSupported, Ok, Unknown};
        assert_eq!(access(Ok, Ok), Some(true));
        for (read, write) in [(Unknown, Ok), (Ok, Unknown), (Unknown, Unknown)] {
            assert_eq!(access(read, write), None);
        }
        for (read, write) in [(ChipsetNotSupported, Unknown), (Ok, ChipsetNotSupported)] {
            assert_eq!(access(read, write), Some(false));
        }
    }

    #[test]
    fn an_affinity_mask_has_its_lowest_word_first() {
        assert_eq!(set::<cuda_cluster_model::cpuset::Cpu>(&[0b101, 1]).to_string(), "0,2,64");
    }
}
