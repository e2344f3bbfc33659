//! Reservations of memory: a [`Reserved`] for each piece, given back when it is dropped.
//!
//! [`core::Books`] decides which party may wait; this module blocks threads and wakes them. A
//! piece's reservation travels with its buffer, so memory counts as used until its last reader
//! drops it, whether that is a task, a peer, or UCX.
//!
//! Does not know limits; the store compares with those.
//!
//! *Invariant:* no thread waits here while it holds the store's lock, and no other lock is taken
//! while the ledger's is held.

mod core;

use std::any::Any;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use self::core::{Books, Holder, Outcome};
use super::core::{Outside, Place};
use crate::ucx::Buffer;

/// A wait that takes longer than this is logged.
const LONG: Duration = Duration::from_secs(10);

/// A peer that hangs can hold memory forever. A party that waits only for that gives up after this
/// long, as a fetch does.
const LONGEST: Duration = Duration::from_secs(120);

/// The counts, and the threads that wait for them to change.
#[derive(Default)]
pub(super) struct Ledger {
    books: Mutex<Books>,
    changed: Condvar,
}

/// A task or a fetch, while it may hold memory.
pub(crate) struct Party {
    ledger: Arc<Ledger>,
    number: u64,
}

/// A reserved piece of memory.
pub(super) struct Reserved {
    ledger: Arc<Ledger>,
    holder: Mutex<Holder>,
    at: usize,
    bytes: u64,
}

/// Marks a thread that will free memory, or make room, without waiting for memory itself.
pub(super) struct Busy(Arc<Ledger>);

/// The owner of a new reservation.
#[derive(Clone, Copy)]
pub(super) enum For<'a> {
    Party(&'a Party),
    /// An object's copy in another tier.
    Copy,
}

fn index(place: Place) -> usize {
    usize::from(place != Place::Device)
}

impl Ledger {
    fn books(&self) -> MutexGuard<'_, Books> {
        // A thread that panicked with it left each count consistent.
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, books: MutexGuard<'a, Books>, limit: Duration) -> MutexGuard<'a, Books> {
        let waited = self.changed.wait_timeout(books, limit);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Increases whenever there may be more room.
    pub(super) fn version(&self) -> u64 {
        self.books().version()
    }

    /// Records that something outside the ledger may have made room.
    pub(super) fn touch(&self) {
        self.books().changed();
        self.changed.notify_all();
    }

    /// Bytes of the device and of the host that are in use.
    pub(super) fn charged(&self) -> (u64, u64) {
        let [device, host] = self.books().charged();
        (device, host)
    }

    /// Bytes in use by anything but objects, without those that are about to be free.
    pub(super) fn outside(&self) -> Outside {
        let [device, host] = self.books().outside();
        Outside { device, host }
    }

    /// Bytes of the device and of the host that are about to be free.
    pub(super) fn pending(&self) -> (u64, u64) {
        let [device, host] = self.books().pending();
        (device, host)
    }

    /// Waits until no party runs alone or waits to.
    pub(super) fn enter(self: &Arc<Self>) -> Party {
        let mut books = self.books();
        let number = loop {
            match books.enter() {
                Some(number) => break number,
                None => books = self.wait(books, LONG),
            }
        };
        drop(books);
        // The thread that watches memory may be waiting for work.
        self.changed.notify_all();
        Party { ledger: Arc::clone(self), number }
    }

    /// Waits until every other party has ended, while no new one enters.
    pub(super) fn enter_alone(self: &Arc<Self>) -> Party {
        let mut books = self.books();
        let number = books.queue();
        while !books.enter_alone(number) {
            books = self.wait(books, LONG);
        }
        drop(books);
        Party { ledger: Arc::clone(self), number }
    }

    /// Waits until there is a party.
    pub(super) fn until_work(&self) {
        let mut books = self.books();
        while !books.is_working() {
            books = self.changed.wait(books).unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub(super) fn busy(self: &Arc<Self>) -> Busy {
        self.books().begin_work();
        Busy(Arc::clone(self))
    }

    /// Reserves memory; the caller has checked that there is room.
    pub(super) fn reserve(self: &Arc<Self>, who: For<'_>, place: Place, bytes: u64) -> Reserved {
        let holder = match who {
            For::Party(party) => Holder::Party(party.number),
            For::Copy => Holder::Moving,
        };
        let at = index(place);
        self.books().charge(holder, at, bytes);
        Reserved { ledger: Arc::clone(self), holder: Mutex::new(holder), at, bytes }
    }

    /// Waits until there may be room that there was not at version `seen`. Returns false if there
    /// will be none unless this party gives back what it holds.
    pub(super) fn wait_for_room(&self, party: &Party, seen: u64) -> bool {
        let start = Instant::now();
        let mut books = self.books();
        match books.stuck(party.number, seen) {
            Outcome::Again => return true,
            Outcome::Refused => return false,
            Outcome::Wait => {}
        }
        // Another party may have been refused.
        self.changed.notify_all();
        let mut told = false;
        while !books.is_called(party.number, seen) {
            books = self.wait(books, LONG);
            if start.elapsed() >= LONG && !told {
                told = true;
                let pending = books.pending();
                tracing::warn!(?pending, "has waited for memory for {} s", LONG.as_secs());
            }
            if start.elapsed() >= LONGEST {
                return false;
            }
        }
        true
    }
}

impl Drop for Party {
    fn drop(&mut self) {
        self.ledger.books().leave(self.number);
        self.ledger.changed.notify_all();
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.books().end_work();
        self.0.changed.notify_all();
    }
}

impl Reserved {
    fn pass(&self, to: Holder) {
        let mut holder = self.holder.lock().unwrap_or_else(PoisonError::into_inner);
        self.ledger.books().pass(*holder, to, self.at, self.bytes);
        *holder = to;
        self.ledger.changed.notify_all();
    }

    /// Makes an object the owner.
    pub(super) fn keep(&self) {
        self.pass(Holder::Kept);
    }

    /// Ends the object's ownership; the memory is free once its last reader drops it.
    pub(super) fn release(&self) {
        self.pass(Holder::Nobody);
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let holder = *self.holder.lock().unwrap_or_else(PoisonError::into_inner);
        self.ledger.books().free(holder, self.at, self.bytes);
        self.ledger.changed.notify_all();
    }
}

/// The reservation that travels with a buffer.
pub(super) fn reserved(buffer: &Buffer) -> Option<&Reserved> {
    let lease: &(dyn Any + Send + Sync) = &**buffer.lease()?;
    lease.downcast_ref()
}
