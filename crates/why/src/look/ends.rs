//! What a process's descriptors lead to, and who has the other ends.
//!
//! *Invariant:* a process at the other end is named only if it was seen to have it open.

use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::FileTypeExt as _;
use std::str::FromStr;
use std::sync::OnceLock;

use super::procfs::numbers;
use super::shared::Shared;
use super::sockets::Sockets;
use crate::evidence::{Connection, End, Holder, Locked, NAMED_PIPE, is_a_device};

/// Who of all processes has which pipes and sockets open.
#[derive(Default)]
pub(super) struct Holders {
    by_inode: BTreeMap<u64, BTreeSet<(u32, i32)>>,
}

impl Holders {
    /// Reads the descriptors of every process that this one may look at.
    pub(super) fn look() -> Self {
        let mut holders = Self::default();
        for pid in numbers::<u32>("/proc") {
            let folder = format!("/proc/{pid}/fd");
            for number in numbers::<i32>(&folder) {
                let link = fs::read_link(format!("{folder}/{number}")).unwrap_or_default();
                if let Some(inode) = link.to_str().and_then(inode) {
                    holders.by_inode.entry(inode).or_default().insert((pid, number));
                }
            }
        }
        holders
    }

    /// Whether a process has it open.
    fn has(&self, inode: u64, pid: u32) -> bool {
        let found = self.by_inode.get(&inode).into_iter().flatten();
        found.into_iter().any(|(holder, _)| *holder == pid)
    }

    /// Processes that have it open, other than `but`.
    pub(super) fn others(&self, inode: u64, but: u32) -> impl Iterator<Item = (u32, i32)> {
        let found = self.by_inode.get(&inode).into_iter().flatten();
        found.copied().filter(move |(pid, _)| *pid != but)
    }
}

/// The number in `pipe:[12]` and `socket:[12]`.
fn inode(link: &str) -> Option<u64> {
    let (kind, rest) = link.split_once(":[")?;
    matches!(kind, "pipe" | "socket").then(|| rest.strip_suffix(']')?.parse().ok()).flatten()
}

/// The descriptors of a process.
pub(super) struct Ends<'a> {
    pub(super) pid: u32,
    pub(super) holders: &'a Holders,
    pub(super) sockets: &'a Sockets,
    /// Read when the first is asked for.
    pub(super) shared: &'a OnceLock<Shared>,
    /// The rank of each process of the job.
    pub(super) ranks: &'a BTreeMap<u32, String>,
    /// Its sockets that are connections, in order: read once, because their places are told.
    pub(super) inodes: OnceCell<Vec<u64>>,
}

impl Ends<'_> {
    /// What a descriptor leads to; `None` if it is not open (any more).
    pub(super) fn of(&self, pid: u32, number: i32) -> Option<End> {
        let link = fs::read_link(format!("/proc/{pid}/fd/{number}")).ok()?;
        let link = link.to_string_lossy().into_owned();
        if let Some(inode) = inode(&link) {
            return Some(if link.starts_with("pipe") {
                self.pipe(pid, number, inode, self.holders.others(inode, pid))
            } else {
                self.socket(inode)
            });
        }
        Some(match link.as_str() {
            "anon_inode:[timerfd]" => End::Timer,
            "anon_inode:inotify" | "anon_inode:[fanotify]" => End::Changes,
            // Since Linux 6.9 these have a file system of their own.
            _ if link == "anon_inode:[pidfd]" || link.starts_with("pidfd:") => {
                info(pid, number, "Pid:").map_or(End::Event, |pid| End::Process { pid })
            }
            _ if link.starts_with("anon_inode:") => End::Event,
            _ if link.starts_with("/dev/pts/") || link.starts_with("/dev/tty") => {
                End::Terminal { path: link }
            }
            _ if link.starts_with('/') => {
                let filesystem = filesystem(pid, &link);
                if filesystem.as_deref() == Some(NAMED_PIPE) {
                    let inode = info(pid, number, "ino:").unwrap_or(0);
                    let others: Vec<(u32, i32)> = opened(&link, pid).collect();
                    if !others.is_empty() {
                        return Some(self.pipe(pid, number, inode, others.into_iter()));
                    }
                }
                End::File { filesystem, path: link }
            }
            _ => End::Other(link),
        })
    }

    /// A pipe, of which these have descriptors, too.
    fn pipe(
        &self,
        pid: u32,
        number: i32,
        inode: u64,
        others: impl Iterator<Item = (u32, i32)>,
    ) -> End {
        let direction = writes(pid, number);
        let others: BTreeSet<u32> = others
            .filter(|(pid, number)| writes(*pid, *number) != direction)
            .map(|it| it.0)
            .collect();
        End::Pipe { inode, others: others.into_iter().map(|pid| self.holder(pid)).collect() }
    }

    fn socket(&self, inode: u64) -> End {
        if let Some(address) = self.sockets.listener(inode) {
            return End::Listener { address };
        }
        match self.inodes().iter().position(|one| *one == inode) {
            Some(place) => End::Connection(place),
            None => End::Other("socket".to_owned()),
        }
    }

    /// The connections of the process.
    pub(super) fn connections(&self) -> Vec<Connection> {
        self.inodes().iter().filter_map(|inode| self.connection(self.pid, *inode)).collect()
    }

    fn inodes(&self) -> &[u64] {
        self.inodes.get_or_init(|| {
            let found: BTreeSet<u64> = links(self.pid).filter_map(|link| inode(&link)).collect();
            found.into_iter().filter(|inode| self.sockets.is_connection(*inode)).collect()
        })
    }

    fn connection(&self, pid: u32, inode: u64) -> Option<Connection> {
        let (mut connection, peer) = self.sockets.connection(inode)?;
        // Both ends may be this process's own, or a child may still have its parent's.
        let holders = peer.map(|peer| self.holders.others(peer, pid).map(|it| it.0));
        let holders: BTreeSet<u32> = holders.into_iter().flatten().collect();
        let own = peer.filter(|peer| self.holders.has(*peer, pid)).map(|_| pid);
        connection.peer = holders.into_iter().next_back().or(own).map(|pid| self.holder(pid));
        Some(connection)
    }

    /// Files that the process has open and of which another one has a lock.
    pub(super) fn locked(&self) -> Vec<Locked> {
        let pid = self.pid;
        let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
        let of_job = |holder: &u32| *holder != pid && self.ranks.contains_key(holder);
        let held: BTreeMap<&str, u32> = held(&locks).filter(|(_, holder)| of_job(holder)).collect();
        if held.is_empty() {
            return Vec::new();
        }
        let mounts = fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap_or_default();
        let locked = |number: i32| {
            let mount: u64 = info(pid, number, "mnt_id:")?;
            let file = file(device(&mounts, mount)?, info(pid, number, "ino:")?);
            let path = fs::read_link(format!("/proc/{pid}/fd/{number}")).ok()?;
            Some(Locked { holder: *held.get(file.as_str())?, path: path.display().to_string() })
        };
        let numbers = numbers::<i32>(&format!("/proc/{pid}/fd"));
        let found: BTreeSet<Locked> = numbers.filter_map(locked).collect();
        found.into_iter().collect()
    }

    /// Who else has the memory at an address, where processes may share it.
    pub(super) fn sharers(&self, address: u64) -> Option<Vec<Holder>> {
        let sharers = self.shared.get_or_init(Shared::look).sharers(self.pid, address)?;
        Some(sharers.into_iter().map(|pid| self.holder(pid)).collect())
    }

    fn holder(&self, pid: u32) -> Holder {
        Holder { pid, rank: self.ranks.get(&pid).cloned() }
    }
}

