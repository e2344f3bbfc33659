//! A machine in virtual time: links of given bandwidth, functions of given duration.
//!
//! All durations are exact, so that placement policies can be compared without a clock.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};

use super::super::*;
use super::lasting;
use cuda_cluster_wire::tasks::Wishes;

/// Microseconds that a message between scheduler and worker takes.
const MESSAGE: u64 = 30;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum What {
    Ordered(Order),
    Fetched { worker: WorkerId, object: ObjectId, source: WorkerId, bytes: u64, micros: u64 },
    Ran { worker: WorkerId, task: ObjectId, micros: u64 },
    Told(Told),
}

/// An [`Action`] for a worker, in a form that a heap can hold.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Order {
    Run { worker: WorkerId, task: ObjectId, inputs: Vec<(ObjectId, Option<(WorkerId, u64)>)> },
    Retract { worker: WorkerId, task: ObjectId },
    Free { worker: WorkerId, object: ObjectId },
}

/// An [`Event`] on its way to the scheduler.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Told {
    Fetched { worker: WorkerId, object: ObjectId, source: WorkerId, bytes: u64, micros: u64 },
    Done { worker: WorkerId, task: ObjectId, micros: u64 },
    Returned { worker: WorkerId, task: ObjectId },
}

#[derive(Default)]
struct Worker {
    has: BTreeSet<ObjectId>,
    fetching: BTreeSet<ObjectId>,
    /// In order of arrival.
    waiting: VecDeque<(ObjectId, Vec<ObjectId>)>,
    busy: bool,
}

/// The machine, its scheduler, and one client.
pub(super) struct Machine {
    core: Core,
    now: u64,
    sequence: u64,
    heap: BinaryHeap<Reverse<(u64, u64, What)>>,
    workers: BTreeMap<WorkerId, Worker>,
    /// Bytes per microsecond.
    links: BTreeMap<(WorkerId, WorkerId), f64>,
    free_at: BTreeMap<(WorkerId, WorkerId), u64>,
    /// For each task: the microseconds that it takes, and the bytes of each output.
    tasks: BTreeMap<ObjectId, (u64, Vec<u64>)>,
    available: BTreeSet<ObjectId>,
    next: u64,
    /// Bytes that were sent over links.
    pub(super) moved: u64,
}

impl Machine {
    pub(super) fn new(
        settings: Settings,
        workers: usize,
        rate: impl Fn(usize, usize) -> f64,
    ) -> Self {
        let mut machine = Self {
            core: Core::new(settings),
            now: 0,
            sequence: 0,
            heap: BinaryHeap::new(),
            workers: BTreeMap::new(),
            links: BTreeMap::new(),
            free_at: BTreeMap::new(),
            tasks: BTreeMap::new(),
            available: BTreeSet::new(),
            next: 0,
            moved: 0,
        };
        for at in 0..workers {
            let worker = at as WorkerId;
            machine.workers.insert(worker, Worker::default());
            for to in (0..workers).filter(|to| *to != at) {
                machine.links.insert((worker, to as WorkerId), rate(at, to) * 1e-6);
            }
            let (name, resources) = (format!("gpu{at}"), BTreeMap::new());
            machine.handle(Event::WorkerJoined { worker, name, threads: 1, resources });
        }
        machine
    }

    pub(super) fn submit(
        &mut self,
        function: &str,
        inputs: &[ObjectId],
        micros: u64,
        outputs: Vec<u64>,
    ) -> Vec<ObjectId> {
        let id = ObjectId::new(1, self.next);
        let count = u32::try_from(outputs.len()).expect("few");
        self.next += u64::from(count);
        self.tasks.insert(id, (micros, outputs));
        let task = TaskSpec {
            id,
            outputs: count,
            function: function.to_owned(),
            arguments: vec![],
            inputs: inputs.to_vec(),
            wishes: Wishes::default(),
        };
        self.handle(Event::Submit { client: 1, task });
        (0..count).map(|at| id.plus(at)).collect()
    }

    pub(super) fn release(&mut self, objects: &[ObjectId]) {
        for &object in objects {
            self.handle(Event::Release { client: 1, object });
        }
    }

    /// Runs until these are available; returns the virtual time, in microseconds.
    pub(super) fn wait(&mut self, objects: &[ObjectId]) -> u64 {
        while !objects.iter().all(|object| self.available.contains(object)) {
            let Reverse((at, _, what)) = self.heap.pop().expect("something happens");
            self.now = at;
            self.happen(what);
        }
        self.now
    }

    fn later(&mut self, micros: u64, what: What) {
        self.sequence += 1;
        self.heap.push(Reverse((self.now + micros, self.sequence, what)));
    }

    fn handle(&mut self, event: Event) {
        for action in self.core.handle(event, self.now) {
            let order = match action {
                Action::Run { worker, task, inputs, .. } => {
                    let source = |(object, input)| match input {
                        Input::At { worker, bytes } => (object, Some((worker, bytes))),
                        _ => (object, None),
                    };
                    Order::Run { worker, task, inputs: inputs.into_iter().map(source).collect() }
                }
                Action::Retract { worker, task, .. } => Order::Retract { worker, task },
                Action::Free { worker, object } => Order::Free { worker, object },
                Action::Available { object, .. } => {
                    self.available.insert(object);
                    continue;
                }
                other => panic!("{other:?} on a machine where nothing fails"),
            };
            self.later(MESSAGE, What::Ordered(order));
        }
    }

