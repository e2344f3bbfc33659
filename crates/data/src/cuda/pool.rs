//! A pool of device memory: large slabs from the driver, handed out in small pieces.
//!
//! Each allocation of the driver has a handle that every peer must open and map, and what a peer
//! has mapped stays on the GPU even when it is freed ([`mappings`](super::mappings)). So objects
//! are cut from slabs of few sizes, and idle slabs are kept for the next objects until the memory
//! is needed; when nothing at all has been in use for a while, those go back that nobody has
//! mapped.
//! Pure: the caller allocates and frees the slabs, and tells the time.
//!
//! *Invariant:* pieces in use do not overlap and lie within their slab; no two holes of a slab are
//! adjacent; `by_length` has each hole once; a pool never holds more than its maximum.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::mappings::{Mappings, SlabNumber, Way};

/// The driver's alignment of allocations, in bytes.
const ALIGNMENT: u64 = 512;

/// The unit in which the driver maps memory, in bytes.
const UNIT: u64 = 2 << 20;

/// The usual length of a slab, in bytes: a power of two, as all lengths are but the initial one and
/// those that are cut short by too little memory.
const SLAB: u64 = 64 << 20;

/// A slab is at most this fraction of the device's memory.
const SHARE: u64 = 64;

/// How long an idle pool keeps what nobody else has mapped: as long as freed host memory is kept
/// ([`crate::memory::spare`]).
const KEEP: Duration = Duration::from_secs(10);

/// How many slabs of the usual length an idle pool gives back at once.
const AT_ONCE: u64 = 8;

/// A slab that peers map for no other reason than what UCX then does with others: nothing is cut
/// from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pebble {
    /// What a peer maps first, which UCX up to 1.21 keeps until the end.
    First,
    /// What a peer maps to let go of larger memory.
    Last,
}

/// The length of a pebble, in bytes.
pub(super) const PEBBLE: u64 = UNIT;

/// One allocation of the driver.
#[derive(Debug)]
struct Slab {
    number: SlabNumber,
    bytes: u64,
    /// Bytes in use.
    used: u64,
    /// Lengths of the free ranges, by address.
    holes: BTreeMap<u64, u64>,
    /// Whether it stays until the end: the pool's initial size, or a pebble.
    stays: bool,
}

impl Slab {
    fn is_idle(&self) -> bool {
        self.used == 0
    }
}

/// Which idle slabs are given back to the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Release {
    Nothing,
    /// Those that nobody else has mapped, as many as are needed.
    Unmapped,
    /// Those that others may have mapped, too: their memory may stay on the device.
    Mapped,
    All,
}

impl Release {
    /// One after the other, if the device has no room.
    pub(super) const STEPS: [Self; 4] = [Self::Nothing, Self::Unmapped, Self::Mapped, Self::All];
}

/// The planned sizes of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    /// Bytes that are allocated at once and kept.
    pub initial_bytes: Option<u64>,
    /// Most bytes that it holds.
    pub maximum_bytes: Option<u64>,
    /// Bytes up to which it grows before it gives idle slabs back.
    pub usual_bytes: Option<u64>,
    /// Most bytes that each peer keeps mapped (`UCX_CUDA_IPC_CACHE_MAX_SIZE`); `None` for no limit.
    pub mapped_by_each_bytes: Option<u64>,
}

/// How much of a device's memory a pool has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolUse {
    /// Allocations of the driver.
    pub slabs: usize,
    /// Their bytes.
    pub held_bytes: u64,
    /// Bytes of them that are in use.
    pub used_bytes: u64,
    /// The largest piece that can be taken without another allocation.
    pub largest_free_bytes: u64,
    /// Most bytes that other processes have mapped, summed over them.
    pub mapped_by_peers_bytes: u64,
    /// Bytes that were given back to the driver, but that other processes may still have mapped.
    pub freed_but_mapped_bytes: u64,
    /// Most that the pool may hold, if that is limited.
    pub maximum_bytes: Option<u64>,
}

/// The slabs of one device.
#[derive(Debug)]
pub(super) struct Pool {
    slab: u64,
    slabs: BTreeMap<u64, Slab>,
    /// Length and address of each hole.
    by_length: BTreeSet<(u64, u64)>,
    held: u64,
    sizes: Sizes,
    /// The number of the next slab.
    next: SlabNumber,
    mappings: Mappings,
    /// Where the [pebbles](Pebble) lie.
    pebbles: BTreeMap<Pebble, u64>,
    /// When nothing was first seen to be in use, since it last was.
    idle_since: Option<Instant>,
}

