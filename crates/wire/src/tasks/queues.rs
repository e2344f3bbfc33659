//! What a cluster's tasks wait for, as the scheduler and its workers tell who asks.

use serde::{Deserialize, Serialize};

use super::ObjectId;

/// What waits in the scheduler, and what workers have: the answer to [`super::Request::Queues`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Queues {
    /// Tasks that wait for inputs.
    pub waiting: u64,
    /// Tasks that could run, and for which no worker has room.
    pub ready: u64,
    /// Tasks that no present worker may run.
    pub parked: u64,
    /// The first of those.
    pub held: Vec<HeldTask>,
    /// Tasks that workers have: of each worker those that it has had for longest.
    pub sent: Vec<SentTask>,
}

/// A task that no present worker may run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldTask {
    /// The task.
    pub task: ObjectId,
    /// Its function.
    pub function: String,
    /// What it needs that no worker has.
    pub why: String,
    /// For how long, in milliseconds; counted anew when a worker comes.
    pub millis: u64,
}

/// A task that a worker has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SentTask {
    /// The task.
    pub task: ObjectId,
    /// Its function.
    pub function: String,
    /// The worker.
    pub worker: String,
    /// For how long, in milliseconds.
    pub millis: u64,
    /// Tasks that wait for it, directly or not.
    pub dependents: u64,
    /// Whether there may be more of them: they were not all counted.
    pub more: bool,
}

/// What a worker is at: the answer to [`super::Bulk::AtWork`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AtWork {
    /// Tasks whose functions run.
    pub running: Vec<RunningTask>,
    /// Objects that it fetches from peers, or is about to.
    pub fetching: Vec<Fetching>,
}

/// A task whose function runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunningTask {
    /// The task.
    pub task: ObjectId,
    /// Its function.
    pub function: String,
    /// The thread that runs it, by the kernel's number.
    pub thread: u32,
    /// For how long, in milliseconds.
    pub millis: u64,
}

/// An object that a worker fetches.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fetching {
    /// The object.
    pub object: ObjectId,
    /// The worker that it comes from.
    pub source: String,
    /// For how long, in milliseconds.
    pub millis: u64,
    /// Tasks that wait for it here.
    pub tasks: u64,
}
