//! The task scheduler's decisions: events in, actions out.
//!
//! Pure: time comes with each event, and the little randomness that probing needs comes from a
//! seed. The parts: [`graph`] (dependencies, what is still needed, what must be computed again),
//! [`placement`] (which worker runs a task, by [`estimate`]), [`steal`] (what idle workers take
//! over), [`store`] (all records), [`crowd`] (which workers to look at), [`links`] (the bandwidth
//! between workers), [`check`] (the invariants, as code), [`explain`], [`queues`], [`recent`] (the
//! last tasks that ran), [`overview`].
//!
//! *Invariant:* those of [`Core::sanity_check`].

#[cfg(test)]
mod check;
mod crowd;
mod estimate;
mod explain;
mod graph;
mod holders;
mod links;
mod overview;
mod placement;
mod queues;
mod recent;
mod record;
mod reports;
mod steal;
mod store;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde::{Deserialize, Serialize};

use crowd::{Arrivals, Crowd};
use cuda_cluster_model::plan::Placement;
use cuda_cluster_wire::tasks::{
    ARGUMENTS_LIMIT, ARITY_LIMIT, INLINE_LIMIT, ObjectId, Product, Ran, TaskError, TaskSpec, Wishes,
};
use links::Links;
use recent::Recent;
use record::{
    Because, ClientId, Entry, Function, Object, ObjectKey, Outputs, Placed, Queue, Special, State,
    Task, TaskKey, Worker, WorkerId,
};
use store::{Objects, Records};

/// A task fails after this many of its workers have died.
const DEATHS_ALLOWED: u32 = 3;

/// What happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Event {
    /// A worker can run tasks.
    WorkerJoined { worker: WorkerId, name: String, threads: u32, resources: BTreeMap<String, u64> },
    /// A worker is gone, with all objects that it held.
    WorkerLost { worker: WorkerId },
    /// A client is gone, and no longer holds anything.
    ClientGone { client: ClientId },
    /// A client submits a task.
    Submit { client: ClientId, task: TaskSpec },
    /// A client provides an object, or will send it to a worker.
    Put { client: ClientId, object: ObjectId, product: Product, on: Option<String> },
    /// A worker has received an object from a client.
    Stored { worker: WorkerId, object: ObjectId, bytes: u64 },
    /// A client no longer needs an object.
    Release { client: ClientId, object: ObjectId },
    /// A client needs another client's object.
    Hold { client: ClientId, object: ObjectId },
    /// A client cancels a task.
    Cancel { client: ClientId, task: ObjectId },
    /// A client asks where an object is.
    Locate { client: ClientId, object: ObjectId },
    /// A client wants copies of an object on several workers.
    Replicate { client: ClientId, object: ObjectId, copies: u32 },
    /// A task has run.
    Done { worker: WorkerId, task: ObjectId, products: Vec<Product>, ran: Ran },
    /// A task has failed.
    Failed { worker: WorkerId, task: ObjectId, error: TaskError, ran: Ran },
    /// A worker returns a task that it had not begun.
    Returned { worker: WorkerId, task: ObjectId },
    /// A worker returns a task because it could not get an input.
    Unreachable {
        worker: WorkerId,
        task: ObjectId,
        object: ObjectId,
        source: Option<WorkerId>,
        missing: bool,
    },
    /// A worker could not fetch a copy of an object.
    NotFetched { worker: WorkerId, object: ObjectId },
    /// A client resets the transfer counters.
    CountAnew,
    /// A worker has fetched a copy of an object from the worker of this name.
    Fetched { worker: WorkerId, object: ObjectId, source: String, bytes: u64, micros: Option<u64> },
}

