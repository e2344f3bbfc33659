//! The event loop of all our programs: one thread, plus one for blocking work.
//!
//! *Invariant:* blocking work always runs, even if late because the user has no threads left: the
//! loop keeps one thread for it throughout, and starts more only if possible.

use std::fs::File;
use std::io;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};

/// Longer than any program runs, so that the idle thread for blocking work is kept.
const FOR_EVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Descriptors that tokio opens for an event loop and for signals, and some to spare.
const FILES: usize = 10;

/// Starts an event loop.
///
/// # Errors
/// If descriptors have run out: tokio panics if it gets none for signals.
pub fn start(builder: &mut Builder) -> io::Result<Runtime> {
    let spare: io::Result<Vec<File>> = (0..FILES).map(|_| File::open("/dev/null")).collect();
    drop(spare?);
    builder.enable_all().build()
}

/// Creates an event loop on this thread.
///
/// tokio panics if it has no thread for blocking work and can't start one; if a thread exists,
/// tokio queues the work instead.
///
/// # Errors
/// If descriptors or threads have run out.
pub fn new() -> io::Result<Runtime> {
    let event_loop = start(Builder::new_current_thread().thread_keep_alive(FOR_EVER))?;
    // Starting a thread here turns a lack of threads into an error instead of a panic.
    let trial = std::thread::Builder::new().spawn(|| ())?;
    // The thread does nothing, so joining it cannot fail.
    let _ = trial.join();
    drop(event_loop.spawn_blocking(|| ()));
    Ok(event_loop)
}

#[cfg(test)]
mod tests {
    #[test]
    fn blocking_work_is_done() {
        let event_loop = super::new().expect("an event loop");
        let answer = event_loop.block_on(async { tokio::task::spawn_blocking(|| 6 * 7).await });
        assert_eq!(answer.expect("done"), 42);
    }
}
