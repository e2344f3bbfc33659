//! Handles user requests to a running cluster: restarts and changes of the number of workers.
//!
//! *Invariant:* a request has no effect once the end has begun.

use super::seat::Then;
use super::{Core, Moment, SeatNumber};
use crate::supervise::ProcessPhase;

impl Core {
    /// Asks living workers to end; they are restarted when the scheduler is READY.
    pub(super) fn recall_workers(&mut self, reason: &str, now: Moment) {
        for number in self.workers_from..self.seats.len() {
            match self.seats[number].phase() {
                _ if self.seats[number].is_at_work() => {
                    self.terminate(number, Then::Rejoin, reason, now);
                }
                ProcessPhase::Restarting => {
                    self.seats[number].shown.state = ProcessPhase::Waiting;
                }
                _ => {}
            }
        }
    }

    pub(super) fn restart(&mut self, number: SeatNumber, now: Moment) {
        if self.ending.is_some() || number >= self.seats.len() {
            return;
        }
        self.seats[number].forgive();
        let reason = "a restart was asked for";
        match self.seats[number].phase() {
            _ if self.seats[number].is_at_work() => {
                self.terminate(number, Then::Return, reason, now);
            }
            ProcessPhase::Stopping => self.seats[number].then = Then::Return,
            ProcessPhase::Waiting => {}
            phase => {
                self.seats[number].afresh |= phase == ProcessPhase::Stopped;
                let unwanted = number.checked_sub(self.workers_from);
                if unwanted.is_none_or(|worker| worker < self.wanted) {
                    self.return_at(number, now);
                }
            }
        }
        if number < self.workers_from {
            self.recall_workers(reason, now);
        }
    }

    pub(super) fn scale(&mut self, wanted: usize, now: Moment) {
        if self.ending.is_some() || self.run_to_completion {
            return;
        }
        let first = self.workers_from;
        self.wanted = wanted.min(self.seats.len() - first);
        for number in first..self.seats.len() {
            let phase = self.seats[number].phase();
            if number - first < self.wanted {
                if phase == ProcessPhase::Stopped {
                    self.seats[number].forgive();
                    self.seats[number].afresh = true;
                    self.seats[number].shown.state = ProcessPhase::Waiting;
                } else if phase == ProcessPhase::Stopping && self.seats[number].then == Then::Rest {
                    self.seats[number].then = Then::Rejoin;
                }
            } else if self.seats[number].is_alive() {
                self.terminate(number, Then::Rest, "fewer workers are wanted", now);
            } else {
                self.rest(number);
            }
        }
    }
}
