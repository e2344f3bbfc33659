//! Writes to standard output and standard error from a separate thread, for commands that must stay
//! responsive while a stopped terminal (Ctrl-S) blocks every write.
//!
//! *Invariant:* output stays in order, and writers never block. If the reader is too slow, output
//! beyond [`LIMIT`] is dropped and counted.

use std::collections::VecDeque;
use std::io::{self, IsTerminal, Write};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use indicatif::{ProgressDrawTarget, TermLike};

use super::failure::Exit;

/// Most bytes that wait to be written.
const LIMIT: usize = 1 << 20;

/// How long to wait for a reader after a signal.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// The target of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum To {
    Output,
    Error,
}

#[derive(Debug, Default)]
struct Queue {
    texts: VecDeque<(To, Vec<u8>)>,
    /// Number of bytes in `texts`.
    waiting: usize,
    /// Number of texts that were dropped.
    dropped: u64,
    /// Whether the thread is writing.
    writing: bool,
    /// Why writing to standard output failed; taken when it is reported.
    refused: Option<io::Error>,
}

#[derive(Debug, Default)]
struct Screen {
    queue: Mutex<Queue>,
    changed: Condvar,
}

static SCREEN: OnceLock<Screen> = OnceLock::new();

/// Starts the thread. If it cannot be started, callers write for themselves.
pub(super) fn open() {
    let thread = std::thread::Builder::new().name("screen".to_owned());
    if thread.spawn(|| SCREEN.get_or_init(Screen::default).work()).is_ok() {
        SCREEN.get_or_init(Screen::default);
    }
}

/// Queues a text for the thread; `None` if there is no thread and the caller has to write.
pub(super) fn write(to: To, text: &[u8]) -> Option<io::Result<()>> {
    SCREEN.get().map(|screen| screen.put(to, text.to_vec()))
}

/// Whether everything is written.
pub(super) fn is_idle() -> bool {
    SCREEN.get().is_none_or(|screen| {
        let queue = screen.locked();
        !queue.writing && queue.texts.is_empty()
    })
}

/// Waits until everything is written. A command that ends by a signal does not wait for a stalled
/// reader, and a signal also ends the wait.
///
/// # Errors
/// If writing to standard output failed.
pub(super) fn close(exit: Exit) -> io::Result<()> {
    match exit {
        Exit::Signal(_) => settle(),
        _ if SCREEN.get().is_some() => {
            crate::os::default_stop_signals();
            written_within(Duration::MAX)
        }
        _ => Ok(()),
    }
}

/// Waits until everything is written, but not for a stalled reader.
///
/// # Errors
/// If writing to standard output failed.
pub(super) fn settle() -> io::Result<()> {
    written_within(LAST_WORDS)
}

fn written_within(within: Duration) -> io::Result<()> {
    let Some(screen) = SCREEN.get() else { return Ok(()) };
    let busy = |queue: &mut Queue| queue.writing || !queue.texts.is_empty();
    let waited = screen.changed.wait_timeout_while(screen.locked(), within, busy);
    let (mut queue, _) = waited.unwrap_or_else(PoisonError::into_inner);
    queue.refused.take().map_or(Ok(()), Err)
}

impl Screen {
    fn locked(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, to: To, text: Vec<u8>) -> io::Result<()> {
        let mut queue = self.locked();
        if to == To::Output
            && let Some(error) = queue.refused.take()
        {
            return Err(error);
        }
        if queue.waiting + text.len() > LIMIT {
            queue.dropped += 1;
            return Ok(());
        }
        if queue.dropped > 0 {
            let missing = format!("[{} lines could not be shown]\n", queue.dropped).into_bytes();
            queue.dropped = 0;
            queue.waiting += missing.len();
            queue.texts.push_back((To::Error, missing));
        }
        queue.waiting += text.len();
        queue.texts.push_back((to, text));
        self.changed.notify_all();
        Ok(())
    }

    fn work(&self) {
        loop {
            let idle = |queue: &mut Queue| queue.texts.is_empty();
            let waited = self.changed.wait_while(self.locked(), idle);
            let mut queue = waited.unwrap_or_else(PoisonError::into_inner);
            let Some((to, text)) = queue.texts.pop_front() else { continue };
            queue.writing = true;
            drop(queue);
            let written = match to {
                To::Output => io::stdout().write_all(&text).and_then(|()| io::stdout().flush()),
                To::Error => io::stderr().write_all(&text),
            };
            let mut queue = self.locked();
            queue.writing = false;
            queue.waiting -= text.len();
            if let (To::Output, Err(error)) = (to, written) {
                queue.refused = Some(error);
            }
            self.changed.notify_all();
        }
    }
}

/// The target of a progress bar: standard error, through the thread.
pub(super) fn progress() -> ProgressDrawTarget {
    match SCREEN.get() {
        Some(_) if io::stderr().is_terminal() => ProgressDrawTarget::term_like(Box::new(Bar)),
        Some(_) => ProgressDrawTarget::hidden(),
        None => ProgressDrawTarget::stderr(),
    }
}

/// The terminal as indicatif sees it.
#[derive(Debug)]
struct Bar;

impl Bar {
    fn send(text: String) -> io::Result<()> {
        let screen = SCREEN.get_or_init(Screen::default);
        // A frame that has to wait is outdated when it is shown.
        if screen.locked().texts.len() < 64 {
            screen.put(To::Error, text.into_bytes())
        } else {
            Ok(())
        }
    }

    fn moved(count: usize, direction: char) -> io::Result<()> {
        if count > 0 { Self::send(format!("\x1b[{count}{direction}")) } else { Ok(()) }
    }
}

impl TermLike for Bar {
    fn width(&self) -> u16 {
        // Leaves room for the `^C` that a terminal shows: were it on the next line, that would be
        // cleared instead of this one.
        console::Term::stderr().size().1.saturating_sub(2)
    }

    fn move_cursor_up(&self, count: usize) -> io::Result<()> {
        Self::moved(count, 'A')
    }

    fn move_cursor_down(&self, count: usize) -> io::Result<()> {
        Self::moved(count, 'B')
    }

    fn move_cursor_right(&self, count: usize) -> io::Result<()> {
        Self::moved(count, 'C')
    }

    fn move_cursor_left(&self, count: usize) -> io::Result<()> {
        Self::moved(count, 'D')
    }

    fn write_line(&self, text: &str) -> io::Result<()> {
        Self::send(format!("{text}\n"))
    }

    fn write_str(&self, text: &str) -> io::Result<()> {
        Self::send(text.to_owned())
    }

    fn clear_line(&self) -> io::Result<()> {
        Self::send("\r\x1b[2K".to_owned())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
}
