//! Listens to what processes write on their status pipes, and asks whether they answer.
//!
//! *Invariant:* no line makes it keep more than [`status::LINE_LIMIT`] bytes, and a process that
//! reads nothing holds nobody up.

use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

use nix::sys::socket::{MsgFlags, send};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;

use super::core::Event;
use crate::os::guardian::Key;
use crate::wire::status;

/// The supervisor's end of a status pipe, by its two directions.
pub(super) fn halves(pipe: UnixStream) -> std::io::Result<(OwnedReadHalf, OwnedWriteHalf)> {
    pipe.set_nonblocking(true)?;
    Ok(tokio::net::UnixStream::from_std(pipe)?.into_split())
}

/// Asks a process whether it answers.
pub(super) fn ask(pipe: &OwnedWriteHalf) {
    let now = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    // A process that has closed its end is heard of by whoever listens.
    let _ = send(pipe.as_ref().as_raw_fd(), status::QUESTION, now);
}

/// Reads a process's status pipe until nobody can write to it any more.
pub(super) async fn listen(pipe: OwnedReadHalf, key: Key, events: mpsc::Sender<Event>) {
    let mut pipe = BufReader::new(pipe);
    let mut line = Vec::new();
    while read_line(&mut pipe, &mut line).await {
        let text = String::from_utf8_lossy(&line);
        // A line that is no status is a program's own mistake, and none of the cluster's.
        if let Ok(status) = status::decode(text.trim_end())
            && events.send(Event::Said { key, status }).await.is_err()
        {
            return;
        }
    }
    // Nobody listens when the cluster has ended.
    let _ = events.send(Event::Hushed { key }).await;
}

/// Reads the next line of at most [`status::LINE_LIMIT`] bytes; a longer one comes in pieces, none
/// of which is a status. Says whether there was one.
async fn read_line(pipe: &mut (impl tokio::io::AsyncBufRead + Unpin), line: &mut Vec<u8>) -> bool {
    line.clear();
    let mut limited = pipe.take(status::LINE_LIMIT as u64);
    let read = limited.read_until(b'\n', line).await;
    matches!(read, Ok(1..))
}
