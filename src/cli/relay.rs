//! Relays the output of the ranks of `run` to standard output and standard error.
//!
//! A thread of its own reads the ranks' pipe and writes. While it cannot write, only the ranks
//! wait.
//!
//! *Invariant:* each stream's bytes are written unchanged and in order. With several streams, whole
//! lines are written, unless a line is longer than [`LONGEST_LINE`].

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, IsTerminal, PipeReader, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tokio::sync::oneshot;

use super::failure::{Exit, Failure};
use super::output::{unwritable, unwritable_to};
use super::sanitize::sanitized;
use super::signals::Signals;
use crate::wire::output::{LineBuffer, Source, Stream, read};

/// Longer lines are written in pieces.
const LONGEST_LINE: usize = 64 << 20;

/// After a signal, a reader that takes nothing for this long is given up.
const STALLED: Duration = Duration::from_millis(500);

/// A handle to the relay thread.
pub(super) struct Relay {
    /// Receives the thread's result; taken once the result has been received.
    end: Option<oneshot::Receiver<Result<(), Failure>>>,
    /// Number of writes so far.
    written: Arc<AtomicU64>,
}

impl Relay {
    /// Starts to relay `pipe`, with a prefix for each line if `prefix` is set. `names` are those of
    /// the ranks.
    pub(super) fn begin(
        pipe: Option<PipeReader>,
        names: Vec<String>,
        prefix: bool,
        separate_streams: bool,
    ) -> Result<Self, Failure> {
        let pipe = pipe.ok_or_else(|| failed(io::ErrorKind::BrokenPipe.into()))?;
        let written = Arc::new(AtomicU64::new(0));
        let (ended, end) = oneshot::channel();
        let mut lines = Lines {
            alone: names.len() == 1 && !separate_streams && !prefix,
            names,
            prefix,
            buffers: BTreeMap::new(),
            output: Sink::of(io::stdout()).map_err(failed)?,
            error: Sink::of(io::stderr()).map_err(failed)?,
            written: Arc::clone(&written),
        };
        std::thread::Builder::new()
            .name("relay".to_owned())
            .spawn(move || drop(ended.send(lines.pass_on(pipe))))
            .map_err(failed)?;
        Ok(Self { end: Some(end), written })
    }

    /// Waits until something can't be written. Cancel-safe.
    pub(super) async fn failed(&mut self) -> Failure {
        if let Some(end) = &mut self.end {
            let ended = end.await;
            self.end = None;
            if let Ok(Err(error)) = ended {
                return error;
            }
        }
        std::future::pending().await
    }

    /// Waits until all output is written; after a signal, only as long as the reader makes
    /// progress.
    ///
    /// # Errors
    /// If some could not be written, unless [`Relay::failed`] has told that.
    pub(super) async fn finish(mut self, signals: &mut Signals) -> Result<(), Failure> {
        let Some(mut end) = self.end.take() else { return Ok(()) };
        let mut before = None;
        loop {
            tokio::select! {
                ended = &mut end => return ended.unwrap_or(Ok(())),
                number = signals.next() => drop(signals.escalation(number)),
                () = tokio::time::sleep(STALLED) => {
                    let now = Some(self.written.load(Ordering::Relaxed));
                    if signals.first().is_some() && now == before {
                        return Ok(());
                    }
                    before = now;
                }
            }
        }
    }
}

fn failed(error: io::Error) -> Failure {
    let error = anyhow::Error::new(error).context("cannot pass the ranks' output on");
    Failure::new(Exit::Failed, error)
}

/// Splits the streams into lines and writes them.
struct Lines {
    /// Whether there is only one stream, whose lines need no care.
    alone: bool,
    names: Vec<String>,
    prefix: bool,
    buffers: BTreeMap<Source, LineBuffer>,
    output: Sink,
    error: Sink,
    written: Arc<AtomicU64>,
}

impl Lines {
    fn pass_on(&mut self, mut pipe: PipeReader) -> Result<(), Failure> {
        let mut bytes = Vec::new();
        while let Some(source) = read(&mut pipe, &mut bytes).map_err(failed)? {
            let text = self.text(source, &bytes);
            self.write(source, &text)?;
        }
        // A guardian that was killed has not reported the ends of streams.
        for source in self.buffers.keys().copied().collect::<Vec<_>>() {
            let text = self.text(source, &[]);
            self.write(source, &text)?;
        }
        Ok(())
    }

    /// The text to write when a stream delivers these bytes, or (empty) ends.
    fn text(&mut self, source: Source, bytes: &[u8]) -> Vec<u8> {
        if self.alone {
            return bytes.to_vec();
        }
        // Without prefixes, a carriage return also ends a line, so that progress bars are shown.
        let ends: &[u8] = if self.prefix { b"\n" } else { b"\n\r" };
        let buffer =
            self.buffers.entry(source).or_insert_with(|| LineBuffer::new(ends, LONGEST_LINE));
        let lines = if bytes.is_empty() { buffer.finish() } else { buffer.feed(bytes) };
        if !self.prefix {
            return lines;
        }
        let rank = usize::try_from(source.rank).ok();
        let name = rank.and_then(|rank| self.names.get(rank)).map_or("?", String::as_str);
        let terminal = match source.stream {
            Stream::Output => self.output.terminal,
            Stream::Error => self.error.terminal,
        };
        let mut text = Vec::with_capacity(lines.len() + 64);
        for line in lines.split_inclusive(|byte| *byte == b'\n') {
            text.extend_from_slice(format!("[{name}] ").as_bytes());
            if terminal {
                text.extend_from_slice(&sanitized(line));
            } else {
                text.extend_from_slice(line);
            }
            if !line.ends_with(b"\n") {
                // The next rank's prefix must start on a new line.
                text.push(b'\n');
            }
        }
        text
    }

    fn write(&mut self, source: Source, text: &[u8]) -> Result<(), Failure> {
        match source.stream {
            Stream::Output => self.output.write(text).map_err(unwritable)?,
            Stream::Error => match self.error.write(text) {
                // If its reader has gone, standard output continues.
                Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
                    return Err(unwritable_to("standard error", error));
                }
                _ => {}
            },
        }
        self.written.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

/// An unbuffered standard stream.
struct Sink {
    file: File,
    terminal: bool,
}

impl Sink {
    fn of(stream: impl AsFd + IsTerminal) -> io::Result<Self> {
        let terminal = stream.is_terminal();
        Ok(Self { file: File::from(stream.as_fd().try_clone_to_owned()?), terminal })
    }

    /// Writes everything; blocks as long as that takes.
    fn write(&mut self, mut text: &[u8]) -> io::Result<()> {
        while !text.is_empty() {
            match self.file.write(text) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(length) => text = &text[length..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Another process that shares the terminal has made it non-blocking.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let mut file = [PollFd::new(self.file.as_fd(), PollFlags::POLLOUT)];
                    poll(&mut file, PollTimeout::NONE)?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
