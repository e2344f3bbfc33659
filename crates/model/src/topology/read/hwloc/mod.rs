//! hwloc's XML (`lstopo --of xml`), versions 1, 2 and 3.
//!
//! Reads the CPUs, NUMA nodes, PCI tree, NVIDIA GPUs and RDMA devices; ignores caches and
//! everything else. A GPU is recognised by its PCI class and vendor, whether or not hwloc was built
//! with NVML. hwloc gives only the bandwidth of NVLinks; their number follows from the GPU's model.
//!
//! *Invariant:* the CPUs of a device are those of the object that its host bridge is attached to.

mod attributes;
mod nvlinks;

use std::collections::{BTreeMap, BTreeSet};

use roxmltree::Node;

use super::xml::{XmlError, parsed, required, wrong};
use super::{DEVICE_LIMIT, NUMA_LIMIT, without_zeroed_uuids};
use crate::cpuset::{CpuSet, LIMIT, NodeSet};
use crate::ids::{GpuIndex, GpuUuid, NumaId, PciAddress};
use crate::topology::{
    Allowed, Bridge, BridgeKind, DmaFunction, Gpu, Nic, NicKind, Note, NumaNode, Topology, VERSION,
};
use attributes::{address, bytes, info, number, os_devices, ports, set};

/// Most PCI bridges of one machine; large ones have a few hundred.
const BRIDGE_LIMIT: usize = 2048;

/// Vendor and device of a DMA function, and of the NICs that can have one: ConnectX-8 and 9.
const DMA_FUNCTION: &str = "[15b3:2100]";
const DMA_OWNERS: [&str; 2] = ["[15b3:1023]", "[15b3:1025]"];

pub(super) fn read(root: Node<'_, '_>) -> Result<Topology, XmlError> {
    let mut reader = Reader::new(root);
    let here = Surroundings::default();
    for object in root.children().filter(|child| child.has_tag_name("object")) {
        reader.object(object, &here)?;
    }
    reader.one_node(root)?;
    reader.assume_gpu_memory();
    reader.locate();
    reader.nvlinks(root)?;
    Ok(reader.finish())
}

/// What applies to everything inside an object.
#[derive(Clone, Default)]
struct Surroundings {
    cpus: Option<CpuSet>,
    package: Option<u32>,
    bridge: Option<String>,
}

/// A GPU whose OS devices are still being read.
struct Found {
    gpu: Gpu,
    /// Its number in NVML, if hwloc knew it.
    nvml: Option<u32>,
    /// hwloc's number for it and for each OS device in it.
    handles: Vec<String>,
}

struct Reader {
    topology: Topology,
    gpus: Vec<Found>,
    /// hwloc's numbers of NVSwitches.
    switches: Vec<String>,
    /// Host bridges' CPUs, by bridge.
    localities: BTreeMap<String, CpuSet>,
    packages: Vec<(u32, CpuSet)>,
    /// Names of the bridges so far.
    bridges: BTreeSet<String>,
    /// NUMA nodes that are the memory of the GPU at an address.
    memories: Vec<(PciAddress, NumaId)>,
    /// Whether the platform is one whose GPUs' memory is NUMA nodes.
    coherent: bool,
    /// Names of GPUs without a PCI address.
    placeless: Vec<String>,
    /// GPUs of other vendors, by address.
    foreign: Vec<String>,
    /// DMA functions of NICs, by busid.
    dma: Vec<String>,
    /// Positions of the NICs that can have one.
    dma_owners: Vec<usize>,
    /// Since version 3 the kind of an OS device is a bit mask.
    bitmask: bool,
}

impl Reader {
    fn new(root: Node<'_, '_>) -> Self {
        let version = root.attribute("version").and_then(|text| text.split('.').next());
        let source = Some("hwloc XML".to_owned());
        Self {
            topology: Topology { version: VERSION, source, ..Topology::default() },
            gpus: Vec::new(),
            switches: Vec::new(),
            localities: BTreeMap::new(),
            packages: Vec::new(),
            bridges: BTreeSet::new(),
            memories: Vec::new(),
            coherent: false,
            placeless: Vec::new(),
            foreign: Vec::new(),
            dma: Vec::new(),
            dma_owners: Vec::new(),
            bitmask: version
                .and_then(|major| major.parse().ok())
                .is_some_and(|major: u32| major > 2),
        }
    }

