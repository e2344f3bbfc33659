//! The driver's state in this process, and how a call reaches it.
//!
//! *Invariant:* a call is refused before `cuInit`, in a child that was forked after it, and after the
//! destructors; and where a context must be current and none is.

use std::cell::RefCell;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::codes::{
    Answer, CONTEXT_IS_DESTROYED, DEINITIALIZED, DONE, INVALID_CONTEXT, INVALID_DEVICE,
    NOT_INITIALIZED, NOT_READY,
};
use crate::faults::Faults;
use crate::machine::Device;
use crate::memory::Memory;
use crate::report::Counts;
use crate::streams::{self, DEFAULT, Streams, Work};

pub struct Driver {
    pub devices: Vec<Device>,
    pub faults: Faults,
    pub pid: u32,
    pub counts: Counts,
    state: Mutex<State>,
    /// Work was given or done.
    pub changed: Condvar,
}

#[derive(Default)]
pub struct State {
    /// The primary context of each device.
    pub contexts: Vec<Context>,
    pub memory: Memory,
    pub streams: Streams,
    /// Registered host memory: where it begins, and its length.
    pub pinned: std::collections::BTreeMap<usize, usize>,
    /// Devices whose context has enabled access to the memory of another device's.
    pub peers: std::collections::BTreeSet<(usize, usize)>,
    worker: bool,
}

#[derive(Clone, Copy, Default)]
pub struct Context {
    pub retained: usize,
    /// Whether copies are complete when the call returns (`CU_CTX_SYNC_MEMOPS`).
    pub synchronous: bool,
    /// How often it was made.
    pub generation: u64,
    /// What every call says after a fault.
    sick: Option<c_int>,
}

pub static DRIVER: OnceLock<Result<Driver, c_int>> = OnceLock::new();

/// Whether the destructors have run.
pub static ENDED: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// The contexts that are current on this thread, by device; the last is in use.
    static CURRENT: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// `CUcontext` of a device's primary context.
pub fn context_handle(device: usize) -> usize {
    0xc0de_0000 + device * 64
}

/// Uses the stack of this thread's contexts.
pub fn stack<T>(use_it: impl FnOnce(&mut Vec<usize>) -> T) -> Answer<T> {
    CURRENT.try_with(|stack| use_it(&mut stack.borrow_mut())).map_err(|_| DEINITIALIZED)
}

impl Driver {
    pub fn new(devices: Vec<Device>, faults: Faults) -> Self {
        let contexts = vec![Context::default(); devices.len()];
        Self {
            devices,
            faults,
            pid: std::process::id(),
            counts: Counts::default(),
            state: Mutex::new(State { contexts, ..State::default() }),
            changed: Condvar::new(),
        }
    }

    /// What of a GPU's memory other processes leave.
    pub fn own_bytes(&self, device: usize) -> usize {
        let all = self.devices[device].memory_bytes;
        all - all / 100 * self.faults.taken.min(100)
    }

    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// The device of a `CUdevice`.
    pub fn device(&self, device: c_int) -> Answer<(usize, &Device)> {
        let at = usize::try_from(device).map_err(|_| INVALID_DEVICE)?;
        Ok((at, self.devices.get(at).ok_or(INVALID_DEVICE)?))
    }

    /// The device of a `CUcontext`.
    pub fn context(&self, handle: usize) -> Answer<usize> {
        let mut all = 0..self.devices.len();
        all.find(|device| context_handle(*device) == handle).ok_or(INVALID_CONTEXT)
    }

    /// The device whose context is current and well.
    pub fn current(&self) -> Answer<usize> {
        let device = stack(|stack| stack.last().copied())?.ok_or(INVALID_CONTEXT)?;
        self.well(device)?;
        Ok(device)
    }

    /// Whether a device's context lives and has not faulted.
    pub fn well(&self, device: usize) -> Answer {
        let faults = self.faults.sticky();
        let mut state = self.lock();
        let context = state.contexts.get_mut(device).ok_or(INVALID_CONTEXT)?;
        if context.retained == 0 {
            return Err(CONTEXT_IS_DESTROYED);
        }
        let index = self.devices[device].index;
        let fault = faults.iter().find(|(gpu, _)| *gpu == index);
        context.sick = context.sick.or(fault.map(|(_, code)| *code));
        context.sick.map_or(Ok(()), Err)
    }

    /// A kernel did what ends a context.
    pub fn fault(&self, device: usize, code: c_int) {
        let sick = &mut self.lock().contexts[device].sick;
        *sick = sick.or(Some(code));
    }

    /// Gives work to a stream: done before this returns, or later where that is asked for.
    pub fn submit(&'static self, device: usize, stream: usize, work: Work) -> Answer {
        if stream <= 2 {
            self.drain(device, false)?;
            work.run(DEFAULT);
            return Ok(());
        }
        let owner = self.lock().streams.get(stream)?.device;
        self.well(owner)?;
        let needs_a_thread = matches!(work, Work::Call { .. } | Work::Wait { .. });
        if !self.faults.later && !needs_a_thread {
            work.run(stream);
            return Ok(());
        }
        let mut state = self.lock();
        if !state.worker {
            state.worker = true;
            let spawned = std::thread::Builder::new().name("fake-gpu".to_owned());
            spawned.spawn(move || streams::run(self)).map_err(|_| crate::codes::UNKNOWN)?;
        }
        state.streams.submit(stream, work)?;
        self.changed.notify_all();
        Ok(())
    }

    /// Waits until a stream has done so much.
    pub fn reach(&self, stream: usize, ticket: u64) {
        let mut state = self.lock();
        while !state.streams.reached(stream, ticket) {
            state = self.wait(state);
        }
    }

    /// Waits for a device's streams: the blocking ones, or all.
    pub fn drain(&self, device: usize, all: bool) -> Answer {
        let pending = self.lock().streams.pending(device, all);
        for (stream, ticket) in pending {
            self.reach(stream, ticket);
        }
        self.well(device)
    }
}

/// A call of a function that wants `cuInit` before it.
pub fn call(function: &'static str, answer: impl FnOnce(&'static Driver) -> Answer) -> c_int {
    let driver = match DRIVER.get() {
        Some(Ok(driver)) => driver,
        Some(Err(code)) => return *code,
        None => return NOT_INITIALIZED,
    };
    if ENDED.load(Ordering::Relaxed) {
        return DEINITIALIZED;
    }
    if driver.pid != std::process::id() {
        return NOT_INITIALIZED;
    }
    if !driver.faults.latency.is_zero() {
        std::thread::sleep(driver.faults.latency);
    }
    match answer(driver) {
        Ok(()) => DONE,
        Err(code) => {
            if code != NOT_READY {
                driver.counts.refused(function, code);
            }
            code
        }
    }
}

/// Writes an answer where the caller wants it.
///
/// # Safety
/// `to` must be null or point to a `T`.
pub unsafe fn tell<T>(to: *mut T, value: T) -> Answer {
    if to.is_null() {
        return Err(crate::codes::INVALID_VALUE);
    }
    // SAFETY: the caller's promise.
    unsafe { to.write(value) };
    Ok(())
}
