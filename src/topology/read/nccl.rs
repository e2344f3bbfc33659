//! NCCL's topology XML: a dump (`NCCL_TOPO_DUMP_FILE`), or written by hand for a virtual machine.
//!
//! NCCL shows one `<cpu>` for each NUMA node and one `<pci>` for each switch; host bridges and
//! ports it leaves out. A `<cpu>` is taken for one host bridge, as NCCL takes it. Whatever is odd
//! about a file is kept and noted: such files are written by hand, and steer real jobs.
//!
//! *Invariant:* a device stands under the elements that it stands under in the file; none is moved.

use std::collections::{BTreeMap, BTreeSet};

use roxmltree::Node;

use super::xml::{XmlError, parsed, required, wrong};
use super::{DEVICE_LIMIT, NUMA_LIMIT};
use crate::cpuset::CpuSet;
use crate::ids::{GpuIndex, NumaId, PciAddress};
use crate::topology::{
    Bridge, BridgeKind, ComputeCapability, Device, Gpu, LinkKind, Links, Nic, Note, NumaNode,
    NvLink, NvLinkPeer, PcieLink, Port, Topology, VERSION,
};

/// More NVLinks than any GPU has.
const NVLINK_LIMIT: usize = 64;

/// Reads the `<system>` element.
pub(super) fn read(system: Node<'_, '_>) -> Result<Topology, XmlError> {
    let mut reader = Reader::new();
    if let Some(version) = system.attribute("version").filter(|version| *version != "1") {
        reader.note("version", format!("is {version}; NCCL's own form is 1"));
    }
    for child in system.children().filter(Node::is_element) {
        match child.tag_name().name() {
            "cpu" => reader.cpu(child)?,
            other => reader.note(other, "is no element of a system; it is left out"),
        }
    }
    reader.finish()
}

/// What a `<cpu>` gives to everything below it.
struct Cpu {
    numa: Option<NumaId>,
    cpus: Option<CpuSet>,
}

struct Reader {
    topology: Topology,
    /// The `dev` of each GPU, in the order of `topology.gpus`.
    devs: Vec<Option<u32>>,
    /// NVSwitches that NVLinks end in; `None` once one has no real address.
    switches: Option<BTreeSet<PciAddress>>,
    /// NICs that share one card, by position.
    cards: Vec<Vec<usize>>,
    /// NICs whose device names the file does not say.
    nameless: Vec<String>,
    places: BTreeSet<PciAddress>,
    hosts: BTreeSet<String>,
    /// How often each bridge's name has come; placeholders may come again.
    copies: BTreeMap<String, u32>,
}

impl Reader {
    fn new() -> Self {
        let source = Some("NCCL topology XML".to_owned());
        Self {
            topology: Topology { version: VERSION, source, ..Topology::default() },
            devs: Vec::new(),
            switches: Some(BTreeSet::new()),
            cards: Vec::new(),
            nameless: Vec::new(),
            places: BTreeSet::new(),
            hosts: BTreeSet::new(),
            copies: BTreeMap::new(),
        }
    }

    fn note(&mut self, about: impl Into<String>, text: impl Into<String>) {
        self.topology.notes.push(Note::new(about, text));
    }

