//! What a worker does on the thread that owns its UCX.
//!
//! Does not decide who the peers are, which transfers run, or what is measured; it carries out what
//! [`super::core`], [`super::transfer`] and [`super::measure`] decide. When the thread polls and
//! sleeps, and in which order things come here, is `ucx::thread`'s.
//!
//! *Invariant:* nothing here waits for another thread.

mod letting_go;
mod loss;
mod measuring;
mod objects;
mod proof;

use std::cell::Cell;
use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sched::CpuSet;
use rustc_hash::FxHashMap;
use tokio::sync::{mpsc as async_mpsc, oneshot};

use super::commands::{BYTES_IN_FLIGHT, Command, Inbox, Opening, Report};
use super::core::{Action, Core, Event};
use super::measure::{self, Measurements, Out, RoomToSend};
use super::transfer::{self, Arrival, Offered, Purpose, TransferError, Transfers};
use crate::error::Error;
use cuda_cluster_data::cuda::{Device, Way};
use cuda_cluster_data::ucx::thread::{Handler, Opened};
use cuda_cluster_data::ucx::{
    self, Completion, EndpointFailure, EndpointId, Payload, Protocol, UcpEndpoint, UcpWorker,
    WorkerAddress,
};
use cuda_cluster_wire::native::{ALL_PAIRS, Measurement, ToWorker};
use cuda_cluster_wire::peer::{Header, Hello, Kind, Measure, Member, PeerKey, checksum_of};
use cuda_cluster_wire::secret::{Secret, Token};
use cuda_cluster_wire::status::PeerLanes;

/// Polls of a measurement between two offers of the CPU to other threads: both threads may share a
/// CPU, unless each was given its own.
const MEASURED_LOOKS: u32 = 256;
const PINNED_LOOKS: u32 = 1 << 16;

/// Time in which further connections may come before the new ones are told, where there may be
/// many.
const GROWN_AFTER: Duration = Duration::from_millis(50);

/// The purpose for which addresses are sealed.
const ADDRESS_PURPOSE: &str = "worker address";

/// The identifier of echo requests among pings; measurements use others.
const ECHO: u64 = 1 << 55;

/// The connection to a peer.
struct Link {
    member: Member,
    endpoint: UcpEndpoint<Purpose>,
    /// The token of this worker's messages on it.
    token: Token,
    /// Whether the peer was sent a pebble before other device memory.
    is_pebbled: Cell<bool>,
}

/// The thread's state.
pub(super) struct Owner {
    core: Core,
    transfers: Transfers,
    measurements: Measurements,
    /// Messages that a measurement wants to send; empty between two calls.
    outbox: Vec<Out>,
    device: Option<Device>,
    address_key: [u8; 32],
    links: FxHashMap<PeerKey, Link>,
    /// Addresses of the present peers.
    addresses: HashMap<Member, WorkerAddress>,
    peers_of_endpoints: HashMap<EndpointId, PeerKey>,
    echoes: FxHashMap<u64, (PeerKey, oneshot::Sender<Result<(), TransferError>>)>,
    next_echo: u64,
    /// Requests to peers whose connection is not verified yet.
    early: Vec<transfer::Request>,
    /// And measurements, with the memory for them.
    early_measurements: Vec<(u64, Measurement, RoomToSend)>,
    retries: Vec<(Instant, Member)>,
    /// When to tell of connections since READY.
    grown: Option<Instant>,
    reports: async_mpsc::UnboundedSender<Report>,
    inbox: Arc<Inbox>,
    /// The CPUs of the thread before a measurement pinned it.
    unpinned: Option<CpuSet>,
    /// Messages from processes that are not peers.
    strangers: u64,
    /// The last field, so that the endpoints are closed first.
    worker: UcpWorker<Purpose>,
}

