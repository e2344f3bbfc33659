//! Handles user requests to a running cluster: restarts and changes of the number of workers.
//!
//! *Invariant:* a request has no effect once the end has begun.

use std::time::Duration;

use super::slot::{AfterStop, Slot};
use super::{Core, Moment, SlotNumber};
use crate::ProcessPhase;
use crate::record::What;

/// Longer than a scheduler takes to end after it has sent its workers away.
const SENT_AWAY: Duration = Duration::from_secs(30);

impl Core {
    /// Asks living workers to end; they are restarted when the scheduler is READY.
    pub(super) fn recall_workers(&mut self, reason: &str, now: Moment) {
        let scheduler = (0..self.workers_from).next();
        if self.slots[self.workers_from..].iter().any(Slot::is_at_work) {
            let text = "results and scattered data that the workers held are lost, and clients \
                        must submit again";
            self.record(now, scheduler, What::Note { text: text.to_owned() });
        }
        for number in self.workers_from..self.slots.len() {
            match self.slots[number].phase() {
                _ if self.slots[number].is_at_work() => {
                    self.terminate(number, AfterStop::Rejoin, reason, now);
                }
                ProcessPhase::Restarting => {
                    self.slots[number].shown.state = ProcessPhase::Waiting;
                }
                // A scheduler that is asked to end sends its workers away before it goes.
                ProcessPhase::Stopped
                    if self.slots[number].rested.is_some_and(|at| now - at < SENT_AWAY) =>
                {
                    self.slots[number].shown.state = ProcessPhase::Waiting;
                    self.slots[number].afresh = true;
                }
                _ => {}
            }
        }
    }

    pub(super) fn restart(&mut self, number: SlotNumber, now: Moment) {
        if self.ending.is_some() || number >= self.slots.len() {
            return;
        }
        if self.together.is_some() && number >= self.workers_from {
            return self.regroup("a restart was asked for", now, now);
        }
        self.slots[number].forgive();
        self.slots[number].wanted = true;
        let reason = "a restart was asked for";
        match self.slots[number].phase() {
            _ if self.slots[number].is_at_work() => {
                self.terminate(number, AfterStop::Restart, reason, now);
            }
            ProcessPhase::Stopping => self.slots[number].then = AfterStop::Restart,
            ProcessPhase::Waiting => {}
            phase => {
                self.slots[number].afresh |= phase == ProcessPhase::Stopped;
                self.restart_at(number, now);
            }
        }
        if number < self.workers_from {
            self.recall_workers(reason, now);
        }
    }

    pub(super) fn scale(&mut self, wanted: usize, now: Moment) {
        if self.ending.is_some() || self.run_to_completion || self.together.is_some() {
            return;
        }
        let first = self.workers_from;
        for number in first..self.hosts_from {
            let phase = self.slots[number].phase();
            self.slots[number].wanted = number - first < wanted;
            if self.slots[number].wanted {
                if phase == ProcessPhase::Stopped {
                    self.slots[number].forgive();
                    self.slots[number].afresh = true;
                    self.slots[number].shown.state = ProcessPhase::Waiting;
                } else if phase == ProcessPhase::Stopping
                    && self.slots[number].then == AfterStop::StayStopped
                {
                    self.slots[number].then = AfterStop::Rejoin;
                }
            } else if self.slots[number].is_alive() {
                self.terminate(number, AfterStop::StayStopped, "fewer workers are wanted", now);
            } else {
                self.stay_stopped(number);
            }
        }
    }
}
