//! Objects by name: what this worker offers, and what it is fetching.
//!
//! Does not call UCX itself; the thread's owner carries out what is decided here, and reports the
//! outcome.
//!
//! The receiver sets the pace. An object is announced by its rendezvous message before its bytes
//! move; while too many bytes are in flight to this worker, the announcement waits.
//!
//! *Invariant:* every request is answered once, unless its caller has cancelled it; `receiving`
//! holds the bytes of exactly those receives that UCX has not completed.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use rustc_hash::FxHashMap;
use tokio::sync::oneshot;

use cuda_cluster_data::cuda::{self, Device, Way};
use cuda_cluster_data::ucx::{self, Buffer, Status};
use cuda_cluster_wire::peer::{Member, PeerKey};

/// Why an object could not be fetched.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum TransferError {
    /// No such peer is connected.
    #[error("there is no connection to {peer}")]
    NoPeer {
        /// The name asked for.
        peer: String,
    },
    /// The peer went away before the object arrived.
    #[error("{peer} was lost: {cause}")]
    PeerLost {
        peer: String,
        /// What is known about the reason.
        cause: String,
    },
    /// The peer has no such object.
    #[error("{peer} has no object {name:?}")]
    Missing { peer: String, name: String },
    /// The name is too long.
    #[error("an object's name of {bytes} bytes is too long")]
    Name { bytes: usize },
    /// There is no room for the object.
    #[error("no memory for the object's {bytes} bytes")]
    Memory {
        /// The object's length.
        bytes: usize,
        /// The device's error, if the object was to go to a device.
        #[source]
        source: Option<cuda::Error>,
    },
    /// The checksum of the bytes that arrived differs from the sender's.
    #[error("the checksum of {name:?} from {peer} is wrong")]
    Checksum { peer: String, name: String },
    /// A checksum was asked for, and the sender could not compute it.
    #[error("there is no checksum of {name:?} from {peer} to compare with")]
    Unchecked { peer: String, name: String },
    /// UCX failed.
    #[error("the transfer from {peer} failed: {status}")]
    Failed {
        peer: String,
        /// UCX's error.
        status: Status,
    },
    /// The data plane has ended.
    #[error("the data plane has ended")]
    Ended,
}

/// Where a fetched object goes.
#[derive(Debug, Default)]
pub enum Target {
    /// New host memory.
    #[default]
    Host,
    /// New memory of this worker's device.
    Device,
    /// A buffer of the caller's, at least as long as the object, which goes to its beginning.
    Into(Buffer),
}

/// A fetched object.
#[derive(Debug)]
pub struct Fetched {
    /// The memory, with the object at its beginning.
    pub buffer: Buffer,
    /// The object's length, in bytes.
    pub length: usize,
}

/// What an operation of the UCX thread is for.
pub(super) enum Purpose {
    /// A message whose completion matters to no caller.
    Message,
    /// Receives a probe, whose bytes must have this checksum.
    Probe { by: Box<Member>, checksum: u64 },
    /// Receives a requested object.
    Object { request: u64 },
    /// Sends a message of a measured stream.
    Sent { measurement: u64 },
    /// Receives such a message.
    Received { from: PeerKey, measurement: u64 },
    /// Receives a ping into device memory.
    Pinged { from: PeerKey, measurement: u64 },
    /// Receives the echo of a ping into device memory.
    Echoed { measurement: u64 },
    /// Receives a pebble.
    Pebble { from: PeerKey, id: u64 },
}

pub(super) type Arrival = ucx::Arrival<Purpose>;

/// Receives a peer's message into a buffer, which the peer may map if it is device memory.
pub(super) fn receive_from(
    arrival: Arrival,
    buffer: impl Into<Box<Buffer>>,
    from: PeerKey,
    purpose: Purpose,
) -> Result<(), ucx::Error> {
    let buffer = buffer.into();
    buffer.exchanged_with(from.0, Way::Received);
    arrival.receive(buffer, purpose)
}

/// Bytes that are read at once for a checksum.
const CHECKSUM_CHUNK: usize = 1 << 20;

/// The caller that waits for an object.
type Reply = oneshot::Sender<Result<Arrived, TransferError>>;

/// A request for an object.
pub(super) struct Request {
    pub(super) id: u64,
    pub(super) peer: String,
    pub(super) name: String,
    pub(super) target: Target,
    pub(super) checked: bool,
    pub(super) reply: Reply,
}

/// An object that has arrived, its checksum not yet verified.
pub(super) struct Arrived {
    buffer: Buffer,
    length: usize,
    checksum: Option<u32>,
}

impl Arrived {
    /// Compares what arrived with the sender's checksum, if that was asked for.
    pub(super) fn verify(self, peer: &str, name: &str) -> Result<Fetched, TransferError> {
        let Arrived { buffer, length, checksum } = self;
        let (peer, name) = (peer.to_owned(), name.to_owned());
        let Some(expected) = checksum else { return Ok(Fetched { buffer, length }) };
        match checksum_of(&buffer, length) {
            Some(found) if found == expected => Ok(Fetched { buffer, length }),
            Some(_) => Err(TransferError::Checksum { peer, name }),
            None => Err(TransferError::Unchecked { peer, name }),
        }
    }
}

