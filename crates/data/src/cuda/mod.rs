//! Device memory, through the CUDA driver, which is opened at run time, or simulated in host
//! memory.
//!
//! Kernels are CUDA C++ source, compiled at run time ([`Kernel`]).
//!
//! *Invariant:* a device buffer is freed on the device that it was allocated on, once.
#![allow(unsafe_code)]

mod driver;
mod error;
mod fault;
mod hints;
mod kernel;
mod mappings;
mod nvrtc;
mod pool;
mod simulated;

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

pub use driver::{CopyEnd, DriverDevice, ForeignContext, PinnedMemory};
pub use error::Error;
pub use fault::Fault;
pub use kernel::{Kernel, Parameter, Scalar};
pub use mappings::Way;
pub use pool::{Pebble, PoolUse, Sizes};
pub use simulated::SimulatedDevice;

use crate::memory::Lease;
use cuda_cluster_model::ids::{GpuUuid, PciAddress};

/// How many GPUs CUDA shows this process.
///
/// # Errors
/// If there is no driver, or it cannot be initialised.
pub fn count() -> Result<usize, Error> {
    driver::count()
}

/// Length of the handle that shares device memory between processes (`CU_IPC_HANDLE_SIZE`).
const IPC_HANDLE_BYTES: usize = 64;

/// A device's memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Total memory.
    pub total_bytes: u64,
    /// Memory that can be allocated.
    pub free_bytes: u64,
}

impl MemoryInfo {
    /// Memory that processes have.
    fn in_use_bytes(self) -> u64 {
        self.total_bytes.saturating_sub(self.free_bytes)
    }
}

/// A device that provides memory.
#[derive(Clone, Debug)]
pub enum Device {
    /// Host memory with a GPU's capacity.
    Simulated(Arc<SimulatedDevice>),
    /// A GPU, through the CUDA driver.
    Driver(Arc<DriverDevice>),
}

impl Device {
    /// A simulated device of this capacity.
    pub fn simulated(name: impl Into<String>, capacity_bytes: u64) -> Self {
        Device::Simulated(Arc::new(SimulatedDevice::new(name.into(), capacity_bytes)))
    }

    /// The GPU at a PCI address, through the CUDA driver.
    ///
    /// # Errors
    /// If there is no driver or no such GPU.
    pub fn open(place: PciAddress) -> Result<Self, Error> {
        DriverDevice::open(place).map(|device| Device::Driver(Arc::new(device)))
    }

