//! The conversation with the scheduler: what is held, what has come, and the threads that carry it.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::ClientError;
use super::patience::{LOOK, PATIENCE, Patient, explained, silent};
use crate::wire::native::{
    Answer, Challenge, FRAME_LIMIT, FrameError, GREETING_LIMIT, ToClient, ToScheduler, VERSION,
    Welcome, answer_proof, decode, encode, length, welcome_proof,
};
use crate::wire::secret::Secret;
use crate::wire::tasks::{BATCH_BYTES, News, ObjectId, Overview, Product, Request, TaskError};

/// Requests that wait to be sent, at most; whoever adds more waits.
const WAITING: usize = 1 << 16;

/// What is known of an object.
#[derive(Clone, Debug)]
pub(super) enum Status {
    Pending,
    Available(Product),
    Failed(TaskError),
}

#[derive(Default)]
struct State {
    client: u32,
    gone: bool,
    closing: bool,
    /// Objects held, how often, and what is known of them.
    objects: HashMap<ObjectId, (u32, Status)>,
    outgoing: Vec<Request>,
    released: Vec<ObjectId>,
    places: HashMap<ObjectId, Vec<String>>,
    explanations: HashMap<ObjectId, String>,
    overview: Option<Overview>,
    streams: HashMap<u64, (HashSet<ObjectId>, VecDeque<ObjectId>)>,
    /// When something last came.
    last_news: Option<Instant>,
}

/// The connection, shared by a client and its objects.
pub(super) struct Line {
    pub(super) run_directory: PathBuf,
    pub(super) secret: Secret,
    state: Mutex<State>,
    /// Something has come, or the connection has ended.
    news: Condvar,
    /// There is something to send, or room to add more.
    sending: Condvar,
    next: AtomicU64,
    next_stream: AtomicU64,
    stream: UnixStream,
}

/// The scheduler's name, which is also its socket's.
const SCHEDULER: &str = "scheduler";

impl std::fmt::Debug for Line {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Line").finish_non_exhaustive()
    }
}

/// Connects to a process of the cluster, over the socket with its name, and proves both sides.
pub(super) fn connect(
    run_directory: &Path,
    process: &str,
    secret: &Secret,
) -> Result<Patient, ClientError> {
    let path = &run_directory.join(format!("{process}.sock"));
    let socket = |source| explained(path, source);
    let stranger = || ClientError::Stranger { path: path.to_path_buf() };
    let mut stream = Patient::connect(run_directory, process).map_err(socket)?;
    // Whoever breaks off before a word has probably just died.
    let challenge: Challenge =
        receive(&mut stream, GREETING_LIMIT).map_err(|error| match error.kind() {
            std::io::ErrorKind::Other | std::io::ErrorKind::InvalidData => stranger(),
            _ => socket(error),
        })?;
    if challenge.version != VERSION {
        let (path, version) = (path.to_path_buf(), challenge.version);
        return Err(ClientError::Version { path, version });
    }
    let mut nonce = [0; crate::wire::secret::LENGTH];
    getrandom::fill(&mut nonce).map_err(|error| {
        let source = std::io::Error::other(error.to_string());
        ClientError::System { action: "make a random number", source }
    })?;
    let proof = answer_proof(secret, &challenge, &nonce);
    send(&mut stream, &Answer { nonce, proof }).map_err(socket)?;
    let Welcome { proof } =
        receive(&mut stream, GREETING_LIMIT).map_err(|error| match error.downcast() {
            Ok(silent) => silent,
            Err(_) => stranger(),
        })?;
    if proof == welcome_proof(secret, &challenge, &nonce) { Ok(stream) } else { Err(stranger()) }
}

/// Sends a frame.
pub(super) fn send(stream: &mut impl Write, message: &impl Serialize) -> std::io::Result<()> {
    let frame = encode(message).map_err(|error: FrameError| std::io::Error::other(error))?;
    stream.write_all(&frame)
}

/// Receives a frame.
pub(super) fn receive<T: DeserializeOwned>(
    stream: &mut impl Read,
    limit: usize,
) -> std::io::Result<T> {
    let mut prefix = [0; 4];
    stream.read_exact(&mut prefix)?;
    let mut bytes = vec![0; length(prefix, limit).map_err(std::io::Error::other)?];
    stream.read_exact(&mut bytes)?;
    decode(&bytes).map_err(std::io::Error::other)
}

