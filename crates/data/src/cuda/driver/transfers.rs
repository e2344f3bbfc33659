//! Copies that are timed: between pinned host memory and a GPU, and between two GPUs. What paths
//! carry is measured with them, without UCX.
//!
//! *Invariant:* when a call returns, no copy that it has begun is under way.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Address, DriverDevice, OUT_OF_MEMORY, SUCCESS};
use crate::cuda::Error;
use crate::functions::functions;
use cuda_cluster_model::ids::PciAddress;

/// `CU_MEMHOSTALLOC_PORTABLE`: pinned for all contexts.
const PORTABLE: c_uint = 1;

/// `CU_STREAM_NON_BLOCKING`: does not wait for the default stream.
const NON_BLOCKING: c_uint = 1;

/// `CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED`.
const ALREADY_ENABLED: c_int = 704;

/// The least memory to copy from and to.
const LEAST_BYTES: usize = 1 << 20;

/// The part of a GPU's free memory that is taken.
const SHARE_OF_FREE: u64 = 8;

functions! {
    struct Functions;
    fn cuDeviceCanAccessPeer(*mut c_int, c_int, c_int) -> c_int;
    fn cuCtxEnablePeerAccess(*mut c_void, c_uint) -> c_int;
    fn cuCtxDisablePeerAccess(*mut c_void) -> c_int;
    fn cuMemHostAlloc(*mut *mut c_void, usize, c_uint) -> c_int;
    fn cuMemFreeHost(*mut c_void) -> c_int;
    fn cuMemsetD8Async(Address, u8, usize, *mut c_void) -> c_int;
    fn cuMemcpyHtoDAsync_v2(Address, *const c_void, usize, *mut c_void) -> c_int;
    fn cuMemcpyDtoHAsync_v2(*mut c_void, Address, usize, *mut c_void) -> c_int;
    fn cuMemcpyPeerAsync(Address, *mut c_void, Address, *mut c_void, usize, *mut c_void) -> c_int;
}

/// A GPU with the functions that only copies need.
struct Opened {
    device: DriverDevice,
    functions: Functions,
}

/// One end of copies: a GPU with a stream and a block of memory.
pub struct CopyEnd {
    opened: Arc<Opened>,
    stream: *mut c_void,
    block: Address,
    bytes: usize,
}

impl CopyEnd {
    /// Opens the GPU at a place, with a block of so many bytes, or of fewer: at most an eighth of
    /// its free memory.
    ///
    /// # Errors
    /// If there is no such GPU, it has less than 8 MiB free, or the driver refuses.
    pub fn open(place: PciAddress, most_bytes: usize) -> Result<Self, Error> {
        let device = DriverDevice::open(place)?;
        // SAFETY: these functions have had these signatures since CUDA 4.0, and the library is
        // never closed.
        let functions = unsafe { Functions::find(&device._library) }
            .map_err(|(function, source)| Error::Driver { name: function, source })?;
        let opened = Arc::new(Opened { device, functions });
        let mut end = Self { opened, stream: null_mut(), block: 0, bytes: 0 };
        end.stream = end.opened.stream()?;
        (end.block, end.bytes) = end.opened.block(most_bytes)?;
        Ok(end)
    }

