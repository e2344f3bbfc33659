//! GPUs and NICs as their sources describe them.
//!
//! Does not judge them: `plan` decides whether a port is usable.
//!
//! *Invariant:* an optional fact is `None` if the source did not provide it.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::cpuset::{CpuSet, NodeSet};
use crate::ids::{GpuIndex, GpuUuid, IdError, NumaId, PciAddress, text_form};

/// An NVIDIA GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    /// Its number in NVML order, which people use.
    pub index: GpuIndex,
    /// Its permanent identity, independent of the rest of the machine; `None` if the source did not
    /// provide it.
    pub uuid: Option<GpuUuid>,
    /// Marketing name, like `NVIDIA H100 80GB HBM3`.
    pub name: Option<String>,
    /// Where it is on the PCI bus; `None` if unknown.
    pub pci: Option<PciAddress>,
    /// The nearest host NUMA node, if there is exactly one.
    pub numa: Option<NumaId>,
    /// All host NUMA nodes that are equally near, if there are several (`0-7`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa_set: Option<NodeSet>,
    /// Host CPUs near it.
    pub cpus: Option<CpuSet>,
    /// All of its device memory, in bytes, as NVML counts it.
    pub memory_bytes: Option<u64>,
    /// The window through which PCIe reaches its memory, in bytes: NICs that read a GPU's memory
    /// need it as large as what they register.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bar1_bytes: Option<u64>,
    /// Compute capability, like `9.0`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_capability: Option<ComputeCapability>,
    /// The NUMA node of its own memory, on machines where the kernel shows it (POWER9, Grace).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_numa: Option<NumaId>,
    /// Which processes may use it (`nvidia-smi -c`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_mode: Option<ComputeMode>,
    /// MIG instances; empty when MIG is off or there are none.
    #[serde(default)]
    pub mig: Vec<MigInstance>,
    /// Whether MIG mode is on (then the GPU itself cannot run anything).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig_mode: Option<bool>,
    /// Its NVLinks, by link number.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nvlinks: Vec<NvLink>,
    /// Its chip-to-chip links to the CPU of a superchip (NVLink-C2C of Grace).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub c2c: Option<ChipLinks>,
    /// Its registration with the NVLink fabric of machines with NVSwitches, if the driver tells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fabric: Option<Fabric>,
    /// GPUs whose memory it can read and write directly (CUDA peer access), as the driver says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peers: Option<Vec<GpuIndex>>,
    /// Its PCIe link, now and at full speed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pcie: Option<PcieLink>,
    /// The bridge it is attached to: the `id` of one of `Topology::bridges`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// Whether a display is attached or active on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub display: Option<bool>,
    /// Processes that use it, if the source could list them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub processes: Vec<u32>,
}

/// Which processes may use a GPU (`nvmlComputeMode_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ComputeMode {
    /// All.
    Default,
    /// One at a time.
    ExclusiveProcess,
    /// None.
    Prohibited,
}

/// A part of a GPU with memory and engines of its own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigInstance {
    /// Its identity in CUDA and NVML: `MIG-…`.
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
    /// Whether NVML reports it as up; links that are down are ignored.
    pub active: bool,
    /// NVLink generation, like 4.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    /// What is at the other end.
    pub peer: NvLinkPeer,
    /// Bandwidth in one direction, GB/s, as reported by the source. NVML's figure includes the
    /// protocol's overhead (26.6 on H100, of which 25 carry data).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gb_per_s: Option<f64>,
}

/// How many of a GPU's NVLinks are active, by what they end at.
#[derive(Clone, Debug, Default)]
pub(super) struct NvLinkEnds {
    to_gpus: BTreeMap<PciAddress, usize>,
    /// Links to NVSwitches.
    pub(super) switches: usize,
}

impl NvLinkEnds {
    /// Links to another GPU.
    pub(super) fn to(&self, gpu: &Gpu) -> usize {
        gpu.pci.and_then(|place| self.to_gpus.get(&place)).copied().unwrap_or(0)
    }
}

impl Gpu {
    /// The least bandwidth of its active NVLinks in one direction, GB/s, as the source reports it.
    pub fn slowest_nvlink_gb_per_s(&self) -> Option<f64> {
        let active = self.nvlinks.iter().filter(|link| link.active);
        active.filter_map(|link| link.gb_per_s).min_by(f64::total_cmp)
    }

