//! A process slot: the current process, its predecessors' deaths, and when the next may start.
//!
//! *Invariant:* a slot has a key exactly while its process was started and has not been reported
//! ended.

use std::collections::VecDeque;
use std::time::Duration;

use super::Moment;
use super::liveness::Liveness;
use crate::{Cause, ProcessPhase, ProcessState, ReadyWhen};
use cuda_cluster_model::plan::{RestartWhen, Supervision};
use cuda_cluster_wire::process::Key;
use cuda_cluster_wire::status::{AfterLeaving, Condition};

/// What follows the end of a process, depending on why it was asked to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AfterStop {
    /// Nothing: the cluster is ending, or the worker is no longer requested.
    StayStopped,
    /// It is restarted at once.
    Restart,
    /// It is restarted when the scheduler is READY.
    Rejoin,
    /// Its end counts as a death.
    CountAsDeath,
}

/// Longest delay before the restart of a worker that died while READY and without a task, because
/// the workload waits that long for the worker.
const LONGEST_AT_WORK: Duration = Duration::from_secs(5);

/// What follows a death.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum AfterDeath {
    /// It is restarted after this delay.
    Restart { delay: Duration },
    /// It ended as expected.
    StayStopped,
    /// It is not restarted.
    Fail { reason: String },
}

/// The slot of one process.
#[derive(Clone, Debug)]
pub(super) struct Slot {
    pub(super) ready_when: ReadyWhen,
    pub(super) shown: ProcessState,
    /// Whether it is to run, as far as the user is concerned.
    pub(super) wanted: bool,
    pub(super) key: Option<Key>,
    /// When the living process was started.
    pub(super) started: Moment,
    /// When the living process became READY.
    pub(super) ready: Option<Moment>,
    /// Percentage of its memory limit at which it is killed; `None` for never.
    pub(super) kill_percent: Option<f64>,
    /// Whether the living process has begun a task.
    pub(super) has_worked: bool,
    /// Deadline for the living process to become READY.
    pub(super) ready_by: Option<Moment>,
    /// When to kill the living process, if it was asked to end.
    pub(super) kill_at: Option<Moment>,
    /// When to give up the living process, if it was killed.
    pub(super) give_up_at: Option<Moment>,
    /// What follows its end, once it was asked to end.
    pub(super) then: AfterStop,
    /// Why it could not start, as reported by the process, or why the supervisor ended it.
    pub(super) blame: Option<String>,
    /// What is to follow its end, as reported by the process, if someone else asked it to end.
    pub(super) leaving: Option<AfterLeaving>,
    /// Why that was, and whether it is for want of the scheduler that it had joined.
    pub(super) farewell: Option<(String, bool)>,
    /// When it left because it was not wanted any more.
    pub(super) rested: Option<Moment>,
    /// Earliest time of its next start.
    pub(super) not_before: Moment,
    /// Whether its GPU must become free before it is restarted.
    pub(super) gpu_pending: bool,
    /// Times of restarts within the window, except those after a death while READY.
    recent: VecDeque<Moment>,
    /// Times of deaths while READY within the window, if they are limited.
    recent_at_work: VecDeque<Moment>,
    /// Number of deaths since it was last healthy, except those of processes that had begun a task;
    /// the first delay follows the second death, or the first if the process was not READY.
    strikes: u32,
    /// Whether its next start does not count as a restart, because it had ended as requested.
    pub(super) afresh: bool,
    /// Why it has failed.
    pub(super) cause: Option<Cause>,
    /// What is known about the living process's answers.
    pub(super) liveness: Liveness,
}

impl Slot {
    pub(super) fn new(
        ready_when: ReadyWhen,
        kill_percent: Option<f64>,
        shown: ProcessState,
    ) -> Self {
        Self {
            ready_when,
            shown,
            wanted: true,
            key: None,
            started: Moment::ZERO,
            ready: None,
            kill_percent,
            has_worked: false,
            rested: None,
            ready_by: None,
            kill_at: None,
            give_up_at: None,
            then: AfterStop::CountAsDeath,
            blame: None,
            leaving: None,
            farewell: None,
            not_before: Moment::ZERO,
            gpu_pending: false,
            recent: VecDeque::new(),
            recent_at_work: VecDeque::new(),
            strikes: 0,
            afresh: false,
            cause: None,
            liveness: Liveness::default(),
        }
    }

    pub(super) fn phase(&self) -> ProcessPhase {
        self.shown.state
    }

    /// Whether it is running and has not been asked to end.
    pub(super) fn is_at_work(&self) -> bool {
        use ProcessPhase::{Ready, Starting, Unresponsive};
        matches!(self.phase(), Starting | Ready | Unresponsive)
    }

    /// Whether a program that says nothing has taken the shim's place in its last process. The news
    /// of its end may come before that.
    pub(super) fn has_been_executed(&self) -> bool {
        let bound = self.shown.timings.bound_ms.is_some() && self.blame.is_none();
        self.ready_when == ReadyWhen::Executed && (self.ready.is_some() || bound)
    }

    pub(super) fn is_alive(&self) -> bool {
        self.key.is_some()
    }