    fn object(&mut self, node: Node<'_, '_>, outside: &Surroundings) -> Result<(), XmlError> {
        let mut here = outside.clone();
        let cpus = set(node, "cpuset")?;
        self.coherent |= is_coherent(node);
        match required(node, "type")? {
            "Machine" => self.machine(node, cpus.as_ref())?,
            "Package" | "Socket" => {
                here.package = parsed(node, "os_index", number)?;
                self.packages.extend(here.package.zip(cpus.clone()));
                if self.packages.len() > NUMA_LIMIT {
                    return Err(wrong(node, "there are more packages than a machine has"));
                }
            }
            "NUMANode" => self.numa_node(node, cpus.clone(), outside)?,
            "Core" => self.topology.cores.extend(cpus.clone().filter(|cpus| !cpus.is_empty())),
            "Bridge" => {
                here.bridge = Some(self.bridge(node, outside)?);
                return self.inside(node, &here);
            }
            "PCIDev" => return self.device(node, outside),
            // If hwloc was built without PCI support, they are attached to a package.
            "OSDev" => {
                let name = node.attribute("name").unwrap_or_default();
                if name.starts_with("nvml") || name.starts_with("cuda") {
                    self.placeless.push(name.to_owned());
                }
            }
            _ => {}
        }
        here.cpus = cpus.or(here.cpus);
        self.inside(node, &here)
    }

    fn inside(&mut self, node: Node<'_, '_>, here: &Surroundings) -> Result<(), XmlError> {
        node.children()
            .filter(|child| child.has_tag_name("object"))
            .try_for_each(|child| self.object(child, here))
    }

    fn machine(&mut self, node: Node<'_, '_>, all: Option<&CpuSet>) -> Result<(), XmlError> {
        self.topology.name = info(node, "HostName").map(str::to_owned);
        let allowed = set(node, "allowed_cpuset")?.zip(set(node, "allowed_nodeset")?);
        // hwloc omits what is not allowed unless it is asked for it.
        self.topology.allowed = allowed
            .filter(|(cpus, _)| !cpus.is_empty() && all.is_some_and(|all| all != cpus))
            .map(|(cpus, mems)| Allowed { cpus, mems });
        Ok(())
    }

    fn numa_node(
        &mut self,
        node: Node<'_, '_>,
        cpus: Option<CpuSet>,
        outside: &Surroundings,
    ) -> Result<(), XmlError> {
        let Some(id) = parsed(node, "os_index", number)?.map(NumaId) else { return Ok(()) };
        if self.topology.numa.len() >= NUMA_LIMIT {
            return Err(wrong(node, "there are more NUMA nodes than Linux has"));
        }
        if self.topology.numa_node(id).is_some() {
            return Err(wrong(node, format!("NUMA node {id} is there already")));
        }
        let gpu_memory = node.attribute("subtype") == Some("GPUMemory");
        let of_gpu = info(node, "PCIBusID").and_then(|place| place.parse().ok());
        self.memories.extend(of_gpu.filter(|_| gpu_memory).map(|place| (place, id)));
        self.topology.numa.push(NumaNode {
            id,
            package: outside.package,
            cpus,
            memory_bytes: parsed(node, "local_memory", bytes)?,
            gpu_memory,
        });
        Ok(())
    }

    /// Adds the only node of a machine: hwloc 1 lists none if there is just one.
    fn one_node(&mut self, root: Node<'_, '_>) -> Result<(), XmlError> {
        let machine = |node: &Node<'_, '_>| node.attribute("type") == Some("Machine");
        let Some(machine) = root.children().find(machine) else { return Ok(()) };
        let Some(cpus) = set(machine, "cpuset")?.filter(|_| self.topology.numa.is_empty()) else {
            return Ok(());
        };
        self.topology.numa.push(NumaNode {
            id: NumaId(0),
            package: None,
            cpus: Some(cpus),
            memory_bytes: parsed(machine, "local_memory", bytes)?,
            gpu_memory: false,
        });
        Ok(())
    }