    /// Length of the block of memory.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether it has no memory, which no end has.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Pinned host memory, full of zeros; where this thread's memory policy puts it.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn pinned(&self, bytes: usize) -> Result<PinnedMemory, Error> {
        let device = &self.opened.device;
        device.make_current()?;
        let mut place = null_mut();
        // SAFETY: a place for the result; the context is current.
        let result =
            unsafe { (self.opened.functions.cuMemHostAlloc)(&raw mut place, bytes, PORTABLE) };
        device.check("cuMemHostAlloc", result)?;
        let Some(place) = NonNull::new(place.cast::<u8>()) else {
            let reason = "it gave no memory".to_owned();
            return Err(Error::Call { call: "cuMemHostAlloc", reason });
        };
        // SAFETY: allocated with this length, and nobody else has it.
        unsafe { place.write_bytes(0, bytes) };
        Ok(PinnedMemory { opened: Arc::clone(&self.opened), place, bytes })
    }

    /// Whether this GPU can access the other's memory directly (`cuDeviceCanAccessPeer`).
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn reaches(&self, other: &Self) -> Result<bool, Error> {
        let (one, other) = (&self.opened.device, &other.opened.device);
        let mut can = 0;
        // SAFETY: a place for the result, and two devices of the driver.
        let result = unsafe {
            (self.opened.functions.cuDeviceCanAccessPeer)(&raw mut can, one.device, other.device)
        };
        one.check("cuDeviceCanAccessPeer", result)?;
        Ok(can != 0)
    }

    /// Gives this GPU access to the other's memory: without it copies go by way of the host (CUDA
    /// C++ Programming Guide, "Peer-to-Peer Memory Copy"). It has few peers at a time, so that it
    /// needs [`Self::disconnect`].
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn connect(&self, other: &Self) -> Result<(), Error> {
        self.opened.device.make_current()?;
        // SAFETY: the other context is retained as long as `other`. No flags are defined.
        let result = unsafe {
            (self.opened.functions.cuCtxEnablePeerAccess)(other.opened.device.context, 0)
        };
        match result {
            ALREADY_ENABLED => Ok(()),
            _ => self.opened.device.check("cuCtxEnablePeerAccess", result),
        }
    }

    /// Takes the access away again.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn disconnect(&self, other: &Self) -> Result<(), Error> {
        self.opened.device.make_current()?;
        // SAFETY: the other context is retained as long as `other`; no copy is under way.
        let result =
            unsafe { (self.opened.functions.cuCtxDisablePeerAccess)(other.opened.device.context) };
        self.opened.device.check("cuCtxDisablePeerAccess", result)
    }

    /// Fills the block with a byte.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn fill(&mut self, value: u8) -> Result<(), Error> {
        let (opened, block, bytes, stream) = (&self.opened, self.block, self.bytes, self.stream);
        // SAFETY: the block has so many bytes, and belongs to this context, as the stream does.
        self.timed("cuMemsetD8Async", 1, || unsafe {
            (opened.functions.cuMemsetD8Async)(block, value, bytes, stream)
        })?;
        Ok(())
    }

    /// Copies the first `bytes` from the host to the block, so many times one after the other.
    ///
    /// # Errors
    /// If the driver refuses.
    ///
    /// # Panics
    /// If one of them has fewer bytes.
    pub fn write(
        &mut self,
        from: &PinnedMemory,
        bytes: usize,
        copies: u32,
    ) -> Result<Duration, Error> {
        assert!(bytes <= self.bytes && bytes <= from.bytes, "a copy is within both ends");
        let (opened, block, stream) = (&self.opened, self.block, self.stream);
        // SAFETY: both ranges have so many bytes, and stay until the copies have ended, within this
        // call. Only the block is written, which `self` has alone.
        self.timed("cuMemcpyHtoDAsync", copies, || unsafe {
            (opened.functions.cuMemcpyHtoDAsync_v2)(
                block,
                from.place.as_ptr().cast(),
                bytes,
                stream,
            )
        })
    }

    /// Copies the first `bytes` of the block to the host, so many times one after the other.
    ///
    /// # Errors
    /// If the driver refuses.
    ///
    /// # Panics
    /// If one of them has fewer bytes.
    pub fn read(
        &self,
        to: &mut PinnedMemory,
        bytes: usize,
        copies: u32,
    ) -> Result<Duration, Error> {
        assert!(bytes <= self.bytes && bytes <= to.bytes, "a copy is within both ends");
        let (opened, block, stream) = (&self.opened, self.block, self.stream);
        // SAFETY: as in `write`; what is written is borrowed by this call alone.
        self.timed("cuMemcpyDtoHAsync", copies, || unsafe {
            (opened.functions.cuMemcpyDtoHAsync_v2)(to.place.as_ptr().cast(), block, bytes, stream)
        })
    }

    /// Copies the first `bytes` of the block to another GPU's, so many times one after the other.
    ///
    /// # Errors
    /// If the driver refuses.
    ///
    /// # Panics
    /// If one of them has fewer bytes.
    pub fn send(&self, to: &mut Self, bytes: usize, copies: u32) -> Result<Duration, Error> {
        assert!(bytes <= self.bytes && bytes <= to.bytes, "a copy is within both ends");
        let (opened, stream) = (&self.opened, self.stream);
        let (block, context) = (self.block, opened.device.context);
        let (other, other_context) = (to.block, to.opened.device.context);
        // SAFETY: as in `write`; each block belongs to its context, which is retained.
        self.timed("cuMemcpyPeerAsync", copies, || unsafe {
            (opened.functions.cuMemcpyPeerAsync)(
                other,
                other_context,
                block,
                context,
                bytes,
                stream,
            )
        })
    }

    /// How long it takes until the stream has done this so many times.
    fn timed(
        &self,
        call: &'static str,
        copies: u32,
        mut copy: impl FnMut() -> c_int,
    ) -> Result<Duration, Error> {
        let device = &self.opened.device;
        device.make_current()?;
        let begun = Instant::now();
        let result = (0..copies).map(|_| copy()).find(|result| *result != SUCCESS);
        // After a failure, too, what was begun before it ends here. If this fails, the context has
        // faulted, and does nothing more.
        // SAFETY: a living stream of this context.
        let ended = unsafe { (device.functions.cuStreamSynchronize)(self.stream) };
        let elapsed = begun.elapsed();
        device.check(call, result.unwrap_or(SUCCESS))?;
        device.check("cuStreamSynchronize", ended)?;
        Ok(elapsed)
    }
}