impl Owner {
    /// Opens UCX on this thread.
    pub(super) fn open(
        me: Member,
        secret: Secret,
        opening: Opening,
        reports: async_mpsc::UnboundedSender<Report>,
        inbox: Arc<Inbox>,
    ) -> Result<Self, Error> {
        // UCX looks for a current CUDA context when it is initialised.
        opening.device.as_ref().map_or(Ok(()), Device::make_current)?;
        let Opened { version, path, resources, worker, address } =
            Opened::new(opening.library.as_deref(), &opening.settings)?;
        if let Some(device) = opening.device.as_ref().filter(|_| !version.limits_mappings()) {
            device.mappings_have_no_limit();
        }
        worker.exposed().inspect(|warning| tracing::warn!("{warning}"));
        let address_key = secret.key(ADDRESS_PURPOSE);
        let address = address.seal(&address_key);
        let transports = ucx::lane_transports(&resources).join(" ");
        let library = format!("{version} from {}: {transports}", path.display());
        // The receiver is gone only when the process ends.
        let _ = reports.send(Report::Open { address, library, path, resources });
        let limit =
            if opening.bytes_in_flight == 0 { BYTES_IN_FLIGHT } else { opening.bytes_in_flight };
        let measurements = Measurements::default();
        Ok(Self {
            core: Core::new(me, secret),
            transfers: Transfers::new(limit, opening.device.clone()),
            device: opening.device,
            measurements,
            outbox: Vec::new(),
            address_key,
            links: FxHashMap::default(),
            addresses: HashMap::new(),
            peers_of_endpoints: HashMap::new(),
            echoes: FxHashMap::default(),
            next_echo: ECHO,
            early: Vec::new(),
            early_measurements: Vec::new(),
            retries: Vec::new(),
            grown: None,
            reports,
            inbox,
            unpinned: None,
            strangers: 0,
            worker,
        })
    }
}

impl Handler for Owner {
    type Command = Command;
    type Purpose = Purpose;

    fn worker(&self) -> &UcpWorker<Purpose> {
        &self.worker
    }

    #[inline(never)]
    fn command(&mut self, command: Command) -> ControlFlow<()> {
        match command {
            Command::FromScheduler(message) => self.handle_scheduler(message),
            Command::Put { name, buffer } => {
                let offered = Offered { buffer, checksum: None, waiting: Vec::new() };
                self.transfers.offered.insert(name, offered);
            }
            Command::Remove { name } => drop(self.transfers.offered.remove(&name)),
            Command::Get(request) => self.get(request),
            Command::Cancel { id } => {
                self.early.retain(|request| request.id != id);
                self.transfers.cancel(id);
            }
            Command::Summed { name, buffer, checksum } => self.summed(&name, &buffer, checksum),
            Command::Echo { peer, reply } => self.echo(peer, reply),
            Command::Measure { id, measurement } => self.measure(id, measurement),
            Command::RoomToSend { id, measurement, room } => {
                self.begin_measurement(id, measurement, room);
            }
            Command::RoomToReceive { id, from, measure, room, mapped } => {
                // Gone or broken meanwhile: that ended the measurement at the sender.
                if !self.links.contains_key(&from) {
                    return ControlFlow::Continue(());
                }
                self.pin(measure.cpu);
                let out = self.measurements.prepare(from, id, measure, room, mapped);
                self.send_one(out);
            }
            // The receiver is gone only when the process ends.
            Command::Pulse => {
                // An idle worker must notice a fault too.
                self.device.as_ref().inspect(|device| device.look_for_fault());
                let lanes = self.lanes();
                drop(self.reports.send(Report::Pulse { lanes }));
            }
            Command::Stop => return ControlFlow::Break(()),
        }
        self.ask_to_let_go();
        ControlFlow::Continue(())
    }

    // Rare calls stay out of the stack frames of calls that happen for every message: after each
    // long message, the caches hold nothing else.
    fn arrived(&mut self, arrival: Arrival) {
        let Some(header) = Header::decode(arrival.header()) else { return self.stranger() };
        if header.kind == Kind::Hello {
            if let Some(Hello { from }) = arrival.bytes().and_then(Hello::decode) {
                self.handle(Event::Hello { from, token: header.token });
            }
            if self.core.sender(header.token).is_none() {
                self.stranger();
            }
            return;
        }
        let Some(sender) = self.core.sender(header.token) else { return self.stranger() };
        if matches!(header.kind, Kind::Welcome | Kind::Met | Kind::Probe) {
            let sender = sender.clone();
            return self.proof(sender, header, arrival);
        }
        let sender = sender.key();
        self.message(sender, header, arrival);
    }

