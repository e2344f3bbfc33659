//! The scheduler's connections, and the loop that serves them.
//!
//! Does not decide: [`super::core`] and [`crate::tasks`] do.

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

use super::core::{Action, Core, Event};
use super::outbox::{Frames, Gauge, Outbox, outbox};
use super::relay::Relay;
use crate::connection::{self, ConnectionId, Greetings};
use crate::error::{ConversationError, Error};
use crate::listener::Listener;
use crate::process::{LaunchEnvironment, StatusPipe, log_to_standard_error};
use crate::tasks::service::TaskService;
use cuda_cluster_machine::os::event_loop;
use cuda_cluster_machine::os::run_directory::Paths;
use cuda_cluster_model::ids::SCHEDULER;
use cuda_cluster_model::text::in_full;
use cuda_cluster_wire::frame::{FRAME_LIMIT, encode};
use cuda_cluster_wire::greeting::Role;
use cuda_cluster_wire::native::{
    FromClient, FromWorker, Measurement, REQUESTS_LIMIT, Registration, ToClient, ToWorker,
    WorkerLanes,
};
use cuda_cluster_wire::peer::Member;
use cuda_cluster_wire::secret::Secret;
use cuda_cluster_wire::status::{Condition, PeerLanes};

/// Messages that are handled before the answers are sent.
const EVENTS: usize = 256;

/// Frames of one connection that wait to be handled.
const FRAMES: usize = 4;

/// Runs the scheduler until it is told to end.
///
/// # Errors
/// If it cannot start or continue; the supervisor has been told why.
pub fn main() -> Result<(), Error> {
    log_to_standard_error();
    let mut status = StatusPipe::open()?;
    let result = start(&mut status);
    if let Err(error) = &result {
        // Standard error is the process's log.
        tracing::error!("{}", error.in_full());
        status.failed(error.in_full());
    }
    result
}

fn start(status: &mut StatusPipe) -> Result<(), Error> {
    let launch = LaunchEnvironment::read(Paths::plan)?;
    let runtime = event_loop::start(&mut tokio::runtime::Builder::new_current_thread())
        .map_err(|source| Error::System { action: "start the event loop", source })?;
    runtime.block_on(run(launch, status))
}

async fn run(launch: LaunchEnvironment, status: &mut StatusPipe) -> Result<(), Error> {
    let system = |action| move |source| Error::System { action, source };
    let mut terminate = signal(SignalKind::terminate()).map_err(system("watch for SIGTERM"))?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(system("watch for SIGINT"))?;
    let socket = launch.paths.socket(SCHEDULER);
    let mut listener = Listener::new(&socket, launch.secret.clone())?;
    status.ready(
        Some(format!("unix://{}", socket.display())),
        Vec::new(),
        None,
        Condition::default(),
    );
    tracing::info!(socket = %socket.display(), "scheduler listens");

    let (events, mut incoming) = mpsc::channel(EVENTS);
    let mut service = Service {
        core: Core::default(),
        relay: Relay::default(),
        tasks: TaskService::new(&launch.plan, &launch.native, launch.paths.root()),
        outboxes: BTreeMap::new(),
        workers: BTreeMap::new(),
        secret: Arc::new(launch.secret),
        greetings: Greetings::default(),
        events,
        next: 0,
    };
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok(stream) => service.accept(stream),
                // Out of file descriptors, or the peer gave up: neither is a reason to end the
                // scheduler.
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            },
            Some(event) = incoming.recv() => {
                service.handle(event);
                // Handle what has arrived meanwhile, so that its answers share the same frames.
                for _ in 0..EVENTS {
                    let Ok(event) = incoming.try_recv() else { break };
                    service.handle(event);
                    if service.tasks.is_full() {
                        service.flush();
                    }
                }
                service.flush();
            }
            () = status.asked() => status.answer(Condition::default()),
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
        }
    }
    tracing::info!("scheduler ends as requested");
    // If the socket is gone already, there is nothing to remove.
    let _ = fs::remove_file(&socket);
    Ok(())
}

/// What is shown to users about a worker.
struct Worker {
    member: Member,
    peers: Vec<PeerLanes>,
}

/// Who is on the other side of a connection, and so which messages it may send.
#[derive(Clone, Copy)]
enum Peer {
    Worker,
    Client,
}

