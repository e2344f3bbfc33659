//! This process: its limits, namespaces and control groups, and who other processes are.
//!
//! *Invariant:* the process changes nothing about itself.

#![allow(unsafe_code)]

use std::path::{Path, PathBuf};

use nix::libc;

use super::super::Options;
use super::super::caller::groups_of;
use super::super::sysfs::first_line;
use crate::status::{field, may_lock};
use cuda_cluster_model::preflight::{Holder, Look, Process, Used};

/// Reads it.
pub(super) fn look(options: &Options) -> Process {
    let procfs = &options.procfs;
    let status = std::fs::read_to_string(procfs.join("self/status")).unwrap_or_default();
    let limits = std::fs::read_to_string(procfs.join("self/limits")).unwrap_or_default();
    let groups = Groups::of(options);
    Process {
        limits: limits.lines().skip(1).filter_map(limit).collect(),
        may_lock: may_lock(&status),
        reads_memory: Look::Seen(read_own_memory()),
        own_pids: own_namespace(procfs, "pid"),
        own_ipc: own_namespace(procfs, "ipc"),
        group_memory: groups.used("memory.max", "memory.current"),
        group_tasks: groups.used("pids.max", "pids.current"),
        group_cpus: groups.cpus(),
    }
}

/// A line of a `limits`: `Max open files            1024                 524288         files`.
fn limit(line: &str) -> Option<(String, Option<u64>)> {
    // The name has 26 columns (`fs/proc/base.c`).
    let (name, rest) = line.split_at_checked(26)?;
    let soft = rest.split_whitespace().next()?;
    let soft = if soft == "unlimited" { None } else { Some(soft.parse().ok()?) };
    Some((name.trim().to_owned(), soft))
}

/// Tries `process_vm_readv` on this process, which only a filter of system calls refuses.
fn read_own_memory() -> Result<(), String> {
    let (from, mut to) = ([1u8; 8], [0u8; 8]);
    let local = libc::iovec { iov_base: to.as_mut_ptr().cast(), iov_len: to.len() };
    let remote = libc::iovec { iov_base: from.as_ptr().cast_mut().cast(), iov_len: from.len() };
    // SAFETY: both describe arrays of this function, and the kernel writes to `to` alone.
    let read = unsafe { libc::process_vm_readv(libc::getpid(), &local, 1, &remote, 1, 0) };
    match usize::try_from(read) {
        Ok(length) if length == from.len() && to == from => Ok(()),
        Ok(_) => Err("it read other bytes".to_owned()),
        Err(_) => Err(std::io::Error::last_os_error().to_string()),
    }
}

/// Numbers of the machine's own namespaces (`linux/proc_ns.h`).
const OWN_IPC: u64 = 0xEFFF_FFFF;
const OWN_PIDS: u64 = 0xEFFF_FFFC;

/// Whether this process is in the namespace in which the machine started.
pub(super) fn own_namespace(procfs: &Path, kind: &str) -> Look<bool> {
    let Ok(link) = std::fs::read_link(procfs.join("self/ns").join(kind)) else {
        return Look::NotThere;
    };
    let text = link.to_string_lossy();
    let number = text.split_once('[').and_then(|(_, rest)| rest.strip_suffix(']'));
    let own = if kind == "pid" { OWN_PIDS } else { OWN_IPC };
    Look::of(number.and_then(|number| number.parse::<u64>().ok()).map(|number| number == own))
}

/// The control group of this process and those above, of version 2.
struct Groups(Vec<PathBuf>);

impl Groups {
    fn of(options: &Options) -> Self {
        let own = std::fs::read_to_string(options.procfs.join("self/cgroup")).unwrap_or_default();
        let path = own.lines().find_map(|line| line.strip_prefix("0::/"));
        Self(path.map(|path| groups_of(&options.sysfs.join("fs/cgroup"), path)).unwrap_or_default())
    }

