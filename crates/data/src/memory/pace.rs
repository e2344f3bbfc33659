//! Work that is done while the processors have nothing else to do.
//!
//! A thread of the lowest priority still gets what is left between two messages of others, and
//! takes it from their caches; many of them, one in each of a machine's workers, take seconds from
//! the programs that have just begun. So one that was kept waiting pauses.
//!
//! *Invariant:* a pause follows each step in which the thread waited longer than it worked.

use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};

/// How long a thread pauses that was kept waiting during a step; twice as long each time in a row.
const PAUSE: Duration = Duration::from_millis(20);

/// At most so long.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// After so long it gives up.
const LONGEST: Duration = Duration::from_secs(30);

/// The steps of one thread.
pub(super) struct Pace {
    began: Instant,
    /// The clocks before the last step.
    step: Option<(Instant, Duration)>,
    pause: Duration,
}

/// CPU time of this thread.
fn worked() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

/// Whether others had the processor for longer than this thread.
fn was_kept_waiting(wall: Duration, worked: Duration) -> bool {
    wall > 2 * worked
}

impl Pace {
    pub(super) fn new() -> Self {
        Self { began: Instant::now(), step: None, pause: PAUSE }
    }

    /// Before each step: pauses if the last one was kept waiting. False when it took too long.
    pub(super) fn goes_on(&mut self) -> bool {
        if let Some((wall, before)) = self.step {
            if was_kept_waiting(wall.elapsed(), worked().saturating_sub(before)) {
                std::thread::sleep(self.pause);
                self.pause = LONGEST_PAUSE.min(2 * self.pause);
            } else {
                self.pause = PAUSE;
            }
        }
        self.step = Some((Instant::now(), worked()));
        self.began.elapsed() < LONGEST
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_waited_longer_than_it_worked_pauses() {
        let millis = Duration::from_millis;
        assert!(!was_kept_waiting(millis(10), millis(10)));
        assert!(!was_kept_waiting(millis(10), millis(5)));
        assert!(was_kept_waiting(millis(11), millis(5)));
        assert!(was_kept_waiting(millis(1), Duration::ZERO));
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no clock of a thread's time")]
    fn a_step_in_which_a_thread_slept_is_followed_by_a_pause() {
        let mut pace = Pace::new();
        assert!(pace.goes_on());
        for longer in [1, 2] {
            std::thread::sleep(Duration::from_millis(200));
            let before = Instant::now();
            assert!(pace.goes_on());
            assert!(before.elapsed() >= longer * PAUSE);
        }
        pace.pause = LONGEST_PAUSE;
        std::thread::sleep(Duration::from_millis(200));
        assert!(pace.goes_on());
        assert_eq!(pace.pause, LONGEST_PAUSE);
        pace.began = Instant::now().checked_sub(LONGEST).unwrap();
        assert!(!pace.goes_on());
    }
}
