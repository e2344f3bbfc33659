//! A pool of device memory: large slabs from the driver, handed out in small pieces.
//!
//! Each allocation of the driver has a handle that every peer must open and map, and UCX keeps what
//! it has mapped, up to a limit ([`Sizes::mapped_by_each_bytes`]). So objects are cut from slabs.
//! Pure: the caller allocates and frees the slabs.
//!
//! *Invariant:* pieces in use do not overlap and lie within their slab; no two holes of a slab are
//! adjacent; a pool never holds more than its maximum.

use std::collections::{BTreeMap, BTreeSet};

/// The driver's alignment of allocations, in bytes.
const ALIGNMENT: u64 = 512;

/// The unit in which the driver maps memory, in bytes.
const UNIT: u64 = 2 << 20;

/// The usual length of a slab, in bytes.
const SLAB: u64 = 64 << 20;

/// A slab is at most this fraction of the device's memory.
const SHARE: u64 = 64;

/// One allocation of the driver.
#[derive(Debug)]
struct Slab {
    bytes: u64,
    /// Bytes in use.
    used: u64,
    /// Lengths of the free ranges, by offset.
    holes: BTreeMap<u64, u64>,
    /// Processes to which a piece of it was sent, so that they may have mapped it.
    readers: BTreeSet<u64>,
    /// Whether it stays until the end, being the pool's initial size.
    initial: bool,
}

/// The planned sizes of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    /// Bytes that are allocated at once and kept.
    pub initial_bytes: Option<u64>,
    /// Most bytes that it holds.
    pub maximum_bytes: Option<u64>,
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
    /// Most that the pool may hold, if that is limited.
    pub maximum_bytes: Option<u64>,
}

/// The slabs of one device.
#[derive(Debug)]
pub(super) struct Pool {
    slab: u64,
    slabs: BTreeMap<u64, Slab>,
    /// Bytes of slabs that are completely free and may be freed.
    idle: u64,
    sizes: Sizes,
    /// Bytes that each peer may have mapped, including slabs that have been freed since.
    mapped: BTreeMap<u64, u64>,
}

/// A length rounded up so that every piece stays aligned; `None` beyond the address space.
pub(super) fn rounded(bytes: usize) -> Option<u64> {
    u64::try_from(bytes).ok()?.checked_next_multiple_of(ALIGNMENT)
}

impl Pool {
    /// A pool for a device with this much memory.
    pub(super) fn new(device_bytes: u64) -> Self {
        let slab = (device_bytes / SHARE).clamp(UNIT, SLAB) / UNIT * UNIT;
        let (slabs, sizes, mapped) = (BTreeMap::new(), Sizes::default(), BTreeMap::new());
        Self { slab, slabs, idle: 0, sizes, mapped }
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
        self.sizes.maximum_bytes.map_or(u64::MAX, |most| most.saturating_sub(self.held()))
    }

    fn held(&self) -> u64 {
        self.slabs.values().map(|slab| slab.bytes).sum()
    }

    /// Takes a piece of a [rounded] length from the smallest hole that has room, so that large
    /// holes stay large.
    pub(super) fn take(&mut self, bytes: u64) -> Option<u64> {
        let holes = self.slabs.iter().flat_map(|(base, slab)| {
            slab.holes.iter().map(move |(offset, length)| (*length, *base, *offset))
        });
        let (length, base, offset) = holes.filter(|(length, ..)| *length >= bytes).min()?;
        let slab = self.slabs.get_mut(&base)?;
        slab.holes.remove(&offset);
        if length > bytes {
            slab.holes.insert(offset + bytes, length - bytes);
        }
        if slab.used == 0 && !slab.initial {
            self.idle -= slab.bytes;
        }
        slab.used += bytes;
        Some(base + offset)
    }

    /// The length of the next slab, if it must hold a piece of this length.
    pub(super) fn next_slab(&self, bytes: u64) -> u64 {
        if bytes > self.slab / 4 { bytes.next_multiple_of(UNIT) } else { self.slab }
    }

    /// Adds a slab.
    pub(super) fn grow(&mut self, base: u64, bytes: u64) {
        self.idle += bytes;
        self.add(base, bytes, false);
    }

    /// Adds the slab that stays.
    pub(super) fn begin(&mut self, base: u64, bytes: u64) {
        self.add(base, bytes, true);
    }

    fn add(&mut self, base: u64, bytes: u64, initial: bool) {
        let (holes, readers) = (BTreeMap::from([(0, bytes)]), BTreeSet::new());
        self.slabs.insert(base, Slab { bytes, used: 0, holes, readers, initial });
    }

    /// Records that a piece is sent to another process, which maps its slab.
    pub(super) fn sent(&mut self, address: u64, to: u64) {
        let Some((_, slab)) = self.slabs.range_mut(..=address).next_back() else { return };
        if slab.readers.insert(to) {
            let most = self.sizes.mapped_by_each_bytes.unwrap_or(u64::MAX);
            let mapped = self.mapped.entry(to).or_default();
            // A single slab may exceed the limit while it is read.
            *mapped = mapped.saturating_add(slab.bytes).min(most.max(slab.bytes));
        }
    }

