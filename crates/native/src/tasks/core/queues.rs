//! What waits, and where tasks are.
//!
//! *Invariant:* an answer takes time by its bounds, not by the number of tasks.

use std::collections::HashSet;

use super::overview::Waits;
use super::record::Presence;
use super::{Core, TaskKey, Worker};
use cuda_cluster_wire::tasks::{HeldTask, Queues, SentTask};

/// The most tasks that are told of, of all workers together.
const SENT: usize = 256;

/// The most tasks without a worker that are told of.
const HELD: usize = 4;

/// So many of the tasks that wait for one are counted.
const COUNTED: usize = 10_000;

/// So many tasks have those counted that wait for them.
const WITH_DEPENDENTS: usize = 8;

impl Core {
    /// What waits, and for what.
    pub(crate) fn queues(&self, now: u64) -> Queues {
        let Waits { input, able_worker, room, chosen_worker } = self.waits_of_all();
        let mut held: Vec<(&TaskKey, &u64)> = self.parked.iter().take(COUNTED).collect();
        held.sort_by_key(|(_, since)| **since);
        let held = held.into_iter().take(HELD).map(|(key, since)| self.held(*key, *since, now));
        Queues {
            waiting: input,
            ready: room + chosen_worker,
            parked: able_worker,
            held: held.collect(),
            sent: self.sent(now),
        }
    }

    fn held(&self, key: TaskKey, since: u64, now: u64) -> HeldTask {
        let task = &self.tasks[key];
        let mut wishes = String::new();
        self.explain_wishes(task, &mut wishes);
        let why = match wishes.trim_start_matches(": ") {
            _ if self.workers.is_empty() => "there is none".to_owned(),
            "" => "it is to run on one that is there".to_owned(),
            why => why.to_owned(),
        };
        HeldTask {
            task: task.id,
            function: self.functions[task.function as usize].name.clone(),
            why,
            millis: now.saturating_sub(since) / 1000,
        }
    }

    /// What workers have, those tasks first that have been with theirs for longest.
    fn sent(&self, now: u64) -> Vec<SentTask> {
        let each = (SENT / self.workers.len().max(1)).max(1);
        let of = |worker: &Worker| -> Vec<(u64, TaskKey, String)> {
            let first = worker.sent.values().take(each);
            let known = first.filter_map(|key| {
                let (_, since) = worker.order_of.get(key)?;
                Some((*since, *key, worker.name.clone()))
            });
            known.collect()
        };
        let mut sent: Vec<(u64, TaskKey, String)> = self.workers.values().flat_map(of).collect();
        sent.sort();
        sent.truncate(SENT);
        let told = sent.into_iter().enumerate().map(|(at, (since, key, worker))| {
            let task = &self.tasks[key];
            let counted = (at < WITH_DEPENDENTS).then(|| self.dependents(key));
            SentTask {
                task: task.id,
                function: self.functions[task.function as usize].name.clone(),
                worker,
                millis: now.saturating_sub(since) / 1000,
                dependents: counted.unwrap_or(0) as u64,
                more: counted.is_none_or(|count| count == COUNTED),
            }
        });
        told.collect()
    }

    /// How many tasks wait for one, directly or not; counts no more than [`COUNTED`].
    fn dependents(&self, key: TaskKey) -> usize {
        let (mut found, mut todo) = (HashSet::new(), vec![key]);
        while let Some(key) = todo.pop() {
            for output in &self.tasks[key].products {
                let Presence::Missing(waiters) = &self.objects[*output].presence else { continue };
                for (waiter, stamp) in waiters {
                    let counts = self.waits(*waiter, *stamp) && found.len() < COUNTED;
                    if counts && found.insert(*waiter) {
                        todo.push(*waiter);
                    }
                }
            }
        }
        found.len()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::{Event, Settings};
    use super::*;
    use cuda_cluster_wire::tasks::{ObjectId, TaskSpec, Wishes};

    fn task(number: u64, inputs: &[u64]) -> TaskSpec {
        TaskSpec {
            id: ObjectId::new(1, number),
            outputs: 1,
            function: "f".to_owned(),
            arguments: Vec::new(),
            inputs: inputs.iter().map(|number| ObjectId::new(1, *number)).collect(),
            wishes: Wishes::default(),
        }
    }

    #[test]
    fn what_waits_is_counted_and_what_is_held_back_has_its_reason() {
        let mut core = Core::new(Settings::default());
        let resources = BTreeMap::from([("gpu".to_owned(), 2)]);
        let joined =
            Event::WorkerJoined { worker: 1, name: "gpu0".to_owned(), threads: 1, resources };
        core.handle(joined, 0);
        let submit = |task| Event::Submit { client: 1, task };
        core.handle(submit(task(0, &[])), 1_000_000);
        // A diamond, whose end counts once.
        for (number, inputs) in [(1, &[0][..]), (2, &[0]), (3, &[1, 2])] {
            core.handle(submit(task(number, inputs)), 1_000_000);
        }
        let mut greedy = task(4, &[]);
        greedy.wishes.resources = BTreeMap::from([("gpu".to_owned(), 8)]);
        core.handle(submit(greedy), 2_000_000);
        let Queues { waiting, ready, parked, held, sent } = core.queues(9_000_000);
        assert_eq!((waiting, ready, parked), (3, 0, 1));
        let [held] = &held[..] else { panic!("{held:?}") };
        assert!(held.why.contains("it needs gpu=8, and the most is 2"), "{}", held.why);
        assert_eq!((held.task, held.millis), (ObjectId::new(1, 4), 7_000));
        let [sent] = &sent[..] else { panic!("{sent:?}") };
        assert_eq!((sent.worker.as_str(), sent.millis), ("gpu0", 8_000));
        assert_eq!((sent.dependents, sent.more), (3, false));
    }
}
