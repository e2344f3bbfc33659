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
pub mod pairs;
mod view;

#[cfg(test)]
mod tests;

use std::ops::Range;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub use fold::Rings;
pub use view::{Curve, Curves, Figures, History};

/// How the file begins.
pub const MAGIC: [u8; 8] = *b"cc-hist\n";

/// The version of the form.
pub const VERSION: u32 = 1;

/// Longest file that is read.
pub const FILE_LIMIT: u64 = 64 << 20;

/// Most bytes of a file that [`Shape::new`] describes.
pub const BUDGET: u64 = 8 << 20;

/// Longest shape.
const SHAPE_LIMIT: usize = 1 << 20;

/// Most processes, figures, levels, and records of a level.
const MOST: [usize; 4] = [4096, 32, 8, 100_000];

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
        fit(&mut shape.levels, record, BUDGET);
        shape
    }

    /// The beginning of the file.
    pub fn header(&self) -> Vec<u8> {
        header(&MAGIC, self)
    }

    /// Bytes of a record.
    pub fn record_bytes(&self) -> usize {
        HEAD + self.processes.len() * (4 + 8 * self.figures.len())
    }

    /// The length of a file that is full.
    pub fn bytes(&self) -> u64 {
        let records: u64 = self.levels.iter().map(|level| u64::from(level.slots)).sum();
        self.header().len() as u64 + records * self.record_bytes() as u64
    }

    /// The shape in the beginning of a file, and where the rings begin.
    fn read(bytes: &[u8]) -> Result<(Self, usize), HistoryError> {
        let (shape, begin): (Self, usize) = read_shape(bytes, &MAGIC)?;
        let slots = most_slots(&shape.levels);
        let counts = [shape.processes.len(), shape.figures.len(), shape.levels.len(), slots];
        within(counts, MOST)?;
        Ok((shape, begin))
    }

    /// Where the records of each level are.
    fn places(&self, begin: usize) -> impl Iterator<Item = Range<usize>> + '_ {
        places(&self.levels, self.record_bytes(), begin)
    }
}

/// The beginning of a file that begins so, with a shape as JSON.
fn header(magic: &[u8; 8], shape: &impl Serialize) -> Vec<u8> {
    // Texts and numbers, on which serde_json cannot fail.
    let text = serde_json::to_vec(shape).unwrap_or_default();
    let length = u32::try_from(text.len()).unwrap_or(u32::MAX);
    [&magic[..], &length.to_le_bytes(), &text].concat()
}

/// The shape in the beginning of a file, and where what follows begins.
fn read_shape<T: DeserializeOwned>(
    bytes: &[u8],
    magic: &[u8; 8],
) -> Result<(T, usize), HistoryError> {
    let damaged = |reason: String| HistoryError::Shape { reason };
    let rest = bytes.strip_prefix(magic).ok_or(HistoryError::Foreign)?;
    let (length, rest) = rest.split_first_chunk().ok_or_else(|| damaged("it is cut".into()))?;
    let length = u32::from_le_bytes(*length) as usize;
    let text = rest.get(..length).filter(|_| length <= SHAPE_LIMIT);
    let text = text.ok_or_else(|| damaged("its length is wrong".into()))?;
    let version = |text| serde_json::from_slice::<Version>(text);
    let Version { version } = version(text).map_err(|error| damaged(error.to_string()))?;
    if version != VERSION {
        return Err(HistoryError::Version { found: version });
    }
    let shape = serde_json::from_slice(text).map_err(|error| damaged(error.to_string()))?;
    Ok((shape, magic.len() + 4 + length))
}

/// Refuses a shape of which something is more than there may be.
fn within(counts: [usize; 4], most: [usize; 4]) -> Result<(), HistoryError> {
    if counts.iter().zip(most).any(|(count, most)| *count > most) {
        let reason = format!("it has too much of something: {counts:?}");
        return Err(HistoryError::Shape { reason });
    }
    Ok(())
}

fn most_slots(levels: &[Level]) -> usize {
    levels.iter().map(|level| level.slots as usize).max().unwrap_or(0)
}

/// Where the records of each level are.
fn places(
    levels: &[Level],
    record_bytes: usize,
    begin: usize,
) -> impl Iterator<Item = Range<usize>> + '_ {
    let mut next = begin;
    levels.iter().map(move |level| {
        let from = next;
        next += level.slots as usize * record_bytes;
        from..next
    })
}

/// Leaves fewer records to each level where all of them would be longer than the budget.
fn fit(levels: &mut [Level], record_bytes: usize, budget: u64) {
    let records: u64 = levels.iter().map(|level| u64::from(level.slots)).sum();
    let rings = (records * record_bytes as u64).max(1);
    if rings > budget {
        for level in levels {
            let fewer = u64::from(level.slots) * budget / rings;
            level.slots = u32::try_from(fewer).unwrap_or(level.slots).max(1);
        }
    }
}

#[derive(Deserialize)]
struct Version {
    version: u32,
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

impl Span {
    /// When it begins, if it has no gaps.
    pub fn begin(&self) -> u64 {
        self.at.saturating_sub(u64::from(self.ms))
    }

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
