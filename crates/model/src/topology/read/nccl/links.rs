//! Links that NCCL's form implies beyond the PCI tree that it contains.
//!
//! Does not read elements.
//!
//! *Invariant:* links that follow from the tree are not changed, except those within a card.

use crate::ids::PciAddress;
use crate::topology::{Device, Gpu, LinkKind, Links, Nic, Note, NvLinkEnds, Topology};

/// Devices under different `<cpu>` elements are on different NUMA nodes, numbered or not.
pub(super) fn across_cpus(topology: &Topology, links: &mut Links) {
    let ancestry = topology.ancestry();
    let host = |parent: Option<&str>| ancestry.above(parent).last().map(|bridge| bridge.id.clone());
    let gpus = topology.gpus.iter().map(|gpu| host(gpu.parent.as_deref()));
    let hosts: Vec<Option<String>> = gpus
        .chain(topology.nics.iter().map(|nic| host(nic.parent.as_deref().or(nic.dma_parent()))))
        .collect();
    let devices: Vec<(Device, Option<String>)> = topology.devices().zip(hosts).collect();
    for (n, (a, host_a)) in devices.iter().enumerate() {
        for (b, host_b) in &devices[n + 1..] {
            if links.between(*a, *b).is_none() && host_a != host_b {
                links.set(*a, *b, LinkKind::Sys);
            }
        }
    }
}

/// NICs that are functions of one device are on one card, whose port NCCL omits.
pub(super) fn one_card(topology: &Topology, links: &mut Links) {
    let card = |nic: &Nic| nic.pci.map(|place| PciAddress { function: 0, ..place });
    for (a, first) in (0u32..).zip(&topology.nics) {
        for (b, second) in (a + 1..).zip(topology.nics.iter().skip(a as usize + 1)) {
            if card(first).is_some() && card(first) == card(second) {
                links.set(Device::Nic(a), Device::Nic(b), LinkKind::Pix);
            }
        }
    }
}

/// Notes pairs of GPUs that report different numbers of NVLinks between them.
pub(super) fn asymmetric_nvlinks(topology: &mut Topology) {
    let ends: Vec<NvLinkEnds> = topology.gpus.iter().map(Gpu::active_nvlinks).collect();
    let mut notes = Vec::new();
    for (n, a) in topology.gpus.iter().enumerate() {
        for (m, b) in topology.gpus.iter().enumerate().skip(n + 1) {
            let (there, back) = (ends[n].to(b), ends[m].to(a));
            if there != back {
                let text = format!("{there} NVLinks to GPU{}, which has {back} back", b.index);
                notes.push(Note::new(format!("GPU{}", a.index), text));
            }
        }
    }
    topology.notes.extend(notes);
}
