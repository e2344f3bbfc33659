//! The PCI tree above the devices, and the links derived from it.
//!
//! Does not read sysfs; `probe::sysfs` fills in these values.
//!
//! *Invariant:* ancestry comes from `parent` alone, and is never guessed from bus numbers.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::{Device, Gpu, LinkKind, Links, Nic, NvLinkEnds, PcieLink, Topology};
use crate::ids::{GpuIndex, NumaId};

/// A PCI host bridge, root port or switch port.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bridge {
    /// Its name in sysfs: `pci0000:15` for a host bridge, a PCI address otherwise.
    pub id: String,
    /// The bridge above it; absent for a host bridge.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// Its role in the tree, which decides how links through it count.
    pub kind: BridgeKind,
    /// NUMA node, if the firmware reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa: Option<NumaId>,
    /// Package (socket) to whose root complex it belongs, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub package: Option<u32>,
    /// Its end of a PCIe link: of that to the CPU for a switch's upstream port, else of that to
    /// what is below; absent for a host bridge.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pcie: Option<PcieLink>,
}

/// The role of a bridge between a device and its CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BridgeKind {
    /// The root of one PCI hierarchy, inside a CPU.
    Host,
    /// A port of the root complex: the first bridge below the CPU.
    RootPort,
    /// The port of a switch that faces the CPU.
    SwitchUp,
    /// A port of a switch that faces a device.
    SwitchDown,
    /// A bridge whose port type is unknown.
    Bridge,
}

/// Longest chain of bridges that is followed; a deeper one means that the parents form a cycle.
const DEPTH_LIMIT: usize = 64;

/// The bridges of a topology by name, to walk up from a device.
#[derive(Clone, Debug)]
pub struct Ancestry<'a> {
    bridges: BTreeMap<&'a str, &'a Bridge>,
}

impl<'a> Ancestry<'a> {
    /// The bridges above something attached to `parent`, nearest first.
    pub fn above(&self, parent: Option<&str>) -> Vec<&'a Bridge> {
        let find = |id: &str| self.bridges.get(id).copied();
        std::iter::successors(parent.and_then(find), |bridge| {
            bridge.parent.as_deref().and_then(find)
        })
        .take(DEPTH_LIMIT)
        .collect()
    }

    /// The bridges between two devices that are attached to these, without those above both.
    pub fn between(&self, a: Option<&str>, b: Option<&str>) -> Vec<&'a Bridge> {
        let (a, b) = (self.above(a), self.above(b));
        let only = |one: &[&'a Bridge], other: &[&'a Bridge]| -> Vec<&'a Bridge> {
            let shared = |bridge: &Bridge| other.iter().any(|above| above.id == bridge.id);
            one.iter().copied().filter(|bridge| !shared(bridge)).collect()
        };
        [only(&a, &b), only(&b, &a)].concat()
    }

    /// The NUMA node of the nearest bridge above that has one.
    pub fn numa(&self, parent: Option<&str>) -> Option<NumaId> {
        self.above(parent).iter().find_map(|bridge| bridge.numa)
    }
}

/// A device's place in the tree.
struct Placed<'a> {
    device: Device,
    numa: Option<NumaId>,
    /// Bridges above it, nearest first.
    above: Vec<&'a Bridge>,
    /// Bridges above its DMA function, nearest first.
    above_dma: Vec<&'a Bridge>,
}

impl<'a> Placed<'a> {
    /// The device as if it were where its DMA function is; `None` if it has none.
    fn by_dma(&self) -> Option<Placed<'a>> {
        let Placed { device, ref above_dma, .. } = *self;
        let above = above_dma.clone();
        (!above.is_empty()).then_some(Placed { device, numa: None, above, above_dma: Vec::new() })
    }
}

