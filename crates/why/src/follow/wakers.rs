//! Who of a rank does something while it waits, and so may end the wait.
//!
//! *Invariant:* nobody on the way from the rank to what it waits for is its own waker.

use super::{Visited, Walk};
use crate::condition::{Condition, Kind, LONG_SLEEP_MS, short};
use crate::evidence::{Process, State, Thread, Waits};

impl Walk<'_> {
    /// Says who may end this wait, if nobody is known who has to.
    pub(super) fn with_waker(&self, root: u32, found: Condition, visited: &Visited) -> Condition {
        let ends = [
            Kind::File,
            Kind::FileLock,
            Kind::Unread,
            Kind::Outside,
            Kind::Lock,
            Kind::Child,
            Kind::Idle,
            Kind::Unknown,
        ];
        let waker = if ends.contains(&found.kind) { self.waker(root, visited) } else { None };
        match waker {
            Some(waker) => {
                let text = format!("{}, while its {waker}", found.text);
                Condition { text, open: true, ..found }
            }
            None => found,
        }
    }

    /// A process or a thread of the rank that works, or sleeps for a moment.
    fn waker(&self, root: u32, visited: &Visited) -> Option<String> {
        let own = self.evidence.processes.iter().filter(|process| process.rank == self.rank);
        // The workers of an engine have threads that watch them, and which sleep.
        let own = own.filter(|process| !(self.evidence.serves && process.pid == root));
        let doing = |process: &Process| {
            let threads = process.threads.iter().filter(|one| !visited.contains(&one.tid));
            let mut said = threads.filter_map(|thread| {
                let who = if process.pid == root { "thread" } else { "process" };
                let number = if process.pid == root { thread.tid } else { process.pid };
                Some(format!("{who} {number} ({}) {}", thread.name, self.does(thread)?))
            });
            said.next()
        };
        let mut said = own.filter_map(doing);
        said.next()
    }

    /// Whether a thread of another rank works, or sleeps for a moment: it may serve who waits.
    pub(super) fn does_something(&self, rank: &str) -> bool {
        let processes = self.evidence.processes.iter().filter(|process| process.rank == rank);
        let mut threads = processes.flat_map(|process| &process.threads);
        threads.any(|thread| self.does(thread).is_some())
    }

    /// What a thread does, in words, if it does something or will before long.
    pub(super) fn does(&self, thread: &Thread) -> Option<String> {
        if self.runs(thread) || thread.state == State::Uninterruptible {
            return Some("works".to_owned());
        }
        let call = thread.call.as_ref()?;
        let left = match &call.waits {
            Waits::Time { left_ms } => *left_ms,
            Waits::Any { ends, .. } if ends.is_empty() => call.left_ms,
            _ => None,
        };
        let left = left.filter(|left| *left < LONG_SLEEP_MS)?;
        Some(format!("sleeps for another {}", short(left)))
    }
}
