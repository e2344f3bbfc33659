//! Holds a worker's objects, and moves them between the tiers as [`Tiers`] decides.
//!
//! Peers may read what is in host memory where it is (`share`).
//!
//! *Invariant:* nothing is read, written, copied or waited for while the lock is held: an object
//! that moves stays in its place meanwhile, and the move is abandoned if the object was used or
//! removed before it ended. All memory of objects, tasks and transfers carries a reservation.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::watch;

use super::budget::Budget;
use super::core::{Move, Tiers};
use super::error::StoreError;
use super::ledger::{Consumer, For, Ledger, Reclaimer, reserved};
use super::place::Place;
use super::spill::{Extent, Spill};
use crate::plane::Plane;
use cuda_cluster_data::cuda::Device;
use cuda_cluster_data::memory::{HostMemory, spare};
use cuda_cluster_data::ucx::Buffer;
use cuda_cluster_machine::os::process::{self, Resident};
use cuda_cluster_wire::tasks::{Counters, ObjectId};

/// The settings of a store.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Device memory for objects, in bytes; `None` for all that the device has.
    pub(crate) device_limit: Option<u64>,
    /// Host memory for objects, in bytes; `None` for what the memory limit leaves.
    pub(crate) host_limit: Option<u64>,
    /// Resident memory at which this process is ended, in bytes; `None` for no limit.
    pub(crate) memory_limit: Option<u64>,
    /// Bytes of the file; `None` for no limit.
    pub(crate) disk_limit: Option<u64>,
    /// The directory of the spill file.
    pub(crate) directory: PathBuf,
}

enum Content {
    Memory(Arc<Buffer>),
    Disk(Arc<Extent>),
}

struct Inner {
    tiers: Tiers,
    contents: HashMap<ObjectId, Content>,
    /// Objects that are being read from the file.
    rising: HashSet<ObjectId>,
    budget: Option<Watched>,
}

/// The budget, and when the process was last measured.
struct Watched {
    budget: Budget,
    /// Resident bytes of files and the like, before there were objects.
    files: u64,
    start: Instant,
    looked: Instant,
}

impl Watched {
    /// Bytes of peers that are reserved and not resident, because nobody has read them yet.
    fn unread(&self, resident: Resident) -> u64 {
        let shared = resident.shared_bytes.saturating_sub(self.files);
        spare::unread(usize::try_from(shared).unwrap_or(usize::MAX)) as u64
    }
}

/// A worker's objects.
pub struct Store {
    inner: Mutex<Inner>,
    ledger: Arc<Ledger>,
    spill: Spill,
    device: Option<Device>,
    /// Offers the objects that are in memory to peers.
    plane: Option<Plane>,
    /// Changes when peers are to give back what they read in place.
    recalls: watch::Sender<()>,
}

/// An object in use; it stays in memory until this is dropped.
pub struct Pinned {
    store: Arc<Store>,
    object: ObjectId,
    buffer: Arc<Buffer>,
}

impl Pinned {
    pub(crate) fn buffer(&self) -> &Buffer {
        &self.buffer
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.store.lock().tiers.unpin(self.object);
        self.store.ledger.touch();
    }
}

/// An object to be sent from where it is, in memory or in the file.
pub struct Lent {
    place: LentPlace,
    /// Tells consumers that wait for memory that this will end.
    _reclaimer: Reclaimer,
}

enum LentPlace {
    Memory(Pinned),
    File(Arc<Extent>),
}

impl Lent {
    pub(crate) fn len(&self) -> usize {
        match &self.place {
            LentPlace::Memory(pinned) => pinned.buffer().len(),
            LentPlace::File(extent) => extent.len(),
        }
    }

    /// The bytes, if they are in memory that other processes can read.
    pub(crate) fn host(&self) -> Option<&[u8]> {
        match &self.place {
            LentPlace::Memory(pinned) => pinned.buffer().host(),
            LentPlace::File(_) => None,
        }
    }

    /// Copies from offset `at` until `bytes` is full.
    pub(crate) fn read(&self, at: usize, bytes: &mut [u8]) -> Result<(), StoreError> {
        match &self.place {
            LentPlace::Memory(pinned) => Ok(pinned.buffer().read(at, bytes)?),
            LentPlace::File(extent) => extent.read_at(at, bytes),
        }
    }
}

