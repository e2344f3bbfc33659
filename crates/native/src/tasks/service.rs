//! Carries the task scheduler's events and actions between its core and the connections.
//!
//! Does not decide; [`super::core`] does.
//!
//! Messages are collected while events are handled, and sent in few frames by
//! [`TaskService::flush`].

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use serde::Serialize;

use super::core::{Action, Core, Event, Input, Settings};
use super::record::Recorder;
use crate::connection::ConnectionId;
use crate::process::resources;
use cuda_cluster_machine::os::process::resident_bytes;
use cuda_cluster_model::plan::{NativePlan, Plan};
use cuda_cluster_wire::frame::encode;
use cuda_cluster_wire::native::{ToClient, ToWorker};
use cuda_cluster_wire::peer::Member;
use cuda_cluster_wire::tasks::{
    BATCH_BYTES, News, ObjectId, Order, Overview, Product, Report, Request, Source, TaskError,
};

/// Complete frames, of about [`BATCH_BYTES`] each, above which a round of events ends early.
const FRAMES_BEFORE_FLUSH: usize = 64;

/// Messages for one connection, and their approximate size in bytes.
enum Batch {
    Worker(Vec<Order>, usize),
    Client(Vec<News>, usize),
}

/// How the plan wants tasks to be scheduled.
fn settings(plan: &Plan, native: &NativePlan) -> Settings {
    let pairs = native.gb_per_s.iter().flat_map(|(from, others)| {
        others.iter().map(move |(to, rate)| ((from.clone(), to.clone()), rate * 1e9))
    });
    let planned = plan.workers.iter();
    let planned = planned.map(|worker| (worker.name.clone(), resources(native, Some(worker))));
    Settings {
        placement: native.placement,
        priors: pairs.collect(),
        planned: planned.collect(),
        ..Settings::default()
    }
}

/// The task scheduler and its messages.
pub(crate) struct TaskService {
    core: Core,
    start: Instant,
    workers: BTreeMap<ConnectionId, Member>,
    /// Clients, by the number that their objects' names begin with.
    clients: BTreeMap<ConnectionId, u32>,
    next_client: u32,
    batches: BTreeMap<ConnectionId, Batch>,
    /// Complete frames.
    frames: Vec<(ConnectionId, Vec<u8>)>,
    recorder: Option<Recorder>,
}

impl TaskService {
    /// What a plan asks for; relative paths of it are below the run directory.
    pub(crate) fn new(plan: &Plan, native: &NativePlan, run_directory: &Path) -> Self {
        let settings = settings(plan, native);
        let log = native.record_events.as_ref();
        Self {
            recorder: log.map(|path| Recorder::begin(&run_directory.join(path), &settings)),
            core: Core::new(settings),
            start: Instant::now(),
            workers: BTreeMap::new(),
            clients: BTreeMap::new(),
            next_client: 1,
            batches: BTreeMap::new(),
            frames: Vec::new(),
        }
    }

    /// The core's time, in microseconds.
    fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    fn handle(&mut self, event: Event) {
        let now = self.now();
        let noted = self.recorder.is_some().then(|| event.clone());
        let actions = self.core.handle(event, now);
        if let (Some(recorder), Some(event)) = (&mut self.recorder, noted) {
            recorder.note(event, now, &actions);
        }
        for action in actions {
            self.act(action);
        }
    }

    /// Handles the reports of a worker.
    pub(crate) fn reported(&mut self, worker: ConnectionId, member: &Member, reports: Vec<Report>) {
        for report in reports {
            let event = match report {
                Report::Offer { threads, resources } => {
                    self.workers.insert(worker, member.clone());
                    let name = member.name.clone();
                    Event::WorkerJoined { worker, name, threads, resources }
                }
                Report::Done { task, products, ran } => Event::Done { worker, task, products, ran },
                Report::Failed { task, error, ran } => {
                    tracing::debug!(%task, %error, worker = member.name, "a task has failed");
                    Event::Failed { worker, task, error, ran }
                }
                Report::Returned { task } => Event::Returned { worker, task },
                Report::Unreachable { task, object, source, missing } => {
                    let source = self.workers.iter().find(|(_, member)| **member == source);
                    let source = source.map(|(id, _)| *id);
                    Event::Unreachable { worker, task, object, source, missing }
                }
                Report::NotFetched { object } => Event::NotFetched { worker, object },
                Report::Fetched { object, source, bytes, micros } => {
                    Event::Fetched { worker, object, source: source.name, bytes, micros }
                }
                Report::Stored { object, bytes } => Event::Stored { worker, object, bytes },
            };
            self.handle(event);
        }
    }

