//! A client of a native cluster's tasks: submits, waits, gathers.
//!
//! Does not start clusters. Its own threads carry the messages, so that the callers only wait when
//! they ask for something that is not there yet.
//!
//! *Invariant:* an object is released when its last [`Remote`] is dropped, and everything when the
//! client is.

mod bulk;
mod error;
mod session;
mod socket;

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

pub use self::error::ClientError;
use self::session::{Session, Status};
use crate::wire::tasks::{
    Counters, INLINE_LIMIT, ObjectId, Overview, Product, Request, TaskError, TaskSpec, Wishes,
};
use crate::wire::value::{self, ValueError};

/// Further tries to give an object to a worker that may have died.
const PUT_TRIES: u32 = 20;

/// Time between two of them.
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

    /// A task to be; see [`Task`].
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

    /// Has one function compute one object.
    ///
    /// # Errors
    /// If the arguments cannot be sent, or the scheduler is gone. What the function does is told by
    /// the [`Remote`].
    pub fn submit(
        &self,
        function: &str,
        arguments: &impl Serialize,
        inputs: &[&Remote],
    ) -> Result<Remote, ClientError> {
        self.task(function).arguments(arguments).inputs(inputs).submit()
    }

    /// Has one function compute one object for each of the arguments.
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

    /// Gives the cluster an object.
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
                // Its worker has died over it; the next try is another object, at another worker.
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

    /// The bytes of all of these, in order.
    ///
    /// # Errors
    /// The first that is not to be had.
    pub fn gather(&self, remotes: &[Remote]) -> Result<Vec<Vec<u8>>, ClientError> {
        remotes.iter().map(Remote::bytes).collect()
    }

    /// Waits for all of these.
    ///
    /// # Errors
    /// The first that is not to be had.
    pub fn wait(&self, remotes: &[Remote]) -> Result<(), ClientError> {
        remotes.iter().try_for_each(|remote| remote.wait().map(drop))
    }

    /// These, as they are computed or fail.
    pub fn as_completed(&self, remotes: Vec<Remote>) -> AsCompleted {
        let stream = self.session.watch(remotes.iter().map(Remote::id));
        let mut waiting: HashMap<ObjectId, Vec<Remote>> = HashMap::with_capacity(remotes.len());
        for remote in remotes {
            waiting.entry(remote.id()).or_default().push(remote);
        }
        AsCompleted { session: Arc::clone(&self.session), stream, waiting, came: Vec::new() }
    }

    /// Another client's object.
    ///
    /// # Errors
    /// If the scheduler is gone. An object that does not exist is told by the [`Remote`].
    pub fn hold(&self, object: ObjectId) -> Result<Remote, ClientError> {
        self.session.hold(object);
        self.session.ask(Request::Hold { object })?;
        Ok(self.remote(object))
    }

    /// Why a task does not run, or why it ran where it did.
    ///
    /// # Errors
    /// If the scheduler is gone.
    pub fn explain(&self, task: ObjectId) -> Result<String, ClientError> {
        self.session.explain(task)
    }

    /// The scheduler's numbers, with the measured way between each two workers.
    ///
    /// # Errors
    /// If the scheduler is gone.
    pub fn overview(&self) -> Result<Overview, ClientError> {
        self.session.overview()
    }

    /// Begins the count of transfers anew; what has been learned from them stays.
    ///
    /// # Errors
    /// If the scheduler is gone.
    pub fn count_anew(&self) -> Result<(), ClientError> {
        self.session.ask(Request::CountAnew)
    }

    /// What a worker's memory has done.
    ///
    /// # Errors
    /// If there is no such worker.
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
    /// What the function is told.
    pub fn arguments(mut self, arguments: &impl Serialize) -> Self {
        self.arguments = value::encode(arguments);
        self
    }

    /// The objects that it needs, after those given before.
    pub fn inputs<'r>(mut self, inputs: impl IntoIterator<Item = &'r &'r Remote>) -> Self {
        self.inputs.extend(inputs.into_iter().map(|remote| remote.id()));
        self
    }

    /// How many objects it computes; one, unless said otherwise.
    pub fn outputs(mut self, outputs: u32) -> Self {
        self.outputs = outputs;
        self
    }

    /// Higher goes first.
    pub fn priority(mut self, priority: i32) -> Self {
        self.wishes.priority = priority;
        self
    }

    /// How often it is tried again after an error of its own.
    pub fn retries(mut self, retries: u16) -> Self {
        self.wishes.retries = retries;
        self
    }

    /// The one worker that may run it.
    pub fn on(mut self, worker: &str) -> Self {
        self.wishes.on = Some(worker.to_owned());
        self
    }

    /// What it takes of its worker's resources (`GPU`: 1 each) while it runs.
    pub fn resource(mut self, name: &str, amount: u64) -> Self {
        self.wishes.resources.insert(name.to_owned(), amount);
        self
    }

    /// Has it computed; the first output.
    ///
    /// # Errors
    /// If the arguments cannot be sent, or the scheduler is gone.
    pub fn submit(self) -> Result<Remote, ClientError> {
        let mut outputs = self.submit_all()?;
        // There is at least one: `submit_all` asks for it.
        Ok(outputs.swap_remove(0))
    }

    /// Has it computed; all outputs.
    ///
    /// # Errors
    /// If the arguments cannot be sent, or the scheduler is gone.
    pub fn submit_all(self) -> Result<Vec<Remote>, ClientError> {
        let limit = crate::wire::tasks::ARGUMENTS_LIMIT;
        let arguments = self.arguments?;
        if arguments.len() > limit {
            return Err(ClientError::Arguments { bytes: arguments.len(), limit });
        }
        let outputs = self.outputs.max(1);
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

/// An object in the cluster, or on its way there. Dropping it releases the object.
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
    /// Its name, for [`Client::hold`] and [`Client::explain`].
    pub fn id(&self) -> ObjectId {
        self.object
    }

    /// Waits until it is there; its size in bytes.
    ///
    /// # Errors
    /// Why it will never be there.
    pub fn wait(&self) -> Result<u64, ClientError> {
        match self.session.wait(self.object)? {
            Status::Available(product) => Ok(product.bytes()),
            Status::Failed(error) => Err(error.into()),
            Status::Pending => Err(ClientError::Gone),
        }
    }

    /// Waits for it and brings its bytes here.
    ///
    /// # Errors
    /// Why it will never be there.
    pub fn bytes(&self) -> Result<Vec<u8>, ClientError> {
        match self.session.wait(self.object)? {
            Status::Available(Product::Inline(bytes)) => Ok(bytes),
            Status::Available(Product::Stored(_)) => bulk::fetch(&self.session, self.object),
            Status::Failed(error) => Err(error.into()),
            Status::Pending => Err(ClientError::Gone),
        }
    }

    /// Waits for it and reads it as a value.
    ///
    /// # Errors
    /// Why it will never be there, or that it is something else.
    pub fn value<T: DeserializeOwned>(&self) -> Result<T, ClientError> {
        Ok(value::decode(&self.bytes()?)?)
    }

    /// Lets its task, and what depends on it, not run after all.
    ///
    /// # Errors
    /// If the scheduler is gone.
    pub fn cancel(&self) -> Result<(), ClientError> {
        self.session.ask(Request::Cancel { tasks: vec![self.object] })
    }

    /// Lets this many workers have a copy.
    ///
    /// # Errors
    /// If the scheduler is gone.
    pub fn replicate(&self, copies: u32) -> Result<(), ClientError> {
        self.session.ask(Request::Replicate { object: self.object, copies })
    }

    /// The workers that have it now.
    ///
    /// # Errors
    /// Why it will never be there.
    pub fn places(&self) -> Result<Vec<String>, ClientError> {
        self.wait()?;
        self.session.locate(self.object)
    }
}

/// Objects in the order in which they come; see [`Client::as_completed`].
#[derive(Debug)]
pub struct AsCompleted {
    session: Arc<Session>,
    stream: u64,
    /// More than one if the same was given more than once.
    waiting: HashMap<ObjectId, Vec<Remote>>,
    came: Vec<Remote>,
}

impl Iterator for AsCompleted {
    type Item = Remote;

    /// Waits for the next one; `None` after the last, or when the scheduler is gone.
    fn next(&mut self) -> Option<Remote> {
        while self.came.is_empty() && !self.waiting.is_empty() {
            let object = self.session.next_of(self.stream)?;
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
