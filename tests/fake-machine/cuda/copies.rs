//! Copies and fills, by the rules for pageable and pinned host memory.
//!
//! Pageable host memory that is read has been read when the call returns; pageable memory that is
//! written has been written; pinned memory only when the stream has come so far. What was read from
//! pageable memory may still be on its way to the device then (NVIDIA, "API synchronization
//! behavior"), and another context, a peer or a NIC may read the old bytes, unless the device memory
//! or the context has synchronous operations.

use std::ffi::c_int;

use crate::codes::{Answer, INVALID_VALUE};
use crate::driver::{Driver, State, call};
use crate::faults::Way;
use crate::memory::Origin;
use crate::streams::{DEFAULT, Work};

fn is_pinned(state: &State, address: usize) -> bool {
    let before = state.pinned.range(..=address).next_back();
    before.is_some_and(|(base, bytes)| address - base < *bytes)
}

/// How much of a copy lands later.
const LATE: usize = 64 << 10;

/// Copies from pageable memory; the end of it arrives when this has returned. What follows in the
/// default stream waits for it.
fn land_later(
    driver: &'static Driver,
    device: usize,
    to: usize,
    from: usize,
    bytes: usize,
) -> Answer {
    // SAFETY: host memory that the caller lets us read.
    let all =
        unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance::<u8>(from), bytes) };
    let (first, late) = all.split_at(bytes - bytes.min(LATE));
    driver.counts.landed_later(late.len());
    let work = |to, bytes: &[u8]| Work::Write { to, bytes: bytes.to_vec() };
    driver.submit(device, DEFAULT, work(to, first))?;
    let stream = driver.lock().streams.create(device, true);
    driver.submit(device, stream, work(to + first.len(), late))?;
    driver.lock().streams.destroy(stream)
}

/// Copies on a stream, by whatever kind of memory the two addresses are.
fn copy(driver: &'static Driver, to: usize, from: usize, bytes: usize, stream: usize) -> Answer {
    let device = driver.current()?;
    if bytes == 0 {
        return Ok(());
    }
    let way = way(driver, to, from);
    driver.faults.copy(way, bytes);
    let (work, at_once) = {
        let state = driver.lock();
        let (source, target) = (state.memory.block(from), state.memory.block(to));
        let pageable = |block: bool, address| !block && !is_pinned(&state, address);
        let (read, written) = (state.memory.reach(from, bytes)?, state.memory.reach(to, bytes)?);
        driver.counts.moved(source, target, bytes);
        let at_once = pageable(target.is_some(), to);
        let sync = state.contexts[device].synchronous;
        let lands_later = driver.faults.later
            && stream <= 2
            && pageable(source.is_some(), from)
            && target.is_some_and(|target| !sync && !target.synchronous);
        if lands_later {
            drop(state);
            land_later(driver, device, written, read, bytes)?;
            return spoil(driver, device, way, to, bytes, DEFAULT);
        }
        if !at_once && pageable(source.is_some(), from) {
            // SAFETY: host memory that the caller lets us read.
            let now = unsafe {
                std::slice::from_raw_parts(std::ptr::with_exposed_provenance::<u8>(read), bytes)
            };
            (Work::Write { to: written, bytes: now.to_vec() }, false)
        } else {
            (Work::Copy { to: written, from: read, bytes }, at_once)
        }
    };
    driver.submit(device, stream, work)?;
    spoil(driver, device, way, to, bytes, stream)?;
    if at_once && stream > 2 {
        let ticket = driver.lock().streams.ticket(stream);
        driver.reach(stream, ticket);
    }
    Ok(())
}

/// The GPUs whose memory a copy reads and writes.
fn way(driver: &Driver, to: usize, from: usize) -> Way {
    let state = driver.lock();
    let end = |address| {
        let block = state.memory.block(address)?;
        let owner = match &block.origin {
            Origin::Own => block.device,
            Origin::Mapped { owner, .. } => *owner,
        };
        Some(driver.devices[owner].index)
    };
    (end(from), end(to))
}

