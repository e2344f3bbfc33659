//! What the native engine's scheduler and workers tell each other over the scheduler's socket.
//!
//! A frame is a length of four bytes, little-endian, and a postcard message. A connection opens
//! with [`Challenge`], [`Answer`] and [`Welcome`], by which both sides prove that they know the
//! cluster's secret; after that the worker sends [`ToScheduler`] and the scheduler [`ToWorker`].
//!
//! *Invariant:* a frame is at most [`FRAME_LIMIT`] bytes, and at most [`GREETING_LIMIT`] before the
//! proofs.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::peer::MemoryKind;
use super::secret::{LENGTH, Proof, Secret};
use super::status::PeerLanes;
use super::tasks::{News, Order, Report, Request};

/// The version of this conversation.
pub const VERSION: u32 = 3;

/// Longest frame, in bytes.
pub const FRAME_LIMIT: usize = 8 << 20;

/// Most requests in one frame of a client.
pub const REQUESTS_LIMIT: usize = 1 << 16;

/// Longest frame before both sides have proven themselves, in bytes.
pub const GREETING_LIMIT: usize = 256;

/// Why a frame cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// It is too long.
    #[error("a frame of {bytes} bytes is longer than {limit}")]
    TooLong {
        /// Its length.
        bytes: usize,
        /// The longest allowed.
        limit: usize,
    },
    /// It is not the expected message.
    #[error("a frame is not the expected message")]
    Malformed {
        /// postcard's words.
        #[source]
        source: postcard::Error,
    },
}

/// Writes a frame.
///
/// # Errors
/// If the message is longer than [`FRAME_LIMIT`].
pub fn encode(message: &impl Serialize) -> Result<Vec<u8>, FrameError> {
    let mut frame = vec![0; 4];
    frame =
        postcard::to_extend(message, frame).map_err(|source| FrameError::Malformed { source })?;
    let bytes = frame.len() - 4;
    let too_long = || FrameError::TooLong { bytes, limit: FRAME_LIMIT };
    let length = u32::try_from(bytes).map_err(|_| too_long())?;
    if bytes > FRAME_LIMIT {
        return Err(too_long());
    }
    frame[..4].copy_from_slice(&length.to_le_bytes());
    Ok(frame)
}

/// Reads a frame's length.
///
/// # Errors
/// If it is beyond `limit`.
pub fn length(prefix: [u8; 4], limit: usize) -> Result<usize, FrameError> {
    let bytes = usize::try_from(u32::from_le_bytes(prefix)).unwrap_or(usize::MAX);
    if bytes > limit { Err(FrameError::TooLong { bytes, limit }) } else { Ok(bytes) }
}

/// Reads a frame's message.
///
/// # Errors
/// If it is another message, or has bytes left over.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, FrameError> {
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Ok(message),
        Ok(_) => Err(FrameError::Malformed { source: postcard::Error::DeserializeBadEncoding }),
        Err(source) => Err(FrameError::Malformed { source }),
    }
}

/// The scheduler's first word.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Challenge {
    /// [`VERSION`].
    pub version: u32,
    /// Random.
    pub nonce: [u8; LENGTH],
}

/// The worker's reply.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// Random.
    pub nonce: [u8; LENGTH],
    /// Over both nonces.
    pub proof: Proof,
}

/// The scheduler's reply to a good answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// Over both nonces, for another purpose.
    pub proof: Proof,
}

/// What the connecting side proves.
pub fn answer_proof(secret: &Secret, challenge: &Challenge, nonce: &[u8; LENGTH]) -> Proof {
    secret.prove("to the scheduler", &[&challenge.nonce, nonce])
}

/// What the scheduler proves.
pub fn welcome_proof(secret: &Secret, challenge: &Challenge, nonce: &[u8; LENGTH]) -> Proof {
    secret.prove("from the scheduler", &[&challenge.nonce, nonce])
}

/// A worker process: a name may be used again by its successor, an incarnation may not.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Member {
    /// `gpu3`.
    pub name: String,
    /// Random, drawn when the process starts.
    pub incarnation: u64,
}

impl Member {
    /// The process, whatever its name: incarnations are random, so no two are the same.
    pub fn key(&self) -> PeerKey {
        PeerKey(self.incarnation)
    }
}

/// Names a worker process in tables that are looked at for every message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerKey(pub u64);

