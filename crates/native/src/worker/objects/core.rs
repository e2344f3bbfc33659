//! Which objects move down a tier to make room: the least recently used that are not pinned.
//!
//! Pure: it counts bytes and names moves; the store makes them.
//!
//! Bytes that are reserved but not an object's (memory of tasks, transfers in flight) are passed in
//! as [`Transient`]. Memory of a simulated device is host memory, so it counts there too.
//!
//! *Invariant:* the bytes of a tier are the sum of its objects' bytes, and after the moves that
//! [`Tiers::room`] names, there is the room that was asked for.

use std::collections::{BTreeMap, HashMap};

use super::no_room::{NoRoom, ProcessShare};
use super::place::Place;
use cuda_cluster_wire::tasks::{Counters, Level, ObjectId};

/// The move of an object from one tier to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Move {
    pub(super) object: ObjectId,
    pub(super) from: Place,
    pub(super) to: Place,
}

/// Bytes in use by anything but objects, of the device and of the host.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Transient {
    pub(super) device: u64,
    pub(super) host: u64,
}

/// The memory of the process as a whole.
#[derive(Clone, Copy, Debug)]
pub(super) struct ProcessMemory {
    /// The share for data, in bytes.
    pub(super) limit: u64,
    /// The limit at which the process is ended.
    pub(super) memory_limit: u64,
    /// Used by everything except data.
    pub(super) other: u64,
}

struct Entry {
    bytes: u64,
    place: Place,
    /// The tier where it was made, and to which it returns.
    home: Place,
    pins: u32,
    /// Larger is later.
    used: u64,
}

#[derive(Default)]
struct Shelf {
    limit: Option<u64>,
    /// Objects that may go, the least recently used first.
    movable: BTreeMap<u64, ObjectId>,
    movable_bytes: u64,
    /// Bytes in use by anything but objects.
    transient: u64,
    counters: Level,
}

impl Shelf {
    fn used(&self) -> u64 {
        self.counters.bytes + self.transient
    }
}

/// The tiers and the objects in them.
pub(super) struct Tiers {
    entries: HashMap<ObjectId, Entry>,
    shelves: [Shelf; 3],
    /// Whether device memory is host memory.
    simulated: bool,
    process: Option<ProcessMemory>,
    clock: u64,
}

impl Tiers {
    /// Limits in bytes; `None` for none.
    pub(super) fn new(device: Option<u64>, host: Option<u64>, disk: Option<u64>) -> Self {
        let shelf = |limit| Shelf { limit, ..Shelf::default() };
        Self {
            entries: HashMap::new(),
            shelves: [shelf(device), shelf(host), shelf(disk)],
            simulated: false,
            process: None,
            clock: 0,
        }
    }

    /// Whether device memory also counts as host memory.
    pub(super) fn simulated(mut self, simulated: bool) -> Self {
        self.simulated = simulated;
        self
    }

    /// Sets what is used beside the objects, and what the process may use as a whole.
    pub(super) fn set_usage(&mut self, transient: Transient, process: Option<ProcessMemory>) {
        self.shelf(Place::Device).transient = transient.device;
        self.shelf(Place::Host).transient = transient.host;
        self.process = process;
    }

    fn shelf(&mut self, place: Place) -> &mut Shelf {
        &mut self.shelves[place as usize]
    }

    pub(super) fn counters(&self) -> Counters {
        let [device, host, disk] = [0, 1, 2].map(|at: usize| self.shelves[at].counters);
        Counters { device, host, disk }
    }

    /// The tier that an object is in, and its home.
    pub(super) fn place(&self, object: ObjectId) -> Option<(Place, Place)> {
        self.entries.get(&object).map(|entry| (entry.place, entry.home))
    }

    pub(super) fn bytes(&self, object: ObjectId) -> u64 {
        self.entries.get(&object).map_or(0, |entry| entry.bytes)
    }

    /// Whether a tier could hold this many bytes if it were empty.
    pub(super) fn may_fit(&self, place: Place, bytes: u64) -> Result<(), NoRoom> {
        match self.shelves[place as usize].limit {
            Some(limit) if bytes > limit => Err(Draft::new(self).full(place, bytes)),
            _ => Ok(()),
        }
    }

