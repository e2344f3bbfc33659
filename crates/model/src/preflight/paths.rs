//! The paths of pairs through PCIe: IOMMU, access control, widths, sizes, NUMA nodes.
//!
//! *Invariant:* a port is blamed only if it is on the path of a pair that is used.

use std::collections::{BTreeMap, BTreeSet};

use super::evidence::{Function, FunctionRole, Look};
use super::scene::{Found, Pair, Report, Scene, listed};
use super::{Check, Cost};
use crate::topology::{BridgeKind, Gpu, LinkKind, PcieLink};

pub(super) const CHECKS: &[Check] = &[
    Check {
        id: "iommu",
        title: "IOMMU on the path of a pair",
        looks_at: "iommu_group/type of each GPU and NIC in sysfs",
        consequence: "GPUs that reach each other over PCIe go through the IOMMU: slow, hanging, or \
                      with wrong bytes; CUDA does not support it on bare metal",
        source: "CUDA C++ Programming Guide, 'IOMMU on Linux'; NCCL user guide, troubleshooting; \
                 NVIDIA/nccl#2079, vllm-project/vllm#33041",
        remedy: "iommu=pt on the kernel's command line, or switch the IOMMU off in the firmware",
        cost: Cost::Restart,
        minor: false,
        judge: Some(iommu),
    },
    Check {
        id: "acs",
        title: "access control on the path of a pair",
        looks_at: "the ACS capability in the configuration space of each switch port between two \
                   devices (root alone may read it)",
        consequence: "what one device sends another under the same switch goes up to the CPU and \
                      back: a fraction of the bandwidth, and NCCL may hang",
        source: "NCCL user guide, troubleshooting, 'PCI Access Control Services'; NVIDIA/nccl#257, \
                 #667",
        remedy: "for port in PORTS; do setpci -s $port ECAP_ACS+0x6.w=0000; done, at each start of \
                 the machine; or switch ACS off in the firmware; neither where virtual machines \
                 have devices",
        cost: Cost::Root,
        minor: false,
        judge: Some(acs),
    },
    Check {
        id: "pcie-width",
        title: "lanes of PCIe links",
        looks_at: "current_link_width and max_link_width of GPUs, NICs and the ports above them; \
                   not the speed, which falls when a GPU is idle",
        consequence: "half the lanes are half the bandwidth to the CPU and to other devices",
        source: "open-mpi/hwloc#653, NVIDIA/nvbandwidth#6",
        remedy: "seat the card or its riser again; look at the slot's bifurcation in the firmware",
        cost: Cost::Hands,
        minor: false,
        judge: Some(width),
    },
    Check {
        id: "pcie-slot",
        title: "slots slower than what is in them",
        looks_at: "max_link_speed of GPUs and NICs and of the ports above them",
        consequence: "the device never has its own speed to the CPU and to other devices",
        source: "PCI Express Base Specification",
        remedy: "use a faster slot, or set the slot's speed in the firmware",
        cost: Cost::Hands,
        minor: false,
        judge: Some(slot),
    },
    Check {
        id: "pcie-payload",
        title: "payload sizes of PCIe",
        looks_at: "MaxPayloadSize of GPUs and NICs in the configuration space (root alone)",
        consequence: "the one with the smaller payload needs more packets for the same bytes",
        source: "Azure's node health checks, MaxPayload",
        remedy: "pci=pcie_bus_perf on the kernel's command line, or the firmware's setting",
        cost: Cost::Restart,
        minor: false,
        judge: Some(payload),
    },
    Check {
        id: "pcie-read-request",
        title: "read requests of NICs",
        looks_at: "MaxReadRequest of RDMA adapters in the configuration space (root alone)",
        consequence: "an adapter that asks for less at once reads memory more slowly",
        source: "OCI's node health checks, check_pcie_max_read",
        remedy: "mlxconfig, or setpci -s NIC CAP_EXP+8.w, to the value of its siblings",
        cost: Cost::Root,
        minor: false,
        judge: Some(read_request),
    },
    Check {
        id: "numa-node",
        title: "NUMA nodes of devices",
        looks_at: "numa_node of GPUs and NICs, and of the ports above them",
        consequence: "workers cannot be bound near the device",
        source: "Linux, Documentation/ABI/testing/sysfs-bus-pci",
        remedy: "a firmware that tells it (in a virtual machine, its configuration)",
        cost: Cost::Restart,
        minor: false,
        judge: Some(numa),
    },
    Check {
        id: "data-direct",
        title: "a ConnectX-8's function beside its GPU",
        looks_at: "iommu_group of the function 15b3:2100 and of the GPU in the same PCI domain",
        consequence: "the adapter reads the GPU's memory through the CPU instead of beside it",
        source: "rdma-core, rdma_topo check",
        remedy: "rdma_topo check says which setting is missing",
        cost: Cost::Restart,
        minor: false,
        judge: Some(data_direct),
    },
];

