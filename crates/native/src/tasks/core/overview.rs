//! What is told about all tasks: counts, functions, and what waits for what.
//!
//! *Invariant:* it looks at workers and functions, and at few tasks, however many there are.

use std::collections::BTreeMap;

use cuda_cluster_wire::tasks::{
    FunctionOverview, ObjectId, Overview, Wait, Waiting, WorkerOverview,
};

use super::record::{Function, Presence};
use super::{Core, TaskKey, Worker};

/// Most functions in an overview.
const MOST_FUNCTIONS: usize = 16;

/// Most examples of tasks that wait for the same.
const EXAMPLES: usize = 5;

/// Tasks that are looked at for those that wait for their outputs.
const LOOKED_AT: usize = 256;

/// Numbers of tasks, by what they wait for ([`Wait`]).
pub(super) struct Waits {
    pub(super) input: u64,
    pub(super) able_worker: u64,
    pub(super) room: u64,
    pub(super) chosen_worker: u64,
}

impl Core {
    fn overview_of(&self, worker: &Worker) -> WorkerOverview {
        WorkerOverview {
            name: worker.name.clone(),
            in_flight: worker.sent.len() as u64,
            queued: (worker.queue.len() + worker.needy.len()) as u64,
            objects: worker.objects.len() as u64,
            finished: worker.finished,
        }
    }

    /// The functions that have the most tasks.
    fn most_run(&self) -> Vec<FunctionOverview> {
        let mut sent: BTreeMap<u32, u64> = BTreeMap::new();
        for key in self.workers.values().flat_map(|worker| worker.sent.values()) {
            *sent.entry(self.tasks[*key].function).or_default() += 1;
        }
        let has_any = |one: &Function| one.runs + one.active + one.failed > 0;
        let mut all: Vec<(u32, &Function)> =
            (0..).zip(&self.functions).filter(|(_, one)| has_any(one)).collect();
        all.sort_by_key(|(_, one)| std::cmp::Reverse(one.runs + one.active + one.failed));
        all.truncate(MOST_FUNCTIONS);
        let told = |(at, function): (u32, &Function)| FunctionOverview {
            name: function.name.clone(),
            runs: function.runs,
            active: function.active,
            sent: sent.get(&at).copied().unwrap_or_default(),
            failed: function.failed,
            seconds: function.seconds,
        };
        all.into_iter().map(told).collect()
    }

    /// How many tasks wait, by what they wait for.
    pub(super) fn waits_of_all(&self) -> Waits {
        let sent: usize = self.workers.values().map(|worker| worker.sent.len()).sum();
        let chosen: usize =
            self.workers.values().map(|worker| worker.queue.len() + worker.needy.len()).sum();
        let active: u64 = self.functions.iter().map(|function| function.active).sum();
        let others = self.parked.len() + self.ready.len() + chosen + sent;
        Waits {
            input: active.saturating_sub(others as u64),
            able_worker: self.parked.len() as u64,
            room: self.ready.len() as u64,
            chosen_worker: chosen as u64,
        }
    }

    /// What tasks wait for, with some of them.
    fn waiting(&self) -> Vec<Waiting> {
        let queued = || self.workers.values().flat_map(|one| one.queue.iter().chain(&one.needy));
        let Waits { input, able_worker, room, chosen_worker } = self.waits_of_all();
        let ids = |keys: &mut dyn Iterator<Item = TaskKey>| -> Vec<ObjectId> {
            keys.take(EXAMPLES).map(|key| self.tasks[key].id).collect()
        };
        let all = [
            (Wait::Input, input, self.waiting_for_inputs()),
            (Wait::AbleWorker, able_worker, ids(&mut self.parked.keys().copied())),
            (Wait::Room, room, ids(&mut self.ready.iter().map(|one| one.task))),
            (Wait::ChosenWorker, chosen_worker, ids(&mut queued().map(|one| one.task))),
        ];
        let some = all.into_iter().filter(|(_, tasks, _)| *tasks > 0);
        let told = |(wait, tasks, examples): (Wait, u64, Vec<ObjectId>)| {
            let examples = examples.iter().map(ToString::to_string).collect();
            Waiting { wait, tasks, examples }
        };
        some.map(told).collect()
    }

    /// Some tasks that wait for inputs: for outputs of those that are to run first, or for what
    /// clients are about to send.
    fn waiting_for_inputs(&self) -> Vec<ObjectId> {
        let sent = self.workers.values().flat_map(|worker| worker.sent.values().copied());
        let queued = self.workers.values().flat_map(|one| one.queue.iter().chain(&one.needy));
        let queued = queued.chain(&self.ready).map(|entry| entry.task);
        let first = sent.chain(queued).chain(self.parked.keys().copied()).take(LOOKED_AT);
        let outputs = first.flat_map(|key| self.tasks[key].products.iter());
        let mut found = Vec::new();
        for object in outputs.chain(self.coming.keys().take(LOOKED_AT)).take(LOOKED_AT) {
            let Presence::Missing(waiters) = &self.objects[*object].presence else { continue };
            let waiters = waiters.iter().take(EXAMPLES);
            for (task, _) in waiters.filter(|(task, stamp)| self.waits(*task, *stamp)) {
                let id = self.tasks[*task].id;
                if !found.contains(&id) {
                    found.push(id);
                }
                if found.len() == EXAMPLES {
                    return found;
                }
            }
        }
        found
    }

    /// Counts of everything.
    pub(crate) fn overview(&self) -> Overview {
        Overview {
            workers: self.workers.values().map(|worker| self.overview_of(worker)).collect(),
            tasks: self.tasks.len() as u64,
            objects: self.objects.len() as u64,
            recomputed: self.recomputed,
            stolen: self.stolen,
            links: self.links.overview(),
            functions: self.most_run(),
            waiting: self.waiting(),
            resident_bytes: 0,
        }
    }
}
