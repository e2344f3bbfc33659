//! The event loop that every program of ours runs on: one thread, and one more for blocking work.
//!
//! *Invariant:* blocking work is always done, late where the user has run out of threads: the loop
//! has one thread for it from the beginning to the end, and starts more only where it can.

use std::io;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};

/// Longer than any program runs: the thread for blocking work never ends for want of work.
const FOR_EVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Makes an event loop on this thread.
///
/// tokio panics when it has no thread for blocking work and cannot start one; with one that waits,
/// it queues the work instead.
///
/// # Errors
/// If there are no descriptors for it, or there is no thread.
pub fn new() -> io::Result<Runtime> {
    let event_loop =
        Builder::new_current_thread().enable_all().thread_keep_alive(FOR_EVER).build()?;
    // Whether a thread can be had is asked of the system here, where the answer is an error.
    let trial = std::thread::Builder::new().spawn(|| ())?;
    // A thread that does nothing ends well.
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
