//! A `libcuda.so.1` without a GPU: the driver's interface over host memory, enough for UCX.
//!
//! Does not use the project's code, so that the two cannot be wrong together. Follows `cuda.h` of the
//! CUDA toolkit. It shows logic, order, lifetimes, lanes and failures; no speed, no machine code, no
//! quirks of a real driver. The GPUs are those of the file that `CUDA_CLUSTER_FAKE_NVML` names,
//! `CUDA_CLUSTER_FAKE_CUDA_FAULTS` says how to misbehave (see `faults`).
//!
//! *Invariant:* what is not built is refused with `CUDA_ERROR_NOT_SUPPORTED` (801), never passed over.

#![allow(unsafe_code)]
// The names are CUDA's, and `cuda.h` documents them.
#![allow(non_snake_case, missing_docs, unreachable_pub, clippy::missing_safety_doc)]

mod allocations;
#[allow(dead_code, reason = "the table is complete for what a fault may be")]
mod codes;
mod contexts;
mod copies;
mod driver;
mod faults;
mod ipc;
mod kernels;
#[path = "../nvml/ledger.rs"]
#[allow(dead_code, reason = "NVML looks, and takes none")]
mod ledger;
mod machine;
mod memory;
#[path = "../nvml/machine.rs"]
#[allow(dead_code, reason = "the driver needs a part")]
mod nvml_machine;
mod pointers;
mod queues;
mod refused;
mod report;
mod streams;

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::atomic::Ordering;

use codes::{Answer, DONE, INVALID_DEVICE, INVALID_VALUE, NOT_FOUND, UNKNOWN};
use driver::{DRIVER, Driver, ENDED, call, tell};
use faults::Faults;

// SAFETY of all functions here and in the modules: `cuda.h` says what the pointers point to; the
// callers keep it.

