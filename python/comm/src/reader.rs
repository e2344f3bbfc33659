//! Makes messages of the bytes of a socket.
//!
//! Small frames that are used with the message alone share a block. Each of the others has its own,
//! so that it can be released without them.
//!
//! *Invariant:* every byte is consumed once, whatever the pieces in which they arrive; and no memory is
//! touched for a frame on the socket before its bytes arrive.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use cuda_cluster_data::memory::{Block, Pool};

use crate::wire::{DESCRIPTOR, Descriptor, GRANT, Grant, HEADER, Header, Malformed, decode_grants};

/// From this size on, in bytes, a frame has a block of its own.
const OWN: usize = 32 << 10;

/// A message as received.
#[derive(Debug, Default)]
pub(crate) struct Message {
    pub(crate) number: u64,
    pub(crate) blocks: Vec<Block>,
    pub(crate) frames: Vec<Span>,
    /// Blocks that are to be filled, and where their bytes wait in the sender's memory.
    pub(crate) copies: Vec<(usize, u64)>,
    /// Whether the sender waits for an acknowledgement.
    pub(crate) waits: bool,
}

/// Where a frame lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) block: usize,
    pub(crate) start: usize,
    pub(crate) len: usize,
}

/// What has come of the bytes that were fed.
#[derive(Debug)]
pub(crate) enum Step {
    /// All were consumed, and more are needed.
    More,
    /// A message has come, but for the frames that wait at the sender.
    Announced(Message),
    /// What [`Reader::wait_for`] was waiting for has come, but for what is to be copied.
    Written(Message),
    /// The peer has the frames of this message.
    Taken(u64),
    /// The peer grants memory for frames of this process.
    Granted(Granted),
}

/// What a peer has granted.
#[derive(Debug)]
pub(crate) struct Granted {
    pub(crate) number: u64,
    pub(crate) grants: Vec<Grant>,
    /// Whether the peer's shared memory has come with it.
    pub(crate) arena: bool,
    /// Whether the other frames are to be sent on the socket.
    pub(crate) stream: bool,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Fault {
    #[error(transparent)]
    Malformed(#[from] Malformed),
    #[error("no memory for a message of {bytes} bytes")]
    Memory {
        bytes: usize,
        #[source]
        cause: io::Error,
    },
}

/// How this process gets frames that wait at the sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waiting {
    /// Not at all: all come on the socket.
    Never,
    /// It copies them.
    Copied,
    /// They need memory to which the sender can write.
    Written,
}

#[derive(Debug)]
pub(crate) struct Reader {
    pool: Arc<Pool>,
    stage: Stage,
    waiting: Waiting,
    /// A message for which the peer has been granted memory, and what of it will be streamed.
    granted: Option<(Message, VecDeque<Span>)>,
}

#[derive(Debug)]
enum Stage {
    Header { bytes: [u8; HEADER], have: usize },
    Descriptors { number: u64, bytes: Vec<u8>, len: usize },
    Grants { granted: Granted, bytes: Vec<u8>, len: usize },
    Body { message: Message, missing: VecDeque<Span>, later: VecDeque<Later>, written: bool },
}

/// A block that is taken when the bytes for it arrive: who only announces them takes none.
#[derive(Debug)]
struct Later {
    len: usize,
    shared: bool,
}

const START: Stage = Stage::Header { bytes: [0; HEADER], have: 0 };

impl Reader {
    pub(crate) fn new(pool: Arc<Pool>, waiting: Waiting) -> Self {
        Self { pool, stage: START, waiting, granted: None }
    }

    /// Keeps a message until the peer has written what it was granted of it, and streamed what is
    /// missing.
    pub(crate) fn wait_for(&mut self, message: Message, missing: VecDeque<Span>) {
        self.granted = Some((message, missing));
    }

