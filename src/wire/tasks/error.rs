//! Why a task or an object is not to be had.

use serde::{Deserialize, Serialize};

use super::ObjectId;

/// Why there is no result. What depends on a failed task fails with the same error, which names the
/// task that failed first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum TaskError {
    /// The function returned an error.
    #[error("task {task} failed on {worker}: {message}")]
    Failed {
        task: ObjectId,
        /// Where it ran.
        worker: String,
        /// The function's words.
        message: String,
    },
    /// The function panicked.
    #[error("task {task} panicked on {worker}: {message}")]
    Panicked {
        task: ObjectId,
        /// Where it ran.
        worker: String,
        /// The panic's words.
        message: String,
    },
    /// The workers' program has no such function.
    #[error("task {task}: {worker} has no function {function:?}")]
    UnknownFunction {
        task: ObjectId,
        /// Who was asked.
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
    /// The only copy of an object was at a worker that died, and no task can compute it again.
    #[error("object {object} was lost with {worker}, and no task can compute it again")]
    Lost { object: ObjectId, worker: String },
    /// Everybody had released an object, and no task can compute it again.
    #[error("object {object} was released, and is needed again since a worker died")]
    Forgotten { object: ObjectId },
    /// A worker had no room for an object at any level.
    #[error("task {task}: {worker} has no room: {message}")]
    NoRoom {
        task: ObjectId,
        worker: String,
        /// What was full.
        message: String,
    },
    /// It was cancelled.
    #[error("task {task} was cancelled")]
    Cancelled { task: ObjectId },
    /// The scheduler does not take it.
    #[error("task {task} is refused: {reason}")]
    Refused { task: ObjectId, reason: String },
}

impl TaskError {
    /// What the user can do.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            TaskError::NoRoom { .. } => {
                "raise the limit that it names (--memory-limit, --device-memory-limit), or use \
                 smaller pieces or fewer threads, so that what one task needs at a time fits"
            }
            TaskError::WorkersDied { .. } => "why they died: cuda-cluster events",
            _ => return None,
        };
        Some(hint.to_owned())
    }
}
