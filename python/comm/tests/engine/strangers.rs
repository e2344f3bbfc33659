//! Peers that speak by hand, and wrongly.

use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, Ordering};

use _comm::greeting::{FINISH, Greeting, HELLO, Hello, Role};
use _comm::wire::{Descriptor, Header};

use super::*;

/// Lies in memory that this process may read, as a peer that permits it has it.
static TOKEN: [u8; 32] = [7; 32];

/// A peer's part of a greeting, whose frames can be copied from it or not.
fn greeting(seed: u64, copied: bool) -> Vec<u8> {
    let mut nonce = [0; 32];
    nonce[..8].copy_from_slice(&seed.to_le_bytes());
    let token_at = if copied { TOKEN.as_ptr().expose_provenance() as u64 } else { 0 };
    let hello = Hello {
        role: Role::Connector,
        has_secret: false,
        maps: false,
        nonce,
        token_at,
        token: TOKEN,
        host: "here".to_owned(),
    };
    [&Greeting::new(hello, None).1[..], &[0; FINISH]].concat()
}

impl Place {
    /// One whose reads wait.
    fn stranger(&self) -> UnixStream {
        let stream = self.stream();
        stream.set_nonblocking(false).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }
}

#[test]
fn garbage_of_any_length_before_in_and_after_the_greeting_harms_nobody() {
    let place = Place::new(settings(Route::Auto));
    let [ours, theirs] = pair(Route::Auto);
    let (over, exchanged) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for seed in 0.. {
                let sent = message(seed);
                std::thread::scope(|scope| {
                    scope.spawn(|| ours.send(&sent));
                    assert!(theirs.receive().unwrap() == sent, "message {seed}");
                });
                exchanged.store(true, Ordering::Relaxed);
                if over.load(Ordering::Relaxed) {
                    return;
                }
            }
        });
        let whole = HELLO + FINISH;
        for len in 0..whole + 100 {
            let seed = len as u64;
            let mut chance = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
            let garbage = std::iter::repeat_with(|| {
                chance ^= chance << 13;
                chance ^= chance >> 7;
                chance ^= chance << 17;
                chance.to_le_bytes()[0]
            });
            let garbage: Vec<u8> = garbage.take(len).collect();
            let greeting = greeting(seed, false);
            let mut flipped = greeting.clone();
            flipped[len % whole] ^= 1 << (len % 8);
            let begun = &greeting[..len.min(whole)];
            let kinds =
                [garbage.clone(), begun.to_vec(), flipped, [&greeting[..], &garbage].concat()];
            for (kind, bytes) in kinds.into_iter().enumerate() {
                let mut stranger = place.stranger();
                // It may be gone before all is written.
                let _ = stranger.write_all(&bytes);
                let _ = stranger.shutdown(Shutdown::Write);
                let mut said = Vec::new();
                let end = stranger.read_to_end(&mut said).map_err(|error| error.kind());
                let reset = Err(std::io::ErrorKind::ConnectionReset);
                assert!(end.is_ok() || end == reset, "{len} bytes of kind {kind}: {end:?}");
                place.listener.accept().iter().for_each(|connection| connection.abort());
            }
        }
        over.store(true, Ordering::Relaxed);
    });
    assert!(exchanged.load(Ordering::Relaxed));
}

#[test]
fn a_peer_that_sends_and_never_reads_its_answers_is_given_up() {
    let place = Place::new(settings(Route::Auto));
    let mut stranger = place.stranger();
    stranger.write_all(&greeting(1, true)).unwrap();
    let end = place.accept();
    let address = std::num::NonZeroU64::new(TOKEN.as_ptr().expose_provenance() as u64);
    let frame = Descriptor { len: TOKEN.len(), apart: true, address }.encode();
    let sender = std::thread::spawn(move || {
        for number in 1..1_000_000 {
            let header = Header::Message { number, frames: 1 }.encode();
            if stranger.write_all(&[&header[..], &frame].concat()).is_err() {
                return;
            }
        }
    });
    let ending = loop {
        match end.receive() {
            Ok(message) => assert_eq!(message, [TOKEN.to_vec()]),
            Err(ending) => break ending,
        }
    };
    let text = "the peer sends, and does not read the answers";
    assert_eq!(ending, Ending::Broken(text.to_owned()));
    sender.join().unwrap();
}

#[test]
fn a_peer_that_may_not_be_read_is_not_believed_that_its_frames_wait() {
    let place = Place::new(settings(Route::Socket));
    let mut stranger = place.stranger();
    stranger.write_all(&greeting(1, true)).unwrap();
    let end = place.accept();
    let header = Header::Message { number: 1, frames: 1 }.encode();
    let address = std::num::NonZeroU64::new(4096);
    let frame = Descriptor { len: 50_000, apart: true, address }.encode();
    stranger.write_all(&[&header[..], &frame].concat()).unwrap();
    let ending = end.receive().unwrap_err();
    let text = "the peer sent an address in memory that is not read";
    assert_eq!(ending, Ending::Broken(text.to_owned()));
}
