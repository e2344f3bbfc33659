//! NCCL's topology XML, for `NCCL_TOPO_FILE`.
//!
//! Writes what NCCL cannot detect on a machine that hides it (switches, NUMA nodes, NVLinks). NCCL
//! itself fills in what is absent: CPU models, ranks, GPUDirect support, link speeds. Unknown facts
//! are therefore omitted; NCCL would believe an empty value.
//!
//! Follows the restrictions of NCCL's own parser: no XML declaration, one space between attributes,
//! no tabs (NCCL `src/graph/xml.cc`).
//!
//! *Invariant:* every element is below the switches and the NUMA node of its device; a device
//! without a PCI address is refused, because NCCL identifies devices only by that.

use std::collections::BTreeMap;

use crate::ids::{NumaId, PciAddress};
use crate::text::xml_escaped;
use crate::topology::{
    Bridge, BridgeKind, Device, Gpu, LinkLayer, NCCL_DMA_SUFFIX, Nic, NicKind, NvLinkPeer,
    PcieLink, Topology,
};

/// Why a topology cannot be written as NCCL's XML.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message says what each field is")]
#[non_exhaustive]
pub enum NcclFormError {
    /// A device's PCI address is unknown.
    #[error("the PCI address of {device} is unknown, and NCCL identifies devices only by that")]
    NoAddress { device: Device },
}

/// The address that NVML, and so NCCL, reports for the end of an NVLink that it cannot see.
const HIDDEN: &str = "fffffff:ffff:ff";

/// NICs with their numbers, by shared address.
type Cards<'a> = BTreeMap<PciAddress, Vec<(u32, &'a Nic)>>;

#[derive(Default)]
struct Element {
    tag: &'static str,
    attributes: Vec<(&'static str, String)>,
    children: Vec<Element>,
}

impl Element {
    fn new(tag: &'static str) -> Self {
        Self { tag, ..Self::default() }
    }

    fn with(mut self, name: &'static str, value: impl ToString) -> Self {
        self.attributes.push((name, value.to_string()));
        self
    }

    fn maybe(self, name: &'static str, value: Option<impl ToString>) -> Self {
        match value {
            Some(value) => self.with(name, value),
            None => self,
        }
    }

    fn write(&self, depth: usize, text: &mut String) {
        let indent = "  ".repeat(depth);
        text.push_str(&format!("{indent}<{}", self.tag));
        for (name, value) in &self.attributes {
            text.push_str(&format!(" {name}=\"{}\"", xml_escaped(value)));
        }
        if self.children.is_empty() {
            text.push_str("/>\n");
            return;
        }
        text.push_str(">\n");
        self.children.iter().for_each(|child| child.write(depth + 1, text));
        text.push_str(&format!("{indent}</{}>\n", self.tag));
    }
}

impl Topology {
    /// The machine as a file for `NCCL_TOPO_FILE`.
    ///
    /// # Errors
    /// If a device's PCI address is unknown.
    pub fn to_nccl(&self) -> Result<String, NcclFormError> {
        let mut cpus: BTreeMap<Option<NumaId>, Element> = BTreeMap::new();
        let ancestry = self.ancestry();
        for gpu in &self.gpus {
            let device = Device::Gpu(gpu.index);
            let pci = gpu.pci.ok_or(NcclFormError::NoAddress { device })?;
            let above = ancestry.above(gpu.parent.as_deref());
            let element = pci_element(pci.to_string(), "0x030200", gpu.pcie);
            let element = Element { children: vec![gpu_element(gpu)], ..element };
            self.put(&mut cpus, gpu.numa, &above, element);
        }
        for (pci, nics) in self.cards()? {
            let (_, first) = nics[0];
            let above = ancestry.above(first.parent.as_deref());
            let infiniband =
                first.ports.iter().any(|p| p.link_layer == Some(LinkLayer::InfiniBand));
            let class = if infiniband { "0x020700" } else { "0x020000" };
            let all = nics.iter().flat_map(|(at, nic)| nets(*at, nic, &nic.name));
            let element = nic_element(pci, class, first.pcie, all.collect());
            self.put(&mut cpus, first.numa, &above, element);
        }
        // NCCL takes a DMA function for a device of its own (`mlx5_0_dma`), and where there is one
        // it uses no other of the NIC (`NCCL_IB_DATA_DIRECT`).
        for (pci, nics) in self.dma_functions() {
            let (_, first) = nics[0];
            let above = ancestry.above(first.dma_parent());
            let name = |nic: &Nic| format!("{}{NCCL_DMA_SUFFIX}", nic.name);
            let all = nics.iter().flat_map(|(at, nic)| nets(*at, nic, &name(nic)));
            let element = nic_element(pci, "0x080000", None, all.collect());
            self.put(&mut cpus, None, &above, element);
        }
        let mut system = Element::new("system").with("version", 1);
        system.children = cpus.into_values().collect();
        let mut text = String::new();
        system.write(0, &mut text);
        Ok(text)
    }

