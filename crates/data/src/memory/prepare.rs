//! Blocks of a pool from memory that was touched before: of its reserve, or of larger regions.
//!
//! Does not decide when, nor how much.
//!
//! *Invariant:* what is not needed of a region is kept, so no touched page is lost.

use std::io;
use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::pace::Pace;
use super::pages::{HUGE, Pages};
use super::pool::{Kind, Pool, Region};
use super::reserve::{Reserve, Untouched};
use super::sizes::Sizes;

/// How long a pool keeps memory that was touched before anybody asked for it.
pub(super) const KEEP_RESERVE: Duration = Duration::from_secs(60);

/// A region at most so many times as large as what is needed is split rather than left alone.
const SPLIT: usize = 32;

impl Pool {
    /// Part of a larger private region: its pages have been touched. The rest is kept.
    pub(super) fn split(&self, size: usize) -> Option<Region> {
        // Miri unmaps only what was mapped at once.
        if matches!(self.sizes, Sizes::Any) || cfg!(miri) {
            return None;
        }
        let larger = self.free().take(Kind::Private, size, size.saturating_mul(SPLIT));
        match larger? {
            Region::Private { pages, .. } => Some(self.part(pages, size)),
            Region::Shared(_) => None,
        }
    }

    /// Part of the reserve, or all of it and new pages. Large regions begin at a huge page.
    pub(super) fn cut(&self, size: usize) -> Option<Region> {
        let pages = {
            let mut reserve = self.reserve();
            let pages = reserve.as_mut()?.cut(size.checked_next_multiple_of(HUGE)?);
            reserve.take_if(|reserve| reserve.touched() == 0);
            pages
        };
        Some(self.part(pages?, size))
    }

    /// The first bytes of pages. The rest is kept.
    fn part(&self, mut rest: Pages, size: usize) -> Region {
        let pages = rest.cut(size);
        if rest.len() > 0 {
            self.give_back(Region::Private { pages: rest, uses: 0 });
        }
        Region::Private { pages, uses: 0 }
    }

