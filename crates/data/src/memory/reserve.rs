//! Memory that is touched before it is needed, for the first blocks of a process.
//!
//! A process that has just started has no memory to use again, and the faults of its first messages
//! take longer than their copies. Does not decide how much is touched, nor when it goes back.
//!
//! *Invariant:* who touches pages owns them, until they are a reserve's, all of which are touched.

use std::io;
use std::time::Instant;

use super::pages::{HUGE, PAGE, Pages};

/// Pages that are touched one step after the other.
#[derive(Debug)]
pub(super) struct Untouched(Pages);

/// Pages that have been touched.
#[derive(Debug)]
pub(super) struct Reserve {
    pages: Pages,
    pub(super) since: Instant,
}

impl Untouched {
    /// At most so many bytes.
    ///
    /// # Errors
    /// If there is no memory, or not one step of it is asked for.
    pub(super) fn new(bytes: usize) -> io::Result<Self> {
        Pages::new(bytes - bytes % HUGE).map(Self)
    }

    /// Bytes that are left.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Touches the next pages, which lie behind the ones before.
    pub(super) fn touch(&mut self) -> Option<Pages> {
        if self.len() == 0 {
            return None;
        }
        let pages = self.0.cut(HUGE);
        // One write a page, not one call for all: a call would keep other threads of the process
        // from mapping memory for as long as it takes.
        for at in (0..HUGE).step_by(PAGE) {
            // SAFETY: within the pages, which nobody else has.
            unsafe { pages.start().add(at).write_volatile(0) };
        }
        Some(pages)
    }
}

impl Reserve {
    pub(super) fn new(touched: Pages) -> Self {
        Self { pages: touched, since: Instant::now() }
    }

    /// Has these, too, or gives them back if they do not lie behind its own.
    pub(super) fn extend(&mut self, touched: Pages) -> Option<Pages> {
        self.since = Instant::now();
        self.pages.join(touched)
    }

    /// The first bytes. If it has fewer, all of them, moved to where untouched ones follow.
    pub(super) fn cut(&mut self, len: usize) -> Option<Pages> {
        let touched = self.touched();
        if len == 0 || touched == 0 {
            return None;
        }
        let mut pages = self.pages.cut(len.min(touched));
        if len > touched && pages.grow(len).is_err() {
            self.pages = pages;
            return None;
        }
        Some(pages)
    }

    /// Bytes that have been touched.
    pub(super) fn touched(&self) -> usize {
        self.pages.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touched(steps: usize) -> Reserve {
        let mut untouched = Untouched::new(steps * HUGE).unwrap();
        let mut reserve = Reserve::new(untouched.touch().unwrap());
        while let Some(pages) = untouched.touch() {
            assert!(reserve.extend(pages).is_none(), "they lie behind each other");
        }
        reserve
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri unmaps only what was mapped at once")]
    fn what_is_cut_off_outlives_the_reserve_and_is_nobody_elses() {
        let mut reserve = touched(4);
        let (one, other) = (reserve.cut(HUGE).unwrap(), reserve.cut(2 * HUGE).unwrap());
        assert_eq!(one.start().addr().get() + HUGE, other.start().addr().get());
        assert_eq!(reserve.touched(), HUGE);
        let last = reserve.cut(HUGE).unwrap();
        assert_eq!(reserve.touched(), 0);
        assert!(reserve.cut(HUGE).is_none());
        drop((reserve, one));
        for pages in [&other, &last] {
            // SAFETY: its own bytes.
            unsafe { pages.start().write_bytes(7, pages.len()) };
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri does not move memory")]
    fn touched_pages_that_are_too_few_begin_larger_ones_and_keep_their_bytes() {
        let mut reserve = touched(3);
        let first = reserve.pages.start();
        // SAFETY: its own bytes.
        unsafe { first.write_bytes(7, 3 * HUGE) };
        let pages = reserve.cut(8 * HUGE).unwrap();
        assert_eq!((reserve.touched(), pages.len()), (0, 8 * HUGE));
        assert!(pages.start().addr().get().is_multiple_of(HUGE));
        // SAFETY: its own bytes, and nobody writes them.
        let bytes = unsafe { std::slice::from_raw_parts(pages.start().as_ptr(), pages.len()) };
        assert!(bytes[..3 * HUGE].iter().all(|byte| *byte == 7));
        assert!(bytes[3 * HUGE..].iter().all(|byte| *byte == 0));
        assert!(reserve.cut(usize::MAX - HUGE + 1).is_none(), "nothing is left");
        let mut reserve = touched(1);
        assert!(reserve.cut(usize::MAX - HUGE + 1).is_none(), "more than there is");
        assert_eq!(reserve.touched(), HUGE);
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri unmaps only what was mapped at once")]
    fn pages_of_another_place_are_given_back() {
        let mut reserve = touched(1);
        let mut elsewhere = Untouched::new(2 * HUGE).unwrap();
        drop(elsewhere.touch());
        assert!(reserve.extend(elsewhere.touch().unwrap()).is_some());
        assert_eq!(reserve.touched(), HUGE);
        assert!(Untouched::new(HUGE - 1).is_err(), "less than one step");
        assert!(Untouched::new(usize::MAX).is_err());
    }
}
