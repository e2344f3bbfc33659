//! Asks processes to end, kills those that do not, and ends the cluster.
//!
//! *Invariant:* a process that was asked to end has a time at which it is killed, and a process
//! that was killed has one at which it is given up.

use std::time::Duration;

use super::slot::{AfterStop, Slot};
use super::{Action, Core, Moment, SlotNumber};
use crate::record::What;
use crate::{Cause, ClusterPhase, Escalation, Outcome, ProcessPhase};
use cuda_cluster_model::units::Span;
use cuda_cluster_wire::status::AfterLeaving;

/// After SIGKILL, only a driver or a failing disk can delay a process; the cluster ends without it.
const GIVE_UP: Duration = Duration::from_secs(10);

/// A host's process waits for the processes there, which have the same grace period.
const FARTHER: Duration = Duration::from_secs(10);

/// So many processes are named in a cause; `ps` has all.
const MOST_NAMED: usize = 8;

impl Core {
    /// Asks a living process to end.
    pub(super) fn terminate(
        &mut self,
        number: SlotNumber,
        then: AfterStop,
        reason: &str,
        now: Moment,
    ) {
        let grace = self.grace(number).0;
        let slot = &mut self.slots[number];
        let Some(key) = slot.key else { return };
        slot.then = then;
        if slot.phase() == ProcessPhase::Stopping {
            return;
        }
        slot.shown.state = ProcessPhase::Stopping;
        slot.ready_by = None;
        slot.kill_at = Some(now + grace);
        self.actions.push(Action::Terminate { key });
        self.record(now, Some(number), What::Stopping { reason: reason.to_owned() });
    }

    /// How long a process may take to end.
    fn grace(&self, number: SlotNumber) -> Span {
        let farther = if number < self.hosts_from { Duration::ZERO } else { FARTHER };
        Span(self.policy.grace.0 + farther)
    }

    /// Kills a living process.
    pub(super) fn kill(&mut self, number: SlotNumber, reason: &str, now: Moment) {
        let slot = &mut self.slots[number];
        let Some(key) = slot.key else { return };
        slot.shown.state = ProcessPhase::Stopping;
        slot.ready_by = None;
        slot.kill_at = None;
        slot.give_up_at = slot.give_up_at.or(Some(now + GIVE_UP));
        self.actions.push(Action::Kill { key });
        self.record(now, Some(number), What::Killed { reason: reason.to_owned() });
    }

    pub(super) fn stop(&mut self, how: Escalation, now: Moment) {
        let degraded = self.state.cause.clone();
        let outcome = self.ending.clone().unwrap_or(Outcome::Stopped { degraded });
        match how {
            Escalation::Abandon => self.end_at_once(outcome, now),
            _ => self.begin_end(outcome, how, now),
        }
    }

    /// Starts or escalates the end.
    pub(super) fn begin_end(&mut self, outcome: Outcome, how: Escalation, now: Moment) {
        let cause = match &outcome {
            Outcome::Failed(cause) | Outcome::NotReady(cause) => Some(cause.clone()),
            Outcome::Stopped { .. } | Outcome::Finished => None,
        };
        if self.ending.is_none() {
            self.ending = Some(outcome);
            self.state.cause = cause.or(self.state.cause.take());
            self.enter(ClusterPhase::Stopping, now);
        }
        for number in 0..self.slots.len() {
            if !self.slots[number].is_alive() {
                if self.slots[number].phase() != ProcessPhase::Failed {
                    self.stay_stopped(number);
                }
            } else if how == Escalation::Graceful {
                self.terminate(number, AfterStop::StayStopped, "the cluster ends", now);
            } else {
                self.slots[number].then = AfterStop::StayStopped;
                self.kill(number, "the cluster ends at once", now);
            }
        }
    }

    /// Ends without waiting for processes.
    pub(super) fn end_at_once(&mut self, outcome: Outcome, now: Moment) {
        if self.ending.is_none() {
            self.begin_end(outcome, Escalation::Kill, now);
        }
        self.end(now);
    }

