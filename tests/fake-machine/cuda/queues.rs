//! The functions of streams and events.

use std::ffi::{c_int, c_uint, c_void};

use crate::codes::{INVALID_VALUE, NOT_READY};
use crate::driver::{call, tell};
use crate::streams::{Callback, Work};

/// `CUstream` and `CUevent`.
type Handle = usize;

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: c_uint = 1;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(stream: *mut Handle, flags: c_uint) -> c_int {
    call("cuStreamCreate", |driver| {
        let device = driver.current()?;
        if flags > NON_BLOCKING {
            return Err(INVALID_VALUE);
        }
        let handle = driver.lock().streams.create(device, flags != NON_BLOCKING);
        // SAFETY: see `lib.rs`.
        unsafe { tell(stream, handle) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreateWithPriority(
    stream: *mut Handle,
    flags: c_uint,
    _priority: c_int,
) -> c_int {
    // SAFETY: see `lib.rs`.
    unsafe { cuStreamCreate(stream, flags) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamDestroy_v2(stream: Handle) -> c_int {
    call("cuStreamDestroy", |driver| driver.lock().streams.destroy(stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(stream: Handle) -> c_int {
    call("cuStreamSynchronize", |driver| {
        if stream <= 2 {
            return driver.drain(driver.current()?, false);
        }
        let (device, ticket) = {
            let state = driver.lock();
            (state.streams.get(stream)?.device, state.streams.ticket(stream))
        };
        driver.well(device)?;
        driver.reach(stream, ticket);
        driver.well(device)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamQuery(stream: Handle) -> c_int {
    call("cuStreamQuery", |driver| {
        if stream <= 2 {
            let device = driver.current()?;
            let idle = driver.lock().streams.pending(device, false).is_empty();
            return if idle { Ok(()) } else { Err(NOT_READY) };
        }
        let (device, done) = {
            let streams = &driver.lock().streams;
            (streams.get(stream)?.device, streams.reached(stream, streams.ticket(stream)))
        };
        driver.well(device)?;
        if done { Ok(()) } else { Err(NOT_READY) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWaitEvent(stream: Handle, event: Handle, _flags: c_uint) -> c_int {
    call("cuStreamWaitEvent", |driver| {
        let (other, ticket) = driver.lock().streams.point(event)?;
        let device = driver.current()?;
        if stream <= 2 {
            driver.reach(other, ticket);
            return Ok(());
        }
        driver.submit(device, stream, Work::Wait { stream: other, ticket })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamAddCallback(
    stream: Handle,
    function: Callback,
    user: *mut c_void,
    _flags: c_uint,
) -> c_int {
    call("cuStreamAddCallback", |driver| {
        let device = driver.current()?;
        let user = user.expose_provenance();
        driver.submit(device, stream, Work::Call { function, user })
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(event: *mut Handle, _flags: c_uint) -> c_int {
    call("cuEventCreate", |driver| {
        let device = driver.current()?;
        let handle = driver.lock().streams.create_event(device);
        // SAFETY: see `lib.rs`.
        unsafe { tell(event, handle) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventDestroy_v2(event: Handle) -> c_int {
    call("cuEventDestroy", |driver| driver.lock().streams.destroy_event(event))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecord(event: Handle, stream: Handle) -> c_int {
    call("cuEventRecord", |driver| {
        let device = {
            let streams = &driver.lock().streams;
            if stream > 2 {
                streams.get(stream)?;
            }
            streams.event(event)?.device
        };
        driver.well(device)?;
        driver.lock().streams.record(event, stream)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventQuery(event: Handle) -> c_int {
    call("cuEventQuery", |driver| {
        let (device, done) = {
            let streams = &driver.lock().streams;
            let (stream, ticket) = streams.point(event)?;
            (streams.event(event)?.device, streams.reached(stream, ticket))
        };
        driver.well(device)?;
        if done { Ok(()) } else { Err(NOT_READY) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventSynchronize(event: Handle) -> c_int {
    call("cuEventSynchronize", |driver| {
        let (device, (stream, ticket)) = {
            let streams = &driver.lock().streams;
            (streams.event(event)?.device, streams.point(event)?)
        };
        driver.reach(stream, ticket);
        driver.well(device)
    })
}
