//! Ends waits for a process that does not answer: the supervisor knows which those are.
//!
//! Does not end waits while everything answers, however long they last, nor where the supervisor is
//! to restart a process that does not answer.
//!
//! *Invariant:* a wait ends early only after [`PATIENCE`] in which nothing was heard.

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::ClientError;
use crate::cluster::control::Control;
use crate::os::run_directory::Paths;
use crate::plan::{Plan, Unresponsive};
use crate::supervise::ClusterState;

/// Shortest silence after which the supervisor is asked who does not answer.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// Time between two looks while a wait lasts.
pub(super) const LOOK: Duration = Duration::from_secs(2);

/// The process of the cluster with this run directory that does not answer, as an error: of those
/// named, if any are.
pub(super) fn silent(run_directory: &Path, named: Option<&str>) -> Option<ClientError> {
    let paths = Paths::at(run_directory);
    let plan: Plan = serde_json::from_slice(&std::fs::read(paths.plan()).ok()?).ok()?;
    if plan.supervision.unresponsive == Unresponsive::Restart {
        return None;
    }
    let control = Control::new(paths.control());
    // On a thread of its own, for the caller's may run an event loop already.
    let asked = std::thread::spawn(move || -> Option<ClusterState> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
        runtime.block_on(control.read("/v1/state")).ok()
    });
    let state = asked.join().ok()??;
    let silent = state.unresponsive().find(|one| named.is_none_or(|name| one.name == name))?;
    let since = silent.not_answering_since.clone().unwrap_or_default();
    Some(ClientError::NotAnswering { process: silent.name.clone(), since })
}

/// A connection to a process whose reads and writes end with an error when it does not answer.
pub(super) struct Patient {
    stream: UnixStream,
    run_directory: PathBuf,
    process: String,
}

impl Patient {
    pub(super) fn connect(run_directory: &Path, process: &str) -> io::Result<Self> {
        let stream = UnixStream::connect(run_directory.join(format!("{process}.sock")))?;
        stream.set_read_timeout(Some(LOOK))?;
        stream.set_write_timeout(Some(LOOK))?;
        let process = process.to_owned();
        Ok(Self { stream, run_directory: run_directory.to_owned(), process })
    }

    /// The connection alone, whose reads and writes wait for ever.
    pub(super) fn into_stream(self) -> io::Result<UnixStream> {
        self.stream.set_read_timeout(None)?;
        self.stream.set_write_timeout(None)?;
        Ok(self.stream)
    }

    fn patiently(
        &mut self,
        mut attempt: impl FnMut(&mut UnixStream) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let began = Instant::now();
        loop {
            match attempt(&mut self.stream) {
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                done => return done,
            }
            if began.elapsed() >= PATIENCE
                && let Some(error) = silent(&self.run_directory, Some(&self.process))
            {
                return Err(io::Error::new(ErrorKind::TimedOut, error));
            }
        }
    }
}

impl Read for Patient {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.patiently(|stream| stream.read(buffer))
    }
}

impl Write for Patient {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.patiently(|stream| stream.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// A socket's error: that its process does not answer, where it is this.
pub(super) fn explained(path: &Path, error: io::Error) -> ClientError {
    match error.downcast::<ClientError>() {
        Ok(silent) => silent,
        Err(source) => ClientError::Socket { path: path.to_path_buf(), source },
    }
}
