//! Memory that is touched before it is needed, for the first blocks of a process.
//!
//! A process that has just started has no memory to use again, and the faults of its first messages
//! take longer than their copies. Does not decide how much is touched, nor when it goes back.
//!
//! *Invariant:* the touched bytes are the first ones, and what is cut off is never part of it
//! again.

use std::io;
use std::time::Instant;

use super::pages::{HUGE, PAGE, Pages};

/// Pages of which the first are touched.
#[derive(Debug)]
pub(super) struct Reserve {
    pages: Pages,
    touched: usize,
    pub(super) since: Instant,
}

impl Reserve {
    /// Touches so many bytes, in steps, or fewer if `goes_on` says so before one of them. None if
    /// that is the first.
    ///
    /// # Errors
    /// If there is no memory.
    pub(super) fn touch(
        bytes: usize,
        mut goes_on: impl FnMut() -> bool,
    ) -> io::Result<Option<Self>> {
        let mut touched = bytes - bytes % HUGE;
        // What is cut off last may be larger than what is left of the touched ones.
        let whole = touched.checked_mul(2).filter(|whole| *whole > 0);
        let pages = Pages::new(whole.ok_or(io::ErrorKind::InvalidInput)?)?;
        for step in (0..touched).step_by(HUGE) {
            if !goes_on() {
                touched = step;
                break;
            }
            // One write a page, not one call for all: a call would keep other threads of the
            // process from mapping memory for as long as it takes.
            for at in (step..step + HUGE).step_by(PAGE) {
                // SAFETY: within the pages, which nobody else has.
                unsafe { pages.start().add(at).write_volatile(0) };
            }
        }
        Ok((touched > 0).then(|| Self { pages, touched, since: Instant::now() }))
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

#[cfg(test)]
mod tests {
    use super::*;

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
        let mut steps = 0..3;
        let part = Reserve::touch(4 * HUGE, || steps.next().is_some()).unwrap().unwrap();
        assert_eq!(part.touched(), 3 * HUGE);
        assert!(Reserve::touch(HUGE - 1, || true).is_err(), "less than one step");
        assert!(Reserve::touch(usize::MAX, || true).is_err());
    }
}
