//! The connection to the scheduler: held objects, received messages, and the threads for both
//! directions.

use std::collections::VecDeque;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustc_hash::{FxHashMap, FxHashSet};
use tokio::io::BufReader;
use tokio::sync::Notify;

use super::ClientError;
use super::socket::{LOOK, PATIENCE, Ready, connect, finish, silent};
use cuda_cluster_machine::os::run_directory::Paths;
use cuda_cluster_model::ids::SCHEDULER;
use cuda_cluster_native::connection;
use cuda_cluster_wire::frame::FRAME_LIMIT;
use cuda_cluster_wire::greeting::Role;
use cuda_cluster_wire::native::{FromClient, ToClient};
use cuda_cluster_wire::secret::Secret;
use cuda_cluster_wire::tasks::{
    BATCH_BYTES, News, ObjectId, Overview, Product, Queues, Recent, Request, TaskError,
};

/// Maximum number of queued requests; further callers block.
const WAITING: usize = 1 << 16;

/// What is known about an object.
#[derive(Clone, Debug)]
pub(super) enum Status {
    Pending,
    Available(Product),
    Failed(TaskError),
}

impl Status {
    /// The object's size in bytes.
    pub(super) fn size(self) -> Result<u64, ClientError> {
        match self {
            Status::Available(product) => Ok(product.bytes()),
            Status::Failed(error) => Err(error.into()),
            Status::Pending => Err(ClientError::Gone),
        }
    }
}

#[derive(Default)]
struct State {
    client: u32,
    gone: bool,
    closing: bool,
    /// Objects held, how often, and what is known about them.
    objects: FxHashMap<ObjectId, (u32, Status)>,
    outgoing: Vec<Request>,
    released: Vec<ObjectId>,
    locations: FxHashMap<ObjectId, Vec<String>>,
    explanations: FxHashMap<ObjectId, String>,
    overview: Option<Overview>,
    queues: Option<Queues>,
    recent: Option<Recent>,
    streams: FxHashMap<u64, (FxHashSet<ObjectId>, VecDeque<ObjectId>)>,
    /// When the last message was received.
    last_news: Option<Instant>,
}

/// The connection to the scheduler, shared by a client and its objects. Two threads carry its
/// messages; they end when it is dropped.
pub(super) struct Session {
    pub(super) paths: Paths,
    pub(super) secret: Secret,
    shared: Arc<Shared>,
    next: AtomicU64,
    next_stream: AtomicU64,
    /// Whether the kernel may let this process read workers' memory, and them this process's.
    reads_memory: AtomicBool,
    stream: UnixStream,
}

/// State shared by callers and the two threads.
#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// Signals a received message, or the end of the connection.
    news: Condvar,
    /// The same, for callers on an event loop.
    changed: Notify,
    /// Signals queued requests, or room for more.
    sending: Condvar,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").finish_non_exhaustive()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn heard(&self, news: Vec<News>) {
        let mut state = self.lock();
        state.last_news = Some(Instant::now());
        for one in news {
            state.note(one);
        }
        drop(state);
        self.tell();
    }

    fn end(&self) {
        self.lock().gone = true;
        self.tell();
        self.sending.notify_all();
    }

    fn tell(&self) {
        self.news.notify_all();
        self.changed.notify_waiters();
    }
}

impl Session {
    pub(super) fn open(run_directory: &Path) -> Result<Arc<Self>, ClientError> {
        let paths = Paths::at(run_directory);
        let secret = paths.read_secret()?;
        let path = paths.socket(SCHEDULER);
        let socket = |source| ClientError::Socket { path: path.clone(), source };
        let Ready(patient) = connect(&paths, SCHEDULER, &secret, Role::Client)?;
        let stream = patient.into_stream().map_err(socket)?;
        let session = Arc::new(Self {
            paths: paths.clone(),
            secret,
            shared: Arc::default(),
            next: AtomicU64::new(0),
            next_stream: AtomicU64::new(0),
            reads_memory: AtomicBool::new(true),
            stream: stream.try_clone().map_err(socket)?,
        });
        for (name, run) in [("client-in", listen as fn(_, &_)), ("client-out", speak)] {
            let stream = stream.try_clone().map_err(socket)?;
            let shared = Arc::clone(&session.shared);
            std::thread::Builder::new()
                .name(name.to_owned())
                .spawn(move || run(stream, &shared))
                .map_err(|source| ClientError::System { action: "start a thread", source })?;
        }
        session.until(|state| (state.client != 0).then_some(()))?;
        Ok(session)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.lock()
    }

