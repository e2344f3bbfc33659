//! Checks that the user's limits leave room for a cluster before anything is started.
//!
//! Without enough descriptors or threads a cluster fails somewhere during start-up, often inside a
//! library that aborts. The check demands only the minimum with which a cluster has become READY;
//! its workload needs more.
//!
//! *Invariant:* a limit that does not apply to this user, or can't be read, is ignored.

use std::fs;

use nix::sys::resource::{Resource, getrlimit};
use nix::unistd::{Uid, geteuid};

/// Descriptors of the cluster's process that needs the most, without connections to peers.
const DESCRIPTORS: u64 = 32;

/// Additional descriptors of that process for each other process.
const DESCRIPTORS_FOR_EACH: u64 = 2;

/// Threads other than those of the cluster's processes: supervisor, guardian, starter.
const THREADS: u64 = 3;

/// Above this limit the user's threads are not counted, because that reads a file per process.
const MANY_THREADS: u64 = 1 << 14;

/// A limit that is too low.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TooFew {
    /// On open files per process.
    #[error(
        "a cluster of {processes} processes needs at least {needed} open files in each, and the limit is {limit}"
    )]
    Descriptors {
        /// Number of the cluster's processes.
        processes: u64,
        /// The minimum that each needs.
        needed: u64,
        limit: u64,
    },
    /// On processes and threads of this user.
    #[error(
        "a cluster of {processes} processes needs at least {needed} threads; this user has {present}, and the limit is {limit}"
    )]
    Threads {
        /// Number of the cluster's processes.
        processes: u64,
        /// The minimum that they need.
        needed: u64,
        /// The user's current number.
        present: u64,
        limit: u64,
    },
}

impl TooFew {
    /// A hint for the user.
    pub fn hint(&self) -> String {
        match self {
            Self::Descriptors { .. } => "raise it with 'ulimit -n', or LimitNOFILE of a unit",
            Self::Threads { .. } => "raise it with 'ulimit -u', or LimitNPROC of a unit",
        }
        .to_owned()
    }
}

/// Checks that a cluster with this many processes, and threads in each, can become READY.
///
/// # Errors
/// If it cannot.
pub fn check(processes: usize, threads_each: u64) -> Result<(), TooFew> {
    let processes = processes as u64;
    let needed = DESCRIPTORS + DESCRIPTORS_FOR_EACH * processes;
    if let Some(limit) = soft(Resource::RLIMIT_NOFILE)
        && limit < needed
    {
        return Err(TooFew::Descriptors { processes, needed, limit });
    }
    // The kernel does not apply the limit to root and users with certain capabilities.
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

/// A soft limit; `None` if unlimited.
fn soft(resource: Resource) -> Option<u64> {
    let (soft, _) = getrlimit(resource).ok()?;
    (soft != libc::RLIM_INFINITY).then_some(soft)
}

/// The number of threads in the user's processes, as far as visible.
fn threads_of(user: Uid) -> u64 {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let number = |name: &str| name.bytes().all(|byte| byte.is_ascii_digit());
    let processes = processes.filter(|entry| entry.file_name().to_str().is_some_and(number));
    let statuses =
        processes.filter_map(|entry| fs::read_to_string(entry.path().join("status")).ok());
    statuses.filter_map(|status| threads_in(&status, user)).sum()
}

/// The number of threads in a `/proc/PID/status`, if the process belongs to the user (by real uid,
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
