//! A machine as people draw it: packages, NUMA nodes, host bridges, switches, devices.
//!
//! Root ports and switch ports are left out. If the source knew no bridges, devices that the links
//! place below one switch or one host bridge are grouped without a name.
//!
//! *Invariant:* every GPU and NIC of the topology is in the hierarchy exactly once; a DMA function
//! is there only if its bridge is known.

use std::collections::BTreeMap;

use crate::ids::NumaId;
use crate::topology::{Bridge, BridgeKind, Device, Gpu, LinkKind, Nic, NumaNode, Topology};

/// A part of a machine, with the parts inside or below it.
#[derive(Clone, Debug)]
pub(super) struct Part<'a> {
    pub(super) what: What<'a>,
    pub(super) children: Vec<Part<'a>>,
}

/// The kind of a part. Names are those of bridges, if they are known.
#[derive(Clone, Copy, Debug)]
pub(super) enum What<'a> {
    Package(Option<u32>),
    Numa(Option<NumaId>, Option<&'a NumaNode>),
    Host(Option<&'a str>),
    Switch(Option<&'a str>),
    Gpu(&'a Gpu),
    Nic(u32, &'a Nic),
    /// The DMA function of a NIC.
    Dma(u32, &'a Nic),
}

/// Where a part belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    package: Option<u32>,
    numa: Option<NumaId>,
}

/// The packages of a machine; parts that belong to none come last.
pub(super) fn packages(topology: &Topology) -> Vec<Part<'_>> {
    let mut places: BTreeMap<Place, Vec<Part<'_>>> = BTreeMap::new();
    for node in topology.numa.iter().filter(|node| !node.gpu_memory) {
        places.insert(Place { package: node.package, numa: Some(node.id) }, Vec::new());
    }
    for (place, part) in hosts(topology) {
        places.entry(place).or_default().push(part);
    }
    let mut packages: BTreeMap<(bool, Option<u32>), Vec<Part<'_>>> = BTreeMap::new();
    for (place, mut children) in places {
        children.sort_by_key(|host| first_device(host));
        let node = place.numa.and_then(|id| topology.numa_node(id));
        let numa = Part { what: What::Numa(place.numa, node), children };
        packages.entry((place.package.is_none(), place.package)).or_default().push(numa);
    }
    packages
        .into_iter()
        .map(|((_, id), children)| Part { what: What::Package(id), children })
        .collect()
}

/// The index of a part's first GPU, then NICs: the order that people expect.
fn first_device(part: &Part<'_>) -> (bool, u32) {
    match part.what {
        What::Gpu(gpu) => (false, gpu.index.0),
        What::Nic(at, _) => (true, at),
        _ => part.children.iter().map(first_device).min().unwrap_or((true, u32::MAX)),
    }
}

/// The host bridges with everything below them, and where each belongs.
fn hosts(topology: &Topology) -> Vec<(Place, Part<'_>)> {
    let mut below: BTreeMap<Option<&str>, Vec<&Bridge>> = BTreeMap::new();
    for bridge in &topology.bridges {
        below.entry(bridge.parent.as_deref()).or_default().push(bridge);
    }
    let mut devices: BTreeMap<&str, Vec<Part<'_>>> = BTreeMap::new();
    let mut loose = Vec::new();
    let known = |parent: &Option<String>| {
        let parent = parent.as_deref()?;
        topology.bridges.iter().map(|bridge| bridge.id.as_str()).find(|id| *id == parent)
    };
    for part in parts(topology) {
        let parent = match part.what {
            What::Gpu(gpu) => known(&gpu.parent),
            What::Nic(_, nic) => known(&nic.parent),
            What::Dma(_, nic) => known(&nic.dma.as_ref().and_then(|dma| dma.parent.clone())),
            _ => None,
        };
        match parent {
            None if matches!(part.what, What::Dma(..)) => {}
            Some(parent) => devices.entry(parent).or_default().push(part),
            None => loose.push(part),
        }
    }
    let mut hosts: Vec<(Place, Part<'_>)> = Vec::new();
    for root in below.get(&None).into_iter().flatten() {
        let children = branch(root, &below, &mut devices);
        if !children.is_empty() {
            let part = Part { what: What::Host(Some(&root.id)), children };
            hosts.push((place_of(topology, root, &part), part));
        }
    }
    hosts.extend(by_links(topology, loose));
    hosts
}

/// All devices as parts.
fn parts(topology: &Topology) -> impl Iterator<Item = Part<'_>> {
    let gpus = topology.gpus.iter().map(What::Gpu);
    let nics = (0u32..).zip(&topology.nics).map(|(at, nic)| What::Nic(at, nic));
    let dmas = (0u32..).zip(&topology.nics).filter(|(_, nic)| nic.dma.is_some());
    let dmas = dmas.map(|(at, nic)| What::Dma(at, nic));
    gpus.chain(nics).chain(dmas).map(|what| Part { what, children: Vec::new() })
}

/// What is attached to a bridge: its devices, and its switches with theirs. Ports are skipped.
fn branch<'a>(
    bridge: &'a Bridge,
    below: &BTreeMap<Option<&'a str>, Vec<&'a Bridge>>,
    devices: &mut BTreeMap<&'a str, Vec<Part<'a>>>,
) -> Vec<Part<'a>> {
    let mut children = devices.remove(bridge.id.as_str()).unwrap_or_default();
    for lower in below.get(&Some(bridge.id.as_str())).into_iter().flatten() {
        children.extend(branch(lower, below, devices));
    }
    children.sort_by_key(first_device);
    let switch = match bridge.kind {
        BridgeKind::SwitchUp => !children.is_empty(),
        // If the source knew no port types, a bridge with several children counts as a switch.
        BridgeKind::Bridge => children.len() > 1,
        BridgeKind::Host | BridgeKind::RootPort | BridgeKind::SwitchDown => false,
    };
    if switch { vec![Part { what: What::Switch(Some(&bridge.id)), children }] } else { children }
}

fn place_of(topology: &Topology, root: &Bridge, part: &Part<'_>) -> Place {
    let numa = root.numa.or_else(|| numa_inside(part));
    let node = numa.and_then(|id| topology.numa_node(id));
    Place { package: node.and_then(|node| node.package).or(root.package), numa }
}

fn numa_inside(part: &Part<'_>) -> Option<NumaId> {
    match part.what {
        What::Gpu(gpu) => numa_of(gpu),
        What::Nic(_, nic) => nic.numa,
        _ => part.children.iter().find_map(numa_inside),
    }
}

/// The one NUMA node that a GPU is drawn at: the first of several.
fn numa_of(gpu: &Gpu) -> Option<NumaId> {
    let several = || gpu.numa_set.as_ref().and_then(|set| set.first()).map(NumaId);
    gpu.numa.or_else(several)
}

/// Groups devices without known bridges by their links.
fn by_links<'a>(topology: &'a Topology, loose: Vec<Part<'a>>) -> Vec<(Place, Part<'a>)> {
    let hosts = groups(topology, loose, LinkKind::Phb);
    let host = |devices: Vec<Part<'a>>| {
        let switches = groups(topology, devices, LinkKind::Pxb).into_iter();
        let children = switches.flat_map(|mut devices| {
            if devices.len() > 1 {
                devices = vec![Part { what: What::Switch(None), children: devices }];
            }
            devices
        });
        let part = Part { what: What::Host(None), children: children.collect() };
        let numa = numa_inside(&part).or_else(|| numa_nearby(topology, &part));
        let package = numa.and_then(|id| topology.numa_node(id)).and_then(|node| node.package);
        (Place { package, numa }, part)
    };
    hosts.into_iter().map(host).collect()
}

