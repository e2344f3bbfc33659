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
        let woken = self.refusals.borrow().count > 0 && worker.was_woken();
        if !worker.arm()? {
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
    #[cfg(not(miri))]
    use super::super::thread::Opened;
    #[cfg(not(miri))]
    use super::super::{Payload, Protocol};
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
    #[cfg(not(miri))]
    fn whoever_looks_who_woke_a_worker_hides_no_first_message_from_it() {
        const NEEDED: &str = "UCX_POSIX_ERROR_HANDLING";
        if std::env::var_os(NEEDED).is_none() {
            // UCX reads it from the environment alone, which other tests share.
            let name =
                "ucx::sleep::tests::whoever_looks_who_woke_a_worker_hides_no_first_message_from_it";
            let program = std::env::current_exe().expect("this program");
            let run = std::process::Command::new(program)
                .args([name, "--exact"])
                .envs([(NEEDED, "y"), ("UCX_TLS", "posix,self")])
                .output()
                .expect("it runs");
            let said = String::from_utf8_lossy(&run.stdout);
            assert!(run.status.success() && said.contains("1 passed"), "{said}");
            return;
        }
        for _ in 0..10 {
            let open = || Opened::<()>::new(None, &[]).expect("libucp is installed");
            let (giver, taker) = (open(), open());
            let endpoint = giver.worker.connect(&taker.address).expect("an address");
            endpoint.send(b"first", Payload::Empty, Protocol::Auto, ()).expect("a message");
            let begun = Instant::now();
            // Before UCX's own thread sees it.
            let woken = taker.worker.was_woken();
            let arrival = loop {
                giver.worker.progress();
                taker.worker.progress();
                if let Some(arrival) = taker.worker.next_arrival() {
                    break arrival;
                }
                let late = begun.elapsed() > Duration::from_secs(20);
                assert!(!late, "it never comes; woken before: {woken}");
            };
            assert_eq!(arrival.header(), b"first");
        }
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
