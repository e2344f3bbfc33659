//! What any bytes of a peer make of a greeting and of a reader: for `fuzz/fuzz_targets/comm.rs` beside this crate.

use std::collections::VecDeque;

use cuda_cluster_data::memory::{Limits, Pool};

use crate::greeting::{Greeting, Hello, LENGTH, Role, Step as Greeted};
use crate::reader::{Message, Reader, Span, Step, Waiting};

/// Whatever the pieces in which bytes arrive, the same comes of them.
///
/// # Panics
///
/// If something else does.
pub fn feed(bytes: &[u8]) {
    let Some((&kind, bytes)) = bytes.split_first() else { return };
    let Some((&piece, bytes)) = bytes.split_first() else { return };
    let pieces = || bytes.chunks(usize::from(piece) + 1);
    if kind.is_multiple_of(4) {
        let secret = (kind & 4 != 0).then_some([7; LENGTH]);
        assert_eq!(greet(secret, [bytes].into_iter()), greet(secret, pieces()));
    } else {
        let waiting = [Waiting::Never, Waiting::Copied, Waiting::Written][usize::from(kind % 3)];
        let granted = kind & 64 != 0;
        let whole = read(waiting, granted, [bytes].into_iter());
        assert_eq!(whole, read(waiting, granted, pieces()));
    }
}

fn greet<'a>(secret: Option<[u8; LENGTH]>, pieces: impl Iterator<Item = &'a [u8]>) -> Vec<String> {
    let own = Hello {
        role: Role::Listener,
        has_secret: secret.is_some(),
        maps: true,
        nonce: [1; LENGTH],
        token_at: 0,
        token: [2; LENGTH],
        host: String::new(),
    };
    let (mut greeting, _) = Greeting::new(own, secret);
    let mut steps = Vec::new();
    for mut piece in pieces {
        loop {
            match greeting.feed(&mut piece) {
                Ok(Greeted::More) => break,
                Ok(step) => {
                    steps.push(format!("{step:?}"));
                    if let Greeted::Done { .. } = step {
                        return steps;
                    }
                    let _ = greeting.finish(true);
                }
                Err(refusal) => {
                    steps.push(refusal.to_string());
                    return steps;
                }
            }
        }
    }
    steps
}

/// What has come of the bytes, with the contents of messages.
fn read<'a>(
    waiting: Waiting,
    granted: bool,
    pieces: impl Iterator<Item = &'a [u8]>,
) -> Vec<String> {
    let mut reader = Reader::new(Pool::new(&Limits::new(0)), waiting);
    if granted {
        let message = Message { number: 1, ..Message::default() };
        reader.wait_for(message, VecDeque::new());
    }
    let mut steps = Vec::new();
    for mut piece in pieces {
        loop {
            match reader.feed(&mut piece) {
                Ok(Step::More) => break,
                Ok(Step::Announced(mut message) | Step::Written(mut message)) => {
                    let bytes: Vec<Vec<u8>> = message
                        .frames
                        .clone()
                        .into_iter()
                        // What waits at the sender has not arrived.
                        .filter(|span| !message.copies.iter().any(|(at, _)| *at == span.block))
                        .map(|Span { block, start, len }| {
                            message.blocks[block].bytes_mut()[start..start + len].to_vec()
                        })
                        .collect();
                    steps.push(format!("{} {:?} {bytes:?}", message.number, message.frames));
                }
                Ok(step) => steps.push(format!("{step:?}")),
                Err(fault) => {
                    steps.push(fault.to_string());
                    return steps;
                }
            }
        }
    }
    assert!(reader.destination(0).is_none_or(|place| !place.is_empty()));
    steps
}
