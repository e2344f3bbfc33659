//! GPUs and NICs as their sources describe them.
//!
//! Does not judge them: whether a port is usable is a decision of `plan`.
//!
//! *Invariant:* optional facts are `None` when the source did not tell.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::pci::PcieLink;
use crate::cpuset::{CpuSet, NodeSet};
use crate::ids::{GpuIndex, GpuUuid, IdError, NumaId, PciAddress, text_form};

/// An NVIDIA GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    /// Its number in NVML order, which people know it by.
    pub index: GpuIndex,
    /// What it is known by for good, whatever else is in the machine; `None` when the source did
    /// not tell.
    pub uuid: Option<GpuUuid>,
    /// Marketing name, like `NVIDIA H100 80GB HBM3`.
    pub name: Option<String>,
    /// Where it is on the PCI bus; `None` when the source did not tell.
    pub pci: Option<PciAddress>,
    /// The host NUMA node it is nearest to, when it is one.
    pub numa: Option<NumaId>,
    /// All host NUMA nodes it is equally near to, when they are several (`0-7`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa_set: Option<NodeSet>,
    /// Host CPUs that are near it.
    pub cpus: Option<CpuSet>,
    /// All of its device memory, in bytes, as NVML counts it.
    pub memory_bytes: Option<u64>,
    /// Compute capability, like `9.0`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_capability: Option<ComputeCapability>,
    /// The NUMA node that its own memory is, on machines where the kernel sees it (POWER9, Grace).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_numa: Option<NumaId>,
    /// MIG instances; empty when MIG is off or there are none.
    #[serde(default)]
    pub mig: Vec<MigInstance>,
    /// Whether MIG mode is on (then the GPU itself runs nothing).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig_mode: Option<bool>,
    /// Its NVLinks, by link number.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nvlinks: Vec<NvLink>,
    /// Its chip-to-chip links to the CPU of a superchip (NVLink-C2C of Grace).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub c2c: Option<ChipLinks>,
    /// GPUs whose memory it can read directly (CUDA peer access), as the driver says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peers: Option<Vec<GpuIndex>>,
    /// Its PCIe link, now and at best.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pcie: Option<PcieLink>,
    /// The bridge it hangs off: the `id` of one of `Topology::bridges`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// Whether a display is attached or active on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub display: Option<bool>,
    /// Processes that use it, when the source could tell.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub processes: Vec<u32>,
}

/// A part of a GPU with memory and engines of its own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigInstance {
    /// What CUDA and NVML know it by: `MIG-…`.
    pub uuid: GpuUuid,
    /// Profile, like `3g.40gb`.
    pub profile: String,
    /// Device memory that is its own, in bytes.
    pub memory_bytes: Option<u64>,
}

/// One NVLink of a GPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NvLink {
    /// Link number on this GPU.
    pub link: u32,
    /// Whether NVML says that it is up; links that are down carry nothing and count for nothing.
    pub active: bool,
    /// NVLink generation, like 4.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    /// What is at the other end.
    pub peer: NvLinkPeer,
    /// Bandwidth in one direction, GB/s, as the source has it. NVML's counts the protocol's
    /// overhead in (26.6 on H100, of which 25 carry data).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gb_per_s: Option<f64>,
}

/// How many of a GPU's NVLinks are active, by what they end in.
#[derive(Clone, Debug, Default)]
pub(super) struct NvLinkEnds {
    to_gpus: BTreeMap<PciAddress, usize>,
    /// Ends in NVSwitches.
    pub(super) switches: usize,
}

impl NvLinkEnds {
    /// Links to another GPU.
    pub(super) fn to(&self, gpu: &Gpu) -> usize {
        gpu.pci.and_then(|place| self.to_gpus.get(&place)).copied().unwrap_or(0)
    }
}

impl Gpu {
    /// Counts its active NVLinks.
    pub(super) fn active_nvlinks(&self) -> NvLinkEnds {
        let mut ends = NvLinkEnds::default();
        for link in self.nvlinks.iter().filter(|link| link.active) {
            match link.peer {
                NvLinkPeer::Gpu(place) => *ends.to_gpus.entry(place).or_default() += 1,
                NvLinkPeer::Switch => ends.switches += 1,
                NvLinkPeer::Cpu | NvLinkPeer::Unknown => {}
            }
        }
        ends
    }
}

/// What an NVLink ends in; as text a PCI address, `switch`, `cpu` or `unknown`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NvLinkPeer {
    /// A GPU, by its PCI address.
    Gpu(PciAddress),
    /// An NVSwitch, which reaches every GPU that is on it too.
    Switch,
    /// A CPU (POWER9, Grace).
    Cpu,
    /// The source did not tell.
    Unknown,
}

