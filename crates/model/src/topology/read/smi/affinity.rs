//! The columns after the links: CPU affinity, NUMA affinity, GPU NUMA ID.
//!
//! Does not read links.
//!
//! *Invariant:* a value is assigned to a column only if the number of values, the tab stops or the
//! position below a heading determine it; an empty value or `N/A` is unknown.

use super::words::Word;
use super::{SmiError, place};
use crate::cpuset::{CpuSet, NodeSet};
use crate::ids::NumaId;
use crate::topology::LinkKind;

/// A column after the links.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Column {
    Cpus,
    Numa,
    GpuNuma,
    /// One that later drivers may add; its values are left out.
    Other,
}

/// A column and where its heading begins.
pub(super) type Heading = (Column, usize);

/// The most columns after the links: twice as many as are known.
const MOST_COLUMNS: usize = 6;

/// Reads the headings after the device names; also returns the texts of those that are not known.
///
/// Drivers have added one after the other (NUMA affinity in 2019, GPU NUMA ID in 2023), so another
/// one is no reason to refuse a matrix.
pub(super) fn headings(
    words: &[Word<'_>],
    line: usize,
) -> Result<(Vec<Heading>, Vec<String>), SmiError> {
    let mut headings: Vec<Heading> = Vec::new();
    let mut unknown = Vec::new();
    let mut rest = words;
    while let Some(first) = rest.first() {
        let follows = |texts: &[&str]| {
            rest.len() >= texts.len()
                && rest.iter().zip(texts).all(|(word, text)| word.text == *text)
        };
        let known = [
            (Column::Cpus, &["CPU", "Affinity"][..]),
            (Column::Cpus, &["CPU"]),
            (Column::Numa, &["NUMA", "Affinity"]),
            (Column::Numa, &["NUMA"]),
            (Column::GpuNuma, &["GPU", "NUMA", "ID"]),
        ];
        let found = known.iter().find(|(_, texts)| follows(texts));
        let (column, length) = match found {
            Some((column, texts)) => (*column, texts.len()),
            None => (Column::Other, length_of_one(rest)),
        };
        let twice = column != Column::Other && headings.iter().any(|(before, _)| *before == column);
        let (none_known, too_many) = (headings.is_empty(), headings.len() == MOST_COLUMNS);
        if twice || too_many || (none_known && column == Column::Other) {
            return Err(SmiError::Heading {
                position: place(line, first.column),
                word: first.text.to_owned(),
            });
        }
        if column == Column::Other {
            let texts: Vec<&str> = rest[..length].iter().map(|word| word.text).collect();
            unknown.push(texts.join(" "));
        }
        headings.push((column, first.column));
        rest = &rest[length..];
    }
    Ok((headings, unknown))
}

/// How many words the first heading has: a single blank is within a heading.
fn length_of_one(words: &[Word<'_>]) -> usize {
    let within = |pair: &[Word<'_>]| {
        let end = pair[0].column + pair[0].text.chars().count();
        pair[1].tabs == 0 && pair[1].column == end + 1
    };
    1 + words.windows(2).take_while(|pair| within(pair)).count()
}

/// The values of one row after its links.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Affinity {
    pub(super) cpus: Option<CpuSet>,
    /// The CPU list as it was written, and its position.
    pub(super) cpus_text: String,
    pub(super) column: usize,
    pub(super) numa: Option<NodeSet>,
    pub(super) gpu_numa: Option<NumaId>,
    /// Whether a value is missing and no tab stops show which.
    pub(super) gap: bool,
}

/// One value; a list that was broken after a comma is joined again.
struct Value {
    text: String,
    column: usize,
    tabs: usize,
}

/// Reads the values after a row's links.
pub(super) fn read(
    words: &[Word<'_>],
    headings: &[Heading],
    line: usize,
) -> Result<Affinity, SmiError> {
    let values = values(words);
    let link = values.iter().find(|value| value.text.parse::<LinkKind>().is_ok());
    if let Some(extra) = link.or(values.get(headings.len())) {
        let position = place(line, extra.column);
        return Err(SmiError::Extra { position, value: extra.text.clone() });
    }
    let gap = values.len() < headings.len() && values.iter().all(|value| value.tabs == 0);
    let mut affinity = Affinity { gap, ..Affinity::default() };
    for (value, (column, _)) in values.iter().zip(columns(&values, headings)) {
        if value.text != "N/A" {
            affinity.fill(value, column, line)?;
        }
    }
    Ok(affinity)
}

impl Affinity {
    fn fill(&mut self, value: &Value, column: Column, line: usize) -> Result<(), SmiError> {
        let refused = |cause| SmiError::List {
            position: place(line, value.column),
            column: column.name(),
            cause,
        };
        match column {
            Column::Cpus => {
                self.cpus = Some(value.text.parse().map_err(refused)?);
                self.cpus_text.clone_from(&value.text);
                self.column = value.column;
            }
            Column::Numa => self.numa = Some(value.text.parse().map_err(refused)?),
            Column::GpuNuma => {
                let nodes: NodeSet = value.text.parse().map_err(refused)?;
                self.gpu_numa = nodes.first().map(NumaId);
            }
            Column::Other => {}
        }
        Ok(())
    }
}

impl Column {
    fn name(self) -> &'static str {
        match self {
            Column::Cpus => "CPU affinity",
            Column::Numa => "NUMA affinity",
            Column::GpuNuma => "GPU NUMA ID",
            Column::Other => "another column",
        }
    }
}

fn values(words: &[Word<'_>]) -> Vec<Value> {
    let mut values: Vec<Value> = Vec::new();
    for word in words {
        match values.last_mut().filter(|before| before.text.ends_with(',')) {
            Some(before) => before.text.push_str(word.text),
            None => values.push(Value {
                text: word.text.to_owned(),
                column: word.column,
                tabs: word.tabs,
            }),
        }
    }
    values
}

/// The column of each value, in order; there are at most as many values as headings.
///
/// A full row is assigned in order, because values drift from their headings. In a row with gaps,
/// the tab stops decide (`nvidia-smi` itself prints one too many before the GPU NUMA ID), otherwise
/// the positions.
fn columns(values: &[Value], headings: &[Heading]) -> Vec<Heading> {
    if values.len() == headings.len() {
        return headings.to_vec();
    }
    let tabbed = values.iter().any(|value| value.tabs > 0);
    let stops = values.iter().scan(0, |stop, value| {
        *stop += value.tabs;
        Some(*stop)
    });
    let places: Vec<usize> =
        if tabbed { stops.collect() } else { values.iter().map(|value| value.column).collect() };
    let of_heading = |at: usize| if tabbed { at + 1 } else { headings[at].1 };
    // There are few headings, so there are few ways to omit some.
    let choices = (0u32..1 << headings.len())
        .map(|mask| (0..headings.len()).filter(|at| mask & (1 << at) != 0).collect::<Vec<usize>>());
    let distance = |choice: &Vec<usize>| -> usize {
        choice.iter().zip(&places).map(|(at, place)| of_heading(*at).abs_diff(*place)).sum()
    };
    let fitting = choices.filter(|choice| choice.len() == values.len());
    let nearest = fitting.min_by_key(distance).unwrap_or_default();
    nearest.into_iter().map(|at| headings[at]).collect()
}
