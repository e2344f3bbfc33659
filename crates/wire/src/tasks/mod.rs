//! Objects and tasks, in the messages between clients, the scheduler and workers.
//!
//! The messages travel inside those of [`super::native`], many to a frame. Bytes of large objects
//! don't: they go from worker to worker over UCX, or are read where they are ([`FromViewer`]), and
//! between clients and workers over the worker's own socket ([`Bulk`]).
//!
//! *Invariant:* an object's bytes never change; an object that is computed again keeps its
//! identifier.

mod bulk;
mod error;
mod queues;
mod share;

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::peer::Member;
pub use bulk::{Bulk, BulkReply, Counters, Level};
pub use error::TaskError;
pub use queues::{AtWork, Fetching, HeldTask, Queues, RunningTask, SentTask};
pub use share::{FromViewer, ToViewer};

/// Largest object that is sent inside messages and lives in the scheduler, in bytes.
pub const INLINE_LIMIT: usize = 1 << 10;

/// Largest arguments of one task, in bytes. Anything larger must be an object.
pub const ARGUMENTS_LIMIT: usize = 64 << 10;

/// Most inputs, and most outputs, of one task.
pub const ARITY_LIMIT: usize = 4096;

/// Largest object, in bytes.
pub const OBJECT_LIMIT: u64 = 1 << 40;

/// Approximate bytes of messages that are put into one frame.
pub const BATCH_BYTES: usize = 256 << 10;

/// Identifies an object; never reused. A task is identified by its first output.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct ObjectId(u64);

impl ObjectId {
    /// Number of objects that one client may name.
    pub const PER_CLIENT: u64 = 1 << 40;

    /// The `number`-th object of a client, who must not name more than [`Self::PER_CLIENT`].
    pub fn new(client: u32, number: u64) -> Self {
        ObjectId(((u64::from(client) & 0xff_ffff) << 40) | (number % Self::PER_CLIENT))
    }

    /// The object `further` numbers after this one.
    pub fn plus(self, further: u32) -> Self {
        ObjectId(self.0.wrapping_add(u64::from(further)))
    }

    /// How many numbers an object is after this one.
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
    type Err = cuda_cluster_model::ids::IdError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parts = text.split_once(':').and_then(|(client, number)| {
            let client = client.parse::<u32>().ok().filter(|client| *client <= 0xff_ffff)?;
            let number = number.parse::<u64>().ok().filter(|n| *n < Self::PER_CLIENT)?;
            Some(Self::new(client, number))
        });
        parts.ok_or_else(|| cuda_cluster_model::ids::IdError {
            text: text.chars().take(80).collect(),
            expected: "a task, like 3:17",
        })
    }
}

/// A task to compute.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskSpec {
    /// The identifier of the task and its first output; the other outputs have the next ones.
    pub id: ObjectId,
    /// Number of outputs, at least one.
    pub outputs: u32,
    /// The function's registered name.
    pub function: String,
    /// A value ([`super::value`]) that the function can decode.
    pub arguments: Vec<u8>,
    /// The objects that it needs.
    pub inputs: Vec<ObjectId>,
    /// Further requirements.
    pub wishes: Wishes,
}

/// Requirements on how a task is run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wishes {
    /// Higher goes first; tasks of equal priority run in the order of their submission.
    pub priority: i32,
    /// How often it is tried again after its function fails.
    pub retries: u16,
    /// The one worker that may run it.
    pub on: Option<String>,
    /// What it takes of its worker's resources while it runs.
    pub resources: BTreeMap<String, u64>,
}

/// An object in a message: its bytes, or their number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Product {
    /// At most [`INLINE_LIMIT`] bytes.
    Inline(Vec<u8>),
    /// This many bytes, at a worker.
    Stored(u64),
}

impl Product {
    /// Number of bytes.
    pub fn bytes(&self) -> u64 {
        match self {
            Product::Inline(bytes) => bytes.len() as u64,
            Product::Stored(bytes) => *bytes,
        }
    }
}

