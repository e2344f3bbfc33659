//! A client of a native cluster's tasks: submits, waits, gathers.
//!
//! Does not start clusters. Its own threads carry the messages, so callers block only when they
//! request a result that is not available yet. What blocks has a counterpart for callers on an
//! event loop: `wait` and `wait_async`.
//!
//! *Invariant:* an object is released when its last [`Remote`] is dropped, and all objects when the
//! client is.

mod asynchronous;
mod bulk;
mod error;
mod gather;
mod session;
mod socket;

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

pub use self::error::ClientError;
use self::session::{Session, Status};
use cuda_cluster_wire::numbers::{self, Number};
use cuda_cluster_wire::tasks::{
    AtWork, Counters, INLINE_LIMIT, ObjectId, Overview, Product, Queues, Recent, Request,
    TaskError, TaskSpec, Wishes,
};
use cuda_cluster_wire::value::{self, ValueError};

/// Number of further attempts to send an object to a worker that may have died.
const PUT_TRIES: u32 = 20;

/// Time between two attempts.
const PUT_PAUSE: Duration = Duration::from_millis(250);

/// A connection to a cluster's scheduler. Clones share it.
#[derive(Clone)]
pub struct Client {
    session: Arc<Session>,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").finish_non_exhaustive()
    }
}

impl Client {
    /// Connects to the cluster with this run directory.
    ///
    /// # Errors
    /// If there is no scheduler, or it does not know the directory's secret.
    pub fn connect(run_directory: &Path) -> Result<Self, ClientError> {
        Ok(Self { session: Session::open(run_directory)? })
    }

