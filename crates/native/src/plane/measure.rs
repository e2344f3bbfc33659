//! Measures the link between two workers, with the same messages that carry objects.
//!
//! The sender streams rounds of messages with a window in flight, or plays ping-pong; the receiver
//! counts. Both threads poll during a measurement, so that it shows the link and not the time to
//! wake up.
//!
//! *Invariant:* every measurement ends with one result, whatever happens to the peer.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use super::transfer::{Arrival, Purpose, receive_from};
use cuda_cluster_data::cuda::Device;
use cuda_cluster_data::ucx::{Buffer, Payload};
use cuda_cluster_wire::native::{Mapped, Measurement, Protocol, Quantity, Samples};
use cuda_cluster_wire::peer::{Kind, Measure, Member, MemoryKind, PeerKey};

/// Messages of a stream that are in flight at the same time.
const WINDOW: u32 = 32;

/// Receives that may overlap, and their bytes: few enough that a core's caches hold the memory of
/// sender and receiver, as if all receives went to one place; and twice as many as UCX copies in
/// one go, so that there is always something to copy.
const OVERLAPPING: u64 = 8;
const OVERLAPPING_BYTES: u64 = 512 << 10;

/// More memory than the pages that the kernel lets wait, in bytes.
const WAITING_PAGES: u64 = 256 << 10;

/// Longest message that is measured, in bytes.
const SIZE_LIMIT: u64 = 8 << 30;

/// Most messages and rounds of one measurement.
const COUNT_LIMIT: u32 = 10_000_000;

/// A message for the thread's owner to send.
pub(super) struct Out {
    pub(super) to: PeerKey,
    pub(super) kind: Kind,
    pub(super) id: u64,
    pub(super) argument: u64,
    pub(super) payload: Payload,
}

/// A measurement's end.
pub(super) struct Ended {
    pub(super) id: u64,
    pub(super) peer: Option<PeerKey>,
    /// The length of its messages, if they were sent from device memory.
    pub(super) device_bytes: Option<u64>,
    pub(super) mapped: Mapped,
    pub(super) result: Result<Vec<Duration>, String>,
}

impl Ended {
    /// A measurement that did not begin.
    pub(super) fn early(id: u64, reason: String) -> Self {
        let (peer, device_bytes, mapped) = (None, None, Mapped::NotTried);
        Self { id, peer, device_bytes, mapped, result: Err(reason) }
    }
}

/// The answer to a request to measure: what the receiving side has prepared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Prepared {
    NoRoom,
    /// There is room, and nothing to map.
    Room,
    /// There is room, and the sender's memory can be read.
    Readable,
    /// There is room, but the driver refused to map the sender's memory, with this code.
    Refused(i32),
}

impl Prepared {
    fn encode(self) -> u64 {
        match self {
            Prepared::NoRoom => 0,
            Prepared::Room => 1,
            Prepared::Readable => 2,
            Prepared::Refused(code) => 3 | (u64::from(code.cast_unsigned()) << 8),
        }
    }

    pub(super) fn decode(argument: u64) -> Self {
        match argument & 0xff {
            0 => Prepared::NoRoom,
            2 => Prepared::Readable,
            3 => Prepared::Refused(i32::try_from(argument >> 8).unwrap_or(-1)),
            _ => Prepared::Room,
        }
    }
}

/// Memory for the receiving side.
pub(super) struct Room {
    free: Vec<Buffer>,
    /// As long as a message.
    answer: Buffer,
}

/// Memory for the sending side.
pub(super) struct RoomToSend {
    buffer: Buffer,
    landing: Option<Buffer>,
}

/// The sending side of a measurement.
struct Sending {
    to: PeerKey,
    measurement: Measurement,
    buffer: Arc<Buffer>,
    /// Where echoes go in device memory; in host memory they stay where UCX put them.
    landing: Option<Box<Buffer>>,
    /// Messages of this round that have not been sent.
    left: u32,
    in_flight: u32,
    rounds: Vec<Duration>,
    round_began: Instant,
    mapped: Mapped,
}

/// The receiving side of a measurement.
struct Receiving {
    measure: Measure,
    /// Free memory, one buffer for each receive that may overlap with others.
    #[expect(clippy::vec_box, reason = "they move about with every message")]
    free: Vec<Box<Buffer>>,
    /// What pings are answered with, in the kind of memory that is measured.
    answer: Arc<Buffer>,
    waiting: VecDeque<Arrival>,
    received: u32,
}