    /// Sets a newly started process.
    pub(super) fn take(&mut self, key: Key, now: Moment, ready_by: Moment) {
        debug_assert!(self.key.is_none() && !self.gpu_pending, "an empty slot whose GPU is free");
        self.key = Some(key);
        self.shown.restarts += u32::from(self.shown.last_exit.is_some() && !self.afresh);
        self.afresh = false;
        self.started = now;
        self.ready = None;
        self.has_worked = false;
        self.rested = None;
        self.ready_by = Some(ready_by);
        self.kill_at = None;
        self.give_up_at = None;
        self.then = AfterStop::CountAsDeath;
        self.blame = None;
        self.leaving = None;
        self.farewell = None;
        self.cause = None;
        self.liveness = Liveness::default();
        self.shown.state = ProcessPhase::Starting;
        self.shown.step = None;
        self.shown.address = None;
        self.shown.dashboard = None;
        self.shown.peers.clear();
        self.shown.ucx = None;
        self.reports(Condition::default());
        self.shown.notes.clear();
        self.shown.timings = Default::default();
    }

    /// Shows what the living process reports about itself.
    pub(super) fn reports(&mut self, condition: Condition) {
        self.shown.device_pool = condition.device_pool;
        self.shown.missing_ports = condition.missing_ports;
        self.shown.work = condition.work;
        self.shown.received_from = condition.received_from;
        if let Some(peers) = condition.peers {
            self.shown.peers = peers;
        }
    }

    /// Removes the ended process.
    pub(super) fn leave(&mut self) {
        self.key = None;
        self.kill_at = None;
        self.give_up_at = None;
        self.ready_by = None;
        self.shown.pid = None;
    }

    /// Forgets earlier deaths, after a user's request.
    pub(super) fn forgive(&mut self) {
        self.recover();
        self.recent_at_work.clear();
    }

    /// Forgets what delays and limits the next restart, after a healthy period.
    fn recover(&mut self) {
        self.recent.clear();
        self.strikes = 0;
        self.shown.deaths_at_work = 0;
        self.not_before = Moment::ZERO;
    }

    /// Whether the ended process was able to work: it had reported READY. For a program that was
    /// only executed this is unknown.
    fn said_ready(&self) -> bool {
        self.ready.is_some() && self.ready_when == ReadyWhen::Said
    }

    /// Applies the restart policy to a death. `jitter` is from 0 to 1, and `by_work` says whether
    /// the workload can cause the death, as it can for a worker.
    ///
    /// A process that repeatedly dies before it is READY can't run, and is given up. One that dies
    /// while READY can run, and its next task may succeed: it is restarted as often as
    /// `limit_at_work` says, with growing delays. They are for processes that end by themselves. If
    /// the process had begun a task, there is no delay: schedulers give up tasks that kill, so such
    /// deaths are as rare as the tasks, and the other tasks wait for the worker.
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
            return if succeeded { AfterDeath::StayStopped } else { failed() };
        }
        let healthy = self.ready.is_some_and(|ready| now - ready >= policy.healthy_after.0);
        if healthy {
            self.recover();
        }
        let at_work = by_work && self.said_ready();
        let said = by_work && self.ready_when == ReadyWhen::Said;
        let (deaths, limit, kind) = match at_work {
            true => (&mut self.recent_at_work, policy.limit_at_work, " after deaths at work"),
            false if said => (&mut self.recent, Some(policy.limit), " without becoming READY"),
            false => (&mut self.recent, Some(policy.limit), ""),
        };
        while deaths.front().is_some_and(|at| now.saturating_sub(*at) >= policy.window.0) {
            deaths.pop_front();
        }
        if let Some(limit) = limit.filter(|limit| deaths.len() >= *limit as usize) {
            let times = if limit == 1 { "once" } else { &format!("{limit} times") };
            let reason = format!("it was restarted {times} within {}{kind}", policy.window);
            return AfterDeath::Fail { reason };
        }
        // A process that was READY is restarted at once the first time; if it dies again soon, and
        // not of a task, it waits.
        let at_once = self.has_worked || (self.strikes == 0 && self.ready.is_some());
        let earlier = self.strikes.saturating_sub(1);
        let longest = policy.backoff_max.0;
        let longest = if at_work { longest.min(LONGEST_AT_WORK) } else { longest };
        let grown = || delay(earlier, policy.backoff.0, longest, jitter);
        let delay = if at_once { Duration::ZERO } else { grown() };
        if !self.has_worked {
            self.strikes = self.strikes.max(u32::from(!at_once)) + 1;
        }
        if at_work {
            self.shown.deaths_at_work += 1;
            if policy.limit_at_work.is_some() {
                self.recent_at_work.push_back(now);
            }
        } else {
            self.recent.push_back(now + delay);
        }
        AfterDeath::Restart { delay }
    }
}

/// The delay before a restart that follows `earlier` delayed ones. It doubles each time, plus up to
/// half of it as jitter, so that workers that died together don't restart together. Each delay is
/// longer than the one before, up to `longest`.
pub(super) fn delay(earlier: u32, first: Duration, longest: Duration, jitter: f64) -> Duration {
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
