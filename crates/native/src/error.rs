//! Why a process of the native engine ends, and why a connection to it fails.
//!
//! *Invariant:* an error that a user can do something about has a hint.

use std::path::PathBuf;

use cuda_cluster_data::{cuda, ucx};
use cuda_cluster_machine::os::run_directory::SecretFileError;
use cuda_cluster_model::ids::{GpuUuid, PciAddress};
use cuda_cluster_model::plan::{EngineKind, PlanTextError};
use cuda_cluster_model::text::in_full;
use cuda_cluster_wire::frame::FrameError;
use cuda_cluster_wire::greeting::Role;
use cuda_cluster_wire::links::trials;
use cuda_cluster_wire::status::MissingPort;

/// Why a process of the native engine ends.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum Error {
    /// An environment variable is missing or not what it should be.
    #[error("the environment variable {variable} is missing or not usable")]
    Variable { variable: &'static str },
    /// A file of the run directory cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The plan is not one that this version reads.
    #[error("{} cannot be used as a plan", path.display())]
    Plan {
        path: PathBuf,
        /// Where and why.
        source: PlanTextError,
    },
    /// The plan is another engine's.
    #[error("the plan is for the {engine} engine")]
    Engine { engine: EngineKind },
    /// The cluster's secret cannot be read.
    #[error(transparent)]
    Secret(#[from] SecretFileError),
    /// The system refused something.
    #[error("cannot {action}")]
    System {
        /// What was attempted.
        action: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
    /// The scheduler's socket cannot be used.
    #[error("cannot {action} {}", path.display())]
    Socket {
        /// `listen on` or `connect to`.
        action: &'static str,
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A message from the scheduler could not be read, or a message to it could not be sent.
    #[error("the connection to the scheduler failed")]
    Conversation(#[from] ConversationError),
    /// The scheduler ended, or closed the connection.
    #[error("the scheduler is gone")]
    SchedulerGone,
    /// Workers that were to measure did not report a result in time.
    #[error("no result for {ways} within {:.0?}", within)]
    Silent {
        /// The connections that were measured.
        ways: String,
        within: std::time::Duration,
    },
    /// UCX refused something.
    #[error("UCX does not work here")]
    Ucx(#[from] ucx::Error),
    /// The worker's GPU cannot be used.
    #[error("the GPU cannot be used")]
    Device(#[from] cuda::Error),
    /// The driver has another GPU where the plan's is.
    #[error("CUDA has {found} at {place}, the plan's GPU is {planned}")]
    OtherGpu { place: PciAddress, found: GpuUuid, planned: GpuUuid },
    /// The worker's GPU has faulted and no longer answers this process.
    #[error("the GPU has faulted: {fault}{}", in_task(task.as_deref()))]
    Fault {
        /// The driver's error.
        fault: cuda::Fault,
        /// The task that met the fault, and its function, if it was a task.
        task: Option<String>,
    },
    /// The plan is strict, and UCX has not opened all of the worker's NIC ports.
    #[error("planned for this worker, but not in use: {}", listed(missing))]
    Ports { missing: Vec<MissingPort> },
    /// Nothing that UCX has opened reaches another process.
    #[error(
        "UCX has opened nothing that reaches another worker, only {opened}{}",
        without(missing)
    )]
    Unreachable {
        /// What UCX has opened.
        opened: String,
        /// Planned NIC ports that are not in use.
        missing: Vec<MissingPort>,
    },
    /// The thread that owns UCX ended unexpectedly.
    #[error("the thread that owns UCX ended")]
    PlaneGone,
    /// The system has no random numbers.
    #[error("the system has no random numbers: {reason}")]
    Random {
        /// The system's error.
        reason: String,
    },
}

impl From<getrandom::Error> for Error {
    fn from(error: getrandom::Error) -> Self {
        Error::Random { reason: error.to_string() }
    }
}

fn listed(missing: &[MissingPort]) -> String {
    let each = missing.iter().map(|missing| format!("{} ({})", missing.port, missing.why));
    each.collect::<Vec<_>>().join(", ")
}

fn without(missing: &[MissingPort]) -> String {
    if missing.is_empty() { String::new() } else { format!("; missing: {}", listed(missing)) }
}

fn in_task(task: Option<&str>) -> String {
    task.map_or(String::new(), |task| format!(", in {task}"))
}

impl Error {
    /// What the user can do.
    pub fn hint(&self) -> Option<String> {
        match self {
            Error::Variable { .. } => {
                Some("this command is started by `cuda-cluster up`, not by hand".to_owned())
            }
            Error::Silent { .. } => Some(trials::SILENT_HINT.to_owned()),
            Error::Ucx(error) => error.hint(),
            Error::Device(error) => error.hint(),
            Error::OtherGpu { .. } => Some(
                "the machine has changed since it was probed: start the cluster anew".to_owned(),
            ),
            Error::Ports { .. } => {
                Some("without 'strict' the worker goes on over its other lanes".to_owned())
            }
            Error::Unreachable { .. } => {
                Some("add shared memory ('posix,cma' or 'sm') or 'tcp' to UCX_TLS".to_owned())
            }
            _ => None,
        }
    }

    /// The error, its causes and its hint, on one line.
    pub(super) fn in_full(&self) -> String {
        let mut text = in_full(self);
        if let Some(hint) = self.hint() {
            text.push_str("; hint: ");
            text.push_str(&hint);
        }
        text
    }
}

/// Why a connection over a socket of the cluster failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum ConversationError {
    /// The socket failed or was closed.
    #[error("the connection failed")]
    Broken(#[from] std::io::Error),
    /// A frame could not be decoded.
    #[error("the other side sent a message that cannot be decoded")]
    Frame(#[from] FrameError),
    /// The other side does not know the secret.
    #[error("the other side does not know the cluster's secret")]
    Proof,
    /// The other side closed the connection after it saw this side's proof.
    #[error(
        "the other side closed the connection when it saw this process's proof of the cluster's secret"
    )]
    Refused,
    /// The other side has another version.
    #[error("the other side speaks version {version}")]
    Version { version: u32 },
    /// A frame asks for too much.
    #[error(
        "a frame has {requests} requests, more than {}",
        cuda_cluster_wire::native::REQUESTS_LIMIT
    )]
    TooMany {
        /// How many.
        requests: usize,
    },
    /// The other side stopped reading.
    #[error("the other side does not read what it is sent")]
    NotRead,
    /// The other side has a role that this socket does not accept.
    #[error("this socket takes no {role} connections")]
    Role {
        /// The role that it claims.
        role: Role,
    },
    /// The system has no random numbers.
    #[error("the system has no random numbers: {reason}")]
    Random {
        /// The system's error.
        reason: String,
    },
    /// The other side had not authenticated when many others wanted to.
    #[error("the other side had not authenticated yet, and many others wanted to")]
    Displaced,
    /// The other side took too long to authenticate.
    #[error("the other side did not authenticate in time")]
    Slow,
}

impl From<getrandom::Error> for ConversationError {
    fn from(error: getrandom::Error) -> Self {
        ConversationError::Random { reason: error.to_string() }
    }
}