/// Where a worker finds an input.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "a field that says nothing more has its name")]
pub enum Source {
    /// In this message.
    Inline(Vec<u8>),
    /// The worker has the object, or is fetching it.
    Here,
    /// At a peer.
    Peer { member: Member, bytes: u64 },
}

/// From the scheduler to a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "a field that says nothing more has its name")]
pub enum Order {
    /// Run a task.
    Run {
        task: ObjectId,
        /// The number of outputs that it must return.
        outputs: u32,
        function: String,
        arguments: Vec<u8>,
        /// Its inputs, in order.
        inputs: Vec<(ObjectId, Source)>,
    },
    /// Return a task, if it has not begun.
    Retract {
        task: ObjectId,
        /// Whether nobody wants its outputs, so that a running one should end early.
        unwanted: bool,
    },
    /// Fetch and keep a copy of an object.
    Fetch {
        object: ObjectId,
        /// Where it is.
        source: Source,
    },
    /// Drop an object.
    Free { object: ObjectId },
}

/// When a task ran, and what came for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ran {
    /// When its function began, in microseconds since 1970; if that did not begin, when the task
    /// failed.
    pub at: u64,
    /// How long it ran, in microseconds.
    pub micros: u64,
    /// Bytes of inputs that came from peers. What several tasks wait for counts for the first.
    pub fetched_bytes: u64,
}

/// From a worker to the scheduler.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "a field that says nothing more has its name")]
pub enum Report {
    /// The worker's threads and resources; sent once, before anything else.
    Offer {
        /// Number of tasks that it runs at the same time.
        threads: u32,
        /// The resources that tasks can reserve.
        resources: BTreeMap<String, u64>,
    },
    /// A task has run.
    Done { task: ObjectId, products: Vec<Product>, ran: Ran },
    /// A task has failed.
    Failed { task: ObjectId, error: TaskError, ran: Ran },
    /// A task will not run here: it was retracted in time.
    Returned { task: ObjectId },
    /// A task cannot run here, because an input could not be fetched.
    Unreachable {
        task: ObjectId,
        object: ObjectId,
        /// The worker that was expected to have it.
        source: Member,
        /// Whether that worker reported that it does not have the input; otherwise it was
        /// unreachable.
        missing: bool,
    },
    /// A copy of an object does not arrive.
    NotFetched { object: ObjectId },
    /// A copy of an object has arrived.
    Fetched {
        object: ObjectId,
        /// The worker it came from.
        source: Member,
        bytes: u64,
        /// How long it took; `None` if it is read where it is, and nothing was copied.
        micros: Option<u64>,
    },
    /// A client has put an object here.
    Stored { object: ObjectId, bytes: u64 },
}

/// From a client to the scheduler.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "a field that says nothing more has its name")]
pub enum Request {
    /// Compute a task. The client holds the outputs.
    Submit(TaskSpec),
    /// Add an object of the client's: the bytes are here, or go to the worker that the reply names.
    Put {
        object: ObjectId,
        /// Its bytes, or their number.
        product: Product,
        /// The worker that is to have it.
        on: Option<String>,
    },
    /// The client no longer needs these.
    Release { objects: Vec<ObjectId> },
    /// Cancel these, and everything that depends on them.
    Cancel { tasks: Vec<ObjectId> },
    /// Asks where an object is. Answered with [`News::At`] once it is available.
    Locate { object: ObjectId },
    /// Hold an object of another client.
    Hold { object: ObjectId },
    /// Make copies.
    Replicate {
        object: ObjectId,
        /// The number of workers that are to have it.
        copies: u32,
    },
    /// Asks why a task does not run, or why it ran where it did.
    Explain { task: ObjectId },
    /// Asks for the scheduler's counters.
    Overview,
    /// Asks for the last tasks that ran, of which the client does not know those before this
    /// number ([`Recent::next`]).
    Recent { after: u64 },
    /// Reset the counters of transfers ([`Overview::links`]).
    CountAnew,
    /// Asks what waits, and for what.
    Queues,
}

