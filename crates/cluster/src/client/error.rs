//! The errors of a client, with hints for its user.
//!
//! *Invariant:* an error that a user can do something about has a hint.

use std::path::{Path, PathBuf};

use cuda_cluster_machine::os::run_directory::SecretFileError;
use cuda_cluster_native::error::ConversationError;
use cuda_cluster_wire::frame::FrameError;
use cuda_cluster_wire::greeting::VERSION;
use cuda_cluster_wire::tasks::TaskError;
use cuda_cluster_wire::value::ValueError;

/// Why a client's request failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum ClientError {
    /// The cluster's secret can't be read.
    #[error(transparent)]
    Secret(#[from] SecretFileError),
    /// A socket of the cluster can't be used.
    #[error("cannot talk over {}", path.display())]
    Socket {
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The other side does not know the secret, or has another version.
    #[error("whoever listens on {} does not belong to this cluster", path.display())]
    Stranger { path: PathBuf },
    /// The other side has another version.
    #[error(
        "whoever listens on {} speaks version {version}, and this program speaks {VERSION}",
        path.display()
    )]
    Version {
        path: PathBuf,
        /// The other side's version.
        version: u32,
    },
    /// A message can't be encoded or decoded.
    #[error("a message is not what it should be")]
    Frame(#[from] FrameError),
    /// Arguments can't be encoded, or a value is of another type.
    #[error(transparent)]
    Value(#[from] ValueError),
    /// The scheduler has ended.
    #[error("the scheduler is gone")]
    Gone,
    /// Nothing was received, and a process of the cluster does not answer its supervisor either.
    #[error("{process} does not answer since {since}")]
    NotAnswering {
        /// The process: `gpu3`, `scheduler`.
        process: String,
        /// Since when, as RFC 3339.
        since: String,
    },
    /// There is no result within the time limit. The task goes on.
    #[error("there is no result within {}", cuda_cluster_model::units::Span(*within))]
    TimedOut {
        /// The time limit.
        within: std::time::Duration,
    },
    /// There is no result.
    #[error(transparent)]
    Task(#[from] TaskError),
    /// A worker rejects a request.
    #[error("{worker} refuses: {reason}")]
    Refused { worker: String, reason: String },
    /// The arguments are too long.
    #[error("arguments of {bytes} bytes are longer than {limit}")]
    Arguments {
        /// Their length.
        bytes: usize,
        /// The maximum length.
        limit: usize,
    },
    /// A task can't compute so many objects.
    #[error("a task has 1 to {limit} outputs, not {outputs}")]
    Outputs { outputs: u32, limit: u32 },
    /// The cluster has no such worker, or it does not run.
    #[error("there is no worker {worker}")]
    NoWorker { worker: String },
    /// The system has no random numbers or threads left.
    #[error("cannot {action}")]
    System {
        /// What was attempted.
        action: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
}

impl ClientError {
    /// Converts an error of a conversation over this socket.
    pub(super) fn conversation(path: &Path, error: ConversationError) -> Self {
        let path = path.to_path_buf();
        match error {
            ConversationError::Broken(error) => match error.downcast::<ClientError>() {
                // The error explains why a wait was ended.
                Ok(error) => error,
                Err(source) => ClientError::Socket { path, source },
            },
            ConversationError::Frame(error) => ClientError::Frame(error),
            ConversationError::Version { version } => ClientError::Version { path, version },
            ConversationError::Random { reason } => {
                let source = std::io::Error::other(reason);
                ClientError::System { action: "make a random number", source }
            }
            ConversationError::Proof
            | ConversationError::Refused
            | ConversationError::Role { .. }
            | ConversationError::TooMany { .. }
            | ConversationError::NotRead
            | ConversationError::Displaced
            | ConversationError::Slow => ClientError::Stranger { path },
        }
    }

    /// What the user can do; `None` if that depends on the cause.
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
