//! Lines that name a cause by themselves.
//!
//! What matters only beside other lines is in `judge`.
//!
//! *Invariant:* a sign is a form of words that NCCL or UCX writes for this cause and for no other.

use super::cause::Cause;
use super::lines::Record;

/// A line with all of these words says so.
type Sign = (Cause, &'static [&'static str]);

const SIGNS: [Sign; 45] = [
    (Cause::Versions, &["Mismatched NCCL version detected"]),
    (Cause::Driver, &["CUDA driver version is insufficient"]),
    (Cause::SameGpu, &["Duplicate GPU detected"]),
    (Cause::OutOfMemory, &["Cuda failure", "out of memory"]),
    (Cause::ShmTooSmall, &["posix_fallocate failed", "No space left on device"]),
    (Cause::ShmTooSmall, &["Error while creating shared memory segment"]),
    (Cause::ShmTooSmall, &["failed to extend /dev/shm"]),
    (Cause::NoInterface, &["no socket interface found"]),
    (Cause::NoInterface, &["is neither AF_INET(2) nor AF_INET6(10)"]),
    (Cause::NoInterface, &["Socket creation failed", "Address family not supported"]),
    (Cause::Interface, &["No interface found in the same subnet as remote address"]),
    // Addresses that are valid on one link only.
    (Cause::Interface, &["Connect to 169.254."]),
    (Cause::Interface, &["connect to 169.254."]),
    (Cause::PortDown, &["Got async event", "port error"]),
    (Cause::LockedMemory, &["ibv_reg_", "Cannot allocate memory"]),
    (Cause::LockedMemory, &["ibv_create_", "Cannot allocate memory"]),
    (Cause::LockedMemory, &["Please set max locked memory"]),
    (Cause::GidIndex, &["Got async event", "GID table change"]),
    (Cause::GidIndex, &["Got completion", "error 12"]),
    (Cause::GidIndex, &["Got completion", "status=12"]),
    (Cause::GidIndex, &["ibv_modify_qp failed", "Connection timed out"]),
    (Cause::GidIndex, &["ibv_modify_qp failed", "Invalid argument"]),
    (Cause::Plugin, &["NET/OFI Could not find any optimal provider"]),
    (Cause::Plugin, &["NCCL WARN NET/OFI", "failed"]),
    (Cause::Plugin, &["Failed to initialize any NET plugin"]),
    (Cause::Unreachable, &["ibv_modify_qp failed", "Network is unreachable"]),
    (Cause::Unreachable, &["ibv_modify_qp failed", "No route to host"]),
    (Cause::Unreachable, &["socketStartConnect: Connect to", "failed"]),
    (Cause::Unreachable, &["socketPollConnect", "Connect to", "returned"]),
    (Cause::Unreachable, &["SocketPollConnect to", "failed"]),
    (Cause::Unreachable, &["connect to", "exceeded error retry count"]),
    (Cause::Unreachable, &["NCCL WARN Connect to", "failed"]),
    (Cause::Unreachable, &["Call to connect failed"]),
    (Cause::Unreachable, &["Call to connect timeout"]),
    (Cause::Unreachable, &["Call to connect returned", "retrying"]),
    (Cause::Collectives, &["Mismatched collective detected"]),
    (Cause::Collectives, &["collective mismatch error"]),
    (Cause::HcaName, &["network device", "not available, please use one or more of"]),
    (Cause::HcaName, &["UCX", "network device", "not available"]),
    (Cause::HcaName, &["UCX", "device '", "is not available"]),
    (Cause::Transport, &["UCX", "transport", "not available"]),
    (Cause::Transport, &["no usable transports/devices"]),
    (Cause::Emulation, &["No zero-copy protocol found"]),
    (Cause::Emulation, &["|", "software emulation"]),
    (Cause::NoNvlink, &["cuda-ipc get zcopy disabled as no nvlinks detected"]),
];

/// GPU to NIC, and GPU to GPU.
const DISTANCES: [Sign; 4] = [
    (Cause::GdrDistance, &["GPU Direct RDMA Disabled for GPU", "distance"]),
    (Cause::P2pBySystem, &["P2P is disabled between connected GPUs"]),
    (Cause::P2pBySystem, &["P2P is disabled between NVLINK connected GPUs"]),
    (Cause::P2pBySystem, &["Could not enable P2P between dev"]),
];

/// The cause that a record names by itself.
pub(super) fn sign(record: &Record<'_>) -> Option<Cause> {
    let says = |(_, words): &&Sign| words.iter().all(|word| record.whole.contains(word));
    SIGNS.iter().chain(&DISTANCES).find(says).map(|(cause, _)| *cause)
}