    /// Whether a tier has room for this many bytes now.
    pub(super) fn fits(&self, place: Place, bytes: u64) -> Result<(), NoRoom> {
        let draft = Draft::new(self);
        let limit = draft.limit(place);
        if limit.is_some_and(|limit| draft.used[place as usize] + bytes > limit) {
            return Err(draft.full(place, bytes));
        }
        let is_host = place == Place::Host || self.simulated && place == Place::Device;
        match self.process.filter(|process| is_host && draft.process_used() + bytes > process.limit)
        {
            Some(process) => Err(draft.process_full(process, place, bytes)),
            None => Ok(()),
        }
    }

    /// Why a tier has no room for `bytes` more.
    pub(super) fn no_room(&self, place: Place, bytes: u64) -> NoRoom {
        let full = self.fits(place, bytes);
        full.err().unwrap_or_else(|| Draft::new(self).full(place, bytes))
    }

    /// The moves that make room for `bytes` in a tier, ordered so that each finds room itself.
    ///
    /// # Errors
    /// If moving everything that may move is not enough.
    pub(super) fn room(&self, place: Place, bytes: u64) -> Result<Vec<Move>, NoRoom> {
        let mut draft = Draft::new(self);
        match place {
            Place::Device => draft.free_device(bytes, self.shelves[0].limit)?,
            Place::Host => draft.free_host(bytes)?,
            Place::Disk => {}
        }
        if place == Place::Host || self.simulated && place == Place::Device {
            draft.free_process(place, bytes)?;
        }
        Ok(draft.moves)
    }

    /// The moves that free at least `bytes` of the device, as far as objects may move.
    pub(super) fn evict_device(&self, bytes: u64) -> Result<Vec<Move>, NoRoom> {
        let shelf = &self.shelves[Place::Device as usize];
        let limit = shelf.used().saturating_sub(bytes.min(shelf.movable_bytes));
        let mut draft = Draft::new(self);
        draft.free_device(0, Some(limit))?;
        Ok(draft.moves)
    }

    /// The moves that bring the host back within its limits, as far as objects may move, and why
    /// the rest cannot be freed.
    pub(super) fn balance(&self) -> (Vec<Move>, Option<NoRoom>) {
        let mut draft = Draft::new(self);
        let freed = draft.free_host(0).and_then(|()| draft.free_process(Place::Host, 0));
        (draft.moves, freed.err())
    }

    /// Adds an object, for which room was made before.
    pub(super) fn insert(&mut self, object: ObjectId, bytes: u64, place: Place) {
        self.remove(object);
        self.clock += 1;
        let used = self.clock;
        self.entries.insert(object, Entry { bytes, place, home: place, pins: 0, used });
        self.arrive(object, bytes, place, used, true);
    }

    fn arrive(&mut self, object: ObjectId, bytes: u64, place: Place, used: u64, movable: bool) {
        let shelf = self.shelf(place);
        shelf.counters.objects += 1;
        shelf.counters.bytes += bytes;
        shelf.counters.peak_bytes = shelf.counters.peak_bytes.max(shelf.counters.bytes);
        if movable {
            self.let_go(object, bytes, place, used);
        }
    }

    fn depart(&mut self, bytes: u64, place: Place, used: u64) {
        self.keep(bytes, place, used);
        let shelf = self.shelf(place);
        shelf.counters.objects -= 1;
        shelf.counters.bytes -= bytes;
    }

    /// Makes an object movable.
    fn let_go(&mut self, object: ObjectId, bytes: u64, place: Place, used: u64) {
        let shelf = self.shelf(place);
        if shelf.movable.insert(used, object).is_none() {
            shelf.movable_bytes += bytes;
        }
    }

    /// Makes an object immovable.
    fn keep(&mut self, bytes: u64, place: Place, used: u64) {
        let shelf = self.shelf(place);
        if shelf.movable.remove(&used).is_some() {
            shelf.movable_bytes -= bytes;
        }
    }