/// Whether an IOMMU translates for a function: `identity` alone passes through.
fn translates(function: &Function) -> Option<bool> {
    function.iommu.seen().map(|kind| kind != "identity")
}

/// Pairs whose memory goes over PCIe, directly between the devices.
fn over_pcie<'a>(scene: &Scene<'a>) -> impl Iterator<Item = Pair<'a>> {
    scene.pairs().into_iter().filter(|pair| !pair.has_nvlink() && pair.are_peers() == Some(true))
}

fn iommu(scene: &Scene<'_>, report: &mut Report) {
    // On Arm the SMMU always translates, and the GPUs are made for that (ATS).
    if scene.evidence.system.architecture == "aarch64" {
        return report.ok("the SMMU translates, as it does on every Arm machine");
    }
    let guest = scene.evidence.system.virtual_machine.seen() == Some(&true);
    let (mut well, mut bad, mut unseen) = (0, Vec::new(), Vec::new());
    let used = scene.gpus().into_iter().filter_map(|gpu| Some((gpu, scene.function(gpu.pci)?)));
    for (gpu, function) in used {
        match &function.iommu {
            Look::Unseen(why) => unseen.push((format!("GPU{}", gpu.index), why.clone())),
            Look::NotThere => well += 1,
            Look::Seen(_) if translates(function) == Some(true) => bad.push((gpu, function)),
            Look::Seen(_) => well += 1,
        }
    }
    if let (Some((first, function)), false) = (bad.first(), guest) {
        let bad = |gpu: &Gpu| bad.iter().any(|(other, _)| other.index == gpu.index);
        let pairs: Vec<Pair<'_>> =
            over_pcie(scene).filter(|pair| bad(pair.a) || bad(pair.b)).collect();
        let kind = function.iommu.seen().cloned().unwrap_or_default();
        let from = format!("{}/iommu_group/type", address(first));
        if let Some(pair) = pairs.first() {
            let names: Vec<String> = pairs.iter().map(Pair::name).collect();
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            let text = format!(
                "the IOMMU translates, and the driver lets {} pair(s) of GPUs reach each other \
                 over PCIe: {}",
                names.len(),
                listed(&names)
            );
            let workers = [scene.workers_on(pair.a), scene.workers_on(pair.b)].concat();
            report.push(Found::error(text).saw(from, kind).concerns(workers));
        } else if scene.moves_by_rdma() {
            let text = "the IOMMU translates between GPUs and RDMA adapters";
            let found = Found::warning(text).saw(from, kind);
            report.push(found.consequence("GPUDirect RDMA goes up to the CPU and back"));
        } else {
            report.ok("the IOMMU translates, and no used pair goes over PCIe directly");
        }
    } else if !bad.is_empty() {
        report.ok("the IOMMU of this virtual machine translates");
    }
    report.settle(well, "GPU", "not translated by an IOMMU", unseen);
}

fn address(gpu: &Gpu) -> String {
    gpu.pci.map_or_else(|| format!("GPU{}", gpu.index), |pci| pci.to_string())
}

