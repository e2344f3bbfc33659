//! Which objects go down a level when there is no room: the least recently used that nobody pins.
//!
//! Pure: it counts bytes and names moves; the store makes them.
//!
//! *Invariant:* the bytes of a level are the sum of its objects' bytes, and stay within its limit.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use crate::wire::tasks::{Counters, Level, ObjectId};

/// A level of memory, the fastest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// Device memory.
    Device,
    /// Host memory.
    Host,
    /// A file.
    Disk,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Place::Device => "device memory",
            Place::Host => "host memory",
            Place::Disk => "disk",
        })
    }
}

/// There is no room at a level, and nothing there may go.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "no room for {asked_bytes} bytes in {place}: {used_bytes} of {limit_bytes} are used, \
     {pinned_bytes} of them by running tasks"
)]
pub struct NoRoom {
    /// The level.
    pub place: Place,
    /// What was asked for.
    pub asked_bytes: u64,
    /// The level's limit.
    pub limit_bytes: u64,
    /// What is used of it.
    pub used_bytes: u64,
    /// What of that cannot go.
    pub pinned_bytes: u64,
}

/// An object goes from one level to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Move {
    pub(super) object: ObjectId,
    pub(super) from: Place,
    pub(super) to: Place,
}

struct Entry {
    bytes: u64,
    place: Place,
    /// Where it was made, and where it comes back to.
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
    counters: Level,
}

/// The levels and what lies on them.
pub(super) struct Ladder {
    entries: HashMap<ObjectId, Entry>,
    shelves: [Shelf; 3],
    clock: u64,
}

impl Ladder {
    /// Limits in bytes; `None` for none.
    pub(super) fn new(device: Option<u64>, host: Option<u64>, disk: Option<u64>) -> Self {
        let shelf = |limit| Shelf { limit, ..Shelf::default() };
        Self {
            entries: HashMap::new(),
            shelves: [shelf(device), shelf(host), shelf(disk)],
            clock: 0,
        }
    }

    fn shelf(&mut self, place: Place) -> &mut Shelf {
        &mut self.shelves[place as usize]
    }

    pub(super) fn counters(&self) -> Counters {
        let [device, host, disk] = [0, 1, 2].map(|at: usize| self.shelves[at].counters);
        Counters { device, host, disk }
    }

    /// Where an object is, and where it belongs.
    pub(super) fn place(&self, object: ObjectId) -> Option<(Place, Place)> {
        self.entries.get(&object).map(|entry| (entry.place, entry.home))
    }

    pub(super) fn bytes(&self, object: ObjectId) -> u64 {
        self.entries.get(&object).map_or(0, |entry| entry.bytes)
    }

    /// The moves that make room for `bytes` at a level, in an order in which each has room itself.
    ///
    /// # Errors
    /// If all that may go is not enough.
    pub(super) fn room(&self, place: Place, bytes: u64) -> Result<Vec<Move>, NoRoom> {
        let mut moves = Vec::new();
        self.plan(place, bytes, &mut moves, &mut [0; 3])?;
        Ok(moves)
    }

    /// The moves that take at least `bytes` off a level, or `None` if nothing there may go.
    pub(super) fn shed(&self, place: Place, bytes: u64) -> Result<Option<Vec<Move>>, NoRoom> {
        let shelf = &self.shelves[place as usize];
        if shelf.movable.is_empty() {
            return Ok(None);
        }
        let all: u64 = shelf.movable.values().map(|object| self.bytes(*object)).sum();
        let mut moves = Vec::new();
        // As if the level were full up to here.
        let limit = Some(shelf.counters.bytes);
        self.plan_within(place, bytes.min(all), limit, &mut moves, &mut [0; 3])?;
        Ok(Some(moves))
    }

    fn plan(
        &self,
        place: Place,
        bytes: u64,
        moves: &mut Vec<Move>,
        coming: &mut [u64; 3],
    ) -> Result<(), NoRoom> {
        self.plan_within(place, bytes, self.shelves[place as usize].limit, moves, coming)
    }

