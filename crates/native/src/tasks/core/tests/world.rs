//! Workers that are slow, lose messages when they die, and answer in any order.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::super::*;
use super::lasting;
use cuda_cluster_wire::tasks::Wishes;

/// A worker as the world sees it.
#[derive(Default)]
pub(super) struct FakeWorker {
    pub(super) name: String,
    pub(super) orders: VecDeque<Action>,
    pub(super) reports: VecDeque<Event>,
    pub(super) has: BTreeSet<ObjectId>,
    /// Objects that it fetches, by source.
    pub(super) fetches: BTreeMap<ObjectId, WorkerId>,
    /// Tasks that it runs: number of outputs, and inputs.
    pub(super) runs: BTreeMap<ObjectId, (u32, Vec<ObjectId>)>,
}

/// What a client has been told.
#[derive(Default)]
pub(super) struct FakeClient {
    pub(super) holds: BTreeSet<ObjectId>,
    pub(super) tasks: Vec<ObjectId>,
    pub(super) available: BTreeSet<ObjectId>,
    pub(super) failed: BTreeMap<ObjectId, TaskError>,
    pub(super) places: BTreeMap<ObjectId, Vec<WorkerId>>,
}

/// The world around a core.
pub(super) struct World {
    pub(super) core: Core,
    pub(super) now: u64,
    pub(super) workers: BTreeMap<WorkerId, FakeWorker>,
    pub(super) clients: BTreeMap<ClientId, FakeClient>,
    /// Tasks that a worker has, according to the core.
    pub(super) out: BTreeMap<ObjectId, WorkerId>,
    pub(super) next_worker: WorkerId,
    pub(super) next_object: u64,
    pub(super) log: Vec<(Event, u64)>,
    pub(super) decisions: Vec<Vec<Action>>,
    /// Outputs are small enough to live in the scheduler.
    pub(super) inline: bool,
}

impl World {
    pub(super) fn new(workers: usize, inline: bool) -> Self {
        let mut world = Self {
            core: Core::new(Settings::default()),
            now: 0,
            workers: BTreeMap::new(),
            clients: BTreeMap::new(),
            out: BTreeMap::new(),
            next_worker: 1,
            next_object: 0,
            log: Vec::new(),
            decisions: Vec::new(),
            inline,
        };
        for client in 1..3 {
            world.clients.insert(client, FakeClient::default());
        }
        for _ in 0..workers {
            world.join();
        }
        world
    }

    pub(super) fn handle(&mut self, event: Event) {
        self.now += 10;
        self.log.push((event.clone(), self.now));
        match &event {
            Event::Done { task, .. }
            | Event::Failed { task, .. }
            | Event::Returned { task, .. }
            | Event::Unreachable { task, .. } => {
                self.out.remove(task);
            }
            Event::WorkerLost { worker } => self.out.retain(|_, holder| holder != worker),
            _ => {}
        }
        let missed = matches!(event, Event::Unreachable { .. });
        let actions = self.core.handle(event, self.now);
        self.core.sanity_check();
        for action in &actions {
            if let Action::Free { object, .. } = action {
                // A worker that reported a missing copy is told to drop it.
                assert!(missed || self.core.may_spare(*object), "{object} is freed while needed");
            }
        }
        self.decisions.push(actions.clone());
        for action in actions {
            self.act(action);
        }
    }

