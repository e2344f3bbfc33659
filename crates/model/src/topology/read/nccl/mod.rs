//! NCCL's topology XML: a dump (`NCCL_TOPO_DUMP_FILE`), or written by hand for a virtual machine.
//!
//! NCCL writes one `<cpu>` for each NUMA node and one `<pci>` for each switch, and omits host
//! bridges and ports. A `<cpu>` counts as one host bridge, as in NCCL. Oddities of a file are kept
//! and noted: such files are written by hand, and control real jobs.
//!
//! *Invariant:* a device stays under the elements that it is under in the file.

mod links;
mod nets;
mod nvlinks;

use std::collections::{BTreeMap, BTreeSet};

use roxmltree::Node;

use super::xml::{XmlError, parsed, required, wrong};
use super::{DEVICE_LIMIT, NUMA_LIMIT};
use crate::cpuset::CpuSet;
use crate::ids::{GpuIndex, NumaId, PciAddress};
use crate::topology::{
    Bridge, BridgeKind, ComputeCapability, Device, DmaFunction, Gpu, LinkKind, NCCL_DMA_SUFFIX,
    Nic, NicKind, Note, NumaNode, PcieLink, Topology, VERSION,
};

/// The highest plausible compute capability, times ten; a larger number is something else.
const NEWEST_SM: u32 = 299;

pub(super) fn read(system: Node<'_, '_>) -> Result<Topology, XmlError> {
    let mut reader = Reader::new();
    if let Some(version) = system.attribute("version").filter(|version| *version != "1") {
        reader.note("version", format!("is {version}; NCCL's own form is 1"));
    }
    for child in system.children().filter(Node::is_element) {
        match child.tag_name().name() {
            "cpu" => reader.cpu(child)?,
            other => reader.note(other, "is not an element of a system; it is left out"),
        }
    }
    reader.finish()
}

/// What a `<cpu>` determines for everything below it.
struct Cpu {
    numa: Option<NumaId>,
    cpus: Option<CpuSet>,
}

struct Reader {
    topology: Topology,
    /// The `dev` of each GPU, in the order of `topology.gpus`.
    devs: Vec<Option<u32>>,
    /// NVSwitches at which NVLinks end; `None` once one has no real address.
    switches: Option<BTreeSet<PciAddress>>,
    /// NICs that share one card, by position.
    cards: Vec<Vec<usize>>,
    /// The number of each card in `cards`, by its place.
    card_at: BTreeMap<PciAddress, usize>,
    ports: nets::Ports,
    /// GPUs of other vendors, by busid.
    foreign: Vec<String>,
    /// NICs without a device name in the file.
    nameless: Vec<String>,
    places: BTreeSet<PciAddress>,
    hosts: BTreeSet<String>,
    /// How often each bridge's name has occurred; placeholders may repeat.
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
            card_at: BTreeMap::new(),
            ports: nets::Ports::default(),
            foreign: Vec::new(),
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
            // NCCL writes -1 for unknown.
            if text.starts_with('-') {
                return Ok(None);
            }
            integer(text, "is not a NUMA node").map(|id| Some(NumaId(id)))
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

