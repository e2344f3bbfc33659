//! The handle of a running supervisor.
//!
//! `actor` does the work, `core` makes the decisions.
//!
//! *Invariant:* dropping a [`Supervisor`] leaves no process of its cluster.

use std::sync::Arc;

use nix::sys::signal::Signal;
use tokio::sync::{broadcast, mpsc, watch};
use tokio::task::JoinHandle;

use super::actor::Actor;
use super::handle::{Ask, ControlRequest, Handle, Options, RequestError, StartError};
use super::{Cause, ClusterState, Escalation, Launch, Outcome, Record, Stall};
use cuda_cluster_machine::os::guardian::Guardian;
use cuda_cluster_machine::os::run_directory::RunDirectory;

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
        let lost = |text: String| Outcome::Failed(Cause::of_cluster(text));
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

    /// Requests the end, because the cluster can't go on for this reason.
    pub fn fail(&self, reason: String) {
        let _ = self.0.send(ControlRequest::Fail { reason });
    }

    /// Reports that its processes can't go on by themselves, or that they go on again.
    pub fn stalled(&self, stall: Option<Stall>) {
        let _ = self.0.send(ControlRequest::Stalled(stall));
    }

    /// Reports why nobody can look whether its processes go on, or that somebody can again.
    pub fn unseen(&self, why: Option<String>) {
        let _ = self.0.send(ControlRequest::Unseen(why));
    }

    /// Says that a signal is why the end is requested next.
    pub fn signalled(&self, signal: i32) {
        let name = Signal::try_from(signal).map_or("a signal", Signal::as_str);
        let _ = self.0.send(ControlRequest::Signalled(name));
    }

    /// Like [`Stopper::stop`]; workers that are expected to end (`run`) get this signal.
    pub fn stop_with(&self, how: Escalation, signal: i32) {
        self.signalled(signal);
        let _ = self.0.send(ControlRequest::Stop { how, signal: Some(signal) });
    }
}