/// What the descriptors of a process lead to.
fn links(pid: u32) -> impl Iterator<Item = String> {
    let folder = format!("/proc/{pid}/fd");
    let numbers = numbers::<i32>(&folder);
    numbers.filter_map(move |number| {
        fs::read_link(format!("{folder}/{number}")).ok()?.into_os_string().into_string().ok()
    })
}

/// The inodes of the sockets that a process has open; one may come twice.
pub(super) fn sockets_of(pid: u32) -> impl Iterator<Item = u64> {
    links(pid).filter(|link| link.starts_with("socket")).filter_map(|link| inode(&link))
}

/// The GPUs and NICs that a process has open, in order.
pub(super) fn devices(pid: u32) -> Vec<String> {
    let found: BTreeSet<String> = links(pid).filter(|link| is_a_device(link)).collect();
    found.into_iter().collect()
}

/// Processes that have a file open by this name, other than `but`, with their descriptors.
fn opened(path: &str, but: u32) -> impl Iterator<Item = (u32, i32)> {
    let others = numbers::<u32>("/proc").filter(move |pid| *pid != but);
    others.flat_map(move |pid| {
        let folder = format!("/proc/{pid}/fd");
        let leads = |number: &i32| {
            fs::read_link(format!("{folder}/{number}")).is_ok_and(|link| link.as_os_str() == path)
        };
        let found: Vec<i32> = numbers::<i32>(&folder).filter(leads).collect();
        found.into_iter().map(move |number| (pid, number))
    })
}

/// What `/proc/PID/fdinfo` says of a descriptor. It asks no file system, as `stat` does.
fn info<T: FromStr>(pid: u32, number: i32, key: &str) -> Option<T> {
    let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")).ok()?;
    let value = info.lines().find_map(|line| line.strip_prefix(key))?;
    value.trim().parse().ok()
}

/// Whether a descriptor is open for writing.
fn writes(pid: u32, number: i32) -> bool {
    let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")).unwrap_or_default();
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| i32::from_str_radix(flags.trim(), 8).ok());
    flags.is_some_and(|flags| flags & libc::O_ACCMODE != libc::O_RDONLY)
}

/// The descriptors that an epoll instance watches.
pub(super) fn watched(pid: u32, number: i32) -> Vec<i32> {
    let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")).unwrap_or_default();
    let lines = info.lines().filter_map(|line| line.strip_prefix("tfd:"));
    lines.filter_map(|line| line.split_ascii_whitespace().next()?.parse().ok()).collect()
}

