//! Folds spans into longer ones, and says where in the file each belongs.
//!
//! *Invariant:* the highest of a fold is the highest of what was folded; its mean is between their
//! means.

use super::{Figure, Shape, Span, State, single};

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

    /// Adds what was read now; returns the records to write, each with its place in the file. A
    /// span that is not of this shape is left out.
    pub fn add(&mut self, span: &Span) -> Vec<(u64, Vec<u8>)> {
        let count = self.shape.processes.len();
        if span.states.len() != count || span.figures.len() != count * self.shape.figures.len() {
            return Vec::new();
        }
        let mut due = vec![(0, span.encode())];
        let levels = self.shape.levels.iter().enumerate().skip(1);
        for ((level, ring), (part, fold)) in levels.zip(&mut self.folds) {
            let here = span.at / u64::from(ring.every_ms.max(1));
            if *part != here {
                due.extend(std::mem::take(fold).end().map(|span| (level, span.encode())));
                *part = here;
            }
            fold.add(span);
        }
        due.into_iter().map(|(level, record)| (self.place(level), record)).collect()
    }

    /// The place of the next record of a level.
    fn place(&mut self, level: usize) -> u64 {
        let record = self.shape.record_bytes() as u64;
        let before = self.shape.levels[..level].iter().map(|ring| u64::from(ring.slots) * record);
        let begin = self.header.len() as u64 + before.sum::<u64>();
        let slot = self.written[level] % u64::from(self.shape.levels[level].slots.max(1));
        self.written[level] += 1;
        begin + slot * record
    }
}

/// Several spans that become one.
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

impl Fold {
    /// Adds a span; all spans of a fold have as many processes and figures.
    pub(super) fn add(&mut self, span: &Span) {
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

    /// The span that they became; `None` of none.
    pub(super) fn end(self) -> Option<Span> {
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
