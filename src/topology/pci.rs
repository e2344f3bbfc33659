//! The PCI tree above the devices, and the links that follow from it.
//!
//! Does not read sysfs; `probe::sysfs` fills these values.
//!
//! *Invariant:* ancestry is taken from `parent` alone, never guessed from bus numbers.

use serde::{Deserialize, Serialize};

use crate::ids::NumaId;

/// A PCI host bridge, root port or switch port.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bridge {
    /// Its name in sysfs: `pci0000:15` for a host bridge, a PCI address otherwise.
    pub id: String,
    /// The bridge above it; absent for a host bridge.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// What it is.
    pub kind: BridgeKind,
    /// NUMA node, where the firmware says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa: Option<NumaId>,
    /// Package (socket) whose root complex it belongs to, where known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub package: Option<u32>,
}

/// What a bridge is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BridgeKind {
    /// The root of one PCI hierarchy, inside a CPU.
    Host,
    /// A port of the root complex.
    RootPort,
    /// The port of a switch that faces the CPU.
    SwitchUp,
    /// A port of a switch that faces a device.
    SwitchDown,
    /// A bridge whose port type the source did not tell.
    Bridge,
}

/// A PCIe link: what it runs at, and what both ends could do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PcieLink {
    /// Transfer rate now, GT/s (8 is generation 3, 16 is 4, 32 is 5, 64 is 6).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gt_per_s: Option<f64>,
    /// Lanes now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub width: Option<u32>,
    /// Transfer rate at best, GT/s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_gt_per_s: Option<f64>,
    /// Lanes at best.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_width: Option<u32>,
}
