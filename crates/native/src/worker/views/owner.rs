//! The owner's side: where objects are, and which peers still read them.
//!
//! *Invariant:* memory that a peer may still read is neither written nor freed, not even when the
//! connection breaks while the peer lives: then it is kept for good.

use std::collections::HashMap;
use std::io;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;

use super::CARRIER;
use crate::connection;
use crate::error::ConversationError;
use crate::worker::objects::{Store, is_released, on_host};
use cuda_cluster_data::memory::HostMemory;
use cuda_cluster_data::ucx::Buffer;
use cuda_cluster_machine::os::passing;
use cuda_cluster_model::text::in_full;
use cuda_cluster_wire::greeting::GREETING_LIMIT;
use cuda_cluster_wire::tasks::{FromViewer, ObjectId, ToViewer};

/// Requests that wait to be carried out; more wait in the socket.
const BACKLOG: usize = 64;

/// What a peer reads.
struct Shown {
    buffer: Arc<Buffer>,
    /// Whether the peer was asked to give it back.
    recalled: bool,
}

impl Shown {
    /// Its pages go to the system once it is dropped, if no object is there any more, because
    /// others may have pinned them.
    fn spend(&self) {
        if let Some(memory) = on_host(&self.buffer) {
            memory.spend();
        }
    }
}

/// Frees memory, which takes a while, on another thread.
fn give_back(shown: impl Send + 'static) {
    drop(tokio::task::spawn_blocking(move || drop(shown)));
}

/// Serves a peer until it ends.
pub(in crate::worker) async fn show(stream: UnixStream, store: &Store) {
    let (read, write) = stream.into_split();
    let (sender, requests) = mpsc::channel(BACKLOG);
    // If this is dropped before the peer has ended, such as when this process ends, the memory
    // stays as it is, and the kernel frees it.
    let mut shown = ManuallyDrop::new(HashMap::new());
    let mut reading = std::pin::pin!(hear(read, sender));
    let answering = answer(write, requests, store, &mut shown);
    let error = tokio::select! {
        error = &mut reading => error,
        // The peer hears nothing more, but what it reads it may read until its end.
        failed = answering => {
            if let Err(error) = failed {
                tracing::debug!("a peer is told nothing more: {}", in_full(&error));
            }
            reading.await
        }
    };
    match error {
        // A peer ends its connection after its last view, and the kernel after its process: then
        // another process may still be copying from it.
        ConversationError::Broken(error) if connection::is_closed(&error) => {
            let shown = ManuallyDrop::into_inner(shown);
            shown.values().for_each(Shown::spend);
            give_back(shown);
        }
        error => tracing::warn!(views = shown.len(), "a peer's views stay: {}", in_full(&error)),
    }
}

/// Receives until the connection ends: why it did.
async fn hear(mut read: OwnedReadHalf, requests: mpsc::Sender<FromViewer>) -> ConversationError {
    loop {
        match connection::receive(&mut read, GREETING_LIMIT).await {
            // If nobody answers any more, it waits for the end all the same.
            Ok(request) => drop(requests.send(request).await),
            Err(error) => return error,
        }
    }
}

async fn answer(
    mut write: OwnedWriteHalf,
    mut requests: mpsc::Receiver<FromViewer>,
    store: &Store,
    shown: &mut HashMap<u64, Shown>,
) -> Result<(), ConversationError> {
    let mut recalls = store.recalls();
    let mut last = 0;
    loop {
        tokio::select! {
            request = requests.recv() => match request {
                None => return Ok(()),
                Some(FromViewer::Ended { view }) => match shown.remove(&view) {
                    Some(shown) if shown.recalled => give_back(shown),
                    shown => drop(shown),
                },
                Some(FromViewer::View { object }) => {
                    last += 1;
                    view(&mut write, last, object, store, shown).await?;
                }
            },
            // The store has the sender.
            _ = recalls.changed() => recall(&mut write, shown).await?,
        }
    }
}

/// Tells where an object is, and remembers that the peer reads it.
async fn view(
    write: &mut OwnedWriteHalf,
    view: u64,
    object: ObjectId,
    store: &Store,
    shown: &mut HashMap<u64, Shown>,
) -> Result<(), ConversationError> {
    let buffer = store.share(object);
    let place = buffer.as_deref().and_then(on_host).and_then(HostMemory::shared);
    let place = place.map(|(arena, offset)| (Arc::clone(arena), offset as u64));
    // Without a descriptor for readers, it is not shared.
    let file = place.as_ref().and_then(|(arena, _)| arena.read_only().ok());
    let (Some(buffer), Some((_, offset)), Some(file)) = (buffer, &place, file) else {
        return connection::send(write, &ToViewer::Elsewhere).await;
    };
    let bytes = buffer.len() as u64;
    // Before the peer knows of it.
    shown.insert(view, Shown { buffer, recalled: false });
    connection::send(write, &ToViewer::Here { view, offset: *offset, bytes }).await?;
    let stream: &UnixStream = (*write).as_ref();
    let sent = stream.async_io(Interest::WRITABLE, || passing::send(stream, &CARRIER, &[file]));
    match sent.await? {
        0 => Err(io::Error::from(io::ErrorKind::WriteZero).into()),
        _ => Ok(()),
    }
}

/// Asks for what is needed back. Its pages go to the system then: a device or another process may
/// still be reading them.
async fn recall(
    write: &mut OwnedWriteHalf,
    shown: &mut HashMap<u64, Shown>,
) -> Result<(), ConversationError> {
    for (view, shown) in shown {
        if !shown.recalled && is_released(&shown.buffer) {
            shown.recalled = true;
            shown.spend();
            connection::send(write, &ToViewer::Recall { view: *view }).await?;
        }
    }
    Ok(())
}