    fn cpu(&mut self, node: Node<'_, '_>) -> Result<(), XmlError> {
        let numa = parsed(node, "numaid", |text| {
            let number: i64 = text.parse().map_err(|_| "is no NUMA node".to_owned())?;
            Ok(u32::try_from(number).ok().map(NumaId))
        })?;
        let numa = numa.flatten();
        let cpus = parsed(node, "affinity", |text| {
            CpuSet::parse_mask(text).map_err(|error| error.to_string())
        })?;
        let cpus = cpus.filter(|cpus| !cpus.is_empty());
        let name = match numa {
            Some(id) => format!("cpu{id}"),
            None => format!("cpu?{}", self.topology.bridges.len()),
        };
        if cpus.is_none() {
            self.note(&name, "the file does not say which CPUs it has");
        }
        if let Some(host) = node.attribute("host_hash") {
            self.hosts.insert(host.to_owned());
            if self.hosts.len() > 1 {
                return Err(wrong(node, "belongs to another host; one machine is needed"));
            }
        }
        match numa {
            Some(id) if self.topology.numa_node(id).is_some() => {
                return Err(wrong(node, format!("NUMA node {id} is there already")));
            }
            Some(_) if self.topology.numa.len() >= NUMA_LIMIT => {
                return Err(wrong(node, "there are more NUMA nodes than Linux has"));
            }
            Some(id) => self.topology.numa.push(NumaNode {
                id,
                package: None,
                cpus: cpus.clone(),
                memory_bytes: None,
                gpu_memory: false,
            }),
            None => self.note(&name, "the file does not say which NUMA node it is"),
        }
        let host = self.bridge(name, None, BridgeKind::Host, numa);
        self.children(node, &host, &Cpu { numa, cpus })
    }

    /// Adds a bridge and returns its `id`, made unique if need be.
    fn bridge(
        &mut self,
        name: String,
        parent: Option<&str>,
        kind: BridgeKind,
        numa: Option<NumaId>,
    ) -> String {
        let copies = self.copies.entry(name.clone()).or_insert(0);
        *copies += 1;
        let id = if *copies == 1 { name } else { format!("{name}#{copies}") };
        let parent = parent.map(str::to_owned);
        self.topology.bridges.push(Bridge { id: id.clone(), parent, kind, numa, package: None });
        id
    }

    fn children(&mut self, node: Node<'_, '_>, parent: &str, cpu: &Cpu) -> Result<(), XmlError> {
        for child in node.children().filter(Node::is_element) {
            match child.tag_name().name() {
                "pci" => self.pci(child, parent, cpu)?,
                "nic" => self.nic(child, None, None, parent, cpu)?,
                "gpu" => {
                    return Err(wrong(child, "a GPU stands in a <pci> element of its own"));
                }
                other => self.note(other, "is no element of a PCI tree; it is left out"),
            }
        }
        Ok(())
    }

    fn pci(&mut self, node: Node<'_, '_>, parent: &str, cpu: &Cpu) -> Result<(), XmlError> {
        let busid = required(node, "busid")?;
        let child = |name: &str| node.children().find(|child| child.has_tag_name(name));
        let class = node.attribute("class").unwrap_or_default().trim_start_matches("0x");
        let vendor = node.attribute("vendor").unwrap_or("0x10de");
        // Placeholders of virtual machines name no vendor that there is.
        let nvidia = matches!(vendor, "0x10de" | "0xffff");
        if let Some(gpu) = child("gpu") {
            self.gpu(node, Some(gpu), parent, cpu)
        } else if let Some(nic) = child("nic") {
            self.nic(nic, place(busid), pcie(node), parent, cpu)
        } else if child("pci").is_some() {
            let kind = BridgeKind::SwitchUp;
            let id = self.bridge(busid.to_owned(), Some(parent), kind, None);
            self.children(node, &id, cpu)
        } else if class.starts_with("03") && nvidia {
            self.gpu(node, None, parent, cpu)
        } else if class.starts_with("0200") || class.starts_with("0207") {
            self.unnamed_nic(node, parent, cpu)
        } else if class.is_empty() {
            self.note(busid, "has no class and no <gpu> or <nic>: GPU or NIC cannot be told");
            Ok(())
        } else {
            Ok(())
        }
    }

    /// Takes a place for a device, once.
    fn take(&mut self, node: Node<'_, '_>) -> Result<Option<PciAddress>, XmlError> {
        let found = place(required(node, "busid")?);
        match found {
            Some(place) if !self.places.insert(place) => {
                Err(wrong(node, format!("a device at {place} is there already")))
            }
            _ if self.places.len() > DEVICE_LIMIT => {
                Err(wrong(node, "there are more devices than a machine has"))
            }
            _ => Ok(found),
        }
    }

