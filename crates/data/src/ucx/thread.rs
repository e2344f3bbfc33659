//! The thread that owns UCX: when it polls, yields and sleeps, in which order it handles what has
//! happened, and how it ends.
//!
//! Does not know what is sent. Its [`Handler`] carries out commands and handles what UCX reports;
//! an [`Inbox`] takes commands from any thread.
//!
//! *Invariant:* every command reaches the handler, or is refused; when there is nothing to do, the
//! thread sleeps.

use std::fmt;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::context::{Setting, UcpContext};
use super::library::{Library, Version};
use super::operation::{Completion, EndpointFailure};
use super::polling::Polling;
use super::sleep::{Sleeper, Waker};
use super::worker::{Arrival, UcpWorker};
use super::{Error, WorkerAddress};

/// Polls without a pause between two offers of the CPU to other threads. A poll takes a tenth of a
/// microsecond. The thread that is to be woken may be waiting for this very CPU, and without the
/// offer the kernel may take milliseconds to run it.
const LOOKS: u32 = 8;

/// Polls of a measurement after which the thread pauses between them: an answer to a small message
/// would have come by then, and the copier of a large one may share the core (hyper-threading).
const EAGER_LOOKS: u32 = 256;

/// Time without anything new after which a measurement is no longer polled for: neither a peer that
/// hangs nor a queue that is blocked may keep this thread from sleeping, where it notices the
/// latter.
const QUIET: Duration = Duration::from_secs(1);

/// Longest time that operations in flight get to end before everything is closed.
const DRAIN_TIME: Duration = Duration::from_millis(500);

/// Why a command of a thread that was told to end, or has panicked, is refused.
const ENDED: &str = "UCX's thread has ended";

/// UCX, as its thread has opened it.
pub struct Opened<P: 'static> {
    pub version: Version,
    /// The library's file, as far as the loader tells.
    pub path: PathBuf,
    /// What UCX has opened, `transport/device` each.
    pub resources: Vec<String>,
    pub worker: UcpWorker<P>,
    /// The worker's.
    pub address: WorkerAddress,
}

impl<P> Opened<P> {
    /// Opens UCX for this thread, with these settings in addition to the environment's. UCX looks
    /// for a current CUDA context meanwhile.
    ///
    /// # Errors
    /// If the library, its context or its worker cannot be opened.
    pub fn new(library: Option<&Path>, settings: &[Setting]) -> Result<Self, Error> {
        let library = Library::open(library)?;
        let context = UcpContext::new(&library, settings)?;
        let resources = context.resources()?;
        let worker = UcpWorker::new(&context)?;
        let address = worker.address()?;
        let (version, path) = (library.version(), library.name().to_owned());
        Ok(Self { version, path, resources, worker, address })
    }
}

/// What the thread is told to do.
pub trait Command: Send {
    /// Ends it without having begun: the thread has ended, for this reason.
    fn refuse(self, reason: &str);
}

/// What a process does with UCX. Its functions are called on the thread alone.
pub trait Handler {
    type Command: Command;
    /// What an operation is for.
    type Purpose: 'static;

    fn worker(&self) -> &UcpWorker<Self::Purpose>;

    /// Carries out a command; one that breaks ends the thread.
    fn command(&mut self, command: Self::Command) -> ControlFlow<()>;

    /// Handles a message.
    fn arrived(&mut self, arrival: Arrival<Self::Purpose>);

    /// Handles the end of an operation.
    fn completed(&mut self, completion: Completion<Self::Purpose>);

    /// Handles the loss of an endpoint.
    fn failed(&mut self, failure: EndpointFailure);

    /// Whether a peer owes it an answer.
    fn expects(&self) -> bool;

    /// If it measures: for how many polls it waits without a pause.
    fn measures(&self) -> Option<u32> {
        None
    }

    /// Does what is due by now.
    fn on_time(&mut self) {}

    /// Time until something is due.
    fn next_time(&self) -> Option<Duration> {
        None
    }
}

/// Takes commands from any thread, and wakes the one that carries them out.
pub struct Inbox<C> {
    /// Why there are no more, once the thread has ended.
    commands: Mutex<Result<Vec<C>, String>>,
    waker: Waker,
}

/// The thread's side of an [`Inbox`], which it closes when it ends.
pub struct Outlet<C: Command> {
    inbox: Arc<Inbox<C>>,
    sleeper: Sleeper,
}

/// An inbox, and the side of the thread that serves it.
///
/// # Errors
/// If the system has no event file descriptor.
pub fn inbox<C: Command>() -> Result<(Arc<Inbox<C>>, Outlet<C>), Error> {
    let sleeper = Sleeper::new()?;
    let inbox = Arc::new(Inbox { commands: Mutex::new(Ok(Vec::new())), waker: sleeper.waker() });
    Ok((Arc::clone(&inbox), Outlet { inbox, sleeper }))
}

impl<C: Command> Inbox<C> {
    /// Has the thread carry out a command; refuses it if that has ended.
    pub fn send(&self, command: C) {
        let refused = match &mut *self.locked() {
            Ok(commands) => {
                commands.push(command);
                None
            }
            Err(reason) => Some((command, reason.clone())),
        };
        match refused {
            None => self.waker.wake(),
            Some((command, reason)) => command.refuse(&reason),
        }
    }

