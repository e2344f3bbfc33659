//! Memory of devices, by the CUDA driver, which is opened at run time, or of simulated ones in host
//! memory.
//!
//! Kernels are CUDA C++ source, compiled at run time ([`Kernel`]).
//!
//! *Invariant:* a device buffer is freed on the device that it was allocated on, once.
#![allow(unsafe_code)]

mod driver;
mod fault;
mod host;
mod kernel;
mod nvrtc;
mod pool;
mod simulated;
pub(crate) mod spare;

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

pub use driver::DriverDevice;
pub use fault::Fault;
pub(crate) use host::PAGE;
pub use host::{HostMemory, Lease};
pub use kernel::{Kernel, Parameter, Scalar};
pub use pool::PoolUse;
pub use simulated::SimulatedDevice;

use crate::ids::PciAddress;

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
    /// The driver's library, or a function of it, is not there.
    #[error("cannot find {name}")]
    Driver {
        /// The file or the function.
        name: &'static str,
        /// The loader's words.
        source: libloading::Error,
    },
    /// The driver refused a call.
    #[error("{call} failed: {reason}")]
    Call {
        /// The function.
        call: &'static str,
        /// The driver's words.
        reason: String,
    },
    /// What only a GPU can do was asked of a simulated device.
    #[error("{device} is no GPU: it cannot run CUDA C++")]
    Simulated {
        /// The device's name.
        device: String,
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

/// Length of the handle by which processes share device memory (`CU_IPC_HANDLE_SIZE`).
const IPC_HANDLE_BYTES: usize = 64;

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
    /// A GPU, by the CUDA driver.
    Driver(Arc<DriverDevice>),
}

impl Device {
    /// A simulated device of this capacity.
    pub fn simulated(name: impl Into<String>, capacity_bytes: u64) -> Self {
        Device::Simulated(Arc::new(SimulatedDevice::new(name.into(), capacity_bytes)))
    }

    /// The GPU at a place, by the CUDA driver.
    ///
    /// # Errors
    /// If there is no driver or no such GPU.
    pub fn open(place: PciAddress) -> Result<Self, Error> {
        DriverDevice::open(place).map(|device| Device::Driver(Arc::new(device)))
    }

    /// Makes its context current on this thread; nothing for a simulated device.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn make_current(&self) -> Result<(), Error> {
        match self {
            Device::Simulated(_) => Ok(()),
            Device::Driver(device) => device.make_current(),
        }
    }

    /// Whether it is host memory in truth.
    pub fn is_simulated(&self) -> bool {
        matches!(self, Device::Simulated(_))
    }

    /// Maps another process's memory by its [handle](DeviceBuffer::ipc_handle), reads a byte, and
    /// gives it back. A simulated device has nothing to map.
    ///
    /// # Errors
    /// The driver's code, where it refuses.
    pub fn try_foreign(&self, handle: &[u8]) -> Result<(), i32> {
        match self {
            Device::Simulated(_) => Ok(()),
            Device::Driver(device) => device.try_foreign(handle),
        }
    }

    /// What this process has of the device's memory, and how much of that is in use; a simulated
    /// device has no pool.
    pub fn pool(&self) -> Option<PoolUse> {
        match self {
            Device::Simulated(_) => None,
            Device::Driver(device) => Some(device.pool()),
        }
    }

    /// Gives back all memory of the device that is not in use.
    pub fn shrink(&self) {
        if let Device::Driver(device) = self {
            device.shrink();
        }
    }

    /// The first error that only the end of this process clears. A simulated device has none.
    pub fn fault(&self) -> Option<&Fault> {
        match self {
            Device::Simulated(_) => None,
            Device::Driver(device) => device.faults().first(),
        }
    }

    /// Calls `listener` on the first such error, on the thread that finds it, and at once if there
    /// was one. The first listener stays.
    pub fn on_fault(&self, listener: impl Fn(&Fault) + Send + Sync + 'static) {
        if let Device::Driver(device) = self {
            device.faults().tell(Box::new(listener));
        }
    }

    /// Finds a fault that other calls than ours have met: those of UCX, of a task's own library, of
    /// a kernel that is running. Whether there was one, [`Self::fault`] says.
    pub fn look_for_fault(&self) {
        if let Device::Driver(device) = self {
            // Any other error is no matter of this question.
            let _ = device.memory();
        }
    }

    /// The driver's words for one of its codes.
    pub fn error_text(&self, code: i32) -> String {
        match self {
            Device::Simulated(_) => format!("CUDA error {code}"),
            Device::Driver(device) => device.text(code),
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        match self {
            Device::Simulated(device) => device.name(),
            Device::Driver(device) => device.name(),
        }
    }

    /// Its memory.
    ///
    /// # Errors
    /// If the device cannot be asked.
    pub fn memory(&self) -> Result<MemoryInfo, Error> {
        match self {
            Device::Simulated(device) => Ok(device.memory()),
            Device::Driver(device) => device.memory(),
        }
    }

    /// Allocates memory. Its bytes are undefined.
    ///
    /// # Errors
    /// If there is not enough.
    pub fn allocate(&self, bytes: usize) -> Result<DeviceBuffer, Error> {
        let memory = match self {
            Device::Simulated(device) => {
                Memory::Simulated(SimulatedDevice::allocate(device, bytes)?)
            }
            Device::Driver(device) => Memory::Driver(DriverDevice::allocate(device, bytes)?),
        };
        Ok(DeviceBuffer { memory, lease: None })
    }
}

