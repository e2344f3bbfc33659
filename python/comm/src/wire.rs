//! What the two ends of a connection send each other once they have greeted.
//!
//! A message is a header, one descriptor a frame, and the bytes of those frames that travel on the
//! socket. A frame that does not waits in the sender's memory, at an address. The receiver copies it
//! from there, or grants a range of its shared memory, to which the sender writes it; then the
//! sender says so, and what was not granted may follow on the socket. At last the receiver
//! acknowledges the message. While frames of a message wait, no other message is sent.
//!
//! Pure: bytes in, values out. Numbers are little-endian.
//!
//! *Invariant:* nothing that a peer sends can make a decoder panic or reserve memory that its bytes
//! do not fill.

/// Length of a header, in bytes.
pub const HEADER: usize = 16;

/// Length of a descriptor, in bytes.
pub const DESCRIPTOR: usize = 16;

/// Most frames of a message. Dask's shuffles send some thousands.
pub const MAX_FRAMES: u32 = 1 << 24;

/// Length of one grant, in bytes.
pub const GRANT: usize = 8;

/// The bit of a descriptor's length that says [`Descriptor::apart`].
const APART: u64 = 1 << 63;

/// How a message, or what is not one, begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Header {
    /// Descriptors of so many frames follow. Messages are numbered from 1.
    Message {
        /// The message's number.
        number: u64,
        /// How many descriptors follow.
        frames: u32,
    },
    /// The receiver has the frames of this message.
    Taken {
        /// The message's number.
        number: u64,
    },
    /// Grants follow, one for each of the frames that wait.
    Granted {
        /// The message's number.
        number: u64,
        /// How many grants follow.
        frames: u32,
        /// Whether the receiver's shared memory comes with this header, because it is a new one.
        arena: bool,
        /// Whether frames without a place are to be sent on the socket; otherwise the receiver
        /// copies them.
        stream: bool,
    },
    /// The sender has written what it was granted. What it streams follows.
    Written {
        /// The message's number.
        number: u64,
    },
}

/// Where a frame is to be written in the receiver's shared memory, if it is.
pub type Grant = Option<u64>;

/// One frame of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// In bytes.
    pub len: usize,
    /// Whether it is to have memory of its own, because it is used longer than the message.
    pub apart: bool,
    /// Where the frame waits in the sender's memory; none if its bytes follow on the socket.
    pub address: Option<std::num::NonZeroU64>,
}

/// Bytes that no peer of ours sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// Not one of the headers.
    #[error("the peer sent a header of unknown kind {0}")]
    Kind(u8),
    /// More than [`MAX_FRAMES`].
    #[error("the peer announced {0} frames; a message has at most {MAX_FRAMES}")]
    Frames(u32),
    /// A message while frames of another one wait, or an answer to a message that nobody sent.
    #[error("the peer sent what makes no sense at this moment")]
    Order,
    /// A frame that waits in memory that this process does not read.
    #[error("the peer sent an address in memory that is not read")]
    Address,
    /// More bytes than fit into memory.
    #[error("the peer announced a message that is larger than memory")]
    Length,
}

impl Header {
    /// As sent.
    pub fn encode(self) -> [u8; HEADER] {
        let (kind, flags, frames, number) = match self {
            Header::Message { number, frames } => (1, 0, frames, number),
            Header::Taken { number } => (2, 0, 0, number),
            Header::Granted { number, frames, arena, stream } => {
                (3, u8::from(arena) | u8::from(stream) << 1, frames, number)
            }
            Header::Written { number } => (4, 0, 0, number),
        };
        let mut bytes = [0; HEADER];
        bytes[0] = kind;
        bytes[1] = flags;
        bytes[4..8].copy_from_slice(&frames.to_le_bytes());
        bytes[8..].copy_from_slice(&number.to_le_bytes());
        bytes
    }

