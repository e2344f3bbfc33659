//! What workers tell each other over UCX: the header of every message.
//!
//! A header is 40 bytes, little-endian: version, kind, six bytes of zero, the connection's token,
//! an identifier, an argument. The token proves knowledge of the cluster's secret for one ordered
//! pair of processes, so that a message from anywhere else is recognised by its header alone.
//!
//! *Invariant:* a header that decodes encodes to the same bytes.

use serde::{Deserialize, Serialize};

use super::native::Member;
use super::secret::{Secret, Token};

/// The version of these messages.
const VERSION: u8 = 1;

/// Length of an encoded header.
pub const HEADER_LENGTH: usize = 40;

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// Opens a connection; the data is a [`Hello`].
    Hello = 1,
    /// The other side's [`Kind::Hello`] was good.
    Welcome = 2,
    /// Bytes to check the way with; the argument is their CRC-32C.
    Probe = 3,
    /// The probe arrived whole.
    Met = 4,
}

impl Kind {
    const ALL: [Kind; 4] = [Kind::Hello, Kind::Welcome, Kind::Probe, Kind::Met];
}

/// The header of a message between workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What it is.
    pub kind: Kind,
    /// Proves that the sender belongs to the cluster, and says which worker it is.
    pub token: Token,
    /// Which conversation it belongs to.
    pub id: u64,
    /// Depends on the kind.
    pub argument: u64,
}

impl Header {
    /// The bytes.
    pub fn encode(&self) -> [u8; HEADER_LENGTH] {
        let mut bytes = [0; HEADER_LENGTH];
        bytes[0] = VERSION;
        bytes[1] = self.kind as u8;
        bytes[8..24].copy_from_slice(&self.token.0);
        bytes[24..32].copy_from_slice(&self.id.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.argument.to_le_bytes());
        bytes
    }

    /// Reads the bytes; `None` if they are no header of this version.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; HEADER_LENGTH] = bytes.try_into().ok()?;
        if bytes[0] != VERSION || bytes[2..8] != [0; 6] {
            return None;
        }
        let kind = Kind::ALL.into_iter().find(|kind| *kind as u8 == bytes[1])?;
        let token = Token(bytes[8..24].try_into().ok()?);
        let id = u64::from_le_bytes(bytes[24..32].try_into().ok()?);
        let argument = u64::from_le_bytes(bytes[32..40].try_into().ok()?);
        Some(Self { kind, token, id, argument })
    }
}

/// Who opens a connection. Believed only when the header's token is that of [`token`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The sender.
    pub from: Member,
}

/// Longest data of a [`Kind::Hello`] that is looked at.
pub const HELLO_LIMIT: usize = 512;

impl Hello {
    /// The data of the message.
    pub fn encode(&self) -> Vec<u8> {
        // A string and a number: postcard cannot refuse them.
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
    secret.prove("from worker to worker", &parts).token()
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
            kind in kinds(), token in any::<[u8; 16]>(), id: u64, argument: u64,
        ) {
            let header = Header { kind, token: Token(token), id, argument };
            prop_assert_eq!(Header::decode(&header.encode()), Some(header));
        }

        #[test]
        fn bytes_that_decode_are_a_header_and_nothing_else(
            bytes in proptest::collection::vec(any::<u8>(), 0..64),
        ) {
            if let Some(header) = Header::decode(&bytes) {
                prop_assert_eq!(&header.encode()[..], &bytes[..]);
            }
        }

        #[test]
        fn no_bytes_make_a_hello_panic(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            let _ = Hello::decode(&bytes);
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