/// A length rounded up so that every piece stays aligned; `None` beyond the address space.
pub(super) fn rounded(bytes: usize) -> Option<u64> {
    u64::try_from(bytes).ok()?.checked_next_multiple_of(ALIGNMENT)
}

impl Pool {
    /// A pool for a device with this much memory.
    pub(super) fn new(device_bytes: u64) -> Self {
        let most = (device_bytes / SHARE).clamp(UNIT, SLAB);
        Self {
            slab: 1 << most.ilog2(),
            slabs: BTreeMap::new(),
            by_length: BTreeSet::new(),
            held: 0,
            sizes: Sizes::default(),
            next: 0,
            mappings: Mappings::default(),
            pebbles: BTreeMap::new(),
            idle_since: None,
        }
    }

    /// Sets the limits for what follows, and returns the length of the initial slab.
    pub(super) fn set_sizes(&mut self, sizes: Sizes) -> Option<u64> {
        self.sizes = sizes;
        self.mappings.set_limit(sizes.mapped_by_each_bytes);
        let initial = sizes.initial_bytes.filter(|bytes| *bytes > 0)?;
        let whole = initial.checked_next_multiple_of(UNIT)?;
        // The maximum need not be a multiple of the driver's unit.
        Some(sizes.maximum_bytes.map_or(whole, |most| whole.min(most.max(initial))))
    }

    /// What others may have mapped.
    pub(super) fn mappings(&mut self) -> &mut Mappings {
        &mut self.mappings
    }

    /// Bytes that may be added.
    pub(super) fn room(&self) -> u64 {
        self.sizes.maximum_bytes.map_or(u64::MAX, |most| most.saturating_sub(self.held))
    }

    /// Takes a piece of a [rounded] length from the smallest hole that has room, so that large
    /// holes stay large.
    pub(super) fn take(&mut self, bytes: u64) -> Option<u64> {
        let (length, address) = *self.by_length.range((bytes, 0)..).next()?;
        let (_, slab) = self.slabs.range_mut(..=address).next_back()?;
        slab.holes.remove(&address);
        self.by_length.remove(&(length, address));
        if length > bytes {
            slab.holes.insert(address + bytes, length - bytes);
            self.by_length.insert((length - bytes, address + bytes));
        }
        slab.used += bytes;
        self.idle_since = None;
        Some(address)
    }

    /// The lengths of a slab to ask the driver for, one after the other, if it must hold a piece of
    /// this length: one of few, so that later pieces fit into it, too, or just what is needed.
    pub(super) fn lengths(&self, bytes: u64, release: Release) -> Vec<u64> {
        let usual = if bytes <= self.slab / 4 {
            Some(self.slab)
        } else {
            bytes.checked_next_power_of_two().map(|length| length.max(self.slab))
        };
        let room = match (release, self.sizes.usual_bytes) {
            (Release::All, _) | (_, None) => self.room(),
            (_, Some(usual)) => self.room().min(usual.saturating_sub(self.held)),
        };
        // The maximum need not be a multiple of the driver's unit.
        let lengths = [usual, bytes.checked_next_multiple_of(UNIT), Some(bytes)];
        lengths.into_iter().flatten().filter(|length| *length <= room).collect()
    }

    /// Adds a slab.
    pub(super) fn grow(&mut self, base: u64, bytes: u64) {
        self.add(base, bytes, false);
    }

    /// Adds the slab that stays.
    pub(super) fn begin(&mut self, base: u64, bytes: u64) {
        self.add(base, bytes, true);
    }

    fn add(&mut self, base: u64, bytes: u64, stays: bool) {
        self.add_slab(base, bytes, BTreeMap::from([(base, bytes)]), stays);
        self.by_length.insert((bytes, base));
    }

    fn add_slab(&mut self, base: u64, bytes: u64, holes: BTreeMap<u64, u64>, stays: bool) {
        self.held += bytes;
        let number = self.next;
        self.next += 1;
        self.slabs.insert(base, Slab { number, bytes, used: 0, holes, stays });
    }

