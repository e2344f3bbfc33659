//! The output of a run's ranks, on its way to the process that started the run.
//!
//! One pipe carries the output of every rank in *frames*: which rank, which of its streams, and
//! bytes as the rank wrote them. A frame without bytes is the end of its stream.
//!
//! | bytes | value, little-endian |
//! |---|---|
//! | 4 | rank |
//! | 4 | 1 for standard output, 2 for standard error |
//! | 4 | number of bytes that follow, at most [`LIMIT`] |
//!
//! *Invariant:* the bytes of a stream are decoded as they were encoded, in order; no input makes a
//! decoder panic or hold more than one frame.

use std::io::{self, Read};

/// Most bytes of one frame.
pub const LIMIT: usize = 64 << 10;

/// Length of a frame's header, in bytes.
const HEADER: usize = 12;

/// One of a rank's streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Source {
    /// The rank, from 0.
    pub rank: u32,
    /// Standard output or standard error.
    pub stream: Stream,
}

/// Which stream of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Stream {
    /// Standard output; both, if a rank's streams are combined.
    Output,
    /// Standard error.
    Error,
}

/// Writes a frame.
///
/// # Panics
/// If there are more than [`LIMIT`] bytes: the caller splits them.
pub fn encode(source: Source, bytes: &[u8]) -> Vec<u8> {
    let length = u32::try_from(bytes.len()).ok().filter(|_| bytes.len() <= LIMIT);
    let length = length.expect("a frame of at most LIMIT bytes");
    let stream: u32 = match source.stream {
        Stream::Output => 1,
        Stream::Error => 2,
    };
    let mut frame = Vec::with_capacity(HEADER + bytes.len());
    for number in [source.rank, stream, length] {
        frame.extend_from_slice(&number.to_le_bytes());
    }
    frame.extend_from_slice(bytes);
    frame
}

/// Reads the next frame; `None` at the end of the pipe. Afterwards `bytes` holds what the rank
/// wrote; it is empty at the end of the rank's stream.
///
/// # Errors
/// If the pipe breaks within a frame, or the input is not a frame.
pub fn read(pipe: &mut impl Read, bytes: &mut Vec<u8>) -> io::Result<Option<Source>> {
    bytes.clear();
    let mut header = [0u8; HEADER];
    if pipe.read(&mut header[..1])? == 0 {
        return Ok(None);
    }
    pipe.read_exact(&mut header[1..])?;
    let number = |at: usize| {
        u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
    };
    let malformed = || io::Error::new(io::ErrorKind::InvalidData, "not a frame of output");
    let stream = match number(4) {
        1 => Stream::Output,
        2 => Stream::Error,
        _ => return Err(malformed()),
    };
    let length = usize::try_from(number(8)).ok().filter(|length| *length <= LIMIT);
    bytes.resize(length.ok_or_else(malformed)?, 0);
    pipe.read_exact(bytes)?;
    Ok(Some(Source { rank: number(0), stream }))
}

/// Collects the bytes of one stream into whole lines.
#[derive(Clone, Debug)]
pub struct LineBuffer {
    /// The bytes that end a line.
    ends: &'static [u8],
    /// Most bytes to buffer.
    limit: usize,
    unfinished: Vec<u8>,
}

impl LineBuffer {
    /// Lines end with one of `ends`. A line longer than `limit` bytes is split.
    pub fn new(ends: &'static [u8], limit: usize) -> Self {
        Self { ends, limit, unfinished: Vec::new() }
    }

    /// Adds bytes, and returns all lines that are complete now, concatenated.
    pub fn feed(&mut self, bytes: &[u8]) -> Vec<u8> {
        let end = bytes.iter().rposition(|byte| self.ends.contains(byte)).map_or(0, |at| at + 1);
        let (whole, begun) = bytes.split_at(end);
        let mut lines = Vec::new();
        if !whole.is_empty() {
            lines.append(&mut self.unfinished);
            lines.extend_from_slice(whole);
        }
        self.unfinished.extend_from_slice(begun);
        if self.unfinished.len() > self.limit {
            lines.append(&mut self.unfinished);
        }
        lines
    }

    /// The bytes after the last complete line.
    pub fn finish(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.unfinished)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn source() -> impl Strategy<Value = Source> {
        (0..9u32, prop_oneof![Just(Stream::Output), Just(Stream::Error)])
            .prop_map(|(rank, stream)| Source { rank, stream })
    }

    proptest! {
        #[test]
        fn frames_come_out_as_they_went_in(
            frames in prop::collection::vec((source(), prop::collection::vec(any::<u8>(), 0..99)), 0..9),
        ) {
            let sent: Vec<u8> =
                frames.iter().flat_map(|(source, bytes)| encode(*source, bytes)).collect();
            let mut pipe = &sent[..];
            let mut bytes = Vec::new();
            for (source, expected) in &frames {
                prop_assert_eq!(read(&mut pipe, &mut bytes).ok().flatten(), Some(*source));
                prop_assert_eq!(&bytes, expected);
            }
            prop_assert_eq!(read(&mut pipe, &mut bytes).ok(), Some(None));
        }

        #[test]
        fn what_is_no_frame_is_an_error_and_no_panic(sent in prop::collection::vec(any::<u8>(), 0..99)) {
            let mut pipe = &sent[..];
            let mut bytes = Vec::new();
            while let Ok(Some(_)) = read(&mut pipe, &mut bytes) {}
            prop_assert!(bytes.len() <= LIMIT);
        }

        #[test]
        fn a_line_buffer_loses_nothing_and_cuts_no_line(
            chunks in prop::collection::vec(prop::collection::vec(0..20u8, 0..30), 0..20),
        ) {
            let mut buffer = LineBuffer::new(b"\n", 1 << 20);
            let mut seen = Vec::new();
            for chunk in &chunks {
                let lines = buffer.feed(chunk);
                prop_assert!(lines.is_empty() || lines.ends_with(b"\n"));
                seen.extend(lines);
            }
            seen.extend(buffer.finish());
            prop_assert_eq!(seen, chunks.concat());
        }
    }

    #[test]
    fn a_line_without_an_end_is_not_held_for_ever() {
        let mut buffer = LineBuffer::new(b"\n", 4);
        assert_eq!(buffer.feed(b"abc"), b"");
        assert_eq!(buffer.feed(b"def"), b"abcdef");
        assert_eq!(buffer.feed(b"\nx"), b"\n");
        assert_eq!(buffer.finish(), b"x");
    }
}
