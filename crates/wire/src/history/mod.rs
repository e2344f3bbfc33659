//! A cluster's history: what its processes used, for as long as it runs, in a file of fixed size.
//!
//! The supervisor writes `RUN/history`; whoever shows it reads it. The file begins with
//! [`MAGIC`], the length of the [`Shape`] in four bytes (little-endian, as all numbers), and the
//! shape as JSON. Then come the rings of the shape's levels, the finest first: so many records of
//! one length each. A record is a [`Span`]:
//!
//! | bytes | what |
//! |---|---|
//! | 8 | when it ends, in milliseconds since 1970; 0 in a place that was never written |
//! | 4 | how many milliseconds it covers |
//! | 8 | the first bytes of BLAKE3 over the rest, so that half a record is none |
//! | for each process 4 | its phase, the share of the time in which it ran in percent, restarts |
//! | for each of its figures 8 | mean and highest as 32-bit floats, not a number if unknown |
//!
//! What is older is kept more coarsely: [`Rings`] folds spans into longer ones, and of each figure
//! the mean and the highest remain. [`History`] puts the levels together again. What went from
//! which worker to which is in a file of its own: [`pairs`].
//!
//! *Invariant:* no file makes a reader panic, or allocate more than the file's size warrants; no
//! highest figure is lost by folding, and no figure appears that was not there.

mod fold;
mod form;
pub mod pairs;
mod view;

#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

pub use form::{Form, Timed};
pub use view::{Curve, Curves, Figures};

/// The writer's half of a history of processes.
pub type Rings = form::Rings<Shape>;

/// A history of processes that was read.
pub type History = form::History<Shape>;

/// How the file begins.
pub const MAGIC: [u8; 8] = *b"cc-hist\n";

/// The version of the form.
pub const VERSION: u32 = 1;

/// Longest file that is read.
pub const FILE_LIMIT: u64 = 64 << 20;

/// Most bytes of a file that [`Shape::new`] describes.
pub const BUDGET: u64 = 8 << 20;

/// The levels of a new history: an hour, twelve hours, a week.
pub const LEVELS: [Level; 3] = [
    Level { every_ms: 10_000, slots: 360 },
    Level { every_ms: 60_000, slots: 720 },
    Level { every_ms: 600_000, slots: 1008 },
];

/// The words for [`State::phase`], as the state of a cluster has them.
pub const PHASES: [&str; 8] =
    ["waiting", "starting", "ready", "unresponsive", "stopping", "restarting", "failed", "stopped"];

/// Bytes of a record before its processes.
const HEAD: usize = 20;

/// Why a file can't be read as a history.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HistoryError {
    /// It does not begin as a history.
    #[error("this is no history of a cluster")]
    Foreign,
    /// Its beginning is damaged.
    #[error("the beginning of the history is damaged: {reason}")]
    Shape {
        /// What is wrong with it.
        reason: String,
    },
    /// Another version of the program has written it.
    #[error("the history has version {found}, and this program reads version {VERSION}")]
    Version {
        /// Its version.
        found: u32,
    },
}

/// A ring of records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Level {
    /// Milliseconds that a record usually covers.
    pub every_ms: u32,
    /// The number of records.
    pub slots: u32,
}

/// What a history is about, and how its file is laid out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    /// [`VERSION`].
    pub version: u32,
    /// The processes.
    pub processes: Vec<String>,
    /// What is known of each.
    pub figures: Vec<String>,
    /// The rings, the finest first.
    pub levels: Vec<Level>,
}

impl Shape {
    /// The shape for these processes and figures. Of very many, less is kept.
    pub fn new(processes: Vec<String>, figures: Vec<String>) -> Self {
        let mut shape = Self { version: VERSION, processes, figures, levels: LEVELS.to_vec() };
        let record = shape.record_bytes();
        form::fit(&mut shape.levels, record, BUDGET);
        shape
    }
}

impl Form for Shape {
    const MAGIC: [u8; 8] = MAGIC;
    const MOST_RECORDS: usize = 100_000;
    type Fold = fold::Fold;

    fn levels(&self) -> &[Level] {
        &self.levels
    }

    fn record_bytes(&self) -> usize {
        HEAD + self.processes.len() * (4 + 8 * self.figures.len())
    }

    fn counts(&self) -> [(usize, usize); 2] {
        [(self.processes.len(), 4096), (self.figures.len(), 32)]
    }

    fn holds(&self, span: &Span) -> bool {
        let count = self.processes.len();
        span.states.len() == count && span.figures.len() == count * self.figures.len()
    }

    fn records(&self, _: Level, span: &Span) -> Vec<Vec<u8>> {
        vec![span.encode()]
    }

