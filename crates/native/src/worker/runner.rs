//! Carries out the scheduler's orders: fetches inputs, calls functions, stores outputs.
//!
//! Does not decide what to run or where.
//!
//! A task waits in [`Runner`] until its inputs are here, then in the queue for one of the threads
//! that call functions. Threads and fetches send their results to the event loop, which reports
//! them to the scheduler in batches.
//!
//! *Invariant:* every order to run a task is answered once: done, failed, returned, or unreachable.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::unistd::gettid;
use tokio::sync::{mpsc, oneshot};

use super::call::{self, Job, began_now, micros};
use super::context::WorkerContext;
use super::fetch::{self, Came, Fetched};
use super::objects::Store;
use crate::error::Error;
use cuda_cluster_wire::peer::Member;
use cuda_cluster_wire::tasks::{AtWork, Fetching, ObjectId, Order, Report, RunningTask, Source};

/// The most running tasks, and the most fetches, that are told of.
const TOLD: usize = 64;

/// The queue of the threads that run tasks.
#[derive(Default)]
struct Jobs {
    waiting: VecDeque<Job>,
    running: HashMap<ObjectId, Running>,
    /// Whether the threads are to end.
    closed: bool,
    /// Threads that have not ended.
    threads: u32,
}

/// A task whose function runs.
struct Running {
    /// Set when nobody wants its outputs any more.
    cancelled: Arc<AtomicBool>,
    function: String,
    thread: u32,
    since: Instant,
}

#[derive(Default)]
struct Queue {
    jobs: Mutex<Jobs>,
    /// There is a job, or the queue is closed.
    filled: Condvar,
    /// A thread has ended.
    ended: Condvar,
}

/// An event from a thread or a fetch to the event loop.
pub(super) enum WorkerEvent {
    /// A report for the scheduler.
    Report(Report),
    /// A fetch has ended.
    Fetched(Fetched),
    /// Somebody asks what runs, and what is fetched.
    Asked(oneshot::Sender<AtWork>),
}

/// An object that is being fetched.
struct Fetch {
    source: Member,
    since: Instant,
    /// The tasks that wait for it.
    waiters: Vec<ObjectId>,
}

/// Tasks and fetches of one worker. Lives on the event loop.
pub(super) struct Runner {
    shared: Arc<WorkerContext>,
    queue: Arc<Queue>,
    events: mpsc::UnboundedSender<WorkerEvent>,
    /// Tasks, and the number of fetches that each waits for.
    waiting: HashMap<ObjectId, (Job, usize)>,
    fetching: HashMap<ObjectId, Fetch>,
}

impl Runner {
    /// Starts the threads that call functions.
    pub(super) fn start(
        shared: WorkerContext,
        threads: u32,
    ) -> Result<
        (Self, mpsc::UnboundedSender<WorkerEvent>, mpsc::UnboundedReceiver<WorkerEvent>),
        Error,
    > {
        let (events, happened) = mpsc::unbounded_channel();
        let (shared, queue) = (Arc::new(shared), Arc::new(Queue::default()));
        lock(&queue.jobs).threads = threads.max(1);
        for at in 0..threads.max(1) {
            let (shared, queue, events) = (Arc::clone(&shared), Arc::clone(&queue), events.clone());
            let work = move || {
                work(&shared, &queue, &events);
                drop(shared);
                lock(&queue.jobs).threads -= 1;
                queue.ended.notify_one();
            };
            let thread = std::thread::Builder::new().name(format!("task{at}"));
            thread
                .spawn(work)
                .map_err(|source| Error::System { action: "start a thread for tasks", source })?;
        }
        let sender = events.clone();
        let runner =
            Self { shared, queue, events, waiting: HashMap::new(), fetching: HashMap::new() };
        Ok((runner, sender, happened))
    }

    /// The worker's objects.
    pub(super) fn store(&self) -> &Store {
        &self.shared.store
    }

    /// Carries out the scheduler's orders.
    pub(super) fn execute(&mut self, orders: Vec<Order>) {
        for order in orders {
            match order {
                Order::Run { task, outputs, function, arguments, inputs } => {
                    self.take(task, outputs, function, arguments, inputs);
                }
                Order::Retract { task, unwanted } => self.give_back(task, unwanted),
                Order::Fetch { object, source: Source::Peer { member, bytes } } => {
                    if !self.shared.store.contains(object) {
                        self.fetch(object, member, bytes, None);
                    }
                }
                Order::Fetch { .. } => {}
                Order::Free { object } => self.shared.store.remove(object),
            }
        }
    }

