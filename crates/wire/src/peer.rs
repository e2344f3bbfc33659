//! The messages between workers over UCX: the header of each.
//!
//! A header is two or three words of 64 bits, little-endian: the connection's token; the kind in
//! the highest byte and an identifier in the others; an argument, unless it is zero. The token
//! proves knowledge of the cluster's secret and of this version of the messages for one ordered
//! pair of processes, so that a message of any other origin is recognised by its header alone.
//!
//! Headers are this short because UCX's queue in shared memory moves by cache lines: a small
//! message with a header of 16 bytes fits into one, and takes a fifth less time than in two.
//!
//! *Invariant:* a header that decodes encodes to the same bytes.

use serde::{Deserialize, Serialize};

use super::secret::{Secret, Token};

/// A worker process. A successor may reuse the name, but never the incarnation.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Member {
    /// The name, like `gpu3`.
    pub name: String,
    /// Random, drawn when the process starts.
    pub incarnation: u64,
}

impl Member {
    /// Identifies the process without its name: incarnations are random, so no two are the same.
    pub fn key(&self) -> PeerKey {
        PeerKey(self.incarnation)
    }
}

/// Identifies a worker process in tables that are used for every message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerKey(pub u64);

/// Length of an encoded header without and with an argument, in bytes.
pub const HEADER_LENGTHS: (usize, usize) = (16, 24);

/// The largest identifier.
pub const LARGEST_ID: u64 = (1 << 56) - 1;

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// Opens a connection; the data is a [`Hello`].
    Hello = 1,
    /// The other side's [`Kind::Hello`] was valid.
    Welcome = 2,
    /// Bytes to check the connection with; the argument is their CRC-32C.
    Probe = 3,
    /// The probe arrived completely.
    Met = 4,
    /// Asks for an object; the data is its name, the argument 1 if a checksum is wanted.
    Get = 5,
    /// An object; the argument is its CRC-32C with bit 32 set, or 0.
    Object = 6,
    /// There is no object of that name.
    Missing = 7,
    /// Begins a measurement; the data is a [`Measure`].
    Measure = 8,
    /// The other side is prepared; the argument is 1, or 0 if it cannot measure.
    Prepared = 9,
    /// One message of a measured stream.
    Stream = 10,
    /// A round of a measured stream has arrived.
    RoundDone = 11,
    /// Comes back as [`Kind::Pong`] with data of the same length.
    Ping = 12,
    /// The answer to a [`Kind::Ping`].
    Pong = 13,
    /// Ends a measurement.
    MeasureEnd = 14,
    /// Device memory whose bytes mean nothing, which UCX maps instead of larger memory that is free
    /// again; one with the identifier 1 is answered with one that has 2.
    LetGo = 15,
}

impl Kind {
    const ALL: [Kind; 15] = [
        Kind::Hello,
        Kind::Welcome,
        Kind::Probe,
        Kind::Met,
        Kind::Get,
        Kind::Object,
        Kind::Missing,
        Kind::Measure,
        Kind::Prepared,
        Kind::Stream,
        Kind::RoundDone,
        Kind::Ping,
        Kind::Pong,
        Kind::MeasureEnd,
        Kind::LetGo,
    ];
}

/// The header of a message between workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What it is.
    pub kind: Kind,
    /// Proves that the sender belongs to the cluster, and says which worker it is.
    pub token: Token,
    /// The identifier of the exchange it belongs to; at most [`LARGEST_ID`].
    pub id: u64,
    /// Depends on the kind.
    pub argument: u64,
}

/// The bytes of a header.
#[derive(Clone, Copy, Debug)]
pub struct Encoded {
    words: [[u8; 8]; 3],
    length: usize,
}

impl std::ops::Deref for Encoded {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.words.as_flattened()[..self.length]
    }
}

impl Header {
    /// The bytes.
    pub fn encode(&self) -> Encoded {
        debug_assert!(self.id <= LARGEST_ID, "an identifier has at most 56 bits");
        let named = u64::from(self.kind as u8) << 56 | self.id & LARGEST_ID;
        let words = [self.token.0, named, self.argument].map(u64::to_le_bytes);
        let (short, long) = HEADER_LENGTHS;
        Encoded { words, length: if self.argument == 0 { short } else { long } }
    }

    /// Decodes the bytes; `None` if they are not a header.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (words, []) = bytes.as_chunks::<8>() else { return None };
        let (token, named, argument) = match *words {
            [token, named] => (token, named, 0),
            [token, named, argument] => (token, named, u64::from_le_bytes(argument)),
            _ => return None,
        };
        if argument == 0 && words.len() > 2 {
            return None;
        }
        let [.., kind] = named;
        let kind = *Kind::ALL.get(usize::from(kind.checked_sub(1)?))?;
        let token = Token(u64::from_le_bytes(token));
        Some(Self { kind, token, id: u64::from_le_bytes(named) & LARGEST_ID, argument })
    }
}

