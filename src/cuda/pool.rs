//! A pool of device memory: large slabs from the driver, handed out in small pieces.
//!
//! Each allocation of the driver has a handle that every peer must open and map, and UCX keeps what
//! it has mapped. So objects are cut from slabs. Pure: the caller allocates and frees the slabs.
//!
//! *Invariant:* pieces in use do not overlap and lie within their slab; no two holes of a slab are
//! adjacent.

use std::collections::BTreeMap;

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
}

/// The slabs of one device.
#[derive(Debug)]
pub(super) struct Pool {
    slab: u64,
    slabs: BTreeMap<u64, Slab>,
    /// Bytes of slabs that are completely free.
    idle: u64,
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
}

/// A length rounded up so that every piece stays aligned; `None` beyond the address space.
pub(super) fn rounded(bytes: usize) -> Option<u64> {
    u64::try_from(bytes).ok()?.checked_next_multiple_of(ALIGNMENT)
}

impl Pool {
    /// A pool for a device with this much memory.
    pub(super) fn new(device_bytes: u64) -> Self {
        let slab = (device_bytes / SHARE).clamp(UNIT, SLAB) / UNIT * UNIT;
        Self { slab, slabs: BTreeMap::new(), idle: 0 }
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
        if slab.used == 0 {
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
        self.slabs.insert(base, Slab { bytes, used: 0, holes: BTreeMap::from([(0, bytes)]) });
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
        if slab.used > 0 {
            return None;
        }
        let kept = self.idle;
        self.idle += slab.bytes;
        (kept > 0).then(|| self.drop_slab(base)).flatten()
    }

    /// Removes every slab that is completely free, for the caller to free.
    pub(super) fn shrink(&mut self) -> Vec<u64> {
        let idle = self.slabs.iter().filter(|(_, slab)| slab.used == 0).map(|(base, _)| *base);
        let idle: Vec<u64> = idle.collect();
        idle.into_iter().filter_map(|base| self.drop_slab(base)).collect()
    }

    fn drop_slab(&mut self, base: u64) -> Option<u64> {
        let slab = self.slabs.remove(&base)?;
        self.idle -= slab.bytes;
        Some(base)
    }

    pub(super) fn usage(&self) -> PoolUse {
        let slabs = || self.slabs.values();
        PoolUse {
            slabs: slabs().count(),
            held_bytes: slabs().map(|slab| slab.bytes).sum(),
            used_bytes: slabs().map(|slab| slab.used).sum(),
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
                let PoolUse { held_bytes, used_bytes, .. } = pool.usage();
                prop_assert_eq!(used_bytes, out.values().sum::<u64>());
                prop_assert!(held_bytes >= used_bytes);
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
