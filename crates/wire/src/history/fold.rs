//! Folds spans into longer ones, and says where in the file each belongs.
//!
//! *Invariant:* the highest of a fold is the highest of what was folded; its mean is between their
//! means.

use super::{Figure, Level, Shape, Span, State, places, single};

/// Several spans that become one.
pub(super) trait Folds: Default {
    /// What is folded.
    type Span;

    /// Adds a span.
    fn add(&mut self, span: &Self::Span);

    /// The span that they became; `None` of none.
    fn end(self) -> Option<Self::Span>;
}

/// What is being folded for each level but the first, and for which part of the time.
#[derive(Debug)]
pub(super) struct Folding<F>(Vec<(u64, F)>);

impl<F: Folds> Folding<F> {
    pub(super) fn new(levels: &[Level]) -> Self {
        Self(levels.iter().skip(1).map(|_| Default::default()).collect())
    }

    /// Adds a span that ends then; returns what is complete of each level.
    pub(super) fn add(
        &mut self,
        levels: &[Level],
        at: u64,
        span: &F::Span,
    ) -> Vec<(usize, F::Span)> {
        let mut complete = Vec::new();
        for ((level, ring), (part, fold)) in levels.iter().enumerate().skip(1).zip(&mut self.0) {
            let here = at / u64::from(ring.every_ms.max(1));
            if *part != here {
                complete.extend(std::mem::take(fold).end().map(|span| (level, span)));
                *part = here;
            }
            fold.add(span);
        }
        complete
    }
}

/// Where the next record of each level belongs.
#[derive(Debug)]
pub(super) struct Next {
    /// Where the rings of the levels begin.
    begins: Vec<u64>,
    record_bytes: u64,
    /// The number of records so far, of each level.
    written: Vec<u64>,
}

impl Next {
    /// Of rings that begin there.
    pub(super) fn new(levels: &[Level], record_bytes: usize, begin: usize) -> Self {
        let rings = places(levels, record_bytes, begin);
        Self {
            begins: rings.map(|ring| ring.start as u64).collect(),
            record_bytes: record_bytes as u64,
            written: vec![0; levels.len()],
        }
    }

    /// The place of the next record of a level.
    pub(super) fn place(&mut self, level: usize, ring: Level) -> u64 {
        let slot = self.written[level] % u64::from(ring.slots.max(1));
        self.written[level] += 1;
        self.begins[level] + slot * self.record_bytes
    }
}

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

    /// Adds what was read now; returns the records to write, each with its place in the file. A
    /// span that is not of this shape is left out.
    pub fn add(&mut self, span: &Span) -> Vec<(u64, Vec<u8>)> {
        let count = self.shape.processes.len();
        if span.states.len() != count || span.figures.len() != count * self.shape.figures.len() {
            return Vec::new();
        }
        let levels = &self.shape.levels;
        let complete = self.folding.add(levels, span.at, span);
        let due = complete.iter().map(|(level, span)| (*level, span));
        // There may be no level at all.
        let due = levels.first().map(|_| (0, span)).into_iter().chain(due);
        due.map(|(at, span)| (self.next.place(at, levels[at]), span.encode())).collect()
    }
}

/// What several spans become.
#[derive(Clone, Debug, Default)]
pub(super) struct Fold {
    at: u64,
    ms: u64,
    states: Vec<State>,
    /// For how long each process ran, in hundredths of milliseconds.
    up: Vec<u64>,
    figures: Vec<Sum>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    weight: f64,
    sum: f64,
    highest: Option<f32>,
}

impl Folds for Fold {
    type Span = Span;

    /// All spans of a fold have as many processes and figures.
    fn add(&mut self, span: &Span) {
        let ms = u64::from(span.ms.max(1));
        self.at = self.at.max(span.at);
        self.ms += ms;
        self.states.clone_from(&span.states);
        self.up.resize(span.states.len(), 0);
        self.figures.resize(span.figures.len(), Sum::default());
        let per_process = span.figures.len() / span.states.len().max(1);
        for (at, state) in span.states.iter().enumerate() {
            let ran = ms * u64::from(state.up);
            self.up[at] += ran;
            let figures = at * per_process..(at + 1) * per_process;
            for (sum, figure) in
                self.figures[figures.clone()].iter_mut().zip(&span.figures[figures])
            {
                let Some((mean, highest)) = figure.known() else { continue };
                let weight = ran.max(1) as f64;
                sum.weight += weight;
                sum.sum += f64::from(mean) * weight;
                sum.highest = Some(sum.highest.map_or(highest, |known| known.max(highest)));
            }
        }
    }

    fn end(self) -> Option<Span> {
        let percent = |up: u64| u8::try_from(up.div_ceil(self.ms.max(1))).unwrap_or(100).min(100);
        let states = self.states.iter().zip(&self.up);
        let states = states.map(|(state, up)| State { up: percent(*up), ..*state });
        let figure = |sum: &Sum| match sum.highest {
            // What rounding adds to a mean is not to be more than the highest.
            Some(highest) => Figure { mean: single(sum.sum / sum.weight).min(highest), highest },
            None => Figure::UNKNOWN,
        };
        (self.ms > 0).then(|| Span {
            at: self.at,
            ms: u32::try_from(self.ms).unwrap_or(u32::MAX),
            states: states.collect(),
            figures: self.figures.iter().map(figure).collect(),
        })
    }
}
