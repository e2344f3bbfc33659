//! Starts all workers again together when one of them fails.
//!
//! Ranks that work together (NCCL, MPI, PyTorch) can't go on with one that was started again alone:
//! all end, those whose GPU is lost are replaced by spares or left out, what ranks are told of each
//! other is made anew, and all start. `cluster` makes it; here is decided when, and with whom.
//!
//! *Invariant:* from a failure until what the ranks are told is made anew no worker is started, and
//! it is made only when none lives.

use super::slot::{AfterStop, delay};
use super::{Action, Core, Moment, SlotNumber, millis};
use crate::record::What;
use crate::{Cause, Escalation, Outcome, ProcessPhase};
use cuda_cluster_model::plan::Supervision;
use cuda_cluster_wire::process::Exit;

/// Signals that come from outside: SIGHUP, SIGINT, SIGKILL, SIGTERM. This pure module does not ask
/// the system for their numbers.
const FROM_OUTSIDE: [i32; 4] = [1, 2, 9, 15];

/// The workers that are started together.
#[derive(Clone, Debug)]
pub(super) struct Together {
    /// How often they may be started again.
    limit: u32,
    /// How often they have been.
    restarts: u32,
    /// How many starts in a row have failed soon.
    short: u32,
    /// The workers' slots in the order of their ranks.
    members: Vec<SlotNumber>,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// They may start and run.
    Running,
    /// All are to end; what they are told is made anew at this time or later.
    Ending { not_before: Moment },
    /// It is being made.
    Meeting,
}

impl Together {
    pub(super) fn new(limit: u32, members: Vec<SlotNumber>) -> Self {
        Self { limit, restarts: 0, short: 0, members, stage: Stage::Running }
    }

    /// How often they have been started again.
    pub(super) fn restarts(&self) -> u32 {
        self.restarts
    }

    /// When to look again, if nothing happens before.
    pub(super) fn deadline(&self, now: Moment) -> Option<Moment> {
        match self.stage {
            Stage::Ending { not_before } => Some(not_before).filter(|at| *at > now),
            Stage::Running | Stage::Meeting => None,
        }
    }

    /// Why the workers are not started again; `soon`: the one that failed had only just started.
    fn refuses(&self, exit: Option<Exit>, soon: bool, policy: &Supervision) -> Option<String> {
        let signal = exit.and_then(|exit| exit.signal);
        let by_itself = !signal.is_some_and(|signal| FROM_OUTSIDE.contains(&signal));
        if self.restarts >= self.limit {
            let times = if self.limit == 1 { "once" } else { &format!("{} times", self.limit) };
            return Some(format!("the ranks were started again {times}"));
        }
        (self.restarts == 0 && soon && by_itself).then(|| {
            format!("it failed within {} of its start, as it would again", policy.healthy_after)
        })
    }
}

impl Core {
    /// Handles the failure of a worker that is started together with others.
    pub(super) fn fail_together(&mut self, number: SlotNumber, cause: Cause, now: Moment) {
        let healthy = self.policy.healthy_after.0;
        let soon = self.slots[number].ready.is_none_or(|ready| now - ready < healthy);
        let Some(together) = &mut self.together else { return };
        if together.stage != Stage::Running {
            // It ends like the others, which are told to.
            return self.rejoin(number);
        }
        if let Some(reason) = together.refuses(cause.exit, soon, &self.policy) {
            let cause = Cause { text: format!("{}, and {reason}", cause.text), ..cause };
            self.fail(number, cause.clone());
            return self.begin_end(Outcome::Failed(cause), Escalation::Graceful, now);
        }
        together.restarts += 1;
        let earlier = if soon { together.short } else { 0 };
        together.short = earlier + u32::from(soon);
        let jitter = self.random.f64();
        let wait = match earlier {
            0 => Moment::ZERO,
            more => delay(more - 1, self.policy.backoff.0, self.policy.backoff_max.0, jitter),
        };
        let (restart, limit) = (together.restarts, together.limit);
        let rank = (0..).zip(&together.members).find(|(_, slot)| **slot == number);
        let rank = rank.map_or(0, |(rank, _)| rank);
        let what = What::Regrouping { restart, limit, rank, in_ms: millis(wait), cause };
        self.record(now, Some(number), what);
        self.regroup("a rank has failed, and all are started again together", now + wait, now);
    }