/// Longest name of an object, in bytes.
pub const NAME_LIMIT: usize = 4096;

/// The argument of a [`Kind::Object`], with or without a checksum.
pub fn checksum_argument(checksum: Option<u32>) -> u64 {
    checksum.map_or(0, |checksum| 1 << 32 | u64::from(checksum))
}

/// The checksum in the argument of a [`Kind::Object`].
pub fn checksum_of(argument: u64) -> Option<u32> {
    // Below bit 32 the argument is the checksum and nothing else.
    (argument >> 32 == 1).then(|| u32::try_from(argument & 0xffff_ffff).ok()).flatten()
}

/// What the receiving side of a measurement prepares for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Measure {
    /// Bytes of each message.
    pub size: u64,
    /// Messages of a round.
    pub messages: u32,
    /// The memory that the messages are received in.
    pub memory: MemoryKind,
    /// The CPU for the receiving thread during the measurement.
    pub cpu: Option<u32>,
    /// The handle of the sender's device memory, to be mapped.
    pub handle: Option<Vec<u8>>,
}

impl Measure {
    /// The data of the message.
    pub fn encode(&self) -> Vec<u8> {
        // Postcard cannot fail on numbers and bytes.
        postcard::to_stdvec(self).unwrap_or_default()
    }

    /// Reads the data of a message.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        postcard::from_bytes(bytes).ok()
    }
}

/// The kind of memory that bytes are in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryKind {
    /// Host memory.
    Host,
    /// The GPU's memory, or a simulated one's.
    Device,
}

impl std::fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            MemoryKind::Host => "host",
            MemoryKind::Device => "device",
        })
    }
}

/// The sender of a [`Kind::Hello`]. Valid only if the header's token is that of [`token`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Who sent it, by name and number.
    pub from: Member,
}

/// Longest data of a [`Kind::Hello`] that is read.
pub const HELLO_LIMIT: usize = 512;

impl Hello {
    /// The data of the message.
    pub fn encode(&self) -> Vec<u8> {
        // Postcard cannot fail on a string and a number.
        postcard::to_stdvec(self).unwrap_or_default()
    }

    /// Reads the data of a message.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        (bytes.len() <= HELLO_LIMIT).then(|| postcard::from_bytes(bytes).ok()).flatten()
    }
}

/// The token of all messages from one process to another.
pub fn token(secret: &Secret, from: &Member, to: &Member) -> Token {
    let parts: [&[u8]; 4] = [
        from.name.as_bytes(),
        &from.incarnation.to_le_bytes(),
        to.name.as_bytes(),
        &to.incarnation.to_le_bytes(),
    ];
    secret.prove("from worker to worker, messages of version 2", &parts).token()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn kinds() -> impl Strategy<Value = Kind> {
        proptest::sample::select(&Kind::ALL[..])
    }

    proptest! {
        #[test]
        fn a_header_survives_its_bytes(
            kind in kinds(), token: u64, id in 0..=LARGEST_ID,
            argument in prop_oneof![Just(0), any::<u64>()],
        ) {
            let header = Header { kind, token: Token(token), id, argument };
            prop_assert_eq!(Header::decode(&header.encode()), Some(header));
        }

        #[test]
        fn bytes_that_decode_are_a_header_and_nothing_else(
            token: [u8; 8], id: [u8; 7], kind in 0u8..20,
            rest in proptest::collection::vec(0u8..2, 0..20),
        ) {
            let bytes = [&token[..], &id, &[kind], &rest].concat();
            if let Some(header) = Header::decode(&bytes) {
                prop_assert_eq!(&header.encode()[..], &bytes[..]);
            }
        }

        #[test]
        fn no_bytes_make_a_hello_panic(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            let _ = Hello::decode(&bytes);
            let _ = Measure::decode(&bytes);
        }
    }

    #[test]
    fn a_kind_is_its_place_in_the_list() {
        for (place, kind) in (1u8..).zip(Kind::ALL) {
            assert_eq!(kind as u8, place);
        }
    }

    #[test]
    fn a_checksum_survives_its_argument() {
        for checksum in [None, Some(0), Some(1), Some(u32::MAX)] {
            assert_eq!(checksum_of(checksum_argument(checksum)), checksum);
        }
    }

    #[test]
    fn a_token_is_for_one_direction_of_one_pair_of_processes() {
        let secret = Secret::new([3; 32]);
        let member = |name: &str, incarnation| Member { name: name.to_owned(), incarnation };
        let (a, b, b2) = (member("gpu0", 1), member("gpu1", 2), member("gpu1", 3));
        let there = token(&secret, &a, &b);
        assert_eq!(there, token(&secret, &a, &b));
        assert_ne!(there, token(&secret, &b, &a));
        assert_ne!(there, token(&secret, &a, &b2));
        assert_ne!(there, token(&Secret::new([4; 32]), &a, &b));
    }
}
