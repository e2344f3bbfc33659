//! Brings one object from a peer into this worker's store.
//!
//! A large one is read where the peer has it, if that is memory of the host that can be shared.
//! Otherwise it comes over UCX if the peer has it in memory, and over the peer's socket if it is in
//! the peer's spill file. Does not choose the peer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::io::AsyncReadExt;

use super::context::WorkerContext;
use super::objects::{Consumer, Room, Store, StoreError};
use crate::connection;
use crate::error::{ConversationError, Error};
use crate::plane::{Target, TransferError};
use cuda_cluster_data::memory::SHAREABLE;
use cuda_cluster_data::memory::view::View;
use cuda_cluster_data::ucx::Buffer;
use cuda_cluster_model::text::in_full;
use cuda_cluster_wire::frame::FRAME_LIMIT;
use cuda_cluster_wire::greeting::Role;
use cuda_cluster_wire::peer::Member;
use cuda_cluster_wire::tasks::{Bulk, BulkReply, ObjectId, TaskError};

/// Attempts after which a peer counts as unreachable.
const TRIES: u32 = 3;

/// A transfer may take this long, and a second more for every [`SLOWEST`] bytes: a peer that hangs
/// must not occupy a task, and the memory for its input, forever.
const TIME_LIMIT: Duration = Duration::from_secs(120);

/// Bytes per second that any link carries.
const SLOWEST: u64 = 1 << 20;

/// Bytes that are read from a socket at once.
const CHUNK: usize = 1 << 20;

/// A peer that does not tell in this time where an object is may be asked over UCX.
const VIEW_TIME: Duration = Duration::from_secs(5);

/// Time between two attempts.
const PAUSE: Duration = Duration::from_millis(50);

/// A fetch that has ended.
pub(super) struct Fetched {
    pub(super) object: ObjectId,
    pub(super) source: Member,
    pub(super) result: Result<Came, FetchError>,
}

/// What came of a fetch.
pub(super) struct Came {
    pub(super) bytes: u64,
    /// `None` if the object is read where it is, so that nothing was copied.
    pub(super) took: Option<Duration>,
}

/// Why an object could not be fetched.
#[derive(Debug, thiserror::Error)]
pub(super) enum FetchError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Transfer(#[from] TransferError),
    #[error(transparent)]
    Conversation(#[from] Error),
    #[error("{reason}")]
    Refused { reason: String },
    #[error("it did not come within {} s", limit.as_secs())]
    Slow { limit: Duration },
    #[error("a thread for waiting was lost")]
    Thread,
}

impl FetchError {
    /// Whether this worker had no room for it.
    pub(super) fn is_full(&self) -> bool {
        matches!(self, FetchError::Store(StoreError::NoRoom(_)))
    }

    /// Whether the peer reported that it does not have it.
    pub(super) fn is_missing(&self) -> bool {
        matches!(self, FetchError::Refused { .. })
    }

    /// The task's error, if the cause is this worker's memory and not the connection to the peer.
    pub(super) fn here(&self, task: ObjectId, worker: &str) -> Option<TaskError> {
        let FetchError::Store(error) = self else { return None };
        let (worker, message) = (worker.to_owned(), in_full(error));
        Some(match error {
            StoreError::NoRoom(_) => TaskError::NoRoom { task, worker, message },
            _ => TaskError::Failed { task, worker, message },
        })
    }
}

/// Fetches an object and stores it. If it finds no room beside running tasks and other fetches, it
/// is tried once more alone; if there is no room even then, there is none at all.
pub(super) async fn fetch(
    shared: &Arc<WorkerContext>,
    object: ObjectId,
    source: Member,
    bytes: u64,
) -> Fetched {
    let mut result = fetch_beside(shared, object, &source, bytes, Store::enter).await;
    if result.as_ref().is_err_and(FetchError::is_full) {
        result = fetch_beside(shared, object, &source, bytes, Store::enter_alone).await;
    }
    if let Err(error) = &result {
        tracing::warn!(%object, from = source.name, %error, "an object was not fetched");
    }
    Fetched { object, source, result }
}

async fn fetch_beside(
    shared: &Arc<WorkerContext>,
    object: ObjectId,
    source: &Member,
    bytes: u64,
    enter: fn(&Store) -> Consumer,
) -> Result<Came, FetchError> {
    // While it waits here, the object stays with its sender and takes no memory.
    let place = shared.fetches.acquire().await.map_err(|_| FetchError::Thread)?;
    let consumer = Arc::new(blocking(&shared.store, enter).await?);
    let (buffer, mut took) = attempts(shared, &consumer, object, source, bytes).await?;
    drop(place);
    let mut measures = !matches!(&buffer, Buffer::Host(memory) if memory.is_view());
    if let Some(link) = shared.links.get(&source.name) {
        took = link.carry(bytes, took).await;
        measures = true;
    }
    blocking(&shared.store, move |store| store.insert(&consumer, object, buffer)).await??;
    Ok(Came { bytes, took: measures.then_some(took) })
}

/// Runs something on a blocking thread that may wait for memory or write files.
async fn blocking<T: Send + 'static>(
    store: &Arc<Store>,
    call: impl FnOnce(&Store) -> T + Send + 'static,
) -> Result<T, FetchError> {
    let store = Arc::clone(store);
    tokio::task::spawn_blocking(move || call(&store)).await.map_err(|_| FetchError::Thread)
}