/// Who has a lock on the file that a descriptor leads to, `/proc/locks`.
pub(super) fn lock_holder(pid: u32, number: i32) -> Option<u32> {
    let mounts = fs::read_to_string(format!("/proc/{pid}/mountinfo")).ok()?;
    let device = device(&mounts, info(pid, number, "mnt_id:")?)?;
    let file = file(device, info(pid, number, "ino:")?);
    let locks = fs::read_to_string("/proc/locks").ok()?;
    held(&locks).find(|(locked, holder)| **locked == *file && *holder != pid).map(|it| it.1)
}

/// The locks that are held, as the file and the process of each:
/// `1: POSIX  ADVISORY  WRITE 1234 08:01:5678 0 EOF`; lines of those that wait have an arrow.
fn held(locks: &str) -> impl Iterator<Item = (&str, u32)> {
    let lines = locks.lines().filter(|line| !line.contains("->"));
    lines.filter_map(|line| {
        let mut words = line.split_ascii_whitespace().skip(4);
        let pid = words.next()?.parse().ok()?;
        Some((words.next()?, pid))
    })
}

/// A file as `/proc/locks` names it.
fn file((major, minor): (u32, u32), inode: u64) -> String {
    format!("{major:02x}:{minor:02x}:{inode}")
}

/// The device of a mount, `36 35 98:0 / /mnt …`.
fn device(mounts: &str, mount: u64) -> Option<(u32, u32)> {
    let mut lines = mounts.lines().map(|line| line.split(' '));
    lines.find_map(|mut words| {
        let is_it = words.next()?.parse() == Ok(mount);
        let (major, minor) = words.nth(1)?.split_once(':')?;
        is_it.then_some((major.parse().ok()?, minor.parse().ok()?))
    })
}

/// File systems that answer by themselves: a server may not.
const LOCAL: [&str; 8] = ["btrfs", "ext2", "ext3", "ext4", "overlay", "tmpfs", "xfs", "zfs"];

/// The kind of file system that a path is on, by the process's own mounts. The path itself is
/// looked at only where that can't hang.
pub(super) fn filesystem(pid: u32, path: &str) -> Option<String> {
    let mounts = fs::read_to_string(format!("/proc/{pid}/mountinfo")).ok()?;
    let kind = mounted(&mounts, path)?;
    let is_pipe = || {
        let file = fs::symlink_metadata(format!("/proc/{pid}/root{path}"));
        file.is_ok_and(|file| file.file_type().is_fifo())
    };
    if LOCAL.contains(&kind.as_str()) && is_pipe() {
        return Some(NAMED_PIPE.to_owned());
    }
    Some(kind)
}

/// Whether a file can be read without a server's answer.
pub(super) fn is_local(pid: u32, path: &str) -> bool {
    let mounts = fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap_or_default();
    mounted(&mounts, path).is_some_and(|kind| LOCAL.contains(&kind.as_str()))
}

fn mounted(mounts: &str, path: &str) -> Option<String> {
    let entries = mounts.lines().filter_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        let place = before.split(' ').nth(4)?.replace("\\040", " ");
        let inside = path.strip_prefix(place.trim_end_matches('/'))?;
        let below = inside.is_empty() || inside.starts_with('/');
        below.then(|| (place.len(), after.split(' ').next().unwrap_or_default().to_owned()))
    });
    // The last of equal ones lies on top.
    entries.max_by_key(|(length, _)| *length).map(|(_, kind)| kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_system_is_that_of_the_nearest_mount() {
        let mounts = "1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 0:5 / /data rw - nfs4 host:/x rw\n\
                      3 1 0:6 / /data2 rw - fuse.s3 s3 rw\n";
        assert_eq!(mounted(mounts, "/data/x").as_deref(), Some("nfs4"));
        assert_eq!(mounted(mounts, "/data2").as_deref(), Some("fuse.s3"));
        assert_eq!(mounted(mounts, "/database").as_deref(), Some("ext4"));
        assert_eq!(mounted(mounts, "relative"), None);
    }

    #[test]
    fn who_holds_a_lock_is_not_one_that_waits_for_it() {
        let locks = "1: FLOCK  ADVISORY  WRITE 12 08:01:99 0 EOF\n\
                     1: -> FLOCK  ADVISORY  WRITE 13 08:01:99 0 EOF\n";
        let held: Vec<(&str, u32)> = held(locks).collect();
        assert_eq!(held, [("08:01:99", 12)]);
        let mounts = "1 0 8:1 / / rw - ext4 /dev/a rw\n21 1 0:25 / /x rw - tmpfs none rw\n";
        assert_eq!(device(mounts, 1).map(|device| file(device, 99)).as_deref(), Some("08:01:99"));
        assert_eq!(device(mounts, 21).map(|device| file(device, 7)).as_deref(), Some("00:19:7"));
        assert_eq!(device(mounts, 2), None);
    }

    #[test]
    fn only_pipes_and_sockets_have_other_ends() {
        assert_eq!(inode("pipe:[12]"), Some(12));
        assert_eq!(inode("socket:[9]"), Some(9));
        assert_eq!(inode("anon_inode:[eventpoll]"), None);
        assert_eq!(inode("/tmp/pipe:[x"), None);
    }
}
