//! What a client can fail with, and what its user can do then.
//!
//! *Invariant:* an error that a user can do something about has a hint.

use std::path::{Path, PathBuf};

use crate::engine::native::error::ConversationError;
use crate::os::run_directory::SecretFileError;
use crate::wire::frame::FrameError;
use crate::wire::greeting::VERSION;
use crate::wire::tasks::TaskError;
use crate::wire::value::ValueError;

/// Why a client cannot have what it asked for.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The cluster's secret cannot be had.
    #[error(transparent)]
    Secret(#[from] SecretFileError),
    /// A socket of the cluster cannot be used.
    #[error("cannot talk over {}", path.display())]
    Socket {
        /// The socket.
        path: PathBuf,
        /// The system's words.
        source: std::io::Error,
    },
    /// The other side does not know the secret, or is of another version.
    #[error("whoever listens on {} does not belong to this cluster", path.display())]
    Stranger {
        /// The socket.
        path: PathBuf,
    },
    /// The other side is of another version.
    #[error(
        "whoever listens on {} speaks version {version}, and this program speaks {VERSION}",
        path.display()
    )]
    Version {
        /// The socket.
        path: PathBuf,
        /// The other side's version.
        version: u32,
    },
    /// A message cannot be written or read.
    #[error("a message is not what it should be")]
    Frame(#[from] FrameError),
    /// Arguments cannot be written, or a value is of another type.
    #[error(transparent)]
    Value(#[from] ValueError),
    /// The scheduler ended.
    #[error("the scheduler is gone")]
    Gone,
    /// Nothing is heard, and a process of the cluster does not answer its supervisor either.
    #[error("{process} does not answer since {since}")]
    NotAnswering {
        /// The process: `gpu3`, `scheduler`.
        process: String,
        /// Since when, RFC 3339.
        since: String,
    },
    /// There is no result.
    #[error(transparent)]
    Task(#[from] TaskError),
    /// A worker does not do what it was asked for.
    #[error("{worker} refuses: {reason}")]
    Refused {
        /// The worker.
        worker: String,
        /// Its words.
        reason: String,
    },
    /// Arguments are longer than allowed.
    #[error("arguments of {bytes} bytes are longer than {limit}")]
    Arguments {
        /// Their length.
        bytes: usize,
        /// The longest allowed.
        limit: usize,
    },
    /// The system gives no random numbers or no thread.
    #[error("cannot {action}")]
    System {
        /// What was attempted.
        action: &'static str,
        /// The system's words.
        source: std::io::Error,
    },
}

impl ClientError {
    /// What broke a conversation over this socket.
    pub(super) fn conversation(path: &Path, error: ConversationError) -> Self {
        let path = path.to_path_buf();
        match error {
            ConversationError::Broken(error) => match error.downcast::<ClientError>() {
                // A wait that was ended says why.
                Ok(error) => error,
                Err(source) => ClientError::Socket { path, source },
            },
            ConversationError::Frame(error) => ClientError::Frame(error),
            ConversationError::Version { version } => ClientError::Version { path, version },
            ConversationError::Random(error) => {
                let source = std::io::Error::other(error.to_string());
                ClientError::System { action: "make a random number", source }
            }
            ConversationError::Proof
            | ConversationError::Refused
            | ConversationError::Role { .. }
            | ConversationError::TooMany { .. }
            | ConversationError::NotRead
            | ConversationError::Slow => ClientError::Stranger { path },
        }
    }

    /// What the user can do.
    pub fn hint(&self) -> Option<String> {
        match self {
            ClientError::Secret(_) | ClientError::Socket { .. } | ClientError::Gone => {
                Some("look at the cluster: cuda-cluster ps".to_owned())
            }
            ClientError::NotAnswering { process, .. } => Some(format!(
                "let it go on (kill -CONT), or start it again: cuda-cluster restart {process}; \
                 'supervision.unresponsive: restart' does so by itself"
            )),
            ClientError::Version { .. } => {
                Some("use the program that the cluster was started with".to_owned())
            }
            ClientError::Arguments { .. } => {
                Some("put what is large, and give it as an input".to_owned())
            }
            ClientError::Task(error) => error.hint(),
            _ => None,
        }
    }
}
