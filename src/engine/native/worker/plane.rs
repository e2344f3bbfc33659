//! The data plane: the one thread that owns this process's UCX worker.
//!
//! Does not talk to the scheduler; the worker's event loop does, and passes on what it hears.
//!
//! *Invariant:* UCX is called by this thread only. When nothing is to be done, the thread sleeps.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tokio::sync::mpsc as async_mpsc;

use super::core::{Action, Core, Event};
use crate::ucx::{
    self, Arrival, Buffer, Completion, EndpointFailure, EndpointId, Library, OperationId, Payload,
    Protocol, Setting, Sleeper, UcpContext, UcpEndpoint, UcpWorker, Waker, WorkerAddress,
};
use crate::wire::native::{Member, ToWorker};
use crate::wire::peer::{Header, Hello, Kind};
use crate::wire::secret::Secret;
use crate::wire::status::PeerLanes;

/// Length of the message that checks a new connection, in bytes: enough to go by rendezvous.
const PROBE_BYTES: usize = 64 << 10;

/// Rounds without anything to do before the thread sleeps. Arming costs a system call, so a few
/// looks are cheaper when the next message is already on its way.
const IDLE_ROUNDS: u32 = 16;

/// Time before a broken connection to a living peer is tried again.
const RETRY_AFTER: Duration = Duration::from_millis(500);

/// What the sealed addresses are sealed for.
const ADDRESS_PURPOSE: &str = "worker address";

/// What the data plane is told.
enum Command {
    /// What the scheduler says.
    Heard(ToWorker),
    /// Close everything.
    Stop,
}

/// What the data plane says.
#[derive(Debug)]
pub(super) enum Report {
    /// UCX is open; this is the worker's address, sealed.
    Open {
        /// The address.
        address: Vec<u8>,
        /// The library's version and name, for the log.
        library: String,
    },
    /// Every expected peer is reached, over these lanes.
    Ready(Vec<PeerLanes>),
    /// A connection broke although its peer was not said to be lost.
    PeerFailed {
        /// The peer.
        member: Member,
        /// UCX's words.
        cause: String,
    },
}

/// How UCX is to be opened.
pub(super) struct Opening {
    /// Which libucp; `None` for the loader's choice.
    pub(super) library: Option<PathBuf>,
    /// Settings on top of the environment's.
    pub(super) settings: Vec<Setting>,
}

/// The handle of the thread.
pub(super) struct Plane {
    commands: mpsc::Sender<Command>,
    waker: Waker,
    thread: JoinHandle<Result<(), ucx::Error>>,
}

impl Plane {
    /// Starts the thread. What it has to say comes through the receiver, which closes when the
    /// thread ends.
    pub(super) fn spawn(
        me: Member,
        secret: Secret,
        opening: Opening,
    ) -> Result<(Self, async_mpsc::UnboundedReceiver<Report>), super::Error> {
        let sleeper = Sleeper::new()?;
        let waker = sleeper.waker();
        let (commands, inbox) = mpsc::channel();
        let (reports, incoming) = async_mpsc::unbounded_channel();
        let run = move || Owner::open(me, secret, &opening, reports)?.run(&sleeper, &inbox);
        let thread = thread::Builder::new()
            .name("ucx".to_owned())
            .spawn(run)
            .map_err(|source| super::Error::System { action: "start the UCX thread", source })?;
        Ok((Self { commands, waker, thread }, incoming))
    }

    /// Passes on what the scheduler says.
    pub(super) fn heard(&self, message: ToWorker) {
        self.tell(Command::Heard(message));
    }

    /// Closes every connection and ends the thread.
    pub(super) fn stop(self) -> Result<(), super::Error> {
        self.tell(Command::Stop);
        match self.thread.join() {
            Ok(result) => Ok(result?),
            Err(_) => Err(super::Error::PlaneGone),
        }
    }

    fn tell(&self, command: Command) {
        // A thread that has ended is noticed by its closed reports.
        let _ = self.commands.send(command);
        self.waker.wake();
    }
}

/// The thread's state.
struct Owner {
    core: Core,
    address_key: [u8; 32],
    endpoints: BTreeMap<Member, UcpEndpoint>,
    /// Addresses of the peers that are present.
    addresses: HashMap<Member, WorkerAddress>,
    peers_of_endpoints: HashMap<EndpointId, Member>,
    /// Probes being received, with the sender and the expected checksum.
    probes: HashMap<OperationId, (Member, u64)>,
    retries: Vec<(Instant, Member)>,
    reports: async_mpsc::UnboundedSender<Report>,
    /// Messages from processes that are no peers.
    strangers: u64,
    /// Last, so that the endpoints are closed before.
    worker: UcpWorker,
}

