//! Finding room: for tasks, for incoming objects, and for the rest of the process.
//!
//! Does not hold objects.
//!
//! *Invariant:* memory is given out only with a reservation, and only if it is within every limit
//! at that moment.

use std::time::{Duration, Instant};

use super::{Inner, Store};
use crate::worker::objects::core::Transient;
use crate::worker::objects::error::StoreError;
use crate::worker::objects::ledger::{Consumer, For, Reserved};
use crate::worker::objects::no_room::{DeviceShare, NoRoom};
use crate::worker::objects::place::Place;
use cuda_cluster_data::cuda::{self, Device};
use cuda_cluster_data::memory::view::View;
use cuda_cluster_data::memory::{HostMemory, spare};
use cuda_cluster_data::ucx::Buffer;
use cuda_cluster_machine::os::{memory, process};

/// Time between two measurements of the process's memory while it works.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// A measurement is skipped if the last one is younger than this.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// Shortest time between two returns of freed heap to the system.
const TRIM_AGAIN: Duration = Duration::from_millis(200);

/// Room for an object that comes.
pub(in crate::worker) struct Room(Kind);

enum Kind {
    /// Memory of the device.
    Device(Buffer),
    /// So many bytes of the host, which are not allocated.
    Host(Reserved, usize),
}

impl Room {
    /// In bytes.
    pub(in crate::worker) fn len(&self) -> usize {
        match &self.0 {
            Kind::Device(memory) => memory.len(),
            Kind::Host(_, bytes) => *bytes,
        }
    }

    /// Memory with undefined content.
    pub(in crate::worker) fn memory(self) -> Result<Buffer, StoreError> {
        let (reserved, bytes) = match self.0 {
            Kind::Device(memory) => return Ok(memory),
            Kind::Host(reserved, bytes) => (reserved, bytes),
        };
        let mut memory = HostMemory::shareable(bytes).ok_or(StoreError::Memory { bytes })?;
        memory.hold(Box::new(reserved));
        Ok(Buffer::Host(memory))
    }

    /// What a peer has: copied to the device, or else left where it is.
    pub(in crate::worker) fn view(self, view: View) -> Result<Buffer, StoreError> {
        match self.0 {
            Kind::Device(mut memory) => {
                memory.write_at(0, &view)?;
                Ok(memory)
            }
            Kind::Host(reserved, _) => {
                let mut memory = HostMemory::from(view);
                memory.hold(Box::new(reserved));
                Ok(Buffer::Host(memory))
            }
        }
    }
}

impl Store {
    /// Device memory for a task, or host memory if there is no device. Objects that are not in use
    /// make room.
    pub(crate) fn allocate(&self, consumer: &Consumer, bytes: usize) -> Result<Buffer, StoreError> {
        match &self.device {
            Some(device) => self.device_memory(consumer, device, bytes, true),
            None => self.host_room(consumer, bytes)?.memory(),
        }
    }

    /// Room for an incoming object: on the device, or on the host if the device has none that can
    /// be made now.
    pub(in crate::worker) fn receive(
        &self,
        consumer: &Consumer,
        bytes: usize,
    ) -> Result<Room, StoreError> {
        self.somewhere(consumer, self.device.as_ref(), bytes)
    }

    /// Host memory for a task, or an object from a client.
    pub(crate) fn allocate_on_host(
        &self,
        consumer: &Consumer,
        bytes: usize,
    ) -> Result<Buffer, StoreError> {
        self.host_room(consumer, bytes)?.memory()
    }

    /// Device memory if there is some without waiting, otherwise host memory.
    pub(super) fn somewhere(
        &self,
        consumer: &Consumer,
        device: Option<&Device>,
        bytes: usize,
    ) -> Result<Room, StoreError> {
        match device.map(|device| self.device_memory(consumer, device, bytes, false)) {
            Some(Ok(buffer)) => Ok(Room(Kind::Device(buffer))),
            Some(Err(error)) if !matches!(error, StoreError::NoRoom(_)) => Err(error),
            _ => self.host_room(consumer, bytes),
        }
    }

