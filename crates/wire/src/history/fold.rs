//! Folds what processes did into longer spans.
//!
//! *Invariant:* the highest of a fold is the highest of what was folded; its mean is between their
//! means.

use super::form::Folds;
use super::{Figure, Span, State, single};

/// What several spans become.
#[derive(Clone, Debug, Default)]
pub struct Fold {
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
