//! Memory that messages are received into.
//!
//! Large blocks are regions of their own, which go back to a [`Pool`] when their last user is gone
//! and are given to the next message of that size: memory that has been touched costs no page
//! faults. What the pool keeps is bounded, and is returned to the system when it is not used.
//!
//! *Invariant:* a block has one owner, and its region is in the pool only after that owner is gone.

#![allow(unsafe_code)]

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous, munmap};

/// From this size on, in bytes, a block is a region of the pool. Smaller ones are the allocator's.
pub const POOLED: usize = 64 << 10;

/// How long the pool keeps a region that nobody asks for.
pub const KEEP: Duration = Duration::from_secs(10);

const HUGE: usize = 2 << 20;

/// Regions that wait for their next use.
#[derive(Debug)]
pub struct Pool {
    /// The process whose threads take its lock; a fork of it may have been made while it was held.
    process: u32,
    limit: usize,
    free: Mutex<Free>,
}

#[derive(Debug, Default)]
struct Free {
    bytes: usize,
    /// By size; those used last at the end.
    regions: BTreeMap<usize, VecDeque<(Region, Instant)>>,
}

/// Pages of this process.
#[derive(Debug)]
struct Region {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a region is memory that only its owner refers to.
unsafe impl Send for Region {}
// SAFETY: all access to the memory is through `&mut` or the owner's own rules ([`Block::start`]).
unsafe impl Sync for Region {}

// SAFETY: a block is the only owner of its memory.
unsafe impl Send for Block {}
// SAFETY: shared references give an address alone.
unsafe impl Sync for Block {}

/// Writable memory of a length.
#[derive(Debug)]
pub struct Block {
    len: usize,
    from: From,
}

#[derive(Debug)]
enum From {
    /// A box, of which this is the only pointer.
    Heap(NonNull<[u8]>),
    Pool(Option<Region>, Arc<Pool>),
}

/// The size of the region for so many bytes: at most an eighth larger, so that messages of similar
/// size share regions.
fn region_size(len: usize) -> Option<usize> {
    let step = (len.checked_next_power_of_two()? / 16).max(4096);
    len.checked_next_multiple_of(step)
}

impl Region {
    fn new(len: usize) -> io::Result<Self> {
        // Huge pages need a region that begins at a multiple of their size.
        let spare = if len >= HUGE { HUGE } else { 0 };
        let whole = len.checked_add(spare).and_then(NonZeroUsize::new);
        let whole = whole.ok_or(io::ErrorKind::OutOfMemory)?;
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping, at a place of the kernel's choice.
        let mapped = unsafe { mmap_anonymous(None, whole, protection, flags) }?.cast::<u8>();
        if spare == 0 {
            return Ok(Self { start: mapped, len });
        }
        let before = mapped.as_ptr().align_offset(HUGE);
        // SAFETY: `before` is less than `HUGE`, by which the mapping is longer than `len`.
        let start = unsafe { mapped.add(before) };
        // SAFETY: both parts are of this mapping, and nobody knows them.
        unsafe {
            if before > 0 {
                let _ = munmap(mapped.cast(), before);
            }
            if before < spare {
                let _ = munmap(start.add(len).cast(), spare - before);
            }
            // Where there are none, pages are small.
            let _ = madvise(start.cast(), len, MmapAdvise::MADV_HUGEPAGE);
        }
        Ok(Self { start, len })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the whole of what was mapped; its owner is gone.
        let _ = unsafe { munmap(self.start.cast(), self.len) };
    }
}

impl Pool {
    /// A pool that keeps at most `limit` bytes for later use.
    pub fn new(limit: usize) -> Arc<Self> {
        let process = std::process::id();
        Arc::new(Self { process, limit, free: Mutex::default() })
    }

    /// A block of `len` bytes. What they are is not defined: another message may have been there.
    pub fn take(self: &Arc<Self>, len: usize) -> io::Result<Block> {
        if len < POOLED {
            let bytes = NonNull::from(Box::leak(vec![0; len].into_boxed_slice()));
            return Ok(Block { len, from: From::Heap(bytes) });
        }
        let size = region_size(len).ok_or(io::ErrorKind::OutOfMemory)?;
        let kept = self.free().take(size);
        let region = kept.map_or_else(|| Region::new(size), Ok)?;
        Ok(Block { len, from: From::Pool(Some(region), Arc::clone(self)) })
    }

    /// Returns to the system what nobody has used for [`KEEP`]. The time of the next such region,
    /// if there is one.
    pub fn trim(&self, now: Instant) -> Option<Instant> {
        let mut free = self.free();
        let mut freed = Vec::new();
        free.regions.retain(|_, regions| {
            let old = regions.partition_point(|(_, since)| now.duration_since(*since) >= KEEP);
            freed.extend(regions.drain(..old).map(|(region, _)| region));
            !regions.is_empty()
        });
        free.bytes -= freed.iter().map(|region| region.len).sum::<usize>();
        let oldest = free.regions.values().filter_map(|regions| regions.front());
        oldest.map(|(_, since)| *since + KEEP).min()
    }