/// What connections report to the scheduler's loop.
enum Incoming {
    /// A worker has authenticated, and joins.
    Worker(ConnectionId, Outbox, Registration),
    /// A client has authenticated.
    Client(ConnectionId, Outbox),
    /// A worker's message; the worker may send more once it has been handled.
    FromWorker(ConnectionId, FromWorker, OwnedSemaphorePermit),
    /// A client's message, likewise.
    FromClient(ConnectionId, FromClient, OwnedSemaphorePermit),
    /// The connection ended.
    Ended(ConnectionId),
}

/// The messages of one kind of peer.
trait PeerMessage: DeserializeOwned {
    /// Whether it asks for no more than it may.
    fn check(&self) -> Result<(), ConversationError> {
        Ok(())
    }

    fn incoming(self, from: ConnectionId, turn: OwnedSemaphorePermit) -> Incoming;
}

impl PeerMessage for FromWorker {
    fn incoming(self, from: ConnectionId, turn: OwnedSemaphorePermit) -> Incoming {
        Incoming::FromWorker(from, self, turn)
    }
}

impl PeerMessage for FromClient {
    fn check(&self) -> Result<(), ConversationError> {
        match self {
            FromClient::Ask(requests) if requests.len() > REQUESTS_LIMIT => {
                Err(ConversationError::TooMany { requests: requests.len() })
            }
            _ => Ok(()),
        }
    }

    fn incoming(self, from: ConnectionId, turn: OwnedSemaphorePermit) -> Incoming {
        Incoming::FromClient(from, self, turn)
    }
}

struct Service {
    core: Core,
    relay: Relay,
    tasks: TaskService,
    outboxes: BTreeMap<ConnectionId, Outbox>,
    workers: BTreeMap<ConnectionId, Worker>,
    secret: Arc<Secret>,
    greetings: Greetings,
    events: mpsc::Sender<Incoming>,
    next: ConnectionId,
}

impl Service {
    fn accept(&mut self, mut stream: UnixStream) {
        let place = self.greetings.place();
        self.next += 1;
        let (id, secret, events) = (self.next, Arc::clone(&self.secret), self.events.clone());
        tokio::spawn(async move {
            let greeting = place.welcome(&mut stream, &secret, |role| match role {
                Role::Worker => Some(Peer::Worker),
                Role::Client => Some(Peer::Client),
                Role::Bulk | Role::Viewer => None,
            });
            match greeting.await {
                Ok(peer) => converse(id, peer, stream, events).await,
                Err(error) => tracing::warn!("a connection is refused: {}", in_full(&error)),
            }
        });
    }

    fn handle(&mut self, incoming: Incoming) {
        let event = match incoming {
            Incoming::Worker(connection, outbox, Registration { member, address }) => {
                tracing::info!(worker = member.name, "worker registers");
                self.outboxes.insert(connection, outbox);
                let worker = Worker { member: member.clone(), peers: Vec::new() };
                self.workers.insert(connection, worker);
                Event::Registered { connection, member, address }
            }
            Incoming::Client(connection, outbox) => {
                self.outboxes.insert(connection, outbox);
                self.tasks.joined(connection);
                return;
            }
            Incoming::FromWorker(connection, message, _turn) => {
                match self.worker_sent(connection, message) {
                    Some(event) => event,
                    None => return,
                }
            }
            Incoming::FromClient(connection, message, _turn) => {
                self.client_sent(connection, message);
                return;
            }
            Incoming::Ended(connection) => {
                self.outboxes.remove(&connection);
                self.tasks.gone(connection);
                if let Some(Worker { member, .. }) = self.workers.remove(&connection) {
                    tracing::info!(worker = member.name, "worker is gone");
                }
                for (to, message) in self.relay.gone(connection) {
                    self.send(to, &message);
                }
                Event::Gone { connection }
            }
        };
        for action in self.core.handle(event) {
            self.act(action);
        }
    }

    fn worker_sent(&mut self, connection: ConnectionId, message: FromWorker) -> Option<Event> {
        // A worker whose successor has registered is ignored.
        let worker = self.workers.get_mut(&connection)?;
        match message {
            FromWorker::Connected { peers } => {
                worker.peers = peers;
                Some(Event::Connected { connection })
            }
            FromWorker::Measured { id, result } => {
                if let Some((client, message)) = self.relay.measured(connection, id, result) {
                    self.send(client, &message);
                }
                None
            }
            FromWorker::Work(reports) => {
                self.tasks.reported(connection, &worker.member, reports);
                None
            }
            FromWorker::Leaving => Some(Event::Leaving { connection }),
            FromWorker::PeerFailed { member, cause } => {
                let from = &worker.member.name;
                tracing::warn!(from, to = member.name, cause, "a connection between workers broke");
                None
            }
        }
    }

