//! Holds a worker's objects, and moves them between the levels as the ladder decides.
//!
//! *Invariant:* nothing is read, written or copied while the lock is held: what moves is held in
//! its place meanwhile, and the move is given up if the object was used or removed before it ended.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::StoreError;
use super::core::{Ladder, Move, NoRoom, Place};
use super::spill::{Extent, Spill};
use crate::cuda::{self, Device};
use crate::engine::native::plane::Plane;
use crate::ucx::Buffer;
use crate::wire::tasks::{Counters, ObjectId};

/// Longest wait for device memory of objects that have left, which peers are still reading, and of
/// objects that were to come from a peer that was lost.
const PATIENCE: Duration = Duration::from_secs(5);

/// Time between two looks.
const PAUSE: Duration = Duration::from_millis(1);

/// What a store is made of.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// Device memory for objects, in bytes; `None` for all that the device has.
    pub(crate) device_limit: Option<u64>,
    /// Host memory for objects, in bytes; `None` for no limit.
    pub(crate) host_limit: Option<u64>,
    /// Bytes of the file; `None` for no limit.
    pub(crate) disk_limit: Option<u64>,
    /// Where the file lies.
    pub(crate) directory: PathBuf,
}

enum Content {
    Memory(Arc<Buffer>),
    Disk(Arc<Extent>),
}

struct Inner {
    ladder: Ladder,
    contents: HashMap<ObjectId, Content>,
    /// Threads that are making room.
    moving: u32,
    /// Objects that are being read from the file.
    rising: HashSet<ObjectId>,
    /// Device memory that objects have left, while somebody still reads it.
    leaving: Vec<(Weak<Buffer>, u64)>,
}

/// A worker's objects.
pub(crate) struct Store {
    inner: Mutex<Inner>,
    /// Room has been made, or an object has been read.
    changed: Condvar,
    spill: Spill,
    device: Option<Device>,
    device_limit: Option<u64>,
    /// Through which peers fetch what is in memory.
    plane: Option<Plane>,
}

/// An object in use, which stays in memory until this is dropped.
pub(crate) struct Pinned {
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
        self.store.lock().ladder.unpin(self.object);
    }
}

/// An object to be sent: where it lies in memory, or a copy of what lies in the file.
pub(crate) enum Lent {
    Pinned(Pinned),
    Copy(Buffer),
}

impl Lent {
    pub(crate) fn buffer(&self) -> &Buffer {
        match self {
            Lent::Pinned(pinned) => pinned.buffer(),
            Lent::Copy(buffer) => buffer,
        }
    }
}

