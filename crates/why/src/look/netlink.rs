//! The kernel's diagnosis of sockets, sock_diag(7): questions about all sockets of this network
//! namespace, and the news that one is closed.
//!
//! Knows no protocol.
//!
//! *Invariant:* what is not whole is left out; the kernel's answers are never waited for for ever.

use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::sockopt::{RcvBuf, ReceiveTimeout};
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, sendto,
    setsockopt, socket,
};
use nix::sys::time::{TimeVal, TimeValLike as _};

/// `linux/sock_diag.h`, `linux/netlink.h`.
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLMSG_ERROR: u16 = 2;
const HEADER: usize = 16;
const REQUEST_DUMP: u16 = 0x301;
/// The groups that are told of closed TCP sockets over IPv4 and over IPv6, as a mask.
const TCP_DESTROYED: u32 = 1 << 0 | 1 << 2;

/// How long the kernel may take for a packet of its answer.
const PATIENCE_S: i64 = 2;

/// Room for the news of some ten thousand closed sockets between two readings.
const ROOM: usize = 4 << 20;

fn diagnosis(flags: SockFlag) -> nix::Result<OwnedFd> {
    let flags = flags | SockFlag::SOCK_CLOEXEC;
    socket(AddressFamily::Netlink, SockType::Raw, flags, SockProtocol::NetlinkSockDiag)
}

/// Asks for all sockets that a request (the part after the header) is about.
pub(super) fn dump(request: &[u8], mut each: impl FnMut(&[u8])) -> nix::Result<()> {
    let kernel = diagnosis(SockFlag::empty())?;
    setsockopt(&kernel, ReceiveTimeout, &TimeVal::seconds(PATIENCE_S))?;
    let mut question = Vec::with_capacity(HEADER + request.len());
    let length = u32::try_from(HEADER + request.len()).unwrap_or(u32::MAX);
    question.extend(length.to_ne_bytes());
    question.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    question.extend(REQUEST_DUMP.to_ne_bytes());
    question.extend([0; 8]);
    question.extend(request);
    sendto(kernel.as_raw_fd(), &question, &NetlinkAddr::new(0, 0), MsgFlags::empty())?;
    let mut buffer = vec![0; 1 << 16];
    loop {
        let length = recv(kernel.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
        if !messages(&buffer[..length], &mut each)? {
            return Ok(());
        }
    }
}

/// News of TCP sockets that are closed.
pub(super) struct Closed(OwnedFd);

impl Closed {
    pub(super) fn listen() -> nix::Result<Self> {
        let kernel = diagnosis(SockFlag::SOCK_NONBLOCK)?;
        // The kernel gives what it allows.
        let _ = setsockopt(&kernel, RcvBuf, &ROOM);
        bind(kernel.as_raw_fd(), &NetlinkAddr::new(0, TCP_DESTROYED))?;
        Ok(Self(kernel))
    }

    /// All news since the last time; `false` if some were lost.
    pub(super) fn news(&self, mut each: impl FnMut(&[u8])) -> bool {
        let mut buffer = vec![0; 1 << 16];
        let mut whole = true;
        loop {
            match recv(self.0.as_raw_fd(), &mut buffer, MsgFlags::empty()) {
                // Nothing was asked, so nothing is refused.
                Ok(length) => drop(messages(&buffer[..length], &mut each)),
                Err(Errno::ENOBUFS) => whole = false,
                Err(Errno::EINTR) => {}
                Err(_) => return whole,
            }
        }
    }
}

impl AsFd for Closed {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Takes the messages in a packet; `false` after the last one. An error is the kernel's answer to
/// a question that it does not know.
fn messages(mut packet: &[u8], each: &mut impl FnMut(&[u8])) -> nix::Result<bool> {
    while let Some((length, kind)) = u32_at(packet, 0).zip(u16_at(packet, 4)) {
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let Some(message) = packet.get(HEADER..length) else { return Ok(false) };
        match kind {
            SOCK_DIAG_BY_FAMILY => each(message),
            // `struct nlmsgerr` begins with the negative number of the error.
            NLMSG_ERROR => {
                let number = u32_at(message, 0).map_or(0, u32::cast_signed);
                return Err(Errno::from_raw(number.saturating_neg()));
            }
            _ => return Ok(false),
        }
        packet = packet.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(true)
}

/// The attributes after the fixed part of a message: kinds and values.
pub(super) fn attributes(mut rest: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let (length, kind) = u16_at(rest, 0).zip(u16_at(rest, 2))?;
        let length = usize::from(length);
        let value = rest.get(4..length)?;
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

pub(super) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_that_the_kernel_does_not_know_is_no_empty_answer() {
        // No family has this number.
        let mut request = [0; 56];
        request[0] = 255;
        assert!(dump(&request, |_| panic!("an answer")).is_err());
    }
}