/// The checksum to compare an object with when it has arrived; `Err` if there should be one and
/// the sender has none.
fn proof(checked: bool, announced: Option<u32>) -> Result<Option<u32>, ()> {
    match (checked, announced) {
        (false, _) => Ok(None),
        (true, Some(checksum)) => Ok(Some(checksum)),
        (true, None) => Err(()),
    }
}

/// The CRC-32C of a buffer's beginning; `None` if its device cannot be read.
pub(super) fn checksum_of(buffer: &Buffer, length: usize) -> Option<u32> {
    if let Some(bytes) = buffer.host() {
        return bytes.get(..length).map(crc32c::crc32c);
    }
    let mut chunk = vec![0; CHECKSUM_CHUNK.min(length)];
    let (mut checksum, mut offset) = (0, 0);
    while offset < length {
        let bytes = chunk.len().min(length - offset);
        buffer.read(offset, &mut chunk[..bytes]).ok()?;
        checksum = crc32c::crc32c_append(checksum, &chunk[..bytes]);
        offset += bytes;
    }
    Some(checksum)
}

/// An object that this worker offers.
pub(super) struct Offered {
    pub(super) buffer: Arc<Buffer>,
    pub(super) checksum: Option<u32>,
    /// Requests that wait for the checksum, with their peers.
    pub(super) waiting: Vec<(PeerKey, u64)>,
}

/// A request whose object has not arrived.
struct Fetch {
    peer: PeerKey,
    request: Request,
}

/// A receive that has not ended.
struct Receiving {
    peer: PeerKey,
    peer_name: String,
    length: usize,
    checksum: Option<u32>,
    /// `None` once its caller has cancelled it.
    reply: Option<Reply>,
}

/// An announced object that waits until others have arrived.
struct Announced {
    id: u64,
    peer: PeerKey,
    arrival: Arrival,
    checksum: Option<u32>,
}

/// The transfers of one worker.
pub(super) struct Transfers {
    pub(super) offered: HashMap<String, Offered>,
    fetches: FxHashMap<u64, Fetch>,
    announced: VecDeque<Announced>,
    /// By the number of the request.
    receiving: FxHashMap<u64, Receiving>,
    bytes: u64,
    limit: u64,
    device: Option<Device>,
}

impl Request {
    /// Tells the caller why it gets no object, once the memory for it is free.
    pub(super) fn refuse(self, error: TransferError) {
        drop(self.target);
        let _ = self.reply.send(Err(error));
    }
}

impl Transfers {
    pub(super) fn new(limit: u64, device: Option<Device>) -> Self {
        Self {
            offered: HashMap::new(),
            fetches: FxHashMap::default(),
            announced: VecDeque::new(),
            receiving: FxHashMap::default(),
            bytes: 0,
            limit,
            device,
        }
    }

    /// Whether a peer owes an object.
    pub(super) fn expecting(&self) -> bool {
        !self.fetches.is_empty()
    }

    /// Remembers a request that has been sent to a peer.
    pub(super) fn requested(&mut self, request: Request, peer: PeerKey) {
        self.fetches.insert(request.id, Fetch { peer, request });
    }

    /// Cancels a request. A receive that has begun continues, into memory that is then dropped.
    pub(super) fn cancel(&mut self, id: u64) {
        self.fetches.remove(&id);
        self.announced.retain(|announced| announced.id != id);
        if let Some(receiving) = self.receiving.get_mut(&id) {
            receiving.reply = None;
        }
    }

    /// Handles an object that a peer sends. If nobody waits for it, its arrival is dropped, which
    /// tells the sender that it is done.
    #[inline(never)]
    pub(super) fn object(
        &mut self,
        id: u64,
        peer: PeerKey,
        arrival: Arrival,
        checksum: Option<u32>,
    ) {
        // The reply to a cancelled request is dropped, which also frees the object at the sender.
        if self.fetches.get(&id).is_some_and(|fetch| fetch.peer == peer) {
            let at_hand = arrival.bytes().is_some();
            let announced = Announced { id, peer, arrival, checksum };
            if at_hand {
                // It is small, and in UCX's own memory, which UCX needs back.
                self.start(announced);
            } else {
                self.announced.push_back(announced);
                self.receive();
            }
        }
    }

    /// Handles a peer's answer that it has no such object.
    pub(super) fn missing(&mut self, id: u64, peer: PeerKey) {
        if self.fetches.get(&id).is_none_or(|fetch| fetch.peer != peer) {
            return;
        }
        if let Some(Fetch { request, .. }) = self.fetches.remove(&id) {
            let (peer, name) = (request.peer.clone(), request.name.clone());
            request.refuse(TransferError::Missing { peer, name });
        }
    }

