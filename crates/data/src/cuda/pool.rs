//! A pool of device memory: large slabs from the driver, handed out in small pieces.
//!
//! Each allocation of the driver has a handle that every peer must open and map, and UCX keeps what
//! it has mapped, up to a limit ([`Sizes::mapped_by_each_bytes`]). What a peer has mapped stays on
//! the GPU even when it is freed (openucx/ucx#11288, #4410). So objects are cut from slabs of few
//! sizes, and idle slabs are kept for the next objects until the memory is needed.
//! Pure: the caller allocates and frees the slabs.
//!
//! *Invariant:* pieces in use do not overlap and lie within their slab; no two holes of a slab are
//! adjacent; `by_length` has each hole once; a pool never holds more than its maximum.

use std::collections::{BTreeMap, BTreeSet};

/// The driver's alignment of allocations, in bytes.
const ALIGNMENT: u64 = 512;

/// The unit in which the driver maps memory, in bytes.
const UNIT: u64 = 2 << 20;

/// The usual length of a slab, in bytes: a power of two, as all lengths are but the initial one and
/// those that are cut short by too little memory.
const SLAB: u64 = 64 << 20;

/// A slab is at most this fraction of the device's memory.
const SHARE: u64 = 64;

/// One allocation of the driver.
#[derive(Debug)]
struct Slab {
    bytes: u64,
    /// Bytes in use.
    used: u64,
    /// Lengths of the free ranges, by address.
    holes: BTreeMap<u64, u64>,
    /// Processes to which a piece of it was sent, so that they may have mapped it.
    readers: BTreeSet<u64>,
    /// Whether it stays until the end, being the pool's initial size.
    initial: bool,
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
    /// Most bytes that each peer keeps mapped (`UCX_CUDA_IPC_CACHE_MAX_SIZE`).
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

/// A slab that was given back to the driver while others may have it mapped.
#[derive(Debug)]
struct Freed {
    bytes: u64,
    readers: BTreeSet<u64>,
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
    /// Bytes that each peer may have mapped, including slabs that have been freed since.
    mapped: BTreeMap<u64, u64>,
    /// The oldest first: each peer unmaps them before what it has used since.
    freed: Vec<Freed>,
    /// The names of peers.
    names: BTreeMap<u64, String>,
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
            mapped: BTreeMap::new(),
            freed: Vec::new(),
            names: BTreeMap::new(),
        }
    }

    /// Sets the limits for what follows, and returns the length of the initial slab.
    pub(super) fn set_sizes(&mut self, sizes: Sizes) -> Option<u64> {
        self.sizes = sizes;
        let initial = sizes.initial_bytes.filter(|bytes| *bytes > 0)?;
        let whole = initial.checked_next_multiple_of(UNIT)?;
        // The maximum need not be a multiple of the driver's unit.
        Some(sizes.maximum_bytes.map_or(whole, |most| whole.min(most.max(initial))))
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

    fn add(&mut self, base: u64, bytes: u64, initial: bool) {
        let (holes, readers) = (BTreeMap::from([(base, bytes)]), BTreeSet::new());
        self.by_length.insert((bytes, base));
        self.held += bytes;
        self.slabs.insert(base, Slab { bytes, used: 0, holes, readers, initial });
    }

    /// Records that a piece is sent to another process, which maps its slab.
    pub(super) fn sent(&mut self, address: u64, to: u64, name: &str) {
        let Some((_, slab)) = self.slabs.range_mut(..=address).next_back() else { return };
        if !slab.readers.insert(to) {
            return;
        }
        self.names.entry(to).or_insert_with(|| name.to_owned());
        // A single slab may exceed the limit while it is read.
        let most = self.sizes.mapped_by_each_bytes.unwrap_or(u64::MAX).max(slab.bytes);
        let mapped = self.mapped.entry(to).or_default();
        let together = mapped.saturating_add(slab.bytes);
        *mapped = together.min(most);
        let mut unmapped = together - *mapped;
        for freed in &mut self.freed {
            if unmapped == 0 {
                break;
            }
            if freed.readers.remove(&to) {
                unmapped = unmapped.saturating_sub(freed.bytes);
            }
        }
        self.freed.retain(|freed| !freed.readers.is_empty());
    }

    /// Records that another process has ended, and its mappings with it.
    pub(super) fn lost(&mut self, peer: u64) {
        self.mapped.remove(&peer);
        self.names.remove(&peer);
        for slab in self.slabs.values_mut() {
            slab.readers.remove(&peer);
        }
        for freed in &mut self.freed {
            freed.readers.remove(&peer);
        }
        self.freed.retain(|freed| !freed.readers.is_empty());
    }

    /// Returns a piece to the pool.
    pub(super) fn give(&mut self, address: u64, bytes: u64) {
        let Some((_, slab)) = self.slabs.range_mut(..=address).next_back() else { return };
        let (mut start, mut length) = (address, bytes);
        slab.used -= bytes;
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
    }

    /// Removes idle slabs, for the caller to free, until they had this many bytes; but not the
    /// initial one. The smallest go first, as they are of use to the fewest pieces.
    pub(super) fn release(&mut self, bytes: u64, release: Release) -> Vec<u64> {
        let may_go = |slab: &Slab| match release {
            Release::Nothing => false,
            Release::Unmapped => slab.readers.is_empty(),
            Release::Mapped | Release::All => true,
        };
        let idle = self.slabs.iter().filter(|(_, slab)| slab.is_idle() && !slab.initial);
        let mut going: Vec<(bool, u64, u64)> = idle
            .filter(|(_, slab)| may_go(slab))
            .map(|(base, slab)| (!slab.readers.is_empty(), slab.bytes, *base))
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

    /// Removes every slab that is completely free, at the end.
    pub(super) fn close(&mut self) -> Vec<u64> {
        let idle = self.slabs.iter().filter(|(_, slab)| slab.is_idle());
        self.drop_slabs(idle.map(|(base, _)| *base).collect())
    }

    fn drop_slabs(&mut self, bases: Vec<u64>) -> Vec<u64> {
        for base in &bases {
            let Some(Slab { bytes, readers, .. }) = self.slabs.remove(base) else { continue };
            self.by_length.remove(&(bytes, *base));
            self.held -= bytes;
            if !readers.is_empty() {
                self.freed.push(Freed { bytes, readers });
            }
        }
        bases
    }

    pub(super) fn usage(&self) -> PoolUse {
        PoolUse {
            slabs: self.slabs.len(),
            held_bytes: self.held,
            used_bytes: self.slabs.values().map(|slab| slab.used).sum(),
            largest_free_bytes: self.by_length.last().map_or(0, |(length, _)| *length),
            mapped_by_peers_bytes: self.mapped.values().sum(),
            freed_but_mapped_bytes: self.freed.iter().map(|freed| freed.bytes).sum(),
            maximum_bytes: self.sizes.maximum_bytes,
        }
    }

    /// The peers that may still have mapped what was freed.
    pub(super) fn keepers(&self) -> Vec<String> {
        let all: BTreeSet<u64> =
            self.freed.iter().flat_map(|freed| freed.readers.iter().copied()).collect();
        all.iter().filter_map(|peer| self.names.get(peer).cloned()).collect()
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
        pool.sent(piece, 7, "gpu7");
        pool.give(piece, 64 << 20);
        assert_eq!(pool.usage().slabs, 4, "all are kept");
        let room = 60 << 20;
        assert_eq!(pool.lengths(32 << 20, Release::Nothing)[0], 32 << 20, "within what is usual");
        assert!(pool.lengths(room + 1, Release::Nothing).is_empty());
        assert_eq!(pool.release(9 << 20, Release::Nothing), [0u64; 0]);
        assert_eq!(pool.release(9 << 20, Release::Unmapped), [2 << 40, 4 << 40], "the smallest");
        assert_eq!(pool.lengths(room + 1, Release::Unmapped)[0], 64 << 20);
        assert_eq!(pool.release(1 << 40, Release::Unmapped), [3 << 40]);
        assert_eq!(pool.usage().freed_but_mapped_bytes, 0);
        assert_eq!(pool.release(1, Release::Mapped), [1 << 40]);
        let usage = pool.usage();
        assert_eq!((usage.held_bytes, usage.freed_but_mapped_bytes), (0, 64 << 20));
        assert_eq!(pool.keepers(), ["gpu7"]);
        pool.grow(5 << 40, 512 << 20);
        assert!(pool.lengths(1 << 30, Release::Mapped).is_empty());
        assert_eq!(pool.lengths(1 << 30, Release::All)[0], 1 << 30, "more than usual at last");
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
        assert_eq!(pool.usage().held_bytes, 64 << 20);
        assert_eq!(pool.close(), [1 << 40]);
        let all = Sizes { initial_bytes: Some(3), maximum_bytes: Some(3), ..Sizes::default() };
        assert_eq!(pool.set_sizes(all), Some(3), "never more than the maximum");
    }

    #[test]
    fn what_peers_have_mapped_is_counted_once_for_each_and_goes_with_them() {
        let mut pool = Pool::new(80 << 30);
        let bound = Sizes { mapped_by_each_bytes: Some(5 << 20), ..Sizes::default() };
        assert_eq!(pool.set_sizes(bound), None);
        let mapped = |pool: &Pool| pool.usage().mapped_by_peers_bytes >> 20;
        pool.grow(1 << 40, 4 << 20);
        let piece = pool.take(512).expect("room");
        for peer in [7, 8, 7] {
            pool.sent(piece, peer, &format!("gpu{peer}"));
        }
        assert_eq!(mapped(&pool), 8);
        pool.give(piece, 512);
        assert_eq!(pool.release(1, Release::Mapped), [1 << 40]);
        assert_eq!(mapped(&pool), 8, "UCX keeps what it has mapped");
        assert_eq!(pool.keepers(), ["gpu7", "gpu8"]);
        pool.grow(2 << 40, 4 << 20);
        let piece = pool.take(512).expect("room");
        pool.sent(piece, 7, "gpu7");
        assert_eq!(mapped(&pool), 9, "up to its limit for each");
        assert_eq!(pool.keepers(), ["gpu8"], "beyond it, the oldest goes");
        assert_eq!(pool.usage().freed_but_mapped_bytes, 4 << 20, "until nobody has it");
        pool.lost(8);
        assert_eq!(pool.usage().freed_but_mapped_bytes, 0);
        assert_eq!(mapped(&pool), 5);
        pool.lost(7);
        assert_eq!(mapped(&pool), 0);
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
                let PoolUse { held_bytes, used_bytes, largest_free_bytes, .. } = pool.usage();
                prop_assert_eq!(used_bytes, out.values().sum::<u64>());
                prop_assert!(held_bytes >= used_bytes + largest_free_bytes);
            }
            for (at, bytes) in out {
                pool.give(at, bytes);
            }
            pool.release(0, Release::All);
            prop_assert_eq!(pool.usage(), PoolUse::default());
            prop_assert!(pool.by_length.is_empty());
        }
    }
}