impl Store {
    pub(crate) fn new(settings: &Settings, device: Option<Device>, plane: Option<Plane>) -> Self {
        let all = device.as_ref().and_then(|device| device.memory().ok());
        let all = all.map(|memory| memory.total_bytes);
        let limit = settings.device_limit.filter(|limit| all.is_some_and(|all| *limit < all));
        let simulated = device.as_ref().is_some_and(Device::is_simulated);
        let tiers = Tiers::new(limit.or(all), settings.host_limit, settings.disk_limit)
            .simulated(simulated);
        let budget = settings.memory_limit.map(|limit| {
            let resident = process::resident(std::process::id()).unwrap_or_default();
            let now = Instant::now();
            let budget = Budget::new(limit, resident.bytes);
            Watched { budget, files: resident.shared_bytes, start: now, looked: now }
        });
        let (contents, rising) = (HashMap::new(), HashSet::new());
        Self {
            inner: Mutex::new(Inner { tiers, contents, rising, budget }),
            ledger: Arc::default(),
            spill: Spill::new(&settings.directory),
            device,
            plane,
            recalls: watch::Sender::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // A thread that panicked with it left the counts as they were before or after a whole step.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn device(&self) -> Option<&Device> {
        self.device.as_ref()
    }

    pub(crate) fn counters(&self) -> Counters {
        self.lock().tiers.counters()
    }

    pub(crate) fn contains(&self, object: ObjectId) -> bool {
        self.lock().contents.contains_key(&object)
    }

    /// Admits a task or a fetch that may hold memory beside others. Waits while one runs alone.
    pub(crate) fn enter(&self) -> Consumer {
        self.ledger.enter()
    }

    /// Admits one that found no room beside others, after it left: waits until it is alone.
    pub(crate) fn enter_alone(&self) -> Consumer {
        self.ledger.enter_alone()
    }

    /// Stores an object. If one of that name is in memory already, that one stays.
    ///
    /// A buffer without a reservation, made by a function, displaces other objects or goes to the
    /// file itself.
    pub(crate) fn insert(
        &self,
        consumer: &Consumer,
        object: ObjectId,
        mut buffer: Buffer,
    ) -> Result<u64, StoreError> {
        let bytes = buffer.len() as u64;
        let place = place_of(&buffer);
        let brought = reserved(&buffer).is_none();
        if brought {
            let reserved = self.ledger.reserve(For::Consumer(consumer), place, bytes);
            buffer.hold(Box::new(reserved));
        }
        let mut inner = self.lock();
        if matches!(inner.contents.get(&object), Some(Content::Memory(_))) {
            return Ok(bytes);
        }
        let buffer = Arc::new(buffer);
        self.offer(object, &buffer);
        keep(&buffer);
        inner.tiers.insert(object, bytes, place);
        let before = inner.contents.insert(object, Content::Memory(buffer));
        drop(inner);
        drop(before);
        if brought && let Err(error) = self.balance() {
            self.remove(object);
            return Err(error);
        }
        Ok(bytes)
    }

    pub(crate) fn remove(&self, object: ObjectId) {
        let mut inner = self.lock();
        inner.tiers.remove(object);
        let content = inner.contents.remove(&object);
        if let Some(Content::Memory(buffer)) = &content {
            self.withdraw(object);
            release(buffer);
        }
        drop(inner);
        drop(content);
        self.ledger.touch();
    }

    /// Removes every object, at the worker's end. One that is in use is freed by its last user.
    pub(crate) fn clear(&self) {
        let objects: Vec<ObjectId> = self.lock().contents.keys().copied().collect();
        for object in objects {
            self.remove(object);
        }
    }

    /// Brings an object into memory and pins it.
    pub(crate) fn open(
        self: &Arc<Self>,
        consumer: &Consumer,
        object: ObjectId,
    ) -> Result<Pinned, StoreError> {
        loop {
            let mut inner = self.lock();
            let seen = self.ledger.version();
            let extent = match inner.contents.get(&object) {
                None => return Err(StoreError::Unknown { object }),
                Some(Content::Memory(_)) => {
                    drop(inner);
                    match self.pin(object) {
                        Some(pinned) => return Ok(pinned),
                        None => continue,
                    }
                }
                Some(Content::Disk(extent)) => Arc::clone(extent),
            };
            if inner.rising.insert(object) {
                drop(inner);
                let risen = self.rise(consumer, object, &extent);
                self.lock().rising.remove(&object);
                self.ledger.touch();
                risen?;
                continue;
            }
            drop(inner);
            if !self.ledger.wait_for_room(consumer, seen) {
                return Err(self.no_room(Place::Host, extent.len() as u64).into());
            }
        }
    }

    /// Pins an object that is in memory.
    fn pin(self: &Arc<Self>, object: ObjectId) -> Option<Pinned> {
        let mut inner = self.lock();
        let Some(Content::Memory(buffer)) = inner.contents.get(&object) else { return None };
        let buffer = Arc::clone(buffer);
        inner.tiers.pin(object);
        Some(Pinned { store: Arc::clone(self), object, buffer })
    }

    /// Reads an object from the file into memory: into its home tier, or the host.
    fn rise(
        &self,
        consumer: &Consumer,
        object: ObjectId,
        extent: &Extent,
    ) -> Result<(), StoreError> {
        let home = self.lock().tiers.place(object).map(|(_, home)| home);
        let device = self.device.as_ref().filter(|_| home == Some(Place::Device));
        let mut buffer = self.somewhere(consumer, device, extent.len())?.memory()?;
        extent.read(object, |at, bytes| {
            buffer.write_at(at, bytes)?;
            Ok::<_, StoreError>(())
        })?;
        let mut inner = self.lock();
        match inner.contents.get(&object) {
            Some(Content::Disk(there)) if std::ptr::eq(&**there, extent) => {}
            _ => return Ok(()),
        }
        inner.tiers.moved(object, place_of(&buffer));
        let buffer = Arc::new(buffer);
        keep(&buffer);
        self.offer(object, &buffer);
        let before = inner.contents.insert(object, Content::Memory(buffer));
        drop(inner);
        drop(before);
        Ok(())
    }

    /// An object for another process. If it is in the file, it is not brought into memory for that.
    pub(crate) fn lend(self: &Arc<Self>, object: ObjectId) -> Result<Lent, StoreError> {
        let reclaimer = self.ledger.reclaimer();
        loop {
            if let Some(pinned) = self.pin(object) {
                return Ok(Lent { place: LentPlace::Memory(pinned), _reclaimer: reclaimer });
            }
            let extent = match self.lock().contents.get(&object) {
                None => return Err(StoreError::Unknown { object }),
                Some(Content::Memory(_)) => continue,
                Some(Content::Disk(extent)) => Arc::clone(extent),
            };
            // Check it before its length is sent.
            extent.verify(object)?;
            return Ok(Lent { place: LentPlace::File(extent), _reclaimer: reclaimer });
        }
    }

    /// Makes moves, one after the other, as far as they are still possible.
    fn make(&self, mut inner: MutexGuard<'_, Inner>, moves: Vec<Move>) -> Result<(), StoreError> {
        let mut sources = Vec::with_capacity(moves.len());
        for step in moves {
            if let Some(Content::Memory(buffer)) = inner.contents.get(&step.object) {
                sources.push((step, Arc::clone(buffer)));
                inner.tiers.hold(step.object);
            }
        }
        let _reclaimer = self.ledger.reclaimer();
        drop(inner);
        let mut result = Ok(());
        for (step, buffer) in sources {
            let copied = result.is_ok().then(|| self.copy(step.to, &buffer)).transpose();
            let copy = copied.unwrap_or_else(|error| {
                result = Err(error);
                None
            });
            self.land(step, buffer, copy);
        }
        result
    }

    fn copy(&self, to: Place, buffer: &Buffer) -> Result<Content, StoreError> {
        if to == Place::Disk {
            return Ok(Content::Disk(Arc::new(self.spill.write(buffer)?)));
        }
        let bytes = buffer.len();
        let reserved = self.ledger.reserve(For::Copy, Place::Host, bytes as u64);
        let mut copy = HostMemory::shareable(bytes).ok_or(StoreError::Memory { bytes })?;
        buffer.read(0, &mut copy)?;
        copy.hold(Box::new(reserved));
        Ok(Content::Memory(Arc::new(Buffer::Host(copy))))
    }

    /// Replaces the object's content with the copy, unless it is in use, or there is no room any
    /// more.
    fn land(&self, step: Move, buffer: Arc<Buffer>, copy: Option<Content>) {
        let mut inner = self.lock();
        inner.tiers.unpin(step.object);
        let is_same = match inner.contents.get(&step.object) {
            Some(Content::Memory(now)) => Arc::ptr_eq(now, &buffer),
            _ => false,
        };
        let may_go = is_same && inner.tiers.may_go(step.object, step.to);
        let mut before = None;
        if may_go && let Some(copy) = copy {
            match &copy {
                Content::Memory(buffer) => {
                    self.offer(step.object, buffer);
                    keep(buffer);
                }
                Content::Disk(_) => self.withdraw(step.object),
            }
            release(&buffer);
            before = inner.contents.insert(step.object, copy);
            inner.tiers.moved(step.object, step.to);
        }
        drop(inner);
        if before.take().is_some() && step.from == Place::Host {
            self.recall();
        }
    }

    fn offer(&self, object: ObjectId, buffer: &Arc<Buffer>) {
        if let Some(plane) = &self.plane {
            plane.put_shared(object.to_string(), Arc::clone(buffer));
        }
    }

    fn withdraw(&self, object: ObjectId) {
        if let Some(plane) = &self.plane {
            plane.remove(object.to_string());
        }
    }
}

/// Makes an object the owner of the buffer's reservation.
fn keep(buffer: &Buffer) {
    if let Some(reserved) = reserved(buffer) {
        reserved.keep();
    }
}

/// Ends the object's ownership of the buffer's reservation.
fn release(buffer: &Buffer) {
    if let Some(reserved) = reserved(buffer) {
        reserved.release();
    }
}

fn place_of(buffer: &Buffer) -> Place {
    match buffer {
        Buffer::Device(_) => Place::Device,
        Buffer::Host(_) => Place::Host,
    }
}

mod room;
mod share;
#[cfg(test)]
mod tests;

pub(in crate::worker) use room::Room;
pub(in crate::worker) use share::{is_released, on_host};