    fn client_sent(&mut self, client: ConnectionId, message: FromClient) {
        match message {
            FromClient::Ask(requests) => self.tasks.asked(client, requests),
            FromClient::Measure(measurement) => self.measure(client, measurement),
            FromClient::List => {
                let lanes = |worker: &Worker| WorkerLanes {
                    name: worker.member.name.clone(),
                    peers: worker.peers.clone(),
                };
                let workers = self.workers.values().map(lanes).collect();
                self.send(client, &ToClient::Workers { workers });
            }
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Send { to, message } => {
                self.send(to, &message);
            }
            Action::Close { connection } => {
                self.outboxes.remove(&connection);
                self.tasks.gone(connection);
                self.workers.remove(&connection);
            }
        }
    }

    fn measure(&mut self, client: ConnectionId, measurement: Measurement) {
        let Measurement { from, to, .. } = &measurement;
        let worker = self.workers.iter().find(|(_, worker)| worker.member.name == *from);
        let Some((&worker, _)) = worker else {
            let result = Err(format!("there is no worker {from}"));
            let message = ToClient::Measured { from: from.clone(), to: to.clone(), result };
            return self.send(client, &message);
        };
        let id = self.relay.begin(client, worker, from.clone(), to.clone());
        self.send(worker, &ToWorker::Measure { id, measurement });
    }

    fn flush(&mut self) {
        for (to, frame) in self.tasks.flush() {
            self.post(to, frame);
        }
    }

    fn post(&self, to: ConnectionId, frame: Vec<u8>) {
        // A connection that has just ended is about to be removed.
        if let Some(outbox) = self.outboxes.get(&to) {
            outbox.post(frame);
        }
    }

    fn send(&self, to: ConnectionId, message: &impl Serialize) {
        match encode(message) {
            Ok(frame) => self.post(to, frame),
            Err(error) => tracing::error!("a message is not sent: {error}"),
        }
    }
}

/// Carries messages both ways until either side ends.
async fn converse(
    id: ConnectionId,
    peer: Peer,
    stream: UnixStream,
    events: mpsc::Sender<Incoming>,
) {
    let (mut reader, writer) = stream.into_split();
    let (outbox, frames, gauge) = outbox();
    let ended = match peer {
        Peer::Worker => match connection::receive(&mut reader, FRAME_LIMIT).await {
            Ok(registration) => {
                let joins = Incoming::Worker(id, outbox, registration);
                carry::<FromWorker>(id, joins, (reader, &gauge), (frames, writer), &events).await
            }
            Err(error) => Err(error),
        },
        Peer::Client => {
            let joins = Incoming::Client(id, outbox);
            carry::<FromClient>(id, joins, (reader, &gauge), (frames, writer), &events).await
        }
    };
    match ended {
        Err(ConversationError::Broken(_)) | Ok(()) => {}
        Err(error) => tracing::warn!("a connection is dropped: {}", in_full(&error)),
    }
    let _ = events.send(Incoming::Ended(id)).await;
}

async fn carry<T: PeerMessage>(
    id: ConnectionId,
    joins: Incoming,
    (reader, gauge): (OwnedReadHalf, &Gauge),
    (frames, writer): (Frames, OwnedWriteHalf),
    events: &mpsc::Sender<Incoming>,
) -> Result<(), ConversationError> {
    // The loop ends only with the process, so the channel is still open.
    let _ = events.send(joins).await;
    tokio::select! {
        ended = listen_to::<T>(id, reader, events, gauge) => ended,
        ended = frames.write_to(writer) => ended,
    }
}

async fn listen_to<T: PeerMessage>(
    id: ConnectionId,
    mut reader: OwnedReadHalf,
    events: &mpsc::Sender<Incoming>,
    gauge: &Gauge,
) -> Result<(), ConversationError> {
    let turns = Arc::new(Semaphore::new(FRAMES));
    loop {
        // Stop reading from a peer that does not read, or the answers would pile up here.
        gauge.drained().await;
        let message: T = connection::receive(&mut reader, FRAME_LIMIT).await?;
        message.check()?;
        // A few frames at a time, so that a connection with long frames does not starve the others.
        let Ok(turn) = Arc::clone(&turns).acquire_owned().await else { return Ok(()) };
        if events.send(message.incoming(id, turn)).await.is_err() {
            return Ok(());
        }
    }
}