    /// Its identity, as the driver has it; `None` for a simulated device.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn uuid(&self) -> Result<Option<GpuUuid>, Error> {
        match self {
            Device::Simulated(_) => Ok(None),
            Device::Driver(device) => device.uuid(),
        }
    }

    /// The compiler that [kernels](Kernel) for it are made with, and what it makes (`CUDA 13.0,
    /// sm_90a`); `None` for a simulated device, which has no kernels.
    ///
    /// # Errors
    /// If there is none ([`Error::Driver`]), or it does not fit the GPU or the driver.
    pub fn compiler(&self) -> Result<Option<String>, Error> {
        match self {
            Device::Simulated(_) => Ok(None),
            Device::Driver(device) => device.compiler().map(Some),
        }
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

    /// Whether it is really host memory.
    pub fn is_simulated(&self) -> bool {
        matches!(self, Device::Simulated(_))
    }

    /// Maps another process's memory by its [handle](DeviceBuffer::ipc_handle), reads a byte, and
    /// unmaps it. A simulated device has nothing to map.
    ///
    /// # Errors
    /// The driver's code, if it refuses.
    pub fn try_foreign(&self, handle: &[u8]) -> Result<(), i32> {
        match self {
            Device::Simulated(_) => Ok(()),
            Device::Driver(device) => device.try_foreign(handle),
        }
    }

    /// Sets the sizes of this process's pool of device memory, and allocates the initial one. A
    /// simulated device has no pool.
    ///
    /// # Errors
    /// If the device has less free memory than the initial size.
    pub fn size_pool(&self, sizes: Sizes) -> Result<(), Error> {
        match self {
            Device::Simulated(_) => Ok(()),
            Device::Driver(device) => device.size_pool(sizes),
        }
    }

    /// Says that peers keep all that they have mapped, whatever [`Sizes::mapped_by_each_bytes`]
    /// says.
    pub fn mappings_have_no_limit(&self) {
        if let Device::Driver(device) = self {
            device.mappings_have_no_limit();
        }
    }

    /// How much of the device's memory this process's pool has, and how much of that is in use; a
    /// simulated device has no pool.
    pub fn pool(&self) -> Option<PoolUse> {
        match self {
            Device::Simulated(_) => None,
            Device::Driver(device) => Some(device.pool()),
        }
    }

    /// Names another process, by a number of the caller's, for people.
    pub fn peer_found(&self, peer: u64, name: &str) {
        if let Device::Driver(device) = self {
            device.peer_found(peer, name);
        }
    }

    /// Forgets what another process, by a number of the caller's, had mapped: it has ended.
    pub fn peer_lost(&self, peer: u64) {
        if let Device::Driver(device) = self {
            device.peer_lost(peer);
        }
    }

    /// The peers, by numbers of the caller's, that keep more of this device's memory mapped than
    /// [`Sizes::mapped_by_each_bytes`], although it is free again; each is told once. They let go
    /// of it when a [pebble](Self::pebble) is sent to them and one of theirs comes back.
    pub fn take_beyond(&self) -> Vec<u64> {
        match self {
            Device::Simulated(_) => Vec::new(),
            Device::Driver(device) => device.take_beyond(),
        }
    }

    /// Memory of 1 MiB to exchange with a peer, so that its UCX maps this instead of what it had
    /// mapped. There are two such memories, and their bytes mean nothing. `None` for a simulated
    /// device, without room, and where peers keep all that they have mapped.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn pebble(&self, which: Pebble) -> Result<Option<DeviceBuffer>, Error> {
        let Device::Driver(device) = self else { return Ok(None) };
        let memory = DriverDevice::pebble(device, which)?;
        Ok(memory.map(|memory| DeviceBuffer { memory: Memory::Driver(memory), lease: None }))
    }

    /// Whether the pool has been idle for so long that [`Self::trim_pool`] has something to free;
    /// to be asked now and then.
    pub fn pool_is_to_shrink(&self) -> bool {
        match self {
            Device::Simulated(_) => false,
            Device::Driver(device) => device.pool_is_to_shrink(),
        }
    }

    /// Frees what an idle pool need not keep. The driver may wait for the device: not on a thread
    /// that others need.
    pub fn trim_pool(&self) {
        if let Device::Driver(device) = self {
            device.trim_pool();
        }
    }

    /// Frees all memory of the pool that is not in use, at the end of this process.
    pub fn close_pool(&self) {
        if let Device::Driver(device) = self {
            device.close_pool();
        }
    }

    /// The first error that only the end of this process clears. A simulated device has none.
    pub fn fault(&self) -> Option<&Fault> {
        match self {
            Device::Simulated(_) => None,
            Device::Driver(device) => device.faults().first(),
        }
    }

    /// Calls `listener` on the first such error, on the thread that finds it; at once if there was
    /// one already. Only the first listener is kept.
    pub fn on_fault(&self, listener: impl Fn(&Fault) + Send + Sync + 'static) {
        if let Device::Driver(device) = self {
            device.faults().on_fault(Box::new(listener));
        }
    }

    /// Looks for a fault that was met outside our own calls: in UCX, in a library that a task uses,
    /// or in a running kernel. [`Self::fault`] returns it.
    pub fn look_for_fault(&self) {
        if let Device::Driver(device) = self {
            device.look_for_fault();
        }
    }

    /// The driver's text for one of its codes.
    pub fn error_text(&self, code: i32) -> String {
        match self {
            Device::Simulated(_) => format!("CUDA error {code}"),
            Device::Driver(device) => device.text(code),
        }
    }

    /// The product's name, as the driver has it: `NVIDIA H100 80GB HBM3`.
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
    Foreign(driver::ForeignMemory),
}

/// Memory of a device.
pub struct DeviceBuffer {
    memory: Memory,
    /// The last field, so that it is dropped after the memory is freed.
    lease: Option<Lease>,
}