    pub(super) fn act(&mut self, action: Action) {
        match &action {
            Action::Run { worker, task, inputs, .. } => {
                assert_eq!(self.out.insert(*task, *worker), None, "{task} runs twice at once");
                for (object, input) in inputs {
                    if let Input::At { worker: source, .. } = input {
                        assert!(self.workers.contains_key(source), "{object} is at a dead worker");
                    }
                }
                self.worker(*worker).orders.push_back(action);
            }
            Action::Fetch { worker, source, .. } => {
                assert!(self.workers.contains_key(source), "a dead worker is a source");
                self.worker(*worker).orders.push_back(action);
            }
            Action::Retract { worker, .. } | Action::Free { worker, .. } => {
                // The same event may report the death of a worker, which makes this needless.
                if let Some(worker) = self.workers.get_mut(worker) {
                    worker.orders.push_back(action);
                }
            }
            Action::Available { client, object, .. } => {
                self.client(*client).available.insert(*object);
            }
            Action::Unavailable { client, object, error } => {
                self.client(*client).failed.insert(*object, error.clone());
            }
            Action::At { client, object, workers } => {
                let (object, workers) = (*object, workers.clone());
                self.client(*client).places.insert(object, workers);
            }
            Action::PutAt { object, worker, .. } => {
                let (object, id) = (*object, *worker);
                let worker = self.worker(id);
                worker.has.insert(object);
                worker.reports.push_back(Event::Stored { worker: id, object, bytes: 5000 });
            }
        }
    }

    pub(super) fn worker(&mut self, id: WorkerId) -> &mut FakeWorker {
        self.workers.get_mut(&id).expect("only living workers are used")
    }

    pub(super) fn client(&mut self, id: ClientId) -> &mut FakeClient {
        self.clients.entry(id).or_default()
    }

    pub(super) fn join(&mut self) {
        let worker = self.next_worker;
        self.next_worker += 1;
        let name = format!("gpu{}", worker % 4);
        self.workers.insert(worker, FakeWorker { name: name.clone(), ..FakeWorker::default() });
        let resources = [("GPU".to_owned(), 1)].into();
        self.handle(Event::WorkerJoined { worker, name, threads: 1, resources });
    }

    pub(super) fn nth<K: Copy, V>(map: &BTreeMap<K, V>, choice: u32) -> Option<K> {
        let at = choice as usize % map.len().max(1);
        map.keys().nth(at).copied()
    }

    pub(super) fn lose(&mut self, choice: u32) {
        if let Some(worker) = Self::nth(&self.workers, choice) {
            self.workers.remove(&worker);
            self.handle(Event::WorkerLost { worker });
        }
    }

    pub(super) fn submit(&mut self, choice: u32) {
        let Some(client) = Self::nth(&self.clients, choice) else { return };
        let known: Vec<ObjectId> = self.clients[&client].holds.iter().copied().collect();
        let pick = |n: u32| known.get((choice / n) as usize % known.len().max(1)).copied();
        let inputs: Vec<ObjectId> =
            [3, 7, 13].into_iter().take((choice % 4) as usize).filter_map(pick).collect();
        let outputs = 1 + choice / 17 % 3;
        let id = ObjectId::new(u32::try_from(client).expect("small"), self.next_object);
        self.next_object += u64::from(outputs);
        let wishes = Wishes {
            priority: i32::try_from(choice / 31 % 3).expect("small"),
            retries: u16::try_from(choice / 5 % 2).expect("small"),
            on: (choice.is_multiple_of(11)).then(|| "gpu1".to_owned()),
            resources: if choice.is_multiple_of(7) {
                [("GPU".to_owned(), 1)].into()
            } else {
                BTreeMap::new()
            },
        };
        let fake = self.client(client);
        fake.holds.extend((0..outputs).map(|at| id.plus(at)));
        fake.tasks.push(id);
        let task =
            TaskSpec { id, outputs, function: "f".into(), arguments: vec![], inputs, wishes };
        self.handle(Event::Submit { client, task });
    }

    pub(super) fn put(&mut self, choice: u32) {
        let Some(client) = Self::nth(&self.clients, choice) else { return };
        let object = ObjectId::new(u32::try_from(client).expect("small"), self.next_object);
        self.next_object += 1;
        self.client(client).holds.insert(object);
        let product =
            if choice.is_multiple_of(2) { Product::Inline(vec![1]) } else { Product::Stored(5000) };
        self.handle(Event::Put { client, object, product, on: None });
    }

