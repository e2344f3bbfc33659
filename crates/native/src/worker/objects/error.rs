//! Why an object cannot be stored or read.

use std::path::PathBuf;

use super::no_room::NoRoom;
use cuda_cluster_data::cuda;
use cuda_cluster_wire::tasks::ObjectId;

/// Why an object cannot be stored or read.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// There is no room, and nothing can make room.
    #[error(transparent)]
    NoRoom(#[from] NoRoom),
    /// The system has no memory, although the limit permits it.
    #[error("the host has no memory for {bytes} bytes")]
    Memory {
        /// The bytes asked for.
        bytes: usize,
    },
    /// The object is not here.
    #[error("object {object} is not here")]
    Unknown { object: ObjectId },
    /// The file cannot be made, written or read.
    #[error("cannot {action} the file for objects in {}", directory.display())]
    File {
        action: &'static str,
        /// The file's directory.
        directory: PathBuf,
        source: std::io::Error,
    },
    /// The file returned other bytes than were written to it.
    #[error("object {object} came back from its file with a wrong checksum")]
    Checksum { object: ObjectId },
    /// The device reported an error.
    #[error(transparent)]
    Device(#[from] cuda::Error),
}

impl StoreError {
    /// Whether this worker has lost the object's bytes for good.
    pub(crate) fn is_lost(&self) -> bool {
        match self {
            StoreError::Unknown { .. } | StoreError::Checksum { .. } => true,
            StoreError::File { action, .. } => *action == "read from",
            StoreError::NoRoom(_) | StoreError::Memory { .. } | StoreError::Device(_) => false,
        }
    }
}
