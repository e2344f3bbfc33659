//! Facts about one machine: its GPUs, NICs, CPUs and NUMA nodes, and how they reach each other.
//!
//! Holds the value and its text forms; does not inspect any machine (`probe` does) and decides
//! nothing (`plan` does).
//!
//! *Invariant:* a [`Topology`] states only what its source said. What a source cannot provide is
//! `None`, absent from [`Links`], or stated in a [`Note`]; it is never invented.

mod anonymous;
mod catalogue;
mod devices;
mod link;
mod link_rates;
mod pci;
mod read;
mod shown;
mod write;

use serde::{Deserialize, Serialize};

use crate::cpuset::{CpuSet, NodeSet};
use crate::ids::{GpuIndex, NumaId};

pub use catalogue::{builtin, builtin_names};
pub use devices::{
    ChipLinks, ComputeCapability, ComputeMode, DmaFunction, Fabric, FabricFault, FabricState, Gpu,
    LinkLayer, MigInstance, Nic, NicKind, NvLink, NvLinkPeer, PcieLink, Port, PortState,
};
use devices::{NCCL_DMA_SUFFIX, NvLinkEnds};
pub use link::{Device, LinkKind, LinkKindError, Links};
pub use link_rates::LinkRates;
pub use pci::{Ancestry, Bridge, BridgeKind};
pub use read::{DocumentError, Fault, ParseError, SIZE_LIMIT, SmiError, XmlError, parse};
pub use write::NcclFormError;

pub use crate::text::Position;

/// The version of the text form that this program writes, and the only one that it reads.
pub const VERSION: u32 = 1;

/// One machine, as far as its source described it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Topology {
    /// Version of this text form: [`VERSION`].
    pub version: u32,
    /// The machine's name: a host name, or the model for a file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Where the facts come from: `live`, the name of a format, or the publication that a file is
    /// based on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// Version of the NVIDIA driver, like `570.86.15`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// Highest CUDA version that the driver supports, like `12.8`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cuda: Option<String>,
    /// GPUs in NVML order.
    #[serde(default)]
    pub gpus: Vec<Gpu>,
    /// NICs in the order of their matrix columns (`NIC0`, `NIC1`, …).
    #[serde(default)]
    pub nics: Vec<Nic>,
    /// NUMA nodes in ascending order, including those without CPUs.
    #[serde(default)]
    pub numa: Vec<NumaNode>,
    /// Physical cores, each with the CPUs (SMT siblings) that share it; empty when unknown.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cores: Vec<CpuSet>,
    /// PCI host bridges, root ports and switch ports above the GPUs and NICs, parents first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bridges: Vec<Bridge>,
    /// How each pair of devices reaches each other. A file may leave it out when `bridges` and
    /// NVLinks determine it.
    #[serde(default)]
    pub links: Links,
    /// Number of NVSwitches at which the GPUs' NVLinks end; `None` if unknown.
    pub nvswitch: Option<u32>,
    /// Whether the source says nothing about NVLinks, so that pairs of GPUs may have some.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub nvlinks_untold: bool,
    /// What this process, or the user that a file describes, may use. Absent: everything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allowed: Option<Allowed>,
    /// What could not be read, and what was assumed instead.
    #[serde(default)]
    pub notes: Vec<Note>,
}

/// A NUMA node: memory, and the CPUs next to it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NumaNode {
    /// The operating system's number.
    pub id: NumaId,
    /// Package (socket) it belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub package: Option<u32>,
    /// Its CPUs. Empty for memory-only nodes, such as GPU memory on POWER9 and Grace.
    pub cpus: Option<CpuSet>,
    /// Memory that belongs to it, in bytes.
    pub memory_bytes: Option<u64>,
    /// Whether its memory is a GPU's, so that by default no host memory may be placed there.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub gpu_memory: bool,
}

/// What a process may use of the machine: affinity, cgroup cpuset, `Mems_allowed`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Allowed {
    /// CPUs that it may run on.
    pub cpus: CpuSet,
    /// NUMA nodes that it may allocate on.
    pub mems: NodeSet,
}

/// A worker on a GPU, for the forms that people look at; made from a plan's worker.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Occupant {
    /// The worker's name.
    pub name: String,
    /// Its GPU, by index; `None` for a worker without one.
    pub gpu: Option<GpuIndex>,
    /// Its CPUs; `None` if it may use any.
    pub cpus: Option<CpuSet>,
    /// Names of its NICs, as in [`Nic::name`].
    pub nics: Vec<String>,
}

/// A limit on how far the facts or a decision can be trusted.
///
/// `--strict` turns each into an error.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Note {
    /// What it is about: `GPU3`, `mlx5_2:1`, `numa`, `nvml`, a key.
    pub about: String,
    /// One sentence without a period.
    pub text: String,
}

impl Note {
    /// A note about something.
    pub fn new(about: impl Into<String>, text: impl Into<String>) -> Self {
        Self { about: about.into(), text: text.into() }
    }
}

impl std::fmt::Display for Note {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.about, self.text)
    }
}

impl Topology {
    /// A NUMA node by the operating system's number.
    pub fn numa_node(&self, id: NumaId) -> Option<&NumaNode> {
        self.numa.iter().find(|node| node.id == id)
    }

    /// The CPUs of all NUMA nodes; `None` if no node's CPUs are known.
    pub fn cpus(&self) -> Option<CpuSet> {
        let known = self.numa.iter().filter_map(|node| node.cpus.as_ref());
        known.fold(None, |all: Option<CpuSet>, more| Some(all.unwrap_or_default().union(more)))
    }

    /// All devices in matrix order: GPUs, then NICs.
    pub fn devices(&self) -> impl Iterator<Item = Device> + '_ {
        let gpus = self.gpus.iter().map(|gpu| Device::Gpu(gpu.index));
        gpus.chain((0u32..).zip(&self.nics).map(|(at, _)| Device::Nic(at)))
    }
}
