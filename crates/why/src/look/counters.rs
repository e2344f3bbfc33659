//! The kernel's counters of TCP sockets of this network namespace, also of those that are closed.
//!
//! *Invariant:* a socket of an unknown form is left out, never guessed.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};

use super::netlink::{self, Closed, attributes, u32_at, u64_at};
use crate::audit::ledger::Counter;

/// `linux/inet_diag.h`.
const INET_DIAG_INFO: u16 = 2;
const FIXED: usize = 72;

/// Where `struct tcp_info` (`linux/tcp.h`, since Linux 4.2) has the two counters.
const BYTES_ACKED: usize = 120;
const BYTES_RECEIVED: usize = 128;

/// The state of a socket that listens, `include/net/tcp_states.h`.
const LISTEN: u8 = 10;

/// The counters of all TCP sockets, and the news of those that close.
pub(super) struct Counters {
    closed: Option<Closed>,
}

impl std::fmt::Debug for Counters {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Counters").finish_non_exhaustive()
    }
}

impl Counters {
    /// Begins to listen for those that close.
    pub(super) fn begin() -> Self {
        Self { closed: Closed::listen().ok() }
    }

    /// Whether the kernel tells of closed sockets. If not, what one moved after it was last read is
    /// not known.
    pub(super) fn hears(&self) -> bool {
        self.closed.is_some()
    }

    /// What becomes readable when there is news.
    pub(super) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.closed.as_ref().map(AsFd::as_fd)
    }

    /// The last counters of those that have closed since the last time; `false` if some were lost.
    pub(super) fn closed(&self, mut each: impl FnMut(Counter)) -> bool {
        let Some(closed) = &self.closed else { return true };
        closed.news(|message| counter(message).into_iter().for_each(&mut each))
    }

    /// All sockets that are there.
    ///
    /// # Errors
    /// If the kernel does not answer this question.
    pub(super) fn open(&self) -> Result<Vec<Counter>, String> {
        let mut found = Vec::new();
        for family in [libc::AF_INET, libc::AF_INET6] {
            let asked = netlink::dump(&question(family), |message| found.extend(counter(message)));
            asked.map_err(|error| error.desc().to_owned())?;
        }
        Ok(found)
    }
}

/// `struct inet_diag_req_v2`: TCP, all states, with `struct tcp_info`.
fn question(family: i32) -> Vec<u8> {
    let byte = |number: i32| u8::try_from(number).unwrap_or_default();
    let mut bytes = Vec::with_capacity(56);
    bytes.extend([byte(family), byte(libc::IPPROTO_TCP), 1 << (INET_DIAG_INFO - 1), 0]);
    bytes.extend(u32::MAX.to_ne_bytes());
    bytes.extend([0; 48]);
    bytes
}

/// `struct inet_diag_msg`: family, state, two timers; ports, addresses, interface and cookie;
/// expiry, queues, user and inode; then attributes.
fn counter(message: &[u8]) -> Option<Counter> {
    let family = i32::from(*message.first()?);
    let state = *message.get(1)?;
    let port = |at: usize| Some(u16::from_be_bytes(message.get(at..at + 2)?.try_into().ok()?));
    let address = |at: usize, port: u16| {
        let bytes: [u8; 16] = message.get(at..at + 16)?.try_into().ok()?;
        let host = match family {
            libc::AF_INET => IpAddr::from([bytes[0], bytes[1], bytes[2], bytes[3]]),
            // IPv4 that IPv6 carries is IPv4.
            libc::AF_INET6 => Ipv6Addr::from(bytes).to_canonical(),
            _ => return None,
        };
        Some(SocketAddr::new(host, port))
    };
    let cookie = u64::from(u32_at(message, 44)?) | u64::from(u32_at(message, 48)?) << 32;
    let info = attributes(message.get(FIXED..)?).find(|(kind, _)| *kind == INET_DIAG_INFO);
    let bytes = |at: usize| info.and_then(|(_, value)| u64_at(value, at)).unwrap_or(0);
    Some(Counter {
        cookie,
        inode: u32_at(message, 68)?.into(),
        addresses: (address(8, port(4)?)?, address(24, port(6)?)?),
        listens: state == LISTEN,
        sent: bytes(BYTES_ACKED),
        received: bytes(BYTES_RECEIVED),
    })
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn bytes_are_counted_while_a_connection_is_there_and_after_it() {
        const SENT: u64 = 300_000;
        let counters = Counters::begin();
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let place = listener.local_addr().expect("bound");
        let mut one = TcpStream::connect(place).expect("it listens");
        let (mut other, _) = listener.accept().expect("it connects");
        let reader = std::thread::spawn(move || {
            let mut bytes = vec![0; usize::try_from(SENT).expect("small")];
            other.read_exact(&mut bytes).expect("all of it");
            other
        });
        one.write_all(&vec![1; usize::try_from(SENT).expect("small")]).expect("sent");
        let other = reader.join().expect("it reads");
        let own = one.local_addr().expect("connected");
        let open = counters.open().expect("the kernel answers");
        let found = |addresses| open.iter().find(|counter| counter.addresses == addresses);
        assert_eq!(found((place, own)).map(|counter| counter.received), Some(SENT));
        assert!(open.iter().any(|counter| counter.listens && counter.addresses.0 == place));
        drop((one, other));
        assert!(counters.hears(), "this kernel tells of closed sockets");
        let mut last = Vec::new();
        for _ in 0..100 {
            counters.closed(|counter| last.push(counter));
            if last.iter().any(|counter| counter.addresses == (place, own)) {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        let last = last.iter().find(|counter| counter.addresses == (place, own));
        // The end of the stream counts as a byte.
        assert!(last.is_some_and(|counter| counter.received - SENT <= 1), "{last:?}");
    }

    #[test]
    fn a_message_that_is_cut_off_says_nothing() {
        assert_eq!(counter(&[2, 1, 0]), None);
        let mut whole = vec![0; FIXED];
        whole[0] = 2;
        assert_eq!(counter(&whole).map(|counter| counter.sent), Some(0));
        whole[0] = 1;
        assert_eq!(counter(&whole), None);
    }
}
