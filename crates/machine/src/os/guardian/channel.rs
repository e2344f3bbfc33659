//! The socket between supervisor and guardian: whole messages, with descriptors.
//!
//! *Invariant:* a packet is one JSON message, at most [`LIMIT`] bytes long. Received descriptors
//! are closed by `exec` unless they are passed on.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use nix::sys::socket::{AddressFamily, Shutdown, SockFlag, SockType, shutdown, socketpair};
use serde::{Serialize, de::DeserializeOwned};

use crate::os::passing;

/// Maximum length of a message in bytes; well below the smallest send buffer in use.
const LIMIT: usize = 32 << 10;

/// One end of the socket.
#[derive(Debug)]
pub(super) struct Channel(OwnedFd);

impl Channel {
    /// A connected pair, closed by `exec` and non-blocking.
    pub(super) fn pair() -> io::Result<(Self, Self)> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let (a, b) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)?;
        Ok((Self(a), Self(b)))
    }

    /// The end that was passed to another process.
    pub(super) fn from_descriptor(descriptor: OwnedFd) -> Self {
        Self(descriptor)
    }

    /// Sends an [`encoded`] message, or fails with `WouldBlock`.
    pub(super) fn send(&self, text: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        passing::send(&self.0, text, descriptors).map(drop)
    }

    /// Receives a message with its descriptors; `None` if the other end is gone.
    pub(super) fn receive<Message: DeserializeOwned>(
        &self,
    ) -> io::Result<Option<(Message, Vec<OwnedFd>)>> {
        let mut text = vec![0; LIMIT];
        let (length, descriptors) = match passing::receive(&self.0, &mut text) {
            // The other end died with unread messages of ours.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
            other => other?,
        };
        if length == 0 {
            return Ok(None);
        }
        Ok(Some((serde_json::from_slice(&text[..length])?, descriptors)))
    }

    /// Shuts the connection down, even if other processes hold copies of the descriptor.
    pub(super) fn close(&self) {
        // Fails only if the socket is no longer connected.
        let _ = shutdown(self.0.as_raw_fd(), Shutdown::Both);
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Channel {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// The text of a message, if it fits.
pub(super) fn encoded(message: &impl Serialize) -> io::Result<Vec<u8>> {
    let text = serde_json::to_vec(message)?;
    if text.len() > LIMIT {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the message is too long"));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    #[test]
    fn a_message_comes_with_its_descriptors_and_the_end_is_seen() {
        let (here, there) = Channel::pair().expect("a pair");
        let (mut reader, mut writer) = std::io::pipe().expect("a pipe");
        here.send(&encoded(&"take this").expect("short"), &[writer.as_fd()]).expect("sent");
        writer.write_all(b"one ").expect("written");
        drop(writer);
        let (text, mut descriptors) =
            there.receive::<String>().expect("received").expect("a message");
        assert_eq!(text, "take this");
        let mut copy = std::fs::File::from(descriptors.pop().expect("a descriptor"));
        copy.write_all(b"two").expect("written");
        drop(copy);
        let mut both = String::new();
        reader.read_to_string(&mut both).expect("read");
        assert_eq!(both, "one two");
        drop(here);
        assert!(there.receive::<String>().expect("an end").is_none());
    }

    #[test]
    fn a_message_that_would_not_fit_is_not_sent() {
        assert!(encoded(&"x".repeat(LIMIT)).is_err());
    }
}
