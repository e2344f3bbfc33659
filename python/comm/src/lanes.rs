//! Which way large frames take between processes of this machine.
//!
//! The receiver may copy them from the sender's memory with a call of the kernel, or the sender may
//! write them to memory that both have mapped. Which is faster is measured once a process, when it
//! first matters.
//!
//! *Invariant:* [`least`] decides; nothing here changes memory that others use.

#![allow(unsafe_code)]

use std::time::{Duration, Instant};

use nix::unistd::Pid;

use crate::copy::{self, Part, Piece};
use crate::memory::arena::{Arena, Budget};

/// What to ask a peer to write to mapped memory costs more than to copy: two more messages.
const ASKING: Duration = Duration::from_micros(100);

/// Messages up to this size, in bytes, are never worth it.
pub(crate) const LEAST: usize = 1 << 20;

const SAMPLE: usize = 8 << 20;

/// Seconds a byte, of the two ways.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Speeds {
    pub(crate) mapped: f64,
    pub(crate) copied: f64,
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

/// Copies some MiB of this process both ways. None if one of them isn't there.
#[allow(clippy::cast_precision_loss)]
pub(crate) fn measure() -> Option<Speeds> {
    let arena = Arena::new(&Budget::new(SAMPLE)).ok()?;
    let range = arena.take(SAMPLE)?;
    let from = vec![1_u8; SAMPLE];
    let own = Pid::this();
    let best = |copy: &mut dyn FnMut() -> Option<()>| -> Option<f64> {
        let mut best = f64::INFINITY;
        for _ in 0..5 {
            let began = Instant::now();
            copy()?;
            best = best.min(began.elapsed().as_secs_f64());
        }
        Some(best / SAMPLE as f64)
    };
    let to = range.start().as_ptr();
    let mapped = best(&mut || {
        let piece = Piece { from: from.as_ptr(), to: range.start(), len: SAMPLE };
        // SAFETY: the range is writable, as long as the sample, and nobody else's.
        unsafe { copy::stream(piece) };
        Some(())
    })?;
    let address = from.as_ptr().expose_provenance() as u64;
    // SAFETY: as above.
    let copied =
        best(&mut || unsafe { copy::read_all(own, vec![Part { address, to, len: SAMPLE }]) }.ok())?;
    Some(Speeds { mapped, copied })
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
    fn both_ways_are_measured() {
        let speeds = measure().expect("this machine has both");
        assert!(speeds.mapped > 0.0 && speeds.copied > 0.0 && speeds.copied < 1e-6);
    }
}
