//! The worker's own socket: clients store and fetch objects here, and peers fetch spilled ones, or
//! read objects where they are ([`views`]).
//!
//! A client on this machine copies an object from this process's memory itself if it can, and this
//! process copies an object from the client's. Otherwise the bytes go over the socket. Both sides
//! find the other's process by the kernel's word for who is at the other end.
//!
//! Has no access rules: every connection that knows the secret may fetch every object.
//!
//! *Invariant:* a request is answered only after the other side has proven that it knows the
//! secret, and memory whose address was sent stays as it is until the connection is closed or the
//! other side has read it.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::{Semaphore, mpsc, oneshot};

use super::objects::{Lent, Store, StoreError};
use super::runner::WorkerEvent;
use super::views;
use crate::connection::{self, Greetings};
use crate::error::{ConversationError, Error};
use crate::listener::Listener;
use cuda_cluster_data::copy;
use cuda_cluster_data::ucx::Buffer;
use cuda_cluster_model::text::in_full;
use cuda_cluster_wire::frame::FRAME_LIMIT;
use cuda_cluster_wire::greeting::Role;
use cuda_cluster_wire::secret::Secret;
use cuda_cluster_wire::tasks::{Bulk, BulkReply, OBJECT_LIMIT, ObjectId, Report};

/// Connections served at the same time; others wait.
const CONNECTIONS: usize = 64;

/// Time that the other side may take to read or write [`CHUNK`] bytes.
const TRANSFER_TIME: Duration = Duration::from_secs(60);

/// Bytes per second at which the other side reads this process's memory at least.
const SLOWEST: usize = 1 << 20;

/// Bytes that are copied from a device, or sent, at once.
const CHUNK: usize = 1 << 20;

/// Serves a store on its socket.
pub(super) fn serve(
    path: &Path,
    secret: Secret,
    store: Arc<Store>,
    events: mpsc::UnboundedSender<WorkerEvent>,
) -> Result<(), Error> {
    let listener = Listener::new(path, secret.clone())?;
    tokio::spawn(accept(listener, secret, store, events));
    Ok(())
}

async fn accept(
    mut listener: Listener,
    secret: Secret,
    store: Arc<Store>,
    events: mpsc::UnboundedSender<WorkerEvent>,
) {
    let served = Arc::new(Semaphore::new(CONNECTIONS));
    let mut greetings = Greetings::default();
    loop {
        let Ok(mut stream) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let (secret, store, events) = (secret.clone(), Arc::clone(&store), events.clone());
        let (served, place) = (Arc::clone(&served), greetings.place());
        tokio::spawn(async move {
            let is_for_workers = |role| matches!(role, Role::Bulk | Role::Viewer).then_some(role);
            match place.welcome(&mut stream, &secret, is_for_workers).await {
                Ok(Role::Viewer) => views::show(stream, &store).await,
                Ok(_) => {
                    // Nobody closes the semaphore.
                    let _permit = served.acquire_owned().await;
                    // A broken connection concerns only the other side.
                    let _ = converse(stream, store, events).await;
                }
                Err(error) => tracing::warn!("a connection is refused: {}", in_full(&error)),
            }
        });
    }
}

async fn converse(
    stream: UnixStream,
    store: Arc<Store>,
    events: mpsc::UnboundedSender<WorkerEvent>,
) -> Result<(), ConversationError> {
    // The object whose address the other side knows. Declared before the stream, because it is
    // released only after the stream is closed, which tells a slow reader that it came too late.
    let mut read_by_other: Option<Lent> = None;
    let mut stream = stream;
    let pid = stream.peer_cred().ok().and_then(|peer| peer.pid()).unwrap_or(0);
    let pid = u32::try_from(pid).ok().filter(|pid| *pid > 0);
    loop {
        let next = connection::receive(&mut stream, FRAME_LIMIT);
        let request = match &read_by_other {
            None => next.await?,
            Some(lent) => {
                let limit = TRANSFER_TIME + Duration::from_secs((lent.len() / SLOWEST) as u64);
                let next = tokio::time::timeout(limit, next).await;
                next.unwrap_or(Err(ConversationError::Slow))?
            }
        };
        read_by_other = None;
        match request {
            Bulk::Done => {}
            Bulk::Counters => {
                let reply = BulkReply::Counters(store.counters());
                connection::send(&mut stream, &reply).await?;
            }
            Bulk::AtWork => {
                let (asked, answer) = oneshot::channel();
                let _ = events.send(WorkerEvent::Asked(asked));
                // The event loop is gone only when the process ends.
                let Ok(at_work) = answer.await else { return Ok(()) };
                connection::send(&mut stream, &BulkReply::AtWork(at_work)).await?;
            }
            Bulk::Get { object, reads } => {
                let lending = Arc::clone(&store);
                let lent = tokio::task::spawn_blocking(move || lending.lend(object)).await;
                match lent {
                    Ok(Ok(lent)) => match lent.host().filter(|_| reads) {
                        Some(memory) => {
                            let (address, bytes) = (memory.as_ptr().addr(), memory.len());
                            let (address, bytes) = (address as u64, bytes as u64);
                            read_by_other = Some(lent);
                            connection::send(&mut stream, &BulkReply::At { address, bytes })
                                .await?;
                        }
                        None => give(&mut stream, lent).await?,
                    },
                    Ok(Err(error)) => refuse(&mut stream, &error).await?,
                    Err(_) => return Ok(()),
                }
            }
            Bulk::Put { object, bytes, address } if bytes <= OBJECT_LIMIT => {
                let address = address.and_then(|address| usize::try_from(address).ok());
                let place = address.map(|address| (pid, address));
                match take(&mut stream, &store, object, bytes, place).await? {
                    Ok(bytes) => {
                        let _ = events.send(WorkerEvent::Report(Report::Stored { object, bytes }));
                        connection::send(&mut stream, &BulkReply::Stored).await?;
                    }
                    Err(error) => refuse(&mut stream, &error).await?,
                }
            }
            Bulk::Put { bytes, .. } => {
                let reason = format!("{bytes} bytes are more than {OBJECT_LIMIT}");
                return connection::send(&mut stream, &BulkReply::Refused { reason }).await;
            }
        }
    }
}