    /// The NICs by shared address; those that only their DMA function places are left out.
    fn cards(&self) -> Result<Cards<'_>, NcclFormError> {
        let mut cards = Cards::new();
        for (at, nic) in (0u32..).zip(&self.nics) {
            let device = Device::Nic(at);
            let dma = nic.dma.as_ref().and_then(|dma| dma.pci);
            let Some(pci) = nic.pci else {
                dma.ok_or(NcclFormError::NoAddress { device })?;
                continue;
            };
            cards.entry(pci).or_default().push((at, nic));
        }
        Ok(cards)
    }

    /// The NICs by shared DMA function.
    fn dma_functions(&self) -> Cards<'_> {
        let mut cards = Cards::new();
        for (at, nic) in (0u32..).zip(&self.nics) {
            if let Some(pci) = nic.dma.as_ref().and_then(|dma| dma.pci) {
                cards.entry(pci).or_default().push((at, nic));
            }
        }
        cards
    }

    /// Puts a device's element below its switches, and these below its NUMA node's `<cpu>`.
    fn put(
        &self,
        cpus: &mut BTreeMap<Option<NumaId>, Element>,
        numa: Option<NumaId>,
        above: &[&Bridge],
        element: Element,
    ) {
        let numa = numa.or_else(|| above.iter().find_map(|bridge| bridge.numa));
        let mut inside = cpus.entry(numa).or_insert_with(|| {
            let cpus = numa.and_then(|id| self.numa_node(id)).and_then(|node| node.cpus.as_ref());
            let affinity = cpus.filter(|cpus| !cpus.is_empty()).map(|cpus| cpus.to_mask());
            let id = numa.map_or("-1".to_owned(), |id| id.to_string());
            Element::new("cpu").with("numaid", id).maybe("affinity", affinity)
        });
        for switch in switches(above) {
            let known = inside.children.iter().position(|child| {
                child.attributes.iter().any(|(name, id)| *name == "busid" && *id == switch.id)
            });
            let at = known.unwrap_or_else(|| {
                inside.children.push(pci_element(switch.id.clone(), "0x060400", None));
                inside.children.len() - 1
            });
            inside = &mut inside.children[at];
        }
        inside.children.push(element);
    }
}

/// A GPU with its active NVLinks, counted by their ends.
fn gpu_element(gpu: &Gpu) -> Element {
    let sm = gpu.compute_capability.map(|capability| capability.major * 10 + capability.minor);
    let mut element = Element::new("gpu").with("dev", gpu.index).maybe("sm", sm);
    let mut counts: BTreeMap<(String, &'static str), u32> = BTreeMap::new();
    for link in gpu.nvlinks.iter().filter(|link| link.active) {
        let end = match link.peer {
            NvLinkPeer::Gpu(peer) => (peer.to_string(), "0x030200"),
            NvLinkPeer::Switch => (HIDDEN.to_owned(), "0x068000"),
            NvLinkPeer::Cpu => (HIDDEN.to_owned(), "0x068001"),
            NvLinkPeer::Unknown => continue,
        };
        *counts.entry(end).or_default() += 1;
    }
    let nvlink = |((target, class), count): ((String, &'static str), u32)| {
        let element = Element::new("nvlink").with("target", target).with("count", count);
        element.with("tclass", class)
    };
    element.children = counts.into_iter().map(nvlink).collect();
    element
}

/// The switches on the way down to a device, topmost first.
///
/// If the source knew no port types, every second bridge counts as one, as in NCCL.
fn switches<'a>(above: &[&'a Bridge]) -> Vec<&'a Bridge> {
    let ports = above.iter().filter(|bridge| bridge.kind != BridgeKind::Host);
    let mut switches: Vec<&Bridge> = if above.iter().any(|b| b.kind == BridgeKind::Bridge) {
        ports.skip(1).step_by(2).copied().collect()
    } else {
        ports.filter(|bridge| bridge.kind == BridgeKind::SwitchUp).copied().collect()
    };
    switches.reverse();
    switches
}

fn pci_element(busid: String, class: &'static str, pcie: Option<PcieLink>) -> Element {
    let pcie = pcie.unwrap_or_default();
    let speed = pcie.max_gt_per_s.or(pcie.gt_per_s).map(|speed| format!("{speed:.1} GT/s PCIe"));
    let element = Element::new("pci").with("busid", busid).with("class", class);
    element.maybe("link_speed", speed).maybe("link_width", pcie.max_width.or(pcie.width))
}

fn nic_element(
    pci: PciAddress,
    class: &'static str,
    pcie: Option<PcieLink>,
    nets: Vec<Element>,
) -> Element {
    let nic = Element { children: nets, ..Element::new("nic") };
    Element { children: vec![nic], ..pci_element(pci.to_string(), class, pcie) }
}

/// The networks of a NIC by a name: one for each port, or one with only the name.
fn nets(at: u32, nic: &Nic, name: &str) -> Vec<Element> {
    let net = || Element::new("net").with("name", name).with("dev", at);
    if nic.kind == NicKind::Socket {
        return vec![net().with("port", 0).with("guid", "0x0")];
    }
    if nic.ports.is_empty() {
        return vec![net()];
    }
    let ports = nic.ports.iter().map(|port| {
        let mbit = port.rate_gbps.map(|rate| format!("{:.0}", rate * 1e3));
        net().maybe("speed", mbit).with("port", port.port)
    });
    ports.collect()
}
