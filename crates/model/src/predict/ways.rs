//! The parts of a machine that copies pass, and the way of each copy through them.
//!
//! Does not share them out; `fair` does.
//!
//! *Invariant:* the way from A to B passes the same parts as the way back, in the other direction.

use std::borrow::Cow;
use std::collections::BTreeMap;

use super::capacity::{self, Bus};
use super::component::{Component, ComponentKind, among};
use crate::ids::GpuIndex;
use crate::topology::{
    Ancestry, Bridge, BridgeKind, Device, Gpu, LinkKind, Links, Nic, NvLinkPeer, Port, PortState,
    Topology,
};

/// A part, before its capacity and name are known.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Part {
    Pcie(Device),
    Uplink(String),
    Sockets,
    /// Between two GPUs, smaller index first.
    Bridge(GpuIndex, GpuIndex),
    Switched(GpuIndex),
    ToCpu(GpuIndex),
    Port(u32),
    Staging(GpuIndex, GpuIndex),
}

/// Which direction of a part: away from the device or from the lower index, back, or both, which
/// share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Direction {
    Out,
    Back,
    Both,
}

impl Direction {
    fn reverse(self) -> Self {
        match self {
            Direction::Out => Direction::Back,
            Direction::Back => Direction::Out,
            Direction::Both => Direction::Both,
        }
    }
}

/// A way: what a copy passes, or why that is unknown.
pub(super) type Way = Result<Vec<usize>, String>;

/// One half of a way: parts from a device to where it meets the other half.
type Half = Result<Vec<Part>, String>;

/// A machine's parts, numbered as ways need them.
pub(super) struct Parts<'a> {
    topology: &'a Topology,
    ancestry: Ancestry<'a>,
    links: Cow<'a, Links>,
    numbers: BTreeMap<(Part, Direction), usize>,
    /// By number: what the part carries.
    pub(super) capacities: Vec<f64>,
    /// By number: what the part is.
    pub(super) components: Vec<Component>,
    /// Bridges whose link is taken to be as fast as the fastest below.
    pub(super) assumed_uplinks: bool,
    /// Whether a way passes the interconnect, which no topology tells.
    pub(super) assumed_sockets: bool,
}

impl<'a> Parts<'a> {
    pub(super) fn of(topology: &'a Topology) -> Self {
        Self {
            topology,
            ancestry: topology.ancestry(),
            links: topology.known_links(),
            numbers: BTreeMap::new(),
            capacities: Vec::new(),
            components: Vec::new(),
            assumed_uplinks: false,
            assumed_sockets: false,
        }
    }

    /// The number of NVLinks between each two GPUs, without those to NVSwitches.
    pub(super) fn bridges(&self, gpus: &[&Gpu]) -> Vec<Vec<u32>> {
        let count = |a: &Gpu, b: &Gpu| {
            let ends = [a, b].map(|gpu| Device::Gpu(gpu.index));
            match self.links.between(ends[0], ends[1]) {
                Some(LinkKind::Nv(links)) if !is_switched(a) && !is_switched(b) => links.into(),
                _ => 0,
            }
        };
        gpus.iter().map(|a| gpus.iter().map(|b| count(a, b)).collect()).collect()
    }

    /// The way from one GPU to another.
    pub(super) fn between(&mut self, from: &Gpu, to: &Gpu) -> Way {
        let (low, high) = if from.index < to.index { (from, to) } else { (to, from) };
        let (ups, downs) = self.joined(low, high)?;
        let back = from.index > to.index;
        let way = |this: &mut Self, parts: &[Part], direction: Direction| {
            let turned = if back { direction.reverse() } else { direction };
            parts.iter().map(|part| this.number(part, turned)).collect::<Way>()
        };
        let mut all = way(self, &ups, Direction::Out)?;
        all.extend(way(self, &downs, Direction::Back)?);
        let staged: Vec<Part> =
            ups.iter().filter(|part| matches!(part, Part::Staging(..))).cloned().collect();
        // What waits in the host's memory is shared by both directions.
        all.extend(way(self, &staged, Direction::Both)?);
        Ok(all)
    }

    /// The way from the host's memory to a GPU.
    pub(super) fn host_to(&mut self, gpu: &Gpu) -> Way {
        let half = self.near_host(gpu)?;
        half.iter().map(|part| self.number(part, Direction::Back)).collect()
    }

    /// The way from a GPU to the host's memory.
    pub(super) fn host_from(&mut self, gpu: &Gpu) -> Way {
        let half = self.near_host(gpu)?;
        half.iter().map(|part| self.number(part, Direction::Out)).collect()
    }