    pub(super) fn of_client(&mut self, choice: u32, what: impl Fn(ClientId, ObjectId) -> Event) {
        let Some(client) = Self::nth(&self.clients, choice) else { return };
        let holds = &self.clients[&client].holds;
        let at = (choice / 3) as usize % holds.len().max(1);
        let Some(object) = holds.iter().nth(at).copied() else { return };
        let event = what(client, object);
        if matches!(event, Event::Release { .. }) {
            self.client(client).holds.remove(&object);
        }
        self.handle(event);
    }

    /// A worker carries out its next order.
    pub(super) fn obey(&mut self, choice: u32) -> bool {
        let Some(id) = Self::nth(&self.workers, choice) else { return false };
        let worker = self.worker(id);
        let Some(order) = worker.orders.pop_front() else { return false };
        match order {
            Action::Run { task, outputs, inputs, .. } => {
                for (object, input) in &inputs {
                    if let Input::At { worker: source, .. } = input
                        && !worker.has.contains(object)
                    {
                        worker.fetches.entry(*object).or_insert(*source);
                    }
                }
                let stored = |(object, input): (ObjectId, Input)| match input {
                    Input::Inline(_) => None,
                    _ => Some(object),
                };
                let inputs = inputs.into_iter().filter_map(stored).collect();
                worker.runs.insert(task, (outputs, inputs));
            }
            Action::Retract { task, .. } => {
                if worker.runs.remove(&task).is_some() {
                    worker.reports.push_back(Event::Returned { worker: id, task });
                }
            }
            Action::Fetch { object, source, .. } => {
                if !worker.has.contains(&object) {
                    worker.fetches.entry(object).or_insert(source);
                }
            }
            Action::Free { object, .. } => {
                worker.has.remove(&object);
            }
            other => panic!("{other:?} is no order"),
        }
        true
    }

    /// A worker finishes a fetch, or finds that its source is gone.
    pub(super) fn fetch(&mut self, choice: u32) -> bool {
        let Some(id) = Self::nth(&self.workers, choice) else { return false };
        let Some(object) = Self::nth(&self.workers[&id].fetches, choice / 3) else { return false };
        let source = self.workers[&id].fetches[&object];
        let from = self.workers.get(&source).filter(|source| source.has.contains(&object));
        let name = from.map(|source| source.name.clone());
        let worker = self.worker(id);
        worker.fetches.remove(&object);
        if let Some(source) = name {
            worker.has.insert(object);
            let (bytes, micros) = (5000, 10);
            worker.reports.push_back(Event::Fetched {
                worker: id,
                object,
                source,
                bytes,
                micros: Some(micros),
            });
        } else {
            self.give_up(id, object, Some(source));
        }
        true
    }

    pub(super) fn give_up(&mut self, id: WorkerId, object: ObjectId, source: Option<WorkerId>) {
        let worker = &self.workers[&id];
        let stuck: Vec<ObjectId> =
            worker.runs.iter().filter(|(_, (_, i))| i.contains(&object)).map(|(t, _)| *t).collect();
        for task in stuck {
            self.worker(id).runs.remove(&task);
            let missing = source.is_some_and(|source| self.is_without(source, object));
            let report = Event::Unreachable { worker: id, task, object, source, missing };
            self.worker(id).reports.push_back(report);
        }
    }

    /// Whether a living worker lacks an object.
    fn is_without(&self, worker: WorkerId, object: ObjectId) -> bool {
        self.workers.get(&worker).is_some_and(|worker| !worker.has.contains(&object))
    }