/// P2P Request Redirect and P2P Completion Redirect (PCI Express Base Specification, 7.7.11).
const REDIRECTS: u16 = 0x4 | 0x8;

/// Two devices with a direct path over PCIe.
struct Direct<'a> {
    /// `GPU0 and mlx5_0`.
    name: String,
    /// The bridges above them.
    ends: [Option<&'a str>; 2],
    workers: Vec<String>,
}

/// Pairs under one switch or several, not through the CPU: GPUs without NVLink, and GPUs with
/// their NICs.
fn under_switches<'a>(scene: &Scene<'a>) -> Vec<Direct<'a>> {
    let direct = |kind: Option<LinkKind>| matches!(kind, Some(LinkKind::Pix | LinkKind::Pxb));
    let gpus = over_pcie(scene).filter(|pair| direct(pair.kind)).map(|pair| {
        let workers = [scene.workers_on(pair.a), scene.workers_on(pair.b)].concat();
        let ends = [pair.a.parent.as_deref(), pair.b.parent.as_deref()];
        Direct { name: pair.name(), ends, workers }
    });
    let mut pairs: Vec<_> = gpus.collect();
    let ports = scene.ports();
    for (at, nic) in scene.topology.nics.iter().enumerate() {
        // By its DMA function a NIC reaches a GPU over ports that redirect by design, one requests
        // and the other completions (rdma-core, `rdma_topo`).
        if nic.dma.is_some() || !ports.iter().any(|(used, _)| used.name == nic.name) {
            continue;
        }
        for gpu in scene.gpus() {
            if direct(scene.link_to_nic(gpu, at)) {
                let name = format!("GPU{} and {}", gpu.index, nic.name);
                let ends = [gpu.parent.as_deref(), nic.parent.as_deref()];
                pairs.push(Direct { name, ends, workers: scene.workers_on(gpu) });
            }
        }
    }
    pairs
}

/// What an ACS control redirects, by the bits of `linux/pci_regs.h`.
fn redirects(control: u16) -> &'static str {
    match (control & 0x4 != 0, control & 0x8 != 0) {
        (true, true) => "request and completion redirect",
        (true, false) => "request redirect",
        (false, true) => "completion redirect",
        (false, false) => "no redirect",
    }
}

fn acs(scene: &Scene<'_>, report: &mut Report) {
    let ancestry = scene.topology.ancestry();
    let pairs = under_switches(scene);
    let (mut looked, mut unseen) = (BTreeSet::new(), BTreeSet::new());
    let mut bad: BTreeMap<&str, (u16, Vec<&Direct<'_>>)> = BTreeMap::new();
    for pair in &pairs {
        let between = ancestry.between(pair.ends[0], pair.ends[1]);
        for port in between.into_iter().filter(|bridge| bridge.kind == BridgeKind::SwitchDown) {
            match scene.function(port.id.parse().ok()).map(|function| &function.acs) {
                Some(Look::Seen(control)) if control & REDIRECTS != 0 => {
                    bad.entry(&port.id).or_insert((*control, Vec::new())).1.push(pair);
                }
                Some(Look::Unseen(why)) => drop(unseen.insert((port.id.clone(), why.clone()))),
                _ => drop(looked.insert(port.id.clone())),
            }
        }
    }
    if let Some((port, (control, _))) = bad.first_key_value() {
        let ports: Vec<&str> = bad.keys().copied().collect();
        let redirected = || bad.values().flat_map(|(_, pairs)| pairs);
        // In the order of the pairs, each once.
        let names = pairs.iter().map(|pair| pair.name.as_str());
        let names: Vec<&str> =
            names.filter(|name| redirected().any(|pair| pair.name == *name)).collect();
        let all = ports.join(" ");
        let (ports, names) = (listed(&ports), listed(&names));
        let found = Found::warning(format!(
            "what goes between {names} is redirected to the CPU by {ports}"
        ));
        let saw = format!("{control:#06x} ({})", redirects(*control));
        let concerned = redirected().flat_map(|pair| &pair.workers);
        let found = found.saw(format!("ACS control of {port}"), saw).with("PORTS", all);
        report.push(found.concerns(concerned.cloned().collect()));
    }
    let from = "between devices that are used, none redirects";
    report.settle(looked.len(), "switch port", from, unseen.into_iter().collect());
}

/// A device of the plan with its link and that of the port above it.
fn links<'a>(scene: &Scene<'a>) -> Vec<(String, PcieLink, Option<PcieLink>, Vec<String>)> {
    let above = |parent: Option<&str>| {
        scene.topology.bridges.iter().find(|bridge| Some(bridge.id.as_str()) == parent)?.pcie
    };
    let gpus = scene.gpus().into_iter().filter_map(|gpu: &'a Gpu| {
        let slot = above(gpu.parent.as_deref());
        Some((format!("GPU{}", gpu.index), gpu.pcie?, slot, scene.workers_on(gpu)))
    });
    let used: Vec<&str> = scene.ports().iter().map(|(nic, _)| nic.name.as_str()).collect();
    let nics = scene.topology.nics.iter().filter(|nic| used.contains(&nic.name.as_str()));
    let nics = nics.filter_map(|nic| {
        let slot = above(nic.parent.as_deref());
        Some((nic.name.clone(), nic.pcie?, slot, scene.workers_of_nic(nic)))
    });
    gpus.chain(nics).collect()
}