    fn happen(&mut self, what: What) {
        match what {
            What::Ordered(Order::Run { worker, task, inputs }) => {
                for &(object, source) in &inputs {
                    if let Some((source, bytes)) = source {
                        self.fetch(worker, object, source, bytes);
                    }
                }
                let inputs = inputs.into_iter().map(|(object, _)| object).collect();
                self.at(worker).waiting.push_back((task, inputs));
                self.start(worker);
            }
            What::Ordered(Order::Retract { worker, task }) => {
                let waiting = &mut self.at(worker).waiting;
                if let Some(at) = waiting.iter().position(|(waits, _)| *waits == task) {
                    waiting.remove(at);
                    self.later(MESSAGE, What::Told(Told::Returned { worker, task }));
                }
            }
            What::Ordered(Order::Free { worker, object }) => {
                self.at(worker).has.remove(&object);
            }
            What::Fetched { worker, object, source, bytes, micros } => {
                let there = self.at(worker);
                there.fetching.remove(&object);
                there.has.insert(object);
                let told = Told::Fetched { worker, object, source, bytes, micros };
                self.later(MESSAGE, What::Told(told));
                self.start(worker);
            }
            What::Ran { worker, task, micros } => {
                let outputs = self.tasks[&task].1.len();
                let there = self.at(worker);
                there.busy = false;
                there.has.extend((0..u32::try_from(outputs).expect("few")).map(|at| task.plus(at)));
                self.later(MESSAGE, What::Told(Told::Done { worker, task, micros }));
                self.start(worker);
            }
            What::Told(told) => {
                let event = match told {
                    Told::Fetched { worker, object, source, bytes, micros } => {
                        let source = format!("gpu{source}");
                        Event::Fetched { worker, object, source, bytes, micros: Some(micros) }
                    }
                    Told::Done { worker, task, micros } => {
                        let outputs = &self.tasks[&task].1;
                        let products = outputs.iter().map(|bytes| Product::Stored(*bytes));
                        Event::Done {
                            worker,
                            task,
                            products: products.collect(),
                            ran: lasting(micros),
                        }
                    }
                    Told::Returned { worker, task } => Event::Returned { worker, task },
                };
                self.handle(event);
            }
        }
    }

    fn at(&mut self, worker: WorkerId) -> &mut Worker {
        self.workers.get_mut(&worker).expect("workers do not die here")
    }

    /// Adds a transfer to a link, which carries one at a time.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "microseconds")]
    fn fetch(&mut self, worker: WorkerId, object: ObjectId, source: WorkerId, bytes: u64) {
        let there = self.at(worker);
        if there.has.contains(&object) || !there.fetching.insert(object) {
            return;
        }
        self.moved += bytes;
        let link = (source, worker);
        let micros = (bytes as f64 / self.links[&link]) as u64 + 1;
        let begin = self.free_at.get(&link).copied().unwrap_or_default().max(self.now);
        self.free_at.insert(link, begin + micros);
        let after = begin + micros - self.now;
        self.later(after, What::Fetched { worker, object, source, bytes, micros });
    }

    /// Lets an idle worker begin the first task whose inputs are available.
    fn start(&mut self, worker: WorkerId) {
        let there = self.at(worker);
        let ready = |(_, inputs): &(ObjectId, Vec<ObjectId>)| {
            inputs.iter().all(|input| there.has.contains(input))
        };
        let Some(at) = there.waiting.iter().position(ready).filter(|_| !there.busy) else { return };
        if let Some((task, _)) = self.at(worker).waiting.remove(at) {
            self.at(worker).busy = true;
            let micros = self.tasks[&task].0;
            self.later(micros, What::Ran { worker, task, micros });
        }
    }
}

/// How long a merge takes once its tables are made, and how many bytes it moves. It runs twice,
/// because the first run teaches the scheduler the bandwidths.
pub(super) fn merge(
    settings: &Settings,
    workers: usize,
    parts: usize,
    part_bytes: u64,
    rate: impl Fn(usize, usize) -> f64,
) -> (u64, u64) {
    let mut machine = Machine::new(settings.clone(), workers, rate);
    let mut result = (0, 0);
    for _ in 0..2 {
        let made: Vec<ObjectId> = (0..2 * parts)
            .flat_map(|_| machine.submit("table.make", &[], 3000, vec![part_bytes]))
            .collect();
        let begin = machine.wait(&made);
        let before = machine.moved;
        let piece = part_bytes / parts as u64;
        let split: Vec<Vec<ObjectId>> = made
            .iter()
            .map(|table| machine.submit("table.split", &[*table], 1000, vec![piece; parts]))
            .collect();
        let joined: Vec<ObjectId> = (0..parts)
            .flat_map(|part| {
                let inputs: Vec<ObjectId> = split.iter().map(|table| table[part]).collect();
                machine.submit("table.join", &inputs, 1000, vec![16])
            })
            .collect();
        machine.release(&split.concat());
        let end = machine.wait(&joined);
        result = (end - begin, machine.moved - before);
        machine.release(&joined);
        machine.release(&made);
    }
    result
}