fn open() -> Answer<Driver> {
    let faults = std::env::var("CUDA_CLUSTER_FAKE_CUDA_FAULTS").unwrap_or_default();
    let faults: Faults = faults.parse().map_err(|()| UNKNOWN)?;
    if faults.hang {
        loop {
            std::thread::park();
        }
    }
    if let Some(code) = faults.init {
        return Err(code);
    }
    Ok(Driver::new(machine::devices(&faults)?, faults))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(flags: c_uint) -> c_int {
    if flags != 0 {
        return INVALID_VALUE;
    }
    if ENDED.load(Ordering::Relaxed) {
        return codes::DEINITIALIZED;
    }
    match DRIVER.get_or_init(open) {
        Ok(driver) if driver.pid == std::process::id() => DONE,
        Ok(_) => codes::NOT_INITIALIZED,
        Err(code) => *code,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> c_int {
    // SAFETY: see above.
    unsafe { tell(version, machine::driver_version()) }.err().unwrap_or(DONE)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(code: c_int, text: *mut *const c_char) -> c_int {
    let known = if code == DONE { Some(c"no error") } else { codes::text(code) };
    // SAFETY: see above.
    let told = unsafe { tell(text, known.map_or(std::ptr::null(), CStr::as_ptr)) };
    if told.is_ok() && known.is_some() { DONE } else { INVALID_VALUE }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(code: c_int, text: *mut *const c_char) -> c_int {
    let known = if code == DONE { Some(c"CUDA_SUCCESS") } else { codes::name(code) };
    // SAFETY: see above.
    let told = unsafe { tell(text, known.map_or(std::ptr::null(), CStr::as_ptr)) };
    if told.is_ok() && known.is_some() { DONE } else { INVALID_VALUE }
}

/// Finds a function of this library, by its newest version.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress_v2(
    symbol: *const c_char,
    function: *mut *mut c_void,
    _version: c_int,
    _flags: u64,
    status: *mut c_uint,
) -> c_int {
    // SAFETY: see above.
    let symbol = unsafe { CStr::from_ptr(symbol) }.to_string_lossy();
    // SAFETY: an address of this library, and a place for what is found.
    let own = unsafe {
        let mut own = std::mem::zeroed::<libc::Dl_info>();
        libc::dladdr(cuInit as *const c_void, &raw mut own);
        libc::dlopen(own.dli_fname, libc::RTLD_NOLOAD | libc::RTLD_LAZY)
    };
    let mut found = std::ptr::null_mut();
    let endings: &[&str] = match symbol.as_ref() {
        "cuCtxSetFlags" if machine::driver_version() < contexts::SETS_FLAGS => &[],
        _ => &["_v3\0", "_v2\0", "\0"],
    };
    for ending in endings {
        let name = format!("{symbol}{ending}");
        // SAFETY: a library that is loaded, and a C string.
        found = unsafe { libc::dlsym(own, name.as_ptr().cast()) };
        if !found.is_null() {
            break;
        }
    }
    if !own.is_null() {
        // SAFETY: opened above; the loader still holds the library.
        unsafe { libc::dlclose(own) };
    }
    // `CU_GET_PROC_ADDRESS_SUCCESS` and `…_SYMBOL_NOT_FOUND`.
    if !status.is_null() {
        // SAFETY: see above.
        unsafe { status.write(c_uint::from(found.is_null())) };
    }
    // SAFETY: see above.
    match unsafe { tell(function, found) } {
        Ok(()) if !found.is_null() => DONE,
        Ok(()) => NOT_FOUND,
        Err(code) => code,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> c_int {
    call("cuDeviceGetCount", |driver| {
        let number = c_int::try_from(driver.devices.len()).map_err(|_| UNKNOWN)?;
        // SAFETY: see above.
        unsafe { tell(count, number) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> c_int {
    call("cuDeviceGet", |driver| {
        driver.device(ordinal)?;
        // SAFETY: see above.
        unsafe { tell(device, ordinal) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetByPCIBusId(device: *mut c_int, text: *const c_char) -> c_int {
    call("cuDeviceGetByPCIBusId", |driver| {
        // SAFETY: see above.
        let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
        let place = machine::place(&text).ok_or(INVALID_VALUE)?;
        let found = driver.devices.iter().position(|gpu| (gpu.domain, gpu.bus, gpu.slot) == place);
        let found = c_int::try_from(found.ok_or(INVALID_DEVICE)?).map_err(|_| INVALID_DEVICE)?;
        // SAFETY: see above.
        unsafe { tell(device, found) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, room: c_int, device: c_int) -> c_int {
    call("cuDeviceGetName", |driver| {
        let (_, gpu) = driver.device(device)?;
        let room = usize::try_from(room).ok().and_then(|room| room.checked_sub(1));
        let length = gpu.name.len().min(room.ok_or(INVALID_VALUE)?);
        // SAFETY: see above; the text and its zero fit.
        unsafe {
            std::ptr::copy_nonoverlapping(gpu.name.as_ptr().cast(), name, length);
            name.add(length).write(0);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) -> c_int {
    call("cuDeviceGetUuid", |driver| {
        let (_, gpu) = driver.device(device)?;
        let mut told = gpu.uuid;
        told[15] ^= u8::from(driver.faults.other_uuid);
        // SAFETY: see above.
        unsafe { tell(uuid, told) }
    })
}

/// The same for a whole GPU.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: c_int) -> c_int {
    // SAFETY: see above.
    unsafe { cuDeviceGetUuid_v2(uuid, device) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) -> c_int {
    call("cuDeviceTotalMem", |driver| {
        let (_, gpu) = driver.device(device)?;
        // SAFETY: see above.
        unsafe { tell(bytes, gpu.memory_bytes) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceCanAccessPeer(can: *mut c_int, from: c_int, to: c_int) -> c_int {
    call("cuDeviceCanAccessPeer", |driver| {
        let ((at, device), (other_at, other)) = (driver.device(from)?, driver.device(to)?);
        let reaches = at != other_at && device.reaches(other) && !driver.faults.no_ipc;
        // SAFETY: see above.
        unsafe { tell(can, c_int::from(reaches)) }
    })
}

/// What is not named here the GPUs do not have: dma-buf (124), fabric handles (128), virtual memory
/// management (102), pools (115), managed memory (83).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(
    value: *mut c_int,
    attribute: c_int,
    device: c_int,
) -> c_int {
    call("cuDeviceGetAttribute", |driver| {
        let (_, gpu) = driver.device(device)?;
        let known = match attribute {
            1 => 1024,                    // threads of a block
            10 => 32,                     // threads of a warp
            16 => 132,                    // multiprocessors
            33 => gpu.bus.cast_signed(),  // PCI
            34 => gpu.slot.cast_signed(), // PCI
            41 => 1,                      // one space of addresses
            50 => gpu.domain.cast_signed(),
            75 => gpu.capability.0,
            76 => gpu.capability.1,
            _ => 0,
        };
        // SAFETY: see above.
        unsafe { tell(value, known) }
    })
}