fn width(scene: &Scene<'_>, report: &mut Report) {
    let mut well = 0;
    for (name, link, slot, workers) in links(scene) {
        let (Some(lanes), Some(own)) = (link.width, link.max_width) else { continue };
        let of_slot = slot.and_then(|slot| slot.max_width);
        if lanes >= own {
            well += 1;
            continue;
        }
        let gpus = || scene.topology.gpus.iter();
        let own_model = gpus().find(|gpu| format!("GPU{}", gpu.index) == name);
        let siblings = own_model.map(|gpu| scene.siblings(gpu)).unwrap_or_default();
        let alike = siblings.len() > 1
            && siblings.iter().all(|gpu| gpu.pcie.is_some_and(|pcie| pcie.width == link.width));
        let found = match of_slot {
            Some(slot) if slot <= lanes => {
                Found::note(format!("its slot has {slot} lanes, and the device {own}"))
            }
            // A board that splits its lanes between slots gives each the same.
            _ if alike => Found::note(format!(
                "its PCIe link has {lanes} of {own} lanes, as its siblings': the board splits them"
            )),
            _ => Found::warning(format!("its PCIe link has {lanes} of {own} lanes")),
        };
        let found = found.about(name).concerns(workers);
        report.push(found.saw("current_link_width, max_link_width", format!("{lanes}, {own}")));
    }
    report.settle(well, "device", "all lanes of their PCIe links", Vec::new());
}

fn slot(scene: &Scene<'_>, report: &mut Report) {
    let mut well = 0;
    for (name, link, slot, workers) in links(scene) {
        let slot = slot.and_then(|slot| slot.max_gt_per_s);
        let (Some(own), Some(slot)) = (link.max_gt_per_s, slot) else { continue };
        if slot >= own {
            well += 1;
            continue;
        }
        let found = Found::note(format!("its slot has {slot} GT/s, and the device {own}"));
        let found = found.about(name).concerns(workers);
        report.push(found.saw("max_link_speed of both", format!("{slot}, {own} GT/s")));
    }
    report.settle(well, "device", "slots as fast as what is in them", Vec::new());
}

