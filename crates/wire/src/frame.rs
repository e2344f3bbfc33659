//! Frames over the native engine's sockets: a length of four bytes, little-endian, and that many
//! bytes of a postcard value.
//!
//! *Invariant:* a frame is at most [`FRAME_LIMIT`] bytes, and has no bytes after its value.

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Longest frame, in bytes.
pub const FRAME_LIMIT: usize = 8 << 20;

/// Why a frame cannot be written or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum FrameError {
    /// It is too long.
    #[error("a frame of {bytes} bytes is longer than {limit}")]
    TooLong {
        bytes: usize,
        /// The longest allowed.
        limit: usize,
    },
    /// It is not the expected message.
    #[error("a frame is not the expected message: {reason}")]
    Malformed {
        /// What is wrong with it.
        reason: String,
    },
}

/// Writes a frame.
///
/// # Errors
/// If the message is longer than [`FRAME_LIMIT`].
pub fn encode(message: &impl Serialize) -> Result<Vec<u8>, FrameError> {
    let mut frame = vec![0; 4];
    frame = postcard::to_extend(message, frame).map_err(malformed)?;
    let bytes = frame.len() - 4;
    let too_long = || FrameError::TooLong { bytes, limit: FRAME_LIMIT };
    let length = u32::try_from(bytes).map_err(|_| too_long())?;
    if bytes > FRAME_LIMIT {
        return Err(too_long());
    }
    frame[..4].copy_from_slice(&length.to_le_bytes());
    Ok(frame)
}

/// Reads a frame's length.
///
/// # Errors
/// If it exceeds `limit`.
pub fn length(prefix: [u8; 4], limit: usize) -> Result<usize, FrameError> {
    let bytes = usize::try_from(u32::from_le_bytes(prefix)).unwrap_or(usize::MAX);
    if bytes > limit { Err(FrameError::TooLong { bytes, limit }) } else { Ok(bytes) }
}

/// Reads a frame's message.
///
/// # Errors
/// If it is another message, or has trailing bytes.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, FrameError> {
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Ok(message),
        Ok((_, rest)) => {
            let reason = format!("{} bytes are left over", rest.len());
            Err(FrameError::Malformed { reason })
        }
        Err(error) => Err(malformed(error)),
    }
}

fn malformed(error: postcard::Error) -> FrameError {
    FrameError::Malformed { reason: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_survives_its_frame() {
        let message = ("gpu3".to_owned(), 7u64, vec![1u8; 300]);
        let frame = encode(&message).expect("short");
        let prefix = frame[..4].try_into().expect("four bytes");
        assert_eq!(length(prefix, FRAME_LIMIT).ok(), Some(frame.len() - 4));
        assert_eq!(decode(&frame[4..]).ok(), Some(message));
        assert!(decode::<(String, u64, Vec<u8>)>(&frame[4..frame.len() - 1]).is_err());
    }

    #[test]
    fn a_frame_with_bytes_after_its_value_is_refused() {
        let mut frame = encode(&7u64).expect("short");
        frame.push(0);
        assert!(matches!(decode::<u64>(&frame[4..]), Err(FrameError::Malformed { .. })));
    }

    #[test]
    fn a_frame_beyond_its_limit_is_refused_both_ways() {
        assert!(encode(&vec![0u8; FRAME_LIMIT]).is_err());
        assert!(length(u32::MAX.to_le_bytes(), FRAME_LIMIT).is_err());
    }
}