    /// Asks all workers to end, to be started again together.
    pub(super) fn regroup(&mut self, reason: &str, not_before: Moment, now: Moment) {
        let Some(together) = &mut self.together else { return };
        if together.stage != Stage::Running {
            return;
        }
        together.stage = Stage::Ending { not_before };
        for number in together.members.clone() {
            if self.slots[number].is_alive() {
                self.terminate(number, AfterStop::Rejoin, reason, now);
            } else {
                self.slots[number].afresh |= self.slots[number].phase() == ProcessPhase::Stopped;
                self.rejoin(number);
            }
        }
    }

    /// Whether workers may start. Has what they are told made anew as soon as all have ended.
    pub(super) fn may_gather(&mut self, now: Moment) -> bool {
        let workers = &self.slots[self.workers_from..];
        let busy = workers.iter().any(|slot| slot.is_alive() || slot.gpu_pending);
        match self.together.as_ref().map_or(Stage::Running, |together| together.stage) {
            Stage::Running => return true,
            Stage::Ending { not_before } if !busy && not_before <= now => {}
            Stage::Ending { .. } | Stage::Meeting => return false,
        }
        let members = self.replace_lost(now);
        if members.is_empty() {
            let failed = self.slots.iter().rev().find_map(|slot| slot.cause.clone());
            let cause = failed.unwrap_or_else(|| Cause::of_cluster("no GPU is left".to_owned()));
            self.begin_end(Outcome::Failed(cause), Escalation::Graceful, now);
            return false;
        }
        let checked = members.iter().all(|number| !self.slots[*number].gpu_pending);
        let places = members.iter().map(|number| number - self.workers_from).collect();
        if let Some(together) = &mut self.together {
            together.members = members;
            if checked {
                together.stage = Stage::Meeting;
                self.actions.push(Action::Meet { restart: together.restarts, members: places });
            }
        }
        false
    }

    /// The members of the next start: a spare in the place of each whose GPU is lost, as long as
    /// there are spares.
    fn replace_lost(&mut self, now: Moment) -> Vec<SlotNumber> {
        let members = self.together.as_ref().map_or_else(Vec::new, |one| one.members.clone());
        let mut next = Vec::with_capacity(members.len());
        for number in members {
            if self.slots[number].phase() != ProcessPhase::Failed {
                next.push(number);
                continue;
            }
            let spare = (self.workers_from..self.slots.len()).find(|spare| {
                let slot = &self.slots[*spare];
                !slot.wanted && slot.phase() == ProcessPhase::Stopped
            });
            let name = |core: &Self, number: SlotNumber| core.slots[number].shown.name.clone();
            let lost = name(self, number);
            let by = spare.map(|spare| name(self, spare));
            let text = match &by {
                Some(spare) => format!("{lost} is replaced by {spare}"),
                None => format!("{lost} is left out: the job has one rank less"),
            };
            self.state.notes.push(text);
            self.record(now, Some(number), What::Replaced { by });
            if let Some(spare) = spare {
                self.slots[spare].wanted = true;
                self.rejoin(spare);
                next.push(spare);
            }
        }
        next
    }

    /// Handles that the ranks can be told of each other, with each one's of several programs, or
    /// why not.
    pub(super) fn met(&mut self, met: Result<Vec<Option<String>>, String>, now: Moment) {
        let Some(together) = self.together.as_mut().filter(|one| one.stage == Stage::Meeting)
        else {
            return;
        };
        together.stage = Stage::Running;
        for (rank, number) in (0..).zip(together.members.clone()) {
            self.slots[number].shown.rank = Some(rank);
        }
        let members = together.members.clone();
        let failure = met.map(|roles| {
            for (number, role) in members.into_iter().zip(roles) {
                self.slots[number].shown.program = role;
            }
        });
        if let (Err(reason), None) = (failure, &self.ending) {
            let text = format!("the ranks cannot be started again: {reason}");
            let cause = Cause::of_cluster(text);
            self.begin_end(Outcome::Failed(cause), Escalation::Graceful, now);
        }
    }
}
