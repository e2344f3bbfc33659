//! The handle of the data plane, which any thread may use.
//!
//! Does no work itself: it sends commands to the thread that owns UCX, and receives its replies.

use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::thread::{self, JoinHandle};

use tokio::sync::{mpsc as async_mpsc, oneshot};

use super::commands::{Command, Inbox, Opening, Report};
use super::owner::Owner;
use super::transfer::{self, Fetched, Target, TransferError};
use crate::error::Error;
use cuda_cluster_data::ucx::{self, Buffer};
use cuda_cluster_wire::native::{Measurement, ToWorker};
use cuda_cluster_wire::peer::Member;
use cuda_cluster_wire::secret::Secret;

type Thread = JoinHandle<Result<(), Error>>;

/// The handle of the data plane. The thread ends after [`Plane::stop`], or when it fails.
#[derive(Clone)]
pub struct Plane {
    inbox: Arc<Inbox>,
    next: Arc<AtomicU64>,
    /// Taken by the first [`Plane::stop`].
    thread: Arc<Mutex<Option<Thread>>>,
}

impl Plane {
    /// Starts the thread. Its reports come through the receiver, which closes when the thread ends.
    ///
    /// # Errors
    /// If the system refuses a thread or an event; errors of UCX are returned by [`Plane::stop`].
    pub fn spawn(
        me: Member,
        secret: Secret,
        opening: Opening,
    ) -> Result<(Self, async_mpsc::UnboundedReceiver<Report>), Error> {
        let (inbox, outlet) = ucx::thread::inbox()?;
        let (reports, incoming) = async_mpsc::unbounded_channel();
        let own = Arc::clone(&inbox);
        let run = move || {
            let mut owner = Owner::open(me, secret, opening, reports, own)?;
            Ok(outlet.serve(&mut owner)?)
        };
        let thread = thread::Builder::new()
            .name("ucx".to_owned())
            .spawn(run)
            .map_err(|source| Error::System { action: "start the UCX thread", source })?;
        let plane = Self {
            inbox,
            next: Arc::new(AtomicU64::new(1)),
            thread: Arc::new(Mutex::new(Some(thread))),
        };
        Ok((plane, incoming))
    }

    /// Passes on a message from the scheduler.
    pub fn notify(&self, message: ToWorker) {
        self.inbox.send(Command::FromScheduler(message));
    }

    /// Offers an object to the peers; it replaces an earlier one of that name.
    pub fn put(&self, name: impl Into<String>, buffer: impl Into<Buffer>) {
        let buffer = Arc::new(buffer.into());
        self.inbox.send(Command::Put { name: name.into(), buffer });
    }

    /// Offers an object that other owners keep too.
    pub fn put_shared(&self, name: impl Into<String>, buffer: Arc<Buffer>) {
        self.inbox.send(Command::Put { name: name.into(), buffer });
    }

    /// Stops offering an object. Transfers that have begun continue.
    pub fn remove(&self, name: impl Into<String>) {
        self.inbox.send(Command::Remove { name: name.into() });
    }

    /// Fetches an object from a peer; with `checked`, verifies its CRC-32C.
    ///
    /// Dropping the future cancels the transfer.
    pub fn get(
        &self,
        peer: impl Into<String>,
        name: impl Into<String>,
        target: Target,
        checked: bool,
    ) -> Transfer {
        let (peer, name) = (peer.into(), name.into());
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (reply, answer) = oneshot::channel();
        let request = transfer::Request {
            id,
            peer: peer.clone(),
            name: name.clone(),
            target,
            checked,
            reply,
        };
        self.inbox.send(Command::Get(request));
        Transfer { answer, inbox: Arc::clone(&self.inbox), id, peer, name, done: false }
    }

    /// Sends a message to a peer and waits for its return.
    ///
    /// # Errors
    /// If there is no such peer, or it is lost before the reply.
    pub async fn echo(&self, peer: impl Into<String>) -> Result<(), TransferError> {
        let (reply, answer) = oneshot::channel();
        self.inbox.send(Command::Echo { peer: peer.into(), reply });
        answer.await.unwrap_or(Err(TransferError::Ended))
    }

    /// Measures the link to a peer; the result comes as [`Report::Measured`].
    pub fn measure(&self, id: u64, measurement: Measurement) {
        self.inbox.send(Command::Measure { id, measurement });
    }

    /// Asks whether the thread still works; it answers with [`Report::Pulse`].
    pub fn pulse(&self) {
        self.inbox.send(Command::Pulse);
    }

    /// Closes every connection and waits for the thread to end.
    ///
    /// # Errors
    /// Why the thread ended, if it ended before this.
    pub fn stop(&self) -> Result<(), Error> {
        self.inbox.send(Command::Stop);
        let thread = self.thread.lock().map_err(|_| Error::PlaneGone)?.take();
        match thread.map(JoinHandle::join) {
            None => Ok(()),
            Some(Ok(result)) => result,
            Some(Err(_)) => Err(Error::PlaneGone),
        }
    }
}

impl std::fmt::Debug for Plane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Plane").finish_non_exhaustive()
    }
}

/// An object that is being fetched.
#[must_use = "a transfer that is dropped is cancelled"]
pub struct Transfer {
    answer: oneshot::Receiver<Result<transfer::Arrived, TransferError>>,
    inbox: Arc<Inbox>,
    id: u64,
    peer: String,
    name: String,
    done: bool,
}

impl Future for Transfer {
    type Output = Result<Fetched, TransferError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = std::task::ready!(Pin::new(&mut self.answer).poll(context));
        self.done = true;
        Poll::Ready(match answer.unwrap_or(Err(TransferError::Ended)) {
            // Here rather than on the UCX thread, which must not be held up.
            Ok(arrived) => arrived.verify(&self.peer, &self.name),
            Err(error) => Err(error),
        })
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        if !self.done {
            self.inbox.send(Command::Cancel { id: self.id });
        }
    }
}

impl std::fmt::Debug for Transfer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Transfer").field("peer", &self.peer).field("name", &self.name).finish()
    }
}