    /// Builds a task; see [`Task`].
    pub fn task<'a>(&'a self, function: &str) -> Task<'a> {
        Task {
            client: self,
            function: function.to_owned(),
            arguments: Ok(Vec::new()),
            inputs: Vec::new(),
            outputs: 1,
            wishes: Wishes::default(),
        }
    }

    /// Submits a function that computes one object. Does not wait for it.
    ///
    /// # Errors
    /// If the arguments can't be sent, or the scheduler is gone. The [`Remote`] reports errors of
    /// the function.
    pub fn submit(
        &self,
        function: &str,
        arguments: &impl Serialize,
        inputs: &[&Remote],
    ) -> Result<Remote, ClientError> {
        self.task(function).arguments(arguments).inputs(inputs).submit()
    }

    /// Submits a function for each of the arguments; each call computes one object.
    ///
    /// # Errors
    /// As [`Self::submit`].
    pub fn map<A: Serialize>(
        &self,
        function: &str,
        arguments: impl IntoIterator<Item = A>,
    ) -> Result<Vec<Remote>, ClientError> {
        arguments.into_iter().map(|one| self.submit(function, &one, &[])).collect()
    }

    /// Sends a value to the cluster, which [`Remote::value`] and [`Input::value`] read.
    ///
    /// [`Input::value`]: crate::Input::value
    ///
    /// # Errors
    /// If the value can't be encoded, or no worker can take it.
    pub fn put_value(&self, value: &impl Serialize) -> Result<Remote, ClientError> {
        self.put(&value::encode(value)?)
    }

    /// Sends numbers to the cluster, which [`Remote::numbers`] and [`Input::numbers`] read.
    ///
    /// [`Input::numbers`]: crate::Input::numbers
    ///
    /// # Errors
    /// If no worker can take them.
    pub fn put_numbers<N: Number>(&self, numbers: &[N]) -> Result<Remote, ClientError> {
        self.put(numbers::bytes(numbers))
    }

    /// Sends an object to the cluster.
    ///
    /// # Errors
    /// If no worker can take it.
    pub fn put(&self, bytes: &[u8]) -> Result<Remote, ClientError> {
        if bytes.len() <= INLINE_LIMIT {
            let object = self.session.names(1);
            let product = Product::Inline(bytes.to_vec());
            self.session.hold(object);
            self.session.ask(Request::Put { object, product, on: None })?;
            return Ok(self.remote(object));
        }
        let mut tries = 0;
        loop {
            match self.put_stored(bytes) {
                // Its worker has died; the next attempt uses a new object on another worker.
                Err(
                    ClientError::Socket { .. }
                    | ClientError::Stranger { .. }
                    | ClientError::Task(TaskError::Lost { .. }),
                ) if tries < PUT_TRIES => {
                    tries += 1;
                    std::thread::sleep(PUT_PAUSE);
                }
                result => return result,
            }
        }
    }

    fn put_stored(&self, bytes: &[u8]) -> Result<Remote, ClientError> {
        let object = self.session.names(1);
        self.session.hold(object);
        let remote = self.remote(object);
        let product = Product::Stored(bytes.len() as u64);
        self.session.ask(Request::Put { object, product, on: None })?;
        let worker = self.session.wait_place(object)?;
        bulk::put(&self.session, &worker, object, bytes)?;
        remote.wait()?;
        Ok(remote)
    }

    /// The bytes of all these objects, in order. Copies those that exist while others are computed.
    ///
    /// # Errors
    /// For an object that can't be provided.
    pub fn gather(&self, remotes: &[Remote]) -> Result<Vec<Vec<u8>>, ClientError> {
        gather::gather(&self.session, remotes)
    }

    /// Waits for all these objects.
    ///
    /// # Errors
    /// For the first object that can't be provided.
    pub fn wait(&self, remotes: &[Remote]) -> Result<(), ClientError> {
        remotes.iter().try_for_each(|remote| remote.wait().map(drop))
    }

    /// Waits for all these objects, no longer than `limit` altogether.
    ///
    /// # Errors
    /// For the first object that can't be provided, or with [`ClientError::TimedOut`].
    pub fn wait_within(&self, remotes: &[Remote], limit: Duration) -> Result<(), ClientError> {
        let began = Instant::now();
        let timed_out = |error| match error {
            ClientError::TimedOut { .. } => ClientError::TimedOut { within: limit },
            error => error,
        };
        let left = || limit.saturating_sub(began.elapsed());
        remotes.iter().try_for_each(|one| one.wait_within(left()).map(drop)).map_err(timed_out)
    }

    /// The objects in the order in which they are computed or fail.
    pub fn as_completed(&self, remotes: Vec<Remote>) -> AsCompleted {
        let stream = self.session.watch(remotes.iter().map(Remote::id));
        let mut waiting: HashMap<ObjectId, Vec<Remote>> = HashMap::with_capacity(remotes.len());
        for remote in remotes {
            waiting.entry(remote.id()).or_default().push(remote);
        }
        AsCompleted { session: Arc::clone(&self.session), stream, waiting, came: Vec::new() }
    }

    /// Holds an object of another client.
    ///
    /// # Errors
    /// If the scheduler is gone. The [`Remote`] reports whether the object exists.
    pub fn hold(&self, object: ObjectId) -> Result<Remote, ClientError> {
        self.session.hold(object);
        self.session.ask(Request::Hold { object })?;
        Ok(self.remote(object))
    }

    /// Explains why a task is not running, or why it ran where it did.
    ///
    /// # Errors
    /// If the scheduler is gone.
    pub fn explain(&self, task: ObjectId) -> Result<String, ClientError> {
        self.session.explain(task)
    }

    /// The scheduler's statistics, with measured bandwidths between each two workers.
    ///
    /// # Errors
    /// If the scheduler is gone.
    pub fn overview(&self) -> Result<Overview, ClientError> {
        self.session.overview()
    }

    /// What waits in the scheduler, and for what.
    pub(crate) fn queues(&self) -> Result<Queues, ClientError> {
        self.session.queues()
    }

    /// What a worker runs and fetches.
    pub(crate) fn at_work(&self, worker: &str) -> Result<AtWork, ClientError> {
        bulk::at_work(&self.session, worker)
    }

    /// The last tasks that ran, without those before [`Recent::next`] of an earlier answer; of very
    /// many a sample.
    ///
    /// # Errors
    /// If the scheduler is gone.
    pub fn recent(&self, after: u64) -> Result<Recent, ClientError> {
        self.session.recent(after)
    }

    /// Resets the counts of transfers, but keeps what was learned from them.
    ///
    /// # Errors
    /// If the scheduler is gone.
    pub fn count_anew(&self) -> Result<(), ClientError> {
        self.session.ask(Request::CountAnew)
    }

    /// Statistics of a worker's memory.
    ///
    /// # Errors
    /// If no such worker is running.
    pub fn counters(&self, worker: &str) -> Result<Counters, ClientError> {
        bulk::counters(&self.session, worker)
    }

    fn remote(&self, object: ObjectId) -> Remote {
        Remote { session: Arc::clone(&self.session), object }
    }
}