    /// Adds a bridge and returns its `id`, made unique if necessary.
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
        let (package, pcie) = (None, None);
        self.topology.bridges.push(Bridge { id: id.clone(), parent, kind, numa, package, pcie });
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
                other => self.note(other, "is not an element of a PCI tree; it is left out"),
            }
        }
        Ok(())
    }

    /// One PCI function: a GPU, a NIC, a switch, or a card with several of them.
    fn pci(&mut self, node: Node<'_, '_>, parent: &str, cpu: &Cpu) -> Result<(), XmlError> {
        let busid = required(node, "busid")?;
        let inside = |name: &'static str| {
            node.children().filter(move |child: &Node<'_, '_>| child.has_tag_name(name))
        };
        let class = node.attribute("class").unwrap_or_default().trim_start_matches("0x");
        let known = ["gpu", "nic", "pci"];
        for other in node.children().filter(Node::is_element) {
            if !known.contains(&other.tag_name().name()) {
                self.note(
                    other.tag_name().name(),
                    "is not an element of a PCI tree; it is left out",
                );
            }
        }
        // Whatever is attached to a card is attached to the card's own switch.
        let below = match inside("pci").next() {
            Some(_) => {
                let kind = BridgeKind::SwitchUp;
                self.bridge(busid.to_owned(), Some(parent), kind, None)
            }
            None => parent.to_owned(),
        };
        for nic in inside("nic") {
            self.nic(nic, place(busid), pcie(node), &below, cpu)?;
        }
        if manages_switches(node) {
            let own = |nic: &&mut Nic| nic.pci.is_some() && nic.pci == place(busid);
            let here = self.topology.nics.iter_mut().filter(own);
            here.for_each(|nic| nic.kind = NicKind::SwitchManager);
        }
        let mut gpus = inside("gpu");
        let first = gpus.next();
        for _ in gpus {
            self.note(busid, "has a second <gpu>, which is left out: a GPU has an address alone");
        }
        let graphics = class.starts_with("03");
        if first.is_some() || (graphics && inside("nic").next().is_none()) {
            if is_foreign(node, first) {
                self.foreign.push(busid.to_owned());
            } else {
                self.gpu(node, first, &below, cpu)?;
            }
        }
        for child in inside("pci") {
            self.pci(child, &below, cpu)?;
        }
        let told = first.is_some() || inside("nic").next().is_some();
        if !told && (class.starts_with("0200") || class.starts_with("0207")) {
            self.unnamed_nic(node, &below, cpu)?;
        } else if !told && class.is_empty() && inside("pci").next().is_none() {
            self.note(busid, "has no class and no <gpu> or <nic>: GPU or NIC cannot be told");
        }
        Ok(())
    }

    /// Reserves a PCI address for a device; each may be used once.
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
        let number = |text: &str| integer(text, "is not a number");
        let (mut dev, mut sm, mut nvlinks) = (None, None, Vec::new());
        if let Some(gpu) = gpu {
            dev = parsed(gpu, "dev", number)?.filter(|dev| *dev < 10_000);
            sm = parsed(gpu, "sm", number)?.filter(|sm| (1..=NEWEST_SM).contains(sm));
            nvlinks = self.nvlinks(node, gpu)?;
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

    fn nic(
        &mut self,
        nic: Node<'_, '_>,
        pci: Option<PciAddress>,
        pcie: Option<PcieLink>,
        parent: &str,
        cpu: &Cpu,
    ) -> Result<(), XmlError> {
        let mut devices = Vec::new();
        let card = self.card(pci);
        for node in nic.children().filter(|child| child.has_tag_name("net")) {
            let net = nets::net(node)?;
            for name in &net.names {
                let at = match name.strip_suffix(NCCL_DMA_SUFFIX) {
                    Some(own) => self.dma_of(own, pci, parent),
                    None => self.named_nic(name, pci, pcie, parent, cpu),
                };
                if self.topology.nics.len() > DEVICE_LIMIT {
                    return Err(wrong(node, "there are more NICs than a machine has"));
                }
                if !devices.contains(&at) {
                    devices.push(at);
                }
                if net.socket {
                    self.topology.nics[at].kind = NicKind::Socket;
                } else {
                    self.ports.add(at, card, &net);
                }
            }
        }
        if devices.is_empty() {
            self.note("nic", "a <nic> without <net> has no name; it is left out");
        }
        self.cards[card].extend(devices);
        Ok(())
    }

    /// The number of the card at an address; functions of one device are on one card.
    fn card(&mut self, pci: Option<PciAddress>) -> usize {
        let fresh = self.cards.len();
        let place = pci.map(|place| PciAddress { function: 0, ..place });
        let at = place.map_or(fresh, |place| *self.card_at.entry(place).or_insert(fresh));
        if at == fresh {
            self.cards.push(Vec::new());
        }
        at
    }

    /// The position of the NIC with a name; a new one is added.
    fn named_nic(
        &mut self,
        name: &str,
        pci: Option<PciAddress>,
        pcie: Option<PcieLink>,
        parent: &str,
        cpu: &Cpu,
    ) -> usize {
        let own = self.topology.nics.iter().position(|nic| nic.name == name);
        let at = own.unwrap_or_else(|| self.unplaced_nic(name));
        let nic = &mut self.topology.nics[at];
        // What its DMA function alone has named so far has no place yet.
        if nic.parent.is_none() {
            let parent = Some(parent.to_owned());
            *nic = Nic { pci, numa: cpu.numa, pcie, parent, ..std::mem::take(nic) };
        }
        at
    }

    fn unplaced_nic(&mut self, name: &str) -> usize {
        self.topology.nics.push(Nic { name: name.to_owned(), ..Nic::default() });
        self.topology.nics.len() - 1
    }

    /// The position of the NIC that has a DMA function at a place. Unless NCCL is told to, it
    /// lists no other function of the NIC.
    fn dma_of(&mut self, name: &str, pci: Option<PciAddress>, parent: &str) -> usize {
        let own = self.topology.nics.iter().position(|nic| nic.name == name);
        let at = own.unwrap_or_else(|| self.unplaced_nic(name));
        self.topology.nics[at].dma = Some(DmaFunction { pci, parent: Some(parent.to_owned()) });
        at
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
        if !self.foreign.is_empty() {
            let text = format!("another vendor's, and so left out: {}", self.foreign.join(", "));
            self.note("gpus", text);
        }
        self.name_sockets();
        self.ports.give_to(&mut self.topology.nics);
        let mut topology = self.topology;
        topology.numa.sort_by_key(|node| node.id);
        topology.nvswitch = self
            .switches
            .filter(|switches| !switches.is_empty())
            .and_then(|switches| u32::try_from(switches.len()).ok());
        if self.devs.iter().all(Option::is_none) && topology.gpus.len() > 1 {
            topology.nvlinks_untold = true;
            topology.notes.push(Note::new(
                "links",
                "the file lists no <gpu>, so NVLinks are unknown; GPU pairs show their PCIe path",
            ));
        }
        let mut links = topology.derive_links();
        links::across_cpus(&topology, &mut links);
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
        links::one_card(&topology, &mut links);
        topology.links = links;
        links::asymmetric_nvlinks(&mut topology);
        Ok(topology)
    }

    /// Notes which networks are not RDMA devices.
    fn name_sockets(&mut self) {
        let sockets = self.topology.nics.iter().filter(|nic| nic.kind == NicKind::Socket);
        let names: Vec<&str> = sockets.map(|nic| nic.name.as_str()).collect();
        if !names.is_empty() {
            let text = format!(
                "network interfaces that NCCL reaches through sockets, no RDMA devices, so that UCX \
                 cannot use them for InfiniBand or RoCE: {}",
                names.join(", ")
            );
            self.note("nics", text);
        }
    }

    /// Numbers the GPUs by `dev`, or in PCI order (as NVML does) if the file has no `dev`.
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

/// Whether a GPU is another vendor's: files of RCCL, AMD's NCCL, have the same form.
fn is_foreign(pci: Node<'_, '_>, gpu: Option<Node<'_, '_>>) -> bool {
    let of_rccl = |gpu: Node<'_, '_>| {
        gpu.has_attribute("gcn") || gpu.children().any(|child| child.has_tag_name("xgmi"))
    };
    match pci.attribute("vendor").map(str::trim) {
        // Placeholders of virtual machines name no existing vendor.
        Some("0x10de" | "0x10DE" | "0xffff" | "0x0000" | "") | None => gpu.is_some_and(of_rccl),
        Some(_) => true,
    }
}

/// Whether a device is the baseboard's way to its NVSwitches.
fn manages_switches(pci: Node<'_, '_>) -> bool {
    let names = ["vendor", "device", "subsystem_vendor", "subsystem_device"];
    let told = names.map(|name| pci.attribute(name).unwrap_or_default().trim_start_matches("0x"));
    told == NicKind::SWITCH_MANAGER_IDS.map(|id| format!("{id:04x}"))
}

/// A whole number, also in hexadecimal (`0x1`).
fn integer(text: &str, problem: &str) -> Result<u32, String> {
    let read = match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(digits) => u32::from_str_radix(digits, 16),
        None => text.parse(),
    };
    read.map_err(|_| problem.to_owned())
}

/// A real PCI address; `None` for placeholders such as `fffffff:ff:ff.0`.
fn place(busid: &str) -> Option<PciAddress> {
    busid.trim().parse().ok()
}

/// The best speed that NCCL found for a device's link.
fn pcie(node: Node<'_, '_>) -> Option<PcieLink> {
    // `16.0 GT/s PCIe`, `8 GT/s`, `Unknown`: the number is common to all spellings.
    let speed = node.attribute("link_speed").and_then(|text| text.split_whitespace().next());
    let max_gt_per_s = speed.and_then(|text| text.parse().ok()).filter(|gt: &f64| *gt > 0.0);
    let max_width = node.attribute("link_width").and_then(|text| text.trim().parse().ok());
    let max_width = max_width.filter(|width| *width > 0);
    let known = max_gt_per_s.is_some() || max_width.is_some();
    known.then(|| PcieLink { max_gt_per_s, max_width, ..PcieLink::default() })
}
