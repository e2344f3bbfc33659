//! One process's place in the cluster: who sits there now, who did, and who may next.
//!
//! *Invariant:* a seat has a key exactly while a process of it was started and not reported ended.

use std::collections::VecDeque;
use std::time::Duration;

use super::Moment;
use super::liveness::Liveness;
use crate::plan::{RestartWhen, Supervision};
use crate::supervise::{Cause, ProcessPhase, ProcessState, ReadyWhen};
use crate::wire::process::Key;
use crate::wire::status::AfterLeaving;

/// Why a process that was told to end was told so, which says what follows its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Then {
    /// Nothing: the cluster ends, or the worker is not wanted any more.
    Rest,
    /// It is started again at once.
    Return,
    /// It is started again when the scheduler is READY.
    Rejoin,
    /// It is dealt with as a death.
    Judge,
}

/// Longest delay before the restart of a worker that died at work: whoever submitted the task that
/// ended it, and everybody else, waits that long for the worker.
const LONGEST_AT_WORK: Duration = Duration::from_secs(5);

/// What the death of a process leads to.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum AfterDeath {
    /// It is started again after this delay.
    Restart { delay: Duration },
    /// It ended as it should.
    Rest,
    /// It is not tried again.
    Fail { reason: String },
}

/// One process's place.
#[derive(Clone, Debug)]
pub(super) struct Seat {
    pub(super) ready_when: ReadyWhen,
    pub(super) shown: ProcessState,
    pub(super) key: Option<Key>,
    /// When the living process was started.
    pub(super) started: Moment,
    /// When the living process became READY.
    pub(super) ready: Option<Moment>,
    /// When the living process must be READY.
    pub(super) ready_by: Option<Moment>,
    /// When the living process, told to end, is killed.
    pub(super) kill_at: Option<Moment>,
    /// When the living process, killed, is given up.
    pub(super) give_up_at: Option<Moment>,
    /// What follows its end, once it was told to end.
    pub(super) then: Then,
    /// Its own word on why it cannot start, or ours on why it was ended.
    pub(super) blame: Option<String>,
    /// Its own word on what is to follow its end, when somebody else wished that.
    pub(super) leaving: Option<AfterLeaving>,
    /// When it may be started again.
    pub(super) not_before: Moment,
    /// Whether its GPU must still become free before it is started again.
    pub(super) gpu_pending: bool,
    /// When it was started again after a death that was not at work, within the window.
    recent: VecDeque<Moment>,
    /// Deaths since it was last healthy; the first delay is that of the second, unless it died
    /// before it was READY.
    strikes: u32,
    /// Whether its next start is none of a dead process: it ended as wished, and is wanted again.
    pub(super) afresh: bool,
    /// Why it is failed.
    pub(super) cause: Option<Cause>,
    /// What is known of the living process's answering.
    pub(super) liveness: Liveness,
}

impl Seat {
    pub(super) fn new(ready_when: ReadyWhen, shown: ProcessState) -> Self {
        Self {
            ready_when,
            shown,
            key: None,
            started: Moment::ZERO,
            ready: None,
            ready_by: None,
            kill_at: None,
            give_up_at: None,
            then: Then::Judge,
            blame: None,
            leaving: None,
            not_before: Moment::ZERO,
            gpu_pending: false,
            recent: VecDeque::new(),
            strikes: 0,
            afresh: false,
            cause: None,
            liveness: Liveness::default(),
        }
    }

    pub(super) fn phase(&self) -> ProcessPhase {
        self.shown.state
    }

    /// Whether it lives, and was not told to end.
    pub(super) fn is_at_work(&self) -> bool {
        use ProcessPhase::{Ready, Starting, Unresponsive};
        matches!(self.phase(), Starting | Ready | Unresponsive)
    }

    pub(super) fn is_alive(&self) -> bool {
        self.key.is_some()
    }

    /// Puts a new process into the seat.
    pub(super) fn take(&mut self, key: Key, now: Moment, ready_by: Moment) {
        debug_assert!(self.key.is_none() && !self.gpu_pending, "an empty seat whose GPU is free");
        self.key = Some(key);
        self.shown.restarts += u32::from(self.shown.last_exit.is_some() && !self.afresh);
        self.afresh = false;
        self.started = now;
        self.ready = None;
        self.ready_by = Some(ready_by);
        self.kill_at = None;
        self.give_up_at = None;
        self.then = Then::Judge;
        self.blame = None;
        self.leaving = None;
        self.cause = None;
        self.liveness = Liveness::default();
        self.shown.state = ProcessPhase::Starting;
        self.shown.step = None;
        self.shown.address = None;
        self.shown.dashboard = None;
        self.shown.peers.clear();
        self.shown.ucx = None;
        self.shown.notes.clear();
        self.shown.timings = Default::default();
    }

