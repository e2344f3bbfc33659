//! Finds the descendants of a process, and the processes with a cluster's mark, in `/proc`.
//!
//! *Invariant:* a snapshot is incomplete while processes fork, so callers that kill repeat it until
//! nothing is left.

use std::collections::BTreeMap;
use std::fs;

use nix::sys::signal::Signal;
use nix::unistd::Pid;

use super::pidfd::PidFd;
use super::process::parent;

/// A snapshot of all processes, by parent.
#[derive(Debug, Default)]
pub(super) struct Family {
    children: BTreeMap<i32, Vec<i32>>,
}

impl Family {
    /// Reads `/proc`.
    pub(super) fn look() -> Self {
        let mut family = Self::default();
        for pid in pids() {
            if let Some(parent) = parent(pid.cast_unsigned()) {
                family.children.entry(parent.cast_signed()).or_default().push(pid);
            }
        }
        family
    }

    /// The children of a process.
    pub(super) fn children(&self, pid: Pid) -> Vec<Pid> {
        let children = self.children.get(&pid.as_raw()).into_iter().flatten();
        children.map(|child| Pid::from_raw(*child)).collect()
    }

    /// A process's children, their children, and so on.
    pub(super) fn descendants(&self, pid: Pid) -> Vec<Pid> {
        let mut found = self.children(pid);
        let mut next = 0;
        while let Some(one) = found.get(next) {
            found.extend(self.children(*one));
            next += 1;
        }
        found
    }
}

fn pids() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Whether the process was started with the entry `mark` (`VARIABLE=value`) in its environment.
pub(super) fn carries(pid: Pid, mark: &str) -> bool {
    fs::read(format!("/proc/{pid}/environ"))
        .is_ok_and(|text| text.split(|byte| *byte == 0).any(|entry| entry == mark.as_bytes()))
}

/// Kills every process, except this one, with the entry `mark` in its environment, until none is
/// left or after some rounds; returns the number found in the last round.
///
/// The last resort, when the guardian was killed and there is no control group. Only this user
/// knows the mark, so the cluster has started every process that carries it. The pidfd is opened
/// before the environment is read, so that the process killed is the one that was read.
pub(super) fn kill_marked(mark: &str) -> usize {
    let own = std::process::id().cast_signed();
    let mut left = 0;
    for _ in 0..50 {
        left = 0;
        for pid in pids().filter(|pid| *pid != own) {
            let Ok(process) = PidFd::open(Pid::from_raw(pid)) else { continue };
            if carries(Pid::from_raw(pid), mark) {
                process.signal(Signal::SIGKILL);
                left += 1;
            }
        }
        if left == 0 {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    left
}