impl Owner {
    fn open(
        me: Member,
        secret: Secret,
        opening: &Opening,
        reports: async_mpsc::UnboundedSender<Report>,
    ) -> Result<Self, ucx::Error> {
        let library = Library::open(opening.library.as_deref())?;
        let context = UcpContext::new(&library, &opening.settings)?;
        let worker = UcpWorker::new(&context)?;
        let address_key = secret.key(ADDRESS_PURPOSE);
        let address = worker.address()?.seal(&address_key);
        let library = format!("{} ({})", library.version(), library.name().display());
        // The event loop is only gone when the process ends.
        let _ = reports.send(Report::Open { address, library });
        Ok(Self {
            core: Core::new(me, secret),
            address_key,
            endpoints: BTreeMap::new(),
            addresses: HashMap::new(),
            peers_of_endpoints: HashMap::new(),
            probes: HashMap::new(),
            retries: Vec::new(),
            reports,
            strangers: 0,
            worker,
        })
    }

    fn run(mut self, sleeper: &Sleeper, inbox: &mpsc::Receiver<Command>) -> Result<(), ucx::Error> {
        let mut idle_rounds = 0;
        let mut next = None;
        loop {
            let mut busy = false;
            while let Some(command) = next.take().or_else(|| inbox.try_recv().ok()) {
                busy = true;
                match command {
                    Command::Heard(message) => self.heard(message),
                    Command::Stop => return Ok(()),
                }
            }
            busy |= self.worker.progress();
            busy |= self.digest();
            if busy {
                idle_rounds = 0;
            } else if idle_rounds < IDLE_ROUNDS {
                idle_rounds += 1;
                std::hint::spin_loop();
            } else {
                sleeper.sleep(&self.worker, self.time_to_retry(), || {
                    next = inbox.try_recv().ok();
                    next.is_some()
                })?;
                self.retry();
            }
        }
    }

    /// Deals with everything that UCX's callbacks recorded.
    fn digest(&mut self) -> bool {
        let mut any = false;
        while let Some(arrival) = self.worker.next_arrival() {
            any = true;
            self.arrived(arrival);
        }
        while let Some(completion) = self.worker.next_completion() {
            any = true;
            self.completed(completion);
        }
        while let Some(failure) = self.worker.next_failure() {
            any = true;
            self.failed(failure);
        }
        any
    }

    fn heard(&mut self, message: ToWorker) {
        match message {
            ToWorker::Expect { names } => self.handle(Event::Expect(names)),
            ToWorker::Peer { member, address } => {
                match WorkerAddress::open(&address, &self.address_key) {
                    Ok(address) => {
                        self.addresses.insert(member.clone(), address);
                        self.handle(Event::Appeared(member));
                    }
                    Err(error) => tracing::error!(peer = member.name, "{error}"),
                }
            }
            ToWorker::Lost { member, left } => {
                tracing::info!(peer = member.name, left, "peer is gone");
                self.addresses.remove(&member);
                self.handle(Event::Lost(member));
            }
        }
    }

    fn arrived(&mut self, arrival: Arrival) {
        let Some(header) = Header::decode(arrival.header()) else { return self.stranger() };
        if header.kind == Kind::Hello {
            match arrival.bytes().and_then(Hello::decode) {
                Some(Hello { from }) => self.handle(Event::Hello { from, token: header.token }),
                None => self.stranger(),
            }
            if self.core.sender(header.token).is_none() {
                self.stranger();
            }
            return;
        }
        let Some(sender) = self.core.sender(header.token).cloned() else { return self.stranger() };
        match header.kind {
            Kind::Hello => {}
            Kind::Welcome | Kind::Met => {
                self.handle(Event::Answered { by: sender, kind: header.kind });
            }
            Kind::Probe => match arrival.receive(Buffer::Host(vec![0; PROBE_BYTES])) {
                Ok(operation) => {
                    self.probes.insert(operation, (sender, header.argument));
                }
                Err(error) => tracing::warn!(peer = sender.name, "{error}"),
            },
        }
    }

