//! The reader's side: a connection to each peer whose objects are read here.
//!
//! *Invariant:* the peer is told that a view has ended, or the connection is closed, only after
//! nothing in this process refers to its bytes.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::net::unix::OwnedReadHalf;
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

/// A connection's state.
struct Talk {
    asks: mpsc::WeakUnboundedSender<Ask>,
    socket: Arc<OwnedFd>,
    /// Who waits for an answer, in the order of the questions.
    waiting: VecDeque<oneshot::Sender<View>>,
    /// Where the views are.
    shown: HashMap<u64, (Arc<Viewed>, u64)>,
}

async fn talk(
    paths: &Paths,
    peer: &str,
    secret: &Secret,
    mut incoming: mpsc::UnboundedReceiver<Ask>,
    asks: mpsc::WeakUnboundedSender<Ask>,
) -> Result<(), Error> {
    let stream = connection::connect(paths, peer, secret, Role::Viewer).await?;
    let system = |source| Error::System { action: "keep a peer's connection", source };
    let socket = Arc::new(stream.as_fd().try_clone_to_owned().map_err(system)?);
    let (read, mut write) = stream.into_split();
    let (sender, mut messages) = mpsc::channel(1);
    let mut talk = Talk { asks, socket, waiting: VecDeque::new(), shown: HashMap::new() };
    let mut hearing = std::pin::pin!(hear(read, sender));
    let error = loop {
        let request = tokio::select! {
            error = &mut hearing => break error,
            Some((message, file)) = messages.recv() => {
                talk.told(message, file);
                continue;
            }
            ask = incoming.recv() => match ask {
                // Nobody reads objects any more.
                None => return Ok(()),
                Some(Ask::View { object, reply }) => {
                    talk.waiting.push_back(reply);
                    FromViewer::View { object }
                }
                Some(Ask::Ended { view }) => {
                    talk.shown.remove(&view);
                    FromViewer::Ended { view }
                }
            },
        };
        if let Err(error) = connection::send(&mut write, &request).await {
            break error;
        }
    };
    for (viewed, _) in talk.shown.values() {
        viewed.forget_idle();
    }
    match error {
        ConversationError::Broken(error) if connection::is_closed(&error) => Ok(()),
        error => Err(error.into()),
    }
}

/// Receives messages until the connection ends: why it did.
async fn hear(
    mut read: OwnedReadHalf,
    messages: mpsc::Sender<(ToViewer, Option<OwnedFd>)>,
) -> ConversationError {
    loop {
        let message = match connection::receive(&mut read, GREETING_LIMIT).await {
            Ok(message) => message,
            Err(error) => return error,
        };
        let file = match message {
            ToViewer::Here { .. } => match file(read.as_ref()).await {
                Ok(file) => Some(file),
                Err(error) => return error.into(),
            },
            ToViewer::Elsewhere | ToViewer::Recall { .. } => None,
        };
        // The other half of the same task takes them.
        let _ = messages.send((message, file)).await;
    }
}

/// The descriptor behind a message.
async fn file(stream: &UnixStream) -> io::Result<OwnedFd> {
    let mut byte = CARRIER;
    let received =
        stream.async_io(Interest::READABLE, || passing::receive(stream, &mut byte)).await?;
    let (_, files) = received;
    files.into_iter().next().ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

impl Talk {
    fn told(&mut self, message: ToViewer, file: Option<OwnedFd>) {
        match message {
            ToViewer::Here { view, offset, bytes } => {
                let reply = self.waiting.pop_front();
                let shown = file.and_then(|file| self.show(file, view, offset, bytes));
                if let (Some(reply), Some(shown)) = (reply, shown) {
                    // If nobody waits any more, the view ends here.
                    let _ = reply.send(shown);
                }
            }
            // Who waits learns it from the end of the channel.
            ToViewer::Elsewhere => drop(self.waiting.pop_front()),
            ToViewer::Recall { view } => self.give_back(view),
        }
    }

    fn show(&mut self, file: OwnedFd, view: u64, offset: u64, bytes: u64) -> Option<View> {
        let asks = self.asks.upgrade()?;
        let lease = Ending { view, asks, _socket: Arc::clone(&self.socket) };
        let viewed = spare::view(file)
            .inspect_err(|error| tracing::warn!("a peer's memory cannot be mapped: {error}"))
            .ok()?;
        self.shown.insert(view, (Arc::clone(&viewed), offset));
        viewed.view(offset, usize::try_from(bytes).ok()?, Box::new(lease))
    }

    /// Takes a copy of what the peer needs back.
    fn give_back(&self, view: u64) {
        let Some((viewed, offset)) = self.shown.get(&view) else { return };
        let (viewed, offset, asks) = (Arc::clone(viewed), *offset, self.asks.clone());
        tokio::task::spawn_blocking(move || match viewed.detach(offset) {
            Ok(()) => {
                if let Some(asks) = asks.upgrade() {
                    let _ = asks.send(Ask::Ended { view });
                }
            }
            Err(error) => tracing::warn!("a peer's memory cannot be given back: {error}"),
        });
    }
}