    /// Lends a pebble, if there is one, until it is [given](Self::give) back, also several times at
    /// once.
    pub(super) fn lend_pebble(&mut self, which: Pebble, bytes: u64) -> Option<u64> {
        let base = *self.pebbles.get(&which)?;
        self.slabs.get_mut(&base)?.used += bytes;
        Some(base)
    }

    /// Adds a pebble, which has no holes.
    pub(super) fn add_pebble(&mut self, which: Pebble, base: u64) {
        self.add_slab(base, PEBBLE, BTreeMap::new(), true);
        self.pebbles.insert(which, base);
    }

    /// Records that a piece is sent to another process or received from it, which maps its slab.
    pub(super) fn exchanged(&mut self, address: u64, with: u64, way: Way) {
        let Some((_, slab)) = self.slabs.range(..=address).next_back() else { return };
        self.mappings.exchanged((slab.number, slab.bytes), with, way);
    }

    /// Returns a piece to the pool.
    pub(super) fn give(&mut self, address: u64, bytes: u64) {
        let Some((base, slab)) = self.slabs.range_mut(..=address).next_back() else { return };
        let (mut start, mut length) = (address, bytes);
        slab.used -= bytes;
        if self.pebbles.values().any(|pebble| pebble == base) {
            return;
        }
        if let Some(after) = slab.holes.remove(&(start + length)) {
            self.by_length.remove(&(after, start + length));
            length += after;
        }
        if let Some((before, long)) = slab.holes.range(..start).next_back().map(|(a, l)| (*a, *l))
            && before + long == start
        {
            self.by_length.remove(&(long, before));
            (start, length) = (before, long + length);
        }
        slab.holes.insert(start, length);
        self.by_length.insert((length, start));
        if slab.is_idle() && !slab.stays {
            self.mappings.idle(slab.number, slab.bytes);
        }
    }

    /// Removes idle slabs, for the caller to free, until they had this many bytes; but not those
    /// that stay. The smallest go first, as they are of use to the fewest pieces.
    pub(super) fn release(&mut self, bytes: u64, release: Release) -> Vec<u64> {
        let may_go = |slab: &Slab| match release {
            Release::Nothing => false,
            Release::Unmapped => !self.mappings.has(slab.number),
            Release::Mapped | Release::All => true,
        };
        let idle = self.slabs.iter().filter(|(_, slab)| slab.is_idle() && !slab.stays);
        let mut going: Vec<(bool, u64, u64)> = idle
            .filter(|(_, slab)| may_go(slab))
            .map(|(base, slab)| (self.mappings.has(slab.number), slab.bytes, *base))
            .collect();
        going.sort_unstable();
        let mut released = 0;
        going.retain(|(_, length, _)| {
            let goes = release == Release::All || released < bytes;
            released += if goes { *length } else { 0 };
            goes
        });
        self.drop_slabs(going.into_iter().map(|(.., base)| base).collect())
    }

    /// Whether nothing has been in use for so long that [`Self::trim`] has something to give back.
    /// To be asked now and then.
    pub(super) fn is_to_shrink(&mut self, now: Instant) -> bool {
        if !self.slabs.values().all(Slab::is_idle) {
            return false;
        }
        let since = *self.idle_since.get_or_insert(now);
        let is_for_none = |slab: &Slab| !slab.stays && !self.mappings.has(slab.number);
        now.saturating_duration_since(since) >= KEEP
            && (self.slabs.values().any(is_for_none) || self.mappings.stays())
    }

    /// Removes slabs, for the caller to free, that nobody has mapped, if nothing has been in use
    /// for a while: a few, because freeing takes time. Until there are none.
    ///
    /// If peers have yet kept what was given back, they get a new pebble: they may have kept the
    /// one that there was, and would not map it again.
    pub(super) fn trim(&mut self, now: Instant) -> Vec<u64> {
        if !self.is_to_shrink(now) {
            return Vec::new();
        }
        let mut going = self.release(self.slab * AT_ONCE, Release::Unmapped);
        if self.mappings.stays() {
            self.mappings.tell_again();
            let pebble = self.pebbles.get(&Pebble::Last).copied();
            going.extend(self.drop_slabs(pebble.into_iter().collect()));
        }
        going
    }

