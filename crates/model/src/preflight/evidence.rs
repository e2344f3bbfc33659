//! What was seen of a machine beside its topology, before anything starts.
//!
//! A value with a text form, so that any machine's can be judged again from a file. Gathers
//! nothing; `probe::evidence` does.
//!
//! *Invariant:* what could not be looked at is [`Look::Unseen`] with the reason, never a default.

use core::net::IpAddr;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::ids::PciAddress;
use crate::topology::Topology;

/// The version of the text form of a [`Record`].
pub const VERSION: u32 = 1;

/// A machine as it was seen, for a file: `doctor --record`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// The version of this form: [`VERSION`].
    pub version: u32,
    /// The machine.
    pub topology: Topology,
    /// What else was seen.
    pub evidence: Evidence,
}

/// One look: what was there, that nothing was, or why nobody could look.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Look<T> {
    /// This machine has no such thing.
    #[default]
    NotThere,
    /// It was seen.
    Seen(T),
    /// It could not be looked at, and why.
    Unseen(String),
}

impl<T> Look<T> {
    /// What was seen.
    pub fn seen(&self) -> Option<&T> {
        match self {
            Look::Seen(value) => Some(value),
            Look::NotThere | Look::Unseen(_) => None,
        }
    }

    /// Why nobody could look.
    pub fn unseen(&self) -> Option<&str> {
        match self {
            Look::Unseen(why) => Some(why),
            Look::NotThere | Look::Seen(_) => None,
        }
    }

    /// Something that is there or not.
    pub fn of(value: Option<T>) -> Self {
        value.map_or(Look::NotThere, Look::Seen)
    }
}

/// Everything that was seen.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Evidence {
    /// The state of each GPU that NVML lists, by its index.
    pub gpus: BTreeMap<u32, GpuState>,
    /// Whether the driver runs GPUs in confidential mode.
    pub confidential: Look<bool>,
    /// GPUs, NICs and the bridges above them, as the kernel shows them.
    pub functions: BTreeMap<PciAddress, Function>,
    /// The NVIDIA driver and what belongs to it.
    pub driver: Driver,
    /// The system as a whole.
    pub system: System,
    /// This process, from which all others get their limits.
    pub process: Process,
    /// Network interfaces and names.
    pub network: Network,
    /// Each RDMA port, like `mlx5_0:1`.
    pub ports: BTreeMap<String, RdmaPort>,
    /// Variables and settings that change how GPUs are used, from each place that sets some.
    pub settings: Vec<Setting>,
    /// The errors that the driver has written to the kernel's log since the start of the machine.
    pub xids: Look<Vec<Xid>>,
    /// Services of the driver that run: the first 15 characters of their names.
    pub services: Look<Vec<String>>,
}

/// What NVML tells of a GPU beside its topology.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GpuState {
    /// Rows of its memory that were replaced (`nvmlDeviceGetRemappedRows`).
    pub remapped: Look<Remapped>,
    /// Whether pages wait for a restart to be retired (GPUs before Ampere).
    pub retired_pending: Look<bool>,
    /// Whether its memory is checked.
    pub ecc: Look<bool>,
    /// Errors of its memory that could not be corrected, since the driver was loaded.
    pub ecc_uncorrected: Look<u64>,
    /// What the driver wants done (`NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`); 0 is nothing.
    pub recovery_action: Look<u32>,
    /// Why its clocks are low (`nvmlClocksEventReasons`).
    pub clock_reasons: Look<u64>,
    /// The limit of its power now, in milliwatts.
    pub power_limit_mw: Look<u32>,
    /// The limit of its power as it was made, in milliwatts.
    pub default_power_limit_mw: Look<u32>,
    /// Whether the driver stays loaded without users.
    pub persistence: Look<bool>,
    /// The MIG mode after a reset, if it is another than now.
    pub mig_after_reset: Look<bool>,
    /// Memory that is in use, in bytes.
    pub used_bytes: Look<u64>,
    /// Who computes on it.
    pub holders: Look<Vec<Holder>>,
}

/// Rows of memory that were replaced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Remapped {
    /// After errors that could not be corrected.
    pub uncorrectable: u32,
    /// Some wait for a reset.
    pub pending: bool,
    /// A row could not be replaced.
    pub failure: bool,
}

/// A process that computes on a GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Holder {
    /// Its id; 0 for one in another PID namespace.
    pub pid: u32,
    /// Its name, if it can be seen.
    pub name: Option<String>,
    /// The user that it belongs to, by number.
    pub uid: Option<u32>,
    /// For how long it has run, in seconds.
    pub age_s: Option<u64>,
    /// Its memory on the GPU, if the driver tells.
    pub bytes: Option<u64>,
}

/// A PCI function.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Function {
    /// Vendor and device, like `10de:2330`.
    pub id: String,
    /// What it is.
    pub role: FunctionRole,
    /// The kernel's driver for it.
    pub driver: Option<String>,
    /// The number of its IOMMU group.
    pub iommu_group: Option<u32>,
    /// How the IOMMU treats it: `identity` passes through, `DMA`, `DMA-FQ` and others translate.
    pub iommu: Look<String>,
    /// What its Access Control Services do (the control register), for a port that has them.
    pub acs: Look<u16>,
    /// Its largest payload, in bytes.
    pub payload_bytes: Look<u32>,
    /// Its largest read request, in bytes.
    pub read_request_bytes: Look<u32>,
    /// Whether its firmware gives a NUMA node.
    pub has_numa: Option<bool>,
    /// Whether the NVIDIA driver lists it (`/proc/driver/nvidia/gpus`).
    pub listed: bool,
}

