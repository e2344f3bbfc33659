//! How two devices reach each other, by the names of `nvidia-smi topo -m`.
//!
//! Does not derive a link from a PCI tree; see `pci`.
//!
//! *Invariant:* [`Links`] is symmetric and has no entry from a device to itself.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::ids::{GpuIndex, IdError, text_form};

/// A row or column of the matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Device {
    /// `GPU0`, by NVML index.
    Gpu(GpuIndex),
    /// `NIC0`, by position in `Topology::nics`.
    Nic(u32),
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Gpu(index) => write!(f, "GPU{index}"),
            Device::Nic(at) => write!(f, "NIC{at}"),
        }
    }
}

impl FromStr for Device {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        let number = |digits: &str| {
            let plain =
                (1..=4).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_digit());
            plain.then(|| digits.parse::<u32>().ok()).flatten()
        };
        let gpu = text.strip_prefix("GPU").and_then(number).map(|n| Device::Gpu(GpuIndex(n)));
        let nic = || text.strip_prefix("NIC").and_then(number).map(Device::Nic);
        gpu.or_else(nic).ok_or_else(|| IdError {
            text: text.chars().take(80).collect(),
            expected: "a device of the matrix, like GPU0 or NIC0",
        })
    }
}

text_form!(Device);

/// How two devices reach each other, nearest first.
///
/// The order is the meaning: `a < b` reads "`a` is closer than `b`". The names are those of
/// `nvidia-smi topo -m`, so that a printed plan can be checked against the driver's own table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LinkKind {
    /// A device and itself: the diagonal of the matrix.
    X,
    /// This many bonded NVLinks; more are nearer.
    Nv(u8),
    /// At most a single PCIe bridge, so that traffic stays within one switch.
    Pix,
    /// Several PCIe bridges, without the host bridge.
    Pxb,
    /// The PCIe host bridge, usually the CPU's.
    Phb,
    /// The interconnect between PCIe host bridges of one NUMA node.
    Node,
    /// The interconnect between NUMA nodes (`SOC` in older drivers).
    Sys,
}

impl LinkKind {
    fn rank(self) -> (u8, Reverse<u8>) {
        match self {
            LinkKind::X => (0, Reverse(0)),
            LinkKind::Nv(links) => (1, Reverse(links)),
            LinkKind::Pix => (2, Reverse(0)),
            LinkKind::Pxb => (3, Reverse(0)),
            LinkKind::Phb => (4, Reverse(0)),
            LinkKind::Node => (5, Reverse(0)),
            LinkKind::Sys => (6, Reverse(0)),
        }
    }
}

impl Ord for LinkKind {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.rank().cmp(&other.rank())
    }
}

impl PartialOrd for LinkKind {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Display for LinkKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LinkKind::X => f.pad("X"),
            LinkKind::Nv(links) => f.pad(&format!("NV{links}")),
            LinkKind::Pix => f.pad("PIX"),
            LinkKind::Pxb => f.pad("PXB"),
            LinkKind::Phb => f.pad("PHB"),
            LinkKind::Node => f.pad("NODE"),
            LinkKind::Sys => f.pad("SYS"),
        }
    }
}

/// A cell that is not one of the matrix's words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{cell:?} is not a link: expected X, NV#, PIX, PXB, PHB, NODE or SYS")]
pub struct LinkKindError {
    /// The cell as it was given.
    pub cell: String,
}

impl FromStr for LinkKind {
    type Err = LinkKindError;

    fn from_str(cell: &str) -> Result<Self, LinkKindError> {
        let error = || LinkKindError { cell: cell.chars().take(40).collect() };
        match cell {
            "X" => Ok(LinkKind::X),
            "PIX" => Ok(LinkKind::Pix),
            "PXB" => Ok(LinkKind::Pxb),
            "PHB" => Ok(LinkKind::Phb),
            "NODE" => Ok(LinkKind::Node),
            "SYS" | "SOC" => Ok(LinkKind::Sys),
            _ => {
                let digits = cell.strip_prefix("NV").ok_or_else(error)?;
                let plain = digits.bytes().all(|b| b.is_ascii_digit());
                let links = digits.parse().ok().filter(|n| plain && *n > 0).ok_or_else(error)?;
                Ok(LinkKind::Nv(links))
            }
        }
    }
}

text_form!(LinkKind);

/// The links of a machine: a symmetric partial map from pairs of devices to kinds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Links {
    /// Keys are ordered, `a < b`.
    kinds: BTreeMap<(Device, Device), LinkKind>,
}

impl Links {
    /// Whether no link is known.
    pub fn is_empty(&self) -> bool {
        self.kinds.is_empty()
    }

    /// Number of pairs whose link is known.
    pub fn len(&self) -> usize {
        self.kinds.len()
    }

    /// The link between two devices: [`LinkKind::X`] to itself, `None` if unknown.
    pub fn between(&self, a: Device, b: Device) -> Option<LinkKind> {
        if a == b {
            return Some(LinkKind::X);
        }
        self.kinds.get(&(a.min(b), a.max(b))).copied()
    }

    /// Sets the link of a pair and returns the previous one. A device's link to itself is not
    /// stored.
    pub fn set(&mut self, a: Device, b: Device, kind: LinkKind) -> Option<LinkKind> {
        if a == b {
            return None;
        }
        self.kinds.insert((a.min(b), a.max(b)), kind)
    }

    /// Each known pair once, in matrix order.
    pub fn iter(&self) -> impl Iterator<Item = (Device, Device, LinkKind)> + '_ {
        self.kinds.iter().map(|((a, b), kind)| (*a, *b, *kind))
    }
}

/// One pair in the text form.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    a: Device,
    b: Device,
    kind: LinkKind,
}

impl Serialize for Links {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter().map(|(a, b, kind)| Row { a, b, kind }))
    }
}

impl<'de> Deserialize<'de> for Links {
    /// A pair named twice must agree; a pair of one device with itself is refused.
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        use serde::de::Error;
        let mut links = Links::default();
        for Row { a, b, kind } in Vec::<Row>::deserialize(deserializer)? {
            if a == b || kind == LinkKind::X {
                return Err(D::Error::custom(format!("{a} to {b}: a link joins two devices")));
            }
            if let Some(before) = links.set(a, b, kind).filter(|before| *before != kind) {
                return Err(D::Error::custom(format!("{a} to {b} is both {before} and {kind}")));
            }
        }
        Ok(links)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearer_is_less_and_more_nvlinks_are_nearer() {
        use LinkKind::{Node, Nv, Phb, Pix, Pxb, Sys, X};
        let order = [X, Nv(18), Nv(12), Nv(1), Pix, Pxb, Phb, Node, Sys];
        assert!(order.is_sorted());
        for kind in order {
            assert_eq!(kind.to_string().parse(), Ok(kind));
        }
        assert_eq!("SOC".parse(), Ok(Sys));
        for cell in ["", "NV", "NV0", "NV+1", "NV999", "OK", "pix", "SYSSYS"] {
            assert!(cell.parse::<LinkKind>().is_err(), "{cell:?}");
        }
    }

    #[test]
    fn links_are_symmetric() {
        let (gpu, nic) = (Device::Gpu(GpuIndex(0)), Device::Nic(0));
        let mut links = Links::default();
        links.set(nic, gpu, LinkKind::Pix);
        assert_eq!(links.between(gpu, nic), links.between(nic, gpu));
        assert_eq!(links.between(gpu, gpu), Some(LinkKind::X));
        assert_eq!(links.between(gpu, Device::Nic(1)), None);
    }
}
