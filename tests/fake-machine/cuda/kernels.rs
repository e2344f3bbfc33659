//! Kernels: the shared libraries that the stand-in for NVRTC makes (`nvrtc/lib.rs`).
//!
//! *Invariant:* real machine code is refused (801): nobody here can run it.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use std::sync::atomic::{AtomicU32, Ordering};

use crate::codes::{ILLEGAL_ADDRESS, INVALID_VALUE, NO_BINARY_FOR_GPU, NOT_FOUND, NOT_SUPPORTED};
use crate::driver::{DRIVER, call, tell};
use crate::streams::Work;

/// What the image of a module begins with.
const MARK: &[u8] = b"machine code of a stand-in: ";

type Pack = unsafe extern "C" fn(*mut *mut c_void) -> *mut c_void;
type Reach = unsafe extern "C" fn(*mut c_void) -> *mut c_void;
type Run = unsafe extern "C" fn(*mut c_void, *const c_uint, Reach) -> c_int;

type Parameter = unsafe extern "C" fn(usize, *mut usize, *mut usize) -> c_int;

/// What a `CUfunction` points to; it lives as long as the process.
struct Function {
    pack: Pack,
    run: Run,
    parameter: Parameter,
    /// The most shared memory of a launch.
    shared_bytes: AtomicU32,
}

/// What a function may have without `cuFuncSetAttribute` (CUDA C++ Programming Guide, "Shared Memory").
const USUAL_SHARED_BYTES: c_uint = 48 << 10;