/// What a PCI function is here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FunctionRole {
    /// An NVIDIA GPU.
    Gpu,
    /// An RDMA adapter.
    Nic,
    /// A port above one of them.
    Bridge,
    /// The function of a ConnectX-8 beside a GPU, through which it reads the GPU's memory.
    DataDirect,
    /// Anything else.
    #[default]
    Other,
}

/// The NVIDIA driver.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Driver {
    /// The kernel module's version.
    pub kernel_version: Look<String>,
    /// Whether the kernel module is the open one, which has dma-buf.
    pub open: Look<bool>,
    /// Whether the module `nvidia_peermem` is loaded.
    pub peermem: Look<bool>,
    /// Who has registered with the RDMA drivers to register foreign memory.
    pub memory_peers: Look<Vec<String>>,
    /// Its device files.
    pub files: BTreeMap<String, DeviceFile>,
    /// Whether the first IMEX channel's file is there.
    pub imex_channel: Look<bool>,
    /// Whether MPS's control pipe is there, and where.
    pub mps_pipe: Look<String>,
    /// From where the libucp with CUDA comes that is preferred here: `libucx-cu13 of …`.
    pub ucx: Option<String>,
}

/// What a device file lets this process do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceFile {
    /// Read and write it.
    Usable,
    /// It is not there.
    Missing,
    /// It is refused, and how.
    Refused(String),
}

/// The system.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct System {
    /// The processor's architecture, like `x86_64`.
    pub architecture: String,
    /// The kernel's release.
    pub kernel: Option<String>,
    /// Whether it is a virtual machine.
    pub virtual_machine: Look<bool>,
    /// Room in `/dev/shm`.
    pub shared_memory: Look<Room>,
    /// Memory for new processes, in bytes.
    pub available_bytes: Option<u64>,
    /// Free memory of each NUMA node, in bytes, page cache included.
    pub numa_free_bytes: BTreeMap<u32, u64>,
    /// `vm.overcommit_memory`.
    pub overcommit: Look<u32>,
    /// `kernel.yama.ptrace_scope`.
    pub ptrace_scope: Look<u32>,
    /// Whether transparent huge pages are given: `always`, `madvise`, `never`.
    pub huge_pages: Look<String>,
    /// `kernel.numa_balancing`.
    pub numa_balancing: Look<u32>,
    /// Swap in use, in bytes.
    pub swap_used_bytes: Option<u64>,
    /// Whether cores run two threads.
    pub smt: Look<bool>,
    /// Who chooses the CPUs' speed: `performance`, `powersave`, `schedutil`.
    pub governor: Look<String>,
    /// How long a CPU takes to leave the deepest state of rest that it may enter, in µs.
    pub waking_us: Look<u32>,
    /// The kernel's clock, like `tsc`.
    pub clock: Look<String>,
}

/// Room in a file system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Room {
    /// For this user, in bytes.
    pub free_bytes: u64,
    /// All of it, in bytes.
    pub total_bytes: u64,
    /// Whether nothing can be written.
    pub read_only: bool,
}

/// This process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Process {
    /// Soft limits by the kernel's names (`Max locked memory`); `None` is unlimited.
    pub limits: BTreeMap<String, Option<u64>>,
    /// Whether it may lock any amount of memory (`CAP_IPC_LOCK`).
    pub may_lock: bool,
    /// Whether the kernel let it read a process's memory (`process_vm_readv`), and if not why.
    pub reads_memory: Look<Result<(), String>>,
    /// Whether it is in the machine's own PID namespace.
    pub own_pids: Look<bool>,
    /// Whether it is in the machine's own IPC namespace.
    pub own_ipc: Look<bool>,
    /// Its control group's limit of memory, in bytes, and what is in use.
    pub group_memory: Look<Used>,
    /// Its control group's limit of processes and threads, and how many there are.
    pub group_tasks: Look<Used>,
    /// Its control group's limit of CPU time, in CPUs.
    pub group_cpus: Look<f64>,
}

/// A limit, and what is in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Used {
    /// The limit.
    pub limit: u64,
    /// In use.
    pub used: u64,
}

/// Network interfaces and names.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Network {
    /// Interfaces that are up, in the kernel's order.
    pub interfaces: Vec<Interface>,
    /// The machine's name.
    pub hostname: Option<String>,
    /// The addresses that the hosts file gives that name.
    pub hostname_addresses: Look<Vec<IpAddr>>,
    /// Whether there is a route to everywhere.
    pub default_route: Look<bool>,
}

/// A network interface.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
    /// Whether the machine announces its address to others.
    pub main: bool,
    /// Whether there is hardware below it.
    pub hardware: bool,
}

/// An RDMA port.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RdmaPort {
    /// Its addresses that are set.
    pub gids: Look<Vec<String>>,
    /// How often its link has gone down since the driver was loaded.
    pub link_downed: Look<u64>,
    /// What the file of its device lets this process do.
    pub file: Look<DeviceFile>,
}

/// A variable or setting.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Setting {
    /// `environment`, or a file.
    pub place: String,
    /// Its name.
    pub name: String,
    /// Its value; what may hold a secret (proxies) says `(set)`.
    pub value: String,
    /// For a file that the value names: the PCI addresses of GPUs in it, or why it cannot be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpus: Option<Result<Vec<PciAddress>, String>>,
}

/// An error in the kernel's log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Xid {
    /// The GPU.
    pub pci: PciAddress,
    /// NVIDIA's number.
    pub xid: u32,
    /// How long ago the last of them was written, in seconds.
    pub ago_s: Option<u64>,
    /// How many of this number the GPU has.
    pub count: u32,
}