    /// Records that a move was made.
    pub(super) fn moved(&mut self, object: ObjectId, to: Place) {
        let Some(entry) = self.entries.get_mut(&object) else { return };
        let (bytes, from, used, pins) = (entry.bytes, entry.place, entry.used, entry.pins);
        entry.place = to;
        self.depart(bytes, from, used);
        self.arrive(object, bytes, to, used, pins == 0);
        if to > from {
            self.shelf(to).counters.demoted_bytes += bytes;
        } else {
            self.shelf(from).counters.promoted_bytes += bytes;
        }
    }

    /// Pins an object in its tier while it is used.
    pub(super) fn pin(&mut self, object: ObjectId) {
        let Some(entry) = self.entries.get_mut(&object) else { return };
        self.clock += 1;
        let before = std::mem::replace(&mut entry.used, self.clock);
        entry.pins += 1;
        let (bytes, place) = (entry.bytes, entry.place);
        self.keep(bytes, place, before);
    }

    /// Keeps an object in its tier without counting as a use: it is being copied.
    pub(super) fn hold(&mut self, object: ObjectId) {
        let Some(entry) = self.entries.get_mut(&object) else { return };
        entry.pins += 1;
        let (bytes, place, used) = (entry.bytes, entry.place, entry.used);
        self.keep(bytes, place, used);
    }

    /// Whether a move may be completed: the object is not pinned, and if it goes to the disk, there
    /// is still room.
    pub(super) fn may_go(&self, object: ObjectId, to: Place) -> bool {
        let shelf = &self.shelves[to as usize];
        let limit = shelf.limit.filter(|_| to == Place::Disk);
        self.entries.get(&object).is_some_and(|entry| {
            let there = shelf.counters.bytes + entry.bytes;
            entry.pins == 0 && entry.place < to && limit.is_none_or(|limit| there <= limit)
        })
    }

    /// Ends one use of an object.
    pub(super) fn unpin(&mut self, object: ObjectId) {
        let Some(entry) = self.entries.get_mut(&object) else { return };
        entry.pins = entry.pins.saturating_sub(1);
        if entry.pins == 0 {
            let (bytes, place, used) = (entry.bytes, entry.place, entry.used);
            self.let_go(object, bytes, place, used);
        }
    }

    pub(super) fn remove(&mut self, object: ObjectId) {
        if let Some(entry) = self.entries.remove(&object) {
            self.depart(entry.bytes, entry.place, entry.used);
        }
    }
}

/// The tiers as they will be after some moves.
struct Draft<'a> {
    tiers: &'a Tiers,
    used: [u64; 3],
    /// Bytes that may still move.
    movable: [u64; 3],
    /// The last object of each tier that already moves.
    last: [u64; 3],
    moves: Vec<Move>,
}

impl<'a> Draft<'a> {
    fn new(tiers: &'a Tiers) -> Self {
        let shelf = |at: usize| &tiers.shelves[at];
        Self {
            tiers,
            used: [0, 1, 2].map(|at| shelf(at).used()),
            movable: [0, 1, 2].map(|at| shelf(at).movable_bytes),
            last: [0; 3],
            moves: Vec::new(),
        }
    }

    fn limit(&self, place: Place) -> Option<u64> {
        self.tiers.shelves[place as usize].limit
    }

    /// Host memory in use.
    fn process_used(&self) -> u64 {
        self.used[1] + if self.tiers.simulated { self.used[0] } else { 0 }
    }

    fn full(&self, place: Place, asked_bytes: u64) -> NoRoom {
        let at = place as usize;
        NoRoom {
            place,
            asked_bytes,
            limit_bytes: self.limit(place).unwrap_or(u64::MAX),
            used_bytes: self.used[at],
            pinned_bytes: self.used[at] - self.movable[at],
            process: None,
            device: None,
        }
    }

    fn process_full(&self, process: ProcessMemory, place: Place, asked_bytes: u64) -> NoRoom {
        let device = if self.tiers.simulated { self.used[0] } else { 0 };
        let movable = self.movable[1] + if self.tiers.simulated { self.movable[0] } else { 0 };
        NoRoom {
            place,
            asked_bytes,
            limit_bytes: process.limit,
            used_bytes: self.process_used(),
            pinned_bytes: self.process_used() - movable,
            process: Some(ProcessShare {
                memory_limit_bytes: process.memory_limit,
                other_bytes: process.other,
                simulated_device_bytes: device,
            }),
            device: None,
        }
    }