/// How much of a copy arrives otherwise on a way that spoils it.
const SPOILT: usize = 64;

/// Overwrites the middle of a copy whose way spoils it.
fn spoil(
    driver: &'static Driver,
    device: usize,
    way: Way,
    to: usize,
    bytes: usize,
    stream: usize,
) -> Answer {
    if !driver.faults.spoils(way) {
        return Ok(());
    }
    let spoilt = bytes.min(SPOILT);
    let to = driver.lock().memory.reach(to + (bytes - spoilt) / 2, spoilt)?;
    driver.submit(device, stream, Work::Fill { to, bytes: spoilt, value: 0x5a })
}

/// Copies between two contexts' memory: directly where one has enabled access to the other, else by
/// way of the host (CUDA C++ Programming Guide, "Peer-to-Peer Memory Copy").
#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyPeerAsync(
    to: usize,
    to_context: usize,
    from: usize,
    from_context: usize,
    bytes: usize,
    stream: usize,
) -> c_int {
    call("cuMemcpyPeerAsync", |driver| {
        let device = driver.current()?;
        let ends = [driver.context(from_context)?, driver.context(to_context)?];
        ends.iter().try_for_each(|end| driver.well(*end))?;
        if bytes == 0 {
            return Ok(());
        }
        let way = way(driver, to, from);
        driver.faults.copy(way, bytes);
        let work = {
            let state = driver.lock();
            let (source, target) = (state.memory.block(from), state.memory.block(to));
            if [source, target].map(|block| block.map(|block| block.device)) != ends.map(Some) {
                return Err(INVALID_VALUE);
            }
            let direct = state.peers.contains(&(ends[0], ends[1]))
                || state.peers.contains(&(ends[1], ends[0]));
            driver.counts.moved_between_gpus(direct || ends[0] == ends[1], bytes);
            let (to, from) = (state.memory.reach(to, bytes)?, state.memory.reach(from, bytes)?);
            Work::Copy { to, from, bytes }
        };
        driver.submit(device, stream, work)?;
        spoil(driver, device, way, to, bytes, stream)
    })
}

macro_rules! synchronous {
    ($($name:ident: $called:literal;)*) => {$(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name(to: usize, from: usize, bytes: usize) -> c_int {
            call($called, |driver| copy(driver, to, from, bytes, DEFAULT))
        }
    )*};
}

synchronous! {
    cuMemcpy: "cuMemcpy";
    cuMemcpyHtoD_v2: "cuMemcpyHtoD";
    cuMemcpyDtoH_v2: "cuMemcpyDtoH";
    cuMemcpyDtoD_v2: "cuMemcpyDtoD";
}

macro_rules! asynchronous {
    ($($name:ident: $called:literal;)*) => {$(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name(to: usize, from: usize, bytes: usize, stream: usize) -> c_int {
            call($called, |driver| copy(driver, to, from, bytes, stream))
        }
    )*};
}

asynchronous! {
    cuMemcpyAsync: "cuMemcpyAsync";
    cuMemcpyHtoDAsync_v2: "cuMemcpyHtoDAsync";
    cuMemcpyDtoHAsync_v2: "cuMemcpyDtoHAsync";
    cuMemcpyDtoDAsync_v2: "cuMemcpyDtoDAsync";
}

fn fill(driver: &'static Driver, to: usize, value: u8, bytes: usize, stream: usize) -> Answer {
    let device = driver.current()?;
    let to = driver.lock().memory.reach(to, bytes)?;
    driver.submit(device, stream, Work::Fill { to, bytes, value })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD8_v2(to: usize, value: u8, bytes: usize) -> c_int {
    call("cuMemsetD8", |driver| fill(driver, to, value, bytes, DEFAULT))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD8Async(to: usize, value: u8, bytes: usize, stream: usize) -> c_int {
    call("cuMemsetD8Async", |driver| fill(driver, to, value, bytes, stream))
}