    /// As received.
    pub fn decode(bytes: [u8; HEADER]) -> Result<Self, Malformed> {
        let [kind, flags, _, _, a, b, c, d, number @ ..] = bytes;
        let (frames, number) = (u32::from_le_bytes([a, b, c, d]), u64::from_le_bytes(number));
        match kind {
            1 | 3 if frames > MAX_FRAMES => Err(Malformed::Frames(frames)),
            1 => Ok(Header::Message { number, frames }),
            2 => Ok(Header::Taken { number }),
            3 => {
                let (arena, stream) = (flags & 1 != 0, flags & 2 != 0);
                Ok(Header::Granted { number, frames, arena, stream })
            }
            4 => Ok(Header::Written { number }),
            kind => Err(Malformed::Kind(kind)),
        }
    }
}

impl Descriptor {
    /// As sent.
    pub fn encode(self) -> [u8; DESCRIPTOR] {
        let mut bytes = [0; DESCRIPTOR];
        let apart = if self.apart { APART } else { 0 };
        bytes[..8].copy_from_slice(&(self.len as u64 | apart).to_le_bytes());
        let address = self.address.map_or(0, std::num::NonZeroU64::get);
        bytes[8..].copy_from_slice(&address.to_le_bytes());
        bytes
    }

    /// Those of one message, whose bytes these are.
    pub fn decode_all(bytes: &[u8]) -> Result<Vec<Self>, Malformed> {
        let (each, _) = bytes.as_chunks::<DESCRIPTOR>();
        let mut total = 0_usize;
        each.iter()
            .map(|bytes| {
                let [a, b, c, d, e, f, g, h, address @ ..] = *bytes;
                let len = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
                let apart = len & APART != 0;
                let len = usize::try_from(len & !APART).map_err(|_| Malformed::Length)?;
                total = total.checked_add(len).ok_or(Malformed::Length)?;
                if isize::try_from(total).is_err() {
                    return Err(Malformed::Length);
                }
                let address = std::num::NonZeroU64::new(u64::from_le_bytes(address));
                Ok(Self { len, apart, address })
            })
            .collect()
    }
}

/// Grants as sent.
pub fn encode_grants(grants: &[Grant]) -> Vec<u8> {
    grants.iter().flat_map(|grant| grant.unwrap_or(u64::MAX).to_le_bytes()).collect()
}

/// The grants whose bytes these are.
pub fn decode_grants(bytes: &[u8]) -> Vec<Grant> {
    let (each, _) = bytes.as_chunks::<GRANT>();
    each.iter().map(|bytes| Some(u64::from_le_bytes(*bytes)).filter(|at| *at != u64::MAX)).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_header_is_read_as_it_was_written(
            number: u64, frames in 0..=MAX_FRAMES, arena: bool, stream: bool,
        ) {
            for header in [
                Header::Message { number, frames },
                Header::Taken { number },
                Header::Granted { number, frames, arena, stream },
                Header::Written { number },
            ] {
                prop_assert_eq!(Header::decode(header.encode()), Ok(header));
            }
        }

        #[test]
        fn garbage_is_refused_or_read_and_never_panics(bytes: [u8; HEADER], more: Vec<u8>) {
            let _ = Header::decode(bytes);
            let _ = Descriptor::decode_all(&more);
        }

        #[test]
        fn descriptors_are_read_as_they_were_written(
            frames in prop::collection::vec((0_usize..1 << 40, any::<bool>(), any::<u64>()), 0..20)
        ) {
            let frames: Vec<Descriptor> = frames
                .into_iter()
                .map(|(len, apart, at)| (len, apart, std::num::NonZeroU64::new(at)))
                .map(|(len, apart, address)| Descriptor { len, apart, address })
                .collect();
            let bytes: Vec<u8> = frames.iter().flat_map(|frame| frame.encode()).collect();
            prop_assert_eq!(Descriptor::decode_all(&bytes), Ok(frames));
        }
    }

    #[test]
    fn grants_are_read_as_they_were_written() {
        let grants = [Some(0), None, Some(4096), Some(u64::MAX - 1)];
        assert_eq!(decode_grants(&encode_grants(&grants)), grants);
    }

    #[test]
    fn lengths_that_no_memory_holds_are_refused() {
        let half = Descriptor { len: isize::MAX as usize, apart: false, address: None }.encode();
        assert!(Descriptor::decode_all(&half).is_ok());
        assert_eq!(Descriptor::decode_all(&[half, half].concat()), Err(Malformed::Length));
    }
}