    /// Adds a client, and sends it the number for its objects' names.
    pub(crate) fn joined(&mut self, client: ConnectionId) {
        self.clients.insert(client, self.next_client);
        self.news(client, News::Hello { client: self.next_client }, 8);
        self.next_client += 1;
    }

    /// Handles the requests of a client.
    pub(crate) fn asked(&mut self, client: ConnectionId, requests: Vec<Request>) {
        let Some(&number) = self.clients.get(&client) else { return };
        for request in requests {
            match request {
                Request::Submit(task) if self.is_own(number, task.id) => {
                    self.handle(Event::Submit { client, task });
                }
                Request::Put { object, product, on } if self.is_own(number, object) => {
                    self.handle(Event::Put { client, object, product, on });
                }
                Request::Submit(task) => self.refuse_name(client, task.id),
                Request::Put { object, .. } => self.refuse_name(client, object),
                Request::Release { objects } => {
                    for object in objects {
                        self.handle(Event::Release { client, object });
                    }
                }
                Request::Cancel { tasks } => {
                    for task in tasks {
                        self.handle(Event::Cancel { client, task });
                    }
                }
                Request::Locate { object } => self.handle(Event::Locate { client, object }),
                Request::Hold { object } => self.handle(Event::Hold { client, object }),
                Request::Replicate { object, copies } => {
                    self.handle(Event::Replicate { client, object, copies });
                }
                Request::Explain { task } => {
                    let why = self.core.explain(task);
                    let bytes = why.len();
                    self.news(client, News::Because { task, why }, bytes);
                }
                Request::Recent { after } => {
                    let recent = self.core.recent(after);
                    let bytes = 32 * (recent.tasks.len() + recent.functions.len());
                    self.news(client, News::Recent(recent), bytes);
                }
                Request::CountAnew => self.handle(Event::CountAnew),
                Request::Queues => {
                    let queues = self.core.queues(self.now());
                    let bytes = 96 * (queues.sent.len() + queues.held.len());
                    self.news(client, News::Queues(queues), bytes);
                }
                Request::Overview => {
                    // 0 if the kernel does not report it.
                    let resident_bytes = resident_bytes(std::process::id()).unwrap_or(0);
                    let overview = Overview { resident_bytes, ..self.core.overview() };
                    let bytes = 64 * (overview.workers.len() + overview.links.len());
                    self.news(client, News::Overview(overview), bytes);
                }
            }
        }
    }

    fn is_own(&self, number: u32, id: ObjectId) -> bool {
        id.client() == u64::from(number)
    }

    fn refuse_name(&mut self, client: ConnectionId, object: ObjectId) {
        let reason = "a client's objects are named with its own number".to_owned();
        let error = TaskError::Refused { task: object, reason };
        self.news(client, News::Failed { object, error }, 128);
    }

