//! Whose process is at the other end of a Unix socket.
//!
//! *Invariant:* a process is told to be this user's only if the kernel tells users apart by its
//! number. In a user namespace it shows all users that have none there as one.

use std::fs;
use std::os::fd::AsFd;

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
    use super::is_everybody;

    #[test]
    fn only_the_first_namespace_has_a_number_for_everybody() {
        assert!(is_everybody("         0          0 4294967295\n"));
        for partial in ["", "0 1000 1\n", "65534 1000 1\n", "0 100000 65536\n"] {
            assert!(!is_everybody(partial), "{partial}");
        }
    }
}