/// Receives an object once there is room for it: from this process and address, or else over the
/// connection.
async fn take(
    stream: &mut UnixStream,
    store: &Arc<Store>,
    object: ObjectId,
    bytes: u64,
    place: Option<(Option<u32>, usize)>,
) -> Result<Result<u64, StoreError>, ConversationError> {
    let length = usize::try_from(bytes).unwrap_or(usize::MAX);
    let lost = || io::Error::other("a thread for waiting was lost");
    let mut given = None;
    for enter in [Store::enter, Store::enter_alone] {
        let store = Arc::clone(store);
        let room = move || {
            let consumer = enter(&store);
            store.allocate_on_host(&consumer, length).map(|room| (consumer, room))
        };
        match tokio::task::spawn_blocking(room).await.map_err(|_| lost())? {
            Err(StoreError::NoRoom(full)) => given = Some(Err(StoreError::NoRoom(full))),
            other => {
                given = Some(other);
                break;
            }
        }
    }
    let (consumer, mut room) = match given {
        Some(Ok(given)) => given,
        Some(Err(error)) => {
            // The other side reads the answer only after it has sent everything.
            let mut chunk = vec![0; CHUNK.min(length)];
            let mut left = if place.is_none() { length } else { 0 };
            while left > 0 {
                let bytes = CHUNK.min(left);
                read(stream, &mut chunk[..bytes]).await?;
                left -= bytes;
            }
            return Ok(Err(error));
        }
        None => return Err(lost().into()),
    };
    let mut is_read = false;
    if let Some((pid, address)) = place {
        let reading = move || {
            let memory = room.host_mut().unwrap_or_default();
            let pid = pid.ok_or(io::ErrorKind::NotFound);
            let result = pid.map_err(Into::into).and_then(|pid| copy::read(pid, address, memory));
            (room, result)
        };
        let result: io::Result<()>;
        (room, result) = tokio::task::spawn_blocking(reading).await.map_err(|_| lost())?;
        is_read = result.is_ok();
        if !is_read {
            connection::send(stream, &BulkReply::Send).await?;
        }
    }
    if !is_read {
        let Buffer::Host(memory) = &mut room else { return Err(lost().into()) };
        for chunk in memory.chunks_mut(CHUNK) {
            read(stream, chunk).await?;
        }
    }
    let store = Arc::clone(store);
    let keep = move || store.insert(&consumer, object, room);
    Ok(tokio::task::spawn_blocking(keep).await.map_err(|_| lost())?)
}

/// Reads from a connection, with a time limit so that it cannot make others wait forever.
async fn read(stream: &mut UnixStream, bytes: &mut [u8]) -> Result<(), ConversationError> {
    let read = tokio::time::timeout(TRANSFER_TIME, stream.read_exact(bytes)).await;
    read.map_err(|_| ConversationError::Slow)??;
    Ok(())
}

/// Sends an object while the other side reads; the lent object stays in memory meanwhile.
async fn give(stream: &mut UnixStream, lent: Lent) -> Result<(), ConversationError> {
    let length = lent.len();
    connection::send(stream, &BulkReply::Bytes(length as u64)).await?;
    let mut chunk = vec![0; CHUNK.min(length)];
    let mut offset = 0;
    while offset < length {
        let bytes = CHUNK.min(length - offset);
        // The length was already sent, so an error of the device or file must end the connection.
        let copied = lent.read(offset, &mut chunk[..bytes]);
        copied.map_err(|error| io::Error::other(error.to_string()))?;
        let written = tokio::time::timeout(TRANSFER_TIME, stream.write_all(&chunk[..bytes])).await;
        written.map_err(|_| ConversationError::Slow)??;
        offset += bytes;
    }
    Ok(())
}

async fn refuse(stream: &mut UnixStream, error: &StoreError) -> Result<(), ConversationError> {
    connection::send(stream, &BulkReply::Refused { reason: error.to_string() }).await
}