    fn completed(&mut self, mut completion: Completion<Purpose>) {
        let payload = completion.take_payload();
        match *completion.purpose() {
            Purpose::Message => {
                if let Err(status) = completion.result() {
                    tracing::debug!(%status, "a message was not sent");
                }
            }
            Purpose::Probe { ref by, checksum } => {
                self.probed(by, checksum, completion.result(), &payload);
            }
            Purpose::Object { request } => {
                let buffer = payload.into_owned().map(|buffer| *buffer);
                self.transfers.completed(request, completion.result(), buffer);
            }
            Purpose::Sent { measurement } => {
                self.measurements.sent(measurement, &mut self.outbox);
                self.send_out();
            }
            Purpose::Received { from, measurement } => {
                let buffer = payload.into_owned();
                if let Some(out) = self.measurements.received(from, measurement, buffer) {
                    self.send_one(out);
                }
            }
            Purpose::Pinged { from, measurement } => self.pinged(from, measurement, payload),
            Purpose::Echoed { measurement } => self.echoed(measurement, payload),
            Purpose::Pebble { from, id } => {
                drop(payload);
                self.received_pebble(from, id, completion.result());
            }
        }
        drop(completion);
        self.ask_to_let_go();
    }

    #[inline(never)]
    fn failed(&mut self, failure: EndpointFailure) {
        self.lost(failure);
    }

    fn expects(&self) -> bool {
        !self.echoes.is_empty() || self.transfers.expecting()
    }

    fn measures(&self) -> Option<u32> {
        let looks = if self.unpinned.is_some() { PINNED_LOOKS } else { MEASURED_LOOKS };
        self.measurements.active().then_some(looks)
    }

    fn on_time(&mut self) {
        self.retry();
        if self.grown.is_some_and(|at| at <= Instant::now()) {
            self.tell_of_growth();
        }
    }

    fn next_time(&self) -> Option<Duration> {
        let grown = self.grown.map(|at| at.saturating_duration_since(Instant::now()));
        self.time_to_retry().into_iter().chain(grown).min()
    }
}

