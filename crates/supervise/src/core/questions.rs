//! Whom to ask when, and what follows from silence.
//!
//! All processes that can answer are asked at the same time and rarely, so that an idle cluster
//! stays idle. A process that can't answer (any program of the command engine) is only checked for
//! being stopped.
//!
//! *Invariant:* a process is `unresponsive` exactly while it was READY and is known not to answer.

use std::time::Duration;

use super::liveness::Liveness;
use super::slot::{AfterStop, Slot};
use super::{Action, Core, Key, Moment, SlotNumber, millis};
use crate::record::What;
use crate::{ProcessPhase, ReadyWhen};
use cuda_cluster_model::plan::Unresponsive;

/// Shortest time between two questions.
const SHORTEST: Duration = Duration::from_millis(100);

impl Slot {
    fn can_be_asked(&self) -> bool {
        let at_work = matches!(self.phase(), ProcessPhase::Ready | ProcessPhase::Unresponsive);
        at_work && self.ready_when == ReadyWhen::Said && !self.liveness.deaf
    }
}

impl Core {
    /// Time between two questions to a process that answers. So a hang is detected within twice the
    /// time limit for answers, and by default each process wakes twice a minute.
    pub(super) fn ask_every(&self) -> Duration {
        self.policy.answer_within.0.max(SHORTEST)
    }

    /// Handles an answer of a process.
    pub(super) fn answered(&mut self, number: SlotNumber, now: Moment) {
        self.slots[number].liveness.asked = None;
        self.judge_silence(number, now);
    }

    pub(super) fn guardian_answered(&mut self, now: Moment) {
        self.guardian.asked = None;
        self.guardian.stopped = false;
        self.judge_guardian(now);
    }

    /// Handles a closed status pipe: the process ends, or does not want questions.
    pub(super) fn cannot_be_asked(&mut self, number: SlotNumber) {
        let slot = &mut self.slots[number];
        slot.liveness.deaf = true;
        if slot.phase() == ProcessPhase::Ready {
            slot.liveness.asked = None;
        }
    }

    /// Any message shows that the process is not stopped.
    pub(super) fn heard_of(&mut self, number: SlotNumber) {
        self.slots[number].liveness.stopped = false;
    }

    pub(super) fn gone(&mut self, key: Key, now: Moment) {
        if let Some(number) = self.slot_of(key) {
            self.slots[number].liveness.gone.get_or_insert(now);
        }
    }

    pub(super) fn looked(&mut self, stopped: &[Key], guardian_stopped: bool, now: Moment) {
        for number in 0..self.slots.len() {
            let Some(key) = self.slots[number].key else { continue };
            let stopped = stopped.contains(&key);
            let before = std::mem::replace(&mut self.slots[number].liveness.stopped, stopped);
            if before != stopped {
                // Its answer shows when it has resumed.
                self.ask(number, now);
                self.judge_silence(number, now);
            }
        }
        if std::mem::replace(&mut self.guardian.stopped, guardian_stopped) != guardian_stopped {
            self.ask_guardian(now);
            self.judge_guardian(now);
        }
    }

    fn ask(&mut self, number: SlotNumber, now: Moment) {
        let slot = &mut self.slots[number];
        if let (Some(key), true, None) = (slot.key, slot.can_be_asked(), slot.liveness.asked) {
            slot.liveness.asked = Some(now);
            self.actions.push(Action::Ask { key });
        }
    }

    /// Asks every process that can be asked and owes no answer.
    pub(super) fn ask_all(&mut self, now: Moment) {
        (0..self.slots.len()).for_each(|number| self.ask(number, now));
    }

    /// Whether a process that may answer at any moment has not answered yet.
    pub(crate) fn awaits_answers(&self) -> bool {
        self.slots.iter().any(|slot| {
            let Liveness { asked, stopped, gone, .. } = slot.liveness;
            slot.phase() == ProcessPhase::Ready && asked.is_some() && !stopped && gone.is_none()
        })
    }

    fn ask_guardian(&mut self, now: Moment) {
        if self.guardian.asked.is_none() {
            self.guardian.asked = Some(now);
            self.actions.push(Action::AskGuardian);
        }
    }

