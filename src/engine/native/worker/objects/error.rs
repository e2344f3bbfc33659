//! Why an object cannot be kept or had.

use std::path::PathBuf;

use super::core::NoRoom;
use crate::cuda;
use crate::wire::tasks::ObjectId;

/// Why an object cannot be kept or had.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// There is no room, and nothing that could make room.
    #[error(transparent)]
    NoRoom(#[from] NoRoom),
    /// The system gives no memory, whatever the limit says.
    #[error("the host has no memory for {bytes} bytes")]
    Memory {
        /// What was asked for.
        bytes: usize,
    },
    /// The object is not here.
    #[error("object {object} is not here")]
    Unknown { object: ObjectId },
    /// The file cannot be made, written or read.
    #[error("cannot {action} the file for objects in {}", directory.display())]
    File {
        action: &'static str,
        /// Where it lies.
        directory: PathBuf,
        source: std::io::Error,
    },
    /// The file gave back other bytes than it got.
    #[error("object {object} came back from its file with a wrong checksum")]
    Checksum { object: ObjectId },
    /// The device refused.
    #[error(transparent)]
    Device(#[from] cuda::Error),
}

impl StoreError {
    /// Whether the object's bytes are not to be had here any more, whatever is tried.
    pub(crate) fn is_lost(&self) -> bool {
        match self {
            StoreError::Unknown { .. } | StoreError::Checksum { .. } => true,
            StoreError::File { action, .. } => *action == "read from",
            StoreError::NoRoom(_) | StoreError::Memory { .. } | StoreError::Device(_) => false,
        }
    }
}
