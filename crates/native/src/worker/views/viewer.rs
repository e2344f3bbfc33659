//! The reader's side: a connection to each peer whose objects are read here.
//!
//! *Invariant:* the peer is told that a view has ended, or the connection is closed, only after
//! nothing in this process refers to its bytes.

use std::collections::{HashMap, VecDeque};
use std::io::{self, ErrorKind::NotConnected};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, oneshot};

use super::CARRIER;
use crate::connection;
use crate::error::{ConversationError, Error};
use cuda_cluster_data::memory::spare;
use cuda_cluster_data::memory::view::{View, Viewed};
use cuda_cluster_machine::os::passing;
use cuda_cluster_machine::os::run_directory::Paths;
use cuda_cluster_model::text::in_full;
use cuda_cluster_wire::greeting::{GREETING_LIMIT, Role};
use cuda_cluster_wire::secret::Secret;
use cuda_cluster_wire::tasks::{FromViewer, ObjectId, ToViewer};

/// A peer that does not greet in this time is asked again for the next object.
const CONNECT_TIME: Duration = Duration::from_secs(5);

/// Time until memory is looked for again.
const AGAIN: Duration = Duration::from_millis(200);

/// The connections, by peer.
pub(in crate::worker) struct Views {
    paths: Paths,
    secret: Secret,
    peers: Mutex<HashMap<String, mpsc::UnboundedSender<Ask>>>,
}

/// To the task that has a connection.
enum Ask {
    View { object: ObjectId, reply: oneshot::Sender<View> },
    Ended { view: u64 },
}

/// Tells the peer that a view has ended, when it is dropped.
struct Ending {
    view: u64,
    asks: mpsc::UnboundedSender<Ask>,
    /// The connection stays open as long as there is a view.
    _socket: Arc<OwnedFd>,
}

impl Drop for Ending {
    fn drop(&mut self) {
        // If nobody hears it, the peer has ended.
        let _ = self.asks.send(Ask::Ended { view: self.view });
    }
}

impl Views {
    pub(in crate::worker) fn new(paths: Paths, secret: Secret) -> Self {
        Self { paths, secret, peers: Mutex::default() }
    }

    /// An object where a peer has it; `None` if it cannot be read there, whatever the cause.
    pub(in crate::worker) async fn view(&self, peer: &str, object: ObjectId) -> Option<View> {
        let (reply, answer) = oneshot::channel();
        // If its task has ended, the reply is dropped.
        let _ = self.connection(peer).send(Ask::View { object, reply });
        answer.await.ok()
    }

    fn connection(&self, peer: &str) -> mpsc::UnboundedSender<Ask> {
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(asks) = peers.get(peer).filter(|asks| !asks.is_closed()) {
            return asks.clone();
        }
        let (asks, incoming) = mpsc::unbounded_channel();
        peers.insert(peer.to_owned(), asks.clone());
        let (paths, secret, peer) = (self.paths.clone(), self.secret.clone(), peer.to_owned());
        let weak = asks.downgrade();
        tokio::spawn(async move {
            let talked = talk(&paths, &peer, &secret, incoming, weak).await;
            if let Err(error) = talked {
                tracing::debug!(peer, "its objects are not read in place: {}", in_full(&error));
            }
        });
        asks
    }
}

/// A connection, which reads while it writes: the peer does both, too, and neither socket has room
/// for everything.
struct Talk {
    asks: mpsc::WeakUnboundedSender<Ask>,
    socket: Arc<OwnedFd>,
    state: Mutex<State>,
    recalled: mpsc::UnboundedSender<u64>,
}

#[derive(Default)]
struct State {
    /// Who waits for an answer, in the order of the questions.
    waiting: VecDeque<oneshot::Sender<View>>,
    /// Where the views are.
    shown: HashMap<u64, (Arc<Viewed>, u64)>,
}

/// The half that is written. Dropping it does not shut the socket down: the peer would take that
/// for the end of all views.
struct Writer(Option<OwnedWriteHalf>);

impl Drop for Writer {
    fn drop(&mut self) {
        if let Some(half) = self.0.take() {
            half.forget();
        }
    }
}

async fn talk(
    paths: &Paths,
    peer: &str,
    secret: &Secret,
    incoming: mpsc::UnboundedReceiver<Ask>,
    asks: mpsc::WeakUnboundedSender<Ask>,
) -> Result<(), Error> {
    let connecting = connection::connect(paths, peer, secret, Role::Viewer);
    let connected = tokio::time::timeout(CONNECT_TIME, connecting).await;
    let stream = connected.unwrap_or(Err(ConversationError::Slow.into()))?;
    let system = |source| Error::System { action: "keep a peer's connection", source };
    let socket = Arc::new(stream.as_fd().try_clone_to_owned().map_err(system)?);
    let (read, write) = stream.into_split();
    let (recalled, recalls) = mpsc::unbounded_channel();
    let talk = Talk { asks, socket, state: Mutex::default(), recalled };
    let error = tokio::select! {
        error = talk.hear(read) => error,
        error = talk.ask(Writer(Some(write)), incoming) => error,
        error = talk.give_back(recalls) => error,
    };
    talk.part();
    match error {
        ConversationError::Broken(error) if connection::is_closed(&error) => Ok(()),
        error => Err(error.into()),
    }
}

