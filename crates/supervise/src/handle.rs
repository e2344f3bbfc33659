//! What a supervisor is started with, what it can be asked, and the channels for both.
//!
//! *Invariant:* every request that expects an answer gets one, or an error when the supervisor has
//! ended.

use std::fmt;
use std::future::Future;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;

use tokio::sync::{broadcast, mpsc, oneshot, watch};

use super::gpu::GpuWatch;
use super::{ClusterState, Escalation, Record, Stall};
use cuda_cluster_machine::os::guardian::GuardianError;
use cuda_cluster_machine::os::run_directory::RunDirectoryError;
use cuda_cluster_model::plan::Program;

/// Options of a supervisor.
#[derive(Clone, Debug)]
pub struct Options {
    /// The program with the hidden subcommands: `cuda-cluster`, or any program whose `main` begins
    /// with [`cuda_cluster_machine::os::dispatch`].
    pub helper: PathBuf,
    /// Whether to create a control group if possible.
    pub control_groups: bool,
    /// Queries GPUs; without it, a dead process's GPU counts as free.
    pub gpus: Option<Arc<dyn GpuWatch>>,
    /// The reader of the workers' output, if any.
    pub output: Option<OutputPipe>,
    /// Standard input for one of the workers; the others', and without it all workers', is empty.
    pub input: Option<Input>,
    /// Tells workers that are started again together of each other; without it they are told what
    /// they were before.
    pub meeting: Option<Arc<dyn Meet>>,
    /// Who still reads the run directory when the cluster has ended: it is there until the sender
    /// is dropped, or for some seconds.
    pub reader: Option<watch::Receiver<()>>,
}

/// Tells workers that are started together of each other.
pub trait Meet: Send + Sync + fmt::Debug {
    /// Prepares another start, the `restart`th after the first, and returns the programs of these
    /// workers, which are places in [`Launch::workers`](super::Launch::workers) in the order of
    /// their ranks.
    fn meet(self: Arc<Self>, restart: u32, members: Vec<usize>) -> Meeting;
}

/// The programs of a start, or why there are none.
pub type Meeting = Pin<Box<dyn Future<Output = Result<Vec<Program>, String>> + Send>>;

/// A pipe for the workers' output, encoded by [`cuda_cluster_wire::output`]. A reader that does not
/// read blocks the workers, and nothing else.
#[derive(Clone, Debug)]
pub struct OutputPipe {
    /// The writing end.
    pub pipe: Arc<OwnedFd>,
    /// Whether a worker's standard output and standard error are two streams, rather than one that
    /// keeps their common order.
    pub separate_streams: bool,
}

/// Standard input for a worker's first process; a later one's is empty.
#[derive(Clone, Debug)]
pub struct Input {
    /// The worker's place in [`Launch::workers`](super::Launch::workers).
    pub worker: usize,
    /// What it reads.
    pub from: Arc<OwnedFd>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            helper: PathBuf::from("/proc/self/exe"),
            control_groups: true,
            gpus: None,
            output: None,
            input: None,
            meeting: None,
            reader: None,
        }
    }
}

/// Why a supervisor could not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum StartError {
    /// The file for the process id cannot be written.
    #[error("cannot write {}", path.display())]
    PidFile {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// There is no guardian.
    #[error("the cluster's guardian could not be started")]
    Guardian(#[source] GuardianError),
    /// The run directory's files cannot be written.
    #[error("the run directory cannot be used")]
    RunDirectory(#[source] RunDirectoryError),
    /// The control API's socket could not be created.
    #[error("cannot listen on {}", path.display())]
    Control {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
}

impl StartError {
    /// A hint for the user.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Guardian(error) => error.hint(),
            Self::RunDirectory(error) => error.hint(),
            Self::Control { .. } | Self::PidFile { .. } => None,
        }
    }
}

/// Why a request is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum RequestError {
    /// No process has that name.
    #[error("there is no process {name:?}; there are {}", known.join(", "))]
    Unknown {
        name: String,
        /// The existing names.
        known: Vec<String>,
    },
    /// More workers than were planned.
    #[error("{wanted} workers are wanted, {planned} are planned")]
    TooMany {
        /// The requested number.
        wanted: usize,
        /// The planned number.
        planned: usize,
    },
    /// The cluster is ending or has ended.
    #[error("the cluster has ended or is ending")]
    Ending,
}

/// A request to the supervisor.
#[derive(Debug)]
pub(super) enum ControlRequest {
    Stop {
        how: Escalation,
        signal: Option<i32>,
    },
    /// A signal of this name is why the end will be requested.
    Signalled(&'static str),
    Verified,
    /// The cluster can't go on.
    Fail {
        reason: String,
    },
    /// Processes can't go on, or go on again.
    Stalled(Option<Stall>),
    /// Nobody can look whether processes go on, for this reason, or somebody can again.
    Unseen(Option<String>),
    /// For the state after the processes have been checked.
    Look {
        answer: oneshot::Sender<()>,
    },
    /// For the state after the processes have answered.
    Ask {
        answer: oneshot::Sender<()>,
    },
    Restart {
        process: String,
        answer: oneshot::Sender<Result<(), RequestError>>,
    },
    Scale {
        workers: usize,
        answer: oneshot::Sender<Result<(), RequestError>>,
    },
}

/// The owner's ends of a supervisor's channels.
#[derive(Clone, Debug)]
pub(super) struct Handle {
    pub(super) requests: mpsc::UnboundedSender<ControlRequest>,
    pub(super) state: watch::Receiver<ClusterState>,
    pub(super) records: broadcast::Sender<Record>,
}

/// Sends a request and waits for the answer.
pub(super) trait Ask {
    async fn restart(&self, process: &str) -> Result<(), RequestError>;
    async fn scale(&self, workers: usize) -> Result<(), RequestError>;
}

impl Ask for mpsc::UnboundedSender<ControlRequest> {
    async fn restart(&self, process: &str) -> Result<(), RequestError> {
        let (answer, answered) = oneshot::channel();
        let request = ControlRequest::Restart { process: process.to_owned(), answer };
        self.send(request).map_err(|_| RequestError::Ending)?;
        answered.await.map_err(|_| RequestError::Ending)?
    }

    async fn scale(&self, workers: usize) -> Result<(), RequestError> {
        let (answer, answered) = oneshot::channel();
        self.send(ControlRequest::Scale { workers, answer }).map_err(|_| RequestError::Ending)?;
        answered.await.map_err(|_| RequestError::Ending)?
    }
}