enum Memory {
    Simulated(simulated::SimulatedMemory),
    Driver(driver::DriverMemory),
}

/// Memory of a device.
pub struct DeviceBuffer {
    memory: Memory,
    /// Last, so that it is dropped when the memory is free.
    lease: Option<Lease>,
}

impl DeviceBuffer {
    /// Keeps something until the memory is free.
    pub fn hold(&mut self, lease: Lease) {
        self.lease = Some(lease);
    }

    /// What is kept until the memory is free.
    pub fn lease(&self) -> Option<&Lease> {
        self.lease.as_ref()
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        match &self.memory {
            Memory::Simulated(memory) => memory.bytes().len(),
            Memory::Driver(memory) => memory.len(),
        }
    }

    /// Whether there is not a byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether it is host memory in truth.
    pub fn is_simulated(&self) -> bool {
        matches!(self.memory, Memory::Simulated(_))
    }

    /// The bytes, where the host can read them.
    pub fn host(&self) -> Option<&[u8]> {
        match &self.memory {
            Memory::Simulated(memory) => Some(memory.bytes()),
            Memory::Driver(_) => None,
        }
    }

    /// The bytes, where the host can write them.
    pub fn host_mut(&mut self) -> Option<&mut [u8]> {
        match &mut self.memory {
            Memory::Simulated(memory) => Some(memory.bytes_mut()),
            Memory::Driver(_) => None,
        }
    }

    /// What another process maps it by; `None` for simulated memory, and for none at all.
    ///
    /// # Errors
    /// If the driver refuses: the memory cannot be shared.
    pub fn ipc_handle(&self) -> Result<Option<Vec<u8>>, Error> {
        match &self.memory {
            Memory::Simulated(_) => Ok(None),
            Memory::Driver(memory) if memory.len() == 0 => Ok(None),
            Memory::Driver(memory) => memory.ipc_handle().map(Some),
        }
    }

    /// Its address, for UCX to read.
    pub fn pointer(&self) -> *const c_void {
        match &self.memory {
            Memory::Simulated(memory) => memory.bytes().as_ptr().cast(),
            Memory::Driver(memory) => memory.pointer(),
        }
    }

    /// Its address, for UCX to write.
    pub fn pointer_mut(&mut self) -> *mut c_void {
        match &mut self.memory {
            Memory::Simulated(memory) => memory.bytes_mut().as_mut_ptr().cast(),
            Memory::Driver(memory) => memory.pointer(),
        }
    }

    /// Copies `bytes` from the host to `offset`.
    ///
    /// # Errors
    /// If they do not lie within the buffer, or the driver refuses.
    pub fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<(), Error> {
        let end = self.end(offset, bytes.len())?;
        match &mut self.memory {
            Memory::Simulated(memory) => memory.bytes_mut()[offset..end].copy_from_slice(bytes),
            Memory::Driver(memory) => memory.write(offset, bytes)?,
        }
        Ok(())
    }

    /// Copies from `offset` to the host until `bytes` is full.
    ///
    /// # Errors
    /// If that reaches beyond the buffer, or the driver refuses.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), Error> {
        let end = self.end(offset, bytes.len())?;
        match &self.memory {
            Memory::Simulated(memory) => bytes.copy_from_slice(&memory.bytes()[offset..end]),
            Memory::Driver(memory) => memory.read(offset, bytes)?,
        }
        Ok(())
    }

    /// Where a copy ends, if it lies within the buffer.
    fn end(&self, offset: usize, bytes: usize) -> Result<usize, Error> {
        let length = self.len();
        let end = offset.checked_add(bytes).filter(|end| *end <= length);
        end.ok_or(Error::Range { offset, bytes, length })
    }
}

impl fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBuffer").field("len", &self.len()).finish()
    }
}