    /// The way from a GPU to the wire of a NIC.
    pub(super) fn through(&mut self, gpu: &Gpu, at: u32, nic: &Nic) -> Way {
        let device = Device::Nic(at);
        let parents = [nic.parent.as_deref(), nic.dma_parent()];
        let near = |parent: &Option<&str>| {
            let (own, others) = (self.above(gpu), self.ancestry.above(*parent));
            own.iter().any(|bridge| others.iter().any(|other| other.id == bridge.id))
        };
        let parent = parents.into_iter().find(near).unwrap_or(parents[0].or(parents[1]));
        let (ups, mut downs) = self.halves(gpu, device, &self.ancestry.above(parent))?;
        downs.insert(0, Part::Port(at));
        let mut way = ups.iter().map(|part| self.number(part, Direction::Out)).collect::<Way>()?;
        for part in &downs {
            way.push(self.number(part, Direction::Back)?);
        }
        Ok(way)
    }

    /// The parts of both GPUs, up to where they meet.
    fn joined(&self, a: &Gpu, b: &Gpu) -> Result<(Vec<Part>, Vec<Part>), String> {
        if !may_peer(a, b) || !may_peer(b, a) {
            let mut ups = self.near_host(a)?;
            ups.push(Part::Staging(a.index, b.index));
            return Ok((ups, self.near_host(b)?));
        }
        let kind = self.links.between(Device::Gpu(a.index), Device::Gpu(b.index));
        if matches!(kind, Some(LinkKind::Nv(_))) {
            return Ok(self.over_nvlinks(a, b));
        }
        self.halves(a, Device::Gpu(b.index), &self.above(b))
    }

    /// The parts between two GPUs that have NVLinks.
    pub(super) fn over_nvlinks(&self, a: &Gpu, b: &Gpu) -> (Vec<Part>, Vec<Part>) {
        if direct_nvlinks(a, b) > 0 || self.topology.nvswitch == Some(0) {
            return (vec![Part::Bridge(a.index, b.index)], Vec::new());
        }
        (vec![Part::Switched(a.index)], vec![Part::Switched(b.index)])
    }

    /// The parts from a GPU to the place where its way meets that of another device, and of that.
    fn halves(
        &self,
        gpu: &Gpu,
        other: Device,
        others: &[&'a Bridge],
    ) -> Result<(Vec<Part>, Vec<Part>), String> {
        let own = self.above(gpu);
        let common = |bridge: &&Bridge| others.iter().any(|other| other.id == bridge.id);
        let meet = own.iter().find(|bridge| common(bridge)).map(|bridge| bridge.id.as_str());
        let below = |chain: &[&Bridge]| {
            let chain = chain.iter().take_while(|bridge| Some(bridge.id.as_str()) != meet);
            chain.filter(|bridge| self.is_uplink(bridge)).map(uplink).collect::<Vec<Part>>()
        };
        let of_gpu = Part::Pcie(Device::Gpu(gpu.index));
        let within_pci = meet.is_some_and(|meet| !meet.starts_with("pci"));
        let mut ups = match self.to_cpu(gpu) {
            Some(part) if !within_pci => vec![part],
            _ => [vec![of_gpu], below(&own)].concat(),
        };
        let cpu_end = match other {
            Device::Gpu(index) if !within_pci => {
                self.find(index).and_then(|other| self.to_cpu(other))
            }
            _ => None,
        };
        let downs = match cpu_end {
            Some(part) => vec![part],
            None => [vec![Part::Pcie(other)], below(others)].concat(),
        };
        if self.is_across(gpu, other, meet.is_some()) {
            ups.push(Part::Sockets);
        }
        Ok((ups, downs))
    }

    /// The parts between a GPU and the host's memory.
    fn near_host(&self, gpu: &Gpu) -> Half {
        if let Some(part) = self.to_cpu(gpu) {
            return Ok(vec![part]);
        }
        let above = self.above(gpu);
        let uplinks = above.iter().filter(|bridge| self.is_uplink(bridge)).map(uplink);
        Ok([Part::Pcie(Device::Gpu(gpu.index))].into_iter().chain(uplinks).collect())
    }

    /// NVLink-C2C, or NVLinks to the CPU.
    pub(super) fn to_cpu(&self, gpu: &Gpu) -> Option<Part> {
        let is_cpu = |peer: &NvLinkPeer| *peer == NvLinkPeer::Cpu;
        (gpu.c2c.is_some() || gpu.nvlinks_to(is_cpu) > 0).then_some(Part::ToCpu(gpu.index))
    }

    /// Whether traffic crosses the interconnect of the sockets.
    fn is_across(&self, gpu: &Gpu, other: Device, meets: bool) -> bool {
        let sys = self.links.between(Device::Gpu(gpu.index), other) == Some(LinkKind::Sys);
        let (own, others) = (self.package(Device::Gpu(gpu.index)), self.package(other));
        // A socket may have several NUMA nodes, between which nvidia-smi says SYS.
        !meets && sys && (own.is_none() || own != others)
    }

    fn package(&self, device: Device) -> Option<u32> {
        let (parent, numa) = match device {
            Device::Gpu(index) => {
                let gpu = self.find(index)?;
                (gpu.parent.as_deref(), gpu.numa)
            }
            Device::Nic(at) => {
                let nic = self.topology.nics.get(at as usize)?;
                (nic.parent.as_deref(), nic.numa)
            }
        };
        let of_bridge = self.ancestry.above(parent).iter().find_map(|bridge| bridge.package);
        let numa = numa.or_else(|| self.ancestry.numa(parent));
        of_bridge.or_else(|| self.topology.numa_node(numa?)?.package)
    }

    fn find(&self, index: GpuIndex) -> Option<&'a Gpu> {
        self.topology.gpus.iter().find(|gpu| gpu.index == index)
    }

