//! Which route large frames take between processes of this machine.
//!
//! The receiver may copy them from the sender's memory with a call of the kernel, or the sender may
//! write them to memory that both have mapped. Which is faster is measured when it first matters,
//! by one process of a machine ([`crate::remembered`]).
//!
//! *Invariant:* [`least`] decides; nothing here changes memory that others use.

#![allow(unsafe_code)]

use std::time::{Duration, Instant};

use cuda_cluster_data::copy::{Part, Piece, read_all, stream};
use cuda_cluster_data::memory::Limits;
use cuda_cluster_data::memory::arena::{Arena, Budget};
use nix::unistd::Pid;

/// What to ask a peer to write to mapped memory costs more than to copy: two more messages.
const ASKING: Duration = Duration::from_micros(100);

/// Messages up to this size, in bytes, are never worth it.
pub(crate) const LEAST: usize = 1 << 20;

const SAMPLE: usize = 8 << 20;

/// Memory that a measurement takes, in bytes.
pub(crate) const SAMPLES: usize = 2 * SAMPLE;

/// Seconds a byte, of the two routes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Speeds {
    pub(crate) mapped: f64,
    pub(crate) copied: f64,
}

impl Speeds {
    /// Of two measurements, the better of each: what else happens only slows one down.
    pub(crate) fn best(self, other: Self) -> Self {
        let (mapped, copied) = (self.mapped.min(other.mapped), self.copied.min(other.copied));
        Self { mapped, copied }
    }
}

/// From how many bytes on a message is better written to mapped memory. None if it never is.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
pub(crate) fn least(speeds: Speeds) -> Option<usize> {
    let gain = speeds.copied - speeds.mapped;
    // A tenth is within what a measurement varies by.
    if !gain.is_finite() || gain <= speeds.copied / 10.0 {
        return None;
    }
    // Casting saturates.
    Some(((ASKING.as_secs_f64() / gain) as usize).max(LEAST))
}

/// What measurements have found so far. They run while the process works, so each may be disturbed:
/// the best of each counts, and what seems not to be worth it is measured again, ever more
/// rarely.
///
/// *Invariant:* once mapped memory is worth it, nothing is measured any more.
#[derive(Debug)]
pub(crate) struct Knowledge {
    best: Option<Speeds>,
    /// Measurements that have begun.
    begun: u32,
    is_measuring: bool,
    /// Large messages that have come.
    messages: u64,
}

/// Most measurements of a process.
const MEASUREMENTS: u32 = 6;

impl Knowledge {
    pub(crate) const NONE: Self = Self { best: None, begun: 0, is_measuring: false, messages: 0 };

    /// A large message has come; whether to measure now, if there is room for the samples. Then
    /// [`Self::learn`] has to be called.
    pub(crate) fn measures(&mut self, has_room: impl FnOnce() -> bool) -> bool {
        self.messages += 1;
        let due = self.begun < MEASUREMENTS && self.messages >= 4_u64.pow(self.begun);
        if !due || self.is_measuring || self.least().is_some() || !has_room() {
            return false;
        }
        self.begun += 1;
        self.is_measuring = true;
        true
    }

    /// A measurement has ended; None if one of the routes is not there.
    pub(crate) fn learn(&mut self, found: Option<Speeds>) {
        self.is_measuring = false;
        let Some(found) = found else {
            self.begun = MEASUREMENTS;
            return;
        };
        self.best = Some(self.best.map_or(found, |best| best.best(found)));
    }

    /// Whether nothing has been measured yet, so that what others have measured is enough.
    pub(crate) fn is_first(&self) -> bool {
        self.begun <= 1 && self.best.is_none()
    }

    /// Whether anything has been measured.
    pub(crate) fn is_known(&self) -> bool {
        self.begun > 0 && !self.is_measuring || self.best.is_some()
    }

    /// From how many bytes on a message is better written to mapped memory. None if it never is, as
    /// far as is known.
    pub(crate) fn least(&self) -> Option<usize> {
        self.best.and_then(least)
    }
}

