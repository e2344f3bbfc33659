//! Handles deaths: how they are recorded, and what follows.
//!
//! `slot` decides how often a worker may die.

use std::path::PathBuf;

use super::seat::{AfterDeath, Then};
use super::{Action, Core, GpuFinding, Key, Moment, SeatNumber, millis};
use crate::plan::SchedulerDeath;
use crate::supervise::record::{GpuError, What};
use crate::supervise::state::LastExit;
use crate::supervise::{Cause, Escalation, Outcome, ProcessPhase, ReadyWhen};
use crate::wire::process::Exit;
use crate::wire::status::AfterLeaving;

impl Core {
    /// Handles a written bundle, which may contain errors of the GPU that the exit did not show.
    pub(super) fn bundled(
        &mut self,
        number: SeatNumber,
        at: &str,
        path: PathBuf,
        errors: Vec<GpuError>,
        now: Moment,
    ) {
        let Some(seat) = self.seats.get_mut(number) else { return };
        let gpu = seat.shown.gpu.as_ref().map_or(String::new(), |gpu| format!(" {}", gpu.index));
        let texts: Vec<String> =
            errors.iter().map(|error| format!("GPU{gpu} reported {error}")).collect();
        if let Some(exit) = seat.shown.last_exit.as_mut().filter(|exit| exit.at == at) {
            exit.bundle = Some(path);
            exit.gpu_errors = errors;
        }
        for text in texts {
            self.record(now, Some(number), What::Note { text });
        }
    }

    pub(super) fn exited(&mut self, key: Key, exit: Exit, log_tail: Vec<String>, now: Moment) {
        let Some(number) = self.seat_of(key) else { return };
        let at = self.time_of_day(now);
        let seat = &mut self.seats[number];
        let told = seat.phase() == ProcessPhase::Stopping;
        let succeeded = exit.is_success() && seat.blame.is_none();
        let reason = match &seat.blame {
            Some(blame) if exit.code.is_none() && exit.signal.is_none() => blame.clone(),
            Some(blame) => format!("{blame}; it {exit}"),
            None => exit.to_string(),
        };
        let pid = seat.shown.pid;
        seat.leave();
        seat.shown.last_exit = Some(LastExit {
            exit,
            pid,
            reason: reason.clone(),
            at,
            bundle: None,
            gpu_errors: Vec::new(),
        });
        self.record(now, Some(number), What::Exited { exit, reason: reason.clone() });
        let then = if told { self.seats[number].then } else { Then::Judge };
        if then == Then::Judge && !succeeded {
            self.actions.push(Action::Bundle { seat: number });
        }
        let cause = Cause {
            process: Some(self.seats[number].shown.name.clone()),
            text: format!("{} {reason}", self.seats[number].shown.name),
            exit: Some(exit),
            log_tail,
        };
        match then {
            _ if self.ending.is_some() => self.rest(number),
            Then::Rest => self.rest(number),
            Then::Return => self.return_at(number, now),
            Then::Rejoin => self.rejoin(number),
            Then::Judge => match self.seats[number].leaving.filter(|_| succeeded) {
                Some(then) => self.leave(number, then, now),
                None => self.judge(number, succeeded, cause, now),
            },
        }
    }

    /// What follows an exit that someone other than the supervisor requested.
    fn leave(&mut self, number: SeatNumber, then: AfterLeaving, now: Moment) {
        match then {
            AfterLeaving::Rest => self.rest(number),
            AfterLeaving::Return => {
                let what = What::Restarting { in_ms: 0, deaths_at_work: 0 };
                self.record(now, Some(number), what);
                self.return_at(number, now);
            }
            AfterLeaving::EndCluster => {
                self.rest(number);
                let outcome = Outcome::Stopped { degraded: self.state.cause.clone() };
                self.begin_end(outcome, Escalation::Graceful, now);
            }
        }
    }