    /// The next object of a tier that may move.
    fn next(&self, place: Place) -> Option<(u64, ObjectId, u64)> {
        let at = place as usize;
        let mut movable = self.tiers.shelves[at].movable.range(self.last[at] + 1..);
        let (&used, &object) = movable.next()?;
        Some((used, object, self.tiers.bytes(object)))
    }

    fn go(&mut self, from: Place, to: Place) -> Result<(), NoRoom> {
        let Some((used, object, bytes)) = self.next(from) else { return Ok(()) };
        let disk = self.limit(Place::Disk).filter(|_| to == Place::Disk);
        if disk.is_some_and(|limit| self.used[2] + bytes > limit) {
            return Err(self.full(Place::Disk, bytes));
        }
        let at = from as usize;
        self.last[at] = used;
        self.movable[at] -= bytes;
        self.used[at] -= bytes;
        self.used[to as usize] += bytes;
        self.moves.push(Move { object, from, to });
        Ok(())
    }

    fn free_device(&mut self, bytes: u64, limit: Option<u64>) -> Result<(), NoRoom> {
        let Some(limit) = limit else { return Ok(()) };
        if (self.used[0] + bytes).saturating_sub(limit) > self.movable[0] {
            return Err(self.full(Place::Device, bytes));
        }
        while self.used[0] + bytes > limit {
            let Some((_, _, size)) = self.next(Place::Device) else {
                return Err(self.full(Place::Device, bytes));
            };
            let to = if self.host_takes(size)? { Place::Host } else { Place::Disk };
            self.go(Place::Device, to)?;
        }
        Ok(())
    }

    /// Makes room on the host for an object of the device, unless it would take most of the host.
    fn host_takes(&mut self, bytes: u64) -> Result<bool, NoRoom> {
        let stays = self.used[1] - self.movable[1];
        let process_stays = self.process_used() - self.movable[1];
        let level = self.limit(Place::Host).is_none_or(|limit| stays + bytes <= limit / 2);
        // The copy exists before the device's memory is free.
        let process =
            self.tiers.process.is_none_or(|process| process_stays + bytes <= process.limit);
        if !(level && process) {
            return Ok(false);
        }
        self.free_host(bytes)?;
        self.free_process(Place::Host, bytes)?;
        Ok(true)
    }

    fn free_host(&mut self, bytes: u64) -> Result<(), NoRoom> {
        let Some(limit) = self.limit(Place::Host) else { return Ok(()) };
        while self.used[1] + bytes > limit {
            if self.next(Place::Host).is_none() {
                return Err(self.full(Place::Host, bytes));
            }
            self.go(Place::Host, Place::Disk)?;
        }
        Ok(())
    }