    /// Touches so many bytes for blocks to come, if it may hold them and the process has room. They
    /// go back to the system after a minute, or as soon as the process has too much. Takes long,
    /// and pauses while others need the processors: for a thread of its own. The first block that
    /// is asked for has what is touched by then, and ends it: from then on, it would only be in the
    /// way.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn prepare(&self, bytes: usize) -> io::Result<()> {
        let may = |more: usize| {
            more <= self.limits.keep().saturating_sub(self.kept()) && self.limits.excess(more) == 0
        };
        if bytes < HUGE || cfg!(miri) || !may(bytes) {
            return Ok(());
        }
        self.asked.store(false, Ordering::Relaxed);
        let mut untouched = Untouched::new(bytes)?;
        let mut pace = Pace::new();
        while pace.goes_on()
            && !self.asked.load(Ordering::Relaxed)
            && may(untouched.len())
            && let Some(pages) = untouched.touch()
        {
            self.keep_touched(pages);
        }
        self.free_up(0);
        Ok(())
    }

    /// Adds pages to the reserve, which they begin if it is elsewhere.
    fn keep_touched(&self, pages: Pages) {
        let mut reserve = self.reserve();
        let elsewhere = match reserve.as_mut() {
            Some(one) => one.extend(pages),
            None => Some(pages),
        };
        let Some(pages) = elsewhere else { return };
        let before = reserve.replace(Reserve::new(pages));
        drop(reserve);
        // Unmapping takes time: not under a lock.
        drop(before);
        self.wake();
    }

    /// The reserve, if nobody has needed it for long; else when that will be.
    pub(super) fn trim_reserve(&self, now: Instant) -> (Option<Reserve>, Option<Instant>) {
        let mut reserve = self.reserve();
        let due = reserve.as_ref().map(|reserve| reserve.since + KEEP_RESERVE);
        if due.is_some_and(|due| due <= now) { (reserve.take(), None) } else { (None, due) }
    }

    pub(super) fn reserve(&self) -> MutexGuard<'_, Option<Reserve>> {
        // No step between two changes of it can panic.
        self.reserve.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::memory::{Block, KEEP, Limits, POOLED};

    #[test]
    #[cfg_attr(miri, ignore = "Miri unmaps only what was mapped at once")]
    fn what_is_prepared_serves_the_first_blocks_and_is_bounded_and_given_back() {
        let limits = Limits::new(16 << 20);
        let pool = Pool::new(&limits);
        pool.prepare(17 << 20).unwrap();
        assert_eq!(pool.kept(), 0, "more than it may keep");
        pool.prepare(8 << 20).unwrap();
        assert_eq!(pool.kept(), 8 << 20);
        let mut block = pool.take(3 << 20).unwrap();
        block.bytes_mut().fill(1);
        assert_eq!(pool.kept(), 5 << 20, "the rest of two huge pages is kept");
        drop(block);
        let now = Instant::now();
        assert!(pool.trim(now + KEEP).is_some_and(|next| next > now + KEEP));
        assert_eq!(pool.kept(), 4 << 20, "the reserve is kept for longer");
        assert_eq!(pool.trim(now + KEEP_RESERVE), None);
        assert_eq!(pool.kept(), 0);
        pool.prepare(8 << 20).unwrap();
        assert_eq!(pool.free_up(1), 8 << 20, "memory is short");
        pool.prepare(8 << 20).unwrap();
        limits.set(4 << 20, usize::MAX);
        pool.free_up(0);
        assert_eq!(pool.kept(), 0, "the limit is lower now");
        limits.set(0, usize::MAX);
        pool.prepare(8 << 20).unwrap();
        assert_eq!(pool.kept(), 0, "nothing is to be kept");
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri unmaps only what was mapped at once")]
    fn a_block_that_is_asked_for_meanwhile_has_what_is_touched_by_then_and_no_more_is_touched() {
        let pool = Pool::new(&Limits::new(64 << 20));
        let (asks, first) = (Arc::downgrade(&pool), Arc::new(Mutex::new(None)));
        let given = Arc::clone(&first);
        // The pool says so when the first pages are touched.
        pool.wake_with(move || {
            // It says so again when a part goes back, while the block is taken.
            if let Ok(mut given) = given.try_lock()
                && given.is_none()
            {
                *given = asks.upgrade().map(|pool| pool.take(3 << 20).unwrap());
            }
        });
        pool.prepare(32 << 20).unwrap();
        assert_eq!(pool.kept(), 1 << 20, "the rest of two huge pages");
        let mut block = first.lock().unwrap().take().unwrap();
        assert!(block.bytes().iter().all(|byte| *byte == 0));
        block.bytes_mut().fill(7);
    }

    #[test]
    fn every_way_to_ask_for_a_block_ends_the_preparation() {
        let asked = |take: fn(&Arc<Pool>) -> Block| {
            let pool = Pool::new(&Limits::new(16 << 20));
            drop(take(&pool));
            pool.asked.load(Ordering::Relaxed)
        };
        assert!(asked(|pool| pool.take(1 << 20).unwrap()));
        assert!(asked(|pool| pool.take_shared(1 << 20).unwrap()));
        assert!(!asked(|pool| pool.take(POOLED - 1).unwrap()), "the allocator's");
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri unmaps only what was mapped at once")]
    fn nothing_is_prepared_in_a_process_that_has_as_much_as_it_may() {
        let limits = Limits::within(1 << 30, 100 << 20, || 99 << 20);
        let pool = Pool::new(&limits);
        pool.prepare(8 << 20).unwrap();
        assert_eq!(pool.kept(), 0);
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri unmaps only what was mapped at once")]
    fn a_region_that_is_not_much_larger_is_split_and_no_byte_is_lost() {
        let pool = Pool::new(&Limits::new(1 << 30));
        drop(pool.take(8 << 20).unwrap());
        let mut blocks: Vec<Block> = (0..8).map(|_| pool.take(1 << 20).unwrap()).collect();
        assert_eq!(pool.kept(), 0);
        for (block, byte) in blocks.iter_mut().zip(0..) {
            block.bytes_mut().fill(byte);
        }
        for (block, byte) in blocks.iter().zip(0..) {
            assert!(block.bytes().iter().all(|one| *one == byte));
        }
        drop(blocks);
        assert_eq!(pool.kept(), 8 << 20);
        drop(pool.take(64 << 20).unwrap());
        let small = pool.take(POOLED).unwrap();
        drop(small);
        assert_eq!(pool.kept(), 72 << 20, "a large one is left alone");
    }
}