fn device(part: &Part<'_>) -> Option<Device> {
    match part.what {
        What::Gpu(gpu) => Some(Device::Gpu(gpu.index)),
        What::Nic(at, _) => Some(Device::Nic(at)),
        _ => None,
    }
}

/// Groups of devices that are connected, directly or indirectly, by PCI links up to a kind.
fn groups<'a>(topology: &Topology, parts: Vec<Part<'a>>, kind: LinkKind) -> Vec<Vec<Part<'a>>> {
    let near = |a: &Part<'_>, b: &Part<'_>| {
        let link = device(a).zip(device(b)).and_then(|(a, b)| topology.links.between(a, b));
        link.is_some_and(|link| link >= LinkKind::Pix && link <= kind)
    };
    let mut groups: Vec<Vec<Part<'a>>> = Vec::new();
    for part in parts {
        let (joined, mut rest): (Vec<_>, Vec<_>) =
            groups.into_iter().partition(|group| group.iter().any(|other| near(&part, other)));
        let mut group: Vec<Part<'a>> = joined.into_iter().flatten().collect();
        group.push(part);
        group.sort_by_key(first_device);
        rest.push(group);
        groups = rest;
    }
    groups
}

/// The NUMA node of a GPU that is close to a part's NICs.
fn numa_nearby(topology: &Topology, part: &Part<'_>) -> Option<NumaId> {
    part.children.iter().find_map(|child| match device(child) {
        None => numa_nearby(topology, child),
        Some(device) => topology.gpus.iter().find_map(|gpu| {
            let link = topology.links.between(device, Device::Gpu(gpu.index));
            link.filter(|link| *link < LinkKind::Sys).and_then(|_| numa_of(gpu))
        }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::{builtin, builtin_names, parse};

    fn devices(part: &Part<'_>, found: &mut Vec<Device>) {
        found.extend(device(part));
        part.children.iter().for_each(|child| devices(child, found));
    }

    #[test]
    fn every_device_is_there_once_with_and_without_bridges() {
        for name in builtin_names() {
            let with = parse(builtin(name).expect(name)).expect(name);
            let without = parse(&with.to_matrix()).expect(name);
            for topology in [with, without] {
                let mut found = Vec::new();
                packages(&topology).iter().for_each(|part| devices(part, &mut found));
                found.sort();
                assert_eq!(found, topology.devices().collect::<Vec<_>>(), "{name}");
            }
        }
    }
}
