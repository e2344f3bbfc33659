//! What went from which worker to which, for as long as a cluster runs, in a file of limited size.
//!
//! The supervisor writes `RUN/history-pairs` beside the other history: [`MAGIC`], the length of the
//! [`Shape`] in four bytes, the shape as JSON, then the rings of the shape's levels, of records of
//! one length each. Pairs that moved nothing take no room, so a [`Span`] takes as many records as
//! its pairs need, and at least one, which says that nothing was moved. A record (all numbers are
//! little-endian):
//!
//! | bytes | what |
//! |---|---|
//! | 8 | when its span ends, in milliseconds since 1970; 0 in a place that was never written |
//! | 4 | how many milliseconds the span covers |
//! | 8 | the first bytes of BLAKE3 over the rest, so that half a record is none |
//! | 4, 4 | which part of its span it is, and of how many |
//! | for each pair 16 | sender, receiver (2 each), highest rate as a 32-bit float, bytes (8) |
//!
//! The rest of a record that isn't full is zeros. The mean rate of a pair in a span is its bytes by
//! the span's time; the highest is in bytes per second, of ten seconds or more. [`Counts`] turns
//! what workers say into spans, [`Rings`] folds spans into longer ones, and [`History`] puts the
//! levels together again.
//!
//! *Invariant:* no file makes a reader panic, or allocate more than the file's size warrants;
//! folding neither loses bytes nor adds any, unless more pairs have moved something than half a
//! ring has room for (some 20,000): then those with the fewest are left out. A span of which a
//! record is damaged or overwritten is left out whole.

mod counts;
mod rings;
mod view;

#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

use super::view::Timed;
use super::{HistoryError, LEVELS, Level};

pub use counts::{Counts, Said};
pub use rings::Rings;
pub use view::{Flow, Flows, History};

/// How the file begins.
pub const MAGIC: [u8; 8] = *b"cc-pair\n";

/// Most bytes of the rings that [`Shape::new`] describes.
pub const BUDGET: u64 = 4 << 20;

/// Most pairs of a record of a new history.
const TOGETHER: usize = 16;

/// Most workers, pairs of a record, levels, and records of a level.
const MOST: [usize; 4] = [4096, 4096, 8, 1_000_000];

/// Bytes of a record before its pairs, and of each of these.
const HEAD: usize = 28;
const ENTRY: usize = 16;

/// Which workers a history is about, and how its file is laid out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    /// [`super::VERSION`].
    pub version: u32,
    /// The workers.
    pub workers: Vec<String>,
    /// Most pairs of a record.
    pub pairs_per_record: u32,
    /// The rings, the finest first.
    pub levels: Vec<Level>,
}

impl Shape {
    /// The shape for these workers: room for all of their pairs in all spans of [`LEVELS`], or of
    /// very many workers for as much as fits into [`BUDGET`].
    pub fn new(workers: Vec<String>) -> Self {
        let pairs = workers.len() * workers.len().saturating_sub(1);
        let together = pairs.clamp(1, TOGETHER);
        let records = u32::try_from(pairs.div_ceil(together).max(1)).unwrap_or(u32::MAX);
        let level = |level: Level| Level { slots: level.slots.saturating_mul(records), ..level };
        let mut levels = LEVELS.map(level).to_vec();
        super::fit(&mut levels, HEAD + together * ENTRY, BUDGET);
        let pairs_per_record = u32::try_from(together).unwrap_or(u32::MAX);
        Self { version: super::VERSION, workers, pairs_per_record, levels }
    }

    /// The beginning of the file.
    pub fn header(&self) -> Vec<u8> {
        super::header(&MAGIC, self)
    }

    /// Bytes of a record.
    pub fn record_bytes(&self) -> usize {
        HEAD + self.pairs_per_record as usize * ENTRY
    }

