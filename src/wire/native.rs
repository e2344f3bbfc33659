//! What the native engine's scheduler, workers and clients tell each other over the scheduler's
//! socket, once they are greeted.
//!
//! *Invariant:* a worker and a client have a message type each, so that neither can send what only
//! the other may.

use serde::{Deserialize, Serialize};

use super::peer::{Member, MemoryKind};
use super::status::PeerLanes;
use super::tasks::{News, Order, Report, Request};

/// Most requests in one frame of a client.
pub const REQUESTS_LIMIT: usize = 1 << 16;

/// A worker's first message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registration {
    /// Who joins the cluster.
    pub member: Member,
    /// Its UCX worker address, sealed.
    pub address: Vec<u8>,
}

/// From a worker that has registered to the scheduler.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromWorker {
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
    /// What the worker has to say about its tasks.
    Work(Vec<Report>),
}

/// From a client to the scheduler.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromClient {
    /// What it wants of the task scheduler; at most [`REQUESTS_LIMIT`].
    Ask(Vec<Request>),
    /// Measure; the answers come as [`ToClient::Measured`].
    Measure(Measurement),
    /// Which workers are there, and over which lanes? Answered with [`ToClient::Workers`].
    List,
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
    use crate::wire::frame::decode;
    use crate::wire::greeting::Answer;
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
