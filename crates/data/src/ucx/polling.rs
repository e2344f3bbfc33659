//! How long the UCX thread polls before it sleeps.
//!
//! Pure: durations in, a decision out. Does not look at a clock.
//!
//! Sleeping and waking up costs tens of microseconds, twice for a message and its answer, so a
//! thread that will soon have work does better to poll. What it waits for, and how long it slept
//! recently, predict whether it will.
//!
//! *Invariant:* an idle thread polls for at most [`LONGEST`] at a time, and soon only for
//! [`SHORTEST`].

use std::time::Duration;

/// The shortest poll: less than falling asleep costs.
const SHORTEST: Duration = Duration::from_micros(4);

/// The longest poll: a few times what a sleeping peer takes to answer.
const LONGEST: Duration = Duration::from_micros(250);

/// A sleep shorter than this cost more than polling would have.
const SHORT_SLEEP: Duration = Duration::from_micros(500);

/// The adaptive limit on polling.
#[derive(Clone, Copy, Debug)]
pub(super) struct Polling {
    limit: Duration,
}

impl Polling {
    pub(super) fn new() -> Self {
        Self { limit: SHORTEST }
    }

    /// Whether a thread that has polled this long without finding work continues to poll.
    /// `expecting`: a peer owes it an answer.
    pub(super) fn continues(self, looked: Duration, expecting: bool) -> bool {
        looked < if expecting { LONGEST } else { self.limit }
    }

    /// Learns from a sleep that followed polling without success.
    pub(super) fn slept(&mut self, duration: Duration) {
        self.limit = if duration < SHORT_SLEEP {
            LONGEST
        } else {
            // Polls that fail repeatedly shrink the limit quickly; it costs little to grow it
            // again.
            (self.limit / 8).max(SHORTEST)
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_that_came_soon_is_waited_for_the_next_time() {
        let mut polling = Polling::new();
        assert!(!polling.continues(Duration::from_micros(5), false));
        polling.slept(Duration::from_micros(120));
        assert!(polling.continues(Duration::from_micros(120), false));
        assert!(!polling.continues(LONGEST, false));
    }

    #[test]
    fn an_answer_that_is_owed_is_waited_for_but_not_for_ever() {
        let polling = Polling::new();
        assert!(polling.continues(LONGEST / 2, true));
        assert!(!polling.continues(LONGEST, true));
    }

    #[test]
    fn a_thread_with_nothing_to_do_stops_looking() {
        let mut polling = Polling::new();
        polling.slept(Duration::from_micros(1));
        for _ in 0..2 {
            polling.slept(Duration::from_secs(1));
        }
        assert!(!polling.continues(SHORTEST, false));
    }
}
