//! Contexts: the primary one of each device, and which is current on a thread.

use std::ffi::{c_int, c_uint};

use crate::codes::{
    DEVICE_UNAVAILABLE, INVALID_CONTEXT, INVALID_VALUE, PEER_ACCESS_ALREADY_ENABLED,
    PEER_ACCESS_NOT_ENABLED, PEER_ACCESS_UNSUPPORTED, TOO_MANY_PEERS,
};
use crate::driver::{call, context_handle, stack, tell};

/// `CUcontext`.
type Handle = usize;

/// `CU_CTX_SYNC_MEMOPS`.
const SYNC_MEMOPS: c_uint = 0x80;

/// The first version of CUDA with `cuCtxSetFlags` (12.1).
pub const SETS_FLAGS: i32 = 12010;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut Handle, device: c_int) -> c_int {
    call("cuDevicePrimaryCtxRetain", |driver| {
        let (at, found) = driver.device(device)?;
        if !found.may_be_used() {
            return Err(DEVICE_UNAVAILABLE);
        }
        {
            let known = &mut driver.lock().contexts[at];
            if known.retained == 0 {
                known.generation += 1;
            }
            known.retained += 1;
        }
        // SAFETY: see `lib.rs`.
        unsafe { tell(context, context_handle(at)) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> c_int {
    call("cuDevicePrimaryCtxRelease", |driver| {
        let (at, _) = driver.device(device)?;
        let last = driver.lock().contexts[at].retained;
        if last == 0 {
            return Err(INVALID_CONTEXT);
        }
        if last == 1 {
            // A context that has faulted goes all the same.
            let _ = driver.drain(at, true);
        }
        let mut state = driver.lock();
        state.contexts[at].retained -= 1;
        if state.contexts[at].retained == 0 {
            state.memory.forget(at);
            state.streams.forget(at);
            state.peers.retain(|(one, other)| *one != at && *other != at);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxGetState(
    device: c_int,
    flags: *mut c_uint,
    active: *mut c_int,
) -> c_int {
    call("cuDevicePrimaryCtxGetState", |driver| {
        let (at, _) = driver.device(device)?;
        let lives = driver.lock().contexts[at].retained > 0;
        // SAFETY: see `lib.rs`.
        unsafe {
            tell(flags, 0)?;
            tell(active, c_int::from(lives))
        }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: Handle) -> c_int {
    call("cuCtxSetCurrent", |driver| {
        if context == 0 {
            return stack(|stack| {
                stack.pop();
            });
        }
        let device = driver.context(context)?;
        stack(|stack| {
            stack.pop();
            stack.push(device);
        })?;
        driver.well(device)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPushCurrent_v2(context: Handle) -> c_int {
    call("cuCtxPushCurrent", |driver| {
        let device = driver.context(context)?;
        driver.well(device)?;
        stack(|stack| stack.push(device))
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxPopCurrent_v2(context: *mut Handle) -> c_int {
    call("cuCtxPopCurrent", |_| {
        let device = stack(Vec::pop)?.ok_or(INVALID_CONTEXT)?;
        if !context.is_null() {
            // SAFETY: see `lib.rs`.
            unsafe { context.write(context_handle(device)) };
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetCurrent(context: *mut Handle) -> c_int {
    call("cuCtxGetCurrent", |_| {
        let device = stack(|stack| stack.last().copied())?;
        // SAFETY: see `lib.rs`.
        unsafe { tell(context, device.map_or(0, context_handle)) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetDevice(device: *mut c_int) -> c_int {
    call("cuCtxGetDevice", |_| {
        let at = stack(|stack| stack.last().copied())?.ok_or(INVALID_CONTEXT)?;
        // SAFETY: see `lib.rs`.
        unsafe { tell(device, c_int::try_from(at).map_err(|_| INVALID_VALUE)?) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetId(context: Handle, id: *mut u64) -> c_int {
    call("cuCtxGetId", |driver| {
        let device = if context == 0 { driver.current()? } else { driver.context(context)? };
        let generation = driver.lock().contexts[device].generation;
        // SAFETY: see `lib.rs`.
        unsafe { tell(id, generation * 64 + device as u64) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetFlags(flags: c_uint) -> c_int {
    call("cuCtxSetFlags", |driver| {
        let device = driver.current()?;
        driver.lock().contexts[device].synchronous = flags & SYNC_MEMOPS != 0;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSynchronize() -> c_int {
    call("cuCtxSynchronize", |driver| driver.drain(driver.current()?, true))
}

/// One-sided: gives the current context access to the other's memory.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxEnablePeerAccess(peer: Handle, flags: c_uint) -> c_int {
    call("cuCtxEnablePeerAccess", |driver| {
        let (device, other) = (driver.current()?, driver.context(peer)?);
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        if device == other {
            return Err(INVALID_CONTEXT);
        }
        driver.well(other)?;
        let gpu = &driver.devices[device];
        if !gpu.reaches(&driver.devices[other]) || driver.faults.no_ipc {
            return Err(PEER_ACCESS_UNSUPPORTED);
        }
        let mut state = driver.lock();
        let enabled = state.peers.iter().filter(|(one, _)| *one == device).count();
        if state.peers.contains(&(device, other)) {
            return Err(PEER_ACCESS_ALREADY_ENABLED);
        }
        if gpu.most_peers.is_some_and(|most| enabled >= most) {
            return Err(TOO_MANY_PEERS);
        }
        state.peers.insert((device, other));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxDisablePeerAccess(peer: Handle) -> c_int {
    call("cuCtxDisablePeerAccess", |driver| {
        let (device, other) = (driver.current()?, driver.context(peer)?);
        let known = driver.lock().peers.remove(&(device, other));
        if known { Ok(()) } else { Err(PEER_ACCESS_NOT_ENABLED) }
    })
}
