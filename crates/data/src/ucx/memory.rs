//! Memory that operations own while UCX may access it.
//!
//! Does not allocate device memory; `cuda` does.
//!
//! *Invariant:* a buffer's address and length stay the same while the value is moved.

use std::ffi::c_void;
use std::sync::Arc;

use super::status::Status;
use crate::cuda::{self, DeviceBuffer, Way};
use crate::memory::{HostMemory, Lease, PAGE};

/// Bytes in host or device memory.
#[derive(Debug)]
pub enum Buffer {
    /// Host memory.
    Host(HostMemory),
    /// Memory of a GPU, or of a simulated one.
    Device(DeviceBuffer),
}

impl Buffer {
    /// Records with whom it is exchanged, as [`DeviceBuffer::exchanged_with`] does.
    pub fn exchanged_with(&self, peer: u64, way: Way) {
        if let Buffer::Device(memory) = self {
            memory.exchanged_with(peer, way);
        }
    }

    /// Host memory with undefined content, as in [`HostMemory::undefined`]. `None` if there is no
    /// memory.
    pub fn undefined(bytes: usize) -> Option<Self> {
        HostMemory::undefined(bytes).map(Buffer::Host)
    }

    /// Keeps a value until the memory is freed, wherever the buffer goes.
    pub fn hold(&mut self, lease: Lease) {
        match self {
            Buffer::Host(bytes) => bytes.hold(lease),
            Buffer::Device(buffer) => buffer.hold(lease),
        }
    }

    /// The value that is kept until the memory is freed.
    pub fn lease(&self) -> Option<&Lease> {
        match self {
            Buffer::Host(bytes) => bytes.lease(),
            Buffer::Device(buffer) => buffer.lease(),
        }
    }

    /// Copies `bytes` from the host to `offset`.
    ///
    /// # Errors
    /// If that reaches beyond the buffer, or its device refuses.
    pub fn write_at(&mut self, offset: usize, bytes: &[u8]) -> Result<(), cuda::Error> {
        match self {
            Buffer::Host(target) => {
                let range = offset..offset.saturating_add(bytes.len());
                let error = cuda::Error::Range { offset, bytes: bytes.len(), length: target.len() };
                target.get_mut(range).ok_or(error)?.copy_from_slice(bytes);
                Ok(())
            }
            Buffer::Device(target) => target.write(offset, bytes),
        }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        match self {
            Buffer::Host(bytes) => bytes.len(),
            Buffer::Device(buffer) => buffer.len(),
        }
    }

    /// Whether its length is 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes, if the host can read them; `None` for a real GPU's memory.
    pub fn host(&self) -> Option<&[u8]> {
        match self {
            Buffer::Host(bytes) => Some(bytes),
            Buffer::Device(buffer) => buffer.host(),
        }
    }

    /// The bytes, if the host can write them; `None` for a real GPU's memory.
    pub fn host_mut(&mut self) -> Option<&mut [u8]> {
        match self {
            Buffer::Host(bytes) => Some(bytes),
            Buffer::Device(buffer) => buffer.host_mut(),
        }
    }

    /// Writes to every page of memory that the host can access, so that all of it is resident
    /// before something is timed.
    pub fn touch(&mut self) {
        for byte in self.host_mut().into_iter().flat_map(|bytes| bytes.iter_mut().step_by(PAGE)) {
            *byte = 1;
        }
    }

    /// Copies from `offset` to the host until `bytes` is full.
    ///
    /// # Errors
    /// If that reaches beyond the buffer, or its device refuses.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), cuda::Error> {
        match self {
            Buffer::Host(source) => {
                let range = offset..offset.saturating_add(bytes.len());
                let error = cuda::Error::Range { offset, bytes: bytes.len(), length: source.len() };
                bytes.copy_from_slice(source.get(range).ok_or(error)?);
                Ok(())
            }
            Buffer::Device(source) => source.read(offset, bytes),
        }
    }

    /// Where UCX reads.
    pub(super) fn pointer(&self) -> *const c_void {
        match self {
            Buffer::Host(bytes) => bytes.as_ptr().cast(),
            Buffer::Device(buffer) => buffer.pointer(),
        }
    }

    /// Where UCX writes.
    pub(super) fn pointer_mut(&mut self) -> *mut c_void {
        match self {
            Buffer::Host(bytes) => bytes.as_mut_ptr().cast(),
            Buffer::Device(buffer) => buffer.pointer_mut(),
        }
    }

    /// Copies `bytes` to its beginning; they must fit.
    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), Status> {
        match self {
            Buffer::Host(target) => target[..bytes.len()].copy_from_slice(bytes),
            Buffer::Device(target) => {
                // UCX's code for a copy that a device refuses.
                target.write(0, bytes).map_err(|_| Status::IO_ERROR)?;
            }
        }
        Ok(())
    }

    /// The memory type, given to UCX so that it need not detect it.
    pub(super) fn memory_type(&self) -> ucx1_sys::ucs_memory_type_t {
        if self.is_on_device() {
            ucx1_sys::ucs_memory_type_t::UCS_MEMORY_TYPE_CUDA
        } else {
            ucx1_sys::ucs_memory_type_t::UCS_MEMORY_TYPE_HOST
        }
    }

    /// Whether only the device's driver, and a UCX that knows CUDA, can access it.
    pub(super) fn is_on_device(&self) -> bool {
        matches!(self, Buffer::Device(buffer) if !buffer.is_simulated())
    }
}

impl From<Vec<u8>> for Buffer {
    fn from(bytes: Vec<u8>) -> Self {
        Buffer::Host(bytes.into())
    }
}

/// What a message carries besides its header.
#[derive(Debug, Default)]
pub enum Payload {
    /// Nothing.
    #[default]
    Empty,
    /// A buffer of its own.
    Owned(Box<Buffer>),
    /// A buffer with other readers.
    Shared(Arc<Buffer>),
}

impl Payload {
    /// The buffer, if there is one.
    pub fn buffer(&self) -> Option<&Buffer> {
        match self {
            Payload::Empty => None,
            Payload::Owned(buffer) => Some(buffer),
            Payload::Shared(buffer) => Some(buffer),
        }
    }

    /// The buffer, if it is owned.
    pub fn into_owned(self) -> Option<Box<Buffer>> {
        match self {
            Payload::Owned(buffer) => Some(buffer),
            Payload::Empty | Payload::Shared(_) => None,
        }
    }
}

impl From<Vec<u8>> for Payload {
    fn from(bytes: Vec<u8>) -> Self {
        Payload::Owned(Box::new(bytes.into()))
    }
}