impl Owner {
    fn handle_scheduler(&mut self, message: ToWorker) {
        match message {
            // For the worker's runner.
            ToWorker::Work(_) => {}
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
                if let Some(device) = &self.device {
                    device.peer_lost(member.incarnation);
                }
                let cause = if left { "it left the cluster" } else { "its process ended" };
                self.drop_work_with(&member, cause);
                self.handle(Event::Lost(member));
            }
            ToWorker::Measure { id, measurement } => self.measure(id, measurement),
        }
    }

    /// A message from a proven peer.
    fn message(&mut self, sender: PeerKey, header: Header, arrival: Arrival) {
        let Header { kind, id, argument, .. } = header;
        match kind {
            Kind::Hello | Kind::Welcome | Kind::Met | Kind::Probe => {}
            Kind::Get => self.serve(sender, id, argument == 1, &arrival),
            Kind::Object => self.transfers.object(id, sender, arrival, checksum_of(argument)),
            Kind::Missing => self.transfers.missing(id, sender),
            Kind::Measure => {
                if let Some(measure) = arrival.bytes().and_then(Measure::decode) {
                    let device = self.device.clone();
                    self.aside(move || {
                        let room = measure::memory_to_receive(&measure, device.as_ref());
                        let mapped = measure::try_mapping(&measure, device.as_ref());
                        Command::RoomToReceive { id, from: sender, measure, room, mapped }
                    });
                }
            }
            Kind::Prepared | Kind::RoundDone => self.measured(id, sender, kind, argument),
            Kind::Pong => match self.echoes.remove(&id) {
                // The caller may have stopped waiting.
                Some((_, reply)) => drop(reply.send(Ok(()))),
                None if self.measurements.echo(id, arrival) => {
                    self.measured(id, sender, kind, argument);
                }
                None => {}
            },
            Kind::Stream => self.measurements.stream(sender, id, arrival),
            Kind::Ping if id & ECHO != 0 => {
                self.send(sender, Kind::Pong, id, 0, Payload::Empty);
            }
            Kind::Ping => {
                if let Some(out) = self.measurements.ping(sender, id, arrival) {
                    self.send_one(out);
                }
            }
            Kind::MeasureEnd => {
                self.measurements.finish(sender, id);
                self.unpin_when_idle();
            }
            Kind::LetGo => self.receive_pebble(sender, id, arrival),
        }
    }

    #[inline(never)]
    fn stranger(&mut self) {
        self.strangers += 1;
        // Logged at each power of two, so that a flood does not fill the log.
        if self.strangers.is_power_of_two() {
            tracing::warn!(messages = self.strangers, "messages from strangers are discarded");
        }
    }

    #[inline(never)]
    fn handle(&mut self, event: Event) {
        for action in self.core.handle(event) {
            self.act(action);
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Connect(member) => self.connect(member),
            Action::Disconnect(member) => {
                if let Some(link) = self.links.remove(&member.key()) {
                    self.peers_of_endpoints.remove(&link.endpoint.id());
                }
            }
            Action::Send { to, kind } => self.greet(&to, kind),
            Action::Proven(member) => {
                self.ask_early(&member);
                self.measure_early(&member);
            }
            Action::Reopened(member) => {
                self.drop_exchanges_with(&member, "it opened its connection anew");
            }
            Action::RetryLater(member) => {
                self.retries.push((Instant::now() + loss::RETRY_AFTER, member));
            }
            Action::Ready => {
                let lanes = self.lanes();
                let _ = self.reports.send(Report::Ready(lanes));
            }
            Action::Settled if self.addresses.len() < ALL_PAIRS => self.tell_of_growth(),
            Action::Settled => {
                self.grown.get_or_insert_with(|| Instant::now() + GROWN_AFTER);
            }
        }
    }

    fn tell_of_growth(&mut self) {
        self.grown = None;
        let lanes = self.lanes();
        let _ = self.reports.send(Report::Grown(lanes));
    }

    fn connect(&mut self, member: Member) {
        let Some(address) = self.addresses.get(&member) else { return };
        match self.worker.connect(address) {
            Ok(endpoint) => {
                let (key, token) = (member.key(), self.core.token_to(&member));
                self.peers_of_endpoints.insert(endpoint.id(), key);
                if let Some(device) = &self.device {
                    device.peer_found(member.incarnation, &member.name);
                }
                let is_pebbled = Cell::new(self.device.is_none());
                self.links.insert(key, Link { member, endpoint, token, is_pebbled });
            }
            // This thread ends.
            Err(ucx::Error::Exhausted { .. }) => {}
            Err(error) => {
                let cause = error.to_string();
                let _ = self.reports.send(Report::PeerFailed { member: member.clone(), cause });
                self.handle(Event::Broken(member));
            }
        }
    }

    /// The peer with this name, unless its connection is broken. Opens the connection if nobody
    /// has.
    fn connected(&mut self, name: &str) -> Option<Member> {
        let member = self.core.named(name)?;
        if !self.links.contains_key(&member.key()) {
            self.handle(Event::Wanted(member.clone()));
        }
        self.links.contains_key(&member.key()).then_some(member)
    }

    fn send(&self, to: PeerKey, kind: Kind, id: u64, argument: u64, payload: Payload) {
        let Some(Link { member, endpoint, token, is_pebbled }) = self.links.get(&to) else {
            return;
        };
        // What may let the peer map this worker's memory.
        let is_first = matches!(kind, Kind::Get | Kind::Object | Kind::Measure | Kind::Prepared);
        if is_first && !is_pebbled.replace(true) {
            self.send_pebble(to, letting_go::FIRST);
        }
        let header = Header { kind, token: *token, id, argument }.encode();
        payload.buffer().inspect(|buffer| buffer.exchanged_with(to.0, Way::Sent));
        let protocol = match kind {
            Kind::Probe | Kind::LetGo => Protocol::Rendezvous,
            Kind::Object | Kind::Stream => Protocol::Auto,
            // Read where they arrive.
            _ => Protocol::Eager,
        };
        let purpose = match kind {
            Kind::Stream => Purpose::Sent { measurement: id },
            _ => Purpose::Message,
        };
        if let Err(error) = endpoint.send(&header, payload, protocol, purpose) {
            tracing::error!(peer = member.name, "{error}");
        }
    }

    fn lanes(&self) -> Vec<PeerLanes> {
        let lanes = |link: &Link| PeerLanes {
            peer: link.member.name.clone(),
            lanes: link.endpoint.lanes().unwrap_or_default(),
        };
        let mut peers: Vec<PeerLanes> = self.links.values().map(lanes).collect();
        peers.sort_by(|a, b| a.peer.cmp(&b.peer));
        peers
    }
}
