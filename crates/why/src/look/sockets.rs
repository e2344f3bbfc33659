//! The sockets of network namespaces, and which two belong together.
//!
//! TCP from `/proc/PID/net/tcp`, whose two ends name each other's addresses. Unix from the kernel's
//! socket diagnosis (sock_diag(7)), which alone says what is connected to what.
//!
//! *Invariant:* two sockets are a pair only if the kernel says so.

use std::collections::BTreeMap;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use super::netlink::{self, attributes, u32_at};
use crate::evidence::Connection;

/// States of a TCP socket, `include/net/tcp_states.h`.
mod state {
    pub(super) const ESTABLISHED: u8 = 1;
    pub(super) const SYN_SENT: u8 = 2;
    pub(super) const LISTEN: u8 = 10;
}

#[derive(Default)]
pub(super) struct Sockets {
    tcp: BTreeMap<u64, Tcp>,
    /// By the two addresses, of which two ends have the reverse.
    by_addresses: BTreeMap<(SocketAddr, SocketAddr), u64>,
    unix: BTreeMap<u64, Unix>,
}

struct Tcp {
    local: SocketAddr,
    remote: SocketAddr,
    state: u8,
    unsent: u64,
    unread: u64,
    unanswered: u32,
}

struct Unix {
    peer: Option<u64>,
    listens: bool,
    unread: u64,
}

impl Sockets {
    /// Reads those of the network namespaces of these processes.
    pub(super) fn look(pids: impl Iterator<Item = u32>) -> Self {
        let mut sockets = Self::default();
        let own = fs::read_link("/proc/self/ns/net").ok();
        let mut seen = std::collections::BTreeSet::new();
        for pid in pids {
            let Ok(namespace) = fs::read_link(format!("/proc/{pid}/ns/net")) else { continue };
            if !seen.insert(namespace.clone()) {
                continue;
            }
            for file in ["tcp", "tcp6"] {
                let path = format!("/proc/{pid}/net/{file}");
                sockets.add_tcp(&fs::read_to_string(path).unwrap_or_default());
            }
            if Some(namespace) == own {
                sockets.unix = unix_sockets().unwrap_or_default();
            }
        }
        sockets
    }

    fn add_tcp(&mut self, text: &str) {
        for (inode, tcp) in text.lines().skip(1).filter_map(tcp_line) {
            self.by_addresses.insert((tcp.local, tcp.remote), inode);
            self.tcp.insert(inode, tcp);
        }
    }

    pub(super) fn listener(&self, inode: u64) -> Option<String> {
        let tcp = self.tcp.get(&inode).filter(|tcp| tcp.state == state::LISTEN);
        let unix = || self.unix.get(&inode).filter(|unix| unix.listens).map(|_| "unix".to_owned());
        tcp.map(|tcp| tcp.local.to_string()).or_else(unix)
    }

    pub(super) fn is_connection(&self, inode: u64) -> bool {
        self.tcp.get(&inode).is_some_and(|tcp| tcp.state != state::LISTEN)
            || self.unix.get(&inode).is_some_and(|unix| !unix.listens)
    }

    /// The socket that waits for connections to an address.
    fn listens_at(&self, address: SocketAddr) -> Option<u64> {
        let is_it = |tcp: &Tcp| {
            tcp.state == state::LISTEN
                && tcp.local.port() == address.port()
                && (tcp.local.ip() == address.ip() || tcp.local.ip().is_unspecified())
        };
        self.tcp.iter().find(|(_, tcp)| is_it(tcp)).map(|(inode, _)| *inode)
    }

    /// A connection, and the socket at its other end.
    pub(super) fn connection(&self, inode: u64) -> Option<(Connection, Option<u64>)> {
        if let Some(tcp) = self.tcp.get(&inode) {
            let peer = self.by_addresses.get(&(tcp.remote, tcp.local)).copied();
            // Nobody has accepted it yet: whoever listens there may.
            let peer = peer
                .and_then(|peer| if peer == 0 { self.listens_at(tcp.remote) } else { Some(peer) });
            let connection = Connection {
                local: tcp.local.to_string(),
                remote: tcp.remote.to_string(),
                peer: None,
                unread_bytes: tcp.unread,
                unsent_bytes: tcp.unsent,
                unanswered: tcp.unanswered,
                closed: !matches!(tcp.state, state::ESTABLISHED | state::SYN_SENT),
                connecting: tcp.state == state::SYN_SENT,
            };
            return Some((connection, peer));
        }
        let unix = self.unix.get(&inode).filter(|unix| !unix.listens)?;
        let connection = Connection {
            local: "unix".to_owned(),
            remote: "unix".to_owned(),
            unread_bytes: unix.unread,
            unsent_bytes: unix.peer.and_then(|peer| self.unix.get(&peer)).map_or(0, |it| it.unread),
            closed: unix.peer.is_none(),
            ..Connection::default()
        };
        Some((connection, unix.peer))
    }
}