    fn gpu(
        &mut self,
        node: Node<'_, '_>,
        gpu: Option<Node<'_, '_>>,
        parent: &str,
        cpu: &Cpu,
    ) -> Result<(), XmlError> {
        let pci = self.take(node)?;
        let number = |text: &str| text.parse::<u32>().map_err(|_| "is no number".to_owned());
        let (mut dev, mut sm, mut nvlinks) = (None, None, Vec::new());
        if let Some(gpu) = gpu {
            dev = parsed(gpu, "dev", number)?.filter(|dev| *dev < 10_000);
            sm = parsed(gpu, "sm", number)?.filter(|sm| *sm > 0);
            nvlinks = self.nvlinks(gpu)?;
        }
        self.devs.push(dev);
        self.topology.gpus.push(Gpu {
            pci,
            numa: cpu.numa,
            cpus: cpu.cpus.clone(),
            compute_capability: sm.map(|sm| ComputeCapability { major: sm / 10, minor: sm % 10 }),
            nvlinks,
            pcie: pcie(node),
            parent: Some(parent.to_owned()),
            ..Gpu::default()
        });
        Ok(())
    }

    /// The NVLinks of a GPU. The file counts them by peer; their numbers on the GPU it does not
    /// say, so they are numbered as they come.
    fn nvlinks(&mut self, gpu: Node<'_, '_>) -> Result<Vec<NvLink>, XmlError> {
        let mut links = Vec::new();
        for node in gpu.children().filter(|child| child.has_tag_name("nvlink")) {
            let count = parsed(node, "count", |text| match text.parse::<usize>() {
                Ok(count) if count <= NVLINK_LIMIT - links.len() => Ok(count),
                Ok(_) => Err(format!("a GPU has at most {NVLINK_LIMIT} NVLinks")),
                Err(_) => Err("is no number".to_owned()),
            })?;
            let target = place(required(node, "target")?);
            let class = node.attribute("tclass").unwrap_or_default();
            let peer = match (class.trim_start_matches("0x"), target) {
                ("068000", _) => NvLinkPeer::Switch,
                ("068001", _) => NvLinkPeer::Cpu,
                (class, Some(place)) if class.is_empty() || class.starts_with("03") => {
                    NvLinkPeer::Gpu(place)
                }
                _ => NvLinkPeer::Unknown,
            };
            if peer == NvLinkPeer::Switch {
                self.switches = self.switches.take().zip(target).map(|(mut known, place)| {
                    known.insert(place);
                    known
                });
            }
            for _ in 0..count.unwrap_or(usize::from(links.len() < NVLINK_LIMIT)) {
                let link = u32::try_from(links.len()).unwrap_or(u32::MAX);
                links.push(NvLink { link, active: true, version: None, peer, gb_per_s: None });
            }
        }
        Ok(links)
    }

    fn nic(
        &mut self,
        nic: Node<'_, '_>,
        pci: Option<PciAddress>,
        pcie: Option<PcieLink>,
        parent: &str,
        cpu: &Cpu,
    ) -> Result<(), XmlError> {
        let mut card = Vec::new();
        for net in nic.children().filter(|child| child.has_tag_name("net")) {
            let name = required(net, "name")?;
            // NCCL joins the names of NICs that it uses as one.
            let merged = name.contains('+');
            for name in name.split('+').filter(|name| !name.is_empty()) {
                let at = self.named_nic(name, pci, pcie, parent, cpu);
                if self.topology.nics.len() > DEVICE_LIMIT {
                    return Err(wrong(net, "there are more NICs than a machine has"));
                }
                if !card.contains(&at) {
                    card.push(at);
                }
                self.port(net, at, merged)?;
            }
        }
        if card.is_empty() {
            self.note("nic", "a <nic> without <net> has no name; it is left out");
        }
        self.cards.push(card);
        Ok(())
    }