impl Topology {
    /// The bridges by their ids, to look up what is above a device.
    pub fn ancestry(&self) -> Ancestry<'_> {
        let bridges = self.bridges.iter().map(|bridge| (bridge.id.as_str(), bridge)).collect();
        Ancestry { bridges }
    }

    /// The links that follow from NVLinks, bridges and NUMA nodes.
    ///
    /// NVLinks to a common NVSwitch are counted as `nvidia-smi` does: the smaller number of active
    /// links of the two GPUs. A pair with unknown ancestry gets no link. Devices on different NUMA
    /// nodes are [`LinkKind::Sys`]; on one node (or on unknown ones in one package) under different
    /// host bridges [`LinkKind::Node`]. From a GPU to a NIC with a DMA function it is the nearer of
    /// both ways, as in UCX (`ucs_topo_get_distance_sysfs`).
    pub fn derive_links(&self) -> Links {
        let ancestry = self.ancestry();
        let gpus = self.gpus.iter().map(|gpu: &Gpu| Placed {
            device: Device::Gpu(gpu.index),
            numa: gpu.numa,
            above: ancestry.above(gpu.parent.as_deref()),
            above_dma: Vec::new(),
        });
        let nics = (0u32..).zip(&self.nics).map(|(at, nic): (u32, &Nic)| Placed {
            device: Device::Nic(at),
            numa: nic.numa,
            // What is known by its DMA function alone is there.
            above: ancestry.above(nic.parent.as_deref().or(nic.dma_parent())),
            above_dma: ancestry.above(nic.dma_parent()),
        });
        let placed: Vec<Placed<'_>> = gpus.chain(nics).collect();

        let mut links = Links::default();
        for (at, a) in placed.iter().enumerate() {
            for b in &placed[at + 1..] {
                // GPUs come before NICs.
                let to_nic = matches!((a.device, b.device), (Device::Gpu(_), Device::Nic(_)));
                let dma = b.by_dma().filter(|_| to_nic).and_then(|dma| by_ancestry(a, &dma));
                if let Some(kind) = by_ancestry(a, b).into_iter().chain(dma).min() {
                    links.set(a.device, b.device, kind);
                }
            }
        }
        let ends: Vec<NvLinkEnds> = self.gpus.iter().map(Gpu::active_nvlinks).collect();
        for (at, a) in self.gpus.iter().enumerate() {
            for (other, b) in self.gpus.iter().enumerate().skip(at + 1) {
                if let Some(kind) = by_nvlink((a, &ends[at]), (b, &ends[other])) {
                    links.set(Device::Gpu(a.index), Device::Gpu(b.index), kind);
                }
            }
        }
        links
    }

    /// The links that the source tells, or else those that follow from the rest.
    pub fn known_links(&self) -> Cow<'_, Links> {
        match self.links.is_empty() {
            true => Cow::Owned(self.derive_links()),
            false => Cow::Borrowed(&self.links),
        }
    }

    /// Pairs of GPUs whose NVLinks are up, but to whose memory the driver gives no peer access: so
    /// it is where the NVLink fabric is not, or not yet, whole (NVIDIA, Fabric Manager user
    /// guide). MIG mode refuses peer access by itself.
    pub fn refused_nvlinks(&self) -> Vec<(GpuIndex, GpuIndex)> {
        let links = self.known_links();
        let mut refused = Vec::new();
        for (at, a) in self.gpus.iter().enumerate() {
            for b in &self.gpus[at + 1..] {
                if is_refused(&links, a, b) {
                    refused.push((a.index, b.index));
                }
            }
        }
        refused
    }

    /// Whether two GPUs are one of [these pairs](Self::refused_nvlinks).
    pub fn refuses_nvlink(&self, a: GpuIndex, b: GpuIndex) -> bool {
        let find = |index| self.gpus.iter().find(|gpu| gpu.index == index);
        let pair = find(a).zip(find(b));
        pair.is_some_and(|(a, b)| is_refused(&self.known_links(), a, b))
    }
}

fn is_refused(links: &Links, a: &Gpu, b: &Gpu) -> bool {
    let lacks = |a: &Gpu, b: &Gpu| a.peers.as_ref().is_some_and(|peers| !peers.contains(&b.index));
    let kind = links.between(Device::Gpu(a.index), Device::Gpu(b.index));
    let whole = a.mig_mode != Some(true) && b.mig_mode != Some(true);
    whole && matches!(kind, Some(LinkKind::Nv(_))) && (lacks(a, b) || lacks(b, a))
}

/// How many NVLinks join two GPUs, as `nvidia-smi topo -m` counts them.
fn by_nvlink(a: (&Gpu, &NvLinkEnds), b: (&Gpu, &NvLinkEnds)) -> Option<LinkKind> {
    // Each side names the other; a link that only one side reports is not counted.
    let direct = a.1.to(b.0).min(b.1.to(a.0));
    let links = u8::try_from(direct + a.1.switches.min(b.1.switches)).unwrap_or(u8::MAX);
    (links > 0).then_some(LinkKind::Nv(links))
}

/// The link through the nearest common ancestor of two devices, as `nvidia-smi topo -m` names it.
fn by_ancestry(a: &Placed<'_>, b: &Placed<'_>) -> Option<LinkKind> {
    let known =
        |placed: &Placed<'_>| placed.above.last().is_some_and(|top| top.kind == BridgeKind::Host);
    let above_a: BTreeSet<&str> = a.above.iter().map(|bridge| bridge.id.as_str()).collect();
    let common = b.above.iter().position(|bridge| above_a.contains(bridge.id.as_str()));
    if let Some(at_b) = common {
        let meet = b.above[at_b];
        if meet.kind == BridgeKind::Host {
            return Some(LinkKind::Phb);
        }
        let at_a = a.above.iter().position(|bridge| bridge.id == meet.id)?;
        // Two functions of one card, or two cards under one port or one switch, are PIX. A switch
        // is an upstream port with downstream ports below it, so it adds two bridges to each side
        // but only one meeting point.
        return Some(if switches(&a.above[..=at_a], &b.above[..=at_b]) <= 1 {
            LinkKind::Pix
        } else {
            LinkKind::Pxb
        });
    }
    if !(known(a) && known(b)) {
        return None;
    }
    let numa = |placed: &Placed<'_>| {
        placed.numa.or_else(|| placed.above.iter().find_map(|bridge| bridge.numa))
    };
    let package = |placed: &Placed<'_>| placed.above.iter().find_map(|bridge| bridge.package);
    match (numa(a), numa(b)) {
        (Some(x), Some(y)) if x == y => Some(LinkKind::Node),
        (Some(_), Some(_)) => Some(LinkKind::Sys),
        _ => match (package(a), package(b)) {
            (Some(x), Some(y)) if x == y => Some(LinkKind::Node),
            (Some(_), Some(_)) => Some(LinkKind::Sys),
            _ => None,
        },
    }
}

/// Number of PCIe switches on the way up from both devices to the bridge where they meet.
///
/// A switch is recognised by its upstream port. If the source knows no port types, every bridge
/// below the common one counts as half a switch (a switch shows as two bridges).
fn switches(a: &[&Bridge], b: &[&Bridge]) -> usize {
    let typed = a.iter().chain(b).all(|bridge| bridge.kind != BridgeKind::Bridge);
    if typed {
        let ups: BTreeSet<&str> = a
            .iter()
            .chain(b)
            .filter(|bridge| bridge.kind == BridgeKind::SwitchUp)
            .map(|bridge| bridge.id.as_str())
            .collect();
        ups.len()
    } else {
        a.len().max(b.len()).div_ceil(2)
    }
}
