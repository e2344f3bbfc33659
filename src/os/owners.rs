//! Who keeps a cluster, written down in its run directory for whoever must end it when nobody
//! answers: its supervisor, its guardian, and the mark that all its processes carry.
//!
//! *Invariant:* the kernel gives numbers of processes anew, so each is kept with the moment of its
//! start: a signal reaches the process that was written down, or nobody.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use nix::sys::signal::Signal;
use nix::unistd::{Pid, Uid};
use serde::{Deserialize, Serialize};

use super::guardian::kill_marked;
use super::pidfd::PidFd;

/// The supervisor and the guardian of a cluster, and what its other processes are known by.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owners {
    /// Whoever took the run directory.
    pub supervisor: Option<Identity>,
    /// The parent of the cluster's processes, once there is one.
    pub guardian: Option<Identity>,
    /// An entry (`VARIABLE=value`) of the environment of every process of the cluster, and of no
    /// other.
    pub mark: Option<String>,
}

/// One process, and never another with its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Its process id.
    pub pid: u32,
    /// When it was started, in clock ticks since boot.
    started: u64,
}

impl Owners {
    /// This process as a supervisor that has no guardian yet.
    pub fn this_process() -> Self {
        Self { supervisor: Identity::of(std::process::id()), guardian: None, mark: None }
    }

    /// Reads what was written down; `None` if nothing was, or nothing that can be read.
    pub(super) fn read(path: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(path).ok()?).ok()
    }

    /// Kills every process that carries the mark.
    pub(super) fn kill_marked(&self) {
        if let Some(mark) = &self.mark {
            kill_marked(mark);
        }
    }
}

impl Identity {
    /// A process that lives.
    pub fn of(pid: u32) -> Option<Self> {
        Some(Self { pid, started: started(pid)? })
    }

    /// Kills the process and waits for its end, at most this long; says whether it is gone.
    pub(super) fn kill(&self, within: Duration) -> bool {
        let Some(process) = self.open() else { return true };
        process.signal(Signal::SIGKILL);
        process.wait(within)
    }

    /// The process, if it lives and is this user's.
    fn open(&self) -> Option<PidFd> {
        let process = PidFd::open(Pid::from_raw(self.pid.cast_signed())).ok()?;
        // Looked at after it was opened: what is read is of the process that is held.
        let own = fs::metadata(format!("/proc/{}", self.pid))
            .is_ok_and(|found| found.uid() == Uid::effective().as_raw());
        (own && started(self.pid) == Some(self.started)).then_some(process)
    }
}

/// The 22nd field of `/proc/PID/stat`; the second, the name, may hold anything, proc(5).
fn started(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, after) = stat.rsplit_once(") ")?;
    after.split(' ').nth(19)?.parse().ok()
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