    /// A worker ends a task, successfully or not.
    pub(super) fn end(&mut self, choice: u32, may_fail: bool) -> bool {
        let Some(id) = Self::nth(&self.workers, choice) else { return false };
        let Some(task) = Self::nth(&self.workers[&id].runs, choice / 3) else { return false };
        let inline = self.inline;
        let worker = self.worker(id);
        let (outputs, inputs) = worker.runs[&task].clone();
        let lacking = inputs.iter().find(|input| !worker.has.contains(input)).copied();
        if let Some(object) = lacking {
            if !worker.fetches.contains_key(&object) {
                self.give_up(id, object, Some(id));
            }
            return true;
        }
        worker.runs.remove(&task);
        if may_fail && choice.is_multiple_of(13) {
            let (name, message) = (worker.name.clone(), "no".to_owned());
            let error = TaskError::Failed { task, worker: name, message };
            worker.reports.push_back(Event::Failed { worker: id, task, error, ran: lasting(1) });
            return true;
        }
        let product = |at: u32| {
            if inline && at.is_multiple_of(2) {
                Product::Inline(vec![7])
            } else {
                Product::Stored(5000)
            }
        };
        let products: Vec<Product> = (0..outputs).map(product).collect();
        for (at, product) in (0..outputs).zip(&products) {
            if matches!(product, Product::Stored(_)) {
                worker.has.insert(task.plus(at));
            }
        }
        worker.reports.push_back(Event::Done { worker: id, task, products, ran: lasting(100) });
        true
    }

    pub(super) fn report(&mut self, choice: u32) -> bool {
        let Some(id) = Self::nth(&self.workers, choice) else { return false };
        let Some(report) = self.worker(id).reports.pop_front() else { return false };
        self.handle(report);
        true
    }

    pub(super) fn step(&mut self, choice: u32) {
        let rest = choice / 32;
        match choice % 32 {
            0..5 => self.submit(rest),
            5 => self.put(rest),
            6 | 7 => self.of_client(rest, |client, object| Event::Release { client, object }),
            8 => self.of_client(rest, |client, task| Event::Cancel { client, task }),
            9 => self.of_client(rest, |client, object| Event::Locate { client, object }),
            10 => self.of_client(rest, |client, object| Event::Replicate {
                client,
                object,
                copies: 2,
            }),
            11 if rest.is_multiple_of(4) => self.lose(rest),
            12 if rest.is_multiple_of(3) => self.join(),
            13 if rest.is_multiple_of(16) => {
                if let Some(client) = Self::nth(&self.clients, rest) {
                    self.clients.remove(&client);
                    self.handle(Event::ClientGone { client });
                    self.clients.insert(client + 2, FakeClient::default());
                }
            }
            11..19 => drop(self.obey(rest)),
            19..23 => drop(self.fetch(rest)),
            23..27 => drop(self.end(rest, true)),
            _ => drop(self.report(rest)),
        }
    }

    /// Runs until nothing more happens.
    pub(super) fn settle(&mut self) {
        for name in 0..4 {
            if !self.workers.values().any(|worker| worker.name == format!("gpu{name}")) {
                while self.next_worker % 4 != name {
                    self.next_worker += 1;
                }
                self.join();
            }
        }
        let mut rounds = 0;
        loop {
            let mut moved = false;
            for choice in 0..u32::try_from(self.workers.len()).expect("few") {
                moved |= self.obey(choice) | self.fetch(choice);
                moved |= self.end(choice, false) | self.report(choice);
            }
            if !moved {
                return;
            }
            rounds += 1;
            assert!(rounds < 20_000, "the world does not come to rest");
        }
    }

    /// Every object that a client holds really exists, or has failed.
    pub(super) fn check_promises(&mut self) {
        let held: Vec<(ClientId, ObjectId)> = self
            .clients
            .iter()
            .flat_map(|(client, fake)| fake.holds.iter().map(|object| (*client, *object)))
            .collect();
        for (client, object) in held {
            let why = self.core.explain(object);
            let fake = self.client(client);
            if fake.failed.contains_key(&object) {
                continue;
            }
            assert!(fake.available.contains(&object), "{object} never came: {why}");
            fake.places.clear();
            self.handle(Event::Locate { client, object });
            if let Some(workers) = self.clients[&client].places.get(&object) {
                assert!(!workers.is_empty());
                for worker in workers {
                    assert!(self.workers[worker].has.contains(&object), "{object} was freed");
                }
            }
        }
    }

    pub(super) fn release_all(&mut self) {
        let clients: Vec<ClientId> = self.clients.keys().copied().collect();
        for client in clients {
            for object in std::mem::take(&mut self.client(client).holds) {
                self.handle(Event::Release { client, object });
            }
        }
        self.settle();
    }
}
