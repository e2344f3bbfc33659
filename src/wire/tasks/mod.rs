//! Objects and tasks, as clients, the scheduler and workers speak of them.
//!
//! The messages ride in those of [`super::native`], many to a frame. Bytes of large objects do
//! not: they go from worker to worker over UCX, and between clients and workers over the worker's
//! own socket ([`Bulk`]).
//!
//! *Invariant:* an object's bytes never change; whoever computes an object again gets the same
//! identifier for it.

mod bulk;
mod error;

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::peer::Member;
pub use bulk::{Bulk, BulkReply, Counters, Level};
pub use error::TaskError;

/// Largest object that travels inside messages and lives in the scheduler, in bytes.
pub const INLINE_LIMIT: usize = 1 << 10;

/// Largest arguments of one task, in bytes. What is larger is an object.
pub const ARGUMENTS_LIMIT: usize = 64 << 10;

/// Most inputs, and most outputs, of one task.
pub const ARITY_LIMIT: usize = 4096;

/// Largest object, in bytes.
pub const OBJECT_LIMIT: u64 = 1 << 40;

/// Messages of about this many bytes are put into one frame.
pub const BATCH_BYTES: usize = 256 << 10;

/// Names an object for ever. A task is named by its first output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ObjectId(u64);

impl ObjectId {
    /// Objects that one client may name.
    pub const PER_CLIENT: u64 = 1 << 40;

    /// The `number`-th object of a client, who must not name more than [`Self::PER_CLIENT`].
    pub fn new(client: u32, number: u64) -> Self {
        ObjectId(((u64::from(client) & 0xff_ffff) << 40) | (number % Self::PER_CLIENT))
    }

    /// The object `further` places behind this one.
    pub fn plus(self, further: u32) -> Self {
        ObjectId(self.0.wrapping_add(u64::from(further)))
    }

    /// How far an object is behind this one.
    pub fn distance(self, later: ObjectId) -> u64 {
        later.0.wrapping_sub(self.0)
    }

    /// The client that named it.
    pub fn client(self) -> u64 {
        self.0 >> 40
    }
}

impl fmt::Display for ObjectId {
    /// `3:17`: the client, and the number that it gave.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.0 >> 40, self.0 % Self::PER_CLIENT)
    }
}

impl std::str::FromStr for ObjectId {
    type Err = crate::ids::IdError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parts = text.split_once(':').and_then(|(client, number)| {
            let client = client.parse::<u32>().ok().filter(|client| *client <= 0xff_ffff)?;
            let number = number.parse::<u64>().ok().filter(|n| *n < Self::PER_CLIENT)?;
            Some(Self::new(client, number))
        });
        parts.ok_or_else(|| crate::ids::IdError {
            text: text.chars().take(80).collect(),
            expected: "a task, like 3:17",
        })
    }
}

/// What is to be computed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskSpec {
    /// Its name and its first output's; the others follow it.
    pub id: ObjectId,
    /// How many outputs it has, at least one.
    pub outputs: u32,
    /// The function's registered name.
    pub function: String,
    /// A value ([`super::value`]) that the function knows how to read.
    pub arguments: Vec<u8>,
    /// The objects that it needs.
    pub inputs: Vec<ObjectId>,
    /// What is asked beyond that.
    pub wishes: Wishes,
}

/// How a task shall be run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wishes {
    /// Higher goes first; equal ones in the order of their submission.
    pub priority: i32,
    /// How often it is tried again after an error of its own.
    pub retries: u16,
    /// The one worker that may run it.
    pub on: Option<String>,
    /// What it takes of its worker's resources while it runs.
    pub resources: BTreeMap<String, u64>,
}

/// An object as it is spoken of: its bytes, or how many they are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Product {
    /// At most [`INLINE_LIMIT`] bytes.
    Inline(Vec<u8>),
    /// This many bytes, at a worker.
    Stored(u64),
}

impl Product {
    /// How many bytes.
    pub fn bytes(&self) -> u64 {
        match self {
            Product::Inline(bytes) => bytes.len() as u64,
            Product::Stored(bytes) => *bytes,
        }
    }
}

/// Where a worker finds an input.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Source {
    /// Here are its bytes.
    Inline(Vec<u8>),
    /// It has it, or has asked for it.
    Here,
    /// At a peer.
    Peer {
        /// The peer.
        member: Member,
        /// How many bytes.
        bytes: u64,
    },
}

/// From the scheduler to a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Order {
    /// Run a task.
    Run {
        /// Its name.
        task: ObjectId,
        /// How many outputs it must give.
        outputs: u32,
        /// The function.
        function: String,
        /// Its arguments.
        arguments: Vec<u8>,
        /// Its inputs, in order.
        inputs: Vec<(ObjectId, Source)>,
    },
    /// Do not run a task after all, if it has not begun.
    Retract {
        /// The task.
        task: ObjectId,
    },
    /// Hold a copy of an object.
    Fetch {
        /// The object.
        object: ObjectId,
        /// Where it is.
        source: Source,
    },
    /// Forget an object.
    Free {
        /// The object.
        object: ObjectId,
    },
}

