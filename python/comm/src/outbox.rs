//! What a connection still has to send.
//!
//! Frames are sent from where they lie. A message is done when its bytes are on the socket and, if
//! large frames wait for the receiver, when it has acknowledged them. Meanwhile, later messages stay
//! here; answers to the peer's messages do not.
//!
//! *Invariant:* who submits a message keeps its frames as they are until the message is done; nothing
//! here refers to them afterwards.

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::num::NonZeroU64;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;

use nix::errno::Errno;
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};

use crate::wire::{DESCRIPTOR, Descriptor, Grant, HEADER, Header, encode_grants};
use cuda_cluster_data::memory::arena::Arena;

/// Frames up to this size, in bytes, are joined with the header instead of being sent from where
/// they lie: copying them costs less than another entry for the kernel.
const JOINED: usize = 4 << 10;

/// From this size on, in bytes, a frame waits for the receiver if that can get it otherwise than from
/// the socket.
pub const WAITING: usize = 64 << 10;

/// Answers that may wait for the socket. A peer that keeps to the order of things waits for each.
const ANSWERS: usize = 16;

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

/// What to send, in order.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    /// Partly sent.
    current: Option<Outgoing>,
    /// Goes before messages.
    answers: VecDeque<Outgoing>,
    messages: VecDeque<Outgoing>,
    /// The message whose frames wait for the receiver.
    waiting: Option<Waiting>,
    /// A message whose frames another thread is writing to the receiver's memory. It may be lost
    /// meanwhile.
    writing: Option<u64>,
    /// Numbers of messages that the connection ended before.
    lost: Vec<u64>,
    last: u64,
}

#[derive(Debug)]
struct Waiting {
    number: u64,
    frames: Vec<Frame>,
    /// The receiver has granted memory for some.
    granted: bool,
}

#[derive(Debug)]
struct Outgoing {
    /// Header, descriptors and joined frames.
    head: Vec<u8>,
    pieces: VecDeque<Piece>,
    /// None for what is not a message.
    number: Option<u64>,
    /// Frames that wait for the receiver when this is sent.
    waiting: Vec<Frame>,
    /// Its descriptor goes with the first bytes.
    arena: Option<Arc<Arena>>,
}

/// Frames to write to the receiver's memory, and the place of each there.
#[derive(Debug)]
pub(crate) struct Writing {
    pub(crate) number: u64,
    pub(crate) frames: Vec<(Frame, u64)>,
    /// What is to follow on the socket.
    pub(crate) stream: Vec<Frame>,
}

#[derive(Clone, Copy, Debug)]
enum Piece {
    Head { start: usize, len: usize },
    Frame(Frame),
}

impl Outbox {
    /// Adds bytes that are no message.
    pub(crate) fn push_bytes(&mut self, head: &[u8]) {
        self.push_answer(head.to_vec(), &[], None);
    }

    /// Adds the acknowledgement of a message of the peer.
    pub(crate) fn push_taken(&mut self, number: u64) {
        self.push_bytes(&Header::Taken { number }.encode());
    }

    /// Adds grants for the frames of a message of the peer, and the arena if the peer hasn't got it.
    pub(crate) fn push_granted(
        &mut self,
        number: u64,
        grants: &[Grant],
        stream: bool,
        arena: Option<Arc<Arena>>,
    ) {
        let frames = u32::try_from(grants.len()).unwrap_or(u32::MAX);
        let header = Header::Granted { number, frames, arena: arena.is_some(), stream };
        let head = [&header.encode()[..], &encode_grants(grants)].concat();
        self.push_answer(head, &[], arena);
    }

    fn push_answer(&mut self, head: Vec<u8>, frames: &[Frame], arena: Option<Arc<Arena>>) {
        let mut pieces = VecDeque::from([Piece::Head { start: 0, len: head.len() }]);
        pieces.extend(frames.iter().map(|frame| Piece::Frame(*frame)));
        let outgoing = Outgoing { head, pieces, number: None, waiting: Vec::new(), arena };
        self.answers.push_back(outgoing);
    }

