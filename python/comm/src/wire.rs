//! What the two ends of a connection send each other once they have greeted.
//!
//! A message is a header, one descriptor a frame, and the bytes of those frames that travel on the
//! socket. A frame that does not is described by its address in the sender's memory, from which the
//! receiver copies it; then the receiver acknowledges the message.
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
    /// The receiver has copied the frames of this message.
    Taken {
        /// The message's number.
        number: u64,
    },
}

/// One frame of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// In bytes.
    pub len: usize,
    /// Whether it is to have memory of its own, because it is used longer than the message.
    pub apart: bool,
    /// Where the frame lies in the sender's memory; none if its bytes follow on the socket.
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
    /// More bytes than fit into memory.
    #[error("the peer announced a message that is larger than memory")]
    Length,
}

impl Header {
    /// As sent.
    pub fn encode(self) -> [u8; HEADER] {
        let (kind, frames, number) = match self {
            Header::Message { number, frames } => (1, frames, number),
            Header::Taken { number } => (2, 0, number),
        };
        let mut bytes = [0; HEADER];
        bytes[0] = kind;
        bytes[4..8].copy_from_slice(&frames.to_le_bytes());
        bytes[8..].copy_from_slice(&number.to_le_bytes());
        bytes
    }

    /// As received.
    pub fn decode(bytes: [u8; HEADER]) -> Result<Self, Malformed> {
        let [kind, _, _, _, a, b, c, d, number @ ..] = bytes;
        let (frames, number) = (u32::from_le_bytes([a, b, c, d]), u64::from_le_bytes(number));
        match kind {
            1 if frames <= MAX_FRAMES => Ok(Header::Message { number, frames }),
            1 => Err(Malformed::Frames(frames)),
            2 => Ok(Header::Taken { number }),
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_header_is_read_as_it_was_written(number: u64, frames in 0..=MAX_FRAMES) {
            for header in [Header::Message { number, frames }, Header::Taken { number }] {
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
    fn lengths_that_no_memory_holds_are_refused() {
        let half = Descriptor { len: isize::MAX as usize, apart: false, address: None }.encode();
        assert!(Descriptor::decode_all(&half).is_ok());
        assert_eq!(Descriptor::decode_all(&[half, half].concat()), Err(Malformed::Length));
    }
}
