//! How other threads tell an event loop that something has happened.
//!
//! The loop watches one descriptor, which becomes readable when the first event arrives, and takes
//! all events at once. Nothing here waits, and nothing needs Python.
//!
//! *Invariant:* while there are events that have not been taken, the descriptor is readable.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, PoisonError};

use nix::sys::eventfd::{EfdFlags, EventFd};

/// Events for one event loop, each the number of what it is about.
#[derive(Debug)]
pub struct Completions {
    events: Mutex<Vec<u64>>,
    readable: EventFd,
}

impl Completions {
    /// Without events.
    pub fn new() -> io::Result<Self> {
        let readable = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Self { events: Mutex::default(), readable })
    }

    /// Adds an event, and wakes the loop for the first.
    pub fn push(&self, event: u64) {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        events.push(event);
        if events.len() == 1 {
            // It cannot be full: it is read before as many writes.
            let _ = self.readable.write(1);
        }
    }

    /// Takes all events.
    pub fn take(&self) -> Vec<u64> {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = self.readable.read();
        std::mem::take(&mut events)
    }
}

impl AsFd for Completions {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.readable.as_fd()
    }
}
