//! Device memory that another library of this process has allocated: RMM, CuPy, Numba.
//!
//! Initialises nothing; who has such memory has done that.
//!
//! *Invariant:* each call has the context current in which the memory was allocated, or where it
//! has none, the primary one of its device; and that context has not been destroyed: the driver
//! need not notice one that has.

use std::ffi::{c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::ptr::null_mut;
use std::sync::OnceLock;

use super::{Address, LIBCUDA, SUCCESS, text};
use crate::cuda::Error;
use crate::functions::functions;

/// `CU_POINTER_ATTRIBUTE_CONTEXT`.
const CONTEXT: c_int = 1;

/// `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`.
const DEVICE_ORDINAL: c_int = 9;

functions! {
    struct Functions;
    fn cuGetErrorString(c_int, *mut *const c_char) -> c_int;
    fn cuDeviceGet(*mut c_int, c_int) -> c_int;
    fn cuDevicePrimaryCtxRetain(*mut *mut c_void, c_int) -> c_int;
    fn cuDevicePrimaryCtxRelease_v2(c_int) -> c_int;
    fn cuPointerGetAttribute(*mut c_void, c_int, Address) -> c_int;
    fn cuCtxGetCurrent(*mut *mut c_void) -> c_int;
    fn cuCtxSetCurrent(*mut c_void) -> c_int;
    fn cuCtxSynchronize() -> c_int;
    fn cuStreamSynchronize(*mut c_void) -> c_int;
    fn cuMemcpyDtoH_v2(*mut c_void, Address, usize) -> c_int;
    fn cuMemcpyHtoD_v2(Address, *const c_void, usize) -> c_int;
}

struct Driver {
    functions: Functions,
    /// Never closed: the driver leaves threads behind.
    _library: ManuallyDrop<libloading::Library>,
}

/// The driver, if it can be opened.
fn driver() -> Result<&'static Driver, Error> {
    static DRIVER: OnceLock<Driver> = OnceLock::new();
    if let Some(driver) = DRIVER.get() {
        return Ok(driver);
    }
    // SAFETY: libcuda's initialisers have no preconditions.
    let library = unsafe { libloading::Library::new(LIBCUDA) }
        .map_err(|source| Error::Driver { name: LIBCUDA, source })?;
    let library = ManuallyDrop::new(library);
    // SAFETY: these functions have had these signatures since CUDA 4.1 (7.0 for the primary
    // context), and the library is never closed.
    let functions = unsafe { Functions::find(&library) }
        .map_err(|(function, source)| Error::Driver { name: function, source })?;
    Ok(DRIVER.get_or_init(|| Driver { functions, _library: library }))
}

fn check(driver: &Driver, call: &'static str, result: c_int) -> Result<(), Error> {
    if result == SUCCESS {
        return Ok(());
    }
    // SAFETY: the driver's own function, and the driver is never closed.
    let reason = unsafe { text(driver.functions.cuGetErrorString, result) };
    Err(Error::Refused { call, code: result, reason })
}

/// A CUDA context of another library of this process.
///
/// *Invariant:* it is not destroyed as long as this value is used.
#[derive(Debug, PartialEq, Eq)]
pub struct ForeignContext(*mut c_void);

// SAFETY: a handle, which is only made current; any thread may do that.
unsafe impl Send for ForeignContext {}
// SAFETY: as above.
unsafe impl Sync for ForeignContext {}

impl ForeignContext {
    /// The context that is current on this thread; `None` without a driver or a context.
    ///
    /// # Safety
    /// The context is not destroyed as long as the value is used.
    pub unsafe fn current() -> Option<Self> {
        current().map(Self)
    }

    /// Whether a context is current on this thread.
    pub fn is_there() -> bool {
        current().is_some()
    }

    /// Makes it current on this thread.
    ///
    /// # Errors
    /// If the device has faulted.
    pub fn make_current(&self) -> Result<(), Error> {
        let driver = driver()?;
        // SAFETY: a context of this process, which is not destroyed.
        let result = unsafe { (driver.functions.cuCtxSetCurrent)(self.0) };
        check(driver, "cuCtxSetCurrent", result)
    }

    /// Waits for the work of a stream, numbered as in `__cuda_array_interface__`: 1 or none is the
    /// default stream, 2 the stream of a thread of its own.
    ///
    /// # Errors
    /// If some of its work has failed.
    ///
    /// # Safety
    /// A stream that is not one of the default ones has not been destroyed.
    pub unsafe fn wait(&self, stream: Option<u64>) -> Result<(), Error> {
        self.make_current()?;
        let driver = driver()?;
        // Which thread's stream 2 is, nobody says: this waits for all streams.
        if stream == Some(2) {
            // SAFETY: the context is current.
            let result = unsafe { (driver.functions.cuCtxSynchronize)() };
            return check(driver, "cuCtxSynchronize", result);
        }
        let stream = stream.and_then(|stream| usize::try_from(stream).ok()).unwrap_or(1);
        // SAFETY: the context is current; the stream exists, by the caller's promise.
        let result = unsafe {
            (driver.functions.cuStreamSynchronize)(std::ptr::with_exposed_provenance_mut(stream))
        };
        check(driver, "cuStreamSynchronize", result)
    }
}