    /// The position of the NIC of a name, which is added if it is new.
    fn named_nic(
        &mut self,
        name: &str,
        pci: Option<PciAddress>,
        pcie: Option<PcieLink>,
        parent: &str,
        cpu: &Cpu,
    ) -> usize {
        if let Some(at) = self.topology.nics.iter().position(|nic| nic.name == name) {
            return at;
        }
        self.topology.nics.push(Nic {
            name: name.to_owned(),
            pci,
            numa: cpu.numa,
            pcie,
            parent: Some(parent.to_owned()),
            ..Nic::default()
        });
        self.topology.nics.len() - 1
    }

    /// Adds the port of a `<net>`. A dump lists a NIC again for collectives; that adds nothing.
    fn port(&mut self, net: Node<'_, '_>, at: usize, merged: bool) -> Result<(), XmlError> {
        let port = parsed(net, "port", |text| {
            text.parse::<u32>().map_err(|_| "is no port number".to_owned())
        })?;
        let speed = parsed(net, "speed", |text| match text.parse::<f64>() {
            // Some NICs are said to have a speed of -1, which is none.
            Ok(speed) if speed.is_finite() => Ok(speed),
            _ => Err("is no speed in Mbit/s".to_owned()),
        })?;
        let Some(port) = port.filter(|port| (1..=255).contains(port)) else { return Ok(()) };
        let nic = &mut self.topology.nics[at];
        if nic.ports.iter().all(|known| known.port != port) {
            // The speed of merged NICs is that of all together.
            let rate_gbps = speed.filter(|speed| *speed > 0.0 && !merged).map(|mbit| mbit / 1e3);
            nic.ports.push(Port { port, state: None, link_layer: None, rate_gbps, netdev: None });
            nic.ports.sort_by_key(|port| port.port);
        }
        Ok(())
    }

    fn unnamed_nic(&mut self, node: Node<'_, '_>, parent: &str, cpu: &Cpu) -> Result<(), XmlError> {
        let pci = self.take(node)?;
        let name = format!("NIC{}", self.topology.nics.len());
        self.nameless.push(name.clone());
        self.named_nic(&name, pci, pcie(node), parent, cpu);
        Ok(())
    }

    fn finish(mut self) -> Result<Topology, XmlError> {
        self.number_gpus();
        if !self.nameless.is_empty() {
            let names = self.nameless.join(", ");
            self.note("nics", format!("no <net> says which devices {names} are"));
        }
        let mut topology = self.topology;
        topology.numa.sort_by_key(|node| node.id);
        topology.nvswitch = self
            .switches
            .filter(|switches| !switches.is_empty())
            .and_then(|switches| u32::try_from(switches.len()).ok());
        if self.devs.iter().all(Option::is_none) && topology.gpus.len() > 1 {
            topology.notes.push(Note::new(
                "links",
                "the file lists no <gpu>, so NVLinks are unknown; GPU pairs show their PCIe path",
            ));
        }
        let mut links = topology.derive_links();
        across_cpus(&topology, &mut links);
        for card in self.cards {
            for (n, a) in card.iter().enumerate() {
                for b in &card[n + 1..] {
                    let nic = |at: &usize| u32::try_from(*at).map(Device::Nic).ok();
                    if let Some((a, b)) = nic(a).zip(nic(b)) {
                        links.set(a, b, LinkKind::Pix);
                    }
                }
            }
        }
        one_card(&topology, &mut links);
        topology.links = links;
        asymmetric_nvlinks(&mut topology);
        Ok(topology)
    }

