//! The last tasks that ran, for who wants to see them: of very many a sample.
//!
//! Decides nothing about tasks.
//!
//! *Invariant:* at most [`ROOM`] records are kept, and each says for how many tasks it stands.

use std::collections::VecDeque;

use cuda_cluster_wire::tasks::{self, Ran, TaskRan};

use super::{Core, TaskKey, WorkerId};
use crate::random;

/// Most records that are kept: those of ten seconds if more tasks end than are kept of each.
const ROOM: usize = 10_000;

/// Microseconds in which about [`QUOTA`] records are taken.
const SLOT: u64 = 100_000;

/// So many tasks in each [`SLOT`] have a record each; of more, some stand for others.
const QUOTA: u64 = 100;

/// How densely tasks are sampled.
#[derive(Default)]
struct Pace {
    /// The current slot.
    slot: u64,
    /// Tasks in it, and records of them.
    tasks: u64,
    taken: u64,
    /// One of so many tasks has a record; 0 is as good as 1.
    stride: u32,
}

impl Pace {
    /// For how many tasks the record of this one stands; `None` if it has none. It is chosen by
    /// chance: one of every eight would always be of the same of eight workers.
    fn weight(&mut self, now: u64, random: u32) -> Option<u32> {
        let slot = now / SLOT;
        if slot != self.slot {
            let many = if slot == self.slot + 1 { self.tasks / QUOTA } else { 1 };
            self.stride = u32::try_from(many).unwrap_or(u32::MAX).max(1);
            (self.slot, self.tasks, self.taken) = (slot, 0, 0);
        }
        self.tasks += 1;
        let stride = self.stride.max(1);
        if (u64::from(random) * u64::from(stride)) >> 32 != 0 {
            return None;
        }
        self.taken += 1;
        if self.taken >= QUOTA {
            self.stride = stride.saturating_mul(2);
            self.taken = QUOTA / 2;
        }
        Some(stride)
    }
}

/// The records.
pub(super) struct Recent {
    /// Functions and workers by their places in the core.
    records: VecDeque<TaskRan>,
    /// How many were ever taken.
    taken: u64,
    /// How many tasks ran.
    ran: u64,
    /// Failed tasks are few among many others, and are taken apart.
    done: Pace,
    failed: Pace,
    random: u64,
}

impl Recent {
    pub(super) fn new(seed: u64) -> Self {
        let (done, failed) = (Pace::default(), Pace::default());
        Self { records: VecDeque::new(), taken: 0, ran: 0, done, failed, random: seed | 1 }
    }

    /// Counts a task; says for how many its record stands, if it is to have one.
    fn count(&mut self, now: u64, failed: bool) -> Option<u32> {
        self.ran += 1;
        self.random = random::following(self.random);
        #[allow(clippy::cast_possible_truncation, reason = "the upper half of a random number")]
        let random = (self.random >> 32) as u32;
        let pace = if failed { &mut self.failed } else { &mut self.done };
        pace.weight(now, random)
    }

    fn take(&mut self, record: TaskRan) {
        if self.records.len() == ROOM {
            self.records.pop_front();
        }
        self.records.push_back(record);
        self.taken += 1;
    }

    /// The records after the first `after` that were ever taken.
    fn since(&self, after: u64) -> impl Iterator<Item = &TaskRan> {
        // Who asks may have asked another scheduler before.
        let new = if after > self.taken { self.taken } else { self.taken - after };
        let new = usize::try_from(new).unwrap_or(usize::MAX).min(self.records.len());
        self.records.range(self.records.len() - new..)
    }
}

impl Core {
    /// Notes that a worker has run a task.
    pub(super) fn note_ran(&mut self, key: TaskKey, worker: WorkerId, ran: Ran, failed: bool) {
        // A function that ends early because nobody wants its outputs has not failed.
        let failed = failed && self.is_wanted(key);
        let Some(stands_for) = self.recent.count(self.now, failed) else { return };
        let Some(place) = self.workers.get(&worker).map(|worker| worker.place) else { return };
        let (task, function) = (self.tasks[key].id, self.tasks[key].function);
        let worker = u32::try_from(place).unwrap_or(u32::MAX);
        self.recent.take(TaskRan { task, function, worker, ran, failed, stands_for });
    }

    /// The last tasks that ran, but for the first `after` that were ever kept.
    pub(crate) fn recent(&self, after: u64) -> tasks::Recent {
        let mut places = vec![u32::MAX; self.functions.len()];
        let mut functions = Vec::new();
        let mut named = |mut record: TaskRan| {
            let function = record.function as usize;
            if places[function] == u32::MAX {
                places[function] = u32::try_from(functions.len()).unwrap_or(u32::MAX);
                functions.push(self.functions[function].name.clone());
            }
            record.function = places[function];
            record
        };
        let tasks = self.recent.since(after).map(|record| named(*record)).collect();
        let (next, ran) = (self.recent.taken, self.recent.ran);
        let workers = self.links.names().map(str::to_owned).collect();
        tasks::Recent { next, ran, functions, workers, tasks }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Records of so many tasks a second for some seconds, each of which says which one it was.
    fn sample(per_second: u64, seconds: u64) -> Recent {
        let mut recent = Recent::new(7);
        for task in 0..per_second * seconds {
            let now = task * 1_000_000 / per_second;
            if let Some(stands_for) = recent.count(now, false) {
                let at = Ran { at: task, ..Ran::default() };
                recent.take(TaskRan { ran: at, stands_for, ..TaskRan::default() });
            }
        }
        recent
    }

    #[test]
    fn few_tasks_have_a_record_each() {
        let recent = sample(900, 3);
        assert_eq!((recent.taken, recent.ran), (2700, 2700));
        assert!(recent.records.iter().all(|record| record.stands_for == 1));
        assert_eq!(recent.since(2690).map(|record| record.ran.at).collect::<Vec<_>>()[0], 2690);
        assert_eq!(recent.since(2700).count(), 0, "nothing is new");
        assert_eq!(recent.since(9999).count(), 2700, "another scheduler's number");
    }

    #[test]
    fn of_a_million_a_bounded_sample_stands_for_all_and_for_each_worker() {
        let recent = sample(500_000, 2);
        assert!(recent.taken < 4000, "{}", recent.taken);
        let all: u64 = recent.records.iter().map(|record| u64::from(record.stands_for)).sum();
        assert!((850_000..1_150_000).contains(&all), "{all} of a million");
        // Tasks that go to eight workers in turn.
        let mut each = [0u64; 8];
        for record in &recent.records {
            each[usize::try_from(record.ran.at % 8).expect("small")] +=
                u64::from(record.stands_for);
        }
        assert!(each.iter().all(|tasks| (60_000..200_000).contains(tasks)), "{each:?}");
        let long = sample(50_000, 60);
        assert_eq!(long.records.len(), ROOM);
        assert!(long.taken < 90_000, "{}", long.taken);
    }

    #[test]
    fn one_that_fails_among_a_million_has_a_record() {
        let mut recent = sample(500_000, 2);
        assert_eq!(recent.count(2_000_000, true), Some(1));
    }
}
