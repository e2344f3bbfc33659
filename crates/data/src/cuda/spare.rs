//! Freed host memory, kept for a while for the next allocation.
//!
//! The kernel clears each page that it hands out, and the first access to a new page costs every
//! process a fault. In a virtual machine it can cost a second fault, in the hypervisor: then new
//! memory is filled at a twentieth of the speed of memory that was used before. A worker keeps
//! freeing and allocating pieces of one size, as most programs do.
//!
//! Does not clear what it hands out.
//!
//! *Invariant:* the memory kept never exceeds the limit, which is 0 until [`keep_up_to`] sets it.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::pages::Pages;

/// Memory that has not been reused within this time is returned to the kernel.
const IDLE: Duration = Duration::from_secs(10);

static SPARES: Mutex<Spares<Pages>> = Mutex::new(Spares::new());
static KEPT: Condvar = Condvar::new();

/// Sets how much this process keeps, in bytes, and frees the rest.
///
/// # Errors
/// If no thread can be started to free idle memory; then nothing is kept.
pub fn keep_up_to(bytes: usize) -> std::io::Result<()> {
    std::thread::Builder::new().name("spare memory".to_owned()).spawn(give_back_idle)?;
    spares().bound = bytes;
    give_back_above(bytes);
    Ok(())
}

/// Bytes that are kept now.
pub fn kept() -> usize {
    spares().bytes
}

/// Returns memory to the kernel until no more than this many bytes are kept.
pub fn give_back_above(bytes: usize) {
    // Unmapping takes time, so it happens outside the lock.
    let surplus = spares().shrink(bytes);
    drop(surplus);
}

/// Pages for at least `bytes`, and not many more. They contain old data.
pub(super) fn take(bytes: usize) -> Option<Pages> {
    spares().take(bytes)
}

/// Keeps pages, or frees them.
pub(super) fn keep(pages: Pages) {
    let mut spares = spares();
    let sleeps = spares.bytes == 0;
    let surplus = spares.keep(pages, Instant::now());
    drop(spares);
    // The thread that gives back what is idle sleeps only while nothing is kept.
    if sleeps {
        KEPT.notify_one();
    }
    drop(surplus);
}

fn spares() -> MutexGuard<'static, Spares<Pages>> {
    // No step between two changes of it can panic.
    SPARES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Frees idle memory. Sleeps without a time limit while nothing is kept. Never returns.
fn give_back_idle() {
    loop {
        let mut kept = spares();
        let due = loop {
            match kept.oldest() {
                Some(since) => break since + IDLE,
                None => kept = KEPT.wait(kept).unwrap_or_else(PoisonError::into_inner),
            }
        };
        drop(kept);
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        let idle = spares().idle(Instant::now());
        drop(idle);
    }
}

/// Pieces of memory by size and by age.
struct Spares<P> {
    bound: usize,
    bytes: usize,
    /// The number of the next piece.
    next: u64,
    /// By size and number: of one size, the newest is the last.
    pieces: BTreeMap<(usize, u64), P>,
    /// Sizes, and times of arrival, by number: the oldest is the first.
    ages: BTreeMap<u64, (usize, Instant)>,
}

impl<P: std::ops::Deref<Target = [u8]>> Spares<P> {
    const fn new() -> Self {
        Self { bound: 0, bytes: 0, next: 0, pieces: BTreeMap::new(), ages: BTreeMap::new() }
    }

    /// The best fit; among equals the newest, whose bytes may be in a cache.
    fn take(&mut self, bytes: usize) -> Option<P> {
        let most = bytes.saturating_add(bytes / 8);
        let (&(size, _), _) = self.pieces.range((bytes, 0)..=(most, u64::MAX)).next()?;
        let (&(_, number), _) = self.pieces.range((size, 0)..=(size, u64::MAX)).next_back()?;
        self.remove(number)
    }

    fn remove(&mut self, number: u64) -> Option<P> {
        let (size, _) = self.ages.remove(&number)?;
        self.bytes -= size;
        self.pieces.remove(&(size, number))
    }

    /// Keeps a piece, if necessary instead of the oldest ones. Returns what there is no room for.
    fn keep(&mut self, piece: P, now: Instant) -> Vec<P> {
        let size = piece.len();
        if size > self.bound {
            return vec![piece];
        }
        let surplus = self.shrink(self.bound - size);
        self.bytes += size;
        self.ages.insert(self.next, (size, now));
        self.pieces.insert((size, self.next), piece);
        self.next += 1;
        surplus
    }

    fn shrink(&mut self, bytes: usize) -> Vec<P> {
        let mut surplus = Vec::new();
        while self.bytes > bytes
            && let Some((&oldest, _)) = self.ages.first_key_value()
        {
            surplus.extend(self.remove(oldest));
        }
        surplus
    }

    /// When the oldest piece came.
    fn oldest(&self) -> Option<Instant> {
        self.ages.first_key_value().map(|(_, (_, since))| *since)
    }

    fn idle(&mut self, now: Instant) -> Vec<P> {
        let mut idle = Vec::new();
        while let Some((&oldest, (_, since))) = self.ages.first_key_value()
            && now.saturating_duration_since(*since) >= IDLE
        {
            idle.extend(self.remove(oldest));
        }
        idle
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn piece(bytes: usize) -> Vec<u8> {
        vec![7; bytes]
    }

    #[test]
    fn the_best_fit_is_taken_and_what_is_much_larger_is_not() {
        let mut spares = Spares { bound: 1000, ..Spares::new() };
        for bytes in [130, 100, 110] {
            assert!(spares.keep(piece(bytes), Instant::now()).is_empty());
        }
        assert_eq!(spares.take(101).map(|taken| taken.len()), Some(110));
        assert!(spares.take(101).is_none(), "130 is over an eighth more");
        assert_eq!(spares.take(100).map(|taken| taken.len()), Some(100));
        assert_eq!(spares.bytes, 130);
    }

    #[test]
    fn what_is_idle_is_given_back_and_the_rest_is_kept() {
        let mut spares = Spares { bound: 1000, ..Spares::new() };
        let start = Instant::now();
        let _ = spares.keep(piece(100), start);
        let _ = spares.keep(piece(200), start + IDLE / 2);
        assert!(spares.idle(start + IDLE / 2).is_empty());
        assert_eq!(spares.idle(start + IDLE).len(), 1);
        assert_eq!(spares.bytes, 200);
        assert_eq!(spares.idle(start + 2 * IDLE).len(), 1);
        assert_eq!(spares.bytes, 0);
    }

    proptest! {
        #[test]
        fn what_is_kept_is_counted_and_never_more_than_the_bound(
            bound in 0usize..4000,
            steps in proptest::collection::vec((any::<bool>(), 1usize..2000), 0..60),
        ) {
            let mut spares = Spares { bound, ..Spares::new() };
            let (mut kept, mut out) = (0, 0);
            for (keeps, bytes) in steps {
                if keeps {
                    kept += 1;
                    out += spares.keep(piece(bytes), Instant::now()).len();
                } else if let Some(taken) = spares.take(bytes) {
                    out += 1;
                    prop_assert!((bytes..=bytes + bytes / 8).contains(&taken.len()));
                }
                let counted: usize = spares.pieces.values().map(|piece| piece.len()).sum();
                prop_assert_eq!(counted, spares.bytes);
                prop_assert!(counted <= bound);
                prop_assert_eq!(kept, out + spares.pieces.len());
            }
        }
    }
}