/// Where a worker finds an input.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) enum Input {
    /// In the message itself.
    Inline(Vec<u8>),
    /// On this worker, or being fetched by it.
    Here,
    /// On another worker.
    At { worker: WorkerId, bytes: u64 },
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) enum Action {
    /// Have a worker run a task.
    Run {
        worker: WorkerId,
        task: ObjectId,
        outputs: u32,
        function: String,
        arguments: Vec<u8>,
        inputs: Vec<(ObjectId, Input)>,
    },
    /// Have a worker return a task, unless it has begun.
    Retract { worker: WorkerId, task: ObjectId, unwanted: bool },
    /// Have a worker fetch a copy.
    Fetch { worker: WorkerId, object: ObjectId, source: WorkerId, bytes: u64 },
    /// Have a worker drop an object.
    Free { worker: WorkerId, object: ObjectId },
    /// Tell a client that an object is available.
    Available { client: ClientId, object: ObjectId, product: Product },
    /// Tell a client that an object will never be available.
    Unavailable { client: ClientId, object: ObjectId, error: TaskError },
    /// Tell a client where an object is.
    At { client: ClientId, object: ObjectId, workers: Vec<WorkerId> },
    /// Tell a client where to put an object.
    PutAt { client: ClientId, object: ObjectId, worker: WorkerId },
}

/// The settings of a core.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Settings {
    /// How workers are chosen.
    pub(crate) placement: Placement,
    /// Bytes per second between two workers, by name, before anything is measured.
    pub(crate) priors: BTreeMap<(String, String), f64>,
    /// The workers of the complete cluster, and their resources. A task that none of them may run
    /// is refused; empty if not known.
    pub(crate) planned: BTreeMap<String, BTreeMap<String, u64>>,
    /// Limit on task records.
    pub(crate) task_limit: usize,
    /// Limit on the bytes of arguments and of objects that live in the scheduler. Above it,
    /// requests of clients are refused; outputs of tasks are always accepted.
    pub(crate) bytes_limit: u64,
    /// Seed for probing.
    pub(crate) seed: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            placement: Placement::default(),
            priors: BTreeMap::new(),
            planned: BTreeMap::new(),
            task_limit: 1 << 24,
            bytes_limit: 4 << 30,
            seed: 0x9e37_79b9_7f4a_7c15,
        }
    }
}

/// The scheduler of tasks.
pub(crate) struct Core {
    settings: Settings,
    /// The time of the current event, in microseconds.
    now: u64,
    tasks: Records<Task>,
    objects: Objects,
    workers: BTreeMap<WorkerId, Worker>,
    functions: Vec<Function>,
    function_names: HashMap<String, u32>,
    crowd: Crowd,
    arrivals: Arrivals,
    links: Links,
    recent: Recent,
    /// Tasks that any worker may take.
    ready: Queue,
    /// Tasks that none of the present workers may run, and since when.
    parked: BTreeMap<TaskKey, u64>,
    /// Clients that have asked where an object is.
    askers: BTreeMap<ObjectKey, Vec<ClientId>>,
    /// Objects that clients are about to send to workers.
    coming: BTreeMap<ObjectKey, WorkerId>,
    /// Objects that may no longer be needed; checked at the end of each event.
    garbage: Vec<ObjectKey>,
    /// Bytes of arguments and of objects that live in the scheduler.
    held_bytes: u64,
    next_sequence: u64,
    next_stamp: u32,
    next_order: u64,
    turn: u64,
    recomputed: u64,
    stolen: u64,
    actions: Vec<Action>,
}

impl Core {
    pub(crate) fn new(settings: Settings) -> Self {
        let links = Links::new(settings.priors.clone(), settings.seed);
        let recent = Recent::new(settings.seed);
        Self {
            settings,
            now: 0,
            tasks: Records::new(),
            objects: Objects::new(),
            workers: BTreeMap::new(),
            functions: Vec::new(),
            function_names: HashMap::new(),
            crowd: Crowd::default(),
            arrivals: Arrivals::default(),
            links,
            recent,
            ready: Queue::new(),
            parked: BTreeMap::new(),
            askers: BTreeMap::new(),
            coming: BTreeMap::new(),
            garbage: Vec::new(),
            held_bytes: 0,
            next_sequence: 0,
            next_stamp: 0,
            next_order: 0,
            turn: 0,
            recomputed: 0,
            stolen: 0,
            actions: Vec::new(),
        }
    }

    /// Decides what to do about an event that happened at `now`, in microseconds of any clock that
    /// does not run backwards.
    pub(crate) fn handle(&mut self, event: Event, now: u64) -> Vec<Action> {
        self.now = now;
        self.take_in(event);
        self.sweep();
        self.dispatch();
        std::mem::take(&mut self.actions)
    }

