//! Identifies a cluster's supervisor, guardian and the mark that its processes carry. Stored in the
//! run directory, so that the cluster can be killed when neither answers.
//!
//! *Invariant:* the kernel reuses process ids, so each is stored with its start time: a signal
//! reaches the recorded process or none.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use nix::sys::signal::Signal;
use nix::unistd::{Pid, Uid};
use serde::{Deserialize, Serialize};

use super::descendants::kill_marked;
use super::pidfd::PidFd;
use super::process::started;
use super::reading;

/// The supervisor and guardian of a cluster, and the mark of its processes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owners {
    /// The process that has acquired the run directory.
    pub supervisor: Option<Identity>,
    /// The parent of the cluster's processes, once it exists.
    pub guardian: Option<Identity>,
    /// An environment entry (`VARIABLE=value`) that all processes of the cluster have, and no
    /// others.
    pub mark: Option<String>,
}

/// A process, identified so that a reused process id is never mistaken for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Its process id.
    pub pid: u32,
    /// Its start time, in clock ticks since boot.
    started: u64,
}

impl Owners {
    /// This process as a supervisor without a guardian.
    pub fn this_process() -> Self {
        Self { supervisor: Identity::of(std::process::id()), guardian: None, mark: None }
    }

    /// Reads the file; `None` if it is missing or invalid.
    pub fn read(path: &Path) -> Option<Self> {
        serde_json::from_slice(&reading::bytes(path).ok()?).ok()
    }

    /// Whether the guardian lives. While it does, it holds the cluster's own run directory.
    pub fn have_a_guardian(&self) -> bool {
        self.guardian.is_some_and(|guardian| guardian.lives())
    }

    /// Kills all processes that carry the mark.
    pub(super) fn kill_marked(&self) {
        if let Some(mark) = &self.mark {
            kill_marked(mark);
        }
    }
}

impl Identity {
    /// A running process.
    pub fn of(pid: u32) -> Option<Self> {
        Some(Self { pid, started: started(pid)? })
    }

    /// Whether the process has not ended yet.
    pub fn lives(&self) -> bool {
        !self.ends(Duration::ZERO)
    }

    /// Waits at most this long for the end of the process; returns whether it is gone.
    pub(super) fn ends(&self, within: Duration) -> bool {
        self.open().is_none_or(|process| process.wait(within))
    }

    /// Kills the process and waits at most this long for its end; returns whether it is gone.
    pub(super) fn kill(&self, within: Duration) -> bool {
        let Some(process) = self.open() else { return true };
        process.signal(Signal::SIGKILL);
        process.wait(within)
    }

    /// The process, if it is running and belongs to this user.
    fn open(&self) -> Option<PidFd> {
        let process = PidFd::open(Pid::from_raw(self.pid.cast_signed())).ok()?;
        // Read after the pidfd was opened, so the start time is that of the opened process.
        let own = fs::metadata(format!("/proc/{}", self.pid))
            .is_ok_and(|found| found.uid() == Uid::effective().as_raw());
        (own && started(self.pid) == Some(self.started)).then_some(process)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_process_is_killed_and_another_with_its_number_is_not() {
        let mut child = Command::new("sleep").arg("1000").spawn().expect("a process");
        let meant = Identity::of(child.id()).expect("it lives");
        let earlier = Identity { started: meant.started - 1, ..meant };
        assert!(earlier.kill(Duration::from_secs(10)), "that process is gone");
        assert_eq!(child.try_wait().expect("a child"), None, "this one is another");
        assert!(meant.kill(Duration::from_secs(10)));
        assert!(child.wait().is_ok_and(|status| !status.success()));
        assert_eq!(Identity::of(child.id()), None);
    }
}