    /// The first of this many new ids.
    pub(super) fn names(&self, count: u32) -> ObjectId {
        let number = self.next.fetch_add(u64::from(count), Ordering::Relaxed);
        ObjectId::new(self.lock().client, number)
    }

    pub(super) fn hold(&self, object: ObjectId) {
        self.lock().objects.entry(object).or_insert((0, Status::Pending)).0 += 1;
    }

    pub(super) fn release(&self, object: ObjectId) {
        let mut state = self.lock();
        if let Some((holds, _)) = state.objects.get_mut(&object) {
            *holds -= 1;
            if *holds == 0 {
                state.objects.remove(&object);
            }
            state.released.push(object);
            if state.released.len() == 1 {
                self.shared.sending.notify_all();
            }
        }
    }

    pub(super) fn ask(&self, request: Request) -> Result<(), ClientError> {
        let mut state = self.lock();
        while state.outgoing.len() >= WAITING && !state.gone {
            state = self.shared.sending.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.gone {
            return Err(ClientError::Gone);
        }
        state.outgoing.push(request);
        if state.outgoing.len() == 1 {
            self.shared.sending.notify_all();
        }
        Ok(())
    }

    /// Waits until `found` returns a value, or no messages arrive because a process of the cluster
    /// does not answer.
    fn until<T>(&self, found: impl FnMut(&mut State) -> Option<T>) -> Result<T, ClientError> {
        self.until_within(None, found)
    }

    /// Like [`Self::until`], with a time limit.
    fn until_within<T>(
        &self,
        limit: Option<Duration>,
        mut found: impl FnMut(&mut State) -> Option<T>,
    ) -> Result<T, ClientError> {
        let began = Instant::now();
        let mut state = self.lock();
        loop {
            if let Some(found) = found(&mut state) {
                return Ok(found);
            }
            if state.gone {
                return Err(ClientError::Gone);
            }
            let mut look = state.next_look(began);
            if let Some(limit) = limit {
                let left = limit.saturating_sub(began.elapsed());
                if left.is_zero() {
                    return Err(ClientError::TimedOut { within: limit });
                }
                look = look.min(left);
            }
            let waited = self.shared.news.wait_timeout(state, look);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            if state.quiet_since(began) >= PATIENCE {
                drop(state);
                if let Some(error) = silent(&self.paths, None) {
                    return Err(error);
                }
                state = self.lock();
            }
        }
    }

    /// Like [`Self::until`], for a caller on an event loop.
    async fn until_async<T>(
        &self,
        mut found: impl FnMut(&mut State) -> Option<T>,
    ) -> Result<T, ClientError> {
        let began = Instant::now();
        loop {
            let mut changed = pin!(self.shared.changed.notified());
            // Registered before the look: no message is missed in between.
            changed.as_mut().enable();
            let look = {
                let mut state = self.lock();
                if let Some(found) = found(&mut state) {
                    return Ok(found);
                }
                if state.gone {
                    return Err(ClientError::Gone);
                }
                state.next_look(began)
            };
            let _ = tokio::time::timeout(look, changed).await;
            if self.lock().quiet_since(began) >= PATIENCE {
                let paths = self.paths.clone();
                let asked = tokio::task::spawn_blocking(move || silent(&paths, None)).await;
                // A runtime that is shutting down drops this future, too.
                if let Ok(Some(error)) = asked {
                    return Err(error);
                }
            }
        }
    }

    pub(super) fn wait(
        &self,
        object: ObjectId,
        limit: Option<Duration>,
    ) -> Result<Status, ClientError> {
        self.until_within(limit, |state| state.settled(object))
    }

    pub(super) async fn wait_async(&self, object: ObjectId) -> Result<Status, ClientError> {
        self.until_async(|state| state.settled(object)).await
    }

    /// The workers that have an object; waits until there is one.
    pub(super) fn locate(&self, object: ObjectId) -> Result<Vec<String>, ClientError> {
        self.lock().locations.remove(&object);
        self.ask(Request::Locate { object })?;
        self.wait_locations(object)
    }

    fn wait_locations(&self, object: ObjectId) -> Result<Vec<String>, ClientError> {
        let found = self.until(|state| match state.objects.get(&object) {
            Some((_, Status::Failed(error))) => Some(Err(error.clone())),
            // The scheduler keeps it; no worker has it.
            Some((_, Status::Available(Product::Inline(_)))) => Some(Ok(Vec::new())),
            _ => state.locations.remove(&object).map(Ok),
        })?;
        Ok(found?)
    }

    /// The worker to which an object should be sent.
    pub(super) fn wait_place(&self, object: ObjectId) -> Result<String, ClientError> {
        self.wait_locations(object)?.pop().ok_or(ClientError::Gone)
    }

    pub(super) fn explain(&self, task: ObjectId) -> Result<String, ClientError> {
        self.ask(Request::Explain { task })?;
        self.until(|state| state.explanations.remove(&task))
    }

    pub(super) fn overview(&self) -> Result<Overview, ClientError> {
        self.lock().overview = None;
        self.ask(Request::Overview)?;
        self.until(|state| state.overview.take())
    }

    pub(super) fn queues(&self) -> Result<Queues, ClientError> {
        self.lock().queues = None;
        self.ask(Request::Queues)?;
        self.until(|state| state.queues.take())
    }

    pub(super) fn recent(&self, after: u64) -> Result<Recent, ClientError> {
        self.lock().recent = None;
        self.ask(Request::Recent { after })?;
        self.until(|state| state.recent.take())
    }

    /// Starts to record which of these objects complete.
    pub(super) fn watch(&self, objects: impl Iterator<Item = ObjectId>) -> u64 {
        let stream = self.next_stream.fetch_add(1, Ordering::Relaxed);
        let mut state = self.lock();
        let pending = |object: &ObjectId| {
            matches!(state.objects.get(object), None | Some((_, Status::Pending)))
        };
        let (waiting, ready): (Vec<ObjectId>, Vec<ObjectId>) = objects.partition(pending);
        state.streams.insert(stream, (waiting.into_iter().collect(), ready.into()));
        stream
    }

    /// Waits for the next of these objects that completes, or for [`Self::unwatch`].
    pub(super) fn next_of(&self, stream: u64) -> Result<ObjectId, ClientError> {
        let next = self.until(|state| match state.streams.get_mut(&stream) {
            Some((_, ready)) => ready.pop_front().map(Some),
            None => Some(None),
        })?;
        next.ok_or(ClientError::Gone)
    }

    /// As [`Self::next_of`], without waiting.
    pub(super) fn ready_of(&self, stream: u64) -> Option<ObjectId> {
        self.lock().streams.get_mut(&stream)?.1.pop_front()
    }

    pub(super) fn reads_memory(&self) -> bool {
        self.reads_memory.load(Ordering::Relaxed)
    }

    pub(super) fn stop_reading_memory(&self) {
        self.reads_memory.store(false, Ordering::Relaxed);
    }

    pub(super) async fn next_of_async(&self, stream: u64) -> Option<ObjectId> {
        self.until_async(|state| state.streams.get_mut(&stream)?.1.pop_front()).await.ok()
    }

    pub(super) fn unwatch(&self, stream: u64) {
        self.lock().streams.remove(&stream);
        self.shared.news.notify_all();
    }
}

impl State {
    /// Time since the last message, or since a wait began.
    fn quiet_since(&self, began: Instant) -> Duration {
        self.last_news.unwrap_or(began).max(began).elapsed()
    }