    /// Kills processes whose grace period is over, and those that did not become READY in time.
    pub(super) fn keep_deadlines(&mut self, now: Moment) {
        self.keep_asking(now);
        let due = |at: Option<Moment>| at.is_some_and(|at| at <= now);
        for number in 0..self.slots.len() {
            if due(self.slots[number].kill_at) {
                let reason = format!("it did not end within {}", self.grace(number));
                self.kill(number, &reason, now);
            }
        }
        let late = |core: &Core, number: SlotNumber| {
            let slot = &core.slots[number];
            slot.phase() == ProcessPhase::Starting && due(slot.ready_by)
        };
        let late: Vec<SlotNumber> =
            (0..self.slots.len()).filter(|number| late(self, *number)).collect();
        let held_up = self.state.state.is_first() && self.is_held_up() && self.ready_by <= now;
        if (late.is_empty() && !held_up) || self.ending.is_some() {
            return;
        }
        if self.state.state.is_first() {
            return self.not_ready_in_time(now);
        }
        for number in late {
            let reason = format!(
                "was not ready within {} ({})",
                self.policy.ready_within,
                self.whereabouts(number)
            );
            self.slots[number].blame = Some(reason.clone());
            self.slots[number].then = AfterStop::CountAsDeath;
            self.kill(number, &reason, now);
        }
    }

    fn not_ready_in_time(&mut self, now: Moment) {
        let unready = |number: &SlotNumber| {
            self.slots[*number].phase() != ProcessPhase::Ready && self.slots[*number].wanted
        };
        let hanging: Vec<String> = (0..self.slots.len())
            .filter(unready)
            .map(|number| {
                format!("{} ({})", self.slots[number].shown.name, self.whereabouts(number))
            })
            .collect();
        let guardian = self.guardian.silent_since.map(|_| "the guardian (does not answer)");
        let mut named: Vec<String> =
            guardian.map(str::to_owned).into_iter().chain(hanging).collect();
        let others = named.len().saturating_sub(MOST_NAMED);
        named.truncate(MOST_NAMED);
        if others > 0 {
            named.push(format!("and {others} more"));
        }
        let text = format!("not ready within {}: {}", self.policy.ready_within, named.join(", "));
        let mut cause = Cause::of_cluster(text);
        // What a process that hangs has said is in its log; the first one stands for all.
        let first =
            (0..self.slots.len()).find(|number| unready(number) && self.slots[*number].is_alive());
        if let Some(slot) = first {
            cause.process = Some(self.slots[slot].shown.name.clone());
            self.actions.push(Action::ReadLog { slot });
        }
        self.begin_end(Outcome::NotReady(cause), Escalation::Graceful, now);
    }

    /// Adds the last lines of its log to the cause, if this process is the one that hung.
    pub(super) fn log_read(&mut self, slot: SlotNumber, log_tail: &[String]) {
        let name = self.slots.get(slot).map(|slot| slot.shown.name.clone());
        let outcome = match &mut self.ending {
            Some(Outcome::NotReady(cause)) => Some(cause),
            _ => None,
        };
        for cause in outcome.into_iter().chain(&mut self.state.cause) {
            if cause.process == name {
                cause.log_tail = log_tail.to_vec();
            }
        }
    }

    /// How far the start of a process has come.
    fn whereabouts(&self, number: SlotNumber) -> String {
        let slot = &self.slots[number];
        match &slot.shown.step {
            Some(step) => step.clone(),
            None if slot.phase() == ProcessPhase::Unresponsive => "does not answer".to_owned(),
            None if slot.phase() == ProcessPhase::Waiting => "waits for the scheduler".to_owned(),
            None if slot.shown.timings.bound_ms.is_none() => "not bound yet".to_owned(),
            None => "bound, has said nothing since".to_owned(),
        }
    }

