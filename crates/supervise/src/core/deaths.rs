//! Handles deaths: how they are recorded, and what follows.
//!
//! `slot` decides how often a worker may die.

use std::path::PathBuf;

use super::slot::{AfterDeath, AfterStop};
use super::{Action, Core, GpuFinding, Key, Moment, SlotNumber, millis};
use crate::record::{GpuError, What};
use crate::state::LastExit;
use crate::{Cause, Escalation, Outcome, ProcessPhase, ReadyWhen};
use cuda_cluster_model::plan::SchedulerDeath;
use cuda_cluster_wire::process::Exit;
use cuda_cluster_wire::status::{AfterLeaving, Condition};

/// The number of SIGKILL, which this pure module does not ask the system for.
const SIGKILL: i32 = 9;

/// Likewise of SIGXFSZ, and what it means.
const SIGXFSZ: i32 = 25;
const TOO_LARGE: &str = "it wrote a file, perhaps of shared memory, beyond the limit that 'ulimit -f' \
                         or LimitFSIZE of a unit sets";

/// Of a process that was killed while memory was short.
const STARVED: &str =
    "while it ran, the kernel ended processes for want of memory (dmesg says which)";

impl Core {
    /// Handles a written bundle, which may contain errors of the GPU that the exit did not show.
    pub(super) fn bundled(
        &mut self,
        number: SlotNumber,
        at: &str,
        path: PathBuf,
        errors: Vec<GpuError>,
        now: Moment,
    ) {
        let Some(slot) = self.slots.get_mut(number) else { return };
        let gpu = slot.shown.gpu.as_ref().map_or(String::new(), |gpu| format!(" {}", gpu.index));
        let texts: Vec<String> =
            errors.iter().map(|error| format!("GPU{gpu} reported {error}")).collect();
        if let Some(exit) = slot.shown.last_exit.as_mut().filter(|exit| exit.at == at) {
            exit.bundle = Some(path);
            exit.gpu_errors = errors;
        }
        for text in texts {
            self.record(now, Some(number), What::Note { text });
        }
    }

    pub(super) fn exited(
        &mut self,
        key: Key,
        exit: Exit,
        log_tail: Vec<String>,
        starved: bool,
        now: Moment,
    ) {
        let Some(number) = self.slot_of(key) else { return };
        let at = self.time_of_day(now);
        let slot = &mut self.slots[number];
        let told = slot.phase() == ProcessPhase::Stopping;
        let succeeded = exit.is_success() && slot.blame.is_none();
        let reason = match &slot.blame {
            Some(blame) if exit.code.is_none() && exit.signal.is_none() => blame.clone(),
            Some(blame) => format!("{blame}; it {exit}"),
            // Nobody else has killed it, as far as is known; whose end the kernel counted, it says
            // in its log alone.
            None if starved && exit.signal == Some(SIGKILL) => format!("{exit}; {STARVED}"),
            None if exit.signal == Some(SIGXFSZ) => format!("{exit}: {TOO_LARGE}"),
            None => exit.to_string(),
        };
        let pid = slot.shown.pid;
        slot.leave();
        // The last state of a cluster that has ended shows what its processes had.
        if self.ending.is_none() {
            slot.shown.peers.clear();
            slot.reports(Condition::default());
        }
        slot.shown.last_exit = Some(LastExit {
            exit,
            pid,
            reason: reason.clone(),
            at,
            bundle: None,
            gpu_errors: Vec::new(),
        });
        self.record(now, Some(number), What::Exited { exit, reason: reason.clone() });
        if number < self.workers_from {
            self.all_parted(now);
        }
        let then = if told { self.slots[number].then } else { AfterStop::CountAsDeath };
        if then == AfterStop::CountAsDeath && !succeeded {
            self.actions.push(Action::Bundle { slot: number });
        }
        let cause = Cause {
            process: Some(self.slots[number].shown.name.clone()),
            text: format!("{} {reason}", self.slots[number].shown.name),
            exit: Some(exit),
            log_tail,
            ..Cause::of_cluster("")
        };
        match then {
            _ if self.ending.is_some() => self.stay_stopped(number),
            AfterStop::StayStopped => self.stay_stopped(number),
            AfterStop::Restart => self.restart_at(number, now),
            AfterStop::Rejoin => self.rejoin(number),
            AfterStop::CountAsDeath => match self.slots[number].leaving.filter(|_| succeeded) {
                Some(then) => self.leave(number, then, now),
                None => self.judge(number, succeeded, cause, now),
            },
        }
    }