/// The measurements that this worker takes part in.
#[derive(Default)]
pub(super) struct Measurements {
    sending: FxHashMap<u64, Sending>,
    receiving: FxHashMap<(PeerKey, u64), Receiving>,
}

impl Measurements {
    /// Whether the thread must poll.
    pub(super) fn active(&self) -> bool {
        !self.sending.is_empty() || !self.receiving.is_empty()
    }

    /// Begins a measurement with this memory; returns the request to the peer.
    pub(super) fn begin(
        &mut self,
        id: u64,
        to: PeerKey,
        measurement: Measurement,
        RoomToSend { buffer, landing }: RoomToSend,
    ) -> Out {
        let (handle, mapped) = match &buffer {
            Buffer::Device(buffer) => match buffer.ipc_handle() {
                Ok(handle) => (handle, Mapped::NotTried),
                Err(error) => (None, Mapped::Refused(error.to_string())),
            },
            _ => (None, Mapped::NotTried),
        };
        let ask = Measure {
            size: measurement.size,
            messages: measurement.messages,
            memory: measurement.memory,
            cpu: measurement.cpus.map(|(_, receiver)| receiver),
            handle,
        };
        let out =
            Out { to, kind: Kind::Measure, id, argument: 0, payload: Payload::from(ask.encode()) };
        let sending = Sending {
            to,
            buffer: Arc::new(buffer),
            landing: landing.map(Box::new),
            left: 0,
            in_flight: 0,
            rounds: Vec::new(),
            round_began: Instant::now(),
            mapped,
            measurement,
        };
        self.sending.insert(id, sending);
        out
    }

    /// Prepares for a peer's measurement, if there is memory for it; returns the answer.
    pub(super) fn prepare(
        &mut self,
        from: PeerKey,
        id: u64,
        measure: Measure,
        memory: Option<Room>,
        mapped: Option<Result<(), i32>>,
    ) -> Out {
        let prepared = match (&memory, mapped) {
            (None, _) => Prepared::NoRoom,
            (Some(_), None) => Prepared::Room,
            (Some(_), Some(Ok(()))) => Prepared::Readable,
            (Some(_), Some(Err(code))) => Prepared::Refused(code),
        };
        if let Some(Room { free, answer }) = memory {
            let free = free.into_iter().map(Box::new).collect();
            let (waiting, answer) = (VecDeque::new(), Arc::new(answer));
            let receiving = Receiving { measure, free, answer, waiting, received: 0 };
            self.receiving.insert((from, id), receiving);
        }
        Out {
            to: from,
            kind: Kind::Prepared,
            id,
            argument: prepared.encode(),
            payload: Payload::Empty,
        }
    }

    /// Handles an answer of the receiving side; returns what to send, or the end.
    pub(super) fn answered(
        &mut self,
        id: u64,
        by: PeerKey,
        kind: Kind,
        argument: u64,
        words: impl Fn(i32) -> String,
        out: &mut Vec<Out>,
    ) -> Option<Ended> {
        let sending = self.sending.get_mut(&id).filter(|sending| sending.to == by)?;
        if kind == Kind::Prepared {
            match Prepared::decode(argument) {
                Prepared::NoRoom => {
                    let reason = format!("{} has no room for it", sending.measurement.to);
                    return self.end(id, Err(reason));
                }
                Prepared::Room => {}
                Prepared::Readable => sending.mapped = Mapped::Readable,
                Prepared::Refused(code) => sending.mapped = Mapped::Refused(words(code)),
            }
            sending.round_began = Instant::now();
        } else {
            let now = Instant::now();
            sending.rounds.push(now - sending.round_began);
            sending.round_began = now;
        }
        let Measurement { warmup, rounds, what, messages, .. } = sending.measurement;
        let all = u64::from(warmup) + u64::from(rounds);
        if sending.rounds.len() as u64 == all {
            out.push(sending.message(id, Kind::MeasureEnd, Payload::Empty));
            let counted = sending.rounds.split_off(warmup as usize);
            return self.end(id, Ok(counted));
        }
        match what {
            Quantity::Latency => {
                let payload = sending.payload();
                out.push(sending.message(id, Kind::Ping, payload));
            }
            Quantity::Bandwidth => {
                sending.left = messages;
                sending.fill_window(id, out);
            }
        }
        None
    }

    /// A message of a stream was sent, and its memory may be sent again.
    pub(super) fn sent(&mut self, id: u64, out: &mut Vec<Out>) {
        if let Some(sending) = self.sending.get_mut(&id) {
            sending.in_flight -= 1;
            sending.fill_window(id, out);
        }
    }