/// The context that is current on this thread.
fn current() -> Option<*mut c_void> {
    let mut context = null_mut();
    // SAFETY: a place for the result.
    let result = unsafe { (driver().ok()?.functions.cuCtxGetCurrent)(&raw mut context) };
    (result == SUCCESS && !context.is_null()).then_some(context)
}

impl Drop for ForeignMemory {
    fn drop(&mut self) {
        if let (Some(device), Ok(driver)) = (self.retained, driver()) {
            // SAFETY: retained once in `new`. A failure means that the driver is gone.
            let _ = unsafe { (driver.functions.cuDevicePrimaryCtxRelease_v2)(device) };
        }
    }
}

/// A range of a GPU's memory that another library has allocated.
pub(crate) struct ForeignMemory {
    address: Address,
    bytes: usize,
    /// `None` for a range of no bytes.
    context: Option<ForeignContext>,
    /// The device whose primary context that is, if it was taken because the memory has none.
    retained: Option<c_int>,
}

impl ForeignMemory {
    /// # Safety
    /// As `DeviceBuffer::foreign`.
    pub(crate) unsafe fn new(address: Address, bytes: usize) -> Result<Self, Error> {
        if bytes == 0 {
            return Ok(Self { address: 0, bytes, context: None, retained: None });
        }
        let driver = driver()?;
        let mut context: *mut c_void = null_mut();
        // SAFETY: a place for the attribute, which is a handle; an address that CUDA did not
        // allocate is documented to be answered with an error.
        let result = unsafe {
            (driver.functions.cuPointerGetAttribute)((&raw mut context).cast(), CONTEXT, address)
        };
        check(driver, "cuPointerGetAttribute", result)?;
        let retained = if context.is_null() {
            // Of a pool of the driver's, or virtual memory: any context of its device will do.
            let mut ordinal: c_int = 0;
            let (mut device, place) = (0, &raw mut context);
            // SAFETY: a place for the attribute, which is an `int`.
            let result = unsafe {
                let place = (&raw mut ordinal).cast();
                (driver.functions.cuPointerGetAttribute)(place, DEVICE_ORDINAL, address)
            };
            check(driver, "cuPointerGetAttribute", result)?;
            // SAFETY: a place for the result.
            let result = unsafe { (driver.functions.cuDeviceGet)(&raw mut device, ordinal) };
            check(driver, "cuDeviceGet", result)?;
            // SAFETY: a place for the result, and a device of the driver.
            let result = unsafe { (driver.functions.cuDevicePrimaryCtxRetain)(place, device) };
            check(driver, "cuDevicePrimaryCtxRetain", result)?;
            Some(device)
        } else {
            None
        };
        Ok(Self { address, bytes, context: Some(ForeignContext(context)), retained })
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes
    }

    pub(crate) fn context(&self) -> Option<&ForeignContext> {
        self.context.as_ref()
    }

    /// The device address, in the form that UCX takes.
    pub(crate) fn pointer(&self) -> *mut c_void {
        std::ptr::with_exposed_provenance_mut(usize::try_from(self.address).unwrap_or(0))
    }

    /// Copies `bytes` to `offset`; the caller has checked that they fit.
    pub(crate) fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<(), Error> {
        let Some(context) = &self.context else { return Ok(()) };
        context.make_current()?;
        let driver = driver()?;
        // SAFETY: the range lies within this allocated memory, and the source is readable.
        let result = unsafe {
            (driver.functions.cuMemcpyHtoD_v2)(
                self.address + offset as u64,
                bytes.as_ptr().cast(),
                bytes.len(),
            )
        };
        check(driver, "cuMemcpyHtoD", result)
    }

    /// Copies from `offset`; the caller has checked the range.
    pub(crate) fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), Error> {
        let Some(context) = &self.context else { return Ok(()) };
        context.make_current()?;
        let driver = driver()?;
        // SAFETY: the range lies within this allocated memory, and the target is writable.
        let result = unsafe {
            (driver.functions.cuMemcpyDtoH_v2)(
                bytes.as_mut_ptr().cast(),
                self.address + offset as u64,
                bytes.len(),
            )
        };
        check(driver, "cuMemcpyDtoH", result)
    }
}