    /// The length of a file that is full.
    pub fn bytes(&self) -> u64 {
        let records: u64 = self.levels.iter().map(|level| u64::from(level.slots)).sum();
        self.header().len() as u64 + records * self.record_bytes() as u64
    }

    /// The shape in the beginning of a file, and where the rings begin.
    fn read(bytes: &[u8]) -> Result<(Self, usize), HistoryError> {
        let (shape, begin): (Self, usize) = super::read_shape(bytes, &MAGIC)?;
        let slots = super::most_slots(&shape.levels);
        let together = shape.pairs_per_record as usize;
        super::within([shape.workers.len(), together, shape.levels.len(), slots], MOST)?;
        Ok((shape, begin))
    }
}

/// What went from one worker to another in a span of time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pair {
    /// The sender: a place in [`Shape::workers`].
    pub from: u16,
    /// The receiver.
    pub to: u16,
    /// How much.
    pub bytes: u64,
    /// The highest rate, in bytes per second.
    pub highest: f32,
}

/// What went between all workers in a span of time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Span {
    /// When it ends, in milliseconds since 1970.
    pub at: u64,
    /// How many milliseconds it covers.
    pub ms: u32,
    /// Those that moved something, by sender and receiver.
    pub pairs: Vec<Pair>,
}

impl Timed for Span {
    fn begin(&self) -> u64 {
        self.at.saturating_sub(u64::from(self.ms))
    }

    fn end(&self) -> u64 {
        self.at
    }
}

impl Span {
    /// Its records, of so many pairs each.
    fn encode(&self, together: usize) -> Vec<Vec<u8>> {
        let together = together.max(1);
        let parts = self.pairs.len().div_ceil(together).max(1);
        let record = |part: usize| {
            let mut record = Vec::with_capacity(HEAD + together * ENTRY);
            record.extend(self.at.to_le_bytes());
            record.extend(self.ms.to_le_bytes());
            record.extend([0; 8]);
            for number in [part, parts] {
                record.extend(u32::try_from(number).unwrap_or(u32::MAX).to_le_bytes());
            }
            for pair in self.pairs.iter().skip(part * together).take(together) {
                record.extend(pair.from.to_le_bytes());
                record.extend(pair.to.to_le_bytes());
                record.extend(pair.highest.to_le_bytes());
                record.extend(pair.bytes.to_le_bytes());
            }
            record.resize(HEAD + together * ENTRY, 0);
            let check = super::check(&record);
            record[12..super::HEAD].copy_from_slice(&check);
            record
        };
        (0..parts).map(record).collect()
    }
}

/// A part of a span, as a record has it.
#[derive(Debug)]
struct Part {
    span: Span,
    number: u32,
    of: u32,
}

impl Part {
    /// What is in a record; `None` if it was never written, or only in part.
    fn decode(workers: usize, record: &[u8]) -> Option<Self> {
        let (head, body) = record.split_first_chunk::<HEAD>()?;
        let at = u64::from_le_bytes(*head.first_chunk()?);
        if at == 0 || head[12..super::HEAD] != super::check(record) {
            return None;
        }
        let number = |from: usize| Some(u32::from_le_bytes(*head.get(from..)?.first_chunk()?));
        let pair = |entry: &[u8; ENTRY]| {
            let [a, b, c, d, e, f, g, h, bytes @ ..] = *entry;
            let (from, to) = (u16::from_le_bytes([a, b]), u16::from_le_bytes([c, d]));
            let highest = f32::from_le_bytes([e, f, g, h]);
            let is_pair = from != to && usize::from(from.max(to)) < workers && highest.is_finite();
            is_pair.then(|| Pair { from, to, bytes: u64::from_le_bytes(bytes), highest })
        };
        let pairs = body.as_chunks::<ENTRY>().0.iter().filter_map(pair).collect();
        let span = Span { at, ms: number(8)?, pairs };
        Some(Self { span, number: number(20)?, of: number(24)? })
    }
}