    /// Takes the ended process out.
    pub(super) fn leave(&mut self) {
        self.key = None;
        self.kill_at = None;
        self.give_up_at = None;
        self.ready_by = None;
        self.shown.pid = None;
    }

    /// Forgets earlier deaths, as after a healthy while or on a person's word.
    pub(super) fn forgive(&mut self) {
        self.recent.clear();
        self.strikes = 0;
        self.shown.deaths_at_work = 0;
        self.not_before = Moment::ZERO;
    }

    /// Whether the process that ended could do its work, as far as one can tell: it said itself
    /// that it was READY. Of a program that was only executed nobody knows.
    fn said_ready(&self) -> bool {
        self.ready.is_some() && self.ready_when == ReadyWhen::Said
    }

    /// What follows from its death: the restart policy. `jitter` is from 0 to 1, and `by_work` says
    /// whether the work that it is given can end it, as a worker's can.
    ///
    /// A process that dies again and again before it is READY cannot run, and is given up. One that
    /// dies at work can: its next task may be a better one. It always comes back, more slowly each
    /// time.
    pub(super) fn judge(
        &mut self,
        succeeded: bool,
        by_work: bool,
        policy: &Supervision,
        now: Moment,
        jitter: f64,
    ) -> AfterDeath {
        let wanted = match policy.restart {
            RestartWhen::Never => false,
            RestartWhen::OnFailure => !succeeded,
            RestartWhen::Always => true,
        };
        if !wanted {
            let failed = || AfterDeath::Fail { reason: "it is not to be restarted".to_owned() };
            return if succeeded { AfterDeath::Rest } else { failed() };
        }
        let healthy = self.ready.is_some_and(|ready| now - ready >= policy.healthy_after.0);
        if healthy {
            self.forgive();
        }
        let at_work = by_work && self.said_ready();
        while self.recent.front().is_some_and(|at| now.saturating_sub(*at) >= policy.window.0) {
            self.recent.pop_front();
        }
        if !at_work && self.recent.len() >= policy.limit as usize {
            let times = if policy.limit == 1 { "once" } else { &format!("{} times", policy.limit) };
            let said = by_work && self.ready_when == ReadyWhen::Said;
            let ready = if said { " without becoming READY" } else { "" };
            let reason = format!("it was restarted {times} within {}{ready}", policy.window);
            return AfterDeath::Fail { reason };
        }
        // What was READY is tried again at once, the first time; what dies again soon waits.
        let at_once = self.strikes == 0 && self.ready.is_some();
        let earlier = self.strikes.saturating_sub(1);
        let longest = policy.backoff_max.0;
        let longest = if at_work { longest.min(LONGEST_AT_WORK) } else { longest };
        let grown = || delay(earlier, policy.backoff.0, longest, jitter);
        let delay = if at_once { Duration::ZERO } else { grown() };
        self.strikes = self.strikes.max(u32::from(!at_once)) + 1;
        if at_work {
            self.shown.deaths_at_work += 1;
        } else {
            self.recent.push_back(now + delay);
        }
        AfterDeath::Restart { delay }
    }
}

/// The delay before the restart that follows `earlier` delayed ones: doubled with each, and up to
/// half as long again, so that workers that died together do not return together and yet each
/// delay is longer than the one before, until the longest.
fn delay(earlier: u32, first: Duration, longest: Duration, jitter: f64) -> Duration {
    let doubled = first.saturating_mul(1u32.checked_shl(earlier).unwrap_or(u32::MAX));
    doubled.min(longest).mul_f64(1.0 + jitter.clamp(0.0, 1.0) / 2.0).min(longest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn delays_grow_until_the_longest(jitter in proptest::collection::vec(0.0..1.0f64, 40)) {
            let policy = Supervision::default();
            let (first, longest) = (policy.backoff.0, policy.backoff_max.0);
            let delays = (0..).zip(&jitter);
            let delays = delays.map(|(strikes, jitter)| delay(strikes, first, longest, *jitter));
            let delays: Vec<_> = delays.collect();
            for pair in delays.windows(2) {
                prop_assert!(pair[0] < pair[1] || pair[1] > longest / 2, "{:?}", pair);
            }
            prop_assert!(delays.iter().all(|d| *d <= longest));
            prop_assert!(delays[0] >= first);
        }
    }
}