    /// Treats NUMA nodes without CPUs as GPU memory if hwloc was too old to report it and the
    /// platform has such nodes. Elsewhere they are ordinary memory, only farther away.
    fn assume_gpu_memory(&mut self) {
        let told = self.topology.numa.iter().any(|node| node.gpu_memory);
        if self.gpus.is_empty() || told || !self.coherent {
            return;
        }
        for node in &mut self.topology.numa {
            if node.cpus.as_ref().is_some_and(CpuSet::is_empty) {
                node.gpu_memory = true;
                let text = "has no CPUs; on this platform it is taken for GPU memory";
                self.topology.notes.push(Note::new(format!("NUMA node {}", node.id), text));
            }
        }
    }

    /// Adds a bridge and returns its name.
    fn bridge(&mut self, node: Node<'_, '_>, outside: &Surroundings) -> Result<String, XmlError> {
        let buses = node.attribute("bridge_pci").unwrap_or_default();
        let (id, kind) = if required(node, "bridge_type")?.starts_with("0-") {
            // `0000:[80-84]` is the host bridge that sysfs calls `pci0000:80`.
            let (domain, range) = buses.split_once(":[").unwrap_or((buses, ""));
            let first = range.split('-').next().unwrap_or_default();
            (format!("pci{domain}:{first}"), BridgeKind::Host)
        } else {
            let below_host = outside.bridge.as_ref().is_some_and(|id| id.starts_with("pci"));
            let kind = if below_host { BridgeKind::RootPort } else { BridgeKind::Bridge };
            (required(node, "pci_busid")?.to_owned(), kind)
        };
        let package = outside.package.filter(|_| kind == BridgeKind::Host);
        let parent = outside.bridge.clone().filter(|_| kind != BridgeKind::Host);
        if kind == BridgeKind::Host
            && let Some(cpus) = &outside.cpus
        {
            self.localities.insert(id.clone(), cpus.clone());
        }
        if !self.bridges.insert(id.clone()) {
            return Err(wrong(node, format!("a bridge {id} is there already")));
        }
        if self.bridges.len() > BRIDGE_LIMIT {
            return Err(wrong(node, "there are more bridges than a machine has"));
        }
        let known = Bridge { id: id.clone(), parent, kind, numa: None, package, pcie: None };
        self.topology.bridges.push(known);
        Ok(id)
    }

    fn device(&mut self, node: Node<'_, '_>, outside: &Surroundings) -> Result<(), XmlError> {
        // `0302 [10de:1db8] [10de:131d] a1`: class, vendor and device, subsystem, revision.
        let kind = node.attribute("pci_type").unwrap_or_default();
        let class = kind.get(..4).unwrap_or_default();
        let nvidia = kind.contains("[10de:");
        let accelerator = ["0302", "0380", "1200"].contains(&class);
        if nvidia && class.starts_with("03") {
            self.gpu(node, outside)
        } else if accelerator && (kind.contains("[1002:") || kind.contains("[8086:")) {
            self.foreign.push(required(node, "pci_busid")?.to_owned());
            Ok(())
        } else if kind.contains(DMA_FUNCTION) {
            self.dma.push(required(node, "pci_busid")?.to_owned());
            Ok(())
        } else if (nvidia && class == "0680") || node.attribute("subtype") == Some("NVSwitch") {
            self.switches
                .extend(node.attribute("gp_index").map(|handle| format!("PCIDev:{handle}")));
            Ok(())
        } else {
            self.nic(node, class, outside)
        }
    }