async fn attempts(
    shared: &Arc<WorkerContext>,
    consumer: &Arc<Consumer>,
    object: ObjectId,
    source: &Member,
    bytes: u64,
) -> Result<(Buffer, Duration), FetchError> {
    let mut tries = 0;
    loop {
        let error = match attempt(shared, consumer, object, source, bytes).await {
            Ok(came) => return Ok(came),
            Err(error) => error,
        };
        tries += 1;
        let lost = matches!(error, FetchError::Store(_) | FetchError::Refused { .. });
        if lost || tries == TRIES {
            return Err(error);
        }
        tokio::time::sleep(PAUSE).await;
    }
}

async fn attempt(
    shared: &Arc<WorkerContext>,
    consumer: &Arc<Consumer>,
    object: ObjectId,
    source: &Member,
    bytes: u64,
) -> Result<(Buffer, Duration), FetchError> {
    let length = usize::try_from(bytes).unwrap_or(usize::MAX);
    let room = room(shared, consumer, length).await?;
    let start = Instant::now();
    let limit = TIME_LIMIT + Duration::from_secs(bytes / SLOWEST);
    let coming = tokio::time::timeout(limit, bring(shared, consumer, object, source, room));
    let buffer = coming.await.unwrap_or(Err(FetchError::Slow { limit }))?;
    Ok((buffer, start.elapsed()))
}

async fn room(
    shared: &WorkerContext,
    consumer: &Arc<Consumer>,
    length: usize,
) -> Result<Room, FetchError> {
    let consumer = Arc::clone(consumer);
    Ok(blocking(&shared.store, move |store| store.receive(&consumer, length)).await??)
}

async fn bring(
    shared: &WorkerContext,
    consumer: &Arc<Consumer>,
    object: ObjectId,
    source: &Member,
    room: Room,
) -> Result<Buffer, FetchError> {
    let name = object.to_string();
    let length = room.len();
    if let Some(view) = in_place(shared, object, source, length).await {
        // To a device, it is copied.
        return Ok(blocking(&shared.store, move |_| room.view(view)).await??);
    }
    let room = match length {
        SHAREABLE.. => blocking(&shared.store, move |_| room.memory()).await??,
        _ => room.memory()?,
    };
    match shared.plane.get(&source.name, name, Target::Into(room), false).await {
        Ok(fetched) => Ok(fetched.buffer),
        Err(TransferError::Missing { .. }) => {
            from_socket(shared, consumer, object, source, length).await
        }
        Err(error) => Err(error.into()),
    }
}

/// The object where the peer has it, if it can be read there.
async fn in_place(
    shared: &WorkerContext,
    object: ObjectId,
    source: &Member,
    length: usize,
) -> Option<View> {
    if length < SHAREABLE {
        return None;
    }
    let viewing = tokio::time::timeout(VIEW_TIME, shared.views.view(&source.name, object));
    viewing.await.ok()?.filter(|view| view.len() == length)
}

async fn from_socket(
    shared: &WorkerContext,
    consumer: &Arc<Consumer>,
    object: ObjectId,
    source: &Member,
    length: usize,
) -> Result<Buffer, FetchError> {
    let connecting = connection::connect(&shared.paths, &source.name, &shared.secret, Role::Bulk);
    let mut stream = connecting.await?;
    let talk = |error: ConversationError| FetchError::Conversation(error.into());
    // The memory that was given to UCX is free again. Ask the peer only once there is room, because
    // it soon disconnects a reader that does not read.
    let mut buffer = self::room(shared, consumer, length).await?.memory()?;
    let question = Bulk::Get { object, reads: false };
    connection::send(&mut stream, &question).await.map_err(talk)?;
    match connection::receive(&mut stream, FRAME_LIMIT).await.map_err(talk)? {
        BulkReply::Bytes(bytes) if bytes == length as u64 => {
            let mut chunk = vec![0; CHUNK.min(length)];
            let mut at = 0;
            while at < length {
                let bytes = CHUNK.min(length - at);
                let read = stream.read_exact(&mut chunk[..bytes]).await;
                read.map_err(|error| talk(error.into()))?;
                buffer.write_at(at, &chunk[..bytes]).map_err(StoreError::Device)?;
                at += bytes;
            }
            Ok(buffer)
        }
        BulkReply::Refused { reason } => Err(FetchError::Refused { reason }),
        _ => Err(FetchError::Refused { reason: "an answer to another question".to_owned() }),
    }
}