    /// `coming` counts what the planned moves add to each level.
    fn plan_within(
        &self,
        place: Place,
        bytes: u64,
        limit: Option<u64>,
        moves: &mut Vec<Move>,
        coming: &mut [u64; 3],
    ) -> Result<(), NoRoom> {
        let shelf = &self.shelves[place as usize];
        let used = shelf.counters.bytes + coming[place as usize];
        let Some(limit) = limit else { return Ok(()) };
        let mut excess = used.saturating_add(bytes).saturating_sub(limit);
        if excess == 0 {
            return Ok(());
        }
        let movable: u64 = shelf.movable.values().map(|object| self.bytes(*object)).sum();
        if bytes > limit || movable < excess || place == Place::Disk {
            return Err(NoRoom {
                place,
                asked_bytes: bytes,
                limit_bytes: limit,
                used_bytes: used,
                pinned_bytes: shelf.counters.bytes - movable,
            });
        }
        for &object in shelf.movable.values() {
            if excess == 0 {
                break;
            }
            let size = self.bytes(object);
            let to = self.level_for(place, size);
            if to == Place::Host {
                self.plan(to, size, moves, coming)?;
            } else {
                let disk = &self.shelves[Place::Disk as usize];
                let there = disk.counters.bytes + coming[2] + size;
                if let Some(limit_bytes) = disk.limit.filter(|limit| there > *limit) {
                    return Err(NoRoom {
                        place: Place::Disk,
                        asked_bytes: size,
                        limit_bytes,
                        used_bytes: disk.counters.bytes,
                        pinned_bytes: 0,
                    });
                }
            }
            coming[to as usize] += size;
            excess = excess.saturating_sub(size);
            moves.push(Move { object, from: place, to });
        }
        Ok(())
    }

    /// The level below that could ever hold so much.
    fn level_for(&self, place: Place, bytes: u64) -> Place {
        let host = &self.shelves[Place::Host as usize];
        let pinned = host.counters.bytes
            - host.movable.values().map(|object| self.bytes(*object)).sum::<u64>();
        let fits = host.limit.is_none_or(|limit| bytes + pinned <= limit / 2);
        if place == Place::Device && fits { Place::Host } else { Place::Disk }
    }

