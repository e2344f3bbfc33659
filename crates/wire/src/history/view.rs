//! Says what a history tells of a span of time, in as many points as are wanted.
//!
//! *Invariant:* points are in the order of time, and where nothing is known, there is a point that
//! says so: no line is drawn over a gap.

use std::collections::BTreeMap;

use serde::Serialize;

use super::fold::Fold;
use super::form::{Folds, Timed};
use super::{Figure, History, PHASES, Shape, Span};

/// Most numbers of [`Curves`].
const NUMBERS: usize = 300_000;

impl History {
    /// What happened after `from` and until `to`, in at most so many spans and one.
    pub fn between(&self, from: u64, to: u64, most: usize) -> Vec<Span> {
        if to <= from {
            return Vec::new();
        }
        let wide = (to - from).div_ceil(most.max(1) as u64).max(1);
        let mut parts: BTreeMap<u64, Fold> = BTreeMap::new();
        let shown = |span: &&Span| span.at > from && span.begin() < to;
        for span in self.spans.iter().filter(shown) {
            let part = (span.at.min(to) - from) / wide;
            parts.entry(part).or_default().add(span);
        }
        parts.into_values().filter_map(Fold::end).collect()
    }

    /// The same as curves; all of it without bounds.
    pub fn curves(&self, from: Option<u64>, to: Option<u64>, most: usize) -> Curves {
        let bounds = self.bounds();
        let (begin, end) = bounds.unwrap_or_default();
        // A point more than there is room for may follow each.
        let numbers = self.shape.processes.len() * (3 + 2 * self.shape.figures.len());
        let most = most.clamp(1, (NUMBERS / numbers.max(1) / 2).max(1));
        let spans = self.between(from.unwrap_or(begin), to.unwrap_or(end), most);
        Curves::of(&self.shape, bounds, with_gaps(spans, &self.shape))
    }
}

/// Spans, and `None` between two that lie apart.
fn with_gaps(spans: Vec<Span>, shape: &Shape) -> Vec<(u64, Option<Span>)> {
    let usual = shape.levels.first().map_or(0, |level| level.every_ms);
    let mut all: Vec<(u64, Option<Span>)> = Vec::with_capacity(spans.len());
    let mut last: Option<(u64, u32)> = None;
    for span in spans {
        if let Some((at, ms)) = last {
            let missing = span.begin().saturating_sub(at);
            if missing.saturating_mul(2) > u64::from(usual.max(ms).max(span.ms)) {
                all.push((at + missing / 2, None));
            }
        }
        last = Some((span.at, span.ms));
        all.push((span.at, Some(span)));
    }
    all
}

/// A span of time as curves. Where nothing is known, `None`.
#[derive(Clone, Debug, Serialize)]
pub struct Curves {
    /// When the whole history begins and ends, in milliseconds since 1970.
    pub first: Option<u64>,
    pub last: Option<u64>,
    /// The words for [`Curve::phase`].
    pub phases: [&'static str; 8],
    /// When each point's span ends.
    pub at: Vec<u64>,
    /// How many milliseconds it covers.
    pub ms: Vec<u32>,
    pub processes: Vec<Curve>,
}

/// One process.
#[derive(Clone, Debug, Serialize)]
pub struct Curve {
    pub name: String,
    /// Its phase at the end of each span, a place in [`PHASES`].
    pub phase: Vec<Option<u8>>,
    /// In which share of the time it ran, in percent.
    pub up: Vec<Option<u8>>,
    pub restarts: Vec<Option<u16>>,
    /// What is known of it, by name.
    pub figures: BTreeMap<String, Figures>,
}

/// A figure over time.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Figures {
    pub mean: Vec<Option<f64>>,
    pub highest: Vec<Option<f64>>,
}

/// A figure as it was read, without the digits that it only has as a 64-bit float. As a text, a
/// 32-bit float of a GiB would be 24 bytes less.
fn digits(value: f32) -> f64 {
    let value = f64::from(value);
    if value.abs() < 1e6 { (value * 1e6).round() / 1e6 } else { value }
}

impl Curves {
    fn of(shape: &Shape, bounds: Option<(u64, u64)>, spans: Vec<(u64, Option<Span>)>) -> Self {
        let count = shape.figures.len();
        let curve = |(at, name): (usize, &String)| {
            let states =
                || spans.iter().map(move |(_, span)| span.as_ref().map(|it| it.states[at]));
            let figures = shape.figures.iter().enumerate().map(|(number, figure)| {
                let of = |span: &Option<Span>| {
                    let known = span.as_ref().map(|span| span.figures[at * count + number]);
                    let (mean, highest) = known.and_then(Figure::known)?;
                    Some((digits(mean), digits(highest)))
                };
                let (mean, highest) =
                    spans.iter().map(|(_, span)| of(span)).map(Option::unzip).unzip();
                (figure.clone(), Figures { mean, highest })
            });
            Curve {
                name: name.clone(),
                phase: states().map(|state| Some(state?.phase)).collect(),
                up: states().map(|state| Some(state?.up)).collect(),
                restarts: states().map(|state| Some(state?.restarts)).collect(),
                figures: figures.collect(),
            }
        };
        Self {
            first: bounds.map(|(first, _)| first),
            last: bounds.map(|(_, last)| last),
            phases: PHASES,
            processes: shape.processes.iter().enumerate().map(curve).collect(),
            at: spans.iter().map(|(at, _)| *at).collect(),
            ms: spans.iter().map(|(_, span)| span.as_ref().map_or(0, |span| span.ms)).collect(),
        }
    }
}