    fn above(&self, gpu: &Gpu) -> Vec<&'a Bridge> {
        let own = self.find(gpu.index).and_then(|gpu| gpu.parent.as_deref());
        self.ancestry.above(own)
    }

    /// Whether devices share the link above: a switch, or a port of unknown type above several.
    pub(super) fn is_uplink(&self, bridge: &Bridge) -> bool {
        match bridge.kind {
            BridgeKind::SwitchUp => true,
            BridgeKind::Bridge => self.gpus_below(&bridge.id).len() > 1,
            BridgeKind::Host | BridgeKind::RootPort | BridgeKind::SwitchDown => false,
        }
    }

    fn gpus_below(&self, id: &str) -> Vec<GpuIndex> {
        let is_below = |gpu: &&Gpu| self.above(gpu).iter().any(|bridge| bridge.id == id);
        self.topology.gpus.iter().filter(is_below).map(|gpu| gpu.index).collect()
    }

    /// The number of a part in a direction; an error if what it carries is unknown.
    fn number(&mut self, part: &Part, direction: Direction) -> Result<usize, String> {
        let key = (part.clone(), direction);
        if let Some(number) = self.numbers.get(&key) {
            return Ok(*number);
        }
        let (capacity, component) = self.measure(part, direction)?;
        let number = self.capacities.len();
        self.capacities.push(capacity);
        self.components.push(component);
        self.numbers.insert(key, number);
        Ok(number)
    }

    /// What a part carries by itself, if that is known.
    pub(super) fn capacity(&mut self, part: &Part) -> Option<f64> {
        self.measure(part, Direction::Out).ok().map(|(capacity, _)| capacity)
    }

    fn measure(&mut self, part: &Part, way: Direction) -> Result<(f64, Component), String> {
        match part {
            Part::Pcie(device) => {
                let bus = self.bus(*device)?;
                let kind = match device {
                    Device::Gpu(_) => ComponentKind::GpuPcie,
                    Device::Nic(_) => ComponentKind::NicPcie,
                };
                let name = format!("{bus} of {}", self.called(*device));
                Ok((bus.copies(), Component { kind, name }))
            }
            Part::Uplink(id) => {
                let (bus, gpus) = (self.uplink_bus(id)?, self.gpus_below(id));
                let shared = if gpus.len() > 1 { ", shared by " } else { " of " };
                let name = format!("uplink of switch {id}{shared}{}", among(&gpus));
                Ok((bus.copies(), Component { kind: ComponentKind::Uplink, name }))
            }
            Part::Sockets => self.sockets(),
            Part::Bridge(a, b) => self.bridge(*a, *b),
            Part::Switched(gpu) => self.nvlinks(*gpu, &NvLinkPeer::Switch, "the NVSwitches"),
            Part::ToCpu(gpu) => self.cpu_links(*gpu),
            Part::Port(at) => self.port(*at),
            Part::Staging(a, b) => self.staging(*a, *b, way),
        }
    }

    fn called(&self, device: Device) -> String {
        match device {
            Device::Gpu(index) => format!("gpu{index}"),
            Device::Nic(at) => {
                let nic = self.topology.nics.get(at as usize);
                nic.map_or_else(|| device.to_string(), |nic| nic.name.clone())
            }
        }
    }

    /// A device's link, by both its ends where both are told.
    fn bus(&self, device: Device) -> Result<Bus, String> {
        let (link, parent) = match device {
            Device::Gpu(index) => {
                self.find(index).map(|gpu| (gpu.pcie.as_ref(), gpu.parent.as_deref()))
            }
            Device::Nic(at) => {
                let nic = self.topology.nics.get(at as usize);
                nic.map(|nic| (nic.pcie.as_ref(), nic.parent.as_deref()))
            }
        }
        .unwrap_or_default();
        let own = Bus::of(link)
            .ok_or_else(|| format!("the PCIe link of {} is unknown", self.called(device)))?;
        let slot = self.ancestry.above(parent).first().and_then(|port| Bus::of(port.pcie.as_ref()));
        Ok(slot.map_or(own, |slot| own.slower(slot)))
    }

    /// The link above a switch; if it is not told, one like the fastest link of a device below.
    fn uplink_bus(&mut self, id: &str) -> Result<Bus, String> {
        let bridge = self.topology.bridges.iter().find(|bridge| bridge.id == id);
        if let Some(bus) = bridge.and_then(|bridge| Bus::of(bridge.pcie.as_ref())) {
            return Ok(bus);
        }
        self.assumed_uplinks = true;
        let below = self.gpus_below(id);
        let buses = below.iter().filter_map(|gpu| self.bus(Device::Gpu(*gpu)).ok());
        let fastest = buses.max_by(|a, b| a.copies().total_cmp(&b.copies()));
        // A switch without GPUs has NICs.
        let nics = self.topology.nics.iter().filter(|nic| {
            self.ancestry.above(nic.parent.as_deref()).iter().any(|bridge| bridge.id == id)
        });
        let of_nics = nics.filter_map(|nic| Bus::of(nic.pcie.as_ref()));
        fastest
            .or_else(|| of_nics.max_by(|a, b| a.copies().total_cmp(&b.copies())))
            .ok_or_else(|| format!("the uplink of switch {id} is unknown"))
    }

    fn sockets(&mut self) -> Result<(f64, Component), String> {
        let buses = self.topology.gpus.iter().filter_map(|gpu| Bus::of(gpu.pcie.as_ref()));
        let fastest = buses.max_by(|a, b| a.whole().total_cmp(&b.whole()));
        let untold = || "nothing tells of the interconnect of the sockets".to_owned();
        let capacity = fastest.ok_or_else(untold)?.between_sockets();
        self.assumed_sockets = true;
        let name = "the interconnect of the sockets".to_owned();
        Ok((capacity, Component { kind: ComponentKind::Sockets, name }))
    }

    /// NVLinks between two GPUs.
    fn bridge(&self, a: GpuIndex, b: GpuIndex) -> Result<(f64, Component), String> {
        let ends = self.find(a).zip(self.find(b));
        let counted = match self.links.between(Device::Gpu(a), Device::Gpu(b)) {
            Some(LinkKind::Nv(links)) => usize::from(links),
            _ => 0,
        };
        let links = ends.map_or(0, |(a, b)| direct_nvlinks(a, b));
        let links = if links > 0 { links } else { counted };
        let rates = ends.and_then(|(a, b)| {
            Some(capacity::nvlinks(a, links)?.min(capacity::nvlinks(b, links)?))
        });
        let capacity = rates
            .ok_or_else(|| format!("the NVLinks of gpu{a} and gpu{b} are of unknown speed"))?;
        let name = format!("{} between gpu{a} and gpu{b}", nvlink_count(links));
        Ok((capacity, Component { kind: ComponentKind::NvLink, name }))
    }

    fn nvlinks(
        &self,
        gpu: GpuIndex,
        peer: &NvLinkPeer,
        to: &str,
    ) -> Result<(f64, Component), String> {
        let untold = || format!("the NVLinks of gpu{gpu} are of unknown speed");
        let found = self.find(gpu).ok_or_else(untold)?;
        let told = found.nvlinks_to(|other| other == peer);
        let links = if told > 0 { told } else { self.most_nvlinks(gpu) };
        let capacity = capacity::nvlinks(found, links).ok_or_else(untold)?;
        let name = format!("{} of gpu{gpu} to {to}", nvlink_count(links));
        Ok((capacity, Component { kind: ComponentKind::NvLink, name }))
    }

    /// The NVLinks of a GPU of which only the matrix is known.
    fn most_nvlinks(&self, gpu: GpuIndex) -> usize {
        let counted = self.links.iter().filter_map(|(a, b, kind)| match kind {
            LinkKind::Nv(links) if [a, b].contains(&Device::Gpu(gpu)) => Some(usize::from(links)),
            _ => None,
        });
        counted.max().unwrap_or(0)
    }

    fn cpu_links(&self, gpu: GpuIndex) -> Result<(f64, Component), String> {
        let found = self.find(gpu).filter(|gpu| gpu.c2c.is_some());
        let Some(found) = found else {
            return self.nvlinks(gpu, &NvLinkPeer::Cpu, "the CPU");
        };
        let capacity = capacity::chip_links(found)
            .ok_or_else(|| format!("NVLink-C2C of gpu{gpu} is of unknown speed"))?;
        let name = format!("NVLink-C2C of gpu{gpu}");
        Ok((capacity, Component { kind: ComponentKind::ChipLinks, name }))
    }

    fn port(&self, at: u32) -> Result<(f64, Component), String> {
        let name = self.called(Device::Nic(at));
        let nic = self.topology.nics.get(at as usize);
        let active = nic.into_iter().flat_map(|nic| &nic.ports).filter(|port| is_active(port));
        let fastest = active.filter_map(|port| port.rate_gbps).max_by(f64::total_cmp);
        let rate = fastest.ok_or_else(|| format!("no active port of {name} tells its rate"))?;
        let name = format!("the port of {name} ({rate} Gbit/s)");
        Ok((capacity::port(rate), Component { kind: ComponentKind::Port, name }))
    }

    /// A copy through the host's memory: in one direction, or both together.
    fn staging(
        &self,
        a: GpuIndex,
        b: GpuIndex,
        way: Direction,
    ) -> Result<(f64, Component), String> {
        let buses = [self.bus(Device::Gpu(a)), self.bus(Device::Gpu(b))];
        let [first, second] = buses;
        let (first, second) = (first?, second?);
        let whole = first.slower(second).whole();
        let name = format!("no peer access of gpu{a} and gpu{b}: copies through the host's memory");
        let plain = Component { kind: ComponentKind::Staging, name };
        let below = |id: &&str| self.gpus_below(id).contains(&b);
        let own = self.find(a).map(|gpu| self.above(gpu)).unwrap_or_default();
        let uplinks = own.iter().filter(|bridge| self.is_uplink(bridge));
        let shared = uplinks.map(|bridge| bridge.id.as_str()).find(below);
        Ok(match (shared, way) {
            (Some(id), _) => {
                let name = format!(
                    "uplink of switch {id}, which copies between gpu{a} and gpu{b} pass twice: they \
                     have no peer access"
                );
                let kind = ComponentKind::Uplink;
                (capacity::STAGED_BELOW_ONE_UPLINK * whole, Component { kind, name })
            }
            (None, Direction::Both) => (capacity::STAGED_BOTH_WAYS * whole, plain),
            (None, Direction::Out | Direction::Back) => (capacity::STAGED * whole, plain),
        })
    }
}

