//! Why a tier has no room, with what it is full of.
//!
//! *Invariant:* each figure is one that was read or counted, none is derived from another.

use std::fmt;

use super::place::Place;

/// A tier has no room, and nothing there may move.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct NoRoom {
    /// The tier.
    pub place: Place,
    /// The bytes asked for.
    pub asked_bytes: u64,
    /// The tier's limit.
    pub limit_bytes: u64,
    /// How much of it is in use.
    pub used_bytes: u64,
    /// How much of that may not move.
    pub pinned_bytes: u64,
    /// The process's share, if the process's memory as a whole is full rather than the tier.
    pub process: Option<ProcessShare>,
    /// What the device says, if it has less than its tier's limit permits.
    pub device: Option<DeviceShare>,
}

/// What of a device's memory cannot be had although it is within the tier's limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceShare {
    /// Bytes that can be had: not in one piece, or not enough.
    pub free_bytes: u64,
    /// Bytes that were freed, but that peers may still have mapped.
    pub freed_bytes: u64,
    /// The names of these peers.
    pub mapped_by: Vec<String>,
}

/// How a process's memory limit is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessShare {
    /// The limit at which the process is ended, in bytes.
    pub memory_limit_bytes: u64,
    /// Used by everything except objects, tasks' buffers and transfers.
    pub other_bytes: u64,
    /// The part of the used bytes that is memory of a simulated device.
    pub simulated_device_bytes: u64,
}

impl fmt::Display for NoRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { place, asked_bytes, limit_bytes, used_bytes, pinned_bytes, process, device } =
            self;
        write!(f, "no room for {asked_bytes} bytes in {place}: ")?;
        if let Some(process) = process {
            let ProcessShare { memory_limit_bytes, other_bytes, simulated_device_bytes } = process;
            write!(f, "of the memory limit of {memory_limit_bytes} bytes, ")?;
            write!(f, "{limit_bytes} are for data, ")?;
            write!(f, "since the process itself takes {other_bytes} and a reserve stays free; ")?;
            if *simulated_device_bytes > 0 {
                write!(f, "{simulated_device_bytes} are simulated device memory, ")?;
            }
        }
        match *limit_bytes {
            u64::MAX => write!(f, "{used_bytes} are used")?,
            limit_bytes => write!(f, "{used_bytes} of {limit_bytes} are used")?,
        }
        write!(f, ", {pinned_bytes} of them by running tasks")?;
        let Some(DeviceShare { free_bytes, freed_bytes, mapped_by }) = device else {
            return Ok(());
        };
        write!(f, "; the GPU has {free_bytes} free, not all of them in one piece")?;
        if *freed_bytes > 0 {
            let peers = mapped_by.join(", ");
            write!(f, "; {freed_bytes} were freed, but {peers} may still have them mapped")?;
        }
        Ok(())
    }
}
