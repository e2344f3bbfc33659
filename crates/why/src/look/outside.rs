//! Processes that are not of the job, but have the other ends of what it waits for: whether they do
//! anything.

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use super::procfs::Stat;
use crate::evidence::{Call, End, Outsider, Process, State, Waits};

/// The most that are looked at.
const MOST: usize = 32;

/// Between two looks: the kernel counts processor time by ticks of 10 ms.
const BETWEEN: Duration = Duration::from_millis(100);

/// Looks at those that these processes wait for.
pub(super) fn look(processes: &[Process]) -> Vec<Outsider> {
    let pids: BTreeSet<u32> = processes.iter().flat_map(waited_for).collect();
    let pids: Vec<u32> = pids.into_iter().take(MOST).collect();
    if pids.is_empty() {
        return Vec::new();
    }
    let before: Vec<Option<u64>> = pids.iter().map(|pid| ticks(*pid)).collect();
    std::thread::sleep(BETWEEN);
    let outsider = |(pid, before): (u32, Option<u64>)| {
        let stat = Stat::read(&format!("/proc/{pid}/stat"))?;
        let kernel = fs::read_to_string(format!("/proc/{pid}/wchan")).unwrap_or_default();
        Some(Outsider {
            pid,
            name: stat.name().to_owned(),
            works: stat.state() == State::Running || ticks(pid) > before,
            sleeps: kernel.contains("nanosleep"),
        })
    };
    pids.into_iter().zip(before).filter_map(outsider).collect()
}

/// Those at the other ends of what a process waits for.
fn waited_for(process: &Process) -> Vec<u32> {
    let calls = process.threads.iter().filter_map(|thread| thread.call.as_ref());
    let ends = calls.flat_map(|Call { waits, .. }| match waits {
        Waits::Descriptor { end, .. } => std::slice::from_ref(end),
        Waits::Any { ends, .. } => ends,
        _ => &[],
    });
    let holders = ends.flat_map(|end| match end {
        End::Pipe { others, .. } => others.as_slice(),
        End::Connection(number) => {
            process.connections.get(*number).map_or(&[][..], |one| one.peer.as_slice())
        }
        _ => &[],
    });
    holders.filter(|holder| holder.rank.is_none()).map(|holder| holder.pid).collect()
}

/// Processor time of all threads.
fn ticks(pid: u32) -> Option<u64> {
    let stat = Stat::read(&format!("/proc/{pid}/stat"))?;
    Some(stat.field::<u64>(14)? + stat.field::<u64>(15)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evidence::{Holder, Thread};

    #[test]
    fn who_is_waited_for_and_works_is_known() {
        let pid = std::process::id();
        let others = vec![Holder { pid, rank: None }];
        let end = End::Pipe { inode: 1, others };
        let waits = Waits::Descriptor { end, writes: false };
        let call = Some(Call { name: "read".to_owned(), waits, left_ms: None });
        let threads = vec![Thread { call, ..Thread::default() }];
        let seen = look(&[Process { threads, ..Process::default() }]);
        assert_eq!(seen.len(), 1);
        assert_eq!(seen[0].pid, pid);
        assert!(look(&[Process::default()]).is_empty());
    }
}
