//! Descriptors that travel with bytes over a Unix socket.
//!
//! *Invariant:* received descriptors are closed by `exec` unless they are passed on.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};

/// Most descriptors that come with one message.
pub const DESCRIPTORS: usize = 3;

/// Sends bytes, and descriptors with the first of them. How many bytes the socket took.
///
/// # Errors
/// As `sendmsg`; `WouldBlock` if the socket does not wait.
pub fn send(socket: impl AsFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let raw: Vec<RawFd> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let control = if raw.is_empty() { &rights[..0] } else { &rights[..] };
    let socket = socket.as_fd().as_raw_fd();
    Ok(sendmsg::<()>(socket, &[IoSlice::new(bytes)], control, MsgFlags::MSG_NOSIGNAL, None)?)
}

/// Receives bytes, and the descriptors that come with them. How many bytes came: none at the end.
///
/// # Errors
/// As `recvmsg`; `WouldBlock` if the socket does not wait. [`is_without_room`] if this process has
/// no room for the descriptors: they are lost, and the bytes, too.
pub fn receive(socket: impl AsFd, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut packet = [IoSliceMut::new(bytes)];
    let mut control = nix::cmsg_space!([RawFd; DESCRIPTORS]);
    let socket = socket.as_fd().as_raw_fd();
    let flags = MsgFlags::MSG_CMSG_CLOEXEC;
    let received = recvmsg::<()>(socket, &mut packet, Some(&mut control), flags)?;
    let mut descriptors = Vec::new();
    for message in received.cmsgs()? {
        if let ControlMessageOwned::ScmRights(raw) = message {
            // SAFETY: the kernel has just made these descriptors for this process, and nothing else
            // knows them.
            descriptors.extend(raw.iter().map(|raw| unsafe { OwnedFd::from_raw_fd(*raw) }));
        }
    }
    Ok((received.bytes, descriptors))
}

/// Whether descriptors came that this process had no room for.
pub fn is_without_room(error: &io::Error) -> bool {
    // As `nix` reports it.
    error.raw_os_error() == Some(libc::ENOBUFS)
}