    /// An object has come; room was made before.
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
            shelf.movable.insert(used, object);
        }
    }

    fn depart(&mut self, bytes: u64, place: Place, used: u64) {
        let shelf = self.shelf(place);
        shelf.counters.objects -= 1;
        shelf.counters.bytes -= bytes;
        shelf.movable.remove(&used);
    }

    /// A move has been made.
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

    /// An object is used and stays where it is.
    pub(super) fn pin(&mut self, object: ObjectId) {
        let Some(entry) = self.entries.get_mut(&object) else { return };
        self.clock += 1;
        let before = std::mem::replace(&mut entry.used, self.clock);
        entry.pins += 1;
        let place = entry.place;
        self.shelf(place).movable.remove(&before);
    }

    /// An object stays where it is without being used: it is being copied.
    pub(super) fn hold(&mut self, object: ObjectId) {
        let Some(entry) = self.entries.get_mut(&object) else { return };
        entry.pins += 1;
        let (place, used) = (entry.place, entry.used);
        self.shelf(place).movable.remove(&used);
    }

    /// Whether nobody pins an object, and a level has room for it.
    pub(super) fn may_go(&self, object: ObjectId, to: Place) -> bool {
        let shelf = &self.shelves[to as usize];
        self.entries.get(&object).is_some_and(|entry| {
            let there = shelf.counters.bytes + entry.bytes;
            entry.pins == 0 && entry.place < to && shelf.limit.is_none_or(|limit| there <= limit)
        })
    }

    /// One use of an object is over.
    pub(super) fn unpin(&mut self, object: ObjectId) {
        let Some(entry) = self.entries.get_mut(&object) else { return };
        entry.pins = entry.pins.saturating_sub(1);
        if entry.pins == 0 {
            let (place, used) = (entry.place, entry.used);
            self.shelf(place).movable.insert(used, object);
        }
    }

    pub(super) fn remove(&mut self, object: ObjectId) {
        if let Some(entry) = self.entries.remove(&object) {
            self.depart(entry.bytes, entry.place, entry.used);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn id(number: u64) -> ObjectId {
        ObjectId::new(1, number)
    }

    fn add(ladder: &mut Ladder, object: u64, bytes: u64, place: Place) -> Result<(), NoRoom> {
        for step in ladder.room(place, bytes)? {
            ladder.moved(step.object, step.to);
        }
        ladder.insert(id(object), bytes, place);
        Ok(())
    }

    #[test]
    fn the_least_recently_used_goes_first_and_pinned_ones_stay() {
        let mut ladder = Ladder::new(Some(30), None, None);
        for object in 0..3 {
            add(&mut ladder, object, 10, Place::Device).expect("fits");
        }
        ladder.pin(id(0));
        ladder.pin(id(1));
        ladder.unpin(id(1));
        let moves = ladder.room(Place::Device, 10).expect("one may go");
        let gone = Move { object: id(2), from: Place::Device, to: Place::Host };
        assert_eq!(moves, [gone]);
        let error = ladder.room(Place::Device, 25).expect_err("one is pinned");
        assert_eq!((error.place, error.pinned_bytes), (Place::Device, 10));
    }

    #[test]
    fn what_goes_to_a_full_host_pushes_others_to_the_disk_before_it() {
        let mut ladder = Ladder::new(Some(10), Some(20), None);
        add(&mut ladder, 0, 10, Place::Device).expect("fits");
        add(&mut ladder, 1, 10, Place::Device).expect("fits after a move");
        add(&mut ladder, 2, 10, Place::Device).expect("fits after a move");
        let moves = ladder.room(Place::Device, 10).expect("fits after two moves");
        let places: Vec<(ObjectId, Place)> = moves.iter().map(|m| (m.object, m.to)).collect();
        assert_eq!(places, [(id(0), Place::Disk), (id(2), Place::Host)]);
    }

    proptest! {
        #[test]
        fn no_level_ever_holds_more_than_its_limit(
            steps in proptest::collection::vec((0u64..20, 1u64..40, 0u8..5), 1..200),
        ) {
            let mut ladder = Ladder::new(Some(100), Some(150), Some(300));
            let mut pins: BTreeMap<u64, u32> = BTreeMap::new();
            for (object, bytes, what) in steps {
                match what {
                    0 | 1 => {
                        let place = if what == 0 { Place::Device } else { Place::Host };
                        if ladder.place(id(object)).is_none() {
                            let _ = add(&mut ladder, object, bytes, place);
                        }
                    }
                    2 => {
                        if ladder.place(id(object)).is_some() {
                            ladder.pin(id(object));
                            *pins.entry(object).or_default() += 1;
                        }
                    }
                    3 => {
                        if let Some(count) = pins.get_mut(&object).filter(|count| **count > 0) {
                            *count -= 1;
                            ladder.unpin(id(object));
                        }
                    }
                    _ => {
                        pins.remove(&object);
                        ladder.remove(id(object));
                    }
                }
                let counters = ladder.counters();
                prop_assert!(counters.device.bytes <= 100);
                prop_assert!(counters.host.bytes <= 150);
                prop_assert!(counters.disk.bytes <= 300);
                let sum: u64 = ladder.entries.values().map(|entry| entry.bytes).sum();
                let levels = counters.device.bytes + counters.host.bytes + counters.disk.bytes;
                prop_assert_eq!(sum, levels);
            }
        }
    }
}