/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`, and the most that any GPU has (9.0: 227 KiB).
const SHARED_BYTES: c_int = 8;
const MOST_SHARED_BYTES: c_uint = 227 << 10;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncSetAttribute(
    function: *mut c_void,
    attribute: c_int,
    value: c_int,
) -> c_int {
    call("cuFuncSetAttribute", |driver| {
        driver.current()?;
        let value = c_uint::try_from(value).ok().filter(|bytes| *bytes <= MOST_SHARED_BYTES);
        if function.is_null() || attribute != SHARED_BYTES {
            return Err(INVALID_VALUE);
        }
        // SAFETY: made by `cuModuleGetFunction`, and never freed.
        let function = unsafe { &*function.cast::<Function>() };
        function.shared_bytes.store(value.ok_or(INVALID_VALUE)?, Ordering::Relaxed);
        Ok(())
    })
}

/// Whether a GPU runs code for an architecture: machine code for its generation and not a later part
/// of it, `a` for itself alone; PTX for it or an older one (CUDA C++ Programming Guide, "Application
/// Compatibility").
fn runs(architecture: &str, major: c_int, minor: c_int) -> bool {
    let digits: String = architecture.chars().filter(char::is_ascii_digit).collect();
    let Ok(number) = digits.parse::<c_int>() else { return false };
    let own = major * 10 + minor;
    match architecture.split_once('_') {
        Some(("compute", _)) => number <= own,
        Some(("sm", name)) if name.ends_with('a') => number == own,
        Some(("sm", _)) => number / 10 == major && number <= own,
        _ => false,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadData(module: *mut *mut c_void, image: *const c_char) -> c_int {
    call("cuModuleLoadData", |driver| {
        driver.current()?;
        // SAFETY: see `lib.rs`; an image begins with at least four bytes, which differ otherwise.
        let byte_at = |at: usize| unsafe { *image.add(at) }.cast_unsigned();
        let starts = MARK.iter().enumerate().all(|(at, byte)| byte_at(at) == *byte);
        if !starts {
            return Err(NOT_SUPPORTED);
        }
        // SAFETY: our own NVRTC ends the path with a NUL.
        let path = unsafe { CStr::from_ptr(image.add(MARK.len())) };
        // SAFETY: and after it the architecture.
        let architecture = unsafe { CStr::from_ptr(path.as_ptr().add(path.count_bytes() + 1)) };
        let (major, minor) = driver.devices[driver.current()?].capability;
        if !runs(&architecture.to_string_lossy(), major, minor) {
            return Err(NO_BINARY_FOR_GPU);
        }
        // SAFETY: a C string; what it loads has no initialisers but libstdc++'s.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: see `lib.rs`.
        unsafe { tell(module, library) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(
    function: *mut *mut c_void,
    module: *mut c_void,
    name: *const c_char,
) -> c_int {
    call("cuModuleGetFunction", |driver| {
        driver.current()?;
        // SAFETY: see `lib.rs`.
        let name = unsafe { CStr::from_ptr(name) }.to_str().map_err(|_| NOT_FOUND)?;
        let find = |kind: &str| {
            let symbol = format!("cc_{kind}_{name}\0");
            // SAFETY: a library that `cuModuleLoadData` opened, and a C string.
            let found = unsafe { libc::dlsym(module, symbol.as_ptr().cast()) };
            if found.is_null() { Err(NOT_FOUND) } else { Ok(found) }
        };
        let (pack, run, parameter) = (find("pack")?, find("run")?, find("parameter")?);
        // SAFETY: our own NVRTC exports functions of these types under these names.
        let made = unsafe {
            Function {
                pack: std::mem::transmute::<*mut c_void, Pack>(pack),
                run: std::mem::transmute::<*mut c_void, Run>(run),
                parameter: std::mem::transmute::<*mut c_void, Parameter>(parameter),
                shared_bytes: AtomicU32::new(USUAL_SHARED_BYTES),
            }
        };
        let found = Box::into_raw(Box::new(made));
        // SAFETY: see `lib.rs`.
        unsafe { tell(function, found.cast()) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleUnload(_module: *mut c_void) -> c_int {
    call("cuModuleUnload", |driver| driver.current().map(|_| ()))
}

/// `paramIndex` must be less than the number of parameters, `paramSize` may be null (`cuda.h`).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncGetParamInfo(
    function: *mut c_void,
    index: usize,
    offset: *mut usize,
    size: *mut usize,
) -> c_int {
    call("cuFuncGetParamInfo", |driver| {
        driver.current()?;
        if function.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: made by `cuModuleGetFunction`, and never freed.
        let function = unsafe { &*function.cast::<Function>() };
        let (mut own_offset, mut own_size) = (0, 0);
        // SAFETY: places for the results.
        if unsafe { (function.parameter)(index, &raw mut own_offset, &raw mut own_size) } != 0 {
            return Err(INVALID_VALUE);
        }
        // SAFETY: see `lib.rs`.
        unsafe {
            tell(offset, own_offset)?;
            if size.is_null() { Ok(()) } else { tell(size, own_size) }
        }
    })
}

/// Where a kernel finds the device memory that a parameter points to.
unsafe extern "C" fn reach(address: *mut c_void) -> *mut c_void {
    let Some(Ok(driver)) = DRIVER.get() else { return std::ptr::null_mut() };
    let state = driver.lock();
    // A kernel may not touch the host's memory here, as on most machines.
    let inside = state.memory.block(address.addr()).is_some();
    let place = inside.then(|| state.memory.reach(address.addr(), 1).ok()).flatten();
    std::ptr::with_exposed_provenance_mut(place.unwrap_or(0))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchKernel(
    function: *mut c_void,
    gx: c_uint,
    gy: c_uint,
    gz: c_uint,
    bx: c_uint,
    by: c_uint,
    bz: c_uint,
    shared: c_uint,
    stream: usize,
    parameters: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> c_int {
    call("cuLaunchKernel", |driver| {
        let device = driver.current()?;
        let shape = [gx, gy, gz, bx, by, bz];
        if function.is_null() || shape.contains(&0) || bx * by * bz > 1024 {
            return Err(INVALID_VALUE);
        }
        // SAFETY: made by `cuModuleGetFunction`, and never freed.
        let function = unsafe { &*function.cast::<Function>() };
        if shared > function.shared_bytes.load(Ordering::Relaxed) {
            return Err(INVALID_VALUE);
        }
        // SAFETY: see `lib.rs`: as many parameters as the kernel declares.
        let packed = unsafe { (function.pack)(parameters) }.expose_provenance();
        let run = function.run;
        let kernel = move || {
            let packed = std::ptr::with_exposed_provenance_mut(packed);
            // SAFETY: packed for this kernel, and run once.
            if unsafe { run(packed, shape.as_ptr(), reach) } != 0 {
                driver.fault(device, ILLEGAL_ADDRESS);
            }
        };
        driver.submit(device, stream, Work::Kernel(Box::new(kernel)))
    })
}