/// A task that has not been submitted yet.
#[must_use = "a task runs when it is submitted"]
pub struct Task<'a> {
    client: &'a Client,
    function: String,
    arguments: Result<Vec<u8>, ValueError>,
    inputs: Vec<ObjectId>,
    outputs: u32,
    wishes: Wishes,
}

impl Task<'_> {
    /// The function's arguments.
    pub fn arguments(mut self, arguments: &impl Serialize) -> Self {
        self.arguments = value::encode(arguments);
        self
    }

    /// The objects that it needs, after those given before.
    pub fn inputs<'r>(mut self, inputs: impl IntoIterator<Item = &'r &'r Remote>) -> Self {
        self.inputs.extend(inputs.into_iter().map(|remote| remote.id()));
        self
    }

    /// The number of objects that it computes, 1 to 4096; one by default.
    pub fn outputs(mut self, outputs: u32) -> Self {
        self.outputs = outputs;
        self
    }

    /// The priority; higher runs first.
    pub fn priority(mut self, priority: i32) -> Self {
        self.wishes.priority = priority;
        self
    }

    /// How often it is tried again after an error of its own.
    pub fn retries(mut self, retries: u16) -> Self {
        self.wishes.retries = retries;
        self
    }

    /// The only worker that may run it.
    pub fn on(mut self, worker: &str) -> Self {
        self.wishes.on = Some(worker.to_owned());
        self
    }

    /// The resources of its worker that it uses while it runs (`GPU`: 1 each).
    pub fn resource(mut self, name: &str, amount: u64) -> Self {
        self.wishes.resources.insert(name.to_owned(), amount);
        self
    }

    /// Submits it, and returns its first output.
    ///
    /// # Errors
    /// If the arguments can't be sent (they have at most 64 KiB), the number of outputs is not one
    /// that a task has, or the scheduler is gone.
    pub fn submit(self) -> Result<Remote, ClientError> {
        let mut outputs = self.submit_all()?;
        // There is at least one output: `submit_all` requests it.
        Ok(outputs.swap_remove(0))
    }

    /// Submits it, and returns all outputs.
    ///
    /// # Errors
    /// As [`Task::submit`].
    pub fn submit_all(self) -> Result<Vec<Remote>, ClientError> {
        let limit = cuda_cluster_wire::tasks::ARGUMENTS_LIMIT;
        let arguments = self.arguments?;
        if arguments.len() > limit {
            return Err(ClientError::Arguments { bytes: arguments.len(), limit });
        }
        let outputs = self.outputs;
        let most = u32::try_from(cuda_cluster_wire::tasks::ARITY_LIMIT).unwrap_or(u32::MAX);
        if !(1..=most).contains(&outputs) {
            return Err(ClientError::Outputs { outputs, limit: most });
        }
        let id = self.client.session.names(outputs);
        let remotes: Vec<Remote> = (0..outputs)
            .map(|at| {
                self.client.session.hold(id.plus(at));
                self.client.remote(id.plus(at))
            })
            .collect();
        self.client.session.ask(Request::Submit(TaskSpec {
            id,
            outputs,
            function: self.function,
            arguments,
            inputs: self.inputs,
            wishes: self.wishes,
        }))?;
        Ok(remotes)
    }
}

/// An object in the cluster, or one that is being computed. Dropping it releases the object.
pub struct Remote {
    session: Arc<Session>,
    object: ObjectId,
}

