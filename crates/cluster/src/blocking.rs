//! The embedded API for programs without an event loop of their own.
//!
//! Each cluster has a thread for its event loop. All calls block the calling thread, and may be
//! made anywhere: inside tokio they hold up the event loop that they are called on, so programs
//! that have one use [`super::Cluster`].
//!
//! *Invariant:* no call panics, wherever it is made.

use std::io;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::JoinHandle;

use tokio::runtime;
use tokio::sync::oneshot;

use super::{Builder, ControlError, Handle, LaunchFailure, MeasureError, UpError, Verification};
use cuda_cluster_machine::os::event_loop;
use cuda_cluster_model::plan::Plan;
use cuda_cluster_supervise::{ClusterState, Outcome, Record};

/// A running cluster, owned by this program; like [`super::Cluster`], with blocking calls.
///
/// Dropping it stops the cluster, and waits until nothing of it is left.
#[derive(Debug)]
pub struct Cluster {
    /// `None` once it is stopped.
    cluster: Option<Arc<super::Cluster>>,
    event_loop: EventLoop,
}

#[derive(Debug)]
struct EventLoop {
    tasks: runtime::Handle,
    end: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl EventLoop {
    fn start() -> io::Result<Self> {
        let event_loop = event_loop::new()?;
        let tasks = event_loop.handle().clone();
        let (end, ended) = oneshot::channel();
        // Ends, too, when the sender is dropped.
        let run = move || drop(event_loop.block_on(ended));
        let thread = std::thread::Builder::new().name("cluster".to_owned()).spawn(run)?;
        Ok(Self { tasks, end: Some(end), thread: Some(thread) })
    }

    /// Waits for a future, on a thread that tokio may own. `None` if it panics.
    fn run<T: Send + 'static>(
        &self,
        future: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        let (sender, receiver) = mpsc::sync_channel(1);
        self.tasks.spawn(async move {
            let _ = sender.send(future.await);
        });
        receiver.recv().ok()
    }
}

impl Drop for EventLoop {
    fn drop(&mut self) {
        drop(self.end.take());
        // The thread does not panic.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// The error of a call whose event loop is gone.
fn gone() -> ControlError {
    ControlError::Lost("the event loop of this cluster has ended".into())
}

impl Builder {
    /// Like [`Builder::launch`], for a program without an event loop.
    ///
    /// # Errors
    /// As there.
    pub fn launch_blocking(self) -> Result<Cluster, LaunchFailure> {
        let event_loop = EventLoop::start().map_err(UpError::Runtime)?;
        let failed = || UpError::Runtime(io::Error::other("the event loop has ended"));
        let cluster = event_loop.run(self.launch()).ok_or_else(failed)??;
        Ok(Cluster { cluster: Some(Arc::new(cluster)), event_loop })
    }
}

impl Cluster {
    fn cluster(&self) -> &super::Cluster {
        self.cluster.as_ref().unwrap_or_else(|| panic!("only `stop` and `drop` take it"))
    }

    fn ask<T: Send + 'static, E: From<ControlError> + Send + 'static, F>(
        &self,
        question: impl FnOnce(Arc<super::Cluster>) -> F,
    ) -> Result<T, E>
    where
        F: Future<Output = Result<T, E>> + Send + 'static,
    {
        let Some(cluster) = self.cluster.clone() else { return Err(gone().into()) };
        self.event_loop.run(question(cluster)).unwrap_or_else(|| Err(gone().into()))
    }

    /// A handle for other threads, and for tasks of an event loop.
    pub fn handle(&self) -> &Handle {
        self.cluster().handle()
    }

    /// The plan with its reasons.
    pub fn plan(&self) -> &Plan {
        self.cluster().plan()
    }

    /// The phase of the cluster and of each process, as `ps -o json` prints them.
    ///
    /// # Errors
    /// If the supervisor can't be reached.
    pub fn state(&self) -> Result<ClusterState, ControlError> {
        self.ask(|cluster| async move { cluster.state().await })
    }

    /// Phases, deaths and notes from now on; the last one is the end.
    ///
    /// # Errors
    /// If the supervisor can't be reached.
    pub fn events(&self) -> Result<Events<'_>, ControlError> {
        let events = self.ask(|cluster| async move { cluster.events().await })?;
        Ok(Events { events: Some(events), event_loop: &self.event_loop })
    }

    /// Restarts a worker or, given the scheduler's name, the whole cluster.
    ///
    /// # Errors
    /// If no process has that name, or the supervisor can't be reached.
    pub fn restart(&self, process: &str) -> Result<(), ControlError> {
        let process = process.to_owned();
        self.ask(|cluster| async move { cluster.restart(&process).await })
    }

    /// Changes the number of running workers: the first ones of the plan.
    ///
    /// # Errors
    /// If the plan has fewer, or the supervisor can't be reached.
    pub fn scale(&self, workers: usize) -> Result<(), ControlError> {
        self.ask(move |cluster| async move { cluster.scale(workers).await })
    }

    /// [`Handle::verify`].
    ///
    /// # Errors
    /// As there.
    pub fn verify(&self) -> Result<Verification, MeasureError> {
        self.ask(|cluster| async move { cluster.handle().verify().await })
    }

    /// Waits until the cluster has ended, by whatever cause, and tells how.
    ///
    /// # Errors
    /// If the event loop of this cluster is gone.
    pub fn wait(&self) -> Result<Outcome, ControlError> {
        self.ask(|cluster| async move { Ok(cluster.wait().await) })
    }

    /// [`Cluster::stop`](super::Cluster::stop).
    pub fn stop(self) {
        drop(self);
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // The calls that have borrowed it have returned, and their futures with them.
        if let Some(cluster) = self.cluster.take().and_then(Arc::into_inner) {
            self.event_loop.run(cluster.stop());
        }
    }
}

/// The stream of a running cluster's events, as an iterator.
#[derive(Debug)]
pub struct Events<'a> {
    /// `None` after the last event.
    events: Option<super::Events>,
    event_loop: &'a EventLoop,
}

impl Iterator for Events<'_> {
    type Item = Result<Record, ControlError>;

    /// Waits for the next event; the last one is the cluster's end ([`Record::outcome`]).
    fn next(&mut self) -> Option<Self::Item> {
        let mut events = self.events.take()?;
        let next = async move {
            let next = events.next().await;
            (next, events)
        };
        let (next, events) = self.event_loop.run(next)?;
        self.events = Some(events);
        next.transpose()
    }
}