impl Store {
    pub(crate) fn new(settings: &Settings, device: Option<Device>, plane: Option<Plane>) -> Self {
        let all = device.as_ref().and_then(|device| device.memory().ok());
        let all = all.map(|memory| memory.total_bytes);
        let device_limit =
            settings.device_limit.filter(|limit| all.is_some_and(|all| *limit < all));
        let ladder = Ladder::new(device_limit.or(all), settings.host_limit, settings.disk_limit);
        let inner = Inner {
            ladder,
            contents: HashMap::new(),
            moving: 0,
            rising: HashSet::new(),
            leaving: Vec::new(),
        };
        Self {
            inner: Mutex::new(inner),
            changed: Condvar::new(),
            spill: Spill::new(&settings.directory),
            device,
            device_limit,
            plane,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Whoever panicked with it left the counts as they were before or after a whole step.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait(&self, inner: MutexGuard<'_, Inner>) {
        drop(self.changed.wait(inner).unwrap_or_else(PoisonError::into_inner));
    }

    pub(crate) fn device(&self) -> Option<&Device> {
        self.device.as_ref()
    }

    pub(crate) fn counters(&self) -> Counters {
        self.lock().ladder.counters()
    }

    pub(crate) fn contains(&self, object: ObjectId) -> bool {
        self.lock().contents.contains_key(&object)
    }

    /// Keeps an object. One of that name that is in memory already stays instead.
    pub(crate) fn insert(&self, object: ObjectId, buffer: Buffer) -> Result<u64, StoreError> {
        let bytes = buffer.len() as u64;
        let place = place_of(&buffer);
        let mut inner = match place {
            Place::Host => self.room(place, bytes)?,
            Place::Device | Place::Disk => self.lock(),
        };
        if matches!(inner.contents.get(&object), Some(Content::Memory(_))) {
            return Ok(bytes);
        }
        let buffer = Arc::new(buffer);
        self.offer(object, &buffer);
        inner.ladder.insert(object, bytes, place);
        let before = inner.contents.insert(object, Content::Memory(buffer));
        drop(inner);
        drop(before);
        Ok(bytes)
    }

    pub(crate) fn remove(&self, object: ObjectId) {
        let mut inner = self.lock();
        inner.ladder.remove(object);
        let content = inner.contents.remove(&object);
        if let Some(Content::Memory(buffer)) = &content {
            self.withdraw(object);
            inner.left(buffer);
        }
        drop(inner);
        drop(content);
    }

    /// Brings an object into memory and keeps it there.
    pub(crate) fn open(self: &Arc<Self>, object: ObjectId) -> Result<Pinned, StoreError> {
        loop {
            let mut inner = self.lock();
            let extent = match inner.contents.get(&object) {
                None => return Err(StoreError::Unknown { object }),
                Some(Content::Memory(buffer)) => {
                    let buffer = Arc::clone(buffer);
                    inner.ladder.pin(object);
                    return Ok(Pinned { store: Arc::clone(self), object, buffer });
                }
                Some(Content::Disk(extent)) => Arc::clone(extent),
            };
            if inner.rising.insert(object) {
                drop(inner);
                let risen = self.rise(object, &extent);
                self.lock().rising.remove(&object);
                self.changed.notify_all();
                risen?;
            } else {
                self.wait(inner);
            }
        }
    }

    /// Reads an object from the file into memory: of its home level, or of the host.
    fn rise(&self, object: ObjectId, extent: &Arc<Extent>) -> Result<(), StoreError> {
        let bytes = extent.read(object)?;
        let home = self.lock().ladder.place(object).map(|(_, home)| home);
        let device = self.device.as_ref().filter(|_| home == Some(Place::Device));
        let risen = device.and_then(|device| self.copy_to_device(device, &bytes).ok());
        let (mut inner, buffer) = match risen {
            Some(buffer) => (self.lock(), buffer),
            None => (self.room(Place::Host, bytes.len() as u64)?, Buffer::from(bytes)),
        };
        match inner.contents.get(&object) {
            Some(Content::Disk(there)) if Arc::ptr_eq(there, extent) => {}
            _ => return Ok(()),
        }
        inner.ladder.moved(object, place_of(&buffer));
        let buffer = Arc::new(buffer);
        self.offer(object, &buffer);
        inner.contents.insert(object, Content::Memory(buffer));
        Ok(())
    }

    fn copy_to_device(&self, device: &Device, bytes: &[u8]) -> Result<Buffer, StoreError> {
        let mut buffer = self.device_memory(device, bytes.len())?;
        if let Buffer::Device(memory) = &mut buffer {
            memory.write(0, bytes)?;
        }
        Ok(buffer)
    }

    /// An object for somebody else. What lies in the file is not brought into memory for that.
    pub(crate) fn lend(self: &Arc<Self>, object: ObjectId) -> Result<Lent, StoreError> {
        let extent = match self.lock().contents.get(&object) {
            Some(Content::Disk(extent)) => Some(Arc::clone(extent)),
            _ => None,
        };
        match extent {
            Some(extent) => Ok(Lent::Copy(Buffer::from(extent.read(object)?))),
            None => self.open(object).map(Lent::Pinned),
        }
    }

    /// Device memory for a task, or host memory where there is no device. Objects that are not in
    /// use make room.
    pub(crate) fn allocate(&self, bytes: usize) -> Result<Buffer, StoreError> {
        match &self.device {
            Some(device) => self.device_memory(device, bytes),
            None => host_memory(bytes),
        }
    }

    /// Memory for an object on its way here: of the device, or of the host where nothing on the
    /// device can make room for it now.
    pub(crate) fn receive(&self, bytes: usize) -> Result<Buffer, StoreError> {
        let memory = self.device.as_ref().map(|device| self.device_memory(device, bytes));
        match memory {
            Some(Ok(buffer)) => Ok(buffer),
            Some(Err(error)) if !matches!(error, StoreError::NoRoom(_)) => Err(error),
            _ => {
                drop(self.room(Place::Host, bytes as u64)?);
                host_memory(bytes)
            }
        }
    }

    fn device_memory(&self, device: &Device, bytes: usize) -> Result<Buffer, StoreError> {
        let start = Instant::now();
        loop {
            // Asked before the attempt: what is free after it may have come too late for it.
            let parked = self.plane.as_ref().map_or(0, Plane::parked_bytes);
            let coming = self.lock().leaving_bytes() + parked;
            let refusal = match self.attempt(device, bytes) {
                Ok(buffer) => return Ok(buffer),
                Err(refusal) => refusal,
            };
            let cuda::Error::OutOfMemory { asked_bytes, free_bytes, .. } = &refusal else {
                return Err(refusal.into());
            };
            let lacking = (*asked_bytes as u64).saturating_sub(*free_bytes).max(1);
            let full = no_room(&refusal, device, self.device_limit);
            if full.as_ref().is_some_and(|full| full.asked_bytes > full.limit_bytes) {
                return Err(full.map_or_else(|| refusal.into(), Into::into));
            }
            let mut inner = self.lock();
            let leaving = inner.leaving_bytes();
            let waits = start.elapsed() < PATIENCE;
            if leaving < lacking {
                match inner.ladder.shed(Place::Device, lacking - leaving) {
                    Ok(Some(moves)) => {
                        self.make(inner, moves)?;
                        continue;
                    }
                    _ if inner.moving > 0 => {
                        self.wait(inner);
                        continue;
                    }
                    Err(error) => return Err(error.into()),
                    Ok(None) => {}
                }
            }
            drop(inner);
            if coming == 0 || !waits {
                return Err(full.map_or_else(|| refusal.into(), Into::into));
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Asks the device once, within the limit.
    fn attempt(&self, device: &Device, bytes: usize) -> Result<Buffer, cuda::Error> {
        if let Some(limit) = self.device_limit {
            let free_bytes = limit.saturating_sub(self.counters().device.bytes);
            if bytes as u64 > free_bytes {
                let device = device.name().to_owned();
                return Err(cuda::Error::OutOfMemory { device, asked_bytes: bytes, free_bytes });
            }
        }
        Ok(Buffer::Device(device.allocate(bytes)?))
    }

    /// Waits and moves until a level has room; the lock, under which it still has.
    fn room(&self, place: Place, bytes: u64) -> Result<MutexGuard<'_, Inner>, StoreError> {
        loop {
            let inner = self.lock();
            match inner.ladder.room(place, bytes) {
                Ok(moves) if moves.is_empty() => return Ok(inner),
                Ok(moves) => self.make(inner, moves)?,
                // Others are making room that this could have.
                Err(_) if inner.moving > 0 => self.wait(inner),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Makes moves, one after the other, as far as they are still possible then.
    fn make(&self, mut inner: MutexGuard<'_, Inner>, moves: Vec<Move>) -> Result<(), StoreError> {
        let mut sources = Vec::with_capacity(moves.len());
        for step in moves {
            if let Some(Content::Memory(buffer)) = inner.contents.get(&step.object) {
                sources.push((step, Arc::clone(buffer)));
                inner.ladder.hold(step.object);
            }
        }
        inner.moving += 1;
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
        self.lock().moving -= 1;
        self.changed.notify_all();
        result
    }

    fn copy(&self, to: Place, buffer: &Buffer) -> Result<Content, StoreError> {
        let read;
        let bytes = match buffer.host() {
            Some(bytes) => bytes,
            None => {
                let mut copy = vec![0; buffer.len()];
                buffer.read(0, &mut copy)?;
                read = copy;
                &read[..]
            }
        };
        Ok(match to {
            Place::Disk => Content::Disk(Arc::new(self.spill.write(bytes)?)),
            Place::Host | Place::Device => Content::Memory(Arc::new(bytes.to_vec().into())),
        })
    }

    /// Lets the copy take the object's place, unless it is used, or there is no room any more.
    fn land(&self, step: Move, buffer: Arc<Buffer>, copy: Option<Content>) {
        let mut inner = self.lock();
        inner.ladder.unpin(step.object);
        let is_same = match inner.contents.get(&step.object) {
            Some(Content::Memory(now)) => Arc::ptr_eq(now, &buffer),
            _ => false,
        };
        let may_go = is_same && inner.ladder.may_go(step.object, step.to);
        if let Some(copy) = copy.filter(|_| may_go) {
            match &copy {
                Content::Memory(buffer) => self.offer(step.object, buffer),
                Content::Disk(_) => self.withdraw(step.object),
            }
            inner.left(&buffer);
            inner.contents.insert(step.object, copy);
            inner.ladder.moved(step.object, step.to);
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

impl Inner {
    /// An object has left this memory.
    fn left(&mut self, buffer: &Arc<Buffer>) {
        if place_of(buffer) == Place::Device {
            self.leaving.push((Arc::downgrade(buffer), buffer.len() as u64));
        }
    }

    /// Device memory that is about to be free.
    fn leaving_bytes(&mut self) -> u64 {
        self.leaving.retain(|(buffer, _)| buffer.strong_count() > 0);
        self.leaving.iter().map(|(_, bytes)| bytes).sum()
    }
}

fn host_memory(bytes: usize) -> Result<Buffer, StoreError> {
    Buffer::zeroed(bytes).ok_or(StoreError::Memory { bytes })
}

fn place_of(buffer: &Buffer) -> Place {
    match buffer {
        Buffer::Device(_) => Place::Device,
        Buffer::Host(_) => Place::Host,
    }
}

fn no_room(error: &cuda::Error, device: &Device, limit: Option<u64>) -> Option<NoRoom> {
    let cuda::Error::OutOfMemory { asked_bytes, free_bytes, .. } = error else { return None };
    let limit_bytes = limit.or_else(|| device.memory().ok().map(|memory| memory.total_bytes))?;
    let used_bytes = limit_bytes.saturating_sub(*free_bytes);
    let asked_bytes = *asked_bytes as u64;
    let place = Place::Device;
    Some(NoRoom { place, asked_bytes, limit_bytes, used_bytes, pinned_bytes: used_bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u64) -> ObjectId {
        ObjectId::new(1, number)
    }

    fn store(device: u64, host: u64, directory: &tempfile::TempDir) -> Arc<Store> {
        let directory = directory.path().to_path_buf();
        let settings =
            Settings { device_limit: None, host_limit: Some(host), disk_limit: None, directory };
        Arc::new(Store::new(&settings, Some(Device::simulated("simulated", device)), None))
    }

    fn fill(store: &Store, object: u64, bytes: usize) {
        let mut buffer = store.allocate(bytes).expect("room");
        let pattern = vec![u8::try_from(object).expect("small"); bytes];
        let Buffer::Device(memory) = &mut buffer else { panic!("there is a device") };
        memory.write(0, &pattern).expect("it fits");
        store.insert(id(object), buffer).expect("room");
    }

    #[test]
    fn ten_times_the_device_goes_through_all_levels_and_comes_back_whole() {
        let directory = tempfile::tempdir().expect("a directory");
        let store = store(10_000, 30_000, &directory);
        for object in 0..100 {
            fill(&store, object, 1000);
        }
        let counters = store.counters();
        assert_eq!(counters.device.bytes, 10_000);
        assert!(counters.disk.bytes >= 60_000, "{counters:?}");
        for object in 0..100 {
            let pinned = store.open(id(object)).expect("it is here");
            let expected = u8::try_from(object).expect("small");
            assert!(pinned.buffer().host().expect("simulated").iter().all(|b| *b == expected));
        }
        for object in 0..100 {
            store.remove(id(object));
        }
        let counters = store.counters();
        let left = counters.device.bytes + counters.host.bytes + counters.disk.bytes;
        assert_eq!(left, 0);
    }

    #[test]
    fn what_is_in_use_does_not_make_room() {
        let directory = tempfile::tempdir().expect("a directory");
        let store = store(1000, 10_000, &directory);
        fill(&store, 0, 900);
        let pinned = store.open(id(0)).expect("it is here");
        let error = store.allocate(200).expect_err("all of it is in use");
        assert!(error.to_string().contains("no room for 200 bytes in device memory"), "{error}");
        drop(pinned);
        assert!(store.allocate(200).is_ok());
    }

    #[test]
    fn many_threads_share_little_memory_and_find_every_byte() {
        let directory = tempfile::tempdir().expect("a directory");
        let store = store(8_000, 8_000, &directory);
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let store = Arc::clone(&store);
                scope.spawn(move || {
                    for round in 0..40 {
                        let object = thread * 40 + round;
                        fill(&store, object, 500);
                        let before = id(thread * 40 + round / 2);
                        let pinned = store.open(before).expect("it is here");
                        let expected = u8::try_from(thread * 40 + round / 2).expect("small");
                        let bytes = pinned.buffer().host().expect("simulated");
                        assert!(bytes.iter().all(|byte| *byte == expected));
                    }
                });
            }
        });
        for object in 0..160 {
            let lent = store.lend(id(object)).expect("it is here");
            let expected = u8::try_from(object).expect("small");
            assert!(lent.buffer().host().expect("simulated").iter().all(|b| *b == expected));
            drop(lent);
            store.remove(id(object));
        }
        let counters = store.counters();
        assert_eq!(counters.device.bytes + counters.host.bytes + counters.disk.bytes, 0);
    }

    #[test]
    fn a_disk_that_refuses_is_an_error_and_nothing_is_lost() {
        let settings = Settings {
            device_limit: None,
            host_limit: Some(1000),
            disk_limit: None,
            directory: "/nowhere/at/all".into(),
        };
        let device = Some(Device::simulated("simulated", 1000));
        let store = Arc::new(Store::new(&settings, device, None));
        fill(&store, 0, 900);
        let error = store.allocate(900).expect_err("nobody can make room");
        assert!(error.to_string().contains("/nowhere/at/all"), "{error}");
        assert!(store.open(id(0)).is_ok());
    }
}
