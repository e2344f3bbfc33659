//! Sleeps until UCX or another thread has work.
//!
//! Does not know what the work is, nor how long to poll before.
//!
//! *Invariant:* a [`Waker::wake`] that happens after the owner looked for work and before it sleeps
//! is not lost.

use std::cell::RefCell;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::{Error, UcpWorker};

struct Shared {
    event: EventFd,
    asleep: AtomicBool,
    /// Whether a waker has called since the owner last checked.
    called: AtomicBool,
}

/// Refusals to sleep in a row, and the time that they last, after which UCX counts as stuck.
///
/// A process that is killed between reserving and filling a slot in the queue of a peer's shared
/// memory leaves a slot that will never be filled. The peer receives nothing behind it, from any
/// sender, and whenever it wants to sleep, it is told that there is something to receive.
///
/// A thread that is refused polls for a while before it asks again, so it asks some thousand
/// times a second. Only refusals without a wake-up count: while the queue is blocked, no peer sends
/// one, and strangers can send as many as they like (`wakeup`).
const STUCK_AFTER: (u32, Duration) = (10_000, Duration::from_secs(10));

/// Consecutive refusals to sleep.
#[derive(Default)]
struct Refusals {
    count: u32,
    since: Option<Instant>,
}

impl Refusals {
    /// Counts one, unless somebody has woken the worker; returns whether UCX is stuck.
    fn is_stuck(&mut self, now: Instant, woken: bool) -> bool {
        if woken {
            *self = Self::default();
            return false;
        }
        self.count = self.count.saturating_add(1);
        let since = *self.since.get_or_insert(now);
        let (count, time) = STUCK_AFTER;
        self.count > count && now.saturating_duration_since(since) > time
    }
}

/// The owner's side.
pub struct Sleeper {
    shared: Arc<Shared>,
    refusals: RefCell<Refusals>,
}

/// Wakes the owner from any thread; cheap while it is awake.
#[derive(Clone)]
pub struct Waker {
    shared: Arc<Shared>,
}

impl Sleeper {
    /// A sleeper that is awake.
    ///
    /// # Errors
    /// If the system has no event file descriptor.
    pub fn new() -> Result<Self, Error> {
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(|errno| system("open an event file descriptor", errno))?;
        let shared =
            Shared { event, asleep: AtomicBool::new(false), called: AtomicBool::new(false) };
        Ok(Self { shared: Arc::new(shared), refusals: RefCell::default() })
    }

    /// A handle for other threads.
    pub fn waker(&self) -> Waker {
        Waker { shared: Arc::clone(&self.shared) }
    }

    /// Whether a waker has called since the last check; costs next to nothing if none has. What was
    /// made ready before the call is visible after this.
    pub fn called(&self) -> bool {
        let called = &self.shared.called;
        called.load(Ordering::Relaxed) && called.swap(false, Ordering::AcqRel)
    }

    /// Sleeps until `worker` or a waker has work, at most for `limit`. Returns at once if
    /// `has_work` returns true after wakers have been told that the sleep begins.
    ///
    /// # Errors
    /// If UCX cannot be armed or is stuck, or the system refuses to wait.
    pub fn sleep<P>(
        &self,
        worker: &UcpWorker<P>,
        limit: Option<Duration>,
        has_work: impl FnOnce() -> bool,
    ) -> Result<(), Error> {
        self.shared.asleep.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let result = if has_work() { Ok(()) } else { self.wait(worker, limit) };
        self.shared.asleep.store(false, Ordering::SeqCst);
        result
    }

    fn wait<P>(&self, worker: &UcpWorker<P>, limit: Option<Duration>) -> Result<(), Error> {
        let woken = self.refusals.borrow().count > 0 && worker.take_wakeups();
        if woken || !worker.arm()? {
            let stuck = self.refusals.borrow_mut().is_stuck(Instant::now(), woken);
            return if stuck { Err(Error::Stuck) } else { Ok(()) };
        }
        self.refusals.take();
        let timeout = limit.map_or(PollTimeout::NONE, |limit| {
            // Rounded up, so that a wait of less than a millisecond does not become a busy loop.
            PollTimeout::try_from(limit.as_nanos().div_ceil(1_000_000)).unwrap_or(PollTimeout::MAX)
        });
        let wakes = self.shared.event.as_fd();
        let mut watched = [
            PollFd::new(worker.event_fd(), PollFlags::POLLIN),
            PollFd::new(wakes, PollFlags::POLLIN),
        ];
        match poll(&mut watched, timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(system("wait for events", errno)),
        }
        drain(wakes);
        Ok(())
    }
}

impl Waker {
    /// Ends the owner's sleep, if it sleeps.
    pub fn wake(&self) {
        self.shared.called.store(true, Ordering::Release);
        fence(Ordering::SeqCst);
        if self.shared.asleep.load(Ordering::SeqCst) {
            // A full counter also wakes; nothing else can fail on an open descriptor.
            let _ = self.shared.event.write(1);
        }
    }
}

impl fmt::Debug for Sleeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sleeper").field("fd", &self.shared.event.as_fd().as_raw_fd()).finish()
    }
}

impl fmt::Debug for Waker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waker").field("fd", &self.shared.event.as_fd().as_raw_fd()).finish()
    }
}

/// Empties an event file descriptor; an empty one is no error.
fn drain(event: BorrowedFd<'_>) {
    let mut counter = [0; 8];
    let _ = nix::unistd::read(event, &mut counter);
}

fn system(action: &'static str, errno: Errno) -> Error {
    Error::System { action, source: io::Error::from(errno) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_many_refusals_over_a_long_time_mean_that_ucx_is_stuck() {
        let (begin, (count, time)) = (Instant::now(), STUCK_AFTER);
        let mut refusals = Refusals::default();
        assert!((0..2 * count).all(|_| !refusals.is_stuck(begin, false)), "it may just be busy");
        assert!(refusals.is_stuck(begin + time + Duration::from_secs(1), false));
        let mut refusals = Refusals::default();
        assert!(!refusals.is_stuck(begin, false));
        assert!(!refusals.is_stuck(begin + 2 * time, false), "it was seldom asked");
    }
    #[test]
    fn a_worker_that_somebody_keeps_waking_is_not_stuck() {
        let (begin, (count, time)) = (Instant::now(), STUCK_AFTER);
        let mut refusals = Refusals::default();
        for turn in 0..3 * count {
            let now = begin + time * turn / count;
            assert!(!refusals.is_stuck(now, turn % 100 == 99), "{turn}");
        }
    }
}
