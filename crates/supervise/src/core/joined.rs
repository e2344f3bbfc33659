//! Keeps track of workers of other machines, of which the scheduler tells.
//!
//! Commands none of them: each has a supervisor of its own.
//!
//! *Invariant:* a worker's name is there once, and one that has gone is there with its reason.

use super::{Core, Moment};
use crate::ProcessPhase;
use crate::record::What;
use crate::state::{Joined, JoinedPhase};
use cuda_cluster_wire::status::JoinedWorker;

/// So many that have gone are remembered, the last ones.
const GONE: usize = 64;

impl Core {
    /// A worker has registered with the scheduler.
    pub(super) fn joined(&mut self, worker: JoinedWorker, now: Moment) {
        let since = self.time_of_day(now);
        self.record(now, None, What::Joined { worker: Box::new(worker.clone()) });
        let joined = Joined { worker, state: JoinedPhase::Ready, since, reason: None };
        let all = &mut self.state.joined;
        match all.iter_mut().find(|one| one.worker.name == joined.worker.name) {
            Some(before) => *before = joined,
            None => all.push(joined),
        }
    }

    /// The scheduler has removed a worker. One that ends in order closes connections: whose these
    /// are has not been lost.
    pub(super) fn parted(&mut self, name: &str, lost: bool, reason: &str, now: Moment) {
        let (lost, reason) = match self.ending {
            Some(_) if lost => (false, "the scheduler ends with its cluster"),
            _ => (lost, reason),
        };
        let since = self.time_of_day(now);
        let there = |one: &&mut Joined| one.worker.name == name && one.state == JoinedPhase::Ready;
        let Some(one) = self.state.joined.iter_mut().find(there) else { return };
        one.state = if lost { JoinedPhase::Lost } else { JoinedPhase::Left };
        one.since = since;
        one.reason = Some(reason.to_owned());
        let (name, host) = (one.worker.name.clone(), one.worker.host.clone());
        self.record(now, None, What::Parted { name, host, lost, reason: reason.to_owned() });
        self.forget_the_first();
    }

    /// The scheduler has ended, and all that had joined it are without one.
    pub(super) fn all_parted(&mut self, now: Moment) {
        let there = self.state.joined.iter().filter(|one| one.state == JoinedPhase::Ready);
        let names: Vec<String> = there.map(|one| one.worker.name.clone()).collect();
        for name in names {
            self.parted(&name, true, "the scheduler has ended", now);
        }
    }

    /// A worker has found the scheduler elsewhere: those that have given it up look again.
    pub(super) fn look_again(&mut self, now: Moment) {
        for number in self.workers_from..self.slots.len() {
            let slot = &mut self.slots[number];
            let lost = slot.farewell.as_ref().is_some_and(|(_, lost)| *lost);
            if lost && slot.wanted && slot.phase() == ProcessPhase::Stopped && self.ending.is_none()
            {
                slot.afresh = true;
                self.restart_at(number, now);
            }
        }
    }

    fn forget_the_first(&mut self) {
        let all = &mut self.state.joined;
        let gone = |one: &Joined| one.state != JoinedPhase::Ready;
        while all.iter().filter(|one| gone(one)).count() > GONE {
            let first = all.iter().enumerate().filter(|(_, one)| gone(one));
            // Times of one form have the order of their texts.
            let Some((at, _)) = first.min_by(|(_, a), (_, b)| a.since.cmp(&b.since)) else {
                return;
            };
            all.remove(at);
        }
    }
}