    /// How many of its active NVLinks end at what is wanted.
    pub(crate) fn nvlinks_to(&self, wanted: impl Fn(&NvLinkPeer) -> bool) -> usize {
        self.nvlinks.iter().filter(|link| link.active && wanted(&link.peer)).count()
    }

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

/// What an NVLink ends at; as text a PCI address, `switch`, `cpu` or `unknown`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NvLinkPeer {
    /// A GPU, by its PCI address.
    Gpu(PciAddress),
    /// An NVSwitch, through which it reaches every GPU on the same switch.
    Switch,
    /// A CPU (POWER9, Grace).
    Cpu,
    /// The source did not say.
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

/// A GPU's registration with an NVLink fabric (`nvmlGpuFabricInfoV_t`). Without one, a GPU has no
/// peers over NVLink (NVIDIA, Fabric Manager user guide).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fabric {
    /// How far it is.
    pub state: FabricState,
    /// Why it has failed, in NVML's words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// GPUs of one clique of one cluster can reach each other.
    #[serde(default)]
    pub clique: u32,
    /// The cluster's UUID; `None` for a machine by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<String>,
    /// What is wrong with its links (`healthMask`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub faults: Vec<FabricFault>,
}

/// How far a registration with an NVLink fabric is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FabricState {
    /// The fabric manager has not begun.
    NotStarted,
    /// It is under way.
    InProgress,
    /// It has ended, well or not.
    Completed,
}

/// What can be wrong with a GPU's links to the fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FabricFault {
    /// Some of its links are down.
    DegradedBandwidth,
    /// Its routes are being restored.
    RouteRecovery,
    /// Its routes are not whole.
    RouteUnhealthy,
    /// Accesses have timed out, and that is being mended.
    AccessTimeoutRecovery,
    /// The system's identity is not that of the fabric.
    IncorrectSystemGuid,
    /// The chassis is not that of the fabric.
    IncorrectChassis,
    /// It is in no partition.
    NoPartition,
    /// It has too few links.
    InsufficientNvlinks,
}

impl FabricFault {
    fn text(self) -> &'static str {
        match self {
            FabricFault::DegradedBandwidth => "some of its links to the NVLink fabric are down",
            FabricFault::RouteRecovery => "its routes through the NVLink fabric are being restored",
            FabricFault::RouteUnhealthy => "its routes through the NVLink fabric are not whole",
            FabricFault::AccessTimeoutRecovery => "accesses over the NVLink fabric have timed out",
            FabricFault::IncorrectSystemGuid => "its system's GUID is not the NVLink fabric's",
            FabricFault::IncorrectChassis => "its chassis is not the NVLink fabric's",
            FabricFault::NoPartition => "it is in no partition of the NVLink fabric",
            FabricFault::InsufficientNvlinks => "it has too few NVLinks for the fabric",
        }
    }
}

impl Fabric {
    /// What is wrong, if anything is.
    pub fn problem(&self) -> Option<String> {
        let registered = match (self.state, &self.error) {
            (FabricState::Completed, None) => None,
            (FabricState::Completed, Some(error)) => Some(format!(
                "its registration with the NVLink fabric has failed: {error} (nvidia-fabricmanager)"
            )),
            (FabricState::NotStarted, _) => Some(
                "it is not registered with the NVLink fabric: nvidia-fabricmanager has not begun"
                    .to_owned(),
            ),
            (FabricState::InProgress, _) => {
                Some("its registration with the NVLink fabric is not complete".to_owned())
            }
        };
        let faults = self.faults.iter().map(|fault| fault.text().to_owned());
        let all: Vec<String> = registered.into_iter().chain(faults).collect();
        (!all.is_empty()).then(|| all.join("; "))
    }
}

/// Compute capability, `major.minor`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ComputeCapability {
    /// Major version: 7 Volta, 8 Ampere and Ada, 9 Hopper, 10 and 12 Blackwell.
    pub major: u32,
    /// Minor version: 0 in `9.0`.
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
    /// RDMA device name (`mlx5_0`), or that of the matrix (`NIC0`) if the legend is missing.
    pub name: String,
    /// Where it is on the PCI bus; `None` if unknown.
    pub pci: Option<PciAddress>,
    /// The nearest host NUMA node.
    pub numa: Option<NumaId>,
    /// Ports in ascending order; empty if unknown.
    #[serde(default)]
    pub ports: Vec<Port>,
    /// Whether it is independent hardware.
    #[serde(default, skip_serializing_if = "NicKind::is_physical")]
    pub kind: NicKind,
    /// Its PCIe link, now and at full speed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pcie: Option<PcieLink>,
    /// The bridge it is attached to: the `id` of one of `Topology::bridges`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// Its DMA function, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dma: Option<DmaFunction>,
}