    /// A message of a stream was received; returns what to send if it was the round's last.
    pub(super) fn received(
        &mut self,
        from: PeerKey,
        id: u64,
        buffer: Option<Box<Buffer>>,
    ) -> Option<Out> {
        let receiving = self.receiving.get_mut(&(from, id))?;
        if let Some(buffer) = buffer {
            match receiving.waiting.pop_front() {
                Some(arrival) => receive(arrival, buffer, from, id),
                None => receiving.free.push(buffer),
            }
        }
        receiving.received += 1;
        let round_done = receiving.received == receiving.measure.messages;
        if round_done {
            receiving.received = 0;
        }
        let payload = Payload::Empty;
        round_done.then_some(Out { to: from, kind: Kind::RoundDone, id, argument: 0, payload })
    }

    /// Handles a message of a stream.
    pub(super) fn stream(&mut self, from: PeerKey, id: u64, arrival: Arrival) {
        let receiving = self.receiving.get_mut(&(from, id));
        let fits = |receiving: &&mut Receiving| arrival.len() as u64 <= receiving.measure.size;
        let Some(receiving) = receiving.filter(fits) else { return };
        match receiving.free.pop() {
            Some(buffer) => receive(arrival, buffer, from, id),
            None => receiving.waiting.push_back(arrival),
        }
    }

    /// Handles a ping. Its bytes must be in the memory that is measured before it is answered; for
    /// host memory that may be where UCX put them.
    pub(super) fn ping(&mut self, from: PeerKey, id: u64, arrival: Arrival) -> Option<Out> {
        let receiving = self.receiving.get_mut(&(from, id))?;
        if arrival.len() as u64 != receiving.measure.size {
            return None;
        }
        if receiving.measure.memory == MemoryKind::Device && !arrival.is_empty() {
            let buffer = receiving.free.pop()?;
            let _ = receive_from(arrival, buffer, from, Purpose::Pinged { from, measurement: id });
            return None;
        }
        // The sender keeps the memory until it gets an answer.
        arrival.bytes()?;
        self.pong(from, id)
    }

    /// A ping has arrived in device memory.
    pub(super) fn pinged(
        &mut self,
        from: PeerKey,
        id: u64,
        buffer: Option<Box<Buffer>>,
    ) -> Option<Out> {
        self.receiving.get_mut(&(from, id))?.free.extend(buffer);
        self.pong(from, id)
    }

    fn pong(&self, from: PeerKey, id: u64) -> Option<Out> {
        let answer = &self.receiving.get(&(from, id))?.answer;
        let payload = match answer.len() {
            0 => Payload::Empty,
            _ => Payload::Shared(Arc::clone(answer)),
        };
        Some(Out { to: from, kind: Kind::Pong, id, argument: 0, payload })
    }

    /// Handles an echo; returns whether it has arrived, or must first be moved to device memory.
    pub(super) fn echo(&mut self, id: u64, arrival: Arrival) -> bool {
        let landing = |sending: &mut Sending| Some((sending.landing.take()?, sending.to));
        let Some((buffer, from)) = self.sending.get_mut(&id).and_then(landing) else { return true };
        let _ = receive_from(arrival, buffer, from, Purpose::Echoed { measurement: id });
        false
    }

    /// An echo has arrived in device memory; returns its sender.
    pub(super) fn echoed(&mut self, id: u64, buffer: Option<Box<Buffer>>) -> Option<PeerKey> {
        let sending = self.sending.get_mut(&id)?;
        sending.landing = buffer;
        Some(sending.to)
    }

    /// The sender has finished.
    pub(super) fn finish(&mut self, from: PeerKey, id: u64) {
        self.receiving.remove(&(from, id));
    }

    /// Ends every measurement with a peer that is gone.
    pub(super) fn lost(&mut self, peer: &Member, cause: &str) -> Vec<Ended> {
        let key = peer.key();
        self.receiving.retain(|(from, _), _| *from != key);
        let of_peer = |(id, sending): (&u64, &Sending)| (sending.to == key).then_some(*id);
        let ids: Vec<u64> = self.sending.iter().filter_map(of_peer).collect();
        ids.into_iter()
            .filter_map(|id| self.end(id, Err(format!("{} was lost: {cause}", peer.name))))
            .collect()
    }

