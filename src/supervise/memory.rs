//! Decides when to check a process's memory use, and when it is too high.
//!
//! *Invariant:* a process far below its limit is checked rarely, so that an idle cluster stays
//! idle.

use std::time::Duration;

use crate::plan::KILL_PERCENT;

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

/// Compares `resident` bytes with `limit`.
pub(super) fn judge(resident: u64, limit: u64) -> MemoryFinding {
    let room = limit as f64 / 100.0 * KILL_PERCENT as f64 - resident as f64;
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
    fn a_process_is_killed_at_the_plans_share_and_looked_at_the_more_the_nearer() {
        assert_eq!(judge(KILL_PERCENT, 100), MemoryFinding::Reached);
        assert_eq!(
            judge((KILL_PERCENT - 1) << 30, 100 << 30),
            MemoryFinding::LookAfter(Duration::from_secs_f64((1u64 << 30) as f64 / 4e9))
        );
        assert_eq!(judge(0, 1 << 40), MemoryFinding::LookAfter(Duration::from_secs(10)));
        let near = judge(KILL_PERCENT - 1, 100);
        assert_eq!(near, MemoryFinding::LookAfter(Duration::from_millis(100)));
    }
}
