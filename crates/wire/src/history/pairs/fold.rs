//! Folds what went between workers into longer spans.
//!
//! *Invariant:* the bytes of a fold are those of what was folded, and its highest is their highest.

use std::collections::BTreeMap;

use super::{Pair, Span};
use crate::history::form::Folds;

/// What several spans become.
#[derive(Clone, Debug, Default)]
pub struct Fold {
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