    /// Takes bytes from the front of `input` up to the end of a message or of the input.
    pub(crate) fn feed(&mut self, input: &mut &[u8]) -> Result<Step, Fault> {
        loop {
            match &mut self.stage {
                Stage::Header { bytes, have } => {
                    let part = cut(input, HEADER - *have);
                    bytes[*have..*have + part.len()].copy_from_slice(part);
                    *have += part.len();
                    if *have < HEADER {
                        return Ok(Step::More);
                    }
                    let bytes = *bytes;
                    self.stage = START;
                    match Header::decode(bytes)? {
                        Header::Taken { number } => return Ok(Step::Taken(number)),
                        Header::Granted { number, frames, arena, stream } => {
                            let granted = Granted { number, grants: Vec::new(), arena, stream };
                            let len = GRANT * frames as usize;
                            self.stage = Stage::Grants { granted, bytes: Vec::new(), len };
                        }
                        Header::Written { number } => match self.granted.take() {
                            Some((mut message, missing)) if message.number == number => {
                                message.blocks.iter_mut().for_each(|block| block.lend(false));
                                let later = VecDeque::new();
                                self.stage = Stage::Body { message, missing, later, written: true };
                            }
                            other => {
                                self.granted = other;
                                return Err(Malformed::Order.into());
                            }
                        },
                        Header::Message { .. } if self.granted.is_some() => {
                            return Err(Malformed::Order.into());
                        }
                        Header::Message { number, frames } => {
                            let len = DESCRIPTOR * frames as usize;
                            self.stage = Stage::Descriptors { number, bytes: Vec::new(), len };
                        }
                    }
                }
                Stage::Descriptors { number, bytes, len } => {
                    bytes.extend_from_slice(cut(input, *len - bytes.len()));
                    if bytes.len() < *len {
                        return Ok(Step::More);
                    }
                    let frames = Descriptor::decode_all(bytes)?;
                    self.stage = lay_out(*number, &frames, self.waiting)?;
                }
                Stage::Grants { granted, bytes, len } => {
                    bytes.extend_from_slice(cut(input, *len - bytes.len()));
                    if bytes.len() < *len {
                        return Ok(Step::More);
                    }
                    let grants = decode_grants(bytes);
                    let granted = Granted { grants, ..*granted };
                    self.stage = START;
                    return Ok(Step::Granted(granted));
                }
                Stage::Body { message, missing, later, written } => {
                    let needed = missing.front().map_or(usize::MAX, |span| span.block + 1);
                    while message.blocks.len() < needed
                        && let Some(next) = later.pop_front()
                    {
                        message.blocks.push(next.take(&self.pool)?);
                    }
                    let Some(span) = missing.front_mut() else {
                        let (message, written) = (std::mem::take(message), *written);
                        self.stage = START;
                        return Ok(match written {
                            true => Step::Written(message),
                            false => Step::Announced(message),
                        });
                    };
                    let part = cut(input, span.len);
                    if part.is_empty() {
                        return Ok(Step::More);
                    }
                    let to = &mut message.blocks[span.block].bytes_mut()[span.start..];
                    to[..part.len()].copy_from_slice(part);
                    filled(missing, part.len());
                }
            }
        }
    }

    /// Where the next bytes go, if they are many: they need not be fed.
    pub(crate) fn destination(&mut self, many: usize) -> Option<&mut [u8]> {
        let Stage::Body { message, missing, .. } = &mut self.stage else { return None };
        let span = missing.front().filter(|span| span.len >= many)?;
        let block = message.blocks.get_mut(span.block)?;
        Some(&mut block.bytes_mut()[span.start..span.start + span.len])
    }

    /// So many bytes are at the destination.
    pub(crate) fn filled(&mut self, len: usize) {
        if let Stage::Body { missing, .. } = &mut self.stage {
            filled(missing, len);
        }
    }

    /// Whether the last message has been read to its end.
    pub(crate) fn is_between_messages(&self) -> bool {
        matches!(self.stage, Stage::Header { have: 0, .. })
    }
}

fn cut<'a>(input: &mut &'a [u8], most: usize) -> &'a [u8] {
    let (part, rest) = input.split_at(input.len().min(most));
    *input = rest;
    part
}

fn filled(missing: &mut VecDeque<Span>, len: usize) {
    if let Some(span) = missing.front_mut() {
        span.start += len;
        span.len -= len;
        if span.len == 0 {
            missing.pop_front();
        }
    }
}

