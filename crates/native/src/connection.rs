//! Frames over the cluster's sockets, and the greeting in which both sides authenticate.
//!
//! Does not know what the messages mean. The blocking client uses these functions too, over
//! sockets that are always ready.
//!
//! *Invariant:* until both sides have authenticated, a frame is at most [`GREETING_LIMIT`] bytes.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::oneshot;

use super::error::{ConversationError, Error};
use super::process::random;
use cuda_cluster_machine::os::run_directory::Paths;
use cuda_cluster_wire::frame::{decode, encode, length};
use cuda_cluster_wire::greeting::{Answer, Challenge, GREETING_LIMIT, Role, VERSION, Welcome};
use cuda_cluster_wire::secret::Secret;

/// A connection's number in the process that accepted it; never reused.
pub(super) type ConnectionId = u64;

/// Connects to a process of the cluster, and authenticates both sides.
pub(super) async fn connect(
    paths: &Paths,
    process: &str,
    secret: &Secret,
    role: Role,
) -> Result<UnixStream, Error> {
    let path = paths.socket(process);
    let connect = UnixStream::connect(&path).await;
    let mut stream =
        connect.map_err(|source| Error::Socket { action: "connect to", path, source })?;
    greet(&mut stream, secret, role).await?;
    Ok(stream)
}

/// Sends a frame.
pub async fn send(
    writer: &mut (impl AsyncWriteExt + Unpin),
    message: &impl Serialize,
) -> Result<(), ConversationError> {
    Ok(writer.write_all(&encode(message)?).await?)
}

/// Receives a frame of at most `limit` bytes.
///
/// Not cancel safe: if it is dropped midway, the rest of a frame is read as the next one.
pub async fn receive<T: DeserializeOwned>(
    reader: &mut (impl AsyncReadExt + Unpin),
    limit: usize,
) -> Result<T, ConversationError> {
    let mut prefix = [0; 4];
    reader.read_exact(&mut prefix).await?;
    let mut bytes = vec![0; length(prefix, limit)?];
    reader.read_exact(&mut bytes).await?;
    Ok(decode(&bytes)?)
}

/// The listener's side of the greeting. `accept` decides which roles may connect.
async fn welcome<A>(
    stream: &mut (impl AsyncReadExt + AsyncWriteExt + Unpin),
    secret: &Secret,
    accept: impl FnOnce(Role) -> Option<A>,
) -> Result<A, ConversationError> {
    let challenge = Challenge::new(random()?);
    send(stream, &challenge).await?;
    let answer: Answer = receive(stream, GREETING_LIMIT).await?;
    if !answer.is_proven(secret, &challenge) {
        return Err(ConversationError::Proof);
    }
    let role = answer.role;
    let accepted = accept(role).ok_or(ConversationError::Role { role })?;
    send(stream, &answer.welcome(secret, &challenge)).await?;
    Ok(accepted)
}

/// Time that a connection has to authenticate.
const GREETING_TIME: Duration = Duration::from_secs(5);

/// Connections that may be authenticating at the same time.
const GREETINGS: usize = 64;

/// The connections that are authenticating, the oldest first. It gives way to a new one when there
/// are too many, so that silent ones keep nobody out.
#[derive(Default)]
pub(super) struct Greetings {
    /// Dropping one ends its connection.
    places: VecDeque<oneshot::Sender<Infallible>>,
}

/// A connection's place among those that are authenticating.
pub(super) struct Place {
    given_away: oneshot::Receiver<Infallible>,
}

impl Greetings {
    /// A place for a new connection.
    pub(super) fn place(&mut self) -> Place {
        self.places.retain(|place| !place.is_closed());
        if self.places.len() >= GREETINGS {
            self.places.pop_front();
        }
        let (place, given_away) = oneshot::channel();
        self.places.push_back(place);
        Place { given_away }
    }
}

impl Place {
    /// As [`welcome`], within a time, and as long as the connection keeps its place.
    pub(super) async fn welcome<A>(
        self,
        stream: &mut UnixStream,
        secret: &Secret,
        accept: impl FnOnce(Role) -> Option<A>,
    ) -> Result<A, ConversationError> {
        let greeting = tokio::time::timeout(GREETING_TIME, welcome(stream, secret, accept));
        tokio::select! {
            greeted = greeting => greeted.unwrap_or(Err(ConversationError::Slow)),
            _ = self.given_away => Err(ConversationError::Displaced),
        }
    }
}

/// The connecting side of the greeting.
pub async fn greet(
    stream: &mut (impl AsyncReadExt + AsyncWriteExt + Unpin),
    secret: &Secret,
    role: Role,
) -> Result<(), ConversationError> {
    let challenge: Challenge = receive(stream, GREETING_LIMIT).await?;
    if challenge.version != VERSION {
        return Err(ConversationError::Version { version: challenge.version });
    }
    let answer = challenge.answer(secret, role, random()?);
    send(stream, &answer).await?;
    let welcome: Welcome = match receive(stream, GREETING_LIMIT).await {
        Err(ConversationError::Broken(error)) if is_closed(&error) => {
            return Err(ConversationError::Refused);
        }
        welcome => welcome?,
    };
    if welcome.is_proven(secret, &challenge, &answer) {
        Ok(())
    } else {
        Err(ConversationError::Proof)
    }
}

/// Whether the other side has closed the connection.
pub(super) fn is_closed(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset)
}