    fn take_in(&mut self, event: Event) {
        match event {
            Event::WorkerJoined { worker, name, threads, resources } => {
                self.worker_joined(worker, name, threads, resources);
            }
            Event::WorkerLost { worker } => self.worker_lost(worker),
            Event::ClientGone { client } => self.client_gone(client),
            Event::Submit { client, task } => self.submit(client, task),
            Event::Put { client, object, product, on } => self.put(client, object, product, on),
            Event::Stored { worker, object, bytes } => {
                self.gained(worker, object, bytes);
            }
            Event::Release { client, object } => {
                if let Some(key) = self.objects.key(object) {
                    self.release(key, client);
                }
            }
            Event::Hold { client, object } => self.hold(client, object),
            Event::Cancel { client, task } => self.cancel(client, task),
            Event::CountAnew => self.links.count_anew(),
            Event::Locate { client, object } => self.locate(client, object),
            Event::Replicate { object, copies, .. } => self.replicate(object, copies),
            Event::Done { worker, task, products, ran } => self.done(worker, task, products, ran),
            Event::Failed { worker, task, error, ran } => {
                self.task_failed(worker, task, error, ran);
            }
            Event::Returned { worker, task } => {
                if let Some(key) = self.take_back(worker, task) {
                    self.stolen += u64::from(self.is_wanted(key));
                    self.run_again(key);
                }
            }
            Event::Unreachable { worker, task, object, source, missing } => {
                self.unreachable(worker, task, object, source, missing);
            }
            Event::NotFetched { worker, object } => self.not_fetched(worker, object),
            Event::Fetched { worker, object, source, bytes, micros } => {
                self.fetched(worker, object, &source, bytes, micros);
            }
        }
    }

    fn worker_joined(
        &mut self,
        id: WorkerId,
        name: String,
        threads: u32,
        resources: BTreeMap<String, u64>,
    ) {
        let worker = Worker {
            place: self.links.place(&name),
            name,
            threads: threads.max(1),
            free: resources.clone(),
            resources,
            sent: BTreeMap::new(),
            order_of: HashMap::new(),
            queue: Queue::new(),
            needy: Queue::new(),
            retracting: 0,
            sent_seconds: 0.0,
            queued_seconds: 0.0,
            incoming_seconds: 0.0,
            queued_incoming_seconds: 0.0,
            alone: false,
            objects: BTreeSet::new(),
            finished: 0,
        };
        self.workers.insert(id, worker);
        self.note(id);
        for key in std::mem::take(&mut self.parked).into_keys() {
            self.make_ready(key);
        }
    }

    fn worker_lost(&mut self, id: WorkerId) {
        let Some(lost) = self.workers.remove(&id) else { return };
        self.note(id);
        self.arrivals.forget_worker(id);
        for entry in lost.queue.iter().chain(&lost.needy) {
            self.make_ready(entry.task);
        }
        let suspects: BTreeSet<TaskKey> = lost.sent.values().copied().collect();
        for key in &suspects {
            // Take it from the dead worker before deciding anything else.
            let task = &mut self.tasks[*key];
            task.state = State::Waiting;
            task.retracting = false;
            task.deaths = task.deaths.saturating_add(1);
        }
        let mut gone = Vec::new();
        for &key in &lost.objects {
            let object = &mut self.objects[key];
            object.drop_replica(id);
            if !object.is_available() {
                gone.push(key);
            }
        }
        self.objects_lost(&gone, &lost.name, &suspects);
        let never_came: Vec<ObjectKey> =
            self.coming.iter().filter(|(_, worker)| **worker == id).map(|(key, _)| *key).collect();
        for key in never_came {
            self.coming.remove(&key);
            let (object, worker) = (self.objects[key].id, lost.name.clone());
            self.fail_object(key, &TaskError::Lost { object, worker });
        }
        for key in suspects {
            let deaths = u32::from(self.tasks[key].deaths);
            if deaths >= DEATHS_ALLOWED && self.is_wanted(key) {
                let task = self.tasks[key].id;
                self.fail(key, &TaskError::WorkersDied { task, deaths, worker: lost.name.clone() });
            } else {
                self.run_again(key);
            }
        }
    }

