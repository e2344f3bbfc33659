//! Bytes of objects between clients and workers, over the worker's own socket.

use serde::{Deserialize, Serialize};

use super::{AtWork, ObjectId};

/// From a client to a worker, over the worker's own socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Bulk {
    /// Send an object's bytes, or, if `reads`, say where the client can read them.
    Get { object: ObjectId, reads: bool },
    /// Store an object. Its bytes follow the frame, unless they can be read at this address of the
    /// client's memory.
    Put { object: ObjectId, bytes: u64, address: Option<u64> },
    /// Report the memory counters.
    Counters,
    /// The bytes at the address of the last reply have been read.
    Done,
    /// Report what runs, and what is fetched.
    AtWork,
}

/// A worker's reply to a [`Bulk`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum BulkReply {
    /// This many bytes follow the frame.
    Bytes(u64),
    /// This many bytes are at this address of the worker's memory. They stay there until the next
    /// request, or until the worker closes the connection.
    At { address: u64, bytes: u64 },
    /// The object is stored.
    Stored,
    /// The worker cannot read the client's memory; the bytes should follow.
    Send,
    /// The request cannot be carried out.
    Refused { reason: String },
    /// The answer to [`Bulk::Counters`].
    Counters(Counters),
    /// The answer to [`Bulk::AtWork`].
    AtWork(AtWork),
}

/// Counters of a worker's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Device memory.
    pub device: Level,
    /// Host memory.
    pub host: Level,
    /// Files.
    pub disk: Level,
}

/// Counters of one tier of a worker's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Level {
    /// Objects there now.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
    /// The most bytes that it has held.
    pub peak_bytes: u64,
    /// Bytes that came from the tier above.
    pub demoted_bytes: u64,
    /// Bytes that went to a tier above.
    pub promoted_bytes: u64,
}
