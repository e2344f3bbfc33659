//! Checks that the user's limits leave room for a cluster before anything is started.
//!
//! Without enough descriptors or threads a cluster fails somewhere during start-up, often inside a
//! library that aborts. The check demands only the minimum with which a cluster has become READY;
//! its workload needs more.
//!
//! *Invariant:* a limit that does not apply to this user, or can't be read, is ignored.

use std::fs;

use nix::sys::resource::{Resource, getrlimit};

use super::tasks::Tasks;
use crate::status::may_lock;
use cuda_cluster_model::units::HumanBytes;

/// Descriptors of the cluster's process that needs the most, without connections to peers.
const DESCRIPTORS: u64 = 32;

/// Additional descriptors of that process for each other process.
const DESCRIPTORS_FOR_EACH: u64 = 2;

/// Threads other than those of the cluster's processes: supervisor, guardian, starter.
const THREADS: u64 = 3;

/// Memory that UCX locks for RDMA before the first message: the receive queue of `rc`, 4095 buffers
/// of 8256 bytes, and that of `ud`, which sets connections up, half as much.
const LOCKED: u64 = 64 << 20;

/// Memory of a native worker without peers, and for each peer more, in bytes: its own and UCX's
/// queues, measured with 2 to 48 workers.
const MEMORY: u64 = 4_800_000;
const MEMORY_FOR_EACH: u64 = 25_000;

/// A limit that is too low.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message says what each field is")]
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
    /// On locked memory, which RDMA needs.
    #[error(
        "InfiniBand is planned, and UCX must lock at least {} of memory for it in each worker; the limit on locked memory is {}",
        HumanBytes(*needed),
        HumanBytes(*limit)
    )]
    LockedMemory {
        /// The minimum that each worker needs, in bytes.
        needed: u64,
        /// In bytes.
        limit: u64,
    },
    /// The machine's memory, which connections between all workers take.
    #[error(
        "{workers} workers that are all connected need at least {} of memory, and {} is available",
        HumanBytes(*needed),
        HumanBytes(*available)
    )]
    Memory {
        /// Number of workers.
        workers: u64,
        /// The minimum that they need, in bytes.
        needed: u64,
        /// In bytes.
        available: u64,
    },
    /// On processes and threads.
    #[error("a cluster of {processes} processes needs at least {needed} threads; {tasks}")]
    Threads {
        /// Number of the cluster's processes.
        processes: u64,
        /// The minimum that they need.
        needed: u64,
        /// The limit, and what counts against it.
        tasks: Tasks,
    },
}

impl TooFew {
    /// A hint for the user.
    pub fn hint(&self) -> String {
        match self {
            Self::Descriptors { .. } => "raise it with 'ulimit -n', or LimitNOFILE of a unit",
            Self::LockedMemory { .. } => {
                "raise it with 'ulimit -l unlimited', memlock in limits.conf, LimitMEMLOCK of a \
                 unit, or --ulimit memlock=-1 of a container"
            }
            Self::Memory { .. } => {
                "start fewer workers: each pair has a connection, so half as many need a quarter"
            }
            Self::Threads { tasks, .. } => return tasks.hint(),
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
    let needed = THREADS + threads_each * processes;
    match Tasks::limits().into_iter().find(|tasks| tasks.room() < needed) {
        Some(tasks) => Err(TooFew::Threads { processes, needed, tasks }),
        None => Ok(()),
    }
}

/// Checks that so many native workers can be connected with each other: their connections, without
/// any data, can be more than the machine's memory.
///
/// # Errors
/// If they can't.
pub fn check_memory(workers: usize) -> Result<(), TooFew> {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    judge_memory(workers as u64, available(&text))
}

fn judge_memory(workers: u64, available: Option<u64>) -> Result<(), TooFew> {
    let needed = workers.saturating_mul(MEMORY + MEMORY_FOR_EACH.saturating_mul(workers));
    match available.filter(|available| *available < needed) {
        Some(available) => Err(TooFew::Memory { workers, needed, available }),
        None => Ok(()),
    }
}

/// `MemAvailable` of a `/proc/meminfo`, in bytes.
fn available(meminfo: &str) -> Option<u64> {
    let value = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(value.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.saturating_mul(1024))
}

/// Checks that UCX can lock the memory that it needs for RDMA. `planned` is the limit that the
/// processes get instead of this one's, if any. Returns a note if what workers may lock is limited.
///
/// # Errors
/// If the limit is too low to begin with.
pub fn check_locked_memory(planned: Option<Option<u64>>) -> Result<Option<String>, TooFew> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    judge_locked_memory(planned.unwrap_or_else(|| soft(Resource::RLIMIT_MEMLOCK)), &status)
}

fn judge_locked_memory(limit: Option<u64>, status: &str) -> Result<Option<String>, TooFew> {
    let Some(limit) = limit.filter(|_| !may_lock(status)) else { return Ok(None) };
    if limit < LOCKED {
        return Err(TooFew::LockedMemory { needed: LOCKED, limit });
    }
    Ok(Some(format!(
        "the limit on locked memory is {}: messages in more memory than that cannot go over \
         InfiniBand ('ulimit -l unlimited' removes it)",
        HumanBytes(limit)
    )))
}

/// A soft limit; `None` if unlimited.
fn soft(resource: Resource) -> Option<u64> {
    let (soft, _) = getrlimit(resource).ok()?;
    (soft != libc::RLIM_INFINITY).then_some(soft)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locked_memory_is_enough_or_noted_or_refused_with_its_limit() {
        let user = "Name:\tx\nCapEff:\t0000000000000000\n";
        let refused = judge_locked_memory(Some(64 << 10), user).expect_err("64 KiB");
        assert!(
            refused.to_string().contains("the limit on locked memory is 64.0 KiB"),
            "{refused}"
        );
        assert!(refused.hint().contains("ulimit -l unlimited"));
        let note = judge_locked_memory(Some(1 << 30), user).expect("enough to begin with");
        assert!(note.is_some_and(|note| note.contains("1.0 GiB")));
        assert_eq!(judge_locked_memory(None, user), Ok(None));
        let root = "CapEff:\t000001ffffffffff\n";
        assert_eq!(judge_locked_memory(Some(64 << 10), root), Ok(None), "it is not limited");
        let container = "CapEff:\t00000000a80425fb\n";
        assert!(judge_locked_memory(Some(64 << 10), container).is_err(), "Docker's root");
    }

    #[test]
    fn more_workers_than_memory_has_room_for_are_refused_and_eight_always_fit() {
        let meminfo = "MemTotal:       24683520 kB\nMemAvailable:   20971520 kB\n";
        let room = available(meminfo);
        assert_eq!(room, Some(20 << 30));
        assert_eq!(judge_memory(128, room), Ok(()));
        let refused = judge_memory(1000, room).expect_err("a million connections");
        let expected = "1000 workers that are all connected need at least 27.8 GiB of memory, and \
                        20.0 GiB is available";
        assert_eq!(refused.to_string(), expected);
        assert!(refused.hint().contains("start fewer workers"));
        assert_eq!(judge_memory(8, Some(64 << 20)), Ok(()));
        assert_eq!(judge_memory(1000, available("")), Ok(()), "who knows");
    }
}
