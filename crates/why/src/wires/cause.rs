//! What can be wrong with the wires of a job, in words.
//!
//! Finds nothing.
//!
//! *Invariant:* the order of the causes is that of their weight: what ends a job comes before what
//! slows it down, and what brings other lines about before those that it brings about.

use serde::{Deserialize, Serialize};

/// What is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    Versions,
    Driver,
    SameGpu,
    OutOfMemory,
    ShmTooSmall,
    NoInterface,
    Interface,
    PortDown,
    LockedMemory,
    GidIndex,
    Plugin,
    Unreachable,
    Collectives,
    RasMissing,
    RasFailed,
    RasBehind,
    HcaName,
    Transport,
    IbDisabled,
    NoVerbs,
    NoRdmaDevice,
    GdrModule,
    GdrDistance,
    P2pSwitchedOff,
    P2pBySystem,
    Emulation,
    NoNvlink,
    TcpOnly,
}

/// A cause, with the line that says so.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Found {
    pub cause: Cause,
    /// What is wrong, and what can be done.
    pub text: String,
    /// The first line that says so.
    pub line: String,
    /// How many lines say so.
    pub lines: usize,
}

impl Cause {
    /// What is wrong, and what can be done.
    pub fn says(self) -> &'static str {
        match self {
            Cause::Versions => {
                "ranks have different versions of NCCL: install the same one everywhere"
            }
            Cause::Driver => {
                "the CUDA driver is older than the program's CUDA needs: update the driver, or use \
                 a build for an older CUDA"
            }
            Cause::SameGpu => {
                "two ranks use the same GPU: give each its own (CUDA_VISIBLE_DEVICES, local rank)"
            }
            Cause::OutOfMemory => "a GPU has no memory left for NCCL's buffers",
            Cause::ShmTooSmall => {
                "/dev/shm is too small: give the container more (docker run --shm-size=…, or \
                 --ipc=host; in Kubernetes an emptyDir in memory at /dev/shm), and remove what \
                 ended jobs have left there"
            }
            Cause::NoInterface => {
                "no network interface can be used: check the names in NCCL_SOCKET_IFNAME on every \
                 machine, and that all have the same version of NCCL"
            }
            Cause::Interface => {
                "an interface is used that does not lead to the other machines: name the right one \
                 in NCCL_SOCKET_IFNAME"
            }
            Cause::PortDown => "the port of an RDMA device is down, or goes up and down: its cable",
            Cause::LockedMemory => {
                "the limit of locked memory is too low for RDMA: ulimit -l unlimited (docker run \
                 --ulimit memlock=-1)"
            }
            Cause::GidIndex => {
                "the other RDMA device does not answer; over RoCE this is mostly the wrong GID: \
                 leave NCCL_IB_GID_INDEX unset, or set the index of a RoCE v2 address that is \
                 routed (show_gids)"
            }
            Cause::Plugin => "a network plugin is loaded but can't be used, or is not found",
            Cause::Unreachable => {
                "another process can't be reached: a firewall, a route, or it has ended"
            }
            Cause::Collectives => {
                "ranks call different operations, or with different sizes, or are set up \
                 differently"
            }
            Cause::RasMissing => "ranks are dead, or do not answer",
            Cause::RasFailed => "ranks have reported an error",
            Cause::RasBehind => {
                "ranks have launched different numbers of operations: if a second look shows the \
                 same numbers, those behind keep the others waiting"
            }
            Cause::HcaName => {
                "a device is asked for by a name that is not there (NCCL_IB_HCA, UCX_NET_DEVICES)"
            }
            Cause::Transport => {
                "UCX has none of the transports that are asked for (UCX_TLS), or was built without \
                 them"
            }
            Cause::IbDisabled => "RDMA is switched off by NCCL_IB_DISABLE, so sockets are used",
            Cause::NoVerbs => {
                "libibverbs is not installed, so RDMA is not looked for and sockets are used"
            }
            Cause::NoRdmaDevice => {
                "no RDMA device was found, so sockets are used between machines (in a container: \
                 is /dev/infiniband there?)"
            }
            Cause::GdrModule => {
                "GPUDirect RDMA is off: neither nvidia_peermem (modprobe nvidia_peermem) nor \
                 DMA-BUF can be used, so data goes by way of host memory"
            }
            Cause::GdrDistance => {
                "GPUDirect RDMA is off: GPU and NIC are farther from each other than \
                 NCCL_NET_GDR_LEVEL allows, or it is switched off"
            }
            Cause::P2pSwitchedOff => {
                "direct transfers between GPUs are switched off (NCCL_P2P_DISABLE, NCCL_P2P_LEVEL)"
            }
            Cause::P2pBySystem => {
                "the driver refuses direct transfers between GPUs: GPUs without peer access, or \
                 ACS, an IOMMU or a virtual machine between them"
            }
            Cause::Emulation => {
                "UCX has no transport that writes or reads remote memory itself, and emulates it \
                 by messages"
            }
            Cause::NoNvlink => "without NVLink, UCX's cuda_ipc does not read from other GPUs",
            Cause::TcpOnly => "UCX has nothing but TCP between machines",
        }
    }
}
