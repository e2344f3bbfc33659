//! Memory that is touched before it is needed, for the first blocks of a process.
//!
//! A process that has just started has no memory to use again, and the faults of its first messages
//! take longer than their copies. Does not decide how much is touched, nor when it goes back.
//!
//! *Invariant:* the touched bytes are the first ones, and what is cut off is never part of it
//! again.

use std::io;
use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::pages::{HUGE, PAGE, Pages};
use super::pool::{Kind, Pool, Region, Sizes};

/// How long a pool keeps memory that was touched before anybody asked for it.
pub(super) const KEEP_RESERVE: Duration = Duration::from_secs(60);

/// A region at most so many times as large as what is needed is split rather than left alone.
const SPLIT: usize = 32;

/// Pages of which the first are touched.
#[derive(Debug)]
pub(super) struct Reserve {
    pages: Pages,
    touched: usize,
    since: Instant,
}

impl Reserve {
    /// Touches so many bytes, in steps, while `goes_on` says so. None if it does not, to the end.
    ///
    /// # Errors
    /// If there is no memory.
    pub(super) fn touch(bytes: usize, goes_on: impl Fn() -> bool) -> io::Result<Option<Self>> {
        let touched = bytes - bytes % HUGE;
        // What is cut off last may be larger than what is left of the touched ones.
        let whole = touched.checked_mul(2).filter(|whole| *whole > 0);
        let pages = Pages::new(whole.ok_or(io::ErrorKind::InvalidInput)?)?;
        for step in (0..touched).step_by(HUGE) {
            if !goes_on() {
                return Ok(None);
            }
            // One write a page, not one call for all: a call would keep other threads of the
            // process from mapping memory for as long as it takes.
            for at in (step..step + HUGE).step_by(PAGE) {
                // SAFETY: within the pages, which nobody else has.
                unsafe { pages.start().add(at).write_volatile(0) };
            }
        }
        Ok(Some(Self { pages, touched, since: Instant::now() }))
    }

    /// The first bytes, of which at least half have been touched.
    pub(super) fn cut(&mut self, len: usize) -> Option<Pages> {
        if len == 0 || len / 2 > self.touched || len > self.pages.len() {
            return None;
        }
        self.touched = self.touched.saturating_sub(len);
        Some(self.pages.cut(len))
    }

    /// Bytes that have been touched.
    pub(super) fn touched(&self) -> usize {
        self.touched
    }
}

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

    /// Part of the reserve. Large regions begin at a huge page.
    pub(super) fn cut(&self, size: usize) -> Option<Region> {
        let pages = {
            let mut reserve = self.reserve();
            let pages = reserve.as_mut()?.cut(size.checked_next_multiple_of(HUGE)?);
            if reserve.as_ref().is_some_and(|reserve| reserve.touched() == 0) {
                *reserve = None;
            }
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
    /// go back to the system after [`KEEP_RESERVE`], or as soon as the process has too much. Takes
    /// as long as the faults do: for a thread of its own.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn prepare(&self, bytes: usize) -> io::Result<()> {
        let may = |more: usize| {
            bytes <= self.limits.keep().saturating_sub(self.kept()) && self.limits.excess(more) == 0
        };
        if bytes < HUGE || cfg!(miri) || !may(bytes) {
            return Ok(());
        }
        if let Some(reserve) = Reserve::touch(bytes, || may(0))? {
            let before = self.reserve().replace(reserve);
            drop(before);
            self.free_up(0);
            self.wake();
        }
        Ok(())
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
    use super::*;
    use crate::memory::{Block, KEEP, Limits, POOLED};

    #[test]
    #[cfg_attr(miri, ignore = "Miri unmaps only what was mapped at once")]
    fn what_is_cut_off_outlives_the_reserve_and_is_nobody_elses() {
        let mut reserve = Reserve::touch(4 * HUGE, || true).unwrap().unwrap();
        let (one, other) = (reserve.cut(HUGE).unwrap(), reserve.cut(2 * HUGE).unwrap());
        assert_eq!(one.start().addr().get() + HUGE, other.start().addr().get());
        assert_eq!(reserve.touched(), HUGE);
        assert!(reserve.cut(4 * HUGE).is_none(), "most of it would be new");
        let last = reserve.cut(2 * HUGE).unwrap();
        assert_eq!(reserve.touched(), 0);
        drop((reserve, one));
        for pages in [&other, &last] {
            // SAFETY: its own bytes.
            unsafe { pages.start().write_bytes(7, pages.len()) };
        }
    }

    #[test]
    fn it_stops_touching_when_told() {
        assert!(Reserve::touch(4 * HUGE, || false).unwrap().is_none());
        assert!(Reserve::touch(HUGE - 1, || true).is_err(), "less than one step");
        assert!(Reserve::touch(usize::MAX, || true).is_err());
    }

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