    /// Updates the cluster's phase from those of its processes.
    pub(super) fn settle(&mut self, now: Moment) {
        if self.over {
            return;
        }
        if self.ending.is_some() {
            let given_up = |slot: &Slot| slot.give_up_at.is_some_and(|at| at <= now);
            if self.slots.iter().all(|slot| !slot.is_alive() || given_up(slot)) {
                self.end(now);
            }
            return;
        }
        let wanted: Vec<&Slot> = self.slots.iter().filter(|slot| slot.wanted).collect();
        let workers = &wanted[self.workers_from..];
        let done = |slot: &&Slot| slot.phase() == ProcessPhase::Stopped;
        if self.run_to_completion && !workers.is_empty() && workers.iter().all(done) {
            return self.begin_end_and_settle(Outcome::Finished, now);
        }
        let failed = workers.iter().find_map(|slot| slot.cause.clone());
        // One that starts again just then would join the next scheduler there, alone.
        let ended = |slot: &&Slot| done(slot) && slot.leaving == Some(AfterLeaving::Disband);
        let none_stays = workers.iter().all(done)
            || workers.iter().any(ended)
                && !workers.iter().any(|slot| slot.phase() == ProcessPhase::Ready);
        if self.workers_from == 0 && !workers.is_empty() && none_stays {
            let farewells: Vec<(String, bool)> =
                workers.iter().filter_map(|slot| slot.farewell.clone()).collect();
            return self.none_is_wanted(&farewells, now);
        }
        let lost = |slot: &&Slot| done(slot) || slot.phase() == ProcessPhase::Failed;
        if let (Some(cause), true) = (&failed, workers.iter().all(lost) && !self.scheduler_stays) {
            return self.begin_end_and_settle(Outcome::Failed(cause.clone()), now);
        }
        let settled = |slot: &&Slot| done(slot) || slot.phase() == ProcessPhase::Ready;
        let silent = |slot: &&Slot| slot.phase() == ProcessPhase::Unresponsive;
        let answers = self.guardian.silent_since.is_none();
        let phase = match (failed.is_some(), answers && wanted.iter().all(settled)) {
            (true, _) => ClusterPhase::Degraded,
            (false, true) if self.unverified => ClusterPhase::Verifying,
            (false, true) => ClusterPhase::Ready,
            (false, false) if self.state.state.is_first() => ClusterPhase::Starting,
            (false, false) if wanted.iter().all(|slot| settled(slot) || silent(slot)) => {
                ClusterPhase::Unresponsive
            }
            (false, false) => ClusterPhase::Recovering,
        };
        self.state.cause = failed;
        if phase == ClusterPhase::Ready && self.state.ready_after_ms.is_none() {
            self.state.ready_after_ms = Some(super::millis(now));
        }
        self.enter(phase, now);
    }

    /// Ends where all programs have ended well, or the scheduler elsewhere that the workers joined
    /// has ended or has released them all: nobody is left who could be READY.
    fn none_is_wanted(&mut self, farewells: &[(String, bool)], now: Moment) {
        if let Some((reason, _)) = farewells.iter().find(|(_, lost)| *lost) {
            let text = format!("the scheduler that its workers had joined is lost: {reason}");
            let cause = Cause { scheduler_lost: true, ..Cause::of_cluster(text) };
            return self.begin_end_and_settle(Outcome::Failed(cause), now);
        }
        if let Some((reason, _)) = farewells.first() {
            self.from_elsewhere = true;
            let text = format!("its workers are not wanted any more: {reason}");
            self.state.notes.push(text.clone());
            self.record(now, None, What::Note { text });
        }
        self.begin_end_and_settle(Outcome::Stopped { degraded: None }, now);
    }

    fn begin_end_and_settle(&mut self, outcome: Outcome, now: Moment) {
        self.begin_end(outcome, Escalation::Graceful, now);
        self.settle(now);
    }

    fn end(&mut self, now: Moment) {
        let Some(outcome) = self.ending.clone() else { return };
        for slot in 0..self.slots.len() {
            if let (Some(key), Some(pid)) = (self.slots[slot].key, self.slots[slot].shown.pid) {
                let text = format!("process {pid} has not ended yet");
                self.actions.push(Action::Kill { key });
                self.record(now, Some(slot), What::Note { text });
            }
        }
        let phase = match outcome {
            Outcome::Stopped { .. } | Outcome::Finished => ClusterPhase::Stopped,
            Outcome::NotReady(_) | Outcome::Failed(_) => ClusterPhase::Failed,
        };
        self.state.ended_at = Some(self.time_of_day(now));
        self.enter(phase, now);
        self.over = true;
        self.actions.push(Action::End(outcome));
    }

    fn enter(&mut self, phase: ClusterPhase, now: Moment) {
        if self.state.state != phase {
            self.state.state = phase;
            let cause: Option<Cause> = self.state.cause.clone();
            self.record(now, None, What::Cluster { state: phase, cause });
        }
    }
}