    /// Starts the receives that the limit allows, in the order of their announcement.
    fn receive(&mut self) {
        while let Some(next) = self.announced.front() {
            let bytes = next.arrival.len() as u64;
            if self.bytes > 0 && self.bytes.saturating_add(bytes) > self.limit {
                return;
            }
            if let Some(next) = self.announced.pop_front() {
                self.start(next);
            }
        }
    }

    fn start(&mut self, announced: Announced) {
        let Announced { id, peer, arrival, checksum } = announced;
        let Some(fetch) = self.fetches.remove(&id) else { return };
        let length = arrival.len();
        let Request { peer: peer_name, name, target, checked, reply, .. } = fetch.request;
        let started = match (proof(checked, checksum), self.room(target, length)) {
            (Ok(checksum), Ok(buffer)) => {
                receive_from(arrival, buffer, peer, Purpose::Object { request: id })
                    .map(|()| checksum)
                    .map_err(|_| TransferError::Memory { bytes: length, source: None })
            }
            (Err(()), _) => Err(TransferError::Unchecked { peer: peer_name.clone(), name }),
            (_, Err(error)) => Err(error),
        };
        match started {
            Ok(checksum) => {
                self.bytes += length as u64;
                let reply = Some(reply);
                self.receiving.insert(id, Receiving { peer, peer_name, length, checksum, reply });
            }
            // A caller that is gone needs no answer.
            Err(error) => drop(reply.send(Err(error))),
        }
    }

    fn room(&self, target: Target, bytes: usize) -> Result<Buffer, TransferError> {
        match target {
            Target::Into(buffer) if buffer.len() >= bytes => Ok(buffer),
            Target::Into(_) => Err(TransferError::Memory { bytes, source: None }),
            Target::Host => {
                Buffer::undefined(bytes).ok_or(TransferError::Memory { bytes, source: None })
            }
            Target::Device => match &self.device {
                Some(device) => device
                    .allocate(bytes)
                    .map(Buffer::Device)
                    .map_err(|error| TransferError::Memory { bytes, source: Some(error) }),
                None => Err(TransferError::Memory { bytes, source: None }),
            },
        }
    }

    /// Handles the completion of a receive.
    #[inline(never)]
    pub(super) fn completed(
        &mut self,
        request: u64,
        result: Result<(), Status>,
        buffer: Option<Buffer>,
    ) {
        let Some(receiving) = self.receiving.remove(&request) else { return };
        let Receiving { peer_name, length, checksum, reply, .. } = receiving;
        self.bytes -= length as u64;
        // A caller that is told of a failure may rely on the memory for the object being free
        // again.
        let answer = match (result, buffer) {
            (Ok(()), Some(buffer)) => Ok(Arrived { buffer, length, checksum }),
            (Ok(()), None) => Err(TransferError::Ended),
            (Err(status), buffer) => {
                drop(buffer);
                Err(TransferError::Failed { peer: peer_name, status })
            }
        };
        if let Some(reply) = reply {
            let _ = reply.send(answer);
        }
        self.receive();
    }

    /// Fails everything that was to come from a peer. Receives that have not ended are answered
    /// now; their memory is kept until UCX returns it.
    pub(super) fn lost(&mut self, peer: &Member, cause: &str) {
        let key = peer.key();
        let error = || TransferError::PeerLost { peer: peer.name.clone(), cause: cause.to_owned() };
        for (_, fetch) in self.fetches.extract_if(|_, fetch| fetch.peer == key) {
            fetch.request.refuse(error());
        }
        self.announced.retain(|announced| announced.peer != key);
        for receiving in self.receiving.values_mut().filter(|one| one.peer == key) {
            if let Some(reply) = receiving.reply.take() {
                let _ = reply.send(Err(error()));
            }
        }
        for offered in self.offered.values_mut() {
            offered.waiting.retain(|(waiting, _)| *waiting != key);
        }
        self.receive();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checksum_that_was_asked_for_and_is_not_there_is_an_error() {
        assert_eq!(proof(true, None), Err(()));
        assert_eq!(proof(true, Some(7)), Ok(Some(7)));
        assert_eq!(proof(false, None), Ok(None));
        assert_eq!(proof(false, Some(7)), Ok(None));
    }

    #[test]
    fn what_arrived_is_given_out_only_as_it_was_sent() {
        let bytes = vec![1u8, 2, 3, 4];
        let arrived = |checksum| Arrived {
            buffer: bytes.clone().into(),
            length: bytes.len(),
            checksum: Some(checksum),
        };
        let right = crc32c::crc32c(&bytes);
        assert!(arrived(right).verify("gpu1", "x").is_ok());
        let error = arrived(right ^ 1).verify("gpu1", "x").expect_err("another checksum");
        assert!(matches!(error, TransferError::Checksum { .. }), "{error}");
    }
}