    /// The limit with the least room.
    fn used(&self, limit: &str, current: &str) -> Look<Used> {
        let number = |group: &Path, file: &str| {
            first_line(&group.join(file)).and_then(|text| text.parse::<u64>().ok())
        };
        let used = self.0.iter().filter_map(|group| {
            Some(Used { limit: number(group, limit)?, used: number(group, current)? })
        });
        Look::of(used.min_by_key(|used| used.limit.saturating_sub(used.used)))
    }

    /// The least time of CPUs: `200000 100000` are two.
    fn cpus(&self) -> Look<f64> {
        let of = |group: &PathBuf| {
            let text = first_line(&group.join("cpu.max"))?;
            let (quota, period) = text.split_once(' ')?;
            let (quota, period): (f64, f64) = (quota.parse().ok()?, period.parse().ok()?);
            (period > 0.0).then_some(quota / period)
        };
        Look::of(self.0.iter().filter_map(of).min_by(f64::total_cmp))
    }
}

/// What can be seen of a process that holds so much of a GPU.
pub fn seen(procfs: &Path, pid: u32, bytes: Option<u64>) -> Holder {
    let folder = procfs.join(pid.to_string());
    let status = std::fs::read_to_string(folder.join("status")).unwrap_or_default();
    let uid = field(&status, "Uid");
    Holder {
        pid,
        name: first_line(&folder.join("comm")),
        uid: uid.and_then(|ids| ids.split_whitespace().next()?.parse().ok()),
        age_s: age(procfs, &folder),
        bytes,
    }
}

/// For how long a process has run: field 22 of `stat`, in ticks since the start of the machine.
fn age(procfs: &Path, folder: &Path) -> Option<u64> {
    let stat = std::fs::read_to_string(folder.join("stat")).ok()?;
    let (_, after) = stat.rsplit_once(')')?;
    let started: f64 = after.split_whitespace().nth(19)?.parse().ok()?;
    let uptime = first_line(&procfs.join("uptime"))?;
    let uptime: f64 = uptime.split_whitespace().next()?.parse().ok()?;
    // SAFETY: a call that only reads a constant.
    let ticks = unsafe { libc::sysconf(libc::_SC_CLK_TCK) } as f64;
    Some(super::whole(uptime - started / ticks))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn limits_read_as_the_kernel_writes_them() {
        let own = std::fs::read_to_string("/proc/self/limits").expect("the kernel tells");
        let all: BTreeMap<String, Option<u64>> = own.lines().skip(1).filter_map(limit).collect();
        for name in ["Max open files", "Max locked memory", "Max address space", "Max processes"] {
            assert!(all.contains_key(name), "{all:?}");
        }
        let line = "Max open files            1024                 524288               files     ";
        assert_eq!(limit(line), Some(("Max open files".to_owned(), Some(1024))));
    }

    #[test]
    fn a_process_reads_its_own_memory() {
        assert_eq!(read_own_memory(), Ok(()));
    }

    #[test]
    fn the_group_with_the_least_room_counts() {
        let folder = tempfile::tempdir().expect("a directory");
        let group = folder.path().join("a/b");
        std::fs::create_dir_all(&group).expect("made");
        for (at, limit, used, cpus) in [
            ("", "max", "9", "max 100000"),
            ("a", "400", "390", "150000 100000"),
            ("a/b", "500", "100", "max 100000"),
        ] {
            let at = folder.path().join(at);
            std::fs::write(at.join("pids.max"), limit).expect("written");
            std::fs::write(at.join("pids.current"), used).expect("written");
            std::fs::write(at.join("cpu.max"), cpus).expect("written");
        }
        let groups = Groups(groups_of(folder.path(), "a/b"));
        assert_eq!(
            groups.used("pids.max", "pids.current"),
            Look::Seen(Used { limit: 400, used: 390 })
        );
        assert_eq!(groups.cpus(), Look::Seen(1.5));
        assert_eq!(groups.used("memory.max", "memory.current"), Look::NotThere);
    }
}
