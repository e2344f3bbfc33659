//! Finding room: for tasks, for what is on its way here, and for the rest of the process.
//!
//! Does not hold objects.
//!
//! *Invariant:* memory is given out only with a reservation, and only where it is within every
//! limit at that moment.

use std::time::{Duration, Instant};

use super::{Inner, Store};
use crate::cuda::{self, Device, spare};
use crate::engine::native::worker::objects::core::{NoRoom, Outside, Place};
use crate::engine::native::worker::objects::error::StoreError;
use crate::engine::native::worker::objects::ledger::{For, Party, Reserved};
use crate::os::{memory, process};
use crate::ucx::Buffer;

/// Time between two looks at the process's memory, while it works.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Looks that come sooner than this after another are left out.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// Shortest time between two times that freed heap is given back.
const TRIM_AGAIN: Duration = Duration::from_millis(200);

impl Store {
    /// Device memory for a task, or host memory where there is no device. Objects that are not in
    /// use make room.
    pub(crate) fn allocate(&self, party: &Party, bytes: usize) -> Result<Buffer, StoreError> {
        match &self.device {
            Some(device) => self.device_memory(party, device, bytes, true),
            None => self.host_memory(party, bytes),
        }
    }

    /// Memory for an object on its way here: of the device, or of the host where nothing on the
    /// device can make room for it now.
    pub(crate) fn receive(&self, party: &Party, bytes: usize) -> Result<Buffer, StoreError> {
        self.somewhere(party, self.device.as_ref(), bytes)
    }

    /// Host memory for an object that a client brings.
    pub(crate) fn receive_on_host(
        &self,
        party: &Party,
        bytes: usize,
    ) -> Result<Buffer, StoreError> {
        self.host_memory(party, bytes)
    }

    /// Memory of a device, unless that would have to be waited for, or of the host.
    pub(super) fn somewhere(
        &self,
        party: &Party,
        device: Option<&Device>,
        bytes: usize,
    ) -> Result<Buffer, StoreError> {
        match device.map(|device| self.device_memory(party, device, bytes, false)) {
            Some(Ok(buffer)) => Ok(buffer),
            Some(Err(error)) if !matches!(error, StoreError::NoRoom(_)) => Err(error),
            _ => self.host_memory(party, bytes),
        }
    }

    fn host_memory(&self, party: &Party, bytes: usize) -> Result<Buffer, StoreError> {
        let reserved = self.reserve(party, Place::Host, bytes as u64, true)?;
        let mut buffer = Buffer::undefined(bytes).ok_or(StoreError::Memory { bytes })?;
        buffer.hold(Box::new(reserved));
        Ok(buffer)
    }

    /// Memory of the device; it is waited for only if that is asked for.
    fn device_memory(
        &self,
        party: &Party,
        device: &Device,
        bytes: usize,
        waits: bool,
    ) -> Result<Buffer, StoreError> {
        let mut is_sure = false;
        loop {
            let reserved = self.reserve(party, Place::Device, bytes as u64, waits)?;
            let refusal = match device.allocate(bytes) {
                Ok(memory) => {
                    let mut buffer = Buffer::Device(memory);
                    buffer.hold(Box::new(reserved));
                    return Ok(buffer);
                }
                Err(refusal) => refusal,
            };
            drop(reserved);
            // Others use the device, too, or its memory is in pieces.
            let cuda::Error::OutOfMemory { asked_bytes, free_bytes, .. } = &refusal else {
                return Err(refusal.into());
            };
            let lacking = (*asked_bytes as u64).saturating_sub(*free_bytes).max(1);
            let mut inner = self.lock();
            let seen = self.ledger.version();
            self.surround(&mut inner, true);
            let moves = inner.tiers.shed_device(lacking)?;
            if !moves.is_empty() {
                self.make(inner, moves)?;
                continue;
            }
            drop(inner);
            let again = waits && self.ledger.wait_for_room(party, seen);
            // What was given back after the attempt, and before the look at the counts, is there.
            if !again && is_sure {
                let full = no_room(&refusal, device, self.device_limit);
                return Err(full.map_or_else(|| refusal.into(), Into::into));
            }
            is_sure = !again;
        }
    }