/// Where the frames of a message are to be, and which of them come on the socket.
fn lay_out(number: u64, frames: &[Descriptor], waiting: Waiting) -> Result<Stage, Malformed> {
    let is_small = |frame: &&Descriptor| !frame.apart && frame.address.is_none() && frame.len < OWN;
    let small = frames.iter().filter(is_small).map(|frame| frame.len).sum();
    let mut message = Message { number, ..Message::default() };
    let mut later = VecDeque::from([Later { len: small, shared: false }]);
    let mut missing: VecDeque<Span> = VecDeque::new();
    let mut used = 0;
    for frame in frames {
        let len = frame.len;
        let span = if is_small(&frame) {
            used += len;
            Span { block: 0, start: used - len, len }
        } else {
            let shared = waiting == Waiting::Written && frame.address.is_some();
            later.push_back(Later { len, shared });
            Span { block: later.len() - 1, start: 0, len }
        };
        message.frames.push(span);
        match (frame.address, missing.back_mut()) {
            (Some(_), _) if waiting == Waiting::Never => return Err(Malformed::Address),
            (Some(address), _) => {
                message.waits = true;
                message.copies.push((span.block, address.get()));
            }
            _ if len == 0 => {}
            // Small frames in a row are filled at once.
            (None, Some(last)) if last.block == span.block => last.len += len,
            (None, _) => missing.push_back(span),
        }
    }
    Ok(Stage::Body { message, missing, later, written: false })
}

impl Later {
    fn take(self, pool: &Arc<Pool>) -> Result<Block, Fault> {
        let Self { len, shared } = self;
        let block = if shared { pool.take_shared(len) } else { pool.take(len) };
        block.map_err(|cause| Fault::Memory { bytes: len, cause })
    }
}

impl Message {
    /// Of all frames, in bytes.
    pub(crate) fn len(&self) -> usize {
        self.frames.iter().map(|frame| frame.len).sum()
    }

    /// Of the frames that wait at the sender, in bytes.
    pub(crate) fn waiting(&self) -> usize {
        self.copies.iter().map(|(at, _)| self.blocks[*at].len()).sum()
    }