    fn gpu(&mut self, node: Node<'_, '_>, outside: &Surroundings) -> Result<(), XmlError> {
        let pci = Some(address(node)?);
        if self.gpus.iter().any(|found| found.gpu.pci == pci) {
            return Err(wrong(node, "a GPU is there already at this address"));
        }
        if self.gpus.len() >= DEVICE_LIMIT {
            return Err(wrong(node, "there are more GPUs than a machine has"));
        }
        let mut found = Found {
            gpu: Gpu { pci, parent: outside.bridge.clone(), ..Gpu::default() },
            nvml: None,
            handles: node
                .attribute("gp_index")
                .map(|id| format!("PCIDev:{id}"))
                .into_iter()
                .collect(),
        };
        for device in os_devices(node) {
            found.handles.extend(device.attribute("gp_index").map(|id| format!("OSDev:{id}")));
            let name = device.attribute("name").unwrap_or_default();
            let ours = name.starts_with("nvml") || name.starts_with("cuda");
            if let Some(number) = name.strip_prefix("nvml") {
                found.nvml = number.parse().ok().filter(|number| *number < 10_000);
            }
            if !ours {
                continue;
            }
            let gpu = &mut found.gpu;
            let uuid = info(device, "NVIDIAUUID").and_then(|uuid| uuid.parse::<GpuUuid>().ok());
            gpu.uuid = gpu.uuid.take().or(uuid);
            gpu.name = gpu.name.take().or(info(device, "GPUModel").map(str::to_owned));
            let memory =
                info(device, "CUDAGlobalMemorySize").and_then(|kib| kib.parse::<u64>().ok());
            gpu.memory_bytes = gpu.memory_bytes.or(memory.and_then(|kib| kib.checked_mul(1024)));
        }
        if let Some(uuid) = found.gpu.uuid.as_ref().filter(|uuid| !uuid.is_zeroed())
            && self.gpus.iter().any(|other| other.gpu.uuid.as_ref() == Some(uuid))
        {
            return Err(wrong(node, format!("a GPU with the UUID {uuid} is there already")));
        }
        self.gpus.push(found);
        Ok(())
    }

    fn nic(
        &mut self,
        node: Node<'_, '_>,
        class: &str,
        outside: &Surroundings,
    ) -> Result<(), XmlError> {
        let rdma: Vec<Node<'_, '_>> =
            os_devices(node).filter(|device| self.is(*device, 3, 1 << 5)).collect();
        let nets: Vec<&str> = os_devices(node)
            .filter(|device| self.is(*device, 2, 1 << 4))
            .filter_map(|device| device.attribute("name"))
            .collect();
        let nic = |name: &str| -> Result<Nic, XmlError> {
            let pci = Some(address(node)?);
            let parent = outside.bridge.clone();
            Ok(Nic { name: name.to_owned(), pci, parent, ..Nic::default() })
        };
        let bare = class == "0207" && os_devices(node).next().is_none();
        if bare {
            let name = format!("NIC{}", self.topology.nics.len());
            let text = "its device name is unknown: the file has no OS device for it";
            self.topology.notes.push(Note::new(&name, text));
            self.topology.nics.push(nic(&name)?);
        }
        for device in &rdma {
            let name = required(*device, "name")?;
            if self.topology.nics.iter().any(|nic| nic.name == name) {
                return Err(wrong(*device, format!("a NIC {name} is there already")));
            }
            let mut ports = ports(*device);
            if let ([port], [net], [_]) = (ports.as_mut_slice(), nets.as_slice(), rdma.as_slice()) {
                port.netdev = Some((*net).to_owned());
            }
            let kind = node.attribute("pci_type").unwrap_or_default();
            if DMA_OWNERS.iter().any(|owner| kind.contains(owner)) {
                self.dma_owners.push(self.topology.nics.len());
            }
            let [vendor, device, by, card] = NicKind::SWITCH_MANAGER_IDS;
            let manager = format!("[{vendor:04x}:{device:04x}] [{by:04x}:{card:04x}]");
            let manages = kind.contains(&manager);
            let kind = if manages { NicKind::SwitchManager } else { NicKind::Physical };
            self.topology.nics.push(Nic { ports, kind, ..nic(name)? });
        }
        if self.topology.nics.len() > DEVICE_LIMIT {
            return Err(wrong(node, "there are more NICs than a machine has"));
        }
        Ok(())
    }

    /// Whether an OS device is of a kind: a number up to version 2, a bit from 3 on.
    fn is(&self, device: Node<'_, '_>, kind: u32, bit: u32) -> bool {
        let found = device.attribute("osdev_type").and_then(|text| text.parse::<u32>().ok());
        found.is_some_and(|found| if self.bitmask { found & bit != 0 } else { found == kind })
    }