/// A line of `/proc/net/tcp`: number, local, remote, state, queues, timer, unanswered, user,
/// timeout, inode.
fn tcp_line(line: &str) -> Option<(u64, Tcp)> {
    let words: Vec<&str> = line.split_ascii_whitespace().collect();
    let number = |text: &str| u64::from_str_radix(text, 16).ok();
    let (unsent, unread) = words.get(4)?.split_once(':')?;
    let tcp = Tcp {
        local: address(words.get(1)?)?,
        remote: address(words.get(2)?)?,
        state: u8::from_str_radix(words.get(3)?, 16).ok()?,
        unsent: number(unsent)?,
        unread: number(unread)?,
        unanswered: u32::from_str_radix(words.get(6)?, 16).ok()?,
    };
    Some((words.get(9)?.parse().ok()?, tcp))
}

/// `0100007F:1F90`: words in the machine's order. IPv4 that IPv6 carries is IPv4.
fn address(text: &str) -> Option<SocketAddr> {
    let (host, port) = text.split_once(':')?;
    let word = |at: usize| u32::from_str_radix(host.get(at * 8..at * 8 + 8)?, 16).ok();
    let host: IpAddr = if host.len() == 8 {
        Ipv4Addr::from(word(0)?.to_ne_bytes()).into()
    } else {
        let mut bytes = [0; 16];
        for at in 0..4 {
            bytes[at * 4..at * 4 + 4].copy_from_slice(&word(at)?.to_ne_bytes());
        }
        Ipv6Addr::from(bytes).to_canonical()
    };
    Some(SocketAddr::new(host, u16::from_str_radix(port, 16).ok()?))
}

/// Asks the kernel for all Unix sockets of this network namespace.
fn unix_sockets() -> nix::Result<BTreeMap<u64, Unix>> {
    let mut found = BTreeMap::new();
    netlink::dump(&question(), |message| found.extend(unix_socket(message)))?;
    Ok(found)
}

const UNIX_DIAG_PEER: u16 = 2;
const UNIX_DIAG_RQLEN: u16 = 4;

/// `struct unix_diag_req`: all states, with peers and queues.
fn question() -> Vec<u8> {
    const SHOW_PEER_AND_QUEUES: u32 = 4 | 16;
    let mut bytes = Vec::with_capacity(24);
    bytes.extend([1, 0, 0, 0]); // AF_UNIX
    bytes.extend(u32::MAX.to_ne_bytes());
    bytes.extend(0_u32.to_ne_bytes());
    bytes.extend(SHOW_PEER_AND_QUEUES.to_ne_bytes());
    bytes.extend([0xff; 8]); // any cookie
    bytes
}

/// `struct unix_diag_msg` (family, type, state, a gap, inode, a cookie of eight bytes) and its
/// attributes.
fn unix_socket(message: &[u8]) -> Option<(u64, Unix)> {
    let listens = *message.get(2)? == state::LISTEN;
    let inode = u32_at(message, 4)?;
    let mut unix = Unix { peer: None, listens, unread: 0 };
    for (kind, value) in attributes(message.get(16..)?) {
        match kind {
            UNIX_DIAG_PEER => unix.peer = u32_at(value, 0).map(u64::from),
            UNIX_DIAG_RQLEN => unix.unread = u32_at(value, 0).map_or(0, u64::from),
            _ => {}
        }
    }
    Some((inode.into(), unix))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

    use super::*;

    #[test]
    fn addresses_are_words_of_this_machine() {
        let text = format!("{:08X}:1F90", u32::from_ne_bytes([127, 0, 0, 1]));
        assert_eq!(address(&text), Some("127.0.0.1:8080".parse().expect("an address")));
        assert_eq!(address("0:1"), None);
    }

    #[test]
    fn the_other_end_of_a_connection_is_found() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let one = std::net::TcpStream::connect(listener.local_addr().expect("bound"))
            .expect("it listens");
        let (other, _) = listener.accept().expect("it connects");
        let (left, right) = std::os::unix::net::UnixStream::pair().expect("a pair");
        let sockets = Sockets::look([std::process::id()].into_iter());
        let inode = |number: i32| {
            let link = fs::read_link(format!("/proc/self/fd/{number}")).expect("open");
            let link = link.to_string_lossy().into_owned();
            link.trim_start_matches("socket:[")
                .trim_end_matches(']')
                .parse::<u64>()
                .expect("a number")
        };
        let peer = |number: i32| sockets.connection(inode(number)).and_then(|(_, peer)| peer);
        assert_eq!(peer(one.as_raw_fd()), Some(inode(other.as_raw_fd())));
        assert_eq!(peer(left.as_raw_fd()), Some(inode(right.as_raw_fd())));
        assert!(sockets.listener(inode(listener.as_raw_fd())).is_some());
    }
}