    fn take(
        &mut self,
        task: ObjectId,
        outputs: u32,
        function: String,
        arguments: Vec<u8>,
        sources: Vec<(ObjectId, Source)>,
    ) {
        let mut inputs = Vec::with_capacity(sources.len());
        let mut missing = 0;
        for (object, source) in sources {
            let bytes = match source {
                Source::Inline(bytes) => Some(bytes),
                Source::Here | Source::Peer { .. } if self.shared.store.contains(object) => None,
                Source::Peer { member, bytes } => {
                    self.fetch(object, member, bytes, Some(task));
                    missing += 1;
                    None
                }
                Source::Here => match self.fetching.get_mut(&object) {
                    Some(fetch) => {
                        fetch.waiters.push(task);
                        missing += 1;
                        None
                    }
                    None => {
                        let source = self.shared.me.clone();
                        self.forget_waits(task);
                        let missing = true;
                        return self.report(Report::Unreachable { task, object, source, missing });
                    }
                },
            };
            inputs.push((object, bytes));
        }
        let job = Job { task, outputs, function, arguments, inputs, fetched_bytes: 0 };
        if missing == 0 {
            self.enqueue(job);
        } else {
            self.waiting.insert(task, (job, missing));
        }
    }

    /// Ends the threads and removes all objects, so that what they have of the device is freed.
    /// Waits for running tasks no longer than this; those threads end with the process.
    pub(super) fn stop(&self, within: Duration) {
        let mut jobs = lock(&self.queue.jobs);
        jobs.closed = true;
        self.queue.filled.notify_all();
        let deadline = Instant::now() + within;
        while jobs.threads > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let waited = self.queue.ended.wait_timeout(jobs, left);
            jobs = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(jobs);
        self.shared.store.clear();
    }

