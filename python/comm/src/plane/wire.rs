//! What the owners of two processes send each other: headers of UCX's active messages.
//!
//! Pure. Numbers are little-endian.
//!
//! *Invariant:* nothing that a peer sends can make a decoder panic.

/// Length of a header, in bytes: the most that `ucx` takes.
pub(super) const LENGTH: usize = 24;

/// One message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Header {
    /// Asks for what was offered under a number. The payload is the asker's address.
    Ask {
        /// The offer's number.
        offer: u64,
        /// The asker's number of the answer.
        fetch: u64,
    },
    /// The payload is one of the ranges.
    Data {
        /// Which of them.
        index: u32,
        /// The asker's number.
        fetch: u64,
    },
    /// Nothing is offered under the number.
    Nothing {
        /// The asker's number.
        fetch: u64,
    },
}

impl Header {
    /// As sent.
    pub(super) fn encode(self) -> [u8; LENGTH] {
        let (kind, index, offer, fetch) = match self {
            Header::Ask { offer, fetch } => (1, 0, offer, fetch),
            Header::Data { index, fetch } => (2, index, 0, fetch),
            Header::Nothing { fetch } => (3, 0, 0, fetch),
        };
        let mut bytes = [0; LENGTH];
        bytes[0] = kind;
        bytes[4..8].copy_from_slice(&index.to_le_bytes());
        bytes[8..16].copy_from_slice(&offer.to_le_bytes());
        bytes[16..24].copy_from_slice(&fetch.to_le_bytes());
        bytes
    }

    /// As received; `None` if it is none of ours.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: [u8; LENGTH] = bytes.try_into().ok()?;
        let long = |at: usize| {
            let mut part = [0; 8];
            part.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(part)
        };
        let index = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
        let (offer, fetch) = (long(8), long(16));
        match bytes[0] {
            1 => Some(Header::Ask { offer, fetch }),
            2 => Some(Header::Data { index, fetch }),
            3 => Some(Header::Nothing { fetch }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_header_is_read_as_it_was_written(offer: u64, fetch: u64, index: u32) {
            for header in [
                Header::Ask { offer, fetch },
                Header::Data { index, fetch },
                Header::Nothing { fetch },
            ] {
                prop_assert_eq!(Header::decode(&header.encode()), Some(header));
            }
        }

        #[test]
        fn garbage_is_refused_or_read_and_never_panics(bytes: Vec<u8>) {
            let _ = Header::decode(&bytes);
        }
    }
}