impl fmt::Display for NvLinkPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NvLinkPeer::Gpu(place) => place.fmt(f),
            NvLinkPeer::Switch => f.write_str("switch"),
            NvLinkPeer::Cpu => f.write_str("cpu"),
            NvLinkPeer::Unknown => f.write_str("unknown"),
        }
    }
}

impl FromStr for NvLinkPeer {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        match text {
            "switch" => Ok(NvLinkPeer::Switch),
            "cpu" => Ok(NvLinkPeer::Cpu),
            "unknown" => Ok(NvLinkPeer::Unknown),
            _ => text.parse().map(NvLinkPeer::Gpu).map_err(|error: IdError| IdError {
                expected: "an NVLink's end: a GPU's PCI address, 'switch', 'cpu' or 'unknown'",
                ..error
            }),
        }
    }
}

text_form!(NvLinkPeer);

/// The links between the two chips of a superchip.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChipLinks {
    /// Number of active links.
    pub links: u32,
    /// Bandwidth of all of them together in one direction, GB/s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gb_per_s: Option<f64>,
}

/// Compute capability, `major.minor`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ComputeCapability {
    /// Major version: 7 Volta, 8 Ampere and Ada, 9 Hopper, 10 and 12 Blackwell.
    pub major: u32,
    /// Its second number: 0 of `9.0`.
    pub minor: u32,
}

impl fmt::Display for ComputeCapability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl FromStr for ComputeCapability {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        let parts = text.split_once('.');
        let read = parts.and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
        read.map(|(major, minor)| Self { major, minor }).ok_or_else(|| IdError {
            text: text.chars().take(40).collect(),
            expected: "a compute capability, like '9.0'",
        })
    }
}

text_form!(ComputeCapability);

/// A network adapter that can carry UCX traffic.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Nic {
    /// RDMA device name (`mlx5_0`), or the matrix's own (`NIC0`) when its legend is missing.
    pub name: String,
    /// Where it is on the PCI bus; `None` when the source did not tell.
    pub pci: Option<PciAddress>,
    /// The host NUMA node it is nearest to.
    pub numa: Option<NumaId>,
    /// Ports by rising number; empty when the source did not tell.
    #[serde(default)]
    pub ports: Vec<Port>,
    /// Whether it is hardware, and of its own.
    #[serde(default, skip_serializing_if = "NicKind::is_physical")]
    pub kind: NicKind,
    /// Its PCIe link, now and at best.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pcie: Option<PcieLink>,
    /// The bridge it hangs off: the `id` of one of `Topology::bridges`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
}

/// What a NIC is, as far as using it goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NicKind {
    /// A physical function.
    #[default]
    Physical,
    /// An SR-IOV virtual function whose physical function is here too.
    VirtualFunction,
    /// A bond: one RDMA device over several ports.
    Bond,
    /// A port that belongs to a bond and cannot be used by itself.
    BondSlave,
    /// A software device without hardware below it (`rxe`, `siw`).
    Software,
    /// A network interface that is no RDMA device; other software reaches it through sockets.
    Socket,
}

impl NicKind {
    pub(crate) fn is_physical(&self) -> bool {
        *self == NicKind::Physical
    }
}

/// One port of a NIC.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Port {
    /// Its number, from 1, as in `mlx5_0:1`.
    pub port: u32,
    /// State; `None` when the source did not tell.
    pub state: Option<PortState>,
    /// Link layer; `None` when the source did not tell.
    pub link_layer: Option<LinkLayer>,
    /// Rate in Gbit/s; `None` when the source did not tell.
    pub rate_gbps: Option<f64>,
    /// The network device on it, like `ib0` or `ens1np0`.
    pub netdev: Option<String>,
}

/// A port's logical state, in the words of `/sys/class/infiniband/*/ports/*/state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, strum::Display)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
#[strum(serialize_all = "SCREAMING_SNAKE_CASE")]
pub enum PortState {
    /// No link: the cable, or the other end, is missing.
    Down,
    /// Link up, no subnet manager yet.
    Init,
    /// Configured, not yet carrying data.
    Armed,
    /// Carrying data.
    Active,
    /// Deferred: the link went down a moment ago.
    ActiveDefer,
    /// No change of state; seen only while the port is told to change.
    Nop,
}

/// What a port speaks, in the words of `/sys/class/infiniband/*/ports/*/link_layer`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, strum::Display)]
pub enum LinkLayer {
    /// Native InfiniBand, with a subnet manager.
    InfiniBand,
    /// Ethernet, which carries RDMA as RoCE.
    Ethernet,
}