    /// Handles the end of a connection.
    pub(crate) fn gone(&mut self, connection: ConnectionId) {
        self.batches.remove(&connection);
        if self.workers.remove(&connection).is_some() {
            self.handle(Event::WorkerLost { worker: connection });
        }
        if self.clients.remove(&connection).is_some() {
            self.handle(Event::ClientGone { client: connection });
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Run { worker, task, outputs, function, arguments, inputs } => {
                let inline = |input: &Input| match input {
                    Input::Inline(bytes) => bytes.len(),
                    _ => 24,
                };
                let bytes = 48 + arguments.len() + function.len();
                let bytes = bytes + inputs.iter().map(|(_, i)| 12 + inline(i)).sum::<usize>();
                let inputs = inputs.into_iter().map(|(id, i)| (id, self.source(i))).collect();
                let order = Order::Run { task, outputs, function, arguments, inputs };
                self.order(worker, order, bytes);
            }
            Action::Retract { worker, task, unwanted } => {
                self.order(worker, Order::Retract { task, unwanted }, 16);
            }
            Action::Fetch { worker, object, source, bytes } => {
                let source = self.source(Input::At { worker: source, bytes });
                self.order(worker, Order::Fetch { object, source }, 48);
            }
            Action::Free { worker, object } => self.order(worker, Order::Free { object }, 16),
            Action::Available { client, object, product } => {
                let bytes = match &product {
                    Product::Inline(bytes) => 16 + bytes.len(),
                    Product::Stored(_) => 32,
                };
                self.news(client, News::Available { object, product }, bytes);
            }
            Action::Unavailable { client, object, error } => {
                self.news(client, News::Failed { object, error }, 512);
            }
            Action::At { client, object, workers } => {
                let name = |worker: &ConnectionId| Some(self.workers.get(worker)?.name.clone());
                let workers: Vec<String> = workers.iter().filter_map(name).collect();
                let bytes = 16 * (1 + workers.len());
                self.news(client, News::At { object, workers }, bytes);
            }
            Action::PutAt { client, object, worker } => {
                if let Some(member) = self.workers.get(&worker) {
                    let worker = member.name.clone();
                    self.news(client, News::PutAt { object, worker }, 48);
                }
            }
        }
    }

    fn source(&self, input: Input) -> Source {
        match input {
            Input::Inline(bytes) => Source::Inline(bytes),
            Input::Here => Source::Here,
            Input::At { worker, bytes } => match self.workers.get(&worker) {
                Some(member) => Source::Peer { member: member.clone(), bytes },
                None => Source::Here,
            },
        }
    }

    fn order(&mut self, worker: ConnectionId, order: Order, bytes: usize) {
        let empty = || Batch::Worker(Vec::new(), 0);
        if let Batch::Worker(orders, sum) = self.batches.entry(worker).or_insert_with(empty) {
            orders.push(order);
            *sum += bytes;
            if *sum >= BATCH_BYTES {
                self.seal(worker);
            }
        }
    }

    fn news(&mut self, client: ConnectionId, news: News, bytes: usize) {
        let empty = || Batch::Client(Vec::new(), 0);
        if let Batch::Client(all, sum) = self.batches.entry(client).or_insert_with(empty) {
            all.push(news);
            *sum += bytes;
            if *sum >= BATCH_BYTES {
                self.seal(client);
            }
        }
    }

    fn seal(&mut self, connection: ConnectionId) {
        match self.batches.remove(&connection) {
            Some(Batch::Worker(orders, _)) => self.frame(connection, &ToWorker::Work(orders)),
            Some(Batch::Client(news, _)) => self.frame(connection, &ToClient::News(news)),
            None => {}
        }
    }

    fn frame(&mut self, connection: ConnectionId, message: &impl Serialize) {
        match encode(message) {
            Ok(frame) => self.frames.push((connection, frame)),
            // The limits on what clients send keep a batch below the limit of a frame.
            Err(error) => tracing::error!("messages are not sent: {error}"),
        }
    }

    /// Whether enough messages wait that they should be sent now.
    pub(crate) fn is_full(&self) -> bool {
        self.frames.len() > FRAMES_BEFORE_FLUSH
    }

    /// The frames to send now.
    pub(crate) fn flush(&mut self) -> Vec<(ConnectionId, Vec<u8>)> {
        while let Some((&connection, _)) = self.batches.first_key_value() {
            self.seal(connection);
        }
        self.recorder.iter_mut().for_each(Recorder::flush);
        std::mem::take(&mut self.frames)
    }
}
