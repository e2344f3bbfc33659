//! The form of a history's file, whatever it is about: a beginning with its shape, then rings of
//! records of one length, the finest first. [`Rings`] says what is to be written, and [`History`]
//! is what was read.
//!
//! *Invariant:* no file makes a reader allocate more than its size warrants; records that are
//! damaged or missing are left out.

use std::fmt::Debug;
use std::ops::Range;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{HistoryError, Level, VERSION};

/// Longest shape.
const SHAPE_LIMIT: usize = 1 << 20;

/// Most levels.
const MOST_LEVELS: usize = 8;

/// What covers a part of the time, in milliseconds since 1970.
pub trait Timed: Clone + Debug {
    /// When it ends, and how many milliseconds it covers.
    fn time(&self) -> (u64, u32);

    /// When it begins, if it has no gaps.
    fn begin(&self) -> u64 {
        let (end, ms) = self.time();
        end.saturating_sub(u64::from(ms))
    }

    /// When it ends.
    fn end(&self) -> u64 {
        self.time().0
    }
}

/// Several spans that become one.
pub trait Folds: Default + Debug {
    /// What is folded.
    type Span: Timed;

    /// Adds a span.
    fn add(&mut self, span: &Self::Span);

    /// The span that they became; `None` of none.
    fn end(self) -> Option<Self::Span>;
}

/// What a record, or several, of a history tell.
pub(super) type SpanOf<F> = <<F as Form>::Fold as Folds>::Span;

/// What a history is about, and what its records are.
pub trait Form: Serialize + DeserializeOwned {
    /// How the file begins.
    const MAGIC: [u8; 8];

    /// Most records of a level.
    const MOST_RECORDS: usize;

    /// How its spans become longer ones.
    type Fold: Folds;

    /// The rings, the finest first.
    fn levels(&self) -> &[Level];

    /// Bytes of a record.
    fn record_bytes(&self) -> usize;

    /// How much there is of what has a limit, besides levels and their records, and the limits.
    fn counts(&self) -> [(usize, usize); 2];

    /// Whether a span is of this shape.
    fn holds(&self, span: &SpanOf<Self>) -> bool;

    /// The records of a span, for a ring.
    fn records(&self, ring: Level, span: &SpanOf<Self>) -> Vec<Vec<u8>>;

    /// The spans in a ring's records, in the order of time.
    fn spans<'a>(&self, records: impl Iterator<Item = &'a [u8]>) -> Vec<SpanOf<Self>>;

    /// The beginning of the file.
    fn header(&self) -> Vec<u8> {
        // Texts and numbers, on which serde_json cannot fail.
        let text = serde_json::to_vec(self).unwrap_or_default();
        let length = u32::try_from(text.len()).unwrap_or(u32::MAX);
        [&Self::MAGIC[..], &length.to_le_bytes(), &text].concat()
    }

    /// The length of a file that is full.
    fn bytes(&self) -> u64 {
        (self.header().len() + records(self.levels()) * self.record_bytes()) as u64
    }
}

/// All records of these rings.
fn records(levels: &[Level]) -> usize {
    levels.iter().map(|level| level.slots as usize).sum()
}

/// Leaves fewer records to each level where all of them would be longer than the budget.
pub(super) fn fit(levels: &mut [Level], record_bytes: usize, budget: u64) {
    let rings = (records(levels) as u64 * record_bytes as u64).max(1);
    if rings > budget {
        for level in levels {
            let fewer = u64::from(level.slots) * budget / rings;
            level.slots = u32::try_from(fewer).unwrap_or(level.slots).max(1);
        }
    }
}

/// Where the records of each level are, in a file with so long a beginning.
fn places(shape: &impl Form, begin: usize) -> impl Iterator<Item = Range<usize>> {
    let mut next = begin;
    shape.levels().iter().map(move |level| {
        let from = next;
        next += level.slots as usize * shape.record_bytes();
        from..next
    })
}

#[derive(Deserialize)]
struct Version {
    version: u32,
}

/// The shape in the beginning of a file, and where the rings begin.
fn shape<F: Form>(bytes: &[u8]) -> Result<(F, usize), HistoryError> {
    let damaged = |reason: String| HistoryError::Shape { reason };
    let rest = bytes.strip_prefix(&F::MAGIC).ok_or(HistoryError::Foreign)?;
    let (length, rest) = rest.split_first_chunk().ok_or_else(|| damaged("it is cut".into()))?;
    let length = u32::from_le_bytes(*length) as usize;
    let text = rest.get(..length).filter(|_| length <= SHAPE_LIMIT);
    let text = text.ok_or_else(|| damaged("its length is wrong".into()))?;
    let version = |text| serde_json::from_slice::<Version>(text);
    let Version { version } = version(text).map_err(|error| damaged(error.to_string()))?;
    if version != VERSION {
        return Err(HistoryError::Version { found: version });
    }
    let shape: F = serde_json::from_slice(text).map_err(|error| damaged(error.to_string()))?;
    let slots = shape.levels().iter().map(|level| level.slots as usize).max().unwrap_or(0);
    let [one, other] = shape.counts();
    let counts = [one, other, (shape.levels().len(), MOST_LEVELS), (slots, F::MOST_RECORDS)];
    if counts.iter().any(|(count, most)| count > most) {
        let counts = counts.map(|(count, _)| count);
        return Err(damaged(format!("it has too much of something: {counts:?}")));
    }
    Ok((shape, F::MAGIC.len() + 4 + length))
}