impl Line {
    pub(super) fn open(run_directory: &Path, secret: Secret) -> Result<Arc<Self>, ClientError> {
        let path = run_directory.join(format!("{SCHEDULER}.sock"));
        let stream = connect(run_directory, SCHEDULER, &secret)?;
        let mut stream = stream.into_stream().map_err(|source| explained(&path, source))?;
        let socket = |source| ClientError::Socket { path: path.clone(), source };
        send(&mut stream, &ToScheduler::Ask(Vec::new())).map_err(socket)?;
        let (reading, writing) =
            (stream.try_clone().map_err(socket)?, stream.try_clone().map_err(socket)?);
        let line = Arc::new(Self {
            run_directory: run_directory.to_path_buf(),
            secret,
            state: Mutex::default(),
            news: Condvar::new(),
            sending: Condvar::new(),
            next: AtomicU64::new(0),
            next_stream: AtomicU64::new(0),
            stream,
        });
        for (name, run) in [("client-in", listen as fn(_, _)), ("client-out", speak)] {
            let stream = if name == "client-in" { &reading } else { &writing };
            let stream = stream.try_clone().map_err(socket)?;
            let weak = Arc::downgrade(&line);
            std::thread::Builder::new()
                .name(name.to_owned())
                .spawn(move || run(stream, weak))
                .map_err(|source| ClientError::System { action: "start a thread", source })?;
        }
        line.until(|state| (state.client != 0).then_some(()))?;
        Ok(line)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first of so many new names.
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
            self.sending.notify_all();
        }
    }

    pub(super) fn ask(&self, request: Request) -> Result<(), ClientError> {
        let mut state = self.lock();
        while state.outgoing.len() >= WAITING && !state.gone {
            state = self.sending.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.gone {
            return Err(ClientError::Gone);
        }
        state.outgoing.push(request);
        if state.outgoing.len() == 1 {
            self.sending.notify_all();
        }
        Ok(())
    }

    /// Waits until `found` finds something, or nothing comes any more because a process of the
    /// cluster does not answer.
    fn until<T>(&self, mut found: impl FnMut(&mut State) -> Option<T>) -> Result<T, ClientError> {
        let began = Instant::now();
        let mut state = self.lock();
        loop {
            if let Some(found) = found(&mut state) {
                return Ok(found);
            }
            if state.gone {
                return Err(ClientError::Gone);
            }
            let waited = self.news.wait_timeout(state, LOOK);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            if state.last_news.unwrap_or(began).max(began).elapsed() >= PATIENCE {
                drop(state);
                if let Some(error) = silent(&self.run_directory, None) {
                    return Err(error);
                }
                state = self.lock();
            }
        }
    }

    pub(super) fn wait(&self, object: ObjectId) -> Result<Status, ClientError> {
        self.until(|state| match state.objects.get(&object) {
            None | Some((_, Status::Pending)) => None,
            Some((_, status)) => Some(status.clone()),
        })
    }

    /// The workers that have an object; waits until there is one.
    pub(super) fn locate(&self, object: ObjectId) -> Result<Vec<String>, ClientError> {
        self.lock().places.remove(&object);
        self.ask(Request::Locate { object })?;
        self.wait_places(object)
    }

    fn wait_places(&self, object: ObjectId) -> Result<Vec<String>, ClientError> {
        let failed = |state: &State| match state.objects.get(&object) {
            Some((_, Status::Failed(error))) => Some(error.clone()),
            _ => None,
        };
        let found = self.until(|state| match failed(state) {
            Some(error) => Some(Err(error)),
            None => state.places.remove(&object).map(Ok),
        })?;
        Ok(found?)
    }

    /// The worker to which an object should be given.
    pub(super) fn wait_place(&self, object: ObjectId) -> Result<String, ClientError> {
        self.wait_places(object)?.pop().ok_or(ClientError::Gone)
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

    /// Begins to note which of these objects come.
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

    pub(super) fn next_of(&self, stream: u64) -> Option<ObjectId> {
        self.until(|state| state.streams.get_mut(&stream)?.1.pop_front()).ok()
    }

    pub(super) fn unwatch(&self, stream: u64) {
        self.lock().streams.remove(&stream);
    }

    fn heard(&self, news: Vec<News>) {
        let mut state = self.lock();
        state.last_news = Some(Instant::now());
        for one in news {
            state.note(one);
        }
        drop(state);
        self.news.notify_all();
    }
}

impl State {
    fn note(&mut self, news: News) {
        match news {
            News::Hello { client } => self.client = client,
            News::Available { object, product } => {
                // One that lives in the scheduler is at no worker.
                if matches!(product, Product::Inline(_)) {
                    self.places.insert(object, Vec::new());
                }
                self.came(object, Status::Available(product));
            }
            News::Failed { object, error } => self.came(object, Status::Failed(error)),
            News::At { object, workers } => {
                self.places.insert(object, workers);
            }
            News::PutAt { object, worker } => {
                self.places.insert(object, vec![worker]);
            }
            News::Because { task, why } => {
                self.explanations.insert(task, why);
            }
            News::Overview(overview) => self.overview = Some(overview),
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

impl Drop for Line {
    fn drop(&mut self) {
        // The threads hold this only while they work; closing lets both end.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        self.lock().closing = true;
        self.sending.notify_all();
    }
}

/// Takes in what the scheduler says until it is gone.
fn listen(stream: UnixStream, line: std::sync::Weak<Line>) {
    let mut reader = std::io::BufReader::with_capacity(1 << 20, stream);
    loop {
        let heard = receive::<ToClient>(&mut reader, FRAME_LIMIT);
        let Some(line) = line.upgrade() else { return };
        match heard {
            Ok(ToClient::News(news)) => line.heard(news),
            Ok(_) => {}
            Err(_) => {
                line.lock().gone = true;
                line.news.notify_all();
                line.sending.notify_all();
                return;
            }
        }
    }
}

/// Sends what there is to send, as much as there is at a time.
fn speak(mut stream: UnixStream, line: std::sync::Weak<Line>) {
    loop {
        let Some(strong) = line.upgrade() else { return };
        let mut state = strong.lock();
        if state.outgoing.is_empty() && state.released.is_empty() {
            if state.gone || state.closing {
                return;
            }
            // Looks up now and then whether the client still lives.
            let pause = std::time::Duration::from_millis(200);
            drop(strong.sending.wait_timeout(state, pause));
            continue;
        }
        let mut requests = std::mem::take(&mut state.outgoing);
        let released = std::mem::take(&mut state.released);
        drop(state);
        strong.sending.notify_all();
        drop(strong);
        // After the requests, which may still need what is released.
        requests.extend(
            released.chunks(1 << 14).map(|part| Request::Release { objects: part.to_vec() }),
        );
        for batch in batches(requests) {
            if send(&mut stream, &ToScheduler::Ask(batch)).is_err() {
                return;
            }
        }
    }
}

/// Requests in frames of a good size.
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