    /// If this supervisor did not run for a while, because it was stopped or the machine is very
    /// busy, it may not have read all answers yet: restarts all time limits.
    pub(super) fn forgive_own_absence(&mut self, now: Moment) {
        let patience = self.policy.answer_within.0;
        if self.next_deadline().is_none_or(|due| due + patience / 4 >= now) {
            return;
        }
        let slots = self.slots.iter_mut().map(|slot| &mut slot.liveness);
        for liveness in slots.chain([&mut self.guardian]) {
            liveness.asked = liveness.asked.map(|_| now);
            liveness.gone = liveness.gone.map(|_| now);
            liveness.restart_at = now + patience;
        }
    }

    /// Asks when it is time to, and detects missing answers.
    pub(super) fn keep_asking(&mut self, now: Moment) {
        if self.ending.is_some() {
            return;
        }
        for number in 0..self.slots.len() {
            self.judge_silence(number, now);
        }
        self.judge_guardian(now);
        if self.ask_at <= now {
            self.ask_at = now + self.ask_every();
            self.ask_all(now);
            self.ask_guardian(now);
            self.actions.push(Action::Look);
        }
    }

    /// Updates a process's phase from what is known about its answers.
    fn judge_silence(&mut self, number: SlotNumber, now: Moment) {
        let patience = self.policy.answer_within;
        let slot = &mut self.slots[number];
        if slot.phase() == ProcessPhase::Ready
            && let Some((since, reason)) = slot.liveness.silence(patience, now)
        {
            slot.liveness.silent_since = Some(since);
            slot.liveness.restart_at = since + patience.0;
            slot.shown.state = ProcessPhase::Unresponsive;
            let since = self.time_of_day(since);
            self.record(now, Some(number), What::NotAnswering { since, reason });
            // A process that resumes answers this question first.
            self.ask(number, now);
        }
        let slot = &mut self.slots[number];
        if slot.phase() != ProcessPhase::Unresponsive {
            return;
        }
        let since = slot.liveness.silent_since.unwrap_or(now);
        if slot.liveness.may_answer() {
            slot.shown.state = ProcessPhase::Ready;
            self.record(now, Some(number), What::Answers { after_ms: millis(now - since) });
        } else if self.policy.unresponsive == Unresponsive::Restart
            && slot.liveness.restart_at <= now
        {
            let reason = format!("did not answer for {patience}");
            slot.blame = Some(reason.clone());
            self.terminate(number, AfterStop::CountAsDeath, &reason, now);
        }
    }

    /// Does the same for the guardian, which can't be replaced.
    fn judge_guardian(&mut self, now: Moment) {
        let found = self.guardian.silence(self.policy.answer_within, now);
        match (self.guardian.silent_since, found) {
            (None, Some((since, reason))) => {
                self.guardian.silent_since = Some(since);
                let since = self.time_of_day(since);
                self.record(now, None, What::NotAnswering { since, reason });
            }
            (Some(since), _) if self.guardian.may_answer() => {
                self.guardian.silent_since = None;
                self.record(now, None, What::Answers { after_ms: millis(now - since) });
            }
            _ => {}
        }
    }

    /// Whether a process or guardian that must answer before the first READY does not.
    pub(super) fn is_held_up(&self) -> bool {
        let silent = |slot: &Slot| slot.phase() == ProcessPhase::Unresponsive;
        self.guardian.silent_since.is_some() || self.slots.iter().any(silent)
    }

    /// When to ask, or to detect a missing answer.
    pub(super) fn liveness_deadlines(&self) -> Vec<Moment> {
        if self.ending.is_some() {
            return Vec::new();
        }
        let patience = self.policy.answer_within.0;
        let mut deadlines = vec![self.ask_at];
        for slot in &self.slots {
            match slot.phase() {
                ProcessPhase::Ready => deadlines.extend(slot.liveness.deadline(patience)),
                ProcessPhase::Unresponsive if self.policy.unresponsive == Unresponsive::Restart => {
                    deadlines.push(slot.liveness.restart_at);
                }
                _ => {}
            }
        }
        if self.guardian.silent_since.is_none() {
            deadlines.extend(self.guardian.deadline(patience));
        }
        if self.state.state.is_first() && self.is_held_up() {
            deadlines.push(self.ready_by);
        }
        deadlines
    }
}