    fn completed(&mut self, Completion { id, result, payload }: Completion) {
        let Some((by, checksum)) = self.probes.remove(&id) else {
            if let Err(status) = result {
                tracing::debug!(%status, "a message was not sent");
            }
            return;
        };
        let bytes = payload.buffer().and_then(Buffer::host).unwrap_or_default();
        match result {
            Ok(()) if u64::from(crc32c::crc32c(bytes)) == checksum => {
                self.handle(Event::Probed { by });
            }
            Ok(()) => tracing::error!(peer = by.name, "a probe arrived with the wrong checksum"),
            Err(status) => tracing::warn!(peer = by.name, %status, "a probe did not arrive"),
        }
    }

    fn failed(&mut self, EndpointFailure { endpoint, status }: EndpointFailure) {
        let Some(member) = self.peers_of_endpoints.get(&endpoint).cloned() else { return };
        let cause = status.to_string();
        let _ = self.reports.send(Report::PeerFailed { member: member.clone(), cause });
        self.handle(Event::Broken(member));
    }

    fn stranger(&mut self) {
        self.strangers += 1;
        // Each power of two: a flood must not fill the log.
        if self.strangers.is_power_of_two() {
            tracing::warn!(messages = self.strangers, "messages from strangers are thrown away");
        }
    }

    fn time_to_retry(&self) -> Option<Duration> {
        let next = self.retries.iter().map(|(at, _)| *at).min()?;
        Some(next.saturating_duration_since(Instant::now()))
    }

    fn retry(&mut self) {
        let now = Instant::now();
        let (due, later): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.retries).into_iter().partition(|(at, _)| *at <= now);
        self.retries = later;
        for (_, member) in due {
            self.handle(Event::Retry(member));
        }
    }

    fn handle(&mut self, event: Event) {
        tracing::debug!(?event);
        for action in self.core.handle(event) {
            tracing::debug!(?action);
            self.act(action);
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Connect(member) => self.connect(member),
            Action::Disconnect(member) => {
                if let Some(endpoint) = self.endpoints.remove(&member) {
                    self.peers_of_endpoints.remove(&endpoint.id());
                }
            }
            Action::Say { to, kind } => self.say(&to, kind),
            Action::RetryLater(member) => {
                self.retries.push((Instant::now() + RETRY_AFTER, member));
            }
            Action::Ready => {
                let lanes = self.lanes();
                let _ = self.reports.send(Report::Ready(lanes));
            }
        }
    }

    fn connect(&mut self, member: Member) {
        let Some(address) = self.addresses.get(&member) else { return };
        match self.worker.connect(address) {
            Ok(endpoint) => {
                self.peers_of_endpoints.insert(endpoint.id(), member.clone());
                self.endpoints.insert(member, endpoint);
            }
            Err(error) => {
                let cause = error.to_string();
                let _ = self.reports.send(Report::PeerFailed { member: member.clone(), cause });
                self.retries.push((Instant::now() + RETRY_AFTER, member));
            }
        }
    }

    fn say(&mut self, to: &Member, kind: Kind) {
        let Some(endpoint) = self.endpoints.get(to) else { return };
        let token = self.core.token_to(to);
        let mut header = Header { kind, token, id: 0, argument: 0 };
        let (payload, protocol) = match kind {
            Kind::Hello => {
                let hello = Hello { from: self.core.me().clone() };
                (Payload::from(hello.encode()), Protocol::Eager)
            }
            Kind::Probe => {
                let bytes = probe(to.incarnation);
                header.argument = u64::from(crc32c::crc32c(&bytes));
                (Payload::from(bytes), Protocol::Rendezvous)
            }
            Kind::Welcome | Kind::Met => (Payload::Empty, Protocol::Eager),
        };
        if let Err(error) = endpoint.send(&header.encode(), payload, protocol) {
            tracing::error!(peer = to.name, "{error}");
        }
    }

    fn lanes(&self) -> Vec<PeerLanes> {
        self.endpoints
            .iter()
            .map(|(member, endpoint)| PeerLanes {
                peer: member.name.clone(),
                lanes: endpoint.lanes().unwrap_or_default(),
            })
            .collect()
    }
}

/// Bytes that no page of zeros or of another probe looks like.
fn probe(seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut bytes = Vec::with_capacity(PROBE_BYTES);
    while bytes.len() < PROBE_BYTES {
        // Marsaglia's xorshift64.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes
}
