//! How the guardian ends: nothing is left, and what was written has been delivered.
//!
//! Does not decide when.
//!
//! *Invariant:* it waits for a bounded time, whatever hangs.

use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, waitid};
use nix::unistd::getpid;

use super::{Guard, LAST_OUTPUT, PEEK, Patience};
use crate::os::containment::Cgroup;
use crate::os::descendants::Family;
use crate::os::guardian::Request;
use crate::os::pidfd::PidFd;
use crate::os::shared_memory;

/// How long to wait for the ends of streams without writers, whose threads may read slowly.
const LAST_STREAMS: Duration = Duration::from_secs(3);

/// How long to wait for a stalled reader of the ranks' output, once the end was requested.
const STALLED: Duration = Duration::from_secs(2);

/// How long to wait for a reader when the supervisor no longer waits.
const LAST_DELIVERY: Duration = Duration::from_millis(200);

/// How long to wait for the end of processes that were sent SIGKILL; a driver may delay it.
const UNKILLABLE: Duration = Duration::from_secs(30);

impl Guard {
    /// Kills all descendants of this process until none is left, and cleans up.
    pub(super) fn finish(mut self, supervisor: &PidFd) {
        let deadline = Instant::now() + UNKILLABLE;
        let alone = loop {
            for child in self.children.values().filter(|child| child.exit.is_none()) {
                self.kill_all_of(child);
            }
            for pid in Family::look().descendants(getpid()) {
                // See `kill_orphans_of`.
                let _ = kill(pid, Signal::SIGKILL);
            }
            self.reap();
            let alone = matches!(waitid(Id::All, PEEK), Err(Errno::ECHILD));
            if alone || Instant::now() > deadline {
                break alone;
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        self.finish_logs(if alone { LAST_STREAMS } else { LAST_OUTPUT });
        shared_memory::remove(&self.shared_memory);
        self.cgroup.iter().for_each(Cgroup::leave);
        self.deliver(supervisor);
    }

    /// Waits until the ranks' output is delivered, as long as the supervisor wants.
    fn deliver(&mut self, supervisor: &PidFd) {
        let Some(delivery) = self.delivery.take() else { return };
        delivery.complete();
        let (mut last, mut since) = (0, Instant::now());
        loop {
            let (done, taken) = delivery.wait(Duration::from_millis(20));
            if taken > last {
                (last, since) = (taken, Instant::now());
            }
            let at_most = match self.patience {
                Patience::Full => Duration::MAX,
                Patience::WhileTaking => STALLED,
                Patience::Short => LAST_DELIVERY,
            };
            if done || since.elapsed() >= at_most {
                return;
            }
            if supervisor.wait(Duration::ZERO) {
                self.patience = Patience::Short;
            }
            match self.channel.receive::<Request>() {
                Ok(Some((Request::Deliver { hurry: true }, _))) => {
                    self.patience = Patience::WhileTaking;
                }
                Ok(None) => self.patience = Patience::Short,
                _ => {}
            }
        }
    }

    /// Waits for the log threads, whose pipes have no writers any more.
    fn finish_logs(&mut self, at_most: Duration) {
        let deadline = Instant::now() + at_most;
        if let Some(delivery) = &self.delivery {
            self.children.keys().for_each(|key| delivery.let_through(*key));
        }
        self.note_ends();
        while self.streams > 0 {
            let Some((key, what)) = self.ends.next_by(deadline) else { return };
            self.note_end(key, what);
        }
    }
}
