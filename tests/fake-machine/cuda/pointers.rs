//! What an address is.

use std::ffi::{c_int, c_uint, c_void};

use crate::codes::{Answer, INVALID_VALUE, NOT_SUPPORTED};
use crate::driver::{Driver, State, call, context_handle};
use crate::memory::Origin;

/// `CUpointer_attribute`.
const CONTEXT: c_uint = 1;
const MEMORY_TYPE: c_uint = 2;
const DEVICE_POINTER: c_uint = 3;
const SYNC_MEMOPS: c_uint = 6;
const BUFFER_ID: c_uint = 7;
const IS_MANAGED: c_uint = 8;
const DEVICE_ORDINAL: c_uint = 9;
const LEGACY_IPC: c_uint = 10;
const RANGE_START: c_uint = 11;
const RANGE_SIZE: c_uint = 12;
const MAPPED: c_uint = 13;
const HANDLE_TYPES: c_uint = 14;
const MEMORY_POOL: c_uint = 17;

/// `CUmemoryPool` of a device.
const POOL: u64 = 0x9001_0000;

/// `CU_MEMORYTYPE_HOST` and `CU_MEMORYTYPE_DEVICE`.
const HOST: u64 = 1;
const DEVICE: u64 = 2;

/// A value and its length in bytes. `None`: the address has no such property.
fn attribute(state: &State, attribute: c_uint, address: usize) -> Option<(u64, usize)> {
    let Some(block) = state.memory.block(address) else {
        let before = state.pinned.range(..=address).next_back();
        let pinned = before.is_some_and(|(base, bytes)| address - base < *bytes);
        return match attribute {
            MEMORY_TYPE if pinned => Some((HOST, 4)),
            DEVICE_POINTER if pinned => Some((address as u64, 8)),
            _ => None,
        };
    };
    let own = matches!(block.origin, Origin::Own);
    match attribute {
        CONTEXT if block.pooled => Some((0, 8)),
        CONTEXT => Some((context_handle(block.device) as u64, 8)),
        MEMORY_TYPE => Some((DEVICE, 4)),
        DEVICE_POINTER => Some((address as u64, 8)),
        SYNC_MEMOPS => Some((u64::from(block.synchronous), 4)),
        BUFFER_ID => Some((block.id, 8)),
        IS_MANAGED => Some((0, 4)),
        DEVICE_ORDINAL => Some((block.device as u64, 4)),
        LEGACY_IPC => Some((u64::from(own && !block.pooled), 4)),
        RANGE_START => Some((block.base as u64, 8)),
        RANGE_SIZE => Some((block.bytes as u64, 8)),
        MAPPED => Some((1, 4)),
        HANDLE_TYPES => Some((0, 8)),
        MEMORY_POOL => Some((if block.pooled { POOL } else { 0 }, 8)),
        _ => None,
    }
}

/// What `cuPointerGetAttributes` says of addresses that the driver does not know.
fn default(attribute: c_uint) -> (u64, usize) {
    match attribute {
        // `CU_DEVICE_INVALID`
        DEVICE_ORDINAL => (u64::from((-2_i32).cast_unsigned()), 4),
        MEMORY_TYPE | SYNC_MEMOPS | IS_MANAGED | LEGACY_IPC | MAPPED => (0, 4),
        _ => (0, 8),
    }
}

/// # Safety
/// `to` must have room for what the attribute is.
unsafe fn write(to: *mut c_void, (value, bytes): (u64, usize)) {
    let value = value.to_ne_bytes();
    // SAFETY: little-endian machines alone have GPUs, so the first bytes are the low ones; the
    // caller's promise for the rest.
    unsafe { std::ptr::copy_nonoverlapping(value.as_ptr(), to.cast(), bytes) };
}

fn one(driver: &Driver, wanted: c_uint, address: usize) -> Answer<(u64, usize)> {
    attribute(&driver.lock(), wanted, address).ok_or(INVALID_VALUE)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuPointerGetAttribute(
    to: *mut c_void,
    wanted: c_uint,
    address: usize,
) -> c_int {
    call("cuPointerGetAttribute", |driver| {
        let value = one(driver, wanted, address)?;
        // SAFETY: see `lib.rs`.
        unsafe { write(to, value) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuPointerGetAttributes(
    count: c_uint,
    wanted: *const c_uint,
    to: *const *mut c_void,
    address: usize,
) -> c_int {
    call("cuPointerGetAttributes", |driver| {
        let state = driver.lock();
        for at in 0..count as usize {
            // SAFETY: see `lib.rs`.
            unsafe {
                let wanted = wanted.add(at).read();
                let known = attribute(&state, wanted, address);
                write(to.add(at).read(), known.unwrap_or_else(|| default(wanted)));
            }
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuPointerSetAttribute(
    value: *const c_void,
    attribute: c_uint,
    address: usize,
) -> c_int {
    call("cuPointerSetAttribute", |driver| {
        if attribute != SYNC_MEMOPS {
            return Err(NOT_SUPPORTED);
        }
        // SAFETY: the caller gives an `unsigned int` for this attribute.
        let wanted = unsafe { value.cast::<c_uint>().read() };
        driver.lock().memory.block_mut(address).ok_or(INVALID_VALUE)?.synchronous = wanted != 0;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetAddressRange_v2(
    base: *mut usize,
    bytes: *mut usize,
    address: usize,
) -> c_int {
    call("cuMemGetAddressRange", |driver| {
        let state = driver.lock();
        let block = state.memory.block(address).ok_or(crate::codes::NOT_FOUND)?;
        for (to, value) in [(base, block.base), (bytes, block.bytes)] {
            if !to.is_null() {
                // SAFETY: see `lib.rs`.
                unsafe { to.write(value) };
            }
        }
        Ok(())
    })
}
