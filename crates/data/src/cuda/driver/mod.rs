//! The CUDA driver (libcuda), opened at run time.
//!
//! Does not know NVML's numbers; a device is found by its PCI address.
//!
//! *Invariant:* the device's primary context is current on the thread for each call, and is held
//! as long as any of the device's buffers.

mod foreign;
mod kernel;
mod peers;
mod transfers;

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::error::LIBCUDA;
use super::fault::Faults;
use super::mappings::Way;
use super::pool::{self, Pool, PoolUse, Release, Sizes};
use super::{Error, MemoryInfo};
use crate::functions::functions;
use cuda_cluster_model::ids::{GpuUuid, PciAddress};

pub use self::foreign::ForeignContext;
pub(super) use self::foreign::ForeignMemory;
pub use self::transfers::{CopyEnd, PinnedMemory};

/// `CUDA_SUCCESS`.
const SUCCESS: c_int = 0;

/// `CUDA_ERROR_INVALID_VALUE`.
const INVALID_VALUE: c_int = 1;

/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: c_int = 2;

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`
const LAZY_PEER_ACCESS: c_uint = 1;

/// `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`
const SYNC_MEMOPS: c_int = 6;

/// `CUipcMemHandle`: names an allocation to another process.
#[repr(C)]
#[derive(Clone, Copy)]
struct IpcHandle([u8; super::IPC_HANDLE_BYTES]);

/// `CUdeviceptr`: a device address.
type Address = u64;

functions! {
    struct Functions;
    fn cuInit(c_uint) -> c_int;
    fn cuGetErrorString(c_int, *mut *const c_char) -> c_int;
    fn cuDeviceGetByPCIBusId(*mut c_int, *const c_char) -> c_int;
    fn cuDeviceGetCount(*mut c_int) -> c_int;
    fn cuDeviceGetUuid(*mut [u8; 16], c_int) -> c_int;
    fn cuDeviceGetName(*mut c_char, c_int, c_int) -> c_int;
    fn cuDevicePrimaryCtxRetain(*mut *mut c_void, c_int) -> c_int;
    fn cuDevicePrimaryCtxRelease_v2(c_int) -> c_int;
    fn cuCtxSetCurrent(*mut c_void) -> c_int;
    fn cuMemGetInfo_v2(*mut usize, *mut usize) -> c_int;
    fn cuMemAlloc_v2(*mut Address, usize) -> c_int;
    fn cuMemFree_v2(Address) -> c_int;
    fn cuIpcGetMemHandle(*mut IpcHandle, Address) -> c_int;
    fn cuIpcOpenMemHandle_v2(*mut Address, IpcHandle, c_uint) -> c_int;
    fn cuIpcCloseMemHandle(Address) -> c_int;
    fn cuPointerSetAttribute(*const c_void, c_int, Address) -> c_int;
    fn cuMemcpyHtoD_v2(Address, *const c_void, usize) -> c_int;
    fn cuMemcpyDtoH_v2(*mut c_void, Address, usize) -> c_int;
    fn cuDeviceGetAttribute(*mut c_int, c_int, c_int) -> c_int;
    fn cuDriverGetVersion(*mut c_int) -> c_int;
    fn cuFuncSetAttribute(*mut c_void, c_int, c_int) -> c_int;
    fn cuModuleLoadData(*mut *mut c_void, *const c_void) -> c_int;
    fn cuModuleGetFunction(*mut *mut c_void, *mut c_void, *const c_char) -> c_int;
    fn cuStreamCreate(*mut *mut c_void, c_uint) -> c_int;
    fn cuStreamSynchronize(*mut c_void) -> c_int;
    fn cuStreamDestroy_v2(*mut c_void) -> c_int;
    fn cuLaunchKernel(
        *mut c_void, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, *mut c_void,
        *mut *mut c_void, *mut *mut c_void
    ) -> c_int;
}

/// How many GPUs the driver shows this process.
pub(super) fn count() -> Result<usize, Error> {
    let opened = DriverDevice::unopened()?;
    let mut count = 0;
    // SAFETY: a place for the result.
    let result = unsafe { (opened.functions.cuDeviceGetCount)(&raw mut count) };
    opened.check("cuDeviceGetCount", result)?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// A GPU, accessed through the driver.
pub struct DriverDevice {
    functions: Functions,
    /// Drivers have it since CUDA 12.4.
    parameter_info: Option<kernel::ParameterInfo>,
    /// Never closed: the driver leaves threads behind.
    _library: ManuallyDrop<libloading::Library>,
    device: c_int,
    context: *mut c_void,
    name: String,
    modules: Mutex<kernel::Modules>,
    faults: Faults,
    pool: Mutex<Pool>,
    /// Whether the pool may have peers that are to let go, so that nobody locks it to ask.
    is_beyond: AtomicBool,
}

// SAFETY: the driver's functions may be called from any thread; the context is a handle that is
// made current on each thread that uses it.
unsafe impl Send for DriverDevice {}
// SAFETY: as above; no field but the locked one changes after construction.
unsafe impl Sync for DriverDevice {}

impl DriverDevice {
    /// The initialised driver, without a GPU.
    fn unopened() -> Result<Self, Error> {
        // SAFETY: libcuda's initialisers have no preconditions.
        let library = unsafe { libloading::Library::new(LIBCUDA) }
            .map_err(|source| Error::Driver { name: LIBCUDA, source })?;
        let library = ManuallyDrop::new(library);
        // SAFETY: these functions have had these signatures since CUDA 3.2 (7.0 for the primary
        // context), and the library is never closed.
        let functions = unsafe { Functions::find(&library) }
            .map_err(|(function, source)| Error::Driver { name: function, source })?;
        // SAFETY: this function has always had this signature, and the library is never closed.
        let parameter_info = unsafe { library.get("cuFuncGetParamInfo") }.ok().map(|info| *info);
        let opened = Self {
            functions,
            parameter_info,
            _library: library,
            device: 0,
            context: null_mut(),
            name: String::new(),
            modules: Mutex::default(),
            faults: Faults::default(),
            pool: Mutex::new(Pool::new(0)),
            is_beyond: AtomicBool::new(false),
        };
        // SAFETY: no flags are defined.
        opened.check("cuInit", unsafe { (opened.functions.cuInit)(0) })?;
        Ok(opened)
    }

    /// Opens the GPU at a place, and holds its primary context.
    pub(super) fn open(place: PciAddress) -> Result<Self, Error> {
        let mut opened = Self::unopened()?;
        // `CString::new` refuses NUL bytes, which no PCI address has.
        let text = CString::new(place.to_string()).unwrap_or_default();
        let mut device = 0;
        // SAFETY: a place for the result and a C string.
        let result =
            unsafe { (opened.functions.cuDeviceGetByPCIBusId)(&raw mut device, text.as_ptr()) };
        opened.check("cuDeviceGetByPCIBusId", result)?;
        let mut name = [0; 128];
        // SAFETY: the buffer has the length that is said, and stays a C string.
        let result = unsafe { (opened.functions.cuDeviceGetName)(name.as_mut_ptr(), 127, device) };
        opened.check("cuDeviceGetName", result)?;
        // SAFETY: the driver wrote a C string into the buffer.
        opened.name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let mut context = null_mut();
        // SAFETY: a place for the result and a device of the driver.
        let result =
            unsafe { (opened.functions.cuDevicePrimaryCtxRetain)(&raw mut context, device) };
        opened.check("cuDevicePrimaryCtxRetain", result)?;
        opened.device = device;
        opened.context = context;
        opened.pool = Mutex::new(Pool::new(opened.memory()?.total_bytes));
        Ok(opened)
    }

    pub(super) fn faults(&self) -> &Faults {
        &self.faults
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Of a MIG instance, the driver has another one (`cuDeviceGetUuid_v2`), which old ones lack.
    pub(super) fn uuid(&self) -> Result<Option<GpuUuid>, Error> {
        let mut bytes = [0; 16];
        // SAFETY: a place for the result, and a device of the driver.
        let result = unsafe { (self.functions.cuDeviceGetUuid)(&raw mut bytes, self.device) };
        self.check("cuDeviceGetUuid", result)?;
        Ok(GpuUuid::of_bytes(bytes))
    }

    /// Makes the context current on this thread, as UCX requires before it is initialised.
    pub(super) fn make_current(&self) -> Result<(), Error> {
        // SAFETY: the context is retained as long as `self`.
        let result = unsafe { (self.functions.cuCtxSetCurrent)(self.context) };
        self.check("cuCtxSetCurrent", result)
    }

    pub(super) fn memory(&self) -> Result<MemoryInfo, Error> {
        self.ask_memory().map_err(|(call, code)| self.failure(call, code))
    }

    pub(super) fn look_for_fault(&self) {
        self.faults.asked(self.ask_memory().map(drop), |code| self.text(code));
    }

    fn ask_memory(&self) -> Result<MemoryInfo, (&'static str, c_int)> {
        // SAFETY: the context is retained as long as `self`.
        let result = unsafe { (self.functions.cuCtxSetCurrent)(self.context) };
        if result != SUCCESS {
            return Err(("cuCtxSetCurrent", result));
        }
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: two places for the results; the context is current.
        let result = unsafe { (self.functions.cuMemGetInfo_v2)(&raw mut free, &raw mut total) };
        if result != SUCCESS {
            return Err(("cuMemGetInfo", result));
        }
        Ok(MemoryInfo { total_bytes: total as u64, free_bytes: free as u64 })
    }

    pub(super) fn allocate(device: &Arc<Self>, bytes: usize) -> Result<DriverMemory, Error> {
        device.make_current()?;
        let address = match bytes {
            0 => 0,
            _ => device.piece(bytes)?,
        };
        Ok(DriverMemory { device: Arc::clone(device), address, bytes })
    }

    fn locked(&self) -> MutexGuard<'_, Pool> {
        // No step between two changes of it can panic.
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a piece from the pool. If the pool must grow, it does so by a slab, and before it has
    /// more than it usually has, or if there is no memory for one, it gives idle slabs back.
    fn piece(&self, bytes: usize) -> Result<Address, Error> {
        let mut pool = self.locked();
        let rounded = pool::rounded(bytes).unwrap_or(u64::MAX);
        if let Some(address) = pool.take(rounded) {
            return Ok(address);
        }
        for release in Release::STEPS {
            self.free_slabs(pool.release(rounded, release));
            for length in pool.lengths(rounded, release) {
                if let Some(base) = self.slab(length)? {
                    pool.grow(base, length);
                    if let Some(address) = pool.take(rounded) {
                        return Ok(address);
                    }
                }
            }
        }
        let memory = self.memory()?;
        let used = pool.usage(memory.in_use_bytes());
        let free = memory.free_bytes.min(pool.room());
        Err(Error::OutOfMemory {
            device: self.name.clone(),
            asked_bytes: bytes,
            free_bytes: free + (used.held_bytes - used.used_bytes),
            freed_bytes: used.freed_but_mapped_bytes,
            mapped_by: pool.mappings().keepers(),
        })
    }

    /// Allocates memory from the driver; `None` if the device has too little. The context must be
    /// current.
    ///
    /// What is copied to it from the host has arrived when the call returns, also for peers and
    /// NICs, which are in no stream of this context (CUDA, "API synchronization behavior";
    /// GPUDirect RDMA guide). UCX asks for this, too, but after the first copy.
    fn slab(&self, bytes: u64) -> Result<Option<Address>, Error> {
        let mut base = 0;
        let asked = usize::try_from(bytes).unwrap_or(usize::MAX);
        // SAFETY: a place for the result; the context is current.
        let result = unsafe { (self.functions.cuMemAlloc_v2)(&raw mut base, asked) };
        if result == OUT_OF_MEMORY {
            return Ok(None);
        }
        self.check("cuMemAlloc", result)?;
        let yes: c_uint = 1;
        // SAFETY: a value of the type that this attribute has, and an allocation that lives.
        let result = unsafe {
            (self.functions.cuPointerSetAttribute)((&raw const yes).cast(), SYNC_MEMOPS, base)
        };
        self.check("cuPointerSetAttribute", result)?;
        Ok(Some(base))
    }

    pub(super) fn size_pool(&self, sizes: Sizes) -> Result<(), Error> {
        self.make_current()?;
        let mut pool = self.locked();
        let Some(initial) = pool.set_sizes(sizes) else { return Ok(()) };
        let base = self.slab(initial)?;
        let base = base.ok_or_else(|| Error::Pool {
            device: self.name.clone(),
            asked_bytes: initial,
            free_bytes: self.memory().map_or(0, |memory| memory.free_bytes),
        })?;
        pool.begin(base, initial);
        Ok(())
    }

    /// The context must be current.
    fn free_slabs(&self, slabs: impl IntoIterator<Item = Address>) {
        for base in slabs {
            // SAFETY: allocated once, on this device, and no piece of it is out. A failure means
            // that the context is lost, and the memory with it.
            let _ = unsafe { (self.functions.cuMemFree_v2)(base) };
        }
    }

    pub(super) fn pool(&self) -> PoolUse {
        // Before the device is asked: else the pool could grow meanwhile.
        let mut pool = self.locked();
        // A device that does not answer has a fault, and this process ends.
        let in_use = self.memory().map_or(0, |memory| memory.in_use_bytes());
        pool.usage(in_use)
    }

    pub(super) fn pool_is_to_shrink(&self) -> bool {
        self.locked().is_to_shrink(Instant::now())
    }

    pub(super) fn trim_pool(&self) {
        if self.make_current().is_err() {
            return;
        }
        loop {
            let mut pool = self.locked();
            let idle = pool.trim(Instant::now());
            self.is_beyond.fetch_or(pool.mappings().is_beyond(), Ordering::Relaxed);
            if idle.is_empty() {
                return;
            }
            // Under the lock: else a request could find the device full meanwhile.
            self.free_slabs(idle);
        }
    }

    pub(super) fn close_pool(&self) {
        if self.make_current().is_ok() {
            let slabs = self.locked().close();
            self.free_slabs(slabs);
        }
    }

    /// Maps another process's memory, reads its first byte, and unmaps it.
    pub(super) fn try_foreign(&self, handle: &[u8]) -> Result<(), i32> {
        let code = |result: c_int| if result == SUCCESS { Ok(()) } else { Err(result) };
        let handle = IpcHandle(handle.try_into().map_err(|_| INVALID_VALUE)?);
        let (mut address, mut first) = (0, 0u8);
        // SAFETY: the context is retained as long as `self`; a place for the result; the driver
        // checks the handle.
        unsafe {
            code((self.functions.cuCtxSetCurrent)(self.context))?;
            code((self.functions.cuIpcOpenMemHandle_v2)(
                &raw mut address,
                handle,
                LAZY_PEER_ACCESS,
            ))?;
        }
        // SAFETY: just mapped, at least one byte long, and a place for that byte.
        let read = unsafe { (self.functions.cuMemcpyDtoH_v2)((&raw mut first).cast(), address, 1) };
        // SAFETY: opened once above; where UCX has it open too, the driver counts.
        let closed = unsafe { (self.functions.cuIpcCloseMemHandle)(address) };
        code(read).and(code(closed))
    }

    fn check(&self, call: &'static str, result: c_int) -> Result<(), Error> {
        if result == SUCCESS { Ok(()) } else { Err(self.failure(call, result)) }
    }

    /// Why a call failed; notes it if that is a fault.
    fn failure(&self, call: &'static str, code: c_int) -> Error {
        self.faults.note(call, code, || self.text(code));
        Error::Refused { call, code, reason: self.text(code) }
    }

    /// The driver's text for a result.
    pub(super) fn text(&self, result: c_int) -> String {
        // SAFETY: the driver's own function.
        unsafe { text(self.functions.cuGetErrorString, result) }
    }
}

/// `cuGetErrorString`.
type ErrorString = unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int;

/// The driver's text for a result.
///
/// # Safety
/// The function must be that of a libcuda that is never closed.
unsafe fn text(string: ErrorString, result: c_int) -> String {
    let mut text = std::ptr::null();
    // SAFETY: a place for a pointer to the driver's own constant text.
    let known = unsafe { string(result, &raw mut text) };
    if known == SUCCESS && !text.is_null() {
        // SAFETY: the driver's texts are C strings that live as long as it.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    } else {
        "an error that the driver has no text for".to_owned()
    }
}

impl Drop for DriverDevice {
    fn drop(&mut self) {
        if !self.context.is_null() {
            self.close_pool();
            // SAFETY: retained once in `open`; every buffer holds the device, so none is left. At
            // the process's end the driver may be gone already and says so, which changes nothing.
            let _ = unsafe { (self.functions.cuDevicePrimaryCtxRelease_v2)(self.device) };
        }
    }
}

impl fmt::Debug for DriverDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DriverDevice").field("name", &self.name).finish()
    }
}

/// Memory of a GPU.
pub(super) struct DriverMemory {
    device: Arc<DriverDevice>,
    address: Address,
    bytes: usize,
}

impl DriverMemory {
    pub(super) fn len(&self) -> usize {
        self.bytes
    }

    pub(super) fn device(&self) -> &DriverDevice {
        &self.device
    }

    /// The device address, in the form that UCX takes.
    pub(super) fn pointer(&self) -> *mut c_void {
        // Addresses of the device and of the host share one space of 64 bits.
        std::ptr::with_exposed_provenance_mut(usize::try_from(self.address).unwrap_or(0))
    }

    pub(super) fn exchanged_with(&self, peer: u64, way: Way) {
        self.device.locked().exchanged(self.address, peer, way);
    }

    /// The handle by which another process maps this memory.
    pub(super) fn ipc_handle(&self) -> Result<Vec<u8>, Error> {
        self.device.make_current()?;
        let mut handle = IpcHandle([0; super::IPC_HANDLE_BYTES]);
        // SAFETY: a place for the result, and an allocation that lives.
        let result =
            unsafe { (self.device.functions.cuIpcGetMemHandle)(&raw mut handle, self.address) };
        self.device.check("cuIpcGetMemHandle", result)?;
        Ok(handle.0.to_vec())
    }

    /// Copies `bytes` to `offset`; the caller has checked that they fit.
    pub(super) fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<(), Error> {
        self.device.make_current()?;
        // SAFETY: the range lies within this allocation, and the source is readable.
        let result = unsafe {
            (self.device.functions.cuMemcpyHtoD_v2)(
                self.address + offset as u64,
                bytes.as_ptr().cast(),
                bytes.len(),
            )
        };
        self.device.check("cuMemcpyHtoD", result)
    }

    /// Copies from `offset`; the caller has checked the range.
    pub(super) fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), Error> {
        self.device.make_current()?;
        // SAFETY: the range lies within this allocation, and the target is writable.
        let result = unsafe {
            (self.device.functions.cuMemcpyDtoH_v2)(
                bytes.as_mut_ptr().cast(),
                self.address + offset as u64,
                bytes.len(),
            )
        };
        self.device.check("cuMemcpyDtoH", result)
    }
}

impl Drop for DriverMemory {
    fn drop(&mut self) {
        let Some(bytes) = pool::rounded(self.bytes).filter(|_| self.address != 0) else { return };
        let mut pool = self.device.locked();
        pool.give(self.address, bytes);
        if pool.mappings().is_beyond() {
            self.device.is_beyond.store(true, Ordering::Relaxed);
        }
    }
}
