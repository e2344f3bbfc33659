//! The scheduler's records of tasks, objects, workers and functions.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use smallvec::SmallVec;

use cuda_cluster_wire::tasks::{ObjectId, Product, TaskError};

/// A worker process; never reused.
pub(super) type WorkerId = u64;

/// A client's connection; never reused.
pub(super) type ClientId = u64;

pub(super) type TaskKey = usize;
pub(super) type ObjectKey = usize;

/// The state of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// It waits for inputs.
    Waiting,
    /// It could run; no worker has been chosen.
    Ready,
    /// It waits in the scheduler for the chosen worker.
    Queued(WorkerId),
    /// It was sent to the worker.
    Sent(WorkerId),
    /// It has run, or need not run.
    Idle,
    /// It will never run again.
    Failed,
}

/// A task's record.
pub(super) struct Task {
    pub(super) id: ObjectId,
    /// Position in the order of submission.
    pub(super) sequence: u64,
    /// Changes whenever the task is settled again, which makes older [`Object::waiters`] stale.
    pub(super) stamp: u32,
    pub(super) state: State,
    pub(super) function: u32,
    /// Inputs that are not available yet.
    pub(super) missing: u32,
    pub(super) priority: i32,
    pub(super) retries: u16,
    pub(super) deaths: u16,
    /// How often one of its inputs could not be fetched since it last ran.
    pub(super) misses: u16,
    /// Whether the worker was asked to return it.
    pub(super) retracting: bool,
    pub(super) inputs: Box<[ObjectKey]>,
    pub(super) arguments: Box<[u8]>,
    pub(super) products: Outputs,
    pub(super) special: Option<Box<Special>>,
    pub(super) placed: Placed,
}

/// The keys of a task's outputs.
pub(super) type Outputs = SmallVec<[ObjectKey; 1]>;

/// Options that most tasks don't use.
#[derive(Clone, Debug, Default)]
pub(super) struct Special {
    pub(super) on: Option<String>,
    pub(super) resources: BTreeMap<String, u64>,
}

/// Why a task was given to its worker, and the estimate for it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Placed {
    pub(super) worker: WorkerId,
    /// Seconds until its end, split into transfer and computation.
    pub(super) finish: f32,
    pub(super) transfer: f32,
    pub(super) compute: f32,
    /// The next best worker and its estimate.
    pub(super) other: Option<(WorkerId, f32)>,
    pub(super) because: Because,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Because {
    #[default]
    Nothing,
    Estimate,
    Turn,
    Pinned,
    Probe,
    Stolen,
}

/// An object's record.
pub(super) struct Object {
    pub(super) id: ObjectId,
    /// The task that computes it; `None` if it was put.
    pub(super) producer: Option<TaskKey>,
    pub(super) bytes: u64,
    pub(super) inline: Option<Box<[u8]>>,
    /// Workers that have it.
    pub(super) replicas: SmallVec<[WorkerId; 2]>,
    /// Clients that need it.
    pub(super) holders: SmallVec<[ClientId; 2]>,
    /// Active tasks that need it, once for each time that it is an input.
    pub(super) uses: u32,
    /// Task records that have it as an input.
    pub(super) lineage: u32,
    /// Tasks in [`State::Waiting`] that wait for it, with their stamps.
    pub(super) waiters: Vec<(TaskKey, u32)>,
    pub(super) error: Option<Box<TaskError>>,
}

impl Object {
    pub(super) fn is_available(&self) -> bool {
        self.inline.is_some() || !self.replicas.is_empty()
    }

    pub(super) fn is_needed(&self) -> bool {
        self.uses > 0 || !self.holders.is_empty()
    }

    pub(super) fn product(&self) -> Option<Product> {
        match &self.inline {
            Some(bytes) => Some(Product::Inline(bytes.to_vec())),
            None => self.is_available().then_some(Product::Stored(self.bytes)),
        }
    }
}

/// An entry of a queue, ordered by priority, then by age.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Entry {
    pub(super) priority: Reverse<i32>,
    pub(super) sequence: u64,
    pub(super) task: TaskKey,
}

pub(super) type Queue = BTreeSet<Entry>;

/// A worker's record.
pub(super) struct Worker {
    pub(super) name: String,
    /// Its place in [`super::links`].
    pub(super) place: usize,
    pub(super) threads: u32,
    pub(super) resources: BTreeMap<String, u64>,
    /// Tasks that were sent to it, in that order.
    pub(super) sent: BTreeMap<u64, TaskKey>,
    /// The position of each of them in that order.
    pub(super) order_of: HashMap<TaskKey, u64>,
    /// Tasks that were placed here and wait for room.
    pub(super) queue: Queue,
    /// Likewise, for tasks that need resources or must run alone.
    pub(super) needy: Queue,
    /// Resources that are not in use.
    pub(super) free: BTreeMap<String, u64>,
    /// Number of tasks that it was asked to return.
    pub(super) retracting: u32,
    /// Estimated seconds of computation of the tasks sent, and of those that wait here.
    pub(super) sent_seconds: f64,
    pub(super) queued_seconds: f64,
    /// Estimated seconds of transfers for the tasks sent, and for those that wait here.
    pub(super) incoming_seconds: f64,
    pub(super) queued_incoming_seconds: f64,
    /// Whether it runs a task that must be alone.
    pub(super) alone: bool,
    /// Objects that it has.
    pub(super) objects: BTreeSet<ObjectKey>,
    pub(super) finished: u64,
}

/// What is known about a function.
pub(super) struct Function {
    pub(super) name: String,
    /// Seconds that a call takes, on average.
    pub(super) seconds: Option<f64>,
    pub(super) runs: u64,
    /// Its active tasks.
    pub(super) active: u64,
}