    /// What it keeps, in bytes.
    pub fn kept(&self) -> usize {
        self.free().bytes
    }

    fn give_back(&self, region: Region) {
        if std::process::id() != self.process {
            // The parent's region, of which a fork has a copy.
            std::mem::forget(region);
            return;
        }
        if region.len > self.limit {
            return;
        }
        let mut freed = Vec::new();
        {
            let mut free = self.free();
            while free.bytes + region.len > self.limit {
                freed.extend(free.take_oldest());
            }
            free.bytes += region.len;
            free.regions.entry(region.len).or_default().push_back((region, Instant::now()));
        }
        // Unmapping takes time: not under the lock.
        drop(freed);
    }

    fn free(&self) -> std::sync::MutexGuard<'_, Free> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Free {
    fn take(&mut self, size: usize) -> Option<Region> {
        let regions = self.regions.get_mut(&size)?;
        // The one used last is the likeliest to be in the processor's caches.
        let (region, _) = regions.pop_back()?;
        self.bytes -= region.len;
        if regions.is_empty() {
            self.regions.remove(&size);
        }
        Some(region)
    }

    fn take_oldest(&mut self) -> Option<Region> {
        let since = |regions: &VecDeque<(Region, Instant)>| regions.front().map(|(_, at)| *at);
        let oldest = self.regions.iter().min_by_key(|(_, regions)| since(regions));
        let size = *oldest?.0;
        let regions = self.regions.get_mut(&size)?;
        let (region, _) = regions.pop_front()?;
        self.bytes -= region.len;
        if regions.is_empty() {
            self.regions.remove(&size);
        }
        Some(region)
    }
}

impl Block {
    /// In bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where it lies. It stays there as long as the block lives.
    pub fn start(&self) -> NonNull<u8> {
        match &self.from {
            From::Heap(bytes) => bytes.cast(),
            From::Pool(Some(region), _) => region.start,
            From::Pool(None, _) => NonNull::dangling(),
        }
    }

    /// Its bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the block owns `len` bytes from `start` on, which the kernel or the allocator has
        // filled with zeros and messages with other bytes; nobody else refers to them.
        unsafe { std::slice::from_raw_parts_mut(self.start().as_ptr(), self.len) }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        match &mut self.from {
            // SAFETY: it was leaked by `Pool::take`, and its owner is gone.
            From::Heap(bytes) => drop(unsafe { Box::from_raw(bytes.as_ptr()) }),
            From::Pool(region, pool) => {
                if let Some(region) = region.take() {
                    pool.give_back(region);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_used_again_when_its_block_is_gone_and_not_before() {
        let pool = Pool::new(1 << 30);
        let mut first = pool.take(5 << 20).unwrap();
        first.bytes_mut().fill(7);
        let second = pool.take(5 << 20).unwrap();
        let (one, other) = (first.start(), second.start());
        assert_ne!(one, other);
        drop(first);
        let mut again = pool.take(5_000_000).unwrap();
        assert_eq!(again.start(), one, "blocks of similar size share a region");
        assert_eq!(again.len(), 5_000_000);
        again.bytes_mut().fill(1);
        assert_eq!(pool.kept(), 0);
    }

    #[test]
    fn the_pool_keeps_no_more_than_its_limit_and_lets_the_oldest_go() {
        let pool = Pool::new(3 << 20);
        let blocks: Vec<Block> = (0..5).map(|_| pool.take(1 << 20).unwrap()).collect();
        let newest = blocks[4].start();
        drop(blocks);
        assert_eq!(pool.kept(), 3 << 20);
        assert_eq!(pool.take(1 << 20).unwrap().start(), newest);
        drop(pool.take(4 << 20).unwrap());
        assert_eq!(pool.kept(), 3 << 20, "larger than the limit");
    }

    #[test]
    fn what_nobody_uses_goes_back_to_the_system() {
        let pool = Pool::new(1 << 30);
        drop(pool.take(1 << 20).unwrap());
        let now = Instant::now();
        assert!(pool.trim(now).is_some_and(|next| next <= now + KEEP));
        assert_eq!(pool.kept(), 1 << 20);
        assert_eq!(pool.trim(now + KEEP), None);
        assert_eq!(pool.kept(), 0);
    }

    #[test]
    fn more_than_there_is_is_an_error() {
        let pool = Pool::new(1 << 30);
        assert!(pool.take(usize::MAX).is_err());
        assert!(pool.take(isize::MAX as usize).is_err());
        assert!(pool.take(0).unwrap().is_empty());
    }

    #[test]
    fn regions_are_little_larger_than_asked_for() {
        for len in [POOLED, POOLED + 1, 100_000, (1 << 20) + 1, 200 << 20, (1 << 31) + 5] {
            let size = region_size(len).unwrap();
            assert!(
                size >= len && size.is_multiple_of(4096) && size - len <= (len / 8).max(4096),
                "{len}"
            );
        }
    }
}
