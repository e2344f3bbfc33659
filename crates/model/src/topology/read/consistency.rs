//! Whether the parts of a topology agree with each other.
//!
//! Does not judge whether a machine is sensible, only whether its description is consistent.
//!
//! *Invariant:* a topology that passes has one device per name, identity and place, bridges whose
//! parents come before them, and links between its own devices.

use std::collections::BTreeSet;

use super::DEVICE_LIMIT;
use crate::topology::{Device, Topology};

/// A contradiction.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum Fault {
    /// More devices than any machine has.
    #[error("{count} GPUs and NICs are more than a machine has (at most {DEVICE_LIMIT})")]
    TooMany {
        /// How many there are.
        count: usize,
    },
    /// A GPU's index has more digits than the matrix's names allow.
    #[error("GPU{index} has too large an index (at most 9999)")]
    Index { index: u32 },
    /// Two parts share something that must be unique.
    #[error("{what} is there already, at {first}")]
    Duplicate {
        /// What it is, like `GPU3` or `bridge pci0000:15`.
        what: String,
        /// Key path of the first.
        first: String,
    },
    /// A device or bridge is attached to a bridge that does not exist, or comes only later.
    #[error("no bridge {parent:?} stands before this; parents come first in `bridges`")]
    Parent {
        /// The missing bridge's `id`.
        parent: String,
    },
    /// A link joins a device that does not exist.
    #[error("a link to {device}, but there is no {device}")]
    Link {
        /// The missing device.
        device: Device,
    },
}

/// Finds the first contradiction; returns its key path and what it is.
pub(super) fn check(topology: &Topology) -> Result<(), (String, Fault)> {
    let count = topology.gpus.len() + topology.nics.len();
    if count > DEVICE_LIMIT {
        return Err(("gpus".to_owned(), Fault::TooMany { count }));
    }
    names(topology)?;
    parents(topology)?;
    links(topology)
}

/// Remembers where each thing first occurred.
#[derive(Default)]
struct Seen(std::collections::BTreeMap<String, String>);

impl Seen {
    fn add(&mut self, what: String, path: String) -> Result<(), (String, Fault)> {
        match self.0.get(&what) {
            Some(first) => {
                let first = first.clone();
                Err((path, Fault::Duplicate { what, first }))
            }
            None => {
                self.0.insert(what, path);
                Ok(())
            }
        }
    }
}

fn names(topology: &Topology) -> Result<(), (String, Fault)> {
    let mut seen = Seen::default();
    for (at, gpu) in topology.gpus.iter().enumerate() {
        let index = gpu.index.0;
        if index > 9999 {
            return Err((format!("gpus[{at}].index"), Fault::Index { index }));
        }
        seen.add(format!("GPU{index}"), format!("gpus[{at}].index"))?;
        if let Some(uuid) = &gpu.uuid {
            seen.add(format!("UUID {uuid}"), format!("gpus[{at}].uuid"))?;
        }
        if let Some(pci) = gpu.pci {
            seen.add(format!("a GPU at {pci}"), format!("gpus[{at}].pci"))?;
        }
        for (part, mig) in gpu.mig.iter().enumerate() {
            seen.add(format!("UUID {}", mig.uuid), format!("gpus[{at}].mig[{part}].uuid"))?;
        }
        for (part, link) in gpu.nvlinks.iter().enumerate() {
            let what = format!("GPU{index}'s NVLink {}", link.link);
            seen.add(what, format!("gpus[{at}].nvlinks[{part}].link"))?;
        }
    }
    for (at, nic) in topology.nics.iter().enumerate() {
        seen.add(format!("NIC {}", nic.name), format!("nics[{at}].name"))?;
        for (part, port) in nic.ports.iter().enumerate() {
            let what = format!("port {}:{}", nic.name, port.port);
            seen.add(what, format!("nics[{at}].ports[{part}].port"))?;
        }
    }
    for (at, node) in topology.numa.iter().enumerate() {
        seen.add(format!("NUMA node {}", node.id), format!("numa[{at}].id"))?;
    }
    Ok(())
}

fn parents(topology: &Topology) -> Result<(), (String, Fault)> {
    let mut seen = Seen::default();
    let mut known: BTreeSet<&str> = BTreeSet::new();
    let missing = |parent: &Option<String>, known: &BTreeSet<&str>, path: String| match parent {
        Some(parent) if !known.contains(parent.as_str()) => {
            Err((path, Fault::Parent { parent: parent.clone() }))
        }
        _ => Ok(()),
    };
    for (at, bridge) in topology.bridges.iter().enumerate() {
        missing(&bridge.parent, &known, format!("bridges[{at}].parent"))?;
        seen.add(format!("bridge {}", bridge.id), format!("bridges[{at}].id"))?;
        known.insert(&bridge.id);
    }
    for (at, gpu) in topology.gpus.iter().enumerate() {
        missing(&gpu.parent, &known, format!("gpus[{at}].parent"))?;
    }
    for (at, nic) in topology.nics.iter().enumerate() {
        missing(&nic.parent, &known, format!("nics[{at}].parent"))?;
        let dma = nic.dma.as_ref().and_then(|dma| dma.parent.clone());
        missing(&dma, &known, format!("nics[{at}].dma.parent"))?;
    }
    Ok(())
}

fn links(topology: &Topology) -> Result<(), (String, Fault)> {
    let devices: BTreeSet<Device> = topology.devices().collect();
    for (a, b, _) in topology.links.iter() {
        if let Some(device) = [a, b].into_iter().find(|device| !devices.contains(device)) {
            return Err(("links".to_owned(), Fault::Link { device }));
        }
    }
    Ok(())
}