/// From the scheduler to a client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "a field that says nothing more has its name")]
pub enum News {
    /// The first message: the number in the identifiers of the client's objects.
    Hello { client: u32 },
    /// An object is available.
    Available {
        object: ObjectId,
        /// Its bytes, or their number.
        product: Product,
    },
    /// An object will never be available.
    Failed { object: ObjectId, error: TaskError },
    /// Where an object is; empty if it is not at a worker.
    At { object: ObjectId, workers: Vec<String> },
    /// The worker to which the client is to send an object's bytes.
    PutAt { object: ObjectId, worker: String },
    /// The answer to [`Request::Explain`].
    Because {
        task: ObjectId,
        /// One or two sentences.
        why: String,
    },
    /// The answer to [`Request::Overview`].
    Overview(Overview),
    /// The answer to [`Request::Queues`].
    Queues(Queues),
    /// The answer to [`Request::Recent`].
    Recent(Recent),
}

/// The last tasks that ran: of very many a sample.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recent {
    /// What to ask for next time.
    pub next: u64,
    /// How many ran since the scheduler began.
    pub ran: u64,
    /// The names of the functions, for [`TaskRan::function`].
    pub functions: Vec<String>,
    /// The names of the workers, for [`TaskRan::worker`].
    pub workers: Vec<String>,
    /// The tasks, in the order in which they ended.
    pub tasks: Vec<TaskRan>,
}

/// A task that ran.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskRan {
    /// Its name.
    pub task: ObjectId,
    /// The place of its function among the names.
    pub function: u32,
    /// The place of its worker among the names.
    pub worker: u32,
    /// When it ran.
    pub ran: Ran,
    /// Whether it failed.
    pub failed: bool,
    /// The number of tasks that it stands for, with itself: of very many only some are kept.
    pub stands_for: u32,
}

/// What tasks wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Wait {
    /// An input that is not there yet.
    Input,
    /// A worker that may run them; there is none now.
    AbleWorker,
    /// Any worker that has room.
    Room,
    /// The worker that was chosen for them, which is busy.
    ChosenWorker,
}

/// Tasks that wait for the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waiting {
    /// For what.
    pub wait: Wait,
    /// How many.
    pub tasks: u64,
    /// The names of some of them.
    pub examples: Vec<String>,
}

/// The scheduler's counters.
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
    /// Tasks that an idle worker took from a busy one.
    pub stolen: u64,
    /// Measured transfers, per pair of workers.
    pub links: Vec<LinkOverview>,
    /// The functions with the most tasks, most first.
    pub functions: Vec<FunctionOverview>,
    /// What tasks wait for.
    pub waiting: Vec<Waiting>,
    /// The scheduler's resident memory, in bytes.
    pub resident_bytes: u64,
}

/// One worker's counters.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WorkerOverview {
    /// Its name.
    pub name: String,
    /// Tasks sent to it, running or waiting.
    pub in_flight: u64,
    /// Tasks that wait for it in the scheduler.
    pub queued: u64,
    /// Objects that it holds.
    pub objects: u64,
    /// Tasks that it has finished.
    pub finished: u64,
}

/// What is known of a function.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FunctionOverview {
    /// Its name.
    pub name: String,
    /// How often it ran.
    pub runs: u64,
    /// Tasks that wait or run now.
    pub active: u64,
    /// Those among them that workers have: they run, or are the next to run there.
    pub sent: u64,
    /// Tasks that failed, or could not run because others failed.
    pub failed: u64,
    /// Seconds that a run takes, on average.
    pub seconds: Option<f64>,
}

/// What was measured between two workers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LinkOverview {
    /// The worker that sent.
    pub from: String,
    /// The worker that received.
    pub to: String,
    /// Number of objects sent.
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
            let _ = crate::frame::decode::<Vec<Order>>(&bytes);
            let _ = crate::frame::decode::<Vec<Report>>(&bytes);
            let _ = crate::frame::decode::<Vec<Request>>(&bytes);
            let _ = crate::frame::decode::<Vec<News>>(&bytes);
            let _ = crate::frame::decode::<Bulk>(&bytes);
            let _ = crate::frame::decode::<FromViewer>(&bytes);
            let _ = crate::frame::decode::<ToViewer>(&bytes);
        }
    }
}