    /// Moves objects to the disk until the process has room for `bytes` more: first those of the
    /// host, then those of a simulated device.
    fn free_process(&mut self, place: Place, bytes: u64) -> Result<(), NoRoom> {
        let Some(process) = self.tiers.process else { return Ok(()) };
        while self.process_used() + bytes > process.limit {
            let from = match self.next(Place::Host) {
                Some(_) => Place::Host,
                None if self.tiers.simulated && self.next(Place::Device).is_some() => Place::Device,
                None => return Err(self.process_full(process, place, bytes)),
            };
            self.go(from, Place::Disk)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn id(number: u64) -> ObjectId {
        ObjectId::new(1, number)
    }

    fn add(tiers: &mut Tiers, object: u64, bytes: u64, place: Place) -> Result<(), NoRoom> {
        for step in tiers.room(place, bytes)? {
            tiers.moved(step.object, step.to);
        }
        tiers.insert(id(object), bytes, place);
        Ok(())
    }

    #[test]
    fn the_least_recently_used_goes_first_and_pinned_ones_stay() {
        let mut tiers = Tiers::new(Some(30), None, None);
        for object in 0..3 {
            add(&mut tiers, object, 10, Place::Device).expect("fits");
        }
        tiers.pin(id(0));
        tiers.pin(id(1));
        tiers.unpin(id(1));
        let moves = tiers.room(Place::Device, 10).expect("one may go");
        let gone = Move { object: id(2), from: Place::Device, to: Place::Host };
        assert_eq!(moves, [gone]);
        let error = tiers.room(Place::Device, 25).expect_err("one is pinned");
        assert_eq!((error.place, error.pinned_bytes), (Place::Device, 10));
    }

    #[test]
    fn what_goes_to_a_full_host_pushes_others_to_the_disk_before_it() {
        let mut tiers = Tiers::new(Some(10), Some(20), None);
        add(&mut tiers, 0, 10, Place::Device).expect("fits");
        add(&mut tiers, 1, 10, Place::Device).expect("fits after a move");
        add(&mut tiers, 2, 10, Place::Device).expect("fits after a move");
        let moves = tiers.room(Place::Device, 10).expect("fits after two moves");
        let places: Vec<(ObjectId, Place)> = moves.iter().map(|m| (m.object, m.to)).collect();
        assert_eq!(places, [(id(0), Place::Disk), (id(2), Place::Host)]);
    }

    #[test]
    fn memory_of_a_simulated_device_counts_as_host_memory_and_goes_to_the_disk() {
        let mut tiers = Tiers::new(Some(100), None, None).simulated(true);
        let process = ProcessMemory { limit: 30, memory_limit: 50, other: 10 };
        tiers.set_usage(Transient::default(), Some(process));
        for object in 0..5 {
            add(&mut tiers, object, 10, Place::Device).expect("the disk has room");
        }
        let counters = tiers.counters();
        assert_eq!((counters.device.bytes, counters.disk.bytes), (30, 20));
        tiers.set_usage(Transient { device: 0, host: 15 }, Some(process));
        let (moves, rest) = tiers.balance();
        assert_eq!((moves.len(), rest), (2, None), "what else is used pushes objects out");
        let error = tiers.room(Place::Device, 20).expect_err("too much beside it");
        assert_eq!(error.process.map(|process| process.memory_limit_bytes), Some(50));
    }

    proptest! {
        #[test]
        fn no_level_ever_holds_more_than_its_limit(
            steps in proptest::collection::vec((0u64..20, 1u64..40, 0u8..5), 1..200),
            simulated: bool,
        ) {
            let mut tiers = Tiers::new(Some(100), Some(150), Some(300)).simulated(simulated);
            let process = ProcessMemory { limit: 170, memory_limit: 200, other: 10 };
            tiers.set_usage(Transient::default(), Some(process));
            let mut pins: BTreeMap<u64, u32> = BTreeMap::new();
            for (object, bytes, what) in steps {
                match what {
                    0 | 1 => {
                        let place = if what == 0 { Place::Device } else { Place::Host };
                        if tiers.place(id(object)).is_none() {
                            let _ = add(&mut tiers, object, bytes, place);
                        }
                    }
                    2 => {
                        if tiers.place(id(object)).is_some() {
                            tiers.pin(id(object));
                            *pins.entry(object).or_default() += 1;
                        }
                    }
                    3 => {
                        if let Some(count) = pins.get_mut(&object).filter(|count| **count > 0) {
                            *count -= 1;
                            tiers.unpin(id(object));
                        }
                    }
                    _ => {
                        pins.remove(&object);
                        tiers.remove(id(object));
                    }
                }
                let counters = tiers.counters();
                prop_assert!(counters.device.bytes <= 100);
                prop_assert!(counters.host.bytes <= 150);
                let device = if simulated { counters.device.bytes } else { 0 };
                prop_assert!(counters.host.bytes + device <= 170);
                for at in [Place::Device, Place::Host] {
                    let shelf = &tiers.shelves[at as usize];
                    let movable = shelf.movable.values().map(|object| tiers.bytes(*object));
                    prop_assert_eq!(movable.sum::<u64>(), shelf.movable_bytes);
                }
                prop_assert!(counters.disk.bytes <= 300);
                let sum: u64 = tiers.entries.values().map(|entry| entry.bytes).sum();
                let levels = counters.device.bytes + counters.host.bytes + counters.disk.bytes;
                prop_assert_eq!(sum, levels);
            }
        }
    }
}