/// What NCCL appends to the name of a NIC's device when it uses its DMA function (`ncclIbInit`).
pub(super) const NCCL_DMA_SUFFIX: &str = "_dma";

/// A second PCI function of a NIC, through which it reads and writes the memory of the GPU beside
/// that function: ConnectX-8's Data Direct (`15b3:2100`), also called Direct NIC.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DmaFunction {
    /// Where it is on the PCI bus; `None` if the source does not tell which one is this NIC's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pci: Option<PciAddress>,
    /// The bridge it is attached to: the `id` of one of `Topology::bridges`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
}

impl Nic {
    /// Whether it has a DMA function, and nobody tells which one.
    pub fn dma_is_untold(&self) -> bool {
        self.dma.as_ref().is_some_and(|dma| dma.pci.is_none() && dma.parent.is_none())
    }

    /// The bridge above its DMA function.
    pub(crate) fn dma_parent(&self) -> Option<&str> {
        self.dma.as_ref()?.parent.as_deref()
    }
}

/// The kind of a NIC, as far as it matters for its use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NicKind {
    /// A physical function.
    #[default]
    Physical,
    /// An SR-IOV virtual function whose physical function is present too.
    VirtualFunction,
    /// A bond: one RDMA device over several ports.
    Bond,
    /// A port that belongs to a bond and cannot be used by itself.
    BondSlave,
    /// The baseboard's own adapter, through which fabric manager reaches the NVSwitches of HGX B200
    /// and B300. It looks like any other ConnectX-7 and leads to no network.
    SwitchManager,
    /// A software device without hardware below it (`rxe`, `siw`).
    Software,
    /// A network interface that is not an RDMA device; software reaches it through sockets.
    Socket,
}

impl NicKind {
    /// PCI vendor and device of a [`NicKind::SwitchManager`], then those of its subsystem, as an
    /// AWS p6-b200 shows them. Its vital product data say `SMDL=SW_MNG`, but to root alone.
    pub const SWITCH_MANAGER_IDS: [u16; 4] = [0x15b3, 0x1021, 0x15b3, 0x0087];

    /// Whether it is a network card, as opposed to a part of one or to software.
    pub fn is_physical(&self) -> bool {
        *self == NicKind::Physical
    }
}

/// One port of a NIC, `mlx5_0:1` to UCX.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Port {
    /// Its number, from 1, as in `mlx5_0:1`.
    pub port: u32,
    /// State; `None` if unknown.
    pub state: Option<PortState>,
    /// Link layer; `None` if unknown.
    pub link_layer: Option<LinkLayer>,
    /// Rate in Gbit/s; `None` if unknown.
    pub rate_gbps: Option<f64>,
    /// Its network device, like `ib0` or `ens1np0`.
    pub netdev: Option<String>,
}

/// A port's logical state, by the names in `/sys/class/infiniband/*/ports/*/state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, strum::Display)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
#[strum(serialize_all = "SCREAMING_SNAKE_CASE")]
pub enum PortState {
    /// No link: the cable or the other end is missing.
    Down,
    /// Link up, no subnet manager yet.
    Init,
    /// Configured, but not carrying data yet.
    Armed,
    /// Carrying data.
    Active,
    /// Deferred: the link has just gone down.
    ActiveDefer,
    /// No change of state; seen only while the port is told to change.
    Nop,
}

/// A port's link layer, by the names in `/sys/class/infiniband/*/ports/*/link_layer`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, strum::Display)]
pub enum LinkLayer {
    /// Native InfiniBand, with a subnet manager.
    InfiniBand,
    /// Ethernet, which carries RDMA as RoCE.
    Ethernet,
}

/// A PCIe link: its current speed, and what both ends support.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PcieLink {
    /// Transfer rate now, GT/s (8 is generation 3, 16 is 4, 32 is 5, 64 is 6).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gt_per_s: Option<f64>,
    /// Lanes in use now; fewer than `max_width` in an idle link or a narrow slot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub width: Option<u32>,
    /// Highest transfer rate, GT/s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_gt_per_s: Option<f64>,
    /// Lanes that the device has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_width: Option<u32>,
}
