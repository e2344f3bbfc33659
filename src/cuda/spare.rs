//! Freed host memory, kept for a moment for the next allocation.
//!
//! The kernel clears each page that it hands out, and the first access to a new page costs every
//! process a fault. A worker that keeps freeing and allocating pieces of one size, as most do,
//! spends a third of its time on that (`cuda-cluster bench transpose`).
//!
//! Does not clear what it hands out.
//!
//! *Invariant:* the memory kept never exceeds the limit, which is 0 until [`keep_up_to`] sets it.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Smaller pieces come from the heap's free lists, which are just as fast.
const SMALLEST: usize = 128 << 10;

/// Memory that has not been reused within this time is returned to the kernel.
const IDLE: Duration = Duration::from_secs(1);

static SPARES: Mutex<Spares> = Mutex::new(Spares::new());
static KEPT: Condvar = Condvar::new();

/// Sets how much this process keeps, in bytes, and frees the rest.
///
/// # Errors
/// If no thread can be started to free idle memory; then nothing is kept.
pub(crate) fn keep_up_to(bytes: usize) -> std::io::Result<()> {
    std::thread::Builder::new().name("spare memory".to_owned()).spawn(give_back_idle)?;
    let mut spares = spares();
    spares.bound = bytes;
    let surplus = spares.shrink(bytes);
    drop(spares);
    drop(surplus);
    Ok(())
}

/// Returns all memory that is kept to the kernel.
pub(crate) fn give_back() {
    let all = spares().shrink(0);
    drop(all);
}

/// A piece of at least `bytes`, and not much more. It contains old data.
pub(super) fn take(bytes: usize) -> Option<Vec<u8>> {
    if bytes < SMALLEST { None } else { spares().take(bytes) }
}

/// Keeps a piece, of which every byte up to its capacity has been written, or frees it.
pub(super) fn keep(memory: Vec<u8>) {
    if memory.capacity() < SMALLEST {
        return;
    }
    let mut spares = spares();
    let sleeps = spares.pieces.is_empty();
    let surplus = spares.keep(memory, Instant::now());
    drop(spares);
    // The thread that gives back what is idle sleeps only while nothing is kept.
    if sleeps {
        KEPT.notify_one();
    }
    drop(surplus);
}

fn spares() -> MutexGuard<'static, Spares> {
    // No step between two changes of it can panic.
    SPARES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Frees idle memory. Sleeps without a time limit while nothing is kept. Never returns.
fn give_back_idle() {
    loop {
        let mut kept = spares();
        while kept.pieces.is_empty() {
            kept = KEPT.wait(kept).unwrap_or_else(PoisonError::into_inner);
        }
        drop(kept);
        std::thread::sleep(IDLE);
        let idle = spares().idle(Instant::now());
        drop(idle);
    }
}

struct Spares {
    bound: usize,
    bytes: usize,
    /// In the order of arrival.
    pieces: Vec<(Instant, Vec<u8>)>,
}

impl Spares {
    const fn new() -> Self {
        Self { bound: 0, bytes: 0, pieces: Vec::new() }
    }

    /// The best fit; among equals the newest, whose bytes may be in a cache.
    fn take(&mut self, bytes: usize) -> Option<Vec<u8>> {
        let most = bytes.saturating_add(bytes / 4);
        let fits = |capacity: usize| (bytes..=most).contains(&capacity);
        let pieces = self.pieces.iter().enumerate().rev();
        let sizes = pieces.map(|(at, (_, piece))| (piece.capacity(), at));
        let (capacity, at) = sizes.filter(|(size, _)| fits(*size)).min_by_key(|(size, _)| *size)?;
        self.bytes -= capacity;
        Some(self.pieces.remove(at).1)
    }

    /// Keeps a piece, if necessary instead of the oldest ones. Returns what there is no room for.
    fn keep(&mut self, memory: Vec<u8>, now: Instant) -> Vec<Vec<u8>> {
        let capacity = memory.capacity();
        if capacity > self.bound {
            return vec![memory];
        }
        let surplus = self.shrink(self.bound - capacity);
        self.bytes += capacity;
        self.pieces.push((now, memory));
        surplus
    }

    fn shrink(&mut self, bytes: usize) -> Vec<Vec<u8>> {
        let mut count = 0;
        while self.bytes > bytes {
            self.bytes -= self.pieces[count].1.capacity();
            count += 1;
        }
        self.pieces.drain(..count).map(|(_, piece)| piece).collect()
    }

    fn idle(&mut self, now: Instant) -> Vec<Vec<u8>> {
        let old = |(since, _): &(Instant, Vec<u8>)| now.saturating_duration_since(*since) >= IDLE;
        let idle = self.pieces.iter().take_while(|piece| old(piece));
        let bytes: usize = idle.map(|(_, piece)| piece.capacity()).sum();
        self.shrink(self.bytes - bytes)
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
        for bytes in [130, 100, 120] {
            assert!(spares.keep(piece(bytes), Instant::now()).is_empty());
        }
        assert_eq!(spares.take(101).map(|taken| taken.capacity()), Some(120));
        assert!(spares.take(101).is_none(), "130 is over a quarter more");
        assert_eq!(spares.take(100).map(|taken| taken.capacity()), Some(100));
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
                    prop_assert!((bytes..=bytes + bytes / 4).contains(&taken.capacity()));
                }
                let counted: usize = spares.pieces.iter().map(|(_, piece)| piece.capacity()).sum();
                prop_assert_eq!(counted, spares.bytes);
                prop_assert!(counted <= bound);
                prop_assert_eq!(kept, out + spares.pieces.len());
            }
        }
    }
}
