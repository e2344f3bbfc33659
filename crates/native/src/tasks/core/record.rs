//! The scheduler's records of tasks, objects, workers and functions.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use smallvec::SmallVec;

use cuda_cluster_wire::tasks::{ObjectId, Product, TaskError};

/// A worker process; never reused.
pub(super) type WorkerId = u64;

/// A client's connection; never reused.
pub(super) type ClientId = u64;

pub(super) type TaskKey = u32;
pub(super) type ObjectKey = u32;

/// The state of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// It waits for inputs.
    Waiting,
    /// It could run; no worker has been chosen.
    Ready,
    /// It waits in the scheduler for the worker that [`Task::placed`] names.
    Queued,
    /// It was sent to that worker.
    Sent,
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
    /// Changes whenever the task is settled again, which makes older [`Waiters`] stale.
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
    pub(super) arguments: Arguments,
    pub(super) products: Outputs,
    pub(super) special: Option<Box<Special>>,
    pub(super) placed: Placed,
}

/// The keys of a task's outputs.
pub(super) type Outputs = SmallVec<[ObjectKey; 4]>;

/// A task's arguments, without an allocation if they are few.
pub(super) type Arguments = SmallVec<[u8; 16]>;

/// Tasks in [`State::Waiting`] that wait for an object, with their stamps.
pub(super) type Waiters = SmallVec<[(TaskKey, u32); 2]>;

/// Options that most tasks don't use.
#[derive(Clone, Debug, Default)]
pub(super) struct Special {
    pub(super) on: Option<String>,
    pub(super) resources: BTreeMap<String, u64>,
}

/// Why a task was given to its worker, and the estimate for it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Placed {
    pub(super) worker: WorkerId,
    /// Seconds until its end, split into transfer and computation.
    pub(super) finish: f32,
    pub(super) transfer: f32,
    pub(super) compute: f32,
    /// The next best worker and its seconds, which are infinite if there is none.
    pub(super) other: WorkerId,
    pub(super) other_finish: f32,
    pub(super) because: Because,
}

impl Default for Placed {
    fn default() -> Self {
        Self {
            worker: 0,
            finish: 0.0,
            transfer: 0.0,
            compute: 0.0,
            other: 0,
            other_finish: f32::INFINITY,
            because: Because::Nothing,
        }
    }
}

impl Placed {
    /// The next best worker and its estimate.
    pub(super) fn other(&self) -> Option<(WorkerId, f32)> {
        self.other_finish.is_finite().then_some((self.other, self.other_finish))
    }

    /// The same, with the next best one.
    pub(super) fn after(self, next: &Placed) -> Self {
        Placed { other: next.worker, other_finish: next.finish, ..self }
    }
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
    pub(super) presence: Presence,
    /// Clients that need it.
    pub(super) holders: SmallVec<[ClientId; 2]>,
    /// Active tasks that need it, once for each time that it is an input.
    pub(super) uses: u32,
    /// Task records that have it as an input.
    pub(super) lineage: u32,
}

/// Where the bytes of an object are.
pub(super) enum Presence {
    /// Nowhere; some tasks wait for them.
    Missing(Waiters),
    /// In the scheduler.
    Inline(Box<[u8]>),
    /// On these workers, of which there is at least one.
    Stored(Replicas),
    /// Nowhere, for ever.
    Failed(Box<TaskError>),
}

/// Workers that have an object.
pub(super) type Replicas = SmallVec<[WorkerId; 2]>;

impl Default for Presence {
    fn default() -> Self {
        Presence::Missing(Waiters::new())
    }
}

impl Object {
    pub(super) fn is_available(&self) -> bool {
        matches!(self.presence, Presence::Inline(_) | Presence::Stored(_))
    }

    pub(super) fn is_needed(&self) -> bool {
        self.uses > 0 || !self.holders.is_empty()
    }

    pub(super) fn product(&self) -> Option<Product> {
        match &self.presence {
            Presence::Inline(bytes) => Some(Product::Inline(bytes.to_vec())),
            Presence::Stored(_) => Some(Product::Stored(self.bytes)),
            Presence::Missing(_) | Presence::Failed(_) => None,
        }
    }

    /// The bytes, if the scheduler has them.
    pub(super) fn inline(&self) -> Option<&[u8]> {
        if let Presence::Inline(bytes) = &self.presence { Some(bytes) } else { None }
    }

    /// The workers that have it.
    pub(super) fn replicas(&self) -> &[WorkerId] {
        if let Presence::Stored(workers) = &self.presence { workers } else { &[] }
    }

    pub(super) fn error(&self) -> Option<&TaskError> {
        if let Presence::Failed(error) = &self.presence { Some(error) } else { None }
    }

    #[cfg(test)]
    pub(super) fn waiters(&self) -> &[(TaskKey, u32)] {
        if let Presence::Missing(waiters) = &self.presence { waiters } else { &[] }
    }

    /// Has a task wait for it.
    pub(super) fn wait(&mut self, task: TaskKey, stamp: u32) {
        if let Presence::Missing(waiters) = &mut self.presence {
            waiters.push((task, stamp));
        }
    }

    pub(super) fn take_waiters(&mut self) -> Waiters {
        if let Presence::Missing(waiters) = &mut self.presence {
            std::mem::take(waiters)
        } else {
            Waiters::new()
        }
    }

    /// Records that a worker has it. Returns who waited if it is the first that has.
    pub(super) fn add_replica(&mut self, worker: WorkerId) -> Option<Waiters> {
        match &mut self.presence {
            Presence::Missing(waiters) => {
                let waiters = std::mem::take(waiters);
                self.presence = Presence::Stored(SmallVec::from_elem(worker, 1));
                Some(waiters)
            }
            Presence::Stored(workers) => {
                if !workers.contains(&worker) {
                    workers.push(worker);
                }
                None
            }
            Presence::Inline(_) | Presence::Failed(_) => None,
        }
    }

    pub(super) fn drop_replica(&mut self, worker: WorkerId) {
        if let Presence::Stored(workers) = &mut self.presence {
            workers.retain(|other| *other != worker);
            if workers.is_empty() {
                self.presence = Presence::default();
            }
        }
    }

    pub(super) fn take_replicas(&mut self) -> Replicas {
        let Presence::Stored(workers) = &mut self.presence else { return Replicas::new() };
        let taken = std::mem::take(workers);
        self.presence = Presence::default();
        taken
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
    /// The position of each of them in that order, and when it was sent.
    pub(super) order_of: HashMap<TaskKey, (u64, u64)>,
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
    /// Its tasks that failed, or could not run because others failed.
    pub(super) failed: u64,
}