    fn host_room(&self, consumer: &Consumer, bytes: usize) -> Result<Room, StoreError> {
        let reserved = self.reserve(consumer, Place::Host, bytes as u64, true)?;
        self.limit_spares();
        Ok(Room(Kind::Host(reserved, bytes)))
    }

    /// Device memory; waits for it only if asked to.
    fn device_memory(
        &self,
        consumer: &Consumer,
        device: &Device,
        bytes: usize,
        waits: bool,
    ) -> Result<Buffer, StoreError> {
        let mut is_sure = false;
        loop {
            let reserved = self.reserve(consumer, Place::Device, bytes as u64, waits)?;
            let refusal = match device.allocate(bytes) {
                Ok(memory) => {
                    let mut buffer = Buffer::Device(memory);
                    buffer.hold(Box::new(reserved));
                    if device.is_simulated() {
                        self.limit_spares();
                    }
                    return Ok(buffer);
                }
                Err(refusal) => refusal,
            };
            drop(reserved);
            // Other programs use the device too, or its memory is fragmented.
            let cuda::Error::OutOfMemory { asked_bytes, free_bytes, .. } = &refusal else {
                return Err(refusal.into());
            };
            let lacking = (*asked_bytes as u64).saturating_sub(*free_bytes).max(1);
            let mut inner = self.lock();
            let seen = self.ledger.version();
            self.set_usage(&mut inner, true);
            let moves = inner.tiers.evict_device(lacking)?;
            if !moves.is_empty() {
                self.make(inner, moves)?;
                continue;
            }
            drop(inner);
            let again = waits && self.ledger.wait_for_room(consumer, seen);
            // Memory that was freed between the attempt and the check is available now.
            if !again && is_sure {
                return Err(self.device_full(refusal));
            }
            is_sure = !again;
        }
    }

