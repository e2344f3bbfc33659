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
mod fold;
mod view;

#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

use super::form::{self, Form, Timed};
use super::{LEVELS, Level};

pub use counts::{Counts, Said};
pub use view::{Flow, Flows};

/// The writer's half of a history of pairs.
pub type Rings = form::Rings<Shape>;

/// A history of pairs that was read.
pub type History = form::History<Shape>;

/// How the file begins.
pub const MAGIC: [u8; 8] = *b"cc-pair\n";

/// Most bytes of the rings that [`Shape::new`] describes.
pub const BUDGET: u64 = 4 << 20;

/// Most pairs of a record of a new history.
const TOGETHER: usize = 16;

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
        form::fit(&mut levels, HEAD + together * ENTRY, BUDGET);
        let pairs_per_record = u32::try_from(together).unwrap_or(u32::MAX);
        Self { version: super::VERSION, workers, pairs_per_record, levels }
    }
}

impl Form for Shape {
    const MAGIC: [u8; 8] = MAGIC;
    const MOST_RECORDS: usize = 1_000_000;
    type Fold = fold::Fold;

    fn levels(&self) -> &[Level] {
        &self.levels
    }

    fn record_bytes(&self) -> usize {
        HEAD + self.pairs_per_record as usize * ENTRY
    }

    fn counts(&self) -> [(usize, usize); 2] {
        [(self.workers.len(), 4096), (self.pairs_per_record as usize, 4096)]
    }

    fn holds(&self, _: &Span) -> bool {
        true
    }

    fn records(&self, ring: Level, span: &Span) -> Vec<Vec<u8>> {
        let together = self.pairs_per_record as usize;
        // What is longer than its ring would overwrite itself.
        let most = (ring.slots as usize / 2).max(1) * together;
        if span.pairs.len() <= most {
            return span.encode(together);
        }
        let mut span = span.clone();
        span.pairs.sort_by_key(|pair| std::cmp::Reverse(pair.bytes));
        span.pairs.truncate(most);
        span.pairs.sort_by_key(|pair| (pair.from, pair.to));
        span.encode(together)
    }

    fn spans<'a>(&self, records: impl Iterator<Item = &'a [u8]>) -> Vec<Span> {
        whole(records.filter_map(|record| Part::decode(self.workers.len(), record)).collect())
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
    fn time(&self) -> (u64, u32) {
        (self.at, self.ms)
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

/// The spans of which all parts are there, in the order of time.
fn whole(mut parts: Vec<Part>) -> Vec<Span> {
    parts.sort_by_key(|part| (part.span.at, part.number));
    let mut spans = Vec::new();
    for group in parts.chunk_by_mut(|one, next| one.span.at == next.span.at) {
        let (of, ms) = (group[0].of, group[0].span.ms);
        let is_next = |(at, part): (usize, &Part)| {
            part.number as usize == at && part.of == of && part.span.ms == ms
        };
        if group.len() == of as usize && group.iter().enumerate().all(is_next) {
            let at = group[0].span.at;
            let pairs = group.iter_mut().flat_map(|part| std::mem::take(&mut part.span.pairs));
            spans.push(Span { at, ms, pairs: pairs.collect() });
        }
    }
    spans
}
