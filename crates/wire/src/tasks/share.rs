//! How a worker reads an object where a peer of the same machine has it, over the peer's socket.

use serde::{Deserialize, Serialize};

use super::ObjectId;

/// From a worker to the peer that has an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromViewer {
    /// Where is this object?
    View { object: ObjectId },
    /// It reads these bytes no more.
    Ended { view: u64 },
}

/// From the peer that has an object to the worker that reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToViewer {
    /// In the file whose descriptor follows. The bytes stay as they are until the worker says that
    /// the view has ended, or ends itself.
    Here {
        /// The number of the view, which is never used again on this connection.
        view: u64,
        /// Where the object begins in the file, in bytes.
        offset: u64,
        /// Its length.
        bytes: u64,
    },
    /// Not where it could be read in place.
    Elsewhere,
    /// The memory is needed: the worker should copy the bytes, and end the view.
    Recall { view: u64 },
}