    /// Records that another process has ended, and its mappings with it.
    pub(super) fn lost(&mut self, peer: u64) {
        self.mapped.remove(&peer);
        for slab in self.slabs.values_mut() {
            slab.readers.remove(&peer);
        }
    }

    /// Returns a piece to the pool. Returns a slab to be freed: the one that has become idle, if
    /// others are idle already.
    pub(super) fn give(&mut self, address: u64, bytes: u64) -> Option<u64> {
        let (base, slab) = self.slabs.range_mut(..=address).next_back()?;
        let (base, mut offset, mut length) = (*base, address - base, bytes);
        slab.used -= bytes;
        if let Some(after) = slab.holes.remove(&(offset + length)) {
            length += after;
        }
        if let Some((before, long)) = slab.holes.range(..offset).next_back()
            && before + long == offset
        {
            (offset, length) = (*before, long + length);
        }
        slab.holes.insert(offset, length);
        if slab.used > 0 || slab.initial {
            return None;
        }
        let kept = self.idle;
        self.idle += slab.bytes;
        (kept > 0).then(|| self.drop_slab(base)).flatten()
    }

    /// Removes every slab that is completely free, for the caller to free, but not the initial one.
    pub(super) fn shrink(&mut self) -> Vec<u64> {
        self.drop_idle(|slab| !slab.initial)
    }

    /// Removes every slab that is completely free, at the end.
    pub(super) fn close(&mut self) -> Vec<u64> {
        self.drop_idle(|_| true)
    }

    fn drop_idle(&mut self, wanted: impl Fn(&Slab) -> bool) -> Vec<u64> {
        let idle = self.slabs.iter().filter(|(_, slab)| slab.used == 0 && wanted(slab));
        let idle: Vec<u64> = idle.map(|(base, _)| *base).collect();
        idle.into_iter().filter_map(|base| self.drop_slab(base)).collect()
    }

    fn drop_slab(&mut self, base: u64) -> Option<u64> {
        let slab = self.slabs.remove(&base)?;
        if !slab.initial {
            self.idle -= slab.bytes;
        }
        Some(base)
    }

    pub(super) fn usage(&self) -> PoolUse {
        let slabs = || self.slabs.values();
        let holes = slabs().flat_map(|slab| slab.holes.values().copied());
        PoolUse {
            slabs: slabs().count(),
            held_bytes: self.held(),
            used_bytes: slabs().map(|slab| slab.used).sum(),
            largest_free_bytes: holes.max().unwrap_or(0),
            mapped_by_peers_bytes: self.mapped.values().sum(),
            maximum_bytes: self.sizes.maximum_bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn small_pieces_share_a_slab_and_large_ones_have_their_own() {
        let pool = Pool::new(80 << 30);
        assert_eq!(pool.next_slab(512), 64 << 20);
        assert_eq!(pool.next_slab((16 << 20) + 512), 18 << 20);
        assert_eq!(Pool::new(100 << 20).next_slab(512), 2 << 20, "a small GPU has small slabs");
    }

    #[test]
    fn one_idle_slab_is_kept_and_more_are_freed() {
        let mut pool = Pool::new(80 << 30);
        pool.grow(1 << 40, 4 << 20);
        pool.grow(2 << 40, 4 << 20);
        let pieces = [0; 2].map(|_| pool.take(4 << 20).expect("room"));
        assert_eq!(pool.give(pieces[0], 4 << 20), None);
        assert_eq!(pool.give(pieces[1], 4 << 20), Some(2 << 40));
        assert_eq!(pool.take(512), Some(1 << 40));
        assert_eq!(pool.shrink(), [0u64; 0], "it is in use");
        assert_eq!(pool.give(1 << 40, 512), None);
        assert_eq!(pool.shrink(), [1 << 40]);
        assert_eq!(pool.usage(), PoolUse::default());
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
        assert_eq!(pool.give(piece, 64 << 20), None);
        assert_eq!(pool.shrink(), [0u64; 0]);
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
            pool.sent(piece, peer);
        }
        assert_eq!(mapped(&pool), 8);
        pool.give(piece, 512);
        pool.shrink();
        assert_eq!(mapped(&pool), 8, "UCX keeps what it has mapped");
        pool.grow(2 << 40, 4 << 20);
        let piece = pool.take(512).expect("room");
        pool.sent(piece, 7);
        assert_eq!(mapped(&pool), 9, "up to its limit for each");
        pool.lost(7);
        assert_eq!(mapped(&pool), 4);
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
                        let slab = pool.next_slab(bytes);
                        pool.grow(next, slab);
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
                    if let Some(freed) = pool.give(at, bytes) {
                        prop_assert!(!out.keys().any(|piece| piece >> 32 == freed >> 32));
                    }
                }
                let PoolUse { held_bytes, used_bytes, largest_free_bytes, .. } = pool.usage();
                prop_assert_eq!(used_bytes, out.values().sum::<u64>());
                prop_assert!(held_bytes >= used_bytes + largest_free_bytes);
            }
            for (at, bytes) in out {
                pool.give(at, bytes);
            }
            prop_assert!(pool.usage().slabs <= 1);
            pool.shrink();
            prop_assert_eq!(pool.usage(), PoolUse::default());
            prop_assert_eq!(pool.idle, 0);
        }
    }
}