/// Copies some MiB of this process by both routes. None if one of them isn't there.
#[allow(clippy::cast_precision_loss)]
pub(crate) fn measure() -> Option<Speeds> {
    let arena = Arena::new(&Budget::new(&Limits::new(SAMPLE))).ok()?;
    let range = arena.take(SAMPLE)?;
    let from = vec![1_u8; SAMPLE];
    let own = Pid::this();
    let to = range.start().as_ptr();
    let address = from.as_ptr().expose_provenance() as u64;
    let timed = |copy: &dyn Fn() -> Option<()>| -> Option<f64> {
        let began = Instant::now();
        copy()?;
        Some(began.elapsed().as_secs_f64() / SAMPLE as f64)
    };
    let mut best = Speeds { mapped: f64::INFINITY, copied: f64::INFINITY };
    // In turns, so that what else happens disturbs both.
    for _ in 0..5 {
        let mapped = timed(&|| {
            let piece = Piece { from: from.as_ptr(), to: range.start(), len: SAMPLE };
            // SAFETY: the range is writable, as long as the sample, and nobody else's.
            unsafe { stream(piece) };
            Some(())
        })?;
        let part = || vec![Part { address, to, len: SAMPLE }];
        // SAFETY: as above.
        let copied = timed(&|| unsafe { read_all(own, part()) }.ok())?;
        best = best.best(Speeds { mapped, copied });
    }
    Some(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapped_memory_is_used_where_it_saves_more_than_asking_costs() {
        let least = |mapped, copied| least(Speeds { mapped: mapped * 1e-9, copied: copied * 1e-9 });
        assert_eq!(least(0.08, 0.08), None, "no gain");
        assert_eq!(least(0.2, 0.1), None, "a loss");
        assert_eq!(least(0.095, 0.1), None, "as good as none");
        assert_eq!(least(0.1, 10.0), Some(LEAST), "small messages are never worth it");
        let some = least(0.08, 0.1).unwrap();
        assert!((4_900_000..5_100_000).contains(&some), "{some}: 100 us at 20 ps a byte");
        assert_eq!(least(f64::NAN, 0.1), None);
    }

    #[test]
    fn what_seems_not_to_be_worth_it_is_measured_again_and_the_best_of_each_route_counts() {
        let mut known = Knowledge::NONE;
        assert!(!known.is_known());
        let mut when = Vec::new();
        for message in 1..5_000 {
            if known.measures(|| true) {
                assert!(!known.measures(|| true), "one at a time");
                // Disturbed: the mapped route seems slow.
                known.learn(Some(Speeds { mapped: 0.2e-9, copied: 0.15e-9 }));
                when.push(message);
            }
        }
        assert!(known.is_known() && known.least().is_none());
        assert_eq!(when.len(), MEASUREMENTS as usize, "{when:?}");
        assert!(when.windows(2).all(|pair| pair[1] > 2 * pair[0]), "{when:?}");

        let mut known = Knowledge::NONE;
        assert!(known.measures(|| true));
        known.learn(Some(Speeds { mapped: 0.2e-9, copied: 0.15e-9 }));
        assert!((0..4).any(|_| known.measures(|| true)));
        known.learn(Some(Speeds { mapped: 0.09e-9, copied: 0.4e-9 }));
        let best = Speeds { mapped: 0.09e-9, copied: 0.15e-9 };
        assert!(known.least().is_some() && known.least() == least(best));
        assert!(!(0..5_000).any(|_| known.measures(|| true)), "it is known");

        let mut known = Knowledge::NONE;
        assert!(!known.measures(|| false), "there is no room");
        assert!(!known.is_known() && known.measures(|| true), "there is now");
        known.learn(None);
        assert!(known.is_known() && known.least().is_none());
        assert!(!(0..5_000).any(|_| known.measures(|| true)), "one of the routes is not there");
    }

    #[test]
    fn both_routes_are_measured() {
        let speeds = measure().expect("this machine has both");
        assert!(speeds.mapped > 0.0 && speeds.copied > 0.0 && speeds.copied < 1e-6);
    }
}
