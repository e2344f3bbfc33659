//! Whether this user's limits leave room for a cluster, asked before anything is started.
//!
//! A cluster that begins without enough descriptors or threads fails somewhere in the middle, often
//! inside a library that aborts. What is asked for here is the least with which one became READY;
//! what runs in it needs more.
//!
//! *Invariant:* a limit that does not hold for this user, or that cannot be read, refuses nothing.

use std::fs;

use nix::sys::resource::{Resource, getrlimit};
use nix::unistd::{Uid, geteuid};

/// Descriptors of the process of a cluster that has the most, without any for its peers.
const DESCRIPTORS: u64 = 32;

/// Descriptors of that process for each other process.
const DESCRIPTORS_FOR_EACH: u64 = 2;

/// Threads of a cluster beside those of its processes: supervisor, guardian, whoever waits.
const THREADS: u64 = 3;

/// A limit above which the user's threads are not counted: that reads a file of every process.
const MANY_THREADS: u64 = 1 << 14;

/// A limit that leaves too little room.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TooFew {
    /// Of open files for a process.
    #[error(
        "a cluster of {processes} processes needs at least {needed} open files in each, and the limit is {limit}"
    )]
    Descriptors {
        /// Processes of the cluster.
        processes: u64,
        /// The least that they need.
        needed: u64,
        limit: u64,
    },
    /// Of processes and threads for this user.
    #[error(
        "a cluster of {processes} processes needs at least {needed} threads; this user has {present}, and the limit is {limit}"
    )]
    Threads {
        /// Processes of the cluster.
        processes: u64,
        /// The least that they need.
        needed: u64,
        /// What this user has already.
        present: u64,
        limit: u64,
    },
}

impl TooFew {
    /// What the user can do.
    pub fn hint(&self) -> String {
        match self {
            Self::Descriptors { .. } => "raise it with 'ulimit -n', or LimitNOFILE of a unit",
            Self::Threads { .. } => "raise it with 'ulimit -u', or LimitNPROC of a unit",
        }
        .to_owned()
    }
}

/// Checks that a cluster of this many processes, with this many threads each, can become READY.
///
/// # Errors
/// If it certainly cannot.
pub fn check(processes: usize, threads_each: u64) -> Result<(), TooFew> {
    let processes = processes as u64;
    let needed = DESCRIPTORS + DESCRIPTORS_FOR_EACH * processes;
    if let Some(limit) = soft(Resource::RLIMIT_NOFILE)
        && limit < needed
    {
        return Err(TooFew::Descriptors { processes, needed, limit });
    }
    // The kernel does not count for root, nor for whoever may raise limits.
    let limit = soft(Resource::RLIMIT_NPROC).filter(|_| !geteuid().is_root());
    if let Some(limit) = limit.filter(|limit| *limit <= MANY_THREADS) {
        let needed = THREADS + threads_each * processes;
        let present = threads_of(Uid::current());
        if present.saturating_add(needed) > limit {
            return Err(TooFew::Threads { processes, needed, present, limit });
        }
    }
    Ok(())
}

/// A soft limit; `None` without one.
fn soft(resource: Resource) -> Option<u64> {
    let (soft, _) = getrlimit(resource).ok()?;
    (soft != libc::RLIM_INFINITY).then_some(soft)
}

/// Threads of a user's processes that this one can see.
fn threads_of(user: Uid) -> u64 {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let number = |name: &str| name.bytes().all(|byte| byte.is_ascii_digit());
    let processes = processes.filter(|entry| entry.file_name().to_str().is_some_and(number));
    let statuses =
        processes.filter_map(|entry| fs::read_to_string(entry.path().join("status")).ok());
    statuses.filter_map(|status| threads_in(&status, user)).sum()
}

/// The number of threads in a `/proc/PID/status`, if the process is the user's (by its real uid,
/// which is what the limit counts).
fn threads_in(status: &str, user: Uid) -> Option<u64> {
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    (field("Uid:")? == u64::from(user.as_raw())).then(|| field("Threads:"))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_counted_for_their_user_alone() {
        let status = "Name:\tx\nUid:\t1000\t0\t0\t0\nThreads:\t7\n";
        assert_eq!(threads_in(status, Uid::from_raw(1000)), Some(7));
        assert_eq!(threads_in(status, Uid::from_raw(0)), None);
        assert!(threads_of(Uid::current()) >= 1, "this process has threads");
    }
}