    /// How long to wait before asking which processes do not answer.
    fn next_look(&self, began: Instant) -> Duration {
        PATIENCE.saturating_sub(self.quiet_since(began)).max(LOOK)
    }

    /// What is known about an object, unless it is still computed.
    fn settled(&self, object: ObjectId) -> Option<Status> {
        match self.objects.get(&object) {
            None | Some((_, Status::Pending)) => None,
            Some((_, status)) => Some(status.clone()),
        }
    }

    fn note(&mut self, news: News) {
        match news {
            News::Hello { client } => self.client = client,
            News::Available { object, product } => self.came(object, Status::Available(product)),
            News::Failed { object, error } => self.came(object, Status::Failed(error)),
            News::At { object, workers } => {
                self.locations.insert(object, workers);
            }
            News::PutAt { object, worker } => {
                self.locations.insert(object, vec![worker]);
            }
            News::Because { task, why } => {
                self.explanations.insert(task, why);
            }
            News::Overview(overview) => self.overview = Some(overview),
            News::Queues(queues) => self.queues = Some(queues),
            News::Recent(recent) => self.recent = Some(recent),
        }
    }

    fn came(&mut self, object: ObjectId, status: Status) {
        if let Some((_, known)) = self.objects.get_mut(&object) {
            *known = status;
        }
        for (waiting, ready) in self.streams.values_mut() {
            if waiting.remove(&object) {
                ready.push_back(object);
            }
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // One thread waits for the socket, the other for requests to send.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        self.lock().closing = true;
        self.shared.sending.notify_all();
    }
}

/// Receives the scheduler's messages until it is gone.
fn listen(stream: UnixStream, shared: &Shared) {
    let mut reader = BufReader::with_capacity(1 << 20, Ready(stream));
    loop {
        match finish(connection::receive(&mut reader, FRAME_LIMIT)) {
            Ok(ToClient::News(news)) => shared.heard(news),
            Ok(_) => {}
            Err(_) => return shared.end(),
        }
    }
}

/// Sends queued requests, as many at a time as there are.
fn speak(stream: UnixStream, shared: &Shared) {
    let mut writer = Ready(stream);
    loop {
        let mut state = shared.lock();
        while state.outgoing.is_empty() && state.released.is_empty() {
            if state.gone || state.closing {
                return;
            }
            state = shared.sending.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let mut requests = std::mem::take(&mut state.outgoing);
        let released = std::mem::take(&mut state.released);
        drop(state);
        shared.sending.notify_all();
        // Release objects after the requests that may still need them.
        requests.extend(
            released.chunks(1 << 14).map(|part| Request::Release { objects: part.to_vec() }),
        );
        for batch in batches(requests) {
            if finish(connection::send(&mut writer, &FromClient::Ask(batch))).is_err() {
                return;
            }
        }
    }
}

/// Groups requests into frames of a suitable size.
fn batches(requests: Vec<Request>) -> Vec<Vec<Request>> {
    let mut all = Vec::new();
    let (mut batch, mut bytes) = (Vec::new(), 0);
    for request in requests {
        bytes += match &request {
            Request::Submit(task) => 64 + task.arguments.len() + 10 * task.inputs.len(),
            Request::Release { objects } => 10 * objects.len(),
            Request::Put { product: Product::Inline(inline), .. } => 32 + inline.len(),
            _ => 32,
        };
        batch.push(request);
        if bytes >= BATCH_BYTES {
            all.push(std::mem::take(&mut batch));
            bytes = 0;
        }
    }
    if !batch.is_empty() {
        all.push(batch);
    }
    all
}
