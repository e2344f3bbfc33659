//! What a connection still has to send.
//!
//! Frames are sent from where they lie. A message is done when its bytes are on the socket and, if
//! the receiver copies frames itself, when it has acknowledged that.
//!
//! *Invariant:* who submits a message keeps its frames as they are until the message is done or the
//! outbox is cleared; nothing here refers to them afterwards.

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::num::NonZeroU64;
use std::os::fd::{AsRawFd, BorrowedFd};

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, sendmsg};

use crate::wire::{DESCRIPTOR, Descriptor, HEADER, Header};

/// Frames up to this size, in bytes, are joined with the header instead of being sent from where
/// they lie: copying them costs less than another entry for the kernel.
const JOINED: usize = 4 << 10;

/// From this size on, in bytes, the receiver copies a frame itself if it can.
pub const COPIED: usize = 64 << 10;

/// Entries of one call of the kernel.
const ENTRIES: usize = 64;

/// A frame, by place: someone else owns it.
#[derive(Clone, Copy, Debug)]
pub struct Frame {
    /// Address of its first byte.
    pub address: usize,
    /// In bytes.
    pub len: usize,
    /// Whether the receiver uses it longer than the message.
    pub apart: bool,
}

/// Messages to send, in order.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    queue: VecDeque<Outgoing>,
    /// Numbers of messages that are sent and not yet acknowledged.
    unacknowledged: VecDeque<u64>,
    /// Numbers of messages that the connection ended before.
    lost: Vec<u64>,
    last: u64,
}

#[derive(Debug)]
struct Outgoing {
    /// Header, descriptors and joined frames.
    head: Vec<u8>,
    pieces: VecDeque<Piece>,
    /// None for what is not a message.
    number: Option<u64>,
    acknowledged: bool,
}

#[derive(Clone, Copy, Debug)]
enum Piece {
    Head { start: usize, len: usize },
    Frame(Frame),
}

impl Outbox {
    /// Adds bytes that are no message.
    pub(crate) fn push_bytes(&mut self, head: &[u8]) {
        let pieces = VecDeque::from([Piece::Head { start: 0, len: head.len() }]);
        let head = head.to_vec();
        self.queue.push_back(Outgoing { head, pieces, number: None, acknowledged: true });
    }

    /// Adds the acknowledgement of a message of the peer.
    pub(crate) fn push_taken(&mut self, number: u64) {
        self.push_bytes(&Header::Taken { number }.encode());
    }

    /// Adds a message and gives it its number. Large frames are left to the receiver to copy if it
    /// can (`peer_copies`).
    ///
    /// # Safety
    ///
    /// The frames must be readable, and stay so until the message is done or the outbox is cleared.
    pub(crate) unsafe fn push_message(&mut self, frames: &[Frame], peer_copies: bool) -> u64 {
        self.last += 1;
        let number = self.last;
        let copied = |frame: &Frame| peer_copies && frame.len >= COPIED;
        let count = u32::try_from(frames.len()).unwrap_or(u32::MAX);
        let joined: usize = frames.iter().map(|frame| frame.len).filter(|len| *len <= JOINED).sum();
        let mut head = Vec::with_capacity(HEADER + frames.len() * DESCRIPTOR + joined);
        head.extend(Header::Message { number, frames: count }.encode());
        for frame in frames {
            let address = NonZeroU64::new(frame.address as u64).filter(|_| copied(frame));
            head.extend(Descriptor { len: frame.len, apart: frame.apart, address }.encode());
        }
        let mut pieces = VecDeque::from([Piece::Head { start: 0, len: head.len() }]);
        for frame in frames.iter().filter(|frame| frame.len > 0 && !copied(frame)) {
            if frame.len > JOINED {
                pieces.push_back(Piece::Frame(*frame));
                continue;
            }
            // SAFETY: the caller's promise.
            head.extend_from_slice(unsafe { frame.bytes() });
            match pieces.back_mut() {
                Some(Piece::Head { len, .. }) => *len += frame.len,
                _ => {
                    pieces.push_back(Piece::Head { start: head.len() - frame.len, len: frame.len })
                }
            }
        }
        let acknowledged = !frames.iter().any(copied);
        self.queue.push_back(Outgoing { head, pieces, number: Some(number), acknowledged });
        number
    }

    /// Whether a message needs nothing any more.
    pub(crate) fn is_done(&self, number: u64) -> bool {
        !self.unacknowledged.contains(&number)
            && !self.queue.iter().any(|outgoing| outgoing.number == Some(number))
    }

    /// Whether there is nothing to send and nothing to be acknowledged.
    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.unacknowledged.is_empty()
    }

    /// The peer has acknowledged a message. False if there is no such message.
    pub(crate) fn taken(&mut self, number: u64) -> bool {
        let known = self.unacknowledged.front() == Some(&number);
        if known {
            self.unacknowledged.pop_front();
        }
        known
    }

    /// Forgets everything but which messages were lost.
    pub(crate) fn clear(&mut self) {
        self.lost.extend(self.unacknowledged.drain(..));
        self.lost.extend(self.queue.drain(..).filter_map(|outgoing| outgoing.number));
    }

    /// Whether the peer may not have got a message that nothing uses any more.
    pub(crate) fn is_lost(&self, number: u64) -> bool {
        self.lost.contains(&number)
    }

    /// Sends what the socket takes without waiting.
    pub(crate) fn flush(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        while let Some(outgoing) = self.queue.front_mut() {
            let entries: Vec<IoSlice<'_>> =
                outgoing.pieces.iter().take(ENTRIES).map(|piece| outgoing.slice(piece)).collect();
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
            match sendmsg::<()>(socket.as_raw_fd(), &entries, &[], flags, None) {
                Ok(sent) => outgoing.advance(sent),
                Err(Errno::EINTR) => continue,
                Err(Errno::EAGAIN) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
            if outgoing.pieces.is_empty()
                && let Some(outgoing) = self.queue.pop_front()
                && let (Some(number), false) = (outgoing.number, outgoing.acknowledged)
            {
                self.unacknowledged.push_back(number);
            }
        }
        Ok(())
    }
}

impl Outgoing {
    fn slice(&self, piece: &Piece) -> IoSlice<'_> {
        IoSlice::new(match piece {
            Piece::Head { start, len } => &self.head[*start..*start + *len],
            // SAFETY: `push_message`'s caller keeps the frame until the message is done, and this
            // piece is still to be sent.
            Piece::Frame(frame) => unsafe { frame.bytes() },
        })
    }

    fn advance(&mut self, mut sent: usize) {
        while let Some(piece) = self.pieces.front_mut() {
            let (start, len) = match piece {
                Piece::Head { start, len } => (start, len),
                Piece::Frame(Frame { address, len, .. }) => (address, len),
            };
            if *len > sent {
                *start += sent;
                *len -= sent;
                return;
            }
            sent -= *len;
            self.pieces.pop_front();
        }
    }
}

impl Frame {
    /// # Safety
    ///
    /// The frame must be readable for as long as the slice is used.
    unsafe fn bytes<'a>(&self) -> &'a [u8] {
        // SAFETY: the caller's promise; a frame comes from a buffer of Python's, whose address is
        // not null.
        unsafe {
            std::slice::from_raw_parts(std::ptr::with_exposed_provenance(self.address), self.len)
        }
    }
}