    /// What follows an exit that someone other than the supervisor requested.
    fn leave(&mut self, number: SlotNumber, then: AfterLeaving, now: Moment) {
        match then {
            AfterLeaving::Rest | AfterLeaving::Disband => {
                self.slots[number].rested = Some(now);
                self.stay_stopped(number);
            }
            AfterLeaving::Return => {
                let what = What::Restarting { in_ms: 0, deaths_at_work: 0 };
                self.record(now, Some(number), what);
                self.restart_at(number, now);
            }
            AfterLeaving::EndCluster => {
                self.stay_stopped(number);
                let outcome = Outcome::Stopped { degraded: self.state.cause.clone() };
                self.begin_end(outcome, Escalation::Graceful, now);
            }
        }
    }

    /// What follows a death that nobody requested.
    fn judge(&mut self, number: SlotNumber, succeeded: bool, cause: Cause, now: Moment) {
        let scheduler = number < self.workers_from;
        if self.run_to_completion && !scheduler && succeeded {
            return self.stay_stopped(number);
        }
        let first = self.state.state.is_first();
        let together = self.together.is_some();
        // While others are still being executed, a rank's program may have failed already.
        if together && !scheduler && (!first || self.slots[number].has_been_executed()) {
            return match succeeded {
                true => self.stay_stopped(number),
                false => self.fail_together(number, cause, now),
            };
        }
        // Ranks that are started together may be forked from it.
        let needed = together || self.policy.scheduler_death == SchedulerDeath::EndCluster;
        if first || self.run_to_completion || scheduler && needed {
            self.fail(number, cause.clone());
            return self.begin_end(Outcome::Failed(cause), Escalation::Graceful, now);
        }
        let jitter = self.random.f64();
        // Without its scheduler a cluster is of no use, however the scheduler ended. A worker that
        // ended without a request has failed, even if a task made it exit with status 0.
        let unasked = self.slots[number].ready_when == ReadyWhen::Said;
        let succeeded = succeeded && !scheduler && !unasked;
        let worker = !scheduler && number < self.hosts_from;
        match self.slots[number].judge(succeeded, worker, &self.policy, now, jitter) {
            AfterDeath::StayStopped => self.stay_stopped(number),
            AfterDeath::Restart { delay } => {
                self.restart_at(number, now + delay);
                let deaths_at_work = self.slots[number].shown.deaths_at_work;
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

    pub(super) fn stay_stopped(&mut self, number: SlotNumber) {
        self.slots[number].shown.state = ProcessPhase::Stopped;
    }

    pub(super) fn fail(&mut self, number: SlotNumber, cause: Cause) {
        self.slots[number].cause = Some(cause);
        self.slots[number].shown.state = ProcessPhase::Failed;
    }

    /// Schedules a dead process's restart, at `when` or later, once its GPU is free.
    pub(super) fn restart_at(&mut self, number: SlotNumber, when: Moment) {
        self.slots[number].shown.state = ProcessPhase::Restarting;
        self.slots[number].not_before = when;
        self.await_gpu(number);
    }

    /// Schedules a dead process's restart for when the scheduler is READY and its GPU is free.
    pub(super) fn rejoin(&mut self, number: SlotNumber) {
        self.slots[number].shown.state = ProcessPhase::Waiting;
        self.await_gpu(number);
    }

    fn await_gpu(&mut self, number: SlotNumber) {
        let slot = &mut self.slots[number];
        if slot.shown.gpu.is_some() && !self.state.simulated && !slot.gpu_pending {
            slot.gpu_pending = true;
            self.actions.push(Action::AwaitGpu { slot: number });
        }
    }

    pub(super) fn gpu_found(&mut self, number: SlotNumber, finding: GpuFinding, now: Moment) {
        let Some(slot) = self.slots.get_mut(number).filter(|slot| slot.gpu_pending) else { return };
        slot.gpu_pending = false;
        if !matches!(slot.phase(), ProcessPhase::Restarting | ProcessPhase::Waiting) {
            return;
        }
        match finding {
            GpuFinding::Free => {}
            GpuFinding::Held(text) => self.record(now, Some(number), What::Note { text }),
            GpuFinding::Lost(reason) => {
                let name = slot.shown.name.clone();
                let text = format!("{name} cannot be started again: {reason}");
                let cause = Cause { process: Some(name), ..Cause::of_cluster(text) };
                self.record(now, Some(number), What::Failed { reason: cause.text.clone() });
                self.fail(number, cause);
                // The others go on without it.
                self.slots[number].wanted &= self.together.is_none();
            }
        }
    }
}