    /// What it takes of memory, in bytes: its frames, and about as much for each as it takes to know
    /// of it.
    pub(crate) fn weight(&self) -> usize {
        self.len() + self.frames.len() * 100
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use cuda_cluster_data::memory::Limits;

    fn reader() -> Reader {
        Reader::new(Pool::new(&Limits::new(0)), Waiting::Copied)
    }

    fn contents(message: &mut Message) -> Vec<Vec<u8>> {
        let frames = message.frames.clone();
        let frame = |span: Span| {
            message.blocks[span.block].bytes_mut()[span.start..span.start + span.len].to_vec()
        };
        frames.into_iter().map(frame).collect()
    }

    fn encoded(number: u64, frames: &[Vec<u8>], apart: bool) -> Vec<u8> {
        let count = u32::try_from(frames.len()).unwrap();
        let mut bytes = Header::Message { number, frames: count }.encode().to_vec();
        for frame in frames {
            bytes.extend(Descriptor { len: frame.len(), apart, address: None }.encode());
        }
        bytes.extend(frames.concat());
        bytes
    }

    fn frames() -> impl Strategy<Value = Vec<Vec<u8>>> {
        let len = prop_oneof![Just(0_usize), 1_usize..50, OWN - 1..OWN + 2];
        let frame = (len, any::<u8>()).prop_map(|(len, first)| {
            (0..len).map(|at| first.wrapping_add(at.to_le_bytes()[0])).collect()
        });
        prop::collection::vec(frame, 0..6)
    }

    proptest! {
        #[test]
        fn messages_arrive_as_sent_in_pieces_of_any_size(
            messages in prop::collection::vec(frames(), 0..4),
            pieces in prop::collection::vec(1_usize..60_000, 1..9),
            direct: bool,
            apart: bool,
        ) {
            let mut bytes = Vec::new();
            for (message, number) in messages.iter().zip(1..) {
                bytes.extend(encoded(number, message, apart));
                bytes.extend(Header::Taken { number }.encode());
            }
            let (mut reader, mut read, mut taken) = (reader(), Vec::new(), 0);
            let (mut rest, mut sizes) = (&bytes[..], pieces.iter().cycle());
            while !rest.is_empty() {
                let size = rest.len().min(*sizes.next().unwrap());
                if direct && let Some(to) = reader.destination(1000) {
                    let len = to.len().min(size);
                    to[..len].copy_from_slice(&rest[..len]);
                    reader.filled(len);
                    rest = &rest[len..];
                    continue;
                }
                let mut piece = &rest[..size];
                rest = &rest[size..];
                loop {
                    match reader.feed(&mut piece).unwrap() {
                        Step::More => break,
                        Step::Taken(number) => { taken += 1; prop_assert_eq!(number, taken); }
                        Step::Granted(_) => prop_assert!(false, "nothing was granted"),
                        Step::Announced(mut message) => read.push(contents(&mut message)),
                        Step::Written(_) => prop_assert!(false, "nothing was granted"),
                    }
                }
                prop_assert!(piece.is_empty());
            }
            prop_assert!(reader.is_between_messages());
            prop_assert_eq!(read, messages);
        }

        #[test]
        fn garbage_never_panics(bytes: Vec<u8>, kind in 0..6_u8) {
            for start in [&[][..], &[kind, 3, 0, 0, 2, 0, 0, 0]] {
                let bytes = [start, &bytes].concat();
                let (mut reader, mut input) = (reader(), &bytes[..]);
                while !matches!(reader.feed(&mut input), Ok(Step::More) | Err(_)) {}
            }
        }
    }

    #[test]
    fn frames_that_are_used_longer_have_memory_of_their_own() {
        let frames = [vec![1; 10], vec![2; 20], vec![3; 30]];
        let blocks = |apart| match reader().feed(&mut &encoded(1, &frames, apart)[..]) {
            Ok(Step::Announced(message)) => {
                message.frames.iter().map(|frame| frame.block).collect()
            }
            other => panic!("{other:?}"),
        };
        let (together, apart): (Vec<usize>, Vec<usize>) = (blocks(false), blocks(true));
        assert_eq!((together, apart), (vec![0, 0, 0], vec![1, 2, 3]));
    }

    #[test]
    fn memory_is_taken_for_a_frame_when_its_bytes_come() {
        let (mut reader, frames) = (reader(), vec![vec![0; 60_000]; 1000]);
        let bytes = encoded(1, &frames, true);
        let announced = HEADER + DESCRIPTOR * frames.len();
        for (fed, taken) in [(0, 0), (announced, 2), (1, 2), (60_000, 3), (120_000, 5)] {
            let mut input = &bytes[..fed];
            assert!(matches!(reader.feed(&mut input), Ok(Step::More)));
            let blocks = match &reader.stage {
                Stage::Body { message, .. } => message.blocks.len(),
                _ => 0,
            };
            assert_eq!(blocks, taken, "after {fed} bytes more");
        }
        let all: usize = frames.iter().map(Vec::len).sum();
        let step = reader.feed(&mut &bytes[..all - 180_001]).unwrap();
        assert!(matches!(step, Step::Announced(message) if message.blocks.len() == 1001));
    }

    #[test]
    fn while_frames_of_a_message_wait_no_other_message_comes_and_grants_do() {
        let (mut reader, message) = (reader(), Message { number: 5, ..Message::default() });
        reader.wait_for(message, VecDeque::new());
        let header = Header::Granted { number: 9, frames: 2, arena: false, stream: true };
        let grants = crate::wire::encode_grants(&[Some(4096), None]);
        let step = reader.feed(&mut &[&header.encode()[..], &grants].concat()[..]).unwrap();
        let Step::Granted(granted) = step else { panic!("{step:?}") };
        assert_eq!((granted.number, granted.stream), (9, true));
        assert_eq!(granted.grants, [Some(4096), None]);
        let wrong = [Header::Message { number: 6, frames: 0 }, Header::Written { number: 6 }];
        for header in wrong {
            assert!(reader.feed(&mut &header.encode()[..]).is_err(), "{header:?}");
        }
        let written = Header::Written { number: 5 }.encode();
        let step = reader.feed(&mut &written[..]).unwrap();
        assert!(matches!(step, Step::Written(message) if message.number == 5));
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri ends where there is no memory")]
    fn a_message_that_no_memory_holds_is_an_error() {
        let mut bytes = Header::Message { number: 1, frames: 1 }.encode().to_vec();
        bytes.extend(Descriptor { len: 1 << 60, apart: true, address: None }.encode());
        let fault = reader().feed(&mut &bytes[..]).unwrap_err();
        assert!(fault.to_string().starts_with("no memory for a message of 1152921504606846976"));
    }
}