    /// Reserves memory once a tier has room. Objects that are not in use move away for it; waits
    /// for other room only if asked to.
    fn reserve(
        &self,
        consumer: &Consumer,
        place: Place,
        bytes: u64,
        waits: bool,
    ) -> Result<Reserved, StoreError> {
        let mut is_sure = false;
        loop {
            let mut inner = self.lock();
            let seen = self.ledger.version();
            self.set_usage(&mut inner, false);
            inner.tiers.may_fit(place, bytes)?;
            let full = match inner.tiers.room(place, bytes) {
                Ok(moves) if moves.is_empty() => {
                    // Memory that is about to be free need not be moved away, but is not free yet.
                    self.set_usage(&mut inner, true);
                    match inner.tiers.fits(place, bytes) {
                        Ok(()) => {
                            return Ok(self.ledger.reserve(For::Consumer(consumer), place, bytes));
                        }
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
            if place == Place::Host || full.process.is_some() {
                self.recall();
            }
            if waits && self.ledger.wait_for_room(consumer, seen) {
                continue;
            }
            // Before refusing, return freed heap to the system and forget old peaks.
            if waits && !is_sure && full.process.is_some() {
                is_sure = true;
                self.look_closely();
                continue;
            }
            return Err(full.into());
        }
    }

    /// Why a tier has no room for `bytes` more.
    pub(super) fn no_room(&self, place: Place, bytes: u64) -> NoRoom {
        let mut inner = self.lock();
        self.set_usage(&mut inner, true);
        inner.tiers.no_room(place, bytes)
    }

    /// Why a device has no room for what its tier permits.
    fn device_full(&self, refusal: cuda::Error) -> StoreError {
        let cuda::Error::OutOfMemory { asked_bytes, free_bytes, freed_bytes, mapped_by, .. } =
            refusal
        else {
            return refusal.into();
        };
        let mut full = self.no_room(Place::Device, asked_bytes as u64);
        full.device = Some(DeviceShare { free_bytes, freed_bytes, mapped_by });
        full.into()
    }

    /// Passes to [`Tiers`] what is used beside its objects, with or without memory about to be
    /// free.
    fn set_usage(&self, inner: &mut Inner, with_pending: bool) {
        self.look(inner);
        let mut transient = self.ledger.transient();
        if with_pending {
            let (device, host) = self.ledger.pending();
            transient =
                Transient { device: transient.device + device, host: transient.host + host };
        }
        let process = inner.budget.as_ref().map(|watched| watched.budget.process_memory());
        inner.tiers.set_usage(transient, process);
    }

    /// Reserved bytes that are memory of this process.
    fn charged(&self) -> u64 {
        let (device, host) = self.ledger.charged();
        let simulated = self.device.as_ref().is_some_and(Device::is_simulated);
        host + if simulated { device } else { 0 }
    }

    /// Resident bytes that are reserved, and spare ones, which data may take at any time. A piece
    /// that is freed or reused during the call counts at least once.
    fn data(&self, unread: u64) -> u64 {
        let before = self.charged();
        let spare = spare::kept() as u64;
        (before.max(self.charged()) + spare).saturating_sub(unread)
    }

    /// Frees spare memory that would not fit beside the data: together they stay within the share
    /// of the memory limit that is for data.
    fn limit_spares(&self) {
        let limit = self.lock().budget.as_ref().map(|one| one.budget.process_memory().limit);
        if let Some(limit) = limit {
            let rest = limit.saturating_sub(self.charged());
            spare::give_back_above(usize::try_from(rest).unwrap_or(usize::MAX));
        }
    }

    fn look(&self, inner: &mut Inner) {
        let Some(watched) = &mut inner.budget else { return };
        if watched.looked.elapsed() < LOOK_AGAIN {
            return;
        }
        watched.looked = Instant::now();
        let Some(resident) = process::resident(std::process::id()) else { return };
        let data = self.data(watched.unread(resident));
        watched.budget.observe(resident.bytes, data, watched.start.elapsed());
    }

    /// Returns freed memory to the system, and measures the process again without old peaks.
    pub(super) fn look_closely(&self) {
        spare::give_back_above(0);
        memory::give_back_freed_heap();
        let charged = self.charged();
        let mut inner = self.lock();
        let Some(watched) = &mut inner.budget else { return };
        if let Some(resident) = process::resident(std::process::id()) {
            let charged = charged.saturating_sub(watched.unread(resident));
            watched.budget.settle(resident.bytes, charged, watched.start.elapsed());
        }
    }

    /// Measures the process while it works, and moves objects to the disk when its other memory
    /// grows. Never returns.
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
            self.limit_spares();
            if is_bloated && trimmed.elapsed() >= TRIM_AGAIN {
                memory::give_back_freed_heap();
                trimmed = Instant::now();
            }
            // Waiting consumers may now find that the process uses less.
            if now > room {
                self.ledger.touch();
            }
            room = now;
        }
    }

    /// The memory for data, and whether much of the rest may be freed heap.
    fn room_for_data(&self) -> Option<(u64, bool)> {
        let inner = self.lock();
        let budget = &inner.budget.as_ref()?.budget;
        Some((budget.process_memory().limit, budget.is_bloated()))
    }

    /// Brings the host back within its limits, as far as objects may move.
    pub(super) fn balance(&self) -> Result<(), StoreError> {
        loop {
            let mut inner = self.lock();
            self.set_usage(&mut inner, false);
            let (moves, rest) = inner.tiers.balance();
            if moves.is_empty() {
                // What peers still read is not moved away, but not free yet.
                self.set_usage(&mut inner, true);
                if inner.tiers.fits(Place::Host, 0).is_err() {
                    self.recall();
                }
                let full = rest.filter(|full| full.place == Place::Disk);
                return full.map_or(Ok(()), |full| Err(full.into()));
            }
            self.make(inner, moves)?;
        }
    }
}
