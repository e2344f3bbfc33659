//! Memory that waits for its next use, by size and by age.
//!
//! Does not decide how much is kept, nor for how long ([`super::pool`]).
//!
//! *Invariant:* the sum of the bytes is that of the pieces.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// A piece of memory.
pub(super) trait Piece {
    /// What else than size tells pieces apart.
    type Kind: Copy + Ord;

    fn kind(&self) -> Self::Kind;

    /// In bytes.
    fn len(&self) -> usize;
}

/// Pieces of memory by size and by age.
#[derive(Debug)]
pub(super) struct Kept<P: Piece> {
    bytes: usize,
    /// The number of the next piece.
    next: u64,
    /// By kind, size and number: of one size, the newest is the last.
    pieces: BTreeMap<(P::Kind, usize, u64), P>,
    /// Kinds, sizes, and times of arrival, by number: the oldest is the first.
    ages: BTreeMap<u64, (P::Kind, usize, Instant)>,
}

impl<P: Piece> Default for Kept<P> {
    fn default() -> Self {
        Self { bytes: 0, next: 0, pieces: BTreeMap::new(), ages: BTreeMap::new() }
    }
}

impl<P: Piece> Kept<P> {
    /// Of all pieces.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The best fit; among equals the newest, whose bytes may be in a cache.
    pub(super) fn take(&mut self, kind: P::Kind, least: usize, most: usize) -> Option<P> {
        let fitting = (kind, least, 0)..=(kind, most, u64::MAX);
        let (&(_, size, _), _) = self.pieces.range(fitting).next()?;
        let equal = (kind, size, 0)..=(kind, size, u64::MAX);
        let (&(_, _, number), _) = self.pieces.range(equal).next_back()?;
        self.remove(number)
    }

    /// The one that nobody has used for longest.
    pub(super) fn take_oldest(&mut self) -> Option<P> {
        let (&number, _) = self.ages.first_key_value()?;
        self.remove(number)
    }

    /// Those that nobody has used for so long.
    pub(super) fn take_idle(&mut self, now: Instant, time: Duration) -> Vec<P> {
        let mut idle = Vec::new();
        while self.oldest().is_some_and(|since| now.saturating_duration_since(since) >= time) {
            idle.extend(self.take_oldest());
        }
        idle
    }

    /// Keeps a piece.
    pub(super) fn keep(&mut self, piece: P, now: Instant) {
        let (kind, size) = (piece.kind(), piece.len());
        self.bytes += size;
        self.ages.insert(self.next, (kind, size, now));
        self.pieces.insert((kind, size, self.next), piece);
        self.next += 1;
    }

    /// When the oldest piece came.
    pub(super) fn oldest(&self) -> Option<Instant> {
        self.ages.first_key_value().map(|(_, (_, _, since))| *since)
    }

    fn remove(&mut self, number: u64) -> Option<P> {
        let (kind, size, _) = self.ages.remove(&number)?;
        self.bytes -= size;
        self.pieces.remove(&(kind, size, number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    impl Piece for (bool, usize) {
        type Kind = bool;

        fn kind(&self) -> bool {
            self.0
        }

        fn len(&self) -> usize {
            self.1
        }
    }

    #[test]
    fn the_best_fit_of_a_kind_is_taken() {
        let mut kept = Kept::default();
        for piece in [(true, 130), (true, 100), (true, 110), (false, 101)] {
            kept.keep(piece, Instant::now());
        }
        assert_eq!(kept.take(true, 101, 113), Some((true, 110)));
        assert_eq!(kept.take(true, 101, 113), None);
        assert_eq!(kept.take(true, 100, 100), Some((true, 100)));
        assert_eq!(kept.take(false, 90, 101), Some((false, 101)));
        assert_eq!(kept.bytes(), 130);
    }

    #[test]
    fn what_is_idle_is_taken_and_the_rest_is_kept() {
        let (start, time) = (Instant::now(), Duration::from_secs(10));
        let mut kept = Kept::default();
        kept.keep((true, 100), start);
        kept.keep((false, 200), start + time / 2);
        assert_eq!(kept.take_idle(start + time / 2, time), []);
        assert_eq!(kept.take_idle(start + time, time), [(true, 100)]);
        assert_eq!((kept.bytes(), kept.oldest()), (200, Some(start + time / 2)));
        assert_eq!(kept.take_idle(start + 2 * time, time), [(false, 200)]);
        assert_eq!((kept.bytes(), kept.oldest()), (0, None));
    }

    proptest! {
        #[test]
        fn what_is_kept_is_counted_and_comes_out_once(
            steps in proptest::collection::vec((0..3_u8, any::<bool>(), 1usize..2000), 0..60),
        ) {
            let mut kept = Kept::default();
            let mut model: Vec<(bool, usize)> = Vec::new();
            for (step, kind, bytes) in steps {
                let most = bytes + bytes / 8;
                let taken = match step {
                    0 => {
                        kept.keep((kind, bytes), Instant::now());
                        model.push((kind, bytes));
                        continue;
                    }
                    1 => {
                        let oldest = kept.take_oldest();
                        prop_assert_eq!(oldest, model.first().copied());
                        oldest
                    }
                    _ => {
                        let taken = kept.take(kind, bytes, most);
                        let fits = |one: &&(bool, usize)| one.0 == kind && (bytes..=most).contains(&one.1);
                        let best = model.iter().filter(fits).map(|(_, size)| *size).min();
                        prop_assert_eq!(taken, best.map(|size| (kind, size)));
                        taken
                    }
                };
                if let Some(piece) = taken {
                    // Of equals the newest, but for the oldest of all.
                    let at = match step {
                        1 => 0,
                        _ => model.iter().rposition(|one| *one == piece).unwrap_or(usize::MAX),
                    };
                    model.remove(at);
                }
                prop_assert_eq!(kept.bytes(), model.iter().map(|(_, size)| size).sum::<usize>());
            }
        }
    }
}
