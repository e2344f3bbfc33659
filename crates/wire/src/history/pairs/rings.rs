//! Folds spans into longer ones, and says where in the file their records belong.
//!
//! *Invariant:* the bytes of a fold are those of what was folded, and its highest is their highest.

use std::collections::BTreeMap;

use super::super::fold::{Folding, Folds, Next};
use super::{Pair, Shape, Span};

/// The writer's half of a history: what is being folded, and where the next record goes.
#[derive(Debug)]
pub struct Rings {
    shape: Shape,
    header: Vec<u8>,
    next: Next,
    folding: Folding<Fold>,
}

impl Rings {
    /// An empty history.
    pub fn new(shape: Shape) -> Self {
        let header = shape.header();
        let next = Next::new(&shape.levels, shape.record_bytes(), header.len());
        Self { next, folding: Folding::new(&shape.levels), header, shape }
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
        let complete = self.folding.add(&self.shape.levels, span.at, span);
        let due = std::iter::once((0, span.clone())).chain(complete);
        due.flat_map(|(level, span)| self.records(level, span)).collect()
    }

    /// The records of a span, and their places in a level.
    fn records(&mut self, level: usize, mut span: Span) -> Vec<(u64, Vec<u8>)> {
        let Some(ring) = self.shape.levels.get(level).copied() else {
            return Vec::new();
        };
        let together = self.shape.pairs_per_record as usize;
        // What is longer than its ring would overwrite itself.
        let most = (ring.slots as usize / 2).max(1) * together;
        if span.pairs.len() > most {
            span.pairs.sort_by_key(|pair| std::cmp::Reverse(pair.bytes));
            span.pairs.truncate(most);
            span.pairs.sort_by_key(|pair| (pair.from, pair.to));
        }
        let records = span.encode(together).into_iter();
        records.map(|record| (self.next.place(level, ring), record)).collect()
    }
}

/// What several spans become.
#[derive(Clone, Debug, Default)]
struct Fold {
    at: u64,
    ms: u64,
    pairs: BTreeMap<(u16, u16), (u64, f32)>,
}

impl Folds for Fold {
    type Span = Span;

    fn add(&mut self, span: &Span) {
        self.at = self.at.max(span.at);
        self.ms += u64::from(span.ms.max(1));
        for pair in &span.pairs {
            let (bytes, highest) = self.pairs.entry((pair.from, pair.to)).or_default();
            *bytes = bytes.saturating_add(pair.bytes);
            *highest = highest.max(pair.highest);
        }
    }

    fn end(self) -> Option<Span> {
        let pair = |((from, to), (bytes, highest))| Pair { from, to, bytes, highest };
        (self.ms > 0).then(|| Span {
            at: self.at,
            ms: u32::try_from(self.ms).unwrap_or(u32::MAX),
            pairs: self.pairs.into_iter().map(pair).collect(),
        })
    }
}