    fn submit(&mut self, client: ClientId, spec: TaskSpec) {
        let outputs = spec.outputs;
        let reason = if let Some(full) = self.full() {
            Some(full)
        } else if outputs == 0 || outputs as usize > ARITY_LIMIT || spec.inputs.len() > ARITY_LIMIT
        {
            Some(format!("a task has 1 to {ARITY_LIMIT} outputs and at most as many inputs"))
        } else if spec.arguments.len() > ARGUMENTS_LIMIT {
            Some(format!("its arguments are longer than {ARGUMENTS_LIMIT} bytes: put them"))
        } else if (0..outputs).any(|at| self.objects.key(spec.id.plus(at)).is_some()) {
            Some("its name is in use".to_owned())
        } else if let Some(input) = spec.inputs.iter().find(|i| self.objects.key(**i).is_none()) {
            Some(format!("there is no object {input}"))
        } else {
            self.impossible(&spec.wishes)
        };
        if let Some(reason) = reason {
            for at in 0..outputs.min(1) {
                let object = spec.id.plus(at);
                let error = TaskError::Refused { task: spec.id, reason: reason.clone() };
                self.actions.push(Action::Unavailable { client, object, error });
            }
            return;
        }
        self.add_task(client, spec);
    }

    /// Why requests of clients are refused now.
    fn full(&self) -> Option<String> {
        if self.tasks.len() >= self.settings.task_limit {
            Some(format!("the scheduler holds {} tasks, its limit", self.tasks.len()))
        } else if self.objects.len() >= 4 * self.settings.task_limit {
            Some(format!("the scheduler knows {} objects, its limit", self.objects.len()))
        } else if self.held_bytes > self.settings.bytes_limit {
            let held = self.held_bytes;
            Some(format!("the scheduler holds {held} bytes of arguments and small objects"))
        } else {
            None
        }
    }

    /// Why no worker, present or planned, could ever run such a task.
    fn impossible(&self, wishes: &Wishes) -> Option<String> {
        if self.settings.planned.is_empty() {
            return None;
        }
        let planned = self.settings.planned.iter();
        let present = self.workers.values().map(|worker| (&worker.name, &worker.resources));
        let named = |name: &str| wishes.on.as_ref().is_none_or(|wanted| wanted == name);
        let able: Vec<_> = planned.chain(present).filter(|(name, _)| named(name)).collect();
        if able.is_empty() {
            return Some(format!(
                "there is no worker {}",
                wishes.on.as_deref().unwrap_or_default()
            ));
        }
        let has = |of: &BTreeMap<String, u64>| {
            wishes.resources.iter().all(|(name, amount)| of.get(name) >= Some(amount))
        };
        if able.iter().any(|(_, resources)| has(resources)) {
            return None;
        }
        let wanted: Vec<String> =
            wishes.resources.iter().map(|(name, amount)| format!("{name}={amount}")).collect();
        Some(format!("no worker that may run it has {}", wanted.join(" ")))
    }

    fn put(&mut self, client: ClientId, id: ObjectId, product: Product, on: Option<String>) {
        let in_use = || self.objects.key(id).is_some().then(|| "its name is in use".to_owned());
        if let Some(reason) = self.full().or_else(in_use) {
            let error = TaskError::Refused { task: id, reason };
            self.actions.push(Action::Unavailable { client, object: id, error });
            return;
        }
        let key = self.add_object(id, None);
        self.objects[key].holders.push(client);
        match product {
            Product::Inline(bytes) if bytes.len() <= INLINE_LIMIT => {
                self.take_inline(key, bytes);
            }
            _ => {
                let place = |worker: &&WorkerId| match &on {
                    Some(name) => self.workers[worker].name == *name,
                    None => true,
                };
                // The one with the fewest objects, to spread what clients put.
                let fill = |worker: &&WorkerId| self.workers[worker].objects.len();
                match self.workers.keys().filter(place).min_by_key(fill) {
                    Some(&worker) => {
                        self.coming.insert(key, worker);
                        self.actions.push(Action::PutAt { client, object: id, worker });
                    }
                    None => {
                        let reason = "there is no such worker to put it to".to_owned();
                        self.fail_object(key, &TaskError::Refused { task: id, reason });
                    }
                }
            }
        }
    }
}