impl Opened {
    /// A new stream; makes the context current.
    fn stream(&self) -> Result<*mut c_void, Error> {
        let device = &self.device;
        device.make_current()?;
        let mut stream = null_mut();
        // SAFETY: a place for the result; the context is current.
        let result = unsafe { (device.functions.cuStreamCreate)(&raw mut stream, NON_BLOCKING) };
        device.check("cuStreamCreate", result)?;
        Ok(stream)
    }

    /// A block of so many bytes, or fewer. The context must be current.
    fn block(&self, most_bytes: usize) -> Result<(Address, usize), Error> {
        let device = &self.device;
        let free = device.memory()?.free_bytes;
        let room = usize::try_from(free / SHARE_OF_FREE).unwrap_or(usize::MAX);
        let mut bytes = most_bytes.min(room) / LEAST_BYTES * LEAST_BYTES;
        while bytes >= LEAST_BYTES {
            let mut block = 0;
            // SAFETY: a place for the result; the context is current.
            let result = unsafe { (device.functions.cuMemAlloc_v2)(&raw mut block, bytes) };
            if result != OUT_OF_MEMORY {
                device.check("cuMemAlloc", result)?;
                return Ok((block, bytes));
            }
            bytes = bytes / 2 / LEAST_BYTES * LEAST_BYTES;
        }
        Err(Error::OutOfMemory {
            device: device.name.clone(),
            asked_bytes: LEAST_BYTES,
            free_bytes: free,
            freed_bytes: 0,
            mapped_by: Vec::new(),
        })
    }
}

impl Drop for CopyEnd {
    fn drop(&mut self) {
        let device = &self.opened.device;
        if device.make_current().is_err() {
            return;
        }
        // SAFETY: both were created once in `open`, and nothing is under way. A failure means that
        // the context is lost, and they with it.
        unsafe {
            if !self.stream.is_null() {
                let _ = (device.functions.cuStreamDestroy_v2)(self.stream);
            }
            if self.block != 0 {
                let _ = (device.functions.cuMemFree_v2)(self.block);
            }
        }
    }
}

/// Host memory that the driver has pinned, so that GPUs read and write it themselves.
pub struct PinnedMemory {
    opened: Arc<Opened>,
    place: NonNull<u8>,
    bytes: usize,
}

impl PinnedMemory {
    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: allocated with this length, initialised, and only written under `&mut`.
        unsafe { std::slice::from_raw_parts(self.place.as_ptr(), self.bytes) }
    }

    /// Its bytes, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.place.as_ptr(), self.bytes) }
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        if self.opened.device.make_current().is_ok() {
            // SAFETY: allocated once by `cuMemHostAlloc`, and no copy is under way. A failure means
            // that the context is lost.
            let _ = unsafe { (self.opened.functions.cuMemFreeHost)(self.place.as_ptr().cast()) };
        }
    }
}
