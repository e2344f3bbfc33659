//! The messages between the native engine's scheduler, workers and clients over the scheduler's
//! socket, after the greeting.
//!
//! *Invariant:* workers and clients have different message types, so neither can send a message
//! that only the other may.

use serde::{Deserialize, Serialize};

use super::peer::{Member, MemoryKind};
use super::status::PeerLanes;
use super::tasks::{News, Order, Report, Request};

/// Up to so many workers all pairs are connected and checked before READY; of more workers each
/// reaches some others, and the remaining pairs connect on first use.
pub const ALL_PAIRS: usize = 16;

/// Most requests in one frame of a client.
pub const REQUESTS_LIMIT: usize = 1 << 16;

/// A worker's first message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registration {
    /// The process that joins the cluster.
    pub member: Member,
    /// Its UCX worker address, sealed.
    pub address: Vec<u8>,
}

/// From a registered worker to the scheduler.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "a field that says nothing more has its name")]
pub enum FromWorker {
    /// Every expected peer is connected and has passed its messages; sent again when later ones
    /// are.
    Connected {
        /// The lanes of the connection to each.
        peers: Vec<PeerLanes>,
    },
    /// A connection broke although the peer was not reported lost.
    PeerFailed {
        member: Member,
        /// UCX's error.
        cause: String,
    },
    /// The worker ends as requested.
    Leaving,
    /// A measurement has ended.
    Measured {
        id: u64,
        /// What was measured, or why the measurement failed.
        result: Result<Samples, String>,
    },
    /// Reports on the worker's tasks.
    Work(Vec<Report>),
}

/// From a client to the scheduler.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromClient {
    /// Requests to the task scheduler; at most [`REQUESTS_LIMIT`].
    Ask(Vec<Request>),
    /// Measure; the answers come as [`ToClient::Measured`].
    Measure(Measurement),
    /// Asks for the workers and their lanes; answered with [`ToClient::Workers`].
    List,
}

/// From the scheduler to a client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "a field that says nothing more has its name")]
pub enum ToClient {
    /// A measurement has ended.
    Measured {
        from: String,
        to: String,
        /// What was measured, or why the measurement failed.
        result: Result<Samples, String>,
    },
    /// The registered workers.
    Workers {
        /// Each with its lanes to the others.
        workers: Vec<WorkerLanes>,
    },
    /// Results of tasks and objects.
    News(Vec<News>),
}

/// A worker and its lanes to its peers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerLanes {
    /// Its name.
    pub name: String,
    /// The lanes of the connection to each peer, by UCX's names; empty until it is connected.
    pub peers: Vec<PeerLanes>,
}

/// A measurement between two workers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Measurement {
    /// The sender's name.
    pub from: String,
    /// The receiver's name.
    pub to: String,
    /// The memory to use on both sides.
    pub memory: MemoryKind,
    /// What is measured.
    pub what: Quantity,
    /// Bytes of each message.
    pub size: u64,
    /// Messages of a round.
    pub messages: u32,
    /// Measured rounds.
    pub rounds: u32,
    /// Rounds before them that are not measured.
    pub warmup: u32,
    /// CPUs for the sending and the receiving thread during the measurement.
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

/// The result of a measurement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Samples {
    /// Time of each round, in nanoseconds.
    pub rounds_ns: Vec<u64>,
    /// Lanes of the sender's connection, by UCX's names.
    pub lanes: Vec<String>,
    /// The protocol that UCX chose for device memory and this size; `None` if UCX is too old to
    /// report it, and for host memory.
    pub protocol: Option<Protocol>,
    /// Whether the receiver's process could map the sender's device memory.
    pub mapped: Mapped,
}

/// How UCX carries messages of one size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Protocol {
    /// A name like `rendezvous zero-copy read from remote`.
    pub name: String,
    /// The lanes that it uses, like `cuda_ipc/cuda`.
    pub lanes: String,
}

/// The result of mapping the sender's device memory in the receiver's process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Mapped {
    /// There was nothing to map.
    #[default]
    NotTried,
    /// It can be read.
    Readable,
    /// The driver refused, with this text.
    Refused(String),
}

/// To a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "a field that says nothing more has its name")]
pub enum ToWorker {
    /// The worker must connect to these before it is ready. Replaces an earlier list.
    Expect {
        /// The peers' names.
        names: Vec<String>,
    },
    /// A peer is present; connect to it.
    Peer {
        member: Member,
        /// Its UCX worker address, sealed.
        address: Vec<u8>,
    },
    /// A peer is gone; drop its connection.
    Lost {
        member: Member,
        /// Whether it left as requested.
        left: bool,
    },
    /// Measure the link to a peer.
    Measure {
        /// The number for the answer.
        id: u64,
        measurement: Measurement,
    },
    /// Orders for the worker's tasks and objects.
    Work(Vec<Order>),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::decode;
    use crate::greeting::Answer;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_bytes_make_the_decoder_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = decode::<Answer>(&bytes);
            let _ = decode::<Registration>(&bytes);
            let _ = decode::<FromWorker>(&bytes);
            let _ = decode::<FromClient>(&bytes);
            let _ = decode::<ToWorker>(&bytes);
            let _ = decode::<ToClient>(&bytes);
        }
    }
}
