//! Folds spans into longer ones, and says where in the file their records belong.
//!
//! *Invariant:* the bytes of a fold are those of what was folded, and its highest is their highest.

use std::collections::BTreeMap;

use super::{Level, Pair, Shape, Span};

/// The writer's half of a history: what is being folded, and where the next record goes.
#[derive(Debug)]
pub struct Rings {
    shape: Shape,
    header: Vec<u8>,
    /// The number of records so far, of each level.
    written: Vec<u64>,
    /// What is being folded for each level but the first, and for which part of the time.
    folds: Vec<(u64, Fold)>,
}

impl Rings {
    /// An empty history.
    pub fn new(shape: Shape) -> Self {
        let coarser = shape.levels.len().saturating_sub(1);
        Self {
            written: vec![0; shape.levels.len()],
            folds: vec![Default::default(); coarser],
            header: shape.header(),
            shape,
        }
    }

    /// What the history is about.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The beginning of the file.
    pub fn header(&self) -> &[u8] {
        &self.header
    }

    /// Adds what was moved until now; returns the records to write, each with its place in the
    /// file.
    pub fn add(&mut self, span: &Span) -> Vec<(u64, Vec<u8>)> {
        let mut due = vec![(0, span.clone())];
        let levels = self.shape.levels.iter().enumerate().skip(1);
        for ((level, ring), (part, fold)) in levels.zip(&mut self.folds) {
            let here = span.at / u64::from(ring.every_ms.max(1));
            if *part != here {
                due.extend(std::mem::take(fold).end().map(|span| (level, span)));
                *part = here;
            }
            fold.add(span);
        }
        due.into_iter().flat_map(|(level, span)| self.records(level, span)).collect()
    }

    /// The records of a span, and their places in a level.
    fn records(&mut self, level: usize, mut span: Span) -> Vec<(u64, Vec<u8>)> {
        let Some(Level { slots, .. }) = self.shape.levels.get(level).copied() else {
            return Vec::new();
        };
        let together = self.shape.pairs_per_record as usize;
        // What is longer than its ring would overwrite itself.
        let most = (slots as usize / 2).max(1) * together;
        if span.pairs.len() > most {
            span.pairs.sort_by_key(|pair| std::cmp::Reverse(pair.bytes));
            span.pairs.truncate(most);
            span.pairs.sort_by_key(|pair| (pair.from, pair.to));
        }
        span.encode(together).into_iter().map(|record| (self.place(level, slots), record)).collect()
    }

    /// The place of the next record of a level.
    fn place(&mut self, level: usize, slots: u32) -> u64 {
        let record = self.shape.record_bytes();
        let mut places = super::super::places(&self.shape.levels, record, self.header.len());
        let begin = places.nth(level).map_or(0, |place| place.start);
        let slot = self.written[level] % u64::from(slots.max(1));
        self.written[level] += 1;
        begin as u64 + slot * record as u64
    }
}

/// Several spans that become one.
#[derive(Clone, Debug, Default)]
struct Fold {
    at: u64,
    ms: u64,
    pairs: BTreeMap<(u16, u16), (u64, f32)>,
}

impl Fold {
    fn add(&mut self, span: &Span) {
        self.at = self.at.max(span.at);
        self.ms += u64::from(span.ms.max(1));
        for pair in &span.pairs {
            let (bytes, highest) = self.pairs.entry((pair.from, pair.to)).or_default();
            *bytes = bytes.saturating_add(pair.bytes);
            *highest = highest.max(pair.highest);
        }
    }

    /// The span that they became; `None` of none.
    fn end(self) -> Option<Span> {
        let pair = |((from, to), (bytes, highest))| Pair { from, to, bytes, highest };
        (self.ms > 0).then(|| Span {
            at: self.at,
            ms: u32::try_from(self.ms).unwrap_or(u32::MAX),
            pairs: self.pairs.into_iter().map(pair).collect(),
        })
    }
}