    /// Speaks for memory as soon as a level has room, to which objects move that are not in use;
    /// what else would make room is waited for only if that is asked for.
    fn reserve(
        &self,
        party: &Party,
        place: Place,
        bytes: u64,
        waits: bool,
    ) -> Result<Reserved, StoreError> {
        let mut is_sure = false;
        loop {
            let mut inner = self.lock();
            let seen = self.ledger.version();
            self.surround(&mut inner, false);
            inner.tiers.may_fit(place, bytes)?;
            let full = match inner.tiers.room(place, bytes) {
                Ok(moves) if moves.is_empty() => {
                    // What is about to be free need not be moved away, but is not free yet.
                    self.surround(&mut inner, true);
                    match inner.tiers.fits(place, bytes) {
                        Ok(()) => return Ok(self.ledger.reserve(For::Party(party), place, bytes)),
                        Err(full) => full,
                    }
                }
                Ok(moves) => {
                    self.make(inner, moves)?;
                    continue;
                }
                Err(full) => full,
            };
            drop(inner);
            if waits && self.ledger.wait_for_room(party, seen) {
                continue;
            }
            // Before that is the answer, freed heap is given back, and old peaks are forgotten.
            if waits && !is_sure && full.process.is_some() {
                is_sure = true;
                self.look_closely();
                continue;
            }
            return Err(full.into());
        }
    }

    /// What stands in the way of `bytes` more at a level.
    pub(super) fn lack(&self, place: Place, bytes: u64) -> NoRoom {
        let mut inner = self.lock();
        self.surround(&mut inner, true);
        inner.tiers.lack(place, bytes)
    }

    /// Tells [`Tiers`] what is used beside its objects, with what is about to be free or without.
    fn surround(&self, inner: &mut Inner, with_pending: bool) {
        self.look(inner);
        let mut outside = self.ledger.outside();
        if with_pending {
            let (device, host) = self.ledger.pending();
            outside = Outside { device: outside.device + device, host: outside.host + host };
        }
        let whole = inner.budget.as_ref().map(|watched| watched.budget.whole());
        inner.tiers.surround(outside, whole);
    }

    /// Bytes of this process's memory that are charged.
    fn charged(&self) -> u64 {
        let (device, host) = self.ledger.charged();
        let simulated = self.device.as_ref().is_some_and(Device::is_simulated);
        host + if simulated { device } else { 0 }
    }

    fn look(&self, inner: &mut Inner) {
        let Some(watched) = &mut inner.budget else { return };
        if watched.looked.elapsed() < LOOK_AGAIN {
            return;
        }
        watched.looked = Instant::now();
        let Some(resident) = process::resident_bytes(std::process::id()) else { return };
        watched.budget.observe(resident, self.charged(), watched.start.elapsed());
    }

    /// Gives freed heap back, and takes the process as it is now.
    pub(super) fn look_closely(&self) {
        spare::give_back();
        memory::give_back_freed_heap();
        let charged = self.charged();
        let mut inner = self.lock();
        let Some(watched) = &mut inner.budget else { return };
        if let Some(resident) = process::resident_bytes(std::process::id()) {
            watched.budget.settle(resident, charged, watched.start.elapsed());
        }
    }

    /// Looks at the process while it works, and sends objects to the disk when what it uses
    /// otherwise grows. Never returns.
    pub(crate) fn watch(&self) {
        let (mut told, mut room, mut trimmed) = (false, 0, Instant::now());
        loop {
            self.ledger.until_work();
            std::thread::sleep(LOOK_EVERY);
            if let Err(error) = self.balance()
                && !std::mem::replace(&mut told, true)
            {
                tracing::warn!(%error, "objects cannot go to the disk");
            }
            let Some((now, is_bloated)) = self.room_for_data() else { return };
            if is_bloated && trimmed.elapsed() >= TRIM_AGAIN {
                spare::give_back();
                memory::give_back_freed_heap();
                trimmed = Instant::now();
            }
            // Whoever waits may find that the process uses less.
            if now > room {
                self.ledger.touch();
            }
            room = now;
        }
    }

    /// What is for data, and whether much of the rest may be freed heap.
    fn room_for_data(&self) -> Option<(u64, bool)> {
        let inner = self.lock();
        let budget = &inner.budget.as_ref()?.budget;
        Some((budget.whole().limit, budget.is_bloated()))
    }

    /// Brings the host back within its limits, as far as objects may go.
    pub(super) fn balance(&self) -> Result<(), StoreError> {
        loop {
            let mut inner = self.lock();
            self.surround(&mut inner, false);
            let (moves, rest) = inner.tiers.balance();
            if moves.is_empty() {
                let full = rest.filter(|full| full.place == Place::Disk);
                return full.map_or(Ok(()), |full| Err(full.into()));
            }
            self.make(inner, moves)?;
        }
    }
}

fn no_room(error: &cuda::Error, device: &Device, limit: Option<u64>) -> Option<NoRoom> {
    let cuda::Error::OutOfMemory { asked_bytes, free_bytes, .. } = error else { return None };
    let limit_bytes = limit.or_else(|| device.memory().ok().map(|memory| memory.total_bytes))?;
    let used_bytes = limit_bytes.saturating_sub(*free_bytes);
    let (asked_bytes, place) = (*asked_bytes as u64, Place::Device);
    let pinned_bytes = used_bytes;
    Some(NoRoom { place, asked_bytes, limit_bytes, used_bytes, pinned_bytes, process: None })
}