impl DeviceBuffer {
    /// Memory of a GPU that another library of this process has allocated, by its address.
    ///
    /// # Errors
    /// If the driver does not know the address.
    ///
    /// # Safety
    /// The range stays allocated until the buffer is dropped, and nobody else writes to it; while
    /// the buffer is written, nobody reads it. The context that it was allocated in, or that is
    /// current now if it belongs to none, is not destroyed before.
    pub unsafe fn foreign(address: u64, bytes: usize) -> Result<Self, Error> {
        // SAFETY: the caller's promise.
        let memory = unsafe { driver::ForeignMemory::new(address, bytes) }?;
        Ok(DeviceBuffer { memory: Memory::Foreign(memory), lease: None })
    }

    /// The context that its memory belongs to, if another library has allocated it.
    pub fn foreign_context(&self) -> Option<&ForeignContext> {
        match &self.memory {
            Memory::Simulated(_) | Memory::Driver(_) => None,
            Memory::Foreign(memory) => memory.context(),
        }
    }

    /// Keeps a value until the memory is freed.
    pub fn hold(&mut self, lease: Lease) {
        self.lease = Some(lease);
    }

    /// The value that is kept until the memory is freed.
    pub fn lease(&self) -> Option<&Lease> {
        self.lease.as_ref()
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        match &self.memory {
            Memory::Simulated(memory) => memory.bytes().len(),
            Memory::Driver(memory) => memory.len(),
            Memory::Foreign(memory) => memory.len(),
        }
    }

    /// Whether its length is 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether it is really host memory.
    pub fn is_simulated(&self) -> bool {
        matches!(self.memory, Memory::Simulated(_))
    }

    /// The bytes, if the host can read them.
    pub fn host(&self) -> Option<&[u8]> {
        match &self.memory {
            Memory::Simulated(memory) => Some(memory.bytes()),
            Memory::Driver(_) | Memory::Foreign(_) => None,
        }
    }

    /// The bytes, if the host can write them.
    pub fn host_mut(&mut self) -> Option<&mut [u8]> {
        match &mut self.memory {
            Memory::Simulated(memory) => Some(memory.bytes_mut()),
            Memory::Driver(_) | Memory::Foreign(_) => None,
        }
    }

    /// The handle by which another process maps it; `None` for simulated memory, for memory of
    /// other libraries, and for length 0.
    ///
    /// # Errors
    /// If the driver refuses: the memory cannot be shared.
    pub fn ipc_handle(&self) -> Result<Option<Vec<u8>>, Error> {
        match &self.memory {
            Memory::Simulated(_) | Memory::Foreign(_) => Ok(None),
            Memory::Driver(memory) if memory.len() == 0 => Ok(None),
            Memory::Driver(memory) => memory.ipc_handle().map(Some),
        }
    }

    /// Records that it is sent to another process, by a number of the caller's, or received from
    /// it: that process may map it.
    pub fn exchanged_with(&self, peer: u64, way: Way) {
        if let Memory::Driver(memory) = &self.memory {
            memory.exchanged_with(peer, way);
        }
    }

    /// Its address, for UCX to read.
    pub fn pointer(&self) -> *const c_void {
        match &self.memory {
            Memory::Simulated(memory) => memory.bytes().as_ptr().cast(),
            Memory::Driver(memory) => memory.pointer(),
            Memory::Foreign(memory) => memory.pointer(),
        }
    }

    /// Its address, for UCX to write.
    pub fn pointer_mut(&mut self) -> *mut c_void {
        match &mut self.memory {
            Memory::Simulated(memory) => memory.bytes_mut().as_mut_ptr().cast(),
            Memory::Driver(memory) => memory.pointer(),
            Memory::Foreign(memory) => memory.pointer(),
        }
    }

    /// Copies `bytes` from the host to `offset`.
    ///
    /// # Errors
    /// If they are not within the buffer, or the driver refuses.
    pub fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<(), Error> {
        let end = self.end(offset, bytes.len())?;
        match &mut self.memory {
            Memory::Simulated(memory) => memory.bytes_mut()[offset..end].copy_from_slice(bytes),
            Memory::Driver(memory) => memory.write(offset, bytes)?,
            Memory::Foreign(memory) => memory.write(offset, bytes)?,
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
            Memory::Foreign(memory) => memory.read(offset, bytes)?,
        }
        Ok(())
    }

    /// The end of a copy, if it is within the buffer.
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