impl std::fmt::Debug for Remote {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Remote({})", self.object)
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.session.release(self.object);
    }
}

impl Remote {
    /// Its id, for [`Client::hold`] and [`Client::explain`].
    pub fn id(&self) -> ObjectId {
        self.object
    }

    /// Waits until the object exists, and returns its size in bytes.
    ///
    /// # Errors
    /// If it will never exist.
    pub fn wait(&self) -> Result<u64, ClientError> {
        self.session.wait(self.object, None)?.size()
    }

    /// Like [`Self::wait`], but no longer than `limit`. The task goes on; [`Self::cancel`] ends it.
    ///
    /// # Errors
    /// If it will never exist, or with [`ClientError::TimedOut`].
    pub fn wait_within(&self, limit: Duration) -> Result<u64, ClientError> {
        self.session.wait(self.object, Some(limit))?.size()
    }

    /// Waits for the object and returns its bytes.
    ///
    /// # Errors
    /// If it will never exist.
    pub fn bytes(&self) -> Result<Vec<u8>, ClientError> {
        match self.session.wait(self.object, None)? {
            Status::Available(Product::Inline(bytes)) => Ok(bytes),
            Status::Available(Product::Stored(_)) => {
                bulk::Fetcher::new(&self.session).fetch(self.object)
            }
            Status::Failed(error) => Err(error.into()),
            Status::Pending => Err(ClientError::Gone),
        }
    }

    /// Waits for the object and decodes it as a value.
    ///
    /// # Errors
    /// If it will never exist, or has another type.
    pub fn value<T: DeserializeOwned>(&self) -> Result<T, ClientError> {
        Ok(value::decode(&self.bytes()?)?)
    }

    /// Waits for the object and reads it as numbers.
    ///
    /// # Errors
    /// If it will never exist, or its length is not that of whole numbers.
    pub fn numbers<N: Number>(&self) -> Result<Vec<N>, ClientError> {
        Ok(numbers::read(&self.bytes()?)?.into_owned())
    }

    /// Cancels its task and all tasks that depend on it. A running function is not interrupted: it
    /// ends early if it asks [`Context::is_cancelled`], and its worker is free then.
    ///
    /// [`Context::is_cancelled`]: crate::Context::is_cancelled
    ///
    /// # Errors
    /// If the scheduler is gone.
    pub fn cancel(&self) -> Result<(), ClientError> {
        self.session.ask(Request::Cancel { tasks: vec![self.object] })
    }

    /// Makes copies of the object on this many workers, or on all if there are fewer. A small one
    /// lies with the scheduler, and needs no copies.
    ///
    /// # Errors
    /// If the scheduler is gone.
    pub fn replicate(&self, copies: u32) -> Result<(), ClientError> {
        self.session.ask(Request::Replicate { object: self.object, copies })
    }

    /// The workers that currently have the object; none for a small one, which lies with the
    /// scheduler.
    ///
    /// # Errors
    /// If it will never exist.
    pub fn locations(&self) -> Result<Vec<String>, ClientError> {
        self.wait()?;
        self.session.locate(self.object)
    }
}

/// Objects in the order of their completion; see [`Client::as_completed`].
#[derive(Debug)]
pub struct AsCompleted {
    session: Arc<Session>,
    stream: u64,
    /// More than one if the same object was given more than once.
    waiting: HashMap<ObjectId, Vec<Remote>>,
    came: Vec<Remote>,
}

impl Iterator for AsCompleted {
    type Item = Remote;

    /// Waits for the next object; `None` after the last, or if the scheduler is gone.
    fn next(&mut self) -> Option<Remote> {
        while self.came.is_empty() && !self.waiting.is_empty() {
            let object = self.session.next_of(self.stream).ok()?;
            self.came = self.waiting.remove(&object).unwrap_or_default();
        }
        self.came.pop()
    }
}

impl Drop for AsCompleted {
    fn drop(&mut self) {
        self.session.unwatch(self.stream);
    }
}
