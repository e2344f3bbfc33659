//! What limits a figure, by kind and in words.
//!
//! Holds no capacities.
//!
//! *Invariant:* a component's name says which one it is, so that a person can look at it.

use serde::Serialize;

use crate::ids::GpuIndex;

/// A part of a machine that limits copies.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Component {
    /// Its kind.
    pub kind: ComponentKind,
    /// Which one, like `uplink of switch 0000:4a:00.0, shared by gpu0 and gpu1`.
    pub name: String,
}

impl Component {
    /// What its name says without which one it is: `PCIe x16 gen 4`, `12 NVLinks`. Equal for parts
    /// of the same kind that differ in nothing else.
    pub fn like(&self) -> &str {
        let which = [" of ", " between ", ", which "];
        let at = which.iter().filter_map(|word| self.name.find(word)).min();
        match self.kind {
            ComponentKind::GpuPcie | ComponentKind::NicPcie | ComponentKind::NvLink => {
                &self.name[..at.unwrap_or(self.name.len())]
            }
            ComponentKind::Port => self.name.rfind(" (").map_or("", |at| &self.name[at..]),
            _ => "",
        }
    }
}

/// Kinds of components.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, strum::Display)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum ComponentKind {
    /// A GPU's own PCIe link.
    GpuPcie,
    /// A NIC's own PCIe link.
    NicPcie,
    /// The link between a PCIe switch and what is above it.
    Uplink,
    /// The interconnect of the sockets.
    Sockets,
    /// NVLinks: to another GPU, to NVSwitches or to a CPU.
    NvLink,
    /// NVLink-C2C between a GPU and its CPU.
    ChipLinks,
    /// A NIC's port.
    Port,
    /// Copies through the host's memory, for want of peer access.
    Staging,
}

/// `gpu0`, `gpu0 and gpu1`, `gpu0, gpu1 and gpu2`.
pub(super) fn among(gpus: &[GpuIndex]) -> String {
    let names: Vec<String> = gpus.iter().map(|gpu| format!("gpu{gpu}")).collect();
    match names.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, others)) => format!("{} and {last}", others.join(", ")),
        None => "no GPU".to_owned(),
    }
}