    /// What runs, and what is fetched; those that take longest first.
    pub(super) fn at_work(&self) -> AtWork {
        let millis =
            |since: Instant| u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX);
        let jobs = lock(&self.queue.jobs);
        let running = jobs.running.iter().map(|(task, running)| RunningTask {
            task: *task,
            function: running.function.clone(),
            thread: running.thread,
            millis: millis(running.since),
        });
        let mut running: Vec<RunningTask> = running.collect();
        drop(jobs);
        let fetching = self.fetching.iter().map(|(object, fetch)| Fetching {
            object: *object,
            source: fetch.source.name.clone(),
            millis: millis(fetch.since),
            tasks: fetch.waiters.len() as u64,
        });
        let mut fetching: Vec<Fetching> = fetching.collect();
        running.sort_by_key(|one| std::cmp::Reverse(one.millis));
        fetching.sort_by_key(|one| std::cmp::Reverse(one.millis));
        running.truncate(TOLD);
        fetching.truncate(TOLD);
        AtWork { running, fetching }
    }

    fn enqueue(&self, job: Job) {
        lock(&self.queue.jobs).waiting.push_back(job);
        self.queue.filled.notify_one();
    }

    fn report(&self, report: Report) {
        // The event loop is gone only when the process ends.
        let _ = self.events.send(WorkerEvent::Report(report));
    }

    fn forget_waits(&mut self, task: ObjectId) {
        for fetch in self.fetching.values_mut() {
            fetch.waiters.retain(|waiter| *waiter != task);
        }
    }

    /// Returns a task that has not begun. The function of a running one is told that it is
    /// `unwanted`.
    fn give_back(&mut self, task: ObjectId, unwanted: bool) {
        let waited = self.waiting.remove(&task).is_some();
        if waited {
            self.forget_waits(task);
        }
        let queued = !waited && {
            let mut jobs = lock(&self.queue.jobs);
            if let (true, Some(running)) = (unwanted, jobs.running.get(&task)) {
                running.cancelled.store(true, Ordering::Relaxed);
            }
            let at = jobs.waiting.iter().position(|job| job.task == task);
            at.and_then(|at| jobs.waiting.remove(at)).is_some()
        };
        if waited || queued {
            self.report(Report::Returned { task });
        }
    }

    fn fetch(&mut self, object: ObjectId, source: Member, bytes: u64, waiter: Option<ObjectId>) {
        if let Some(fetch) = self.fetching.get_mut(&object) {
            fetch.waiters.extend(waiter);
            return;
        }
        let waiters = waiter.into_iter().collect();
        let fetch = Fetch { source: source.clone(), since: Instant::now(), waiters };
        self.fetching.insert(object, fetch);
        let (shared, events) = (Arc::clone(&self.shared), self.events.clone());
        tokio::spawn(async move {
            let fetched = fetch::fetch(&shared, object, source, bytes).await;
            let _ = events.send(WorkerEvent::Fetched(fetched));
        });
    }

    /// Handles the end of a fetch: continues what waited for it. Returns reports for the scheduler.
    pub(super) fn fetched(&mut self, fetched: Fetched) -> Vec<Report> {
        let Fetched { object, source, result } = fetched;
        let Some(Fetch { waiters, .. }) = self.fetching.remove(&object) else { return Vec::new() };
        match result {
            Ok(Came { bytes, took }) => {
                let mut came = bytes;
                for task in waiters {
                    let Some((job, missing)) = self.waiting.get_mut(&task) else { continue };
                    job.fetched_bytes += std::mem::take(&mut came);
                    *missing -= 1;
                    if *missing == 0
                        && let Some((job, _)) = self.waiting.remove(&task)
                    {
                        self.enqueue(job);
                    }
                }
                vec![Report::Fetched { object, source, bytes, micros: took.map(micros) }]
            }
            Err(error) => {
                // If this GPU's fault was the cause, the process ends.
                self.shared.store.device().inspect(|device| device.look_for_fault());
                let failed = waiters.into_iter().filter(|task| self.waiting.contains_key(task));
                let failed: Vec<ObjectId> = failed.collect();
                // Nobody may wait for it: as another copy, or after its task was retracted.
                let mut reports = vec![Report::NotFetched { object }];
                for task in failed {
                    if self.waiting.remove(&task).is_none() {
                        continue;
                    }
                    self.forget_waits(task);
                    reports.push(match error.here(task, &self.shared.me.name) {
                        Some(error) => Report::Failed { task, error, ran: began_now(0) },
                        None => {
                            let (source, missing) = (source.clone(), error.is_missing());
                            Report::Unreachable { task, object, source, missing }
                        }
                    });
                }
                reports
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

thread_local! {
    /// The task that this thread runs, and its function.
    static RUNNING: RefCell<Option<(ObjectId, String)>> = const { RefCell::new(None) };
}

/// The task that the calling thread runs, with its function, if any.
pub(super) fn running_here() -> Option<String> {
    RUNNING.with_borrow(|running| {
        running.as_ref().map(|(task, function)| format!("task {task} ({function})"))
    })
}

/// The main loop of each thread.
fn work(shared: &WorkerContext, queue: &Queue, events: &mpsc::UnboundedSender<WorkerEvent>) {
    if let Some(Err(error)) = shared.store.device().map(|device| device.make_current()) {
        tracing::error!(%error, "a thread for tasks cannot use the device");
    }
    let thread = u32::try_from(gettid().as_raw()).unwrap_or(0);
    loop {
        let mut jobs = lock(&queue.jobs);
        let job = loop {
            if jobs.closed {
                return;
            }
            match jobs.waiting.pop_front() {
                Some(job) => break job,
                None => jobs = queue.filled.wait(jobs).unwrap_or_else(PoisonError::into_inner),
            }
        };
        let cancelled = Arc::new(AtomicBool::new(false));
        let running = Running {
            cancelled: Arc::clone(&cancelled),
            function: job.function.clone(),
            thread,
            since: Instant::now(),
        };
        jobs.running.insert(job.task, running);
        drop(jobs);
        RUNNING.set(Some((job.task, job.function.clone())));
        let report = call::run(shared, &job, &cancelled);
        lock(&queue.jobs).running.remove(&job.task);
        // A failed task may have met a fault in a library of its own.
        if let (Report::Failed { .. }, Some(device)) = (&report, shared.store.device()) {
            device.look_for_fault();
        }
        RUNNING.take();
        // The process ends, and the task with it: that counts as a death that the task caused.
        while shared.store.device().is_some_and(|device| device.fault().is_some()) {
            std::thread::park();
        }
        if events.send(WorkerEvent::Report(report)).is_err() {
            return;
        }
    }
}
