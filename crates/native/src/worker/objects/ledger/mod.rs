//! Reservations of memory: a [`Reserved`] for each piece, given back when it is dropped.
//!
//! [`core::Accounts`] decides which consumer may wait; this module blocks threads and wakes them. A
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

use self::core::{Accounts, Outcome, Owner};
use super::core::Transient;
use super::place::Place;
use cuda_cluster_data::ucx::Buffer;

/// A wait that takes longer than this is logged.
const LONG: Duration = Duration::from_secs(10);

/// A peer that hangs can hold memory forever. A consumer that waits only for that gives up after
/// this long, as a fetch does.
const LONGEST: Duration = Duration::from_secs(120);

/// The counts, and the threads that wait for them to change.
#[derive(Default)]
pub(super) struct Ledger {
    accounts: Mutex<Accounts>,
    changed: Condvar,
}

/// A task or a fetch, while it may hold memory.
pub struct Consumer {
    ledger: Arc<Ledger>,
    number: u64,
}

/// A reserved piece of memory.
pub(super) struct Reserved {
    ledger: Arc<Ledger>,
    owner: Mutex<Owner>,
    at: usize,
    bytes: u64,
}

/// Marks a thread that will free memory, or make room, without waiting for memory itself.
pub(super) struct Reclaimer(Arc<Ledger>);

/// The owner of a new reservation.
#[derive(Clone, Copy)]
pub(super) enum For<'a> {
    Consumer(&'a Consumer),
    /// An object's copy in another tier.
    Copy,
}

fn index(place: Place) -> usize {
    usize::from(place != Place::Device)
}

impl Ledger {
    fn accounts(&self) -> MutexGuard<'_, Accounts> {
        // A thread that panicked with it left each count consistent.
        self.accounts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(
        &self,
        accounts: MutexGuard<'a, Accounts>,
        limit: Duration,
    ) -> MutexGuard<'a, Accounts> {
        let waited = self.changed.wait_timeout(accounts, limit);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Increases whenever there may be more room.
    pub(super) fn version(&self) -> u64 {
        self.accounts().version()
    }

    /// Records that something transient the ledger may have made room.
    pub(super) fn touch(&self) {
        self.accounts().changed();
        self.changed.notify_all();
    }

    /// Bytes of the device and of the host that are in use.
    pub(super) fn charged(&self) -> (u64, u64) {
        let [device, host] = self.accounts().charged();
        (device, host)
    }

    /// Bytes in use by anything but objects, without those that are about to be free.
    pub(super) fn transient(&self) -> Transient {
        let [device, host] = self.accounts().transient();
        Transient { device, host }
    }

    /// Bytes of the device and of the host that are about to be free.
    pub(super) fn pending(&self) -> (u64, u64) {
        let [device, host] = self.accounts().pending();
        (device, host)
    }

    /// Waits until no consumer runs alone or waits to.
    pub(super) fn enter(self: &Arc<Self>) -> Consumer {
        let mut accounts = self.accounts();
        let number = loop {
            match accounts.enter() {
                Some(number) => break number,
                None => accounts = self.wait(accounts, LONG),
            }
        };
        drop(accounts);
        // The thread that watches memory may be waiting for work.
        self.changed.notify_all();
        Consumer { ledger: Arc::clone(self), number }
    }

    /// Waits until every other consumer has ended, while no new one enters.
    pub(super) fn enter_alone(self: &Arc<Self>) -> Consumer {
        let mut accounts = self.accounts();
        let number = accounts.queue();
        while !accounts.enter_alone(number) {
            accounts = self.wait(accounts, LONG);
        }
        drop(accounts);
        Consumer { ledger: Arc::clone(self), number }
    }

    /// Waits until there is a consumer.
    pub(super) fn until_work(&self) {
        let mut accounts = self.accounts();
        while !accounts.is_working() {
            accounts = self.changed.wait(accounts).unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub(super) fn reclaimer(self: &Arc<Self>) -> Reclaimer {
        self.accounts().begin_reclaim();
        Reclaimer(Arc::clone(self))
    }

    /// Reserves memory; the caller has checked that there is room.
    pub(super) fn reserve(self: &Arc<Self>, who: For<'_>, place: Place, bytes: u64) -> Reserved {
        let owner = match who {
            For::Consumer(consumer) => Owner::Consumer(consumer.number),
            For::Copy => Owner::Copy,
        };
        let at = index(place);
        self.accounts().charge(owner, at, bytes);
        Reserved { ledger: Arc::clone(self), owner: Mutex::new(owner), at, bytes }
    }

    /// Waits until there may be room that there was not at version `seen`. Returns false if there
    /// will be none unless this consumer gives back what it holds.
    pub(super) fn wait_for_room(&self, consumer: &Consumer, seen: u64) -> bool {
        let start = Instant::now();
        let mut accounts = self.accounts();
        match accounts.stuck(consumer.number, seen) {
            Outcome::Again => return true,
            Outcome::Refused => return false,
            Outcome::Wait => {}
        }
        // Another consumer may have been refused.
        self.changed.notify_all();
        let mut told = false;
        while !accounts.is_called(consumer.number, seen) {
            accounts = self.wait(accounts, LONG);
            if start.elapsed() >= LONG && !told {
                told = true;
                let pending = accounts.pending();
                tracing::warn!(?pending, "has waited for memory for {} s", LONG.as_secs());
            }
            if start.elapsed() >= LONGEST {
                return false;
            }
        }
        true
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        self.ledger.accounts().leave(self.number);
        self.ledger.changed.notify_all();
    }
}

impl Drop for Reclaimer {
    fn drop(&mut self) {
        self.0.accounts().end_reclaim();
        self.0.changed.notify_all();
    }
}

impl Reserved {
    fn pass(&self, to: Owner) {
        let mut owner = self.owner.lock().unwrap_or_else(PoisonError::into_inner);
        self.ledger.accounts().pass(*owner, to, self.at, self.bytes);
        *owner = to;
        self.ledger.changed.notify_all();
    }

    /// Makes an object the owner.
    pub(super) fn keep(&self) {
        self.pass(Owner::Object);
    }

    /// Whether no object owns it any more.
    pub(super) fn is_released(&self) -> bool {
        *self.owner.lock().unwrap_or_else(PoisonError::into_inner) == Owner::Released
    }

    /// Ends the object's ownership; the memory is free once its last reader drops it.
    pub(super) fn release(&self) {
        self.pass(Owner::Released);
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let owner = *self.owner.lock().unwrap_or_else(PoisonError::into_inner);
        self.ledger.accounts().free(owner, self.at, self.bytes);
        self.ledger.changed.notify_all();
    }
}

/// The reservation that travels with a buffer.
pub(super) fn reserved(buffer: &Buffer) -> Option<&Reserved> {
    let lease: &(dyn Any + Send + Sync) = &**buffer.lease()?;
    lease.downcast_ref()
}
