//! Frames over the scheduler's socket, and the greeting that proves both sides.
//!
//! Does not know what the messages mean.
//!
//! *Invariant:* before the proofs, no more than [`GREETING_LIMIT`] bytes are read for one frame.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixListener;

use super::error::{ConversationError, Error};
use super::process::random;
use crate::wire::native::{
    Answer, Challenge, GREETING_LIMIT, VERSION, Welcome, answer_proof, decode, encode, length,
    welcome_proof,
};
use crate::wire::secret::Secret;

/// A connection's number in the process that accepted it; never used twice.
pub(super) type ConnectionId = u64;

/// Listens where only this user can connect.
pub(super) fn listen(path: &Path) -> Result<UnixListener, Error> {
    let socket = |source| Error::Socket { action: "listen on", path: path.to_path_buf(), source };
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(socket(error)),
        _ => {}
    }
    let listener = UnixListener::bind(path).map_err(socket)?;
    fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(socket)?;
    Ok(listener)
}

/// Sends a frame.
pub(super) async fn send(
    writer: &mut (impl AsyncWriteExt + Unpin),
    message: &impl Serialize,
) -> Result<(), ConversationError> {
    Ok(writer.write_all(&encode(message)?).await?)
}

/// Receives a frame of at most `limit` bytes.
///
/// Must not be dropped while it waits, or the rest of a frame is taken for the next one.
pub(super) async fn receive<T: DeserializeOwned>(
    reader: &mut (impl AsyncReadExt + Unpin),
    limit: usize,
) -> Result<T, ConversationError> {
    let mut prefix = [0; 4];
    reader.read_exact(&mut prefix).await?;
    let mut bytes = vec![0; length(prefix, limit)?];
    reader.read_exact(&mut bytes).await?;
    Ok(decode(&bytes)?)
}

/// The scheduler's side of the greeting.
pub(super) async fn welcome(
    stream: &mut (impl AsyncReadExt + AsyncWriteExt + Unpin),
    secret: &Secret,
) -> Result<(), Error> {
    let challenge = Challenge { version: VERSION, nonce: random()? };
    send(stream, &challenge).await?;
    let Answer { nonce, proof } = receive(stream, GREETING_LIMIT).await?;
    if proof != answer_proof(secret, &challenge, &nonce) {
        return Err(ConversationError::Proof.into());
    }
    Ok(send(stream, &Welcome { proof: welcome_proof(secret, &challenge, &nonce) }).await?)
}

/// The connecting side of the greeting.
pub(super) async fn greet(
    stream: &mut (impl AsyncReadExt + AsyncWriteExt + Unpin),
    secret: &Secret,
) -> Result<(), Error> {
    let challenge: Challenge = receive(stream, GREETING_LIMIT).await?;
    if challenge.version != VERSION {
        return Err(ConversationError::Version { version: challenge.version }.into());
    }
    let nonce = random()?;
    let answer = Answer { nonce, proof: answer_proof(secret, &challenge, &nonce) };
    send(stream, &answer).await?;
    let Welcome { proof } = match receive(stream, GREETING_LIMIT).await {
        Err(ConversationError::Broken(_)) => return Err(ConversationError::Refused.into()),
        welcome => welcome?,
    };
    if proof == welcome_proof(secret, &challenge, &nonce) {
        Ok(())
    } else {
        Err(ConversationError::Proof.into())
    }
}
