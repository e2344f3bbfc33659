//! When to look at how much memory a process uses, and when it is too much.
//!
//! *Invariant:* a process far from its limit is looked at seldom, so that a cluster at rest stays
//! at rest.

use std::time::Duration;

/// The share of its limit at which a process is stopped, as dask's nanny has it.
const SHARE: f64 = 0.95;

/// No process fills memory faster; pages are zeroed before they are given.
const FASTEST_BYTES_PER_SECOND: f64 = 4e9;

/// What a look at a process leads to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum MemoryFinding {
    /// It has reached its limit.
    Reached,
    /// It cannot reach its limit before this long.
    LookAfter(Duration),
}

/// Judges `resident` bytes of a `limit`.
pub(super) fn judge(resident: u64, limit: u64) -> MemoryFinding {
    let room = limit as f64 * SHARE - resident as f64;
    if room <= 0.0 {
        return MemoryFinding::Reached;
    }
    MemoryFinding::LookAfter(Duration::from_secs_f64(
        (room / FASTEST_BYTES_PER_SECOND).clamp(0.1, 10.0),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_stopped_at_95_percent_and_looked_at_the_more_the_nearer() {
        assert_eq!(judge(95, 100), MemoryFinding::Reached);
        assert_eq!(
            judge(94 << 30, 100 << 30),
            MemoryFinding::LookAfter(Duration::from_secs_f64(
                (0.95 * (100u64 << 30) as f64 - (94u64 << 30) as f64) / 4e9
            ))
        );
        assert_eq!(judge(0, 1 << 40), MemoryFinding::LookAfter(Duration::from_secs(10)));
        assert_eq!(judge(94, 100), MemoryFinding::LookAfter(Duration::from_millis(100)));
    }
}
