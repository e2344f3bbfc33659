//! The connection to a running process: its status pipe in both directions and a watch for its end.
//! Also checks which processes are stopped, and reports exits.
//!
//! *Invariant:* never buffers more than [`status::LINE_LIMIT`] bytes of a line, and a process that
//! does not read blocks nothing.

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::SystemTime;

use nix::sys::socket::{MsgFlags, send};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::{Actor, LAST_WORDS};
use crate::core::Event;
use cuda_cluster_machine::os::memory::ended_for_want_of_memory;
use cuda_cluster_machine::os::process;
use cuda_cluster_machine::os::{log_excerpt, pidfd};
use cuda_cluster_wire::process::{Exit, Key};
use cuda_cluster_wire::status;

/// Most log lines that are part of a cause.
const TAIL: usize = 20;

/// The connection to a running process; closed when this is dropped.
pub(super) struct Contact {
    listener: Option<JoinHandle<()>>,
    /// Where requests are written.
    questions: Option<OwnedWriteHalf>,
    /// Waits for its end, whether or not the guardian reports it.
    end: JoinHandle<()>,
    /// When it was started.
    since: SystemTime,
    /// How many processes the kernel had ended for want of memory by then.
    ended_for_memory: Option<u64>,
}

impl Contact {
    /// Starts to read a process's status pipe, and to wait for its end.
    pub(super) fn new(
        key: Key,
        pid: u32,
        (pipe, since): (Option<UnixStream>, SystemTime),
        events: &mpsc::Sender<Event>,
    ) -> Self {
        // Without free descriptors nothing is read, and the process does not become READY in time.
        let (heard, questions) = pipe.and_then(|pipe| halves(pipe).ok()).unzip();
        let listener = heard.map(|pipe| tokio::spawn(listen(pipe, key, events.clone())));
        let events = events.clone();
        let end = tokio::spawn(async move {
            pidfd::ended(pid).await;
            // The receiver is gone when the cluster has ended.
            let _ = events.send(Event::Gone { key }).await;
        });
        let ended_for_memory = ended_for_want_of_memory();
        Self { listener, questions, end, since, ended_for_memory }
    }

    /// Asks the process for an answer.
    pub(super) fn ask(&self) {
        let Some(questions) = &self.questions else { return };
        let now = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        // If the process has closed its end, the reader reports that.
        let _ = send(questions.as_ref().as_raw_fd(), status::QUESTION, now);
    }

    /// Completes when the process's last messages have been read.
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
    /// Checks which processes are stopped.
    pub(super) fn look(&self) -> Event {
        let state = self.core.state();
        let processes = state.processes();
        let stopped = |pid: Option<u32>| pid.and_then(process::is_stopped) == Some(true);
        let stopped_keys = processes
            .enumerate()
            .filter(|(_, process)| stopped(process.pid))
            .filter_map(|(slot, _)| self.core.key_of(slot));
        Event::Looked {
            stopped: stopped_keys.collect(),
            guardian_stopped: stopped(Some(self.guardian.pid())),
        }
    }

    /// Reports a dead process's exit after its last messages have been read.
    pub(super) fn report_end(&mut self, key: Key, exit: Exit) {
        let contact = self.contacts.remove(&key);
        let log = self.log_since_start(key, contact.as_ref());
        let before = contact.as_ref().and_then(|contact| contact.ended_for_memory);
        let starved = before.zip(ended_for_want_of_memory()).is_some_and(|(a, b)| a < b);
        let listener = contact.and_then(Contact::into_listener);
        let events = self.inner.0.clone();
        tokio::spawn(async move {
            if let Some(listener) = listener {
                // A descendant that could not be killed may hold the pipe.
                let _ = tokio::time::timeout(LAST_WORDS, listener).await;
            }
            let log_tail = log.map(|(log, since)| log_excerpt::excerpt(&log, since, TAIL));
            let log_tail = log_tail.unwrap_or_default();
            // The receiver is gone when the cluster has ended.
            let _ = events.send(Event::Exited { key, exit, log_tail, starved }).await;
        });
    }
}

impl Actor {
    /// What a living process has written to its log, shortened.
    pub(super) fn log_excerpt(&self, key: Key) -> Vec<String> {
        let log = self.log_since_start(key, self.contacts.get(&key));
        log.map(|(log, since)| log_excerpt::excerpt(&log, since, TAIL)).unwrap_or_default()
    }

    fn log_since_start(
        &self,
        key: Key,
        contact: Option<&Contact>,
    ) -> Option<(PathBuf, SystemTime)> {
        let since = contact.map_or(SystemTime::UNIX_EPOCH, |contact| contact.since);
        self.slot(key).map(|spec| (self.paths.log(&spec.name), since))
    }
}

/// The two directions of the supervisor's end of a status pipe.
fn halves(pipe: UnixStream) -> io::Result<(OwnedReadHalf, OwnedWriteHalf)> {
    pipe.set_nonblocking(true)?;
    Ok(tokio::net::UnixStream::from_std(pipe)?.into_split())
}

/// Reads a process's status pipe until it has no writers.
async fn listen(pipe: OwnedReadHalf, key: Key, events: mpsc::Sender<Event>) {
    let mut pipe = BufReader::new(pipe);
    let mut line = Vec::new();
    while read_line(&mut pipe, &mut line).await {
        let text = String::from_utf8_lossy(&line);
        // An invalid line is a mistake of the program, and does not affect the cluster.
        if let Ok(status) = status::decode(text.trim_end())
            && events.send(Event::Said { key, status }).await.is_err()
        {
            return;
        }
    }
    // The receiver is gone when the cluster has ended.
    let _ = events.send(Event::StatusClosed { key }).await;
}

/// Reads the next line of at most [`status::LINE_LIMIT`] bytes. A longer line is split into pieces,
/// none of which is a valid status. Returns whether there was a line.
async fn read_line(pipe: &mut (impl tokio::io::AsyncBufRead + Unpin), line: &mut Vec<u8>) -> bool {
    line.clear();
    let mut limited = pipe.take(status::LINE_LIMIT as u64);
    let read = limited.read_until(b'\n', line).await;
    matches!(read, Ok(1..))
}