/// Judges a size that devices of one role should have in common.
fn alike(
    scene: &Scene<'_>,
    report: &mut Report,
    roles: &[FunctionRole],
    what: &str,
    pick: impl Fn(&Function) -> &Look<u32>,
) {
    for role in roles {
        let functions = scene.evidence.functions.iter().filter(|(_, one)| one.role == *role);
        let (mut sizes, mut unseen) = (Vec::new(), Vec::new());
        for (pci, function) in functions {
            match pick(function) {
                Look::Seen(bytes) => sizes.push((pci.to_string(), *bytes, function)),
                Look::Unseen(why) => unseen.push((pci.to_string(), why.clone())),
                Look::NotThere => {}
            }
        }
        // Devices of another model have other sizes.
        let less: Vec<&(String, u32, &Function)> = sizes
            .iter()
            .filter(|(_, bytes, one)| {
                sizes.iter().any(|(_, other, two)| two.id == one.id && other > bytes)
            })
            .collect();
        if let Some((pci, bytes, _)) = less.first() {
            let names: Vec<&str> = less.iter().map(|(pci, ..)| pci.as_str()).collect();
            let most = sizes.iter().map(|(_, bytes, _)| *bytes).max().unwrap_or_default();
            let text = format!("{what} is {bytes} bytes, and {most} elsewhere");
            let found = Found::warning(text).about(listed(&names));
            report.push(found.saw(format!("configuration space of {pci}"), bytes));
        }
        report.settle(sizes.len() - less.len(), "device", &format!("{what} alike"), unseen);
    }
}

fn payload(scene: &Scene<'_>, report: &mut Report) {
    let roles = [FunctionRole::Gpu, FunctionRole::Nic];
    alike(scene, report, &roles, "MaxPayload", |function| &function.payload_bytes);
}

fn read_request(scene: &Scene<'_>, report: &mut Report) {
    let roles = [FunctionRole::Nic];
    alike(scene, report, &roles, "MaxReadRequest", |function| &function.read_request_bytes);
}

fn numa(scene: &Scene<'_>, report: &mut Report) {
    let with_cpus =
        |node: &&crate::topology::NumaNode| node.cpus.as_ref().is_none_or(|cpus| !cpus.is_empty());
    let nodes = scene.topology.numa.iter().filter(with_cpus).count();
    if nodes < 2 {
        return;
    }
    let mut well = 0;
    for gpu in scene.gpus() {
        // The kernel calls all nodes near where it knows none.
        let several = gpu.numa_set.as_ref().is_some_and(|set| set.len() < nodes);
        if gpu.numa.is_some() || several {
            well += 1;
            continue;
        }
        let told = scene.function(gpu.pci).and_then(|function| function.has_numa);
        let from = format!("numa_node of {}", address(gpu));
        let value = if told == Some(false) { "-1" } else { "unknown" };
        let text = "nobody tells on which of several NUMA nodes it is";
        report.push(scene.of_gpu(gpu, Found::warning(text).saw(from, value)));
    }
    report.settle(well, "GPU", "known NUMA nodes", Vec::new());
}

fn data_direct(scene: &Scene<'_>, report: &mut Report) {
    let functions = &scene.evidence.functions;
    let direct = functions.iter().filter(|(_, one)| one.role == FunctionRole::DataDirect);
    let mut well = 0;
    for (pci, function) in direct {
        let beside = scene
            .gpus()
            .into_iter()
            .find(|gpu| gpu.pci.is_some_and(|own| own.domain == pci.domain));
        let Some((gpu, own)) = beside.and_then(|gpu| Some((gpu, scene.function(gpu.pci)?))) else {
            continue;
        };
        if own.iommu_group == function.iommu_group {
            well += 1;
            continue;
        }
        let group = |group: Option<u32>| group.map_or("none".to_owned(), |group| group.to_string());
        let text = format!("{pci}, which reads its memory, is in another IOMMU group");
        let saw = format!("{} and {}", group(function.iommu_group), group(own.iommu_group));
        let found = Found::warning(text).saw(format!("iommu_group of {pci} and the GPU"), saw);
        report.push(scene.of_gpu(gpu, found));
    }
    report.settle(well, "function", "in the IOMMU group of its GPU", Vec::new());
}
