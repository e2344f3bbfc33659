//! Decides when to check a process's memory use, and when it is too high.
//!
//! *Invariant:* a process far below its limit is checked rarely, so that an idle cluster stays
//! idle.

use std::time::Duration;

/// No process fills memory faster, because the kernel zeroes pages first.
const FASTEST_BYTES_PER_SECOND: f64 = 4e9;

/// The result of a memory check.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum MemoryFinding {
    /// The process has reached its limit.
    Reached,
    /// The process can't reach its limit before this time has passed.
    LookAfter(Duration),
}

/// The longest time between two checks.
const RAREST: Duration = Duration::from_secs(10);

/// Compares `resident` bytes with so many percent of `limit`; without a percentage any number is
/// fine for now.
pub(super) fn judge(resident: u64, limit: u64, percent: Option<f64>) -> MemoryFinding {
    let Some(percent) = percent else { return MemoryFinding::LookAfter(RAREST) };
    let room = limit as f64 / 100.0 * percent - resident as f64;
    if room <= 0.0 {
        return MemoryFinding::Reached;
    }
    MemoryFinding::LookAfter(Duration::from_secs_f64(
        (room / FASTEST_BYTES_PER_SECOND).clamp(0.1, RAREST.as_secs_f64()),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_killed_at_the_share_that_is_given_and_looked_at_the_more_the_nearer() {
        assert_eq!(judge(95, 100, Some(95.0)), MemoryFinding::Reached);
        assert_eq!(judge(60, 100, Some(60.0)), MemoryFinding::Reached);
        let near = judge(94 << 30, 100 << 30, Some(95.0));
        let after = Duration::from_secs_f64((1u64 << 30) as f64 / FASTEST_BYTES_PER_SECOND);
        assert_eq!(near, MemoryFinding::LookAfter(after));
        assert_eq!(judge(0, 1 << 40, Some(95.0)), MemoryFinding::LookAfter(RAREST));
        let nearest = judge(94, 100, Some(95.0));
        assert_eq!(nearest, MemoryFinding::LookAfter(Duration::from_millis(100)));
        assert_eq!(judge(200, 100, None), MemoryFinding::LookAfter(RAREST), "it is never killed");
    }
}