impl Talk {
    fn state(&self) -> MutexGuard<'_, State> {
        // No step between two changes of it can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends until the connection ends: why it did.
    async fn ask(
        &self,
        mut write: Writer,
        mut incoming: mpsc::UnboundedReceiver<Ask>,
    ) -> ConversationError {
        let Some(write) = &mut write.0 else { return io::Error::from(NotConnected).into() };
        // The sender is among the connections of `Views`, which live as long as the process.
        while let Some(ask) = incoming.recv().await {
            let request = match ask {
                Ask::View { object, reply } => {
                    self.state().waiting.push_back(reply);
                    FromViewer::View { object }
                }
                Ask::Ended { view } => {
                    self.state().shown.remove(&view);
                    FromViewer::Ended { view }
                }
            };
            if let Err(error) = connection::send(write, &request).await {
                return error;
            }
        }
        io::Error::from(NotConnected).into()
    }

    /// Receives until the connection ends: why it did.
    async fn hear(&self, mut read: OwnedReadHalf) -> ConversationError {
        loop {
            match connection::receive(&mut read, GREETING_LIMIT).await {
                Ok(ToViewer::Here { view, offset, bytes }) => match file(read.as_ref()).await {
                    Ok(file) => self.shown(file, view, offset, bytes),
                    Err(error) => return error.into(),
                },
                // Who waits learns it from the end of the channel.
                Ok(ToViewer::Elsewhere) => drop(self.state().waiting.pop_front()),
                // It is received below.
                Ok(ToViewer::Recall { view }) => drop(self.recalled.send(view)),
                Err(error) => return error,
            }
        }
    }

    fn shown(&self, file: Option<OwnedFd>, view: u64, offset: u64, bytes: u64) {
        let reply = self.state().waiting.pop_front();
        if let (Some(reply), Some(shown)) = (reply, self.show(file, view, offset, bytes)) {
            // If nobody waits any more, the view ends here.
            let _ = reply.send(shown);
        }
    }

    fn show(&self, file: Option<OwnedFd>, view: u64, offset: u64, bytes: u64) -> Option<View> {
        let asks = self.asks.upgrade()?;
        let lease = Ending { view, asks, _socket: Arc::clone(&self.socket) };
        // Without a descriptor, this process has too many.
        let viewed = spare::view(file?)
            .inspect_err(|error| tracing::debug!("a peer's memory cannot be mapped: {error}"))
            .ok()?;
        self.state().shown.insert(view, (Arc::clone(&viewed), offset));
        viewed.view(offset, usize::try_from(bytes).ok()?, Box::new(lease))
    }

    /// Takes copies of what the peer needs back, one after the other, because each needs memory.
    async fn give_back(&self, mut recalls: mpsc::UnboundedReceiver<u64>) -> ConversationError {
        while let Some(view) = recalls.recv().await {
            let place = self.state().shown.get(&view).cloned();
            let Some((viewed, offset)) = place else { continue };
            let detach = move || viewed.detach(offset);
            match tokio::task::spawn_blocking(detach).await {
                Ok(Ok(())) => {
                    if let Some(asks) = self.asks.upgrade() {
                        let _ = asks.send(Ask::Ended { view });
                    }
                }
                failed => {
                    tracing::warn!(?failed, "a peer's memory cannot be given back yet");
                    tokio::time::sleep(AGAIN).await;
                    let _ = self.recalled.send(view);
                }
            }
        }
        // Its sender lives as long as this.
        io::Error::from(NotConnected).into()
    }

    /// The peer has ended: nothing of it stays.
    fn part(&self) {
        let mut viewed: Vec<Arc<Viewed>> = Vec::new();
        for (one, _) in self.state().shown.values() {
            if !viewed.iter().any(|other| Arc::ptr_eq(one, other)) {
                viewed.push(Arc::clone(one));
            }
        }
        drop(tokio::task::spawn_blocking(move || {
            for viewed in viewed {
                if let Err(error) = viewed.abandon() {
                    tracing::warn!("memory of a peer that has ended stays: {error}");
                }
            }
        }));
    }
}

/// The descriptor behind a message; `None` if this process has too many already.
async fn file(stream: &UnixStream) -> io::Result<Option<OwnedFd>> {
    let mut byte = CARRIER;
    match stream.async_io(Interest::READABLE, || passing::receive(stream, &mut byte)).await {
        Ok((0, _)) => Err(io::ErrorKind::UnexpectedEof.into()),
        Ok((_, files)) => Ok(files.into_iter().next()),
        Err(error) if passing::is_without_room(&error) => Ok(None),
        Err(error) => Err(error),
    }
}