fn uplink(bridge: &&Bridge) -> Part {
    Part::Uplink(bridge.id.clone())
}

fn nvlink_count(links: usize) -> String {
    match links {
        1 => "1 NVLink".to_owned(),
        links => format!("{links} NVLinks"),
    }
}

/// Whether a port carries data, as far as is known.
pub(super) fn is_active(port: &Port) -> bool {
    port.state.is_none_or(|state| state == PortState::Active)
}

/// Whether a GPU's NVLinks end at NVSwitches.
pub(super) fn is_switched(gpu: &Gpu) -> bool {
    gpu.nvlinks_to(|peer| *peer == NvLinkPeer::Switch) > 0
}

/// Whether the driver gives one GPU access to another's memory, or says nothing.
fn may_peer(gpu: &Gpu, other: &Gpu) -> bool {
    gpu.mig_mode != Some(true)
        && gpu.peers.as_ref().is_none_or(|peers| peers.contains(&other.index))
}

/// The NVLinks from one GPU to the other, as far as both tell of them.
fn direct_nvlinks(a: &Gpu, b: &Gpu) -> usize {
    let to = |one: &Gpu, other: &Gpu| {
        let wanted = other.pci.map(NvLinkPeer::Gpu);
        one.nvlinks_to(|peer| Some(*peer) == wanted)
    };
    to(a, b).min(to(b, a))
}
