//! Device memory of other processes, by handle.

use std::ffi::{c_int, c_uint};

use crate::codes::{INVALID_CONTEXT, INVALID_DEVICE, INVALID_HANDLE, INVALID_VALUE, MAP_FAILED};
use crate::driver::{call, tell};
use crate::memory::Key;

/// `CUipcMemHandle`, 64 bytes that travel between processes.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Handle {
    mark: [u8; 8],
    pid: u32,
    fd: i32,
    inode: u64,
    offset: u64,
    bytes: u64,
    /// What the block is called in its own process; keeps the handles of two blocks apart that lay
    /// at the same place one after the other.
    id: u64,
    uuid: [u8; 16],
}

const MARK: [u8; 8] = *b"fake-ipc";

const _: () = assert!(size_of::<Handle>() == 64);

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuIpcGetMemHandle(handle: *mut Handle, address: usize) -> c_int {
    call("cuIpcGetMemHandle", |driver| {
        driver.current()?;
        let state = driver.lock();
        let block = state.memory.block(address).ok_or(INVALID_VALUE)?;
        if block.pooled {
            return Err(INVALID_VALUE);
        }
        let key = state.memory.key(block)?;
        let made = Handle {
            mark: MARK,
            pid: key.pid,
            fd: key.fd,
            inode: key.inode,
            offset: key.offset as u64,
            bytes: key.bytes as u64,
            id: block.id,
            uuid: driver.devices[block.device].uuid,
        };
        // SAFETY: see `lib.rs`.
        unsafe { tell(handle, made) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuIpcOpenMemHandle_v2(
    address: *mut usize,
    handle: Handle,
    _flags: c_uint,
) -> c_int {
    call("cuIpcOpenMemHandle", |driver| {
        let device = driver.current()?;
        if driver.faults.no_ipc {
            return Err(MAP_FAILED);
        }
        if handle.mark != MARK {
            return Err(INVALID_HANDLE);
        }
        if handle.pid == driver.pid {
            return Err(INVALID_CONTEXT);
        }
        let owner = driver.devices.iter().position(|gpu| gpu.uuid == handle.uuid);
        let owner = owner.ok_or(INVALID_DEVICE)?;
        if !driver.devices[device].reaches(&driver.devices[owner]) {
            return Err(MAP_FAILED);
        }
        let whole = |number: u64| usize::try_from(number).map_err(|_| INVALID_HANDLE);
        let (offset, bytes) = (whole(handle.offset)?, whole(handle.bytes)?);
        let key = Key { pid: handle.pid, fd: handle.fd, inode: handle.inode, offset, bytes };
        let base = driver.lock().memory.open(key, owner, device)?;
        // SAFETY: see `lib.rs`.
        unsafe { tell(address, base) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuIpcCloseMemHandle(address: usize) -> c_int {
    call("cuIpcCloseMemHandle", |driver| {
        let device = driver.current()?;
        driver.drain(device, true)?;
        driver.lock().memory.close(address)
    })
}
