//! Whose process is at the other end of a Unix socket, and why its memory cannot be read.
//!
//! *Invariant:* a process is told to be this user's only if the kernel tells users apart by its
//! number. In a user namespace it shows all users that have none there as one.

use std::os::fd::AsFd;
use std::{fs, io};

use cuda_cluster_data::copy::{Part, read_all};
use nix::errno::Errno;
use nix::sys::socket::{getsockopt, sockopt};
use nix::unistd::{Pid, geteuid};

/// The number of users that a user namespace has none for, unless the machine has another.
const OVERFLOW: u32 = 65534;

/// Who is at the other end.
pub(crate) enum Peer {
    /// A process of this user.
    Own(Pid),
    /// A process of this user, or of anybody else.
    Unknown(u32),
}

/// Asks the kernel. For who connected it is who listens, as of that call.
pub(crate) fn of(socket: &impl AsFd) -> Result<Peer, Errno> {
    let peer = getsockopt(socket, sockopt::PeerCredentials)?;
    if peer.uid() != geteuid().as_raw() || !has_number_of_its_own(peer.uid()) {
        return Ok(Peer::Unknown(peer.uid()));
    }
    Ok(Peer::Own(Pid::from_raw(peer.pid())))
}

/// What prevents this process from reading the memory of another of its user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Barrier {
    /// It has no number in this pid namespace.
    NoNumber,
    /// The kernel doesn't permit it.
    Forbidden,
    /// What it said does not lie there.
    NotThere,
}

impl Barrier {
    /// For the user: what has caused it, as far as this process can see.
    pub fn why(self) -> String {
        let file = |path| fs::read_to_string(path).unwrap_or_default();
        match self {
            Self::NoNumber => "the peer is in another pid namespace, as a container has; give \
                both the same (docker run --pid)"
                .to_owned(),
            Self::NotThere => "the peer's memory is not that of the process that connected; do \
                pid namespaces lie between them?"
                .to_owned(),
            Self::Forbidden => forbidden(
                &file("/proc/sys/kernel/yama/ptrace_scope"),
                &file("/proc/self/status"),
                &file("/proc/self/uid_map"),
            ),
        }
    }
}

/// What may have forbidden it, after Yama's setting, this process's status and its map of users.
fn forbidden(scope: &str, status: &str, map: &str) -> String {
    let mut causes = Vec::new();
    if !matches!(scope.trim(), "" | "0") {
        causes.push(format!("kernel.yama.ptrace_scope is {}", scope.trim()));
    }
    if status.lines().any(|line| line.split_whitespace().eq(["Seccomp:", "2"])) {
        causes.push("a seccomp profile, as a container has, forbids process_vm_readv".to_owned());
    }
    if !is_everybody(map) {
        causes.push("the peer is outside this process's user namespace".to_owned());
    }
    if causes.is_empty() {
        causes.push("the kernel or a security module forbids process_vm_readv".to_owned());
    }
    causes.join(", or ")
}

/// Whether this process can read the memory of that one, where `token` lies at `address`.
#[allow(unsafe_code)]
pub(crate) fn can_read(pid: Pid, address: u64, token: &[u8]) -> Result<(), Barrier> {
    if pid.as_raw() == 0 {
        return Err(Barrier::NoNumber);
    }
    let mut read = vec![0; token.len()];
    let part = Part { address, to: read.as_mut_ptr(), len: read.len() };
    // SAFETY: the vector is writable.
    let done = unsafe { read_all(pid, vec![part]) };
    match done {
        Ok(()) if read == token => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Err(Barrier::Forbidden),
        _ => Err(Barrier::NotThere),
    }
}

fn has_number_of_its_own(user: u32) -> bool {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    let overflow = read("/proc/sys/kernel/overflowuid").trim().parse().unwrap_or(OVERFLOW);
    user != overflow || is_everybody(&read("/proc/self/uid_map"))
}

/// Whether each user of the machine has a number in this user namespace.
fn is_everybody(map: &str) -> bool {
    map.split_whitespace().eq(["0", "0", "4294967295"])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_forbids_to_read_is_named() {
        let (everybody, status) = ("0 0 4294967295\n", "Name:\tpython\nSeccomp:\t0\n");
        let filtered = "Name:\tpython\nSeccomp:\t2\nSeccomp_filters:\t1\n";
        for (scope, status, map, said) in [
            ("1\n", status, everybody, "kernel.yama.ptrace_scope is 1"),
            ("0\n", status, "0 1000 1\n", "the peer is outside this process's user namespace"),
            ("", filtered, everybody, "a seccomp profile, as a container has, forbids"),
            ("", status, everybody, "the kernel or a security module forbids"),
        ] {
            let told = forbidden(scope, status, map);
            assert!(told.starts_with(said) && !told.contains(", or "), "{told}");
        }
        assert_eq!(forbidden("1\n", filtered, "0 1000 1\n").matches(", or ").count(), 2);
    }

    #[test]
    fn memory_is_read_where_a_token_lies_and_nowhere_else() {
        let token = [5_u8; 32];
        let at = token.as_ptr().addr() as u64;
        let own = Pid::this();
        assert_eq!(can_read(own, at, &token), Ok(()));
        let not_there = Err(Barrier::NotThere);
        assert_eq!(can_read(own, at, &[6; 32]), not_there, "another process's");
        assert_eq!(can_read(own, 8, &token), not_there, "nothing is there");
        assert_eq!(can_read(Pid::from_raw(i32::MAX), at, &token), not_there, "no such process");
        assert_eq!(can_read(Pid::from_raw(0), at, &token), Err(Barrier::NoNumber));
    }

    #[test]
    fn only_the_first_namespace_has_a_number_for_everybody() {
        assert!(is_everybody("         0          0 4294967295\n"));
        for partial in ["", "0 1000 1\n", "65534 1000 1\n", "0 100000 65536\n"] {
            assert!(!is_everybody(partial), "{partial}");
        }
    }
}
