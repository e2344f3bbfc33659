//! Messages for which the socket has no room yet.
//!
//! A guardian that is busy or stopped for a moment reads nothing, while the supervisor must go on:
//! a hundred workers start at once, and a request to end a process must not be lost.
//!
//! *Invariant:* messages leave in the order in which they were sent.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use serde::Serialize;

use super::channel::{Channel, encoded};

#[derive(Debug)]
struct Message {
    text: Vec<u8>,
    descriptors: Vec<OwnedFd>,
}

impl Message {
    fn send(&self, channel: &Channel) -> io::Result<()> {
        let descriptors: Vec<_> = self.descriptors.iter().map(AsFd::as_fd).collect();
        channel.send(&self.text, &descriptors)
    }
}

/// What waits for room in a socket.
#[derive(Debug, Default)]
pub(super) struct Outbox(Mutex<VecDeque<Message>>);

impl Outbox {
    /// Sends a message with its descriptors, at once or when [`flush`](Self::flush) finds room.
    pub(super) fn send(
        &self,
        channel: &Channel,
        message: &impl Serialize,
        descriptors: Vec<OwnedFd>,
    ) -> io::Result<()> {
        let message = Message { text: encoded(message)?, descriptors };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push_back(message);
        self.flush(channel)
    }

    /// Sends as much as there is room for.
    pub(super) fn flush(&self, channel: &Channel) -> io::Result<()> {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(message) = waiting.front() {
            match message.send(channel) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // What can't be sent at all must not keep back what follows.
                sent => drop((waiting.pop_front(), sent?)),
            }
        }
        Ok(())
    }

    /// Whether nothing waits.
    pub(super) fn is_empty(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::Read;

    #[test]
    fn nothing_is_lost_or_overtaken_while_the_other_end_does_not_read() {
        const MESSAGES: usize = 1000;
        let (here, there) = Channel::pair().expect("a pair");
        let outbox = Outbox::default();
        for number in 0..MESSAGES {
            let (reader, writer) = std::io::pipe().expect("a pipe");
            drop(writer);
            let with = if number % 100 == 0 { vec![OwnedFd::from(reader)] } else { Vec::new() };
            let padded = format!("{number} {}", "x".repeat(1000));
            outbox.send(&here, &padded, with).expect("kept or sent");
        }
        assert!(!outbox.is_empty(), "a socket has room for fewer");
        for number in 0..MESSAGES {
            let (text, descriptors) =
                there.receive::<String>().expect("received").expect("a message");
            outbox.flush(&here).expect("sent");
            assert!(text.starts_with(&format!("{number} ")), "{number} is followed by {text:.8}");
            assert_eq!(descriptors.len(), usize::from(number % 100 == 0), "{number}");
            for descriptor in descriptors {
                let mut nothing = Vec::new();
                assert_eq!(File::from(descriptor).read_to_end(&mut nothing).expect("read"), 0);
            }
        }
        assert!(outbox.is_empty());
    }
}