    /// What follows a death that nobody requested.
    fn judge(&mut self, number: SeatNumber, succeeded: bool, cause: Cause, now: Moment) {
        let scheduler = number < self.workers_from;
        if self.run_to_completion && !scheduler && succeeded {
            return self.rest(number);
        }
        if self.state.state.is_first() || self.run_to_completion {
            self.fail(number, cause.clone());
            return self.begin_end(Outcome::Failed(cause), Escalation::Graceful, now);
        }
        if scheduler && self.policy.scheduler_death == SchedulerDeath::EndCluster {
            self.fail(number, cause.clone());
            return self.begin_end(Outcome::Failed(cause), Escalation::Graceful, now);
        }
        let jitter = self.random.f64();
        // Without its scheduler a cluster is of no use, however the scheduler ended. A worker that
        // ended without a request has failed, even if a task made it exit with status 0.
        let unasked = self.seats[number].ready_when == ReadyWhen::Said;
        let succeeded = succeeded && !scheduler && !unasked;
        match self.seats[number].judge(succeeded, !scheduler, &self.policy, now, jitter) {
            AfterDeath::Rest => self.rest(number),
            AfterDeath::Restart { delay } => {
                self.return_at(number, now + delay);
                let deaths_at_work = self.seats[number].shown.deaths_at_work;
                let what = What::Restarting { in_ms: millis(delay), deaths_at_work };
                self.record(now, Some(number), what);
                if scheduler {
                    self.recall_workers("its scheduler is gone", now);
                }
            }
            AfterDeath::Fail { reason } => {
                let text = format!("{}, and {reason}", cause.text);
                let cause = Cause { text, ..cause };
                self.record(now, Some(number), What::Failed { reason: cause.text.clone() });
                self.fail(number, cause.clone());
                if scheduler {
                    self.begin_end(Outcome::Failed(cause), Escalation::Graceful, now);
                }
            }
        }
    }

    pub(super) fn rest(&mut self, number: SeatNumber) {
        self.seats[number].shown.state = ProcessPhase::Stopped;
    }

    pub(super) fn fail(&mut self, number: SeatNumber, cause: Cause) {
        self.seats[number].cause = Some(cause);
        self.seats[number].shown.state = ProcessPhase::Failed;
    }

    /// Schedules a dead process's restart, at `when` or later, once its GPU is free.
    pub(super) fn return_at(&mut self, number: SeatNumber, when: Moment) {
        self.seats[number].shown.state = ProcessPhase::Restarting;
        self.seats[number].not_before = when;
        self.await_gpu(number);
    }

    /// Schedules a dead process's restart for when the scheduler is READY and its GPU is free.
    pub(super) fn rejoin(&mut self, number: SeatNumber) {
        self.seats[number].shown.state = ProcessPhase::Waiting;
        self.await_gpu(number);
    }

    fn await_gpu(&mut self, number: SeatNumber) {
        let seat = &mut self.seats[number];
        if seat.shown.gpu.is_some() && !self.state.simulated && !seat.gpu_pending {
            seat.gpu_pending = true;
            self.actions.push(Action::AwaitGpu { seat: number });
        }
    }

    pub(super) fn gpu_found(&mut self, number: SeatNumber, finding: GpuFinding, now: Moment) {
        let Some(seat) = self.seats.get_mut(number).filter(|seat| seat.gpu_pending) else { return };
        seat.gpu_pending = false;
        if !matches!(seat.phase(), ProcessPhase::Restarting | ProcessPhase::Waiting) {
            return;
        }
        match finding {
            GpuFinding::Free => {}
            GpuFinding::Held(text) => self.record(now, Some(number), What::Note { text }),
            GpuFinding::Lost(reason) => {
                let name = seat.shown.name.clone();
                let text = format!("{name} cannot be started again: {reason}");
                let cause = Cause { process: Some(name), text, exit: None, log_tail: Vec::new() };
                self.record(now, Some(number), What::Failed { reason: cause.text.clone() });
                self.fail(number, cause);
            }
        }
    }
}