    /// Gives bridges and devices the CPUs and NUMA nodes of the objects that they are attached to.
    fn locate(&mut self) {
        let topology = &mut self.topology;
        topology.numa.sort_by_key(|node| node.id);
        for node in &mut topology.numa {
            let of = |(_, cpus): &&(u32, CpuSet)| {
                node.cpus.as_ref().is_some_and(|own| !own.intersection(cpus).is_empty())
            };
            node.package = node.package.or(self.packages.iter().find(of).map(|(id, _)| *id));
        }
        let with_cpus = |cpus: &CpuSet| -> NodeSet {
            let near = topology.numa.iter().filter(|node| {
                node.cpus.as_ref().is_some_and(|own| !own.intersection(cpus).is_empty())
            });
            near.map(|node| node.id.0).filter(|id| *id < LIMIT).collect()
        };
        let nodes: BTreeMap<&str, NodeSet> =
            self.localities.iter().map(|(id, cpus)| (id.as_str(), with_cpus(cpus))).collect();
        let one = |nodes: &NodeSet| (nodes.len() == 1).then(|| nodes.first()).flatten().map(NumaId);
        for bridge in &mut topology.bridges {
            bridge.numa = nodes.get(bridge.id.as_str()).and_then(one);
        }
        let hosts: BTreeMap<String, String> = {
            let ancestry = topology.ancestry();
            let host = |parent: &Option<String>| {
                ancestry.above(parent.as_deref()).last().map(|top| top.id.clone())
            };
            let parents = self.gpus.iter().map(|found| &found.gpu.parent);
            let parents = parents.chain(topology.nics.iter().map(|nic| &nic.parent));
            parents.filter_map(|parent| parent.clone().zip(host(parent))).collect()
        };
        let host_of = |parent: &Option<String>| parent.as_ref().and_then(|id| hosts.get(id));
        for Found { gpu, .. } in &mut self.gpus {
            let memory = self.memories.iter().find(|(place, _)| gpu.pci == Some(*place));
            gpu.memory_numa = memory.map(|(_, id)| *id);
            if let Some(host) = host_of(&gpu.parent) {
                let near = nodes.get(host.as_str());
                gpu.cpus = self.localities.get(host).cloned();
                gpu.numa = near.and_then(one);
                gpu.numa_set = near.filter(|nodes| nodes.len() > 1).cloned();
            }
        }
        for nic in &mut topology.nics {
            nic.numa = host_of(&nic.parent).and_then(|host| nodes.get(host.as_str())).and_then(one);
        }
    }

    fn finish(mut self) -> Topology {
        for (names, what) in [
            (&self.placeless, "without a PCI device around them"),
            (&self.foreign, "another vendor's"),
        ] {
            if !names.is_empty() {
                let text = format!("{what}, and so left out: {}", names.join(", "));
                self.topology.notes.push(Note::new("gpus", text));
            }
        }
        let known: BTreeSet<u32> = self.gpus.iter().filter_map(|found| found.nvml).collect();
        let numbered = known.len() == self.gpus.len();
        if numbered {
            self.gpus.sort_by_key(|found| found.nvml);
        } else {
            self.gpus.sort_by_key(|found| found.gpu.pci);
            let text = "the file does not number them as NVML does; they are in PCI order";
            self.topology.notes.push(Note::new("gpus", text));
        }
        for (at, found) in (0u32..).zip(self.gpus) {
            let index = GpuIndex(found.nvml.filter(|_| numbered).unwrap_or(at));
            self.topology.gpus.push(Gpu { index, ..found.gpu });
        }
        if !self.dma.is_empty() {
            let nics = &mut self.topology.nics;
            self.dma_owners.iter().for_each(|at| nics[*at].dma = Some(DmaFunction::default()));
            let text =
                format!("no object tells whose the DMA functions are: {}", self.dma.join(", "));
            self.topology.notes.push(Note::new("nics", text));
        }
        without_zeroed_uuids(&mut self.topology);
        self.topology.links = self.topology.derive_links();
        self.topology
    }
}

/// Whether an object describes a platform whose GPUs' memory is NUMA nodes: POWER9 with NVLink, and
/// Grace.
fn is_coherent(node: Node<'_, '_>) -> bool {
    let names = ["CPUModel", "PlatformModel", "DMIProductName", "DMIBoardName", "DMIProductFamily"];
    let platforms = ["POWER9", "8335-GT", "Grace", "GH200", "GB200", "GB300", "Neoverse-V2"];
    names.iter().filter_map(|name| info(node, name)).any(|value| {
        let newer = !value.contains("8335-GTA") && !value.contains("8335-GTB");
        newer && platforms.iter().any(|platform| value.contains(platform))
    })
}