    /// Adds a message and gives it its number. Large frames wait for the receiver if `wait`.
    ///
    /// # Safety
    ///
    /// The frames must be readable, and stay so until the message is done.
    pub(crate) unsafe fn push_message(&mut self, frames: &[Frame], wait: bool) -> u64 {
        self.last += 1;
        let number = self.last;
        let waits = |frame: &Frame| wait && frame.len >= WAITING;
        let count = u32::try_from(frames.len()).unwrap_or(u32::MAX);
        let joined: usize = frames.iter().map(|frame| frame.len).filter(|len| *len <= JOINED).sum();
        let mut head = Vec::with_capacity(HEADER + frames.len() * DESCRIPTOR + joined);
        head.extend(Header::Message { number, frames: count }.encode());
        for frame in frames {
            let address = NonZeroU64::new(frame.address as u64).filter(|_| waits(frame));
            head.extend(Descriptor { len: frame.len, apart: frame.apart, address }.encode());
        }
        let mut pieces = VecDeque::from([Piece::Head { start: 0, len: head.len() }]);
        for frame in frames.iter().filter(|frame| frame.len > 0 && !waits(frame)) {
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
        let waiting = frames.iter().copied().filter(waits).collect();
        let number = Some(number);
        self.messages.push_back(Outgoing { head, pieces, number, waiting, arena: None });
        self.last
    }

    /// Whether a message needs nothing any more.
    pub(crate) fn is_done(&self, number: u64) -> bool {
        let queued = self.current.iter().chain(&self.messages);
        self.writing != Some(number)
            && self.waiting.as_ref().is_none_or(|waiting| waiting.number != number)
            && !queued.into_iter().any(|outgoing| outgoing.number == Some(number))
    }

    /// Whether there is nothing to send and nothing that waits for the peer.
    pub(crate) fn is_empty(&self) -> bool {
        let idle = self.current.is_none() && self.answers.is_empty() && self.messages.is_empty();
        idle && self.waiting.is_none() && self.writing.is_none()
    }

    /// Whether another thread is writing frames.
    pub(crate) fn is_writing(&self) -> bool {
        self.writing.is_some()
    }

    /// The peer has the frames of a message. False if they do not wait.
    pub(crate) fn taken(&mut self, number: u64) -> bool {
        let known = self.writing.is_none()
            && self.waiting.as_ref().is_some_and(|waiting| waiting.number == number);
        if known {
            self.waiting = None;
        }
        known
    }

    /// The peer has granted memory for frames of a message: what to write there, until
    /// [`Self::written`]. None if that makes no sense.
    pub(crate) fn granted(
        &mut self,
        number: u64,
        grants: &[Grant],
        stream: bool,
    ) -> Option<Writing> {
        let waiting = self.waiting.as_mut().filter(|waiting| waiting.number == number)?;
        if waiting.frames.len() != grants.len() || std::mem::replace(&mut waiting.granted, true) {
            return None;
        }
        let mut writing = Writing { number, frames: Vec::new(), stream: Vec::new() };
        for (frame, grant) in waiting.frames.iter().zip(grants) {
            match grant {
                Some(place) => writing.frames.push((*frame, *place)),
                None if stream => writing.stream.push(*frame),
                None => {}
            }
        }
        self.writing = Some(number);
        Some(writing)
    }

    /// What was granted is written, or given up because the connection has ended.
    pub(crate) fn written(&mut self, writing: &Writing) {
        self.writing = None;
        if self.waiting.as_ref().is_some_and(|waiting| waiting.number == writing.number) {
            let header = Header::Written { number: writing.number }.encode();
            self.push_answer(header.to_vec(), &writing.stream, None);
        }
    }

    /// Forgets everything but which messages were lost, and what is being written.
    pub(crate) fn clear(&mut self) {
        self.answers.clear();
        let queued = self.current.take().into_iter().chain(self.messages.drain(..));
        self.lost.extend(queued.filter_map(|outgoing| outgoing.number));
        self.lost.extend(self.waiting.take().map(|waiting| waiting.number));
    }

    /// Whether the peer may not have got a message that nothing uses any more.
    pub(crate) fn is_lost(&self, number: u64) -> bool {
        self.lost.contains(&number)
    }

    /// Sends what the socket takes without waiting.
    pub(crate) fn flush(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        while let Some(mut outgoing) = self.next() {
            let entries: Vec<IoSlice<'_>> =
                outgoing.pieces.iter().take(ENTRIES).map(|piece| outgoing.slice(piece)).collect();
            let descriptor = outgoing.arena.as_ref().map(|arena| [arena.as_fd().as_raw_fd()]);
            let rights =
                descriptor.as_ref().map(|descriptor| ControlMessage::ScmRights(descriptor));
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
            let sent = sendmsg::<()>(socket.as_raw_fd(), &entries, rights.as_slice(), flags, None);
            match sent {
                Ok(sent) => outgoing.advance(sent),
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => {
                    self.current = Some(outgoing);
                    return match self.answers.len() {
                        0..=ANSWERS => Ok(()),
                        _ => Err(io::Error::other("the peer sends, and does not read the answers")),
                    };
                }
                Err(error) => {
                    self.current = Some(outgoing);
                    return Err(error.into());
                }
            }
            self.went(outgoing);
        }
        Ok(())
    }

    /// Part of this, or all, is on the socket.
    fn went(&mut self, outgoing: Outgoing) {
        if !outgoing.pieces.is_empty() {
            self.current = Some(outgoing);
        } else if let Some(number) = outgoing.number
            && !outgoing.waiting.is_empty()
        {
            let frames = outgoing.waiting;
            self.waiting = Some(Waiting { number, frames, granted: false });
        }
    }

    fn next(&mut self) -> Option<Outgoing> {
        let begun = self.current.take().or_else(|| self.answers.pop_front());
        begun.or_else(|| self.waiting.is_none().then(|| self.messages.pop_front())?)
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
        self.arena = None;
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
    pub(crate) unsafe fn bytes<'a>(&self) -> &'a [u8] {
        // SAFETY: the caller's promise; a frame comes from a buffer of Python's, whose address is
        // not null.
        unsafe {
            std::slice::from_raw_parts(std::ptr::with_exposed_provenance(self.address), self.len)
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::reader::{self, Reader, Step};
    use cuda_cluster_data::memory::{Limits, Pool};

    fn places(frames: &[Vec<u8>]) -> Vec<Frame> {
        let place = |frame: &Vec<u8>| {
            let address = frame.as_ptr().expose_provenance();
            Frame { address, len: frame.len(), apart: frame.len() % 2 == 1 }
        };
        frames.iter().map(place).collect()
    }

    /// What a socket gets that takes so many bytes at a time.
    fn sent(outbox: &mut Outbox, most: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        while let Some(mut outgoing) = outbox.next() {
            let entries = outgoing.pieces.iter().map(|piece| outgoing.slice(piece).to_vec());
            let mut part = entries.collect::<Vec<_>>().concat();
            part.truncate(most);
            outgoing.advance(part.len());
            bytes.extend(part);
            outbox.went(outgoing);
        }
        bytes
    }

    fn frames() -> impl Strategy<Value = Vec<Vec<u8>>> {
        let len = prop_oneof![0_usize..20, JOINED - 1..JOINED + 2, WAITING - 1..WAITING + 2];
        let frame = (len, any::<u8>()).prop_map(|(len, byte)| vec![byte; len]);
        prop::collection::vec(frame, 0..6)
    }

    proptest! {
        #[test]
        fn what_is_sent_is_read_as_it_was_whatever_the_socket_takes_at_a_time(
            messages in prop::collection::vec(frames(), 0..5),
            most in 1_usize..40_000,
            wait: bool,
        ) {
            let mut outbox = Outbox::default();
            let mut reader = Reader::new(Pool::new(&Limits::new(0)), reader::Waiting::Copied);
            let mut numbers = Vec::new();
            for frames in &messages {
                // SAFETY: the frames outlive the outbox.
                numbers.push(unsafe { outbox.push_message(&places(frames), wait) });
            }
            for (number, frames) in numbers.iter().zip(&messages) {
                let bytes = sent(&mut outbox, most);
                let mut input = &bytes[..];
                // Without frames that wait, all messages are sent at once: they are read below.
                let waits = wait && frames.iter().any(|frame| frame.len() >= WAITING);
                prop_assert_eq!(outbox.is_done(*number), !waits);
                while let Step::Announced(mut message) = reader.feed(&mut input).unwrap() {
                    let frames = &messages[usize::try_from(message.number).unwrap() - 1];
                    for (span, frame) in message.frames.clone().into_iter().zip(frames) {
                        let waits = message.copies.iter().find(|(at, _)| *at == span.block);
                        if let Some((_, address)) = waits {
                            prop_assert_eq!(*address, frame.as_ptr().addr() as u64);
                            continue;
                        }
                        let bytes = &message.blocks[span.block].bytes_mut()[span.start..][..span.len];
                        prop_assert_eq!(bytes, &frame[..]);
                    }
                }
                prop_assert_eq!(outbox.taken(*number), waits);
            }
            prop_assert!(outbox.is_empty() && reader.is_between_messages());
        }
    }

    #[test]
    fn frames_are_written_where_they_were_granted_and_the_others_follow() {
        let mut outbox = Outbox::default();
        let frames = [vec![1; WAITING], vec![2; 5], vec![3; WAITING + 1]];
        // SAFETY: the frames outlive the outbox.
        let number = unsafe { outbox.push_message(&places(&frames), true) };
        assert!(outbox.granted(number, &[None, None], true).is_none(), "it has not been sent");
        sent(&mut outbox, 1000);
        assert!(outbox.granted(number, &[None], true).is_none(), "two frames wait");
        assert!(outbox.granted(number + 1, &[None, None], true).is_none(), "another message");
        let writing = outbox.granted(number, &[None, Some(4096)], true).unwrap();
        assert!(outbox.granted(number, &[None, None], true).is_none(), "a second time");
        assert_eq!(
            writing.frames.iter().map(|(frame, at)| (frame.len, *at)).collect::<Vec<_>>(),
            [(WAITING + 1, 4096)]
        );
        assert!(outbox.is_writing() && !outbox.is_done(number) && !outbox.taken(number));
        outbox.written(&writing);
        let bytes = sent(&mut outbox, 1000);
        let written = Header::Written { number }.encode();
        assert!(bytes.strip_prefix(&written[..]) == Some(&frames[0][..]));
        assert!(outbox.taken(number) && outbox.is_empty());
    }

    #[test]
    fn what_had_not_been_sent_when_the_connection_ended_is_lost() {
        let mut outbox = Outbox::default();
        let frames = [vec![1; WAITING]];
        // SAFETY: the frames outlive the outbox.
        let numbers = [(); 3].map(|()| unsafe { outbox.push_message(&places(&frames), true) });
        sent(&mut outbox, WAITING);
        assert!(outbox.taken(numbers[0]));
        sent(&mut outbox, WAITING);
        outbox.clear();
        assert_eq!(numbers.map(|number| outbox.is_lost(number)), [false, true, true]);
        assert!(outbox.is_empty() && numbers.iter().all(|number| outbox.is_done(*number)));
    }
}
