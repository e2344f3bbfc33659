//! Why a task failed or an object is not available.

use serde::{Deserialize, Serialize};

use super::ObjectId;

/// Why there is no result. Everything that depends on a failed task fails with the same error,
/// which names the task that failed first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum TaskError {
    /// The function returned an error.
    #[error("task {task} failed on {worker}: {message}")]
    Failed {
        task: ObjectId,
        /// The worker that ran it.
        worker: String,
        /// The function's error.
        message: String,
    },
    /// The function panicked.
    #[error("task {task} panicked on {worker}: {message}")]
    Panicked {
        task: ObjectId,
        /// The worker that ran it.
        worker: String,
        /// The panic's message.
        message: String,
    },
    /// The program that the workers run has no such function.
    #[error("task {task}: {worker} has no function {function:?}")]
    UnknownFunction {
        task: ObjectId,
        /// The worker that was to run it.
        worker: String,
        /// The function's name.
        function: String,
    },
    /// Each worker that ran it died.
    #[error("task {task} was on {deaths} workers that died, {worker} the last")]
    WorkersDied {
        task: ObjectId,
        deaths: u32,
        /// The last of them.
        worker: String,
    },
    /// The only copy of an object was on a worker that died, and no task can compute it again.
    #[error("object {object} was lost with {worker}, and no task can compute it again")]
    Lost { object: ObjectId, worker: String },
    /// All clients had released an object, and no task can compute it again.
    #[error("object {object} was released, and is needed again because a worker died")]
    Forgotten { object: ObjectId },
    /// A worker had no room for an object in any tier.
    #[error("task {task}: {worker} has no room: {message}")]
    NoRoom {
        task: ObjectId,
        worker: String,
        /// The tier that was full.
        message: String,
    },
    /// It was cancelled.
    #[error("task {task} was cancelled")]
    Cancelled { task: ObjectId },
    /// The scheduler does not accept it.
    #[error("task {task} is refused: {reason}")]
    Refused { task: ObjectId, reason: String },
}

impl TaskError {
    /// What the user can do.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            TaskError::NoRoom { .. } => {
                "raise the limit that it names ('memory.limit', 'device.memory_limit'), or use \
                 smaller pieces or fewer threads, so that what one task needs at a time fits"
            }
            TaskError::WorkersDied { .. } => "why they died: cuda-cluster events",
            _ => return None,
        };
        Some(hint.to_owned())
    }
}