/// From a worker to the scheduler.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Report {
    /// What the worker has to offer; sent once, before anything else.
    Offer {
        /// Tasks that it runs at one time.
        threads: u32,
        /// What tasks can be promised.
        resources: BTreeMap<String, u64>,
    },
    /// A task has run.
    Done {
        /// The task.
        task: ObjectId,
        /// Its outputs.
        products: Vec<Product>,
        /// How long it ran.
        micros: u64,
    },
    /// A task has not succeeded.
    Failed {
        /// The task.
        task: ObjectId,
        /// Why.
        error: TaskError,
    },
    /// A task will not run here: it was retracted in time.
    Returned {
        /// The task.
        task: ObjectId,
    },
    /// A task cannot run here, since an input could not be fetched.
    Unreachable {
        /// The task.
        task: ObjectId,
        /// The input.
        object: ObjectId,
        /// Who should have had it.
        source: Member,
        /// Whether it said that it does not have it; else it could not be reached.
        missing: bool,
    },
    /// A copy of an object has arrived.
    Fetched {
        /// The object.
        object: ObjectId,
        /// From whom.
        source: Member,
        /// Its size.
        bytes: u64,
        /// How long it took.
        micros: u64,
    },
    /// A client has put an object here.
    Stored {
        /// The object.
        object: ObjectId,
        /// Its size.
        bytes: u64,
    },
}

/// From a client to the scheduler.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Compute something. The client holds the outputs.
    Submit(TaskSpec),
    /// An object whose bytes the client gives: now, or to the worker that it is told.
    Put {
        /// Its name.
        object: ObjectId,
        /// Its bytes, or how many will come.
        product: Product,
        /// The worker that shall have it.
        on: Option<String>,
    },
    /// The client needs these no more.
    Release {
        /// The objects.
        objects: Vec<ObjectId>,
    },
    /// Do not compute these after all, nor what depends on them.
    Cancel {
        /// The tasks.
        tasks: Vec<ObjectId>,
    },
    /// Where is an object? Answered with [`News::At`] when it is somewhere.
    Locate {
        /// The object.
        object: ObjectId,
    },
    /// Hold an object of another client.
    Hold {
        /// The object.
        object: ObjectId,
    },
    /// Make copies.
    Replicate {
        /// The object.
        object: ObjectId,
        /// How many workers shall have it.
        copies: u32,
    },
    /// Why does a task not run, or why did it run there?
    Explain {
        /// The task.
        task: ObjectId,
    },
    /// What is there?
    Overview,
    /// Begin the count of transfers ([`Overview::links`]) anew.
    CountAnew,
}

/// From the scheduler to a client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum News {
    /// The first message: the number that the client names its objects with.
    Hello {
        /// The number.
        client: u32,
    },
    /// An object is there.
    Available {
        /// The object.
        object: ObjectId,
        /// Its bytes, or how many they are.
        product: Product,
    },
    /// An object will never be there.
    Failed {
        /// The object.
        object: ObjectId,
        /// Why.
        error: TaskError,
    },
    /// Where an object is; empty if it is not at a worker.
    At {
        /// The object.
        object: ObjectId,
        /// The workers.
        workers: Vec<String>,
    },
    /// The worker to which a client should give an object's bytes.
    PutAt {
        /// The object.
        object: ObjectId,
        /// The worker.
        worker: String,
    },
    /// The answer to [`Request::Explain`].
    Because {
        /// The task.
        task: ObjectId,
        /// A sentence or two.
        why: String,
    },
    /// The answer to [`Request::Overview`].
    Overview(Overview),
}

/// The scheduler's numbers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Overview {
    /// The workers that run tasks.
    pub workers: Vec<WorkerOverview>,
    /// Task records.
    pub tasks: u64,
    /// Object records.
    pub objects: u64,
    /// Tasks that were computed again because their worker died.
    pub recomputed: u64,
    /// Tasks that an idle worker took over from a busy one.
    pub stolen: u64,
    /// Measured transfers, per pair of workers.
    pub links: Vec<LinkOverview>,
    /// The scheduler's resident memory, in bytes.
    pub resident_bytes: u64,
}

/// One worker's numbers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WorkerOverview {
    /// Its name.
    pub name: String,
    /// Tasks it has, running or about to.
    pub in_flight: u64,
    /// Tasks that wait for it in the scheduler.
    pub queued: u64,
    /// Objects that it holds.
    pub objects: u64,
    /// Tasks that it has finished.
    pub finished: u64,
}

/// What was measured on the way from one worker to another.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LinkOverview {
    /// The sender.
    pub from: String,
    /// The receiver.
    pub to: String,
    /// Transfers.
    pub transfers: u64,
    /// Bytes of all of them.
    pub bytes: u64,
    /// 25, 50 and 75 % of the latest transfers were slower than this, in bytes per second.
    pub quartiles: [f64; 3],
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_name_survives_its_text(client in 0u32..1 << 24, number in 0..ObjectId::PER_CLIENT) {
            let id = ObjectId::new(client, number);
            prop_assert_eq!(id.to_string().parse().ok(), Some(id));
            prop_assert_eq!(id.client(), u64::from(client));
        }

        #[test]
        fn no_bytes_make_the_decoders_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..400),
        ) {
            let _ = crate::wire::frame::decode::<Vec<Order>>(&bytes);
            let _ = crate::wire::frame::decode::<Vec<Report>>(&bytes);
            let _ = crate::wire::frame::decode::<Vec<Request>>(&bytes);
            let _ = crate::wire::frame::decode::<Vec<News>>(&bytes);
            let _ = crate::wire::frame::decode::<Bulk>(&bytes);
        }
    }
}