/// The writer's half of a history: what is being folded, and where the next record goes.
#[derive(Debug)]
pub struct Rings<F: Form> {
    shape: F,
    header: Vec<u8>,
    /// Where each level begins, and how many records were written to it.
    levels: Vec<(usize, u64)>,
    /// What is being folded for each level but the first, and for which part of the time.
    folds: Vec<(u64, F::Fold)>,
}

impl<F: Form> Rings<F> {
    /// An empty history.
    pub fn new(shape: F) -> Self {
        let header = shape.header();
        let levels = places(&shape, header.len()).map(|place| (place.start, 0)).collect();
        let folds = shape.levels().iter().skip(1).map(|_| Default::default()).collect();
        Self { levels, folds, header, shape }
    }

    /// What the history is about.
    pub fn shape(&self) -> &F {
        &self.shape
    }

    /// The beginning of the file.
    pub fn header(&self) -> &[u8] {
        &self.header
    }

    /// Adds what is known now; returns the records to write, each with its place in the file. A
    /// span that is not of this shape is left out.
    pub fn add(&mut self, span: &SpanOf<F>) -> Vec<(u64, Vec<u8>)> {
        if !self.shape.holds(span) {
            return Vec::new();
        }
        let mut due = self.records(0, span);
        for (at, ring) in self.shape.levels().to_vec().into_iter().enumerate().skip(1) {
            let (part, fold) = &mut self.folds[at - 1];
            let here = span.end() / u64::from(ring.every_ms.max(1));
            let complete = if *part == here { None } else { std::mem::take(fold).end() };
            *part = here;
            fold.add(span);
            due.extend(complete.into_iter().flat_map(|span| self.records(at, &span)));
        }
        due
    }

    /// The records of a span, and their places in a level; none where there is no such level.
    fn records(&mut self, level: usize, span: &SpanOf<F>) -> Vec<(u64, Vec<u8>)> {
        let Some(ring) = self.shape.levels().get(level).copied() else { return Vec::new() };
        let each = self.shape.record_bytes() as u64;
        let (begin, written) = &mut self.levels[level];
        let place = |record| {
            let slot = *written % u64::from(ring.slots.max(1));
            *written += 1;
            (*begin as u64 + slot * each, record)
        };
        self.shape.records(ring, span).into_iter().map(place).collect()
    }
}

/// A history that was read.
#[derive(Clone, Debug)]
pub struct History<F: Form> {
    pub(super) shape: F,
    /// In the order of time, the finest that is known of each moment.
    pub(super) spans: Vec<SpanOf<F>>,
}

impl<F: Form> History<F> {
    /// Reads a file. Records that are damaged, or missing because it is cut, are left out.
    ///
    /// # Errors
    /// If its beginning is not that of a history of this version.
    pub fn read(bytes: &[u8]) -> Result<Self, HistoryError> {
        let (shape, begin): (F, usize) = shape(bytes)?;
        let mut spans = Vec::new();
        for place in places(&shape, begin) {
            let ring = bytes.get(place.start..place.end.min(bytes.len())).unwrap_or_default();
            let level = shape.spans(ring.chunks_exact(shape.record_bytes()));
            spans = joined(level, spans);
        }
        Ok(Self { shape, spans })
    }

    /// What it is about.
    pub fn shape(&self) -> &F {
        &self.shape
    }

    /// When it begins and ends, in milliseconds since 1970; `None` if it is empty.
    pub fn bounds(&self) -> Option<(u64, u64)> {
        Some((self.spans.first()?.begin(), self.spans.last()?.end()))
    }

    /// So many milliseconds before its end.
    pub fn before_end(&self, ms: u64) -> Option<u64> {
        self.bounds().map(|(_, end)| end.saturating_sub(ms))
    }
}

/// The finer spans, and before them the coarser ones. A coarser one that begins before the finer
/// ones do holds those that it overlaps.
fn joined<T: Timed>(coarser: Vec<T>, mut finer: Vec<T>) -> Vec<T> {
    let begin = finer.first().map_or(u64::MAX, T::begin);
    let mut all: Vec<T> = coarser.into_iter().filter(|span| span.begin() < begin).collect();
    let until = all.last().map_or(0, T::end);
    finer.retain(|span| span.end() > until);
    all.append(&mut finer);
    all
}