/// From a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToScheduler {
    /// Joins the cluster; sent once, first.
    Register {
        /// Who joins.
        member: Member,
        /// Its UCX worker address, sealed.
        address: Vec<u8>,
    },
    /// Every expected peer is connected and has passed its messages.
    Connected {
        /// The lanes to each.
        peers: Vec<PeerLanes>,
    },
    /// A connection broke although the peer was not said to be lost.
    PeerFailed {
        /// The peer.
        member: Member,
        /// UCX's words.
        cause: String,
    },
    /// The worker ends in good order.
    Leaving,
    /// A measurement has ended.
    Measured {
        /// Which one.
        id: u64,
        /// What was measured, or why nothing was.
        result: Result<Samples, String>,
    },
    /// A client, which is no worker, asks for measurements; the answers come as [`ToClient`].
    Measure(Measurement),
    /// A client asks for the workers' names and the lanes that they reported.
    List,
    /// What a worker has to say about its tasks.
    Work(Vec<Report>),
    /// What a client of the task scheduler wants. The first makes it one, and may be empty.
    Ask(Vec<Request>),
}

/// From the scheduler to a client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToClient {
    /// A measurement has ended.
    Measured {
        /// The sender.
        from: String,
        /// The receiver.
        to: String,
        /// What was measured, or why nothing was.
        result: Result<Samples, String>,
    },
    /// The registered workers.
    Workers {
        /// Each with its lanes to the others.
        workers: Vec<WorkerLanes>,
    },
    /// What became of tasks and objects.
    News(Vec<News>),
}

/// A worker and its lanes to its peers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerLanes {
    /// Its name.
    pub name: String,
    /// The lanes to each peer, in UCX's words; empty until it is connected.
    pub peers: Vec<PeerLanes>,
}

/// What shall be measured between two workers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Measurement {
    /// The sender's name.
    pub from: String,
    /// The receiver's name.
    pub to: String,
    /// Where the bytes lie on both sides.
    pub memory: MemoryKind,
    /// What is measured.
    pub what: Quantity,
    /// Bytes of each message.
    pub size: u64,
    /// Messages of a round.
    pub messages: u32,
    /// Rounds that count.
    pub rounds: u32,
    /// Rounds before them that do not.
    pub warmup: u32,
    /// CPUs for the sending and the receiving thread while the measurement lasts.
    pub cpus: Option<(u32, u32)>,
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Quantity {
    /// Bytes per time of a stream of messages one way.
    Bandwidth,
    /// Half the time of a message there and one back.
    Latency,
}

/// What was measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Samples {
    /// Time of each round, in nanoseconds.
    pub rounds_ns: Vec<u64>,
    /// Lanes of the sender's connection, in UCX's words.
    pub lanes: Vec<String>,
    /// The protocol that UCX chose for device memory and this size; `None` where UCX is too old to
    /// tell, and for host memory.
    pub protocol: Option<Protocol>,
    /// Whether the receiver's process could map the sender's device memory.
    pub mapped: Mapped,
}

/// How UCX carries messages of one size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Protocol {
    /// Like `rendezvous zero-copy read from remote`.
    pub name: String,
    /// The lanes that it uses, like `cuda_ipc/cuda`.
    pub lanes: String,
}

/// What came of mapping the sender's device memory in the receiver's process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Mapped {
    /// There was nothing to map.
    #[default]
    NotTried,
    /// It can be read.
    Readable,
    /// The driver refused, in its words.
    Refused(String),
}

/// To a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToWorker {
    /// The worker must be connected with these before it is ready. Replaces earlier ones.
    Expect {
        /// The peers' names.
        names: Vec<String>,
    },
    /// A peer is there; connect to it.
    Peer {
        /// The peer.
        member: Member,
        /// Its UCX worker address, sealed.
        address: Vec<u8>,
    },
    /// A peer is gone; drop its connection.
    Lost {
        /// The peer.
        member: Member,
        /// Whether it left in good order.
        left: bool,
    },
    /// Measure the way to a peer.
    Measure {
        /// For the answer.
        id: u64,
        /// What.
        measurement: Measurement,
    },
    /// What the worker is to do.
    Work(Vec<Order>),
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_message_survives_its_frame() {
        let message = ToScheduler::Register {
            member: Member { name: "gpu3".to_owned(), incarnation: 7 },
            address: vec![1; 300],
        };
        let frame = encode(&message).expect("short");
        let prefix = frame[..4].try_into().expect("four bytes");
        assert_eq!(length(prefix, FRAME_LIMIT).ok(), Some(frame.len() - 4));
        assert_eq!(decode(&frame[4..]).ok(), Some(message));
        assert!(decode::<ToScheduler>(&frame[4..frame.len() - 1]).is_err());
    }

    #[test]
    fn a_frame_beyond_its_limit_is_refused_both_ways() {
        let long = ToScheduler::Register {
            member: Member { name: String::new(), incarnation: 0 },
            address: vec![0; FRAME_LIMIT],
        };
        assert!(encode(&long).is_err());
        assert!(length(u32::MAX.to_le_bytes(), FRAME_LIMIT).is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_decoder_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = decode::<ToScheduler>(&bytes);
            let _ = decode::<ToWorker>(&bytes);
            let _ = decode::<Answer>(&bytes);
        }
    }
}
