//! Holds a worker's objects, and moves them between the levels as the ladder decides.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::StoreError;
use super::core::{Ladder, Move, NoRoom, Place};
use super::spill::{Extent, Spill};
use crate::cuda::{self, Device};
use crate::engine::native::plane::Plane;
use crate::ucx::Buffer;
use crate::wire::tasks::{Counters, ObjectId};

/// Longest wait for device memory that others are about to give back.
const PATIENCE: Duration = Duration::from_secs(2);

/// Time between two looks.
const PAUSE: Duration = Duration::from_millis(2);

/// What a store is made of.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// Host memory for objects, in bytes; `None` for no limit.
    pub(crate) host_limit: Option<u64>,
    /// Bytes of the file; `None` for no limit.
    pub(crate) disk_limit: Option<u64>,
    /// Where the file lies.
    pub(crate) directory: PathBuf,
}

enum Content {
    Memory(Arc<Buffer>),
    Disk(Extent),
}

struct Inner {
    ladder: Ladder,
    contents: HashMap<ObjectId, Content>,
    spill: Spill,
}

/// A worker's objects.
pub(crate) struct Store {
    inner: Mutex<Inner>,
    device: Option<Device>,
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

impl Store {
    pub(crate) fn new(settings: &Settings, device: Option<Device>, plane: Option<Plane>) -> Self {
        let capacity = device.as_ref().and_then(|device| device.memory().ok());
        let ladder = Ladder::new(
            capacity.map(|memory| memory.total_bytes),
            settings.host_limit,
            settings.disk_limit,
        );
        let spill = Spill::new(&settings.directory);
        let inner = Inner { ladder, contents: HashMap::new(), spill };
        Self { inner: Mutex::new(inner), device, plane }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Whoever panicked with it left the counts as they were before or after a whole step.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// Keeps an object, in place of an earlier one of that name.
    pub(crate) fn insert(&self, object: ObjectId, buffer: Buffer) -> Result<u64, StoreError> {
        let bytes = buffer.len() as u64;
        let place = place_of(&buffer);
        let mut inner = self.lock();
        if place == Place::Host {
            let moves = inner.ladder.room(place, bytes)?;
            self.make(&mut inner, &moves)?;
        }
        let buffer = Arc::new(buffer);
        self.offer(object, &buffer);
        inner.ladder.insert(object, bytes, place);
        inner.contents.insert(object, Content::Memory(buffer));
        Ok(bytes)
    }

    pub(crate) fn remove(&self, object: ObjectId) {
        let mut inner = self.lock();
        inner.ladder.remove(object);
        match inner.contents.remove(&object) {
            Some(Content::Disk(extent)) => inner.spill.free(extent),
            Some(Content::Memory(_)) => self.withdraw(object),
            None => {}
        }
    }

    /// Brings an object into memory and keeps it there.
    pub(crate) fn open(self: &Arc<Self>, object: ObjectId) -> Result<Pinned, StoreError> {
        let mut inner = self.lock();
        let unknown = || StoreError::Unknown { object };
        let (place, home) = inner.ladder.place(object).ok_or_else(unknown)?;
        if place == Place::Disk {
            let device = self.device.as_ref().filter(|_| home == Place::Device);
            let extent = match inner.contents.get(&object) {
                Some(Content::Disk(extent)) => *extent,
                _ => return Err(unknown()),
            };
            let mut bytes = vec![0; extent.len()];
            inner.spill.read(object, extent, &mut bytes)?;
            let on_device = device.and_then(|d| self.copy_to_device(&mut inner, d, &bytes).ok());
            let buffer = match on_device {
                Some(buffer) => buffer,
                None => {
                    let moves = inner.ladder.room(Place::Host, bytes.len() as u64)?;
                    self.make(&mut inner, &moves)?;
                    Buffer::Host(bytes)
                }
            };
            inner.ladder.moved(object, place_of(&buffer));
            let buffer = Arc::new(buffer);
            self.offer(object, &buffer);
            inner.contents.insert(object, Content::Memory(buffer));
            inner.spill.free(extent);
        }
        let buffer = match inner.contents.get(&object) {
            Some(Content::Memory(buffer)) => Arc::clone(buffer),
            _ => return Err(unknown()),
        };
        inner.ladder.pin(object);
        Ok(Pinned { store: Arc::clone(self), object, buffer })
    }

    fn copy_to_device(
        &self,
        inner: &mut Inner,
        device: &Device,
        bytes: &[u8],
    ) -> Result<Buffer, StoreError> {
        let mut buffer = loop {
            match device.allocate(bytes.len()) {
                Ok(buffer) => break buffer,
                Err(error) => {
                    if !self.shed(inner, &error)? {
                        return Err(error.into());
                    }
                }
            }
        };
        buffer.write(0, bytes)?;
        Ok(Buffer::Device(buffer))
    }

    /// Device memory for a task, or host memory where there is no device. Objects that are not in
    /// use make room.
    pub(crate) fn allocate(&self, bytes: usize) -> Result<Buffer, StoreError> {
        let Some(device) = &self.device else {
            return Ok(Buffer::Host(vec![0; bytes]));
        };
        let start = Instant::now();
        loop {
            let error = match device.allocate(bytes) {
                Ok(buffer) => return Ok(Buffer::Device(buffer)),
                Err(error) => error,
            };
            let mut inner = self.lock();
            if self.shed(&mut inner, &error)? {
                continue;
            }
            let moved_on = device.memory().is_ok_and(|memory| bytes as u64 > memory.total_bytes);
            if moved_on || start.elapsed() > PATIENCE {
                return Err(no_room(&error, device).map_or_else(|| error.into(), Into::into));
            }
            drop(inner);
            std::thread::sleep(PAUSE);
        }
    }

    /// Memory for an object on its way here: of the device, or of the host where nothing on the
    /// device can make room for it now.
    pub(crate) fn receive(&self, bytes: usize) -> Result<Buffer, StoreError> {
        let mut inner = self.lock();
        while let Some(device) = &self.device {
            match device.allocate(bytes) {
                Ok(buffer) => return Ok(Buffer::Device(buffer)),
                Err(error) => {
                    if !self.shed(&mut inner, &error)? {
                        break;
                    }
                }
            }
        }
        let moves = inner.ladder.room(Place::Host, bytes as u64)?;
        self.make(&mut inner, &moves)?;
        Ok(Buffer::Host(vec![0; bytes]))
    }

    /// Takes objects off the device after it has refused. `false` if there is none to take.
    fn shed(&self, inner: &mut Inner, refusal: &cuda::Error) -> Result<bool, StoreError> {
        let cuda::Error::OutOfMemory { asked_bytes, free_bytes, .. } = refusal else {
            return Ok(false);
        };
        let lacking = (*asked_bytes as u64).saturating_sub(*free_bytes).max(1);
        match inner.ladder.shed(Place::Device, lacking)? {
            None => Ok(false),
            Some(moves) => self.make(inner, &moves).map(|()| true),
        }
    }

    fn make(&self, inner: &mut Inner, moves: &[Move]) -> Result<(), StoreError> {
        for step in moves {
            let Some(Content::Memory(buffer)) = inner.contents.get(&step.object) else { continue };
            let buffer = Arc::clone(buffer);
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
            let content = match step.to {
                Place::Disk => {
                    self.withdraw(step.object);
                    Content::Disk(inner.spill.write(bytes)?)
                }
                Place::Host | Place::Device => {
                    let buffer = Arc::new(Buffer::Host(bytes.to_vec()));
                    self.offer(step.object, &buffer);
                    Content::Memory(buffer)
                }
            };
            inner.contents.insert(step.object, content);
            inner.ladder.moved(step.object, step.to);
        }
        Ok(())
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

fn place_of(buffer: &Buffer) -> Place {
    match buffer {
        Buffer::Device(_) => Place::Device,
        Buffer::Host(_) => Place::Host,
    }
}

fn no_room(error: &cuda::Error, device: &Device) -> Option<NoRoom> {
    let cuda::Error::OutOfMemory { asked_bytes, free_bytes, .. } = error else { return None };
    let limit_bytes = device.memory().ok()?.total_bytes;
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
        let settings = Settings { host_limit: Some(host), disk_limit: None, directory };
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
}