    fn end(&mut self, id: u64, result: Result<Vec<Duration>, String>) -> Option<Ended> {
        let sending = self.sending.remove(&id)?;
        let device = sending.measurement.memory == MemoryKind::Device;
        let device_bytes = device.then_some(sending.measurement.size);
        Some(Ended { id, peer: Some(sending.to), device_bytes, mapped: sending.mapped, result })
    }
}

/// Memory for the sending side of a measurement. Slow for large amounts.
pub(super) fn memory_to_send(
    measurement: &Measurement,
    device: Option<&Device>,
) -> Result<RoomToSend, String> {
    let counts = [measurement.messages, measurement.rounds];
    if counts.iter().any(|count| !(1..=COUNT_LIMIT).contains(count)) {
        return Err("the measurement is beyond its limits".to_owned());
    }
    let buffer = memory(measurement.memory, measurement.size, device)?;
    // The kernel keeps new pages waiting, up to 31 for each CPU, before it puts them on its lists
    // (`folio_batch`, mm/swap.c), and copying from one that waits takes a tenth longer. A message
    // is copied once, but a measured one over and over; so let other pages wait.
    drop(memory(MemoryKind::Host, WAITING_PAGES, None));
    let lands = measurement.memory == MemoryKind::Device
        && matches!(measurement.what, Quantity::Latency)
        && measurement.size > 0;
    let landing = lands.then(|| memory(measurement.memory, measurement.size, device));
    Ok(RoomToSend { buffer, landing: landing.transpose()? })
}

/// Memory for the receiving side of a measurement. Slow for large amounts.
pub(super) fn memory_to_receive(measure: &Measure, device: Option<&Device>) -> Option<Room> {
    let overlapping = (OVERLAPPING_BYTES / measure.size.max(1)).clamp(1, OVERLAPPING);
    let piece = || memory(measure.memory, measure.size, device).ok();
    let free = (0..overlapping).map(|_| piece()).collect::<Option<_>>()?;
    Some(Room { free, answer: piece()? })
}

/// Whether the sender's device memory can be mapped here; `None` if there is nothing to map.
pub(super) fn try_mapping(measure: &Measure, device: Option<&Device>) -> Option<Result<(), i32>> {
    let handle = measure.handle.as_ref()?;
    device.map(|device| device.try_foreign(handle))
}

fn memory(kind: MemoryKind, size: u64, device: Option<&Device>) -> Result<Buffer, String> {
    let bytes = usize::try_from(size).ok().filter(|_| size <= SIZE_LIMIT);
    let bytes = bytes.ok_or_else(|| "the messages are too long to measure".to_owned())?;
    let mut buffer = match (kind, device) {
        (MemoryKind::Host, _) => {
            Buffer::undefined(bytes).ok_or_else(|| "out of memory".to_owned())?
        }
        (MemoryKind::Device, Some(device)) => {
            Buffer::Device(device.allocate(bytes).map_err(|error| error.to_string())?)
        }
        (MemoryKind::Device, None) => return Err("this worker has no device memory".to_owned()),
    };
    buffer.touch();
    Ok(buffer)
}

/// Receives a message of a stream into memory of its size.
fn receive(arrival: Arrival, buffer: Box<Buffer>, from: PeerKey, measurement: u64) {
    let _ = receive_from(arrival, buffer, from, Purpose::Received { from, measurement });
}

impl Sending {
    fn message(&self, id: u64, kind: Kind, payload: Payload) -> Out {
        Out { to: self.to, kind, id, argument: 0, payload }
    }

    fn payload(&self) -> Payload {
        if self.buffer.is_empty() {
            Payload::Empty
        } else {
            Payload::Shared(Arc::clone(&self.buffer))
        }
    }

    fn fill_window(&mut self, id: u64, out: &mut Vec<Out>) {
        while self.left > 0 && self.in_flight < WINDOW {
            self.left -= 1;
            self.in_flight += 1;
            out.push(self.message(id, Kind::Stream, self.payload()));
        }
    }
}

/// The result of a measurement.
pub(super) fn samples(
    result: Result<Vec<Duration>, String>,
    lanes: Vec<String>,
    protocol: Option<Protocol>,
    mapped: Mapped,
) -> Result<Samples, String> {
    let nanoseconds = |round: Duration| u64::try_from(round.as_nanos()).unwrap_or(u64::MAX);
    let rounds_ns = result?.into_iter().map(nanoseconds).collect();
    Ok(Samples { rounds_ns, lanes, protocol, mapped })
}