    /// Removes every slab that is completely free, at the end.
    pub(super) fn close(&mut self) -> Vec<u64> {
        let idle = self.slabs.iter().filter(|(_, slab)| slab.is_idle());
        self.drop_slabs(idle.map(|(base, _)| *base).collect())
    }

    fn drop_slabs(&mut self, bases: Vec<u64>) -> Vec<u64> {
        for base in &bases {
            let Some(Slab { number, bytes, .. }) = self.slabs.remove(base) else { continue };
            self.pebbles.retain(|_, pebble| pebble != base);
            self.by_length.remove(&(bytes, *base));
            self.held -= bytes;
            self.mappings.freed(number, bytes);
        }
        bases
    }

    /// Its use, if the device has so many bytes in use, the pool's and others'.
    pub(super) fn usage(&mut self, in_use: u64) -> PoolUse {
        self.mappings.at_most(in_use.saturating_sub(self.held));
        PoolUse {
            slabs: self.slabs.len(),
            held_bytes: self.held,
            used_bytes: self.slabs.values().map(|slab| slab.used).sum(),
            largest_free_bytes: self.by_length.last().map_or(0, |(length, _)| *length),
            mapped_by_peers_bytes: self.mappings.bytes(),
            freed_but_mapped_bytes: self.mappings.freed_bytes(),
            maximum_bytes: self.sizes.maximum_bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A pool with slabs of these lengths in MiB, each at its number in TiB.
    fn with_slabs(lengths: &[u64]) -> Pool {
        let mut pool = Pool::new(80 << 30);
        for (number, length) in (1..).zip(lengths) {
            pool.grow(number << 40, length << 20);
        }
        pool
    }

    fn next_slab(pool: &Pool, bytes: u64) -> u64 {
        pool.lengths(bytes, Release::Nothing)[0]
    }

    #[test]
    fn slabs_have_few_lengths() {
        let pool = Pool::new(80 << 30);
        assert_eq!(next_slab(&pool, 512), 64 << 20);
        assert_eq!(next_slab(&pool, (16 << 20) + 512), 64 << 20);
        assert_eq!(next_slab(&pool, (64 << 20) + 512), 128 << 20);
        assert_eq!(next_slab(&Pool::new(100 << 20), 512), 1 << 20 << 1, "a small GPU's are small");
        let lengths = pool.lengths((64 << 20) + 512, Release::Nothing);
        assert_eq!(lengths, [128 << 20, 66 << 20, (64 << 20) + 512], "or just what is needed");
    }

    #[test]
    fn idle_slabs_are_kept_until_their_memory_is_needed_those_that_others_have_mapped_the_longest()
    {
        let mut pool = with_slabs(&[64, 4, 64, 8]);
        let sizes = Sizes { usual_bytes: Some(200 << 20), ..Sizes::default() };
        assert_eq!(pool.set_sizes(sizes), None);
        let piece = pool.take(64 << 20).expect("room");
        pool.exchanged(piece, 7, Way::Sent);
        pool.give(piece, 64 << 20);
        assert_eq!(pool.usage(u64::MAX).slabs, 4, "all are kept");
        let room = 60 << 20;
        assert_eq!(pool.lengths(32 << 20, Release::Nothing)[0], 32 << 20, "within what is usual");
        assert!(pool.lengths(room + 1, Release::Nothing).is_empty());
        assert_eq!(pool.release(9 << 20, Release::Nothing), [0u64; 0]);
        assert_eq!(pool.release(9 << 20, Release::Unmapped), [2 << 40, 4 << 40], "the smallest");
        assert_eq!(pool.lengths(room + 1, Release::Unmapped)[0], 64 << 20);
        assert_eq!(pool.release(1 << 40, Release::Unmapped), [3 << 40]);
        assert_eq!(pool.usage(u64::MAX).freed_but_mapped_bytes, 0);
        assert_eq!(pool.release(1, Release::Mapped), [1 << 40]);
        let usage = pool.usage(u64::MAX);
        assert_eq!((usage.held_bytes, usage.freed_but_mapped_bytes), (0, 64 << 20));
        pool.grow(5 << 40, 512 << 20);
        assert!(pool.lengths(1 << 30, Release::Mapped).is_empty());
        assert_eq!(pool.lengths(1 << 30, Release::All)[0], 1 << 30, "more than usual at last");
    }

    #[test]
    fn an_idle_pool_gives_back_what_nobody_has_mapped() {
        let mut pool = with_slabs(&[64, 64]);
        let [mine, sent] = [(); 2].map(|()| pool.take(64 << 20).expect("room"));
        pool.exchanged(sent, 7, Way::Sent);
        pool.give(sent, 64 << 20);
        let start = Instant::now();
        assert!(!pool.is_to_shrink(start + KEEP), "something is in use");
        pool.give(mine, 64 << 20);
        assert!(!pool.is_to_shrink(start), "just now");
        let piece = pool.take(512).expect("room");
        pool.give(piece, 512);
        assert!(!pool.is_to_shrink(start + KEEP), "used meanwhile");
        assert_eq!(pool.trim(start + KEEP), [0u64; 0]);
        assert!(pool.is_to_shrink(start + 2 * KEEP));
        assert_eq!(pool.trim(start + 2 * KEEP).len(), 1);
        assert!(!pool.is_to_shrink(start + 9 * KEEP), "the other one would not become free");
        pool.mappings().lost(7);
        assert_eq!(pool.trim(start + 9 * KEEP).len(), 1);
        assert_eq!(pool.usage(u64::MAX), PoolUse::default());
    }

    #[test]
    fn objects_that_come_and_go_need_no_new_slabs() {
        let mut pool = Pool::new(80 << 30);
        let (mut slabs, mut taken) = (0u64, 0);
        for bytes in [32u64 << 20, 64 << 20, 100 << 20, 1 << 30] {
            let mut stages = [[None; 8], [None; 8]];
            for stage in 0..100 {
                for place in &mut stages[stage % 2] {
                    if let Some(piece) = place.take() {
                        pool.give(piece, bytes);
                    }
                    taken += 1;
                    *place = pool.take(bytes).or_else(|| {
                        slabs += 1;
                        pool.grow(slabs << 40, next_slab(&pool, bytes));
                        pool.take(bytes)
                    });
                }
            }
            for piece in stages.into_iter().flatten().flatten() {
                pool.give(piece, bytes);
            }
        }
        assert!(slabs * 100 <= taken * 2, "{slabs} slabs for {taken} objects");
    }

    #[test]
    fn the_initial_slab_stays_until_the_end_and_the_maximum_limits_the_rest() {
        let mut pool = Pool::new(80 << 30);
        let sizes = Sizes {
            initial_bytes: Some((64 << 20) - 1),
            maximum_bytes: Some(100 << 20),
            ..Sizes::default()
        };
        assert_eq!(pool.set_sizes(sizes), Some(64 << 20));
        pool.begin(1 << 40, 64 << 20);
        let piece = pool.take(64 << 20).expect("room");
        assert_eq!(pool.room(), 36 << 20);
        pool.give(piece, 64 << 20);
        assert_eq!(pool.release(1, Release::All), [0u64; 0]);
        assert_eq!(pool.usage(u64::MAX).held_bytes, 64 << 20);
        assert_eq!(pool.close(), [1 << 40]);
        let all = Sizes { initial_bytes: Some(3), maximum_bytes: Some(3), ..Sizes::default() };
        assert_eq!(pool.set_sizes(all), Some(3), "never more than the maximum");
    }

    #[test]
    fn nothing_is_cut_from_a_pebble_and_it_stays_until_the_end() {
        let mut pool = with_slabs(&[64]);
        let limit = Some(32 << 20);
        pool.set_sizes(Sizes { mapped_by_each_bytes: limit, ..Sizes::default() });
        let piece = pool.take(512).expect("room");
        pool.exchanged(piece, 7, Way::Sent);
        assert!(!pool.mappings().is_beyond(), "it is in use");
        pool.give(piece, 512);
        assert_eq!(pool.mappings().take_beyond(), [7]);
        assert_eq!(pool.lend_pebble(Pebble::Last, 512), None);
        pool.add_pebble(Pebble::Last, 9 << 40);
        let pebbles = [Pebble::First, Pebble::Last].map(|which| pool.lend_pebble(which, 512));
        assert_eq!(pebbles, [None, Some(9 << 40)]);
        assert_eq!(pool.usage(u64::MAX).used_bytes, 512);
        pool.give(9 << 40, 512);
        pool.exchanged(9 << 40, 7, Way::Sent);
        assert_eq!(pool.release(1 << 40, Release::Unmapped), [1 << 40], "peer 7 has let go of it");
        assert_eq!(pool.release(1 << 40, Release::All), [0u64; 0]);
        assert_eq!(pool.take(512), None);
        let usage = pool.usage(u64::MAX);
        assert_eq!((usage.held_bytes, usage.used_bytes, usage.largest_free_bytes), (PEBBLE, 0, 0));
        assert_eq!(pool.close(), [9 << 40]);
    }

    #[test]
    fn who_has_kept_what_an_idle_pool_gave_back_gets_another_pebble() {
        let mut pool = Pool::new(1 << 30);
        pool.mappings().set_limit(Some(16 << 20));
        pool.add_pebble(Pebble::Last, 9 << 40);
        pool.grow(1 << 40, 64 << 20);
        let piece = pool.take(64 << 20).expect("room");
        pool.exchanged(piece, 7, Way::Sent);
        pool.give(piece, 64 << 20);
        assert_eq!(pool.mappings().take_beyond(), [7]);
        let pebble = pool.lend_pebble(Pebble::Last, 512).expect("it is there");
        pool.exchanged(pebble, 7, Way::Sent);
        let begin = Instant::now();
        let later = begin + KEEP;
        assert!(!pool.is_to_shrink(begin) && !pool.is_to_shrink(later), "a pebble is on its way");
        pool.give(pebble, 512);
        assert!(!pool.is_to_shrink(later));
        let later = later + KEEP;
        assert_eq!(pool.trim(later), [1 << 40]);
        assert!(!pool.is_to_shrink(later), "nobody knows whether it is mapped");
        pool.usage(PEBBLE + (64 << 20));
        assert_eq!(pool.trim(later), [9 << 40]);
        assert_eq!(pool.mappings().take_beyond(), [7]);
        assert!(!pool.is_to_shrink(later), "once");
    }

    proptest! {
        #[test]
        fn pieces_never_overlap_and_all_that_was_taken_comes_back(
            steps in proptest::collection::vec((any::<bool>(), 1usize..8 << 20), 1..120),
        ) {
            let mut pool = Pool::new(1 << 30);
            let mut out: BTreeMap<u64, u64> = BTreeMap::new();
            let mut next = 1u64 << 40;
            for (takes, number) in steps {
                if takes {
                    let bytes = rounded(number).expect("small");
                    let at = pool.take(bytes).unwrap_or_else(|| {
                        pool.grow(next, next_slab(&pool, bytes));
                        next += 1 << 32;
                        pool.take(bytes).expect("a slab has room for what it was made for")
                    });
                    prop_assert_eq!(at % ALIGNMENT, 0);
                    let before = out.range(..=at).next_back();
                    prop_assert!(before.is_none_or(|(start, length)| start + length <= at));
                    let after = out.range(at..).next();
                    prop_assert!(after.is_none_or(|(start, _)| at + bytes <= *start));
                    out.insert(at, bytes);
                } else if let Some(at) = out.keys().nth(number % out.len().max(1)).copied() {
                    let bytes = out.remove(&at).expect("out");
                    pool.give(at, bytes);
                    for freed in pool.release(1 << (number % 24), Release::STEPS[number % 4]) {
                        prop_assert!(!out.keys().any(|piece| piece >> 32 == freed >> 32));
                    }
                }
                let holes: Vec<(u64, u64)> =
                    pool.slabs.values().flat_map(|slab| &slab.holes).map(|(a, l)| (*l, *a)).collect();
                prop_assert_eq!(holes.iter().copied().collect::<BTreeSet<_>>(), pool.by_length.clone());
                prop_assert_eq!(pool.held, pool.slabs.values().map(|slab| slab.bytes).sum::<u64>());
                let PoolUse { held_bytes, used_bytes, largest_free_bytes, .. } = pool.usage(u64::MAX);
                prop_assert_eq!(used_bytes, out.values().sum::<u64>());
                prop_assert!(held_bytes >= used_bytes + largest_free_bytes);
            }
            for (at, bytes) in out {
                pool.give(at, bytes);
            }
            pool.release(0, Release::All);
            prop_assert_eq!(pool.usage(u64::MAX), PoolUse::default());
            prop_assert!(pool.by_length.is_empty());
        }
    }
}