    /// Numbers the GPUs by `dev`, or in PCI order (which NVML's is) where the file has no `dev`.
    fn number_gpus(&mut self) {
        let known: BTreeSet<u32> = self.devs.iter().flatten().copied().collect();
        let gpus = std::mem::take(&mut self.topology.gpus);
        let mut gpus: Vec<(Option<u32>, Gpu)> = self.devs.iter().copied().zip(gpus).collect();
        if known.len() == gpus.len() {
            gpus.sort_by_key(|(dev, _)| *dev);
        } else {
            gpus.sort_by_key(|(_, gpu)| gpu.pci);
            self.topology
                .notes
                .push(Note::new("gpus", "the file does not number them; they are in PCI order"));
        }
        for (at, (dev, mut gpu)) in (0u32..).zip(gpus) {
            gpu.index =
                GpuIndex(if known.len() == self.devs.len() { dev.unwrap_or(at) } else { at });
            self.topology.gpus.push(gpu);
        }
    }
}

/// Devices under different `<cpu>` elements are on different NUMA nodes, numbered or not.
fn across_cpus(topology: &Topology, links: &mut Links) {
    let ancestry = topology.ancestry();
    let host = |parent: &Option<String>| {
        ancestry.above(parent.as_deref()).last().map(|bridge| bridge.id.clone())
    };
    let gpus = topology.gpus.iter().map(|gpu| host(&gpu.parent));
    let hosts: Vec<Option<String>> =
        gpus.chain(topology.nics.iter().map(|nic| host(&nic.parent))).collect();
    let devices: Vec<(Device, Option<String>)> = topology.devices().zip(hosts).collect();
    for (n, (a, host_a)) in devices.iter().enumerate() {
        for (b, host_b) in &devices[n + 1..] {
            if links.between(*a, *b).is_none() && host_a != host_b {
                links.set(*a, *b, LinkKind::Sys);
            }
        }
    }
}

/// NICs that are functions of one device are on one card, whose port NCCL leaves out.
fn one_card(topology: &Topology, links: &mut Links) {
    let card = |nic: &Nic| nic.pci.map(|place| PciAddress { function: 0, ..place });
    for (a, first) in (0u32..).zip(&topology.nics) {
        for (b, second) in (a + 1..).zip(topology.nics.iter().skip(a as usize + 1)) {
            if card(first).is_some() && card(first) == card(second) {
                links.set(Device::Nic(a), Device::Nic(b), LinkKind::Pix);
            }
        }
    }
}

/// Notes pairs of GPUs that count the NVLinks between them differently.
fn asymmetric_nvlinks(topology: &mut Topology) {
    let count = |a: &Gpu, b: &Gpu| {
        let to_b = |link: &&NvLink| b.pci.is_some_and(|place| link.peer == NvLinkPeer::Gpu(place));
        a.nvlinks.iter().filter(to_b).count()
    };
    let mut notes = Vec::new();
    for (n, a) in topology.gpus.iter().enumerate() {
        for b in &topology.gpus[n + 1..] {
            let (there, back) = (count(a, b), count(b, a));
            if there != back {
                let text = format!("{there} NVLinks to GPU{}, which has {back} back", b.index);
                notes.push(Note::new(format!("GPU{}", a.index), text));
            }
        }
    }
    topology.notes.extend(notes);
}

/// A real place; `None` for placeholders such as `fffffff:ff:ff.0`.
fn place(busid: &str) -> Option<PciAddress> {
    busid.trim().parse().ok()
}

/// The best that NCCL found for a device's link.
fn pcie(node: Node<'_, '_>) -> Option<PcieLink> {
    // `16.0 GT/s PCIe`, `8 GT/s`, `Unknown`: the number is what all spellings have.
    let speed = node.attribute("link_speed").and_then(|text| text.split_whitespace().next());
    let max_gt_per_s = speed.and_then(|text| text.parse().ok()).filter(|gt: &f64| *gt > 0.0);
    let max_width = node.attribute("link_width").and_then(|text| text.trim().parse().ok());
    let max_width = max_width.filter(|width| *width > 0);
    let known = max_gt_per_s.is_some() || max_width.is_some();
    known.then(|| PcieLink { max_gt_per_s, max_width, ..PcieLink::default() })
}