    fn spans<'a>(&self, records: impl Iterator<Item = &'a [u8]>) -> Vec<Span> {
        let mut spans: Vec<Span> =
            records.filter_map(|record| Span::decode(self, record)).collect();
        spans.sort_by_key(|span| span.at);
        spans.dedup_by_key(|span| span.at);
        spans
    }
}

/// What a process was in a span of time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// Its phase at the end: a place in [`PHASES`].
    pub phase: u8,
    /// In which share of the time it ran, in percent.
    pub up: u8,
    /// Its restarts until the end.
    pub restarts: u16,
}

/// A figure's mean and highest in a span of time; not a number if unknown.
#[derive(Clone, Copy, Debug)]
pub struct Figure {
    pub mean: f32,
    pub highest: f32,
}

impl Figure {
    /// Nothing is known.
    pub const UNKNOWN: Self = Self { mean: f32::NAN, highest: f32::NAN };

    /// What was read once.
    pub fn of(value: Option<f64>) -> Self {
        Self::over(value.map(|value| (value, value)))
    }

    /// The mean and the highest of what was read several times.
    pub fn over(known: Option<(f64, f64)>) -> Self {
        let figure = |(mean, highest)| Self { mean: single(mean), highest: single(highest) };
        known.map_or(Self::UNKNOWN, figure)
    }

    /// The mean and the highest, if they are known.
    pub fn known(self) -> Option<(f32, f32)> {
        (self.mean.is_finite() && self.highest.is_finite()).then_some((self.mean, self.highest))
    }
}

/// What all processes did in a span of time.
#[derive(Clone, Debug)]
pub struct Span {
    /// When it ends, in milliseconds since 1970.
    pub at: u64,
    /// How many milliseconds it covers.
    pub ms: u32,
    /// One of each process.
    pub states: Vec<State>,
    /// Those of the first process, those of the second, and so on.
    pub figures: Vec<Figure>,
}

impl Timed for Span {
    fn time(&self) -> (u64, u32) {
        (self.at, self.ms)
    }
}

impl Span {
    /// The record.
    fn encode(&self) -> Vec<u8> {
        let per_process = self.figures.len() / self.states.len().max(1);
        let mut body = Vec::with_capacity(HEAD + self.states.len() * (4 + 8 * per_process));
        body.extend(self.at.to_le_bytes());
        body.extend(self.ms.to_le_bytes());
        body.extend([0; 8]);
        for (at, State { phase, up, restarts }) in self.states.iter().enumerate() {
            body.extend([*phase, *up]);
            body.extend(restarts.to_le_bytes());
            for Figure { mean, highest } in &self.figures[at * per_process..][..per_process] {
                body.extend(mean.to_le_bytes());
                body.extend(highest.to_le_bytes());
            }
        }
        let check = check(&body);
        body[12..HEAD].copy_from_slice(&check);
        body
    }

    /// The span in a record of this shape; `None` if it was never written, or only in part.
    fn decode(shape: &Shape, record: &[u8]) -> Option<Self> {
        let (head, body) = record.split_first_chunk::<HEAD>()?;
        let at = u64::from_le_bytes(*head.first_chunk()?);
        let ms = u32::from_le_bytes(*head[8..].first_chunk()?);
        if at == 0 || head[12..] != check(record) {
            return None;
        }
        let count = shape.processes.len();
        let mut states = Vec::with_capacity(count);
        let mut figures = Vec::with_capacity(count * shape.figures.len());
        for process in body.chunks_exact(4 + 8 * shape.figures.len()) {
            let [phase, up, low, high] = *process.first_chunk()?;
            states.push(State {
                phase,
                up: up.min(100),
                restarts: u16::from_le_bytes([low, high]),
            });
            figures.extend(process[4..].as_chunks::<8>().0.iter().map(
                |[a, b, c, d, e, f, g, h]| {
                    let float = f32::from_le_bytes;
                    Figure { mean: float([*a, *b, *c, *d]), highest: float([*e, *f, *g, *h]) }
                },
            ));
        }
        Some(Self { at, ms, states, figures })
    }
}

/// A figure as a record has it.
#[allow(clippy::cast_possible_truncation, reason = "seven digits are enough for a curve")]
fn single(value: f64) -> f32 {
    value as f32
}

/// What a record is checked by, without the check itself.
fn check(record: &[u8]) -> [u8; 8] {
    let mut hash = blake3::Hasher::new();
    hash.update(&record[..12]).update(&record[HEAD..]);
    let mut check = [0; 8];
    hash.finalize_xof().fill(&mut check);
    check
}
