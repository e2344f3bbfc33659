//! What is open to one living process: its status pipe both ways, and a watch for its end; and what
//! is seen of those that live, and heard of those that end.
//!
//! *Invariant:* no line makes it keep more than [`status::LINE_LIMIT`] bytes, and a process that
//! reads nothing holds nobody up.

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

use nix::sys::socket::{MsgFlags, send};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::actor::{Actor, LAST_WORDS};
use super::core::Event;
use crate::os::process;
use crate::os::{log_file, pidfd};
use crate::wire::process::{Exit, Key};
use crate::wire::status;

/// Last lines of a log that belong to a cause.
const TAIL: usize = 20;

/// What is open to one living process, until this is dropped.
pub(super) struct Contact {
    listener: Option<JoinHandle<()>>,
    /// Where questions are written.
    questions: Option<OwnedWriteHalf>,
    /// Waits for its end, whether or not the guardian reports it.
    end: JoinHandle<()>,
}

impl Contact {
    /// Begins to listen to a process, and to wait for its end.
    pub(super) fn new(
        key: Key,
        pid: u32,
        pipe: Option<UnixStream>,
        events: &mpsc::Sender<Event>,
    ) -> Self {
        // Without descriptors left nothing is heard, and the process is not READY in time.
        let (heard, questions) = pipe.and_then(|pipe| halves(pipe).ok()).unzip();
        let listener = heard.map(|pipe| tokio::spawn(listen(pipe, key, events.clone())));
        let events = events.clone();
        let end = tokio::spawn(async move {
            pidfd::ended(pid).await;
            // Nobody listens when the cluster has ended.
            let _ = events.send(Event::Gone { key }).await;
        });
        Self { listener, questions, end }
    }

    /// Asks whether it answers.
    pub(super) fn ask(&self) {
        let Some(questions) = &self.questions else { return };
        let now = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        // A process that has closed its end is heard of by the listener.
        let _ = send(questions.as_ref().as_raw_fd(), status::QUESTION, now);
    }

    /// Ends with the process's last words.
    pub(super) fn into_listener(mut self) -> Option<JoinHandle<()>> {
        self.listener.take()
    }
}

impl Drop for Contact {
    fn drop(&mut self) {
        self.end.abort();
        if let Some(listener) = &self.listener {
            listener.abort();
        }
    }
}

impl Actor {
    /// Looks which processes are stopped.
    pub(super) fn look(&self) -> Event {
        let state = self.core.state();
        let processes = state.scheduler.iter().chain(&state.workers);
        let stopped = |pid: Option<u32>| pid.and_then(process::is_stopped) == Some(true);
        let stopped_keys = processes
            .enumerate()
            .filter(|(_, process)| stopped(process.pid))
            .filter_map(|(seat, _)| self.core.key_of(seat));
        Event::Looked {
            stopped: stopped_keys.collect(),
            guardian_stopped: stopped(Some(self.guardian.pid())),
        }
    }

    /// Lets a dead process's last words be heard, and then tells of its end.
    pub(super) fn report_end(&mut self, key: Key, exit: Exit) {
        let listener = self.contacts.remove(&key).and_then(Contact::into_listener);
        let log = self.seat(key).map(|spec| self.paths.log(&spec.name));
        let events = self.inner.0.clone();
        tokio::spawn(async move {
            if let Some(listener) = listener {
                // A descendant that could not be killed may hold the pipe.
                let _ = tokio::time::timeout(LAST_WORDS, listener).await;
            }
            let log_tail = log.map(|log| log_file::last_lines(&log, TAIL)).unwrap_or_default();
            // Nobody listens when the cluster has ended.
            let _ = events.send(Event::Exited { key, exit, log_tail }).await;
        });
    }
}

/// The supervisor's end of a status pipe, by its two directions.
fn halves(pipe: UnixStream) -> io::Result<(OwnedReadHalf, OwnedWriteHalf)> {
    pipe.set_nonblocking(true)?;
    Ok(tokio::net::UnixStream::from_std(pipe)?.into_split())
}

/// Reads a process's status pipe until nobody can write to it any more.
async fn listen(pipe: OwnedReadHalf, key: Key, events: mpsc::Sender<Event>) {
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
