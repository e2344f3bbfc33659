//! The handle of a running supervisor.
//!
//! `actor` does the work, `core` makes the decisions.
//!
//! *Invariant:* dropping a [`Supervisor`] leaves no process of its cluster.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use tokio::sync::{broadcast, mpsc, oneshot, watch};
use tokio::task::JoinHandle;

use super::actor::{Actor, ControlRequest};
use super::gpu::GpuWatch;
use super::{Cause, ClusterState, Escalation, Launch, Outcome, Record};
use crate::os::guardian::{Guardian, GuardianError};
use crate::os::run_directory::{RunDirectory, RunDirectoryError};

/// Options of a supervisor.
#[derive(Clone, Debug)]
pub struct Options {
    /// The program with the hidden subcommands: `cuda-cluster`, or any program whose `main` begins
    /// with [`crate::os::dispatch`].
    pub helper: PathBuf,
    /// Whether to create a control group if possible.
    pub control_groups: bool,
    /// Queries GPUs; without it, a dead process's GPU counts as free.
    pub gpus: Option<Arc<dyn GpuWatch>>,
    /// The reader of the workers' output, if any.
    pub output: Option<OutputPipe>,
}

/// A pipe for the workers' output, encoded by [`crate::wire::output`]. A reader that does not read
/// blocks the workers, and nothing else.
#[derive(Clone, Debug)]
pub struct OutputPipe {
    /// The writing end.
    pub pipe: Arc<OwnedFd>,
    /// Whether a worker's standard output and standard error are two streams, rather than one that
    /// keeps their common order.
    pub separate_streams: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            helper: PathBuf::from("/proc/self/exe"),
            control_groups: true,
            gpus: None,
            output: None,
        }
    }
}

/// Why a supervisor could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The file for the process id cannot be written.
    #[error("cannot write {}", path.display())]
    PidFile {
        /// The file.
        path: PathBuf,
        /// The cause.
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
        /// The socket.
        path: PathBuf,
        /// The cause.
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
pub enum RequestError {
    /// No process has that name.
    #[error("there is no process {name:?}; there are {}", known.join(", "))]
    Unknown {
        /// The name.
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

/// A cluster's running supervisor, in a task of its own.
#[derive(Debug)]
pub struct Supervisor {
    guardian: Arc<Guardian>,
    requests: mpsc::UnboundedSender<ControlRequest>,
    state: watch::Receiver<ClusterState>,
    records: broadcast::Sender<Record>,
    task: Option<JoinHandle<Outcome>>,
}

impl Supervisor {
    /// Starts the guardian, the control API and the first process, and returns.
    ///
    /// Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// If the guardian or the control socket can't be created.
    pub async fn start(
        launch: Launch,
        directory: RunDirectory,
        options: Options,
    ) -> Result<Self, StartError> {
        let (actor, handle) = Actor::prepare(launch, directory, options).await?;
        let guardian = actor.guardian();
        let task = tokio::spawn(actor.run());
        let Handle { requests, state, records } = handle;
        Ok(Self { guardian, requests, state, records, task: Some(task) })
    }

    /// The state, and all its changes.
    pub fn state(&self) -> watch::Receiver<ClusterState> {
        self.state.clone()
    }

    /// Subscribes to the records from now on.
    pub fn events(&self) -> broadcast::Receiver<Record> {
        self.records.subscribe()
    }

    /// Waits until the cluster is READY for the first time.
    ///
    /// # Errors
    /// With the cause, as soon as the cluster can't become READY; [`Supervisor::wait`] then waits
    /// for the end of its processes.
    pub async fn ready(&self) -> Result<(), Option<Cause>> {
        let mut state = self.state.clone();
        let settled = |state: &ClusterState| !state.state.is_first();
        match state.wait_for(settled).await {
            Ok(state) if state.ready_after_ms.is_some() => Ok(()),
            Ok(state) => Err(state.cause.clone()),
            Err(_) => Err(None),
        }
    }

    /// Requests the end; returns at once.
    pub fn stop(&self, how: Escalation) {
        self.stopper().stop(how);
    }

    /// A handle that requests the end from elsewhere, such as a task that waits for Ctrl-C.
    pub fn stopper(&self) -> Stopper {
        Stopper(self.requests.clone())
    }

    /// Reports that the cluster has been verified, if READY waits for that.
    pub fn verified(&self) {
        // An ended supervisor ignores the request.
        let _ = self.requests.send(ControlRequest::Verified);
    }

    /// Restarts a worker or, given the scheduler's name, the whole cluster.
    ///
    /// # Errors
    /// If no process has that name, or the cluster is ending.
    pub async fn restart(&self, process: &str) -> Result<(), RequestError> {
        self.requests.restart(process).await
    }

    /// Changes the number of running workers: the first ones of the launch.
    ///
    /// # Errors
    /// If the launch has fewer, or the cluster is ending.
    pub async fn scale(&self, workers: usize) -> Result<(), RequestError> {
        self.requests.scale(workers).await
    }

    /// Waits until everything has ended.
    ///
    /// After a success the run directory is removed; after a failure its logs are kept.
    pub async fn wait(mut self) -> Outcome {
        let lost = |text: String| {
            Outcome::Failed(Cause { process: None, text, exit: None, log_tail: Vec::new() })
        };
        match self.task.take() {
            Some(task) => task.await.unwrap_or_else(|error| lost(error.to_string())),
            None => lost("the supervisor was not at work".to_owned()),
        }
    }
}

impl Drop for Supervisor {
    /// Kills all processes, and waits until they are gone.
    fn drop(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
            self.guardian.end();
        }
    }
}

/// Sends requests to a supervisor without keeping it alive.
#[derive(Clone, Debug)]
pub struct Stopper(mpsc::UnboundedSender<ControlRequest>);

impl Stopper {
    /// Requests the end; returns at once.
    pub fn stop(&self, how: Escalation) {
        // An ended supervisor ignores the request.
        let _ = self.0.send(ControlRequest::Stop { how, signal: None });
    }

    /// Reports that the cluster has been verified, if READY waits for that.
    pub fn verified(&self) {
        let _ = self.0.send(ControlRequest::Verified);
    }

    /// Like [`Stopper::stop`]; workers that are expected to end (`run`) get this signal.
    pub fn stop_with(&self, how: Escalation, signal: i32) {
        let _ = self.0.send(ControlRequest::Stop { how, signal: Some(signal) });
    }
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