    /// Puts what has been sent into an empty list, whose memory serves the next commands.
    fn take(&self, into: &mut Vec<C>) {
        if let Ok(commands) = &mut *self.locked() {
            std::mem::swap(commands, into);
        }
    }

    fn is_empty(&self) -> bool {
        self.locked().as_ref().map_or(true, Vec::is_empty)
    }

    /// Refuses what has not been taken, and everything from now on. Only the first reason counts.
    fn close(&self, reason: &str) {
        let mut commands = self.locked();
        if commands.is_ok() {
            let left = std::mem::replace(&mut *commands, Err(reason.to_owned()));
            // Whatever it does, it does while nothing is locked.
            drop(commands);
            left.into_iter().flatten().for_each(|command| command.refuse(reason));
        }
    }

    fn locked(&self) -> MutexGuard<'_, Result<Vec<C>, String>> {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<C> fmt::Debug for Inbox<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbox").field("waker", &self.waker).finish_non_exhaustive()
    }
}

impl<C: Command> Drop for Outlet<C> {
    fn drop(&mut self) {
        self.inbox.close(ENDED);
    }
}

impl<C: Command> Outlet<C> {
    /// Works for `handler` until a command ends that, or UCX cannot go on. From then on commands
    /// are refused. What is in flight has had time to end only if a command ended it.
    ///
    /// # Errors
    /// Why UCX cannot go on.
    pub fn serve<H: Handler<Command = C>>(self, handler: &mut H) -> Result<(), Error> {
        let ended = self.work(handler);
        match &ended {
            Ok(()) => {
                drain(handler);
            }
            Err(error) => self.inbox.close(&error.in_words()),
        }
        ended
    }

    fn work<H: Handler<Command = C>>(&self, handler: &mut H) -> Result<(), Error> {
        let mut polling = Polling::new();
        let (mut looks, mut idle_since) = (0u32, Instant::now());
        // Since when nothing has come, across sleeps.
        let mut quiet_since = None;
        let mut commands = Vec::new();
        loop {
            // Before the commands: what a peer asks for was offered to it by a command that was
            // sent before, and has to be known when the question is handled.
            let mut busy = handler.worker().progress();
            if self.sleeper.called() {
                self.inbox.take(&mut commands);
                let mut commands = commands.drain(..);
                while let Some(command) = commands.next() {
                    busy = true;
                    if handler.command(command).is_break() {
                        commands.for_each(|command| command.refuse(ENDED));
                        return Ok(());
                    }
                }
            }
            busy |= digest(handler);
            handler.worker().can_go_on()?;
            if busy {
                looks = 0;
                quiet_since = None;
                continue;
            }
            looks = looks.saturating_add(1);
            let measures = handler.measures();
            let pause_after = measures.unwrap_or(LOOKS);
            if looks < pause_after {
                if looks > EAGER_LOOKS {
                    std::hint::spin_loop();
                }
                continue;
            }
            if looks == pause_after {
                idle_since = Instant::now();
                handler.on_time();
            }
            let quiet: Instant = *quiet_since.get_or_insert_with(Instant::now);
            let measures = measures.is_some() && quiet.elapsed() < QUIET;
            if measures || polling.continues(idle_since.elapsed(), handler.expects()) {
                std::thread::yield_now();
            } else {
                let began = Instant::now();
                let has_work = || !self.inbox.is_empty();
                self.sleeper.sleep(handler.worker(), handler.next_time(), has_work)?;
                polling.slept(began.elapsed());
                looks = 0;
                handler.on_time();
            }
        }
    }
}

/// Has everything handled that UCX's callbacks recorded: what a peer has sent comes before its end.
/// Returns whether there was anything.
fn digest<H: Handler>(handler: &mut H) -> bool {
    let mut any = false;
    while let Some(arrival) = handler.worker().next_arrival() {
        any = true;
        handler.arrived(arrival);
    }
    while let Some(completion) = handler.worker().next_completion() {
        any = true;
        handler.completed(completion);
    }
    while let Some(failure) = handler.worker().next_failure() {
        any = true;
        handler.failed(failure);
    }
    any
}

/// Waits a while for operations in flight; returns whether all have ended.
pub fn drain<H: Handler>(handler: &mut H) -> bool {
    let began = Instant::now();
    while handler.worker().operations_in_flight() > 0 && began.elapsed() < DRAIN_TIME {
        handler.worker().progress();
        digest(handler);
    }
    handler.worker().operations_in_flight() == 0
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    struct Counted(Arc<AtomicUsize>);

    impl Command for Counted {
        fn refuse(self, reason: &str) {
            assert_eq!(reason, ENDED);
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn every_command_is_taken_or_refused_though_the_thread_ends_while_others_send() {
        const EACH: usize = 5000;
        let (inbox, outlet) = inbox().expect("an event");
        let refused = Arc::new(AtomicUsize::new(0));
        let taken = std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    (0..EACH).for_each(|_| inbox.send(Counted(Arc::clone(&refused))));
                });
            }
            let (mut taken, mut commands) = (0, Vec::new());
            while taken < EACH {
                if outlet.sleeper.called() {
                    outlet.inbox.take(&mut commands);
                    taken += commands.drain(..).count();
                }
            }
            drop(outlet);
            taken
        });
        assert_eq!(taken + refused.load(Ordering::Relaxed), 4 * EACH);
        inbox.send(Counted(Arc::clone(&refused)));
        assert_eq!(taken + refused.load(Ordering::Relaxed), 4 * EACH + 1);
    }
}
