//! Device memory: the CUDA driver, opened at run time, or a simulated device in host memory.
//!
//! Does not launch kernels.
//!
//! *Invariant:* a device buffer is freed on the device that it was allocated on, once.
#![allow(unsafe_code)]

mod simulated;

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

pub use simulated::SimulatedDevice;

/// Why a device did not do something.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The device's memory is used up.
    #[error("{device} has {free_bytes} bytes free, not {asked_bytes}")]
    OutOfMemory {
        /// The device's name.
        device: String,
        /// Bytes asked for.
        asked_bytes: usize,
        /// Bytes free.
        free_bytes: u64,
    },
    /// A copy beyond a buffer's end.
    #[error("{bytes} bytes at {offset} do not lie in a buffer of {length} bytes")]
    Range {
        /// Where the copy begins.
        offset: usize,
        /// How much is copied.
        bytes: usize,
        /// The buffer's length.
        length: usize,
    },
}

/// A device's memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// All of it.
    pub total_bytes: u64,
    /// What can be allocated.
    pub free_bytes: u64,
}

/// A device that gives memory.
#[derive(Clone, Debug)]
pub enum Device {
    /// Host memory with a GPU's capacity.
    Simulated(Arc<SimulatedDevice>),
}

impl Device {
    /// A simulated device of this capacity.
    pub fn simulated(name: impl Into<String>, capacity_bytes: u64) -> Self {
        Device::Simulated(Arc::new(SimulatedDevice::new(name.into(), capacity_bytes)))
    }

    /// Whether it is host memory in truth.
    pub fn is_simulated(&self) -> bool {
        matches!(self, Device::Simulated(_))
    }

    /// Its name.
    pub fn name(&self) -> &str {
        match self {
            Device::Simulated(device) => device.name(),
        }
    }

    /// Its memory.
    ///
    /// # Errors
    /// If the device cannot be asked.
    pub fn memory(&self) -> Result<MemoryInfo, Error> {
        match self {
            Device::Simulated(device) => Ok(device.memory()),
        }
    }

    /// Allocates memory. A simulated device's is zero; a real one's is undefined.
    ///
    /// # Errors
    /// If there is not enough.
    pub fn allocate(&self, bytes: usize) -> Result<DeviceBuffer, Error> {
        match self {
            Device::Simulated(device) => {
                SimulatedDevice::allocate(device, bytes).map(|memory| DeviceBuffer { memory })
            }
        }
    }
}

/// Memory of a device.
pub struct DeviceBuffer {
    memory: simulated::SimulatedMemory,
}

impl DeviceBuffer {
    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.memory.bytes().len()
    }

    /// Whether there is not a byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether it is host memory in truth.
    pub fn is_simulated(&self) -> bool {
        true
    }

    /// The bytes, where the host can read them.
    pub fn host(&self) -> Option<&[u8]> {
        Some(self.memory.bytes())
    }

    /// The bytes, where the host can write them.
    pub fn host_mut(&mut self) -> Option<&mut [u8]> {
        Some(self.memory.bytes_mut())
    }

    /// Its address, for UCX to read.
    pub fn pointer(&self) -> *const c_void {
        self.memory.bytes().as_ptr().cast()
    }

    /// Its address, for UCX to write.
    pub fn pointer_mut(&mut self) -> *mut c_void {
        self.memory.bytes_mut().as_mut_ptr().cast()
    }

    /// Copies `bytes` from the host to `offset`.
    ///
    /// # Errors
    /// If they do not lie within the buffer.
    pub fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<(), Error> {
        let length = self.len();
        let error = Error::Range { offset, bytes: bytes.len(), length };
        let end = offset.checked_add(bytes.len()).filter(|end| *end <= length).ok_or(error)?;
        self.memory.bytes_mut()[offset..end].copy_from_slice(bytes);
        Ok(())
    }

    /// Copies from `offset` to the host until `bytes` is full.
    ///
    /// # Errors
    /// If that reaches beyond the buffer.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), Error> {
        let length = self.len();
        let error = Error::Range { offset, bytes: bytes.len(), length };
        let end = offset.checked_add(bytes.len()).filter(|end| *end <= length).ok_or(error)?;
        bytes.copy_from_slice(&self.memory.bytes()[offset..end]);
        Ok(())
    }
}

impl fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBuffer").field("len", &self.len()).finish()
    }
}
