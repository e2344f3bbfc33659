//! The sockets by which peers wake a worker: each of UCX's transports over shared memory has one.
//!
//! Their names are in the abstract namespace, which knows no permissions, so every user of the
//! machine can send to them. A peer sends one byte. UCX takes an empty datagram for the end of a
//! peer: `ucp_worker_arm` fails (`uct_mm_iface_event_fd_arm`), or, on a transport that nobody uses
//! yet, UCX ends the process (`ucp_worker_iface_check_events_do`). So the kernel is told to
//! discard empty datagrams. What is left to a stranger is to wake the worker.
//!
//! A transport that nobody uses yet is watched by a thread of UCX's own, which has the worker look
//! for a peer's first message when a datagram comes. If it is taken from under that thread, nobody
//! ever looks (a hang on a busy machine). So whoever looks who woke the worker leaves a datagram.
//!
//! *Invariant:* no empty datagram reaches UCX once the worker exists; where one has come that UCX
//! has not taken, there is one.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::PathBuf;

use nix::errno::Errno;
use nix::sys::socket::{SockType, getsockopt, sockopt};

/// More than a queue has (`net.unix.max_dgram_qlen`, 10), so that a flood keeps nobody here.
const AT_ONCE: u32 = 4096;

/// The sockets that this process has before UCX opens its own, by what `/proc` calls them.
pub(super) struct Before(BTreeSet<PathBuf>);

/// UCX's sockets.
pub(super) struct WakeupSockets(Vec<Wakeup>);

/// One of them, and its name.
struct Wakeup {
    socket: UnixDatagram,
    name: SocketAddr,
}

impl Before {
    pub(super) fn look() -> io::Result<Self> {
        Ok(Self(sockets()?.into_iter().map(|(_, socket)| socket).collect()))
    }
}

impl WakeupSockets {
    /// Finds the sockets that UCX has opened, and closes them to empty datagrams.
    pub(super) fn guard(before: &Before) -> io::Result<Self> {
        let mut found = Vec::new();
        for (number, socket) in sockets()? {
            if !before.0.contains(&socket)
                && let Some(socket) = duplicate(number)
                && let Some(wakeup) = Wakeup::new(socket)
            {
                discard_empty(&wakeup.socket)?;
                // As UCX has it.
                wakeup.socket.set_nonblocking(true)?;
                // One may have come before.
                wakeup.look();
                found.push(wakeup);
            }
        }
        Ok(Self(found))
    }

    /// Whether anybody has woken the worker since the last call, as far as UCX has not noticed.
    pub(super) fn look(&self) -> bool {
        self.0.iter().fold(false, |any, wakeup| wakeup.look() | any)
    }
}

impl Wakeup {
    /// A socket that is like UCX's: for datagrams, with an abstract name.
    fn new(socket: OwnedFd) -> Option<Self> {
        if getsockopt(&socket, sockopt::SockType) != Ok(SockType::Datagram) {
            return None;
        }
        let socket = UnixDatagram::from(socket);
        let name = socket.local_addr().ok().filter(|name| name.as_abstract_name().is_some())?;
        Some(Self { socket, name })
    }

    /// Whether anything has come but what this has left the last time.
    fn look(&self) -> bool {
        let (mut any, mut others) = (false, false);
        for _ in 0..AT_ONCE {
            let Ok((_, from)) = self.socket.recv_from(&mut [0]) else { break };
            any = true;
            others |= from.as_abstract_name() != self.name.as_abstract_name();
        }
        if any {
            // If there is no room, others have sent more.
            let _ = self.socket.send_to_addr(&[0], &self.name);
        }
        others
    }
}

/// Whether this system can discard empty datagrams, tried on a socket that has no name.
///
/// # Errors
/// What the system refuses.
pub fn try_guard() -> io::Result<()> {
    Before::look()?;
    discard_empty(&UnixDatagram::unbound()?)
}

/// The sockets of this process: descriptor, and name in `/proc`.
fn sockets() -> io::Result<Vec<(RawFd, PathBuf)>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc/self/fd")? {
        let entry = entry?;
        let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
        // Another thread may close it meanwhile.
        if let (Some(number), Ok(target)) = (number, std::fs::read_link(entry.path()))
            && target.to_string_lossy().starts_with("socket:")
        {
            found.push((number, target));
        }
    }
    Ok(found)
}

/// Another descriptor of the same socket; `None` if there is none under this number any more.
fn duplicate(number: RawFd) -> Option<OwnedFd> {
    // SAFETY: takes no pointers; a number that is not open is an error.
    let copy = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 0) };
    // SAFETY: a new descriptor, which nobody else knows.
    (copy >= 0).then(|| unsafe { OwnedFd::from_raw_fd(copy) })
}

/// Has the kernel drop empty datagrams before they are queued; their sender is told nothing.
#[allow(clippy::cast_possible_truncation, reason = "constants, all below 256")]
fn discard_empty(socket: &UnixDatagram) -> io::Result<()> {
    const LOAD_LENGTH: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_LEN) as u16;
    const RETURN_IT: u16 = (libc::BPF_RET | libc::BPF_A) as u16;
    const SIZE: libc::socklen_t = size_of::<libc::sock_fprog>() as libc::socklen_t;
    // A filter returns how many bytes to keep, and 0 drops the datagram.
    let mut steps =
        [LOAD_LENGTH, RETURN_IT].map(|code| libc::sock_filter { code, jt: 0, jf: 0, k: 0 });
    let program = libc::sock_fprog { len: 2, filter: steps.as_mut_ptr() };
    // SAFETY: an open socket; the kernel copies the program, which has as many steps as it says.
    let outcome = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            (&raw const program).cast(),
            SIZE,
        )
    };
    Errno::result(outcome).map(drop).map_err(io::Error::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guarded_socket_gets_every_datagram_but_empty_ones() {
        let before = Before::look().unwrap();
        let name = format!("cuda-cluster-test-{}", std::process::id());
        let name = SocketAddr::from_abstract_name(name).unwrap();
        let socket = UnixDatagram::bind_addr(&name).unwrap();
        let (stream, _peer) = UnixDatagram::pair().unwrap();
        let peer = UnixDatagram::unbound().unwrap();
        peer.send_to_addr(b"", &name).unwrap();
        let guarded = WakeupSockets::guard(&before).unwrap();
        let own = |one: &Wakeup| one.name.as_abstract_name() == name.as_abstract_name();
        assert!(guarded.0.iter().any(own));
        assert!(Wakeup::new(OwnedFd::from(stream)).is_none(), "it has no name");
        let mut bytes = [0; 10];
        assert_eq!(socket.recv(&mut bytes).unwrap(), 1, "for the empty one that came before");
        for sent in [&b""[..], b"x", b"", b"longer"] {
            peer.send_to_addr(sent, &name).unwrap();
        }
        assert_eq!([0; 2].map(|_: i32| socket.recv(&mut bytes).unwrap()), [1, 6]);
        assert!(!guarded.look());
        peer.send_to_addr(b"x", &name).unwrap();
        assert!(guarded.look() && !guarded.look());
        assert_eq!(socket.recv(&mut bytes).unwrap(), 1, "UCX is to see that one came");
        assert!(socket.recv(&mut bytes).is_err() && !guarded.look());
    }
}
