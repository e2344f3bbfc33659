//! The matrix of `nvidia-smi topo -m`, as people paste it.
//!
//! Reads the words, not the layout: headers lose their first tab, terminals turn tabs into spaces,
//! editors re-align columns. What the matrix cannot express (PCI addresses, memory, port states)
//! stays unknown.
//!
//! *Invariant:* a row that does not have one cell for each column is refused, never shifted.
//! Cells that ran together count as parted only if they can be read in one way.

mod affinity;
mod glued;
mod words;

use std::collections::{BTreeMap, BTreeSet};

use super::DEVICE_LIMIT;
use crate::cpuset::IdSetError;
use crate::ids::{GpuIndex, NumaId};
use crate::text::Position;
use crate::topology::{Device, Gpu, LinkKind, LinkKindError, Links, Nic, Note, Topology, VERSION};
use affinity::{Affinity, Heading};
use words::{Word, words};

/// Why a text is not a matrix of `nvidia-smi topo -m`.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs, reason = "the message says what each field is")]
#[non_exhaustive]
pub enum SmiError {
    /// There is a row, but no header above it.
    #[error("{position}: a row of the matrix without a header line above it")]
    NoHeader {
        /// The first row.
        position: Position,
    },
    /// A heading after the devices that `nvidia-smi` does not print, or prints only once.
    #[error("{position}: {word:?} is not a column of this matrix")]
    Heading {
        position: Position,
        /// The heading's first word.
        word: String,
    },
    /// More columns than any machine has devices.
    #[error("{position}: {count} columns are more than a machine has devices")]
    TooMany {
        position: Position,
        /// How many there are.
        count: usize,
    },
    /// A device has two columns or two rows.
    #[error("{position}: {name} stands here a second time")]
    Twice {
        /// The second one.
        position: Position,
        name: String,
    },
    /// A row without a column of its name.
    #[error("{position}: {name} has a row but no column")]
    NoColumn { position: Position, name: String },
    /// A GPU without a row.
    #[error("{position}: the matrix ends here, and {name} has no row")]
    NoRow {
        /// The last row.
        position: Position,
        name: String,
    },
    /// A row with too few cells.
    #[error("{position}: the row of {name} ends after {found} of {expected} cells")]
    Short {
        /// The end of the row.
        position: Position,
        name: String,
        /// Cells it has.
        found: usize,
        /// Columns of the header.
        expected: usize,
    },
    /// A cell that is not a link.
    #[error("{position}: {row} to {column}: {cause}")]
    Cell {
        position: Position,
        row: String,
        column: String,
        /// What is wrong with the cell.
        cause: LinkKindError,
    },
    /// `X` off the diagonal, or something else on it.
    #[error("{position}: {row} to {column} cannot be {kind}")]
    Diagonal {
        position: Position,
        row: String,
        column: String,
        /// What the cell contains.
        kind: LinkKind,
    },
    /// The two cells of a pair differ.
    #[error("{position}: {row} to {column} is {here} here and {there} the other way round")]
    Asymmetric {
        position: Position,
        row: String,
        column: String,
        /// What this cell contains.
        here: LinkKind,
        /// What the cell in the column's row contains.
        there: LinkKind,
    },
    /// More values after the links than headings.
    #[error("{position}: {value:?} has no column")]
    Extra { position: Position, value: String },
    /// A value after the links that is not a list of CPUs or NUMA nodes.
    #[error("{position}: {column}: {cause}")]
    List {
        position: Position,
        column: &'static str,
        /// What is wrong with it.
        cause: IdSetError,
    },
    /// A row has CPUs but no NUMA node, although others have both: two values ran together.
    #[error("{position}: {row} has no NUMA affinity beside its CPUs {cpus:?}, but other rows have")]
    Glued {
        /// The CPU list.
        position: Position,
        row: String,
        /// The CPU list as written.
        cpus: String,
    },
}

impl SmiError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        let words = match self {
            SmiError::Cell { cause, .. } if P2P_WORDS.contains(&cause.cell.as_str()) => {
                "this is the output of `nvidia-smi topo -p2p`; `nvidia-smi topo -m` is needed"
            }
            SmiError::NoHeader { .. } | SmiError::NoRow { .. } | SmiError::Short { .. } => {
                "a part of the output is missing; `nvidia-smi topo -m > FILE` keeps all of it"
            }
            SmiError::Heading { .. }
            | SmiError::NoColumn { .. }
            | SmiError::Cell { .. }
            | SmiError::Extra { .. }
            | SmiError::Diagonal { .. }
            | SmiError::Glued { .. } => {
                "copying from a terminal can join or drop cells; \
                 `nvidia-smi topo -m > FILE` keeps them apart"
            }
            _ => return None,
        };
        Some(words.to_owned())
    }
}

/// The states that `nvidia-smi topo -p2p` prints in place of links.
const P2P_WORDS: [&str; 6] = ["OK", "CNS", "GNS", "TNS", "NS", "DR"];

/// The cell of an unknown link.
const UNKNOWN: &str = "N/A";

fn place(line: usize, column: usize) -> Position {
    Position { line, column }
}

/// Whether a line of the text begins like a row or the header of the matrix.
pub(super) fn recognise(text: &str) -> bool {
    text.lines().any(|line| {
        let words = words(line);
        words.first().is_some_and(|first| is_gpu(first.text)) && words.len() > 1
    })
}

fn is_gpu(word: &str) -> bool {
    matches!(word.parse(), Ok(Device::Gpu(_)))
}

/// Whether a line's words are a row: a device, then a link.
fn is_row(words: &[Word<'_>]) -> bool {
    words.len() > 1 && {
        let cell = words[1].text;
        cell.parse::<LinkKind>().is_ok() || cell == UNKNOWN || P2P_WORDS.contains(&cell)
    }
}

/// The header: the devices in order, and the headings after them.
struct Header<'a> {
    devices: Vec<(&'a str, Device)>,
    by_name: BTreeMap<&'a str, usize>,
    headings: Vec<Heading>,
    /// Headings that are not known.
    unknown: Vec<String>,
}

struct Row {
    line: usize,
    /// The row's device, by position in the header.
    at: usize,
    /// The links, in the header's order; `None` for `N/A`.
    cells: Vec<Option<(LinkKind, usize)>>,
    affinity: Affinity,
}

pub(super) fn read(text: &str) -> Result<Topology, SmiError> {
    let lines = text.lines().map(|line| glued::parted(words(line)));
    let (lines, parted): (Vec<Vec<Word<'_>>>, Vec<usize>) = lines.unzip();
    let first = lines.iter().position(|line| is_row(line) && is_gpu(line[0].text));
    let first = first.unwrap_or(lines.len());
    let header_at = lines[..first].iter().rposition(|line| !line.is_empty());
    let no_header = || {
        let column = lines.get(first).and_then(|line| line.first()).map_or(1, |word| word.column);
        SmiError::NoHeader { position: place(first + 1, column) }
    };
    let header_at = header_at.ok_or_else(no_header)?;
    let header = header(&lines[header_at], header_at + 1)?.ok_or_else(no_header)?;
    let (rows, end) = rows(&header, &lines, first)?;
    let mut topology = devices(&header, &rows, end)?;
    topology.links = links(&header, &rows)?;
    name_nics(&mut topology, &lines[end..]);
    notes(&mut topology, &header, &rows, &lines[end..]);
    let parted: usize = parted[header_at..end].iter().sum();
    if parted > 0 {
        let words = if parted == 1 { "word was" } else { "words were" };
        let text = format!("{parted} {words} parted into the cells that had run together there");
        topology.notes.push(Note::new("links", text));
    }
    Ok(topology)
}

/// Reads the header line; `None` when it is another line.
fn header<'a>(line: &[Word<'a>], number: usize) -> Result<Option<Header<'a>>, SmiError> {
    // A table that people draw of the matrix has a word in its corner.
    let line = match line {
        [corner, rest @ ..]
            if corner.text == "GPU" && rest.first().is_some_and(|name| is_gpu(name.text)) =>
        {
            rest
        }
        whole => whole,
    };
    let heading = |word: &Word<'_>| matches!(word.text, "CPU" | "NUMA" | "GPU" | "Affinity");
    let count = line.iter().position(heading).unwrap_or(line.len());
    let (names, rest) = line.split_at(count);
    if !names.iter().any(|name| is_gpu(name.text)) {
        return Ok(None);
    }
    if count > DEVICE_LIMIT {
        return Err(SmiError::TooMany { position: place(number, names[0].column), count });
    }
    let mut devices = Vec::new();
    let mut by_name = BTreeMap::new();
    let mut nics = 0;
    for (at, name) in names.iter().enumerate() {
        let device = match name.text.parse() {
            Ok(gpu @ Device::Gpu(_)) => gpu,
            _ => {
                nics += 1;
                Device::Nic(nics - 1)
            }
        };
        if by_name.insert(name.text, at).is_some() {
            let position = place(number, name.column);
            return Err(SmiError::Twice { position, name: name.text.to_owned() });
        }
        devices.push((name.text, device));
    }
    let (headings, unknown) = affinity::headings(rest, number)?;
    Ok(Some(Header { devices, by_name, headings, unknown }))
}

/// Reads the rows from the first one on; also returns the line at which they end.
fn rows(
    header: &Header<'_>,
    lines: &[Vec<Word<'_>>],
    first: usize,
) -> Result<(Vec<Row>, usize), SmiError> {
    let mut rows: Vec<Row> = Vec::new();
    let mut seen = vec![false; header.devices.len()];
    let mut end = first;
    for (at, line) in lines.iter().enumerate().skip(first) {
        if line.is_empty() && rows.len() < header.devices.len() {
            continue;
        }
        let complete = rows.len() == header.devices.len();
        let named = |name: &Word<'_>| !complete && header.by_name.contains_key(name.text);
        if !line.first().is_some_and(|name| is_row(line) || named(name)) {
            break;
        }
        let row = row(header, line, at + 1)?;
        if std::mem::replace(&mut seen[row.at], true) {
            let position = place(at + 1, line[0].column);
            return Err(SmiError::Twice { position, name: line[0].text.to_owned() });
        }
        rows.push(row);
        end = at + 1;
    }
    Ok((rows, end))
}

fn row(header: &Header<'_>, line: &[Word<'_>], number: usize) -> Result<Row, SmiError> {
    let name = line[0];
    let Some(&at) = header.by_name.get(name.text) else {
        let position = place(number, name.column);
        return Err(SmiError::NoColumn { position, name: name.text.to_owned() });
    };
    let expected = header.devices.len();
    let mut cells = Vec::with_capacity(expected);
    for ((column, (other, _)), word) in header.devices.iter().enumerate().zip(&line[1..]) {
        let position = place(number, word.column);
        let (row, other) = (|| name.text.to_owned(), || (*other).to_owned());
        if word.text == UNKNOWN && column != at {
            cells.push(None);
            continue;
        }
        let kind: LinkKind = word.text.parse().map_err(|cause| SmiError::Cell {
            position,
            row: row(),
            column: other(),
            cause,
        })?;
        if (kind == LinkKind::X) != (column == at) {
            return Err(SmiError::Diagonal { position, row: row(), column: other(), kind });
        }
        cells.push(Some((kind, word.column)));
    }
    if cells.len() < expected {
        let last = line[line.len() - 1];
        let position = place(number, last.column + last.text.chars().count());
        let name = name.text.to_owned();
        return Err(SmiError::Short { position, name, found: cells.len(), expected });
    }
    let affinity = affinity::read(&line[expected + 1..], &header.headings, number)?;
    Ok(Row { line: number, at, cells, affinity })
}

/// The devices of the header, with the values that their rows have after the links.
fn devices(header: &Header<'_>, rows: &[Row], end: usize) -> Result<Topology, SmiError> {
    let row_of: BTreeMap<usize, &Row> = rows.iter().map(|row| (row.at, row)).collect();
    let numa_known = rows.iter().any(|row| row.affinity.numa.is_some());
    let mut topology = Topology {
        version: VERSION,
        source: Some("nvidia-smi topo -m".to_owned()),
        ..Topology::default()
    };
    for (at, (name, device)) in header.devices.iter().enumerate() {
        let row = row_of.get(&at);
        let one = |nodes: &crate::cpuset::NodeSet| (nodes.len() == 1).then(|| nodes.first());
        match device {
            Device::Gpu(index) => {
                let missing =
                    || SmiError::NoRow { position: place(end, 1), name: (*name).to_owned() };
                let row = row.ok_or_else(missing)?;
                whole(row, name, numa_known)?;
                topology.gpus.push(gpu(*index, &row.affinity));
            }
            Device::Nic(_) => {
                let numa = row.and_then(|row| row.affinity.numa.as_ref()).and_then(one).flatten();
                let numa = numa.map(NumaId);
                topology.nics.push(Nic { name: (*name).to_owned(), numa, ..Nic::default() });
            }
        }
    }
    topology.gpus.sort_by_key(|gpu| gpu.index);
    Ok(topology)
}

/// Refuses a row whose NUMA node seems to have run into its CPU list.
fn whole(row: &Row, name: &str, numa_known: bool) -> Result<(), SmiError> {
    let Affinity { cpus, cpus_text, column, numa, gap, .. } = &row.affinity;
    if numa_known && *gap && cpus.is_some() && numa.is_none() {
        return Err(SmiError::Glued {
            position: place(row.line, *column),
            row: name.to_owned(),
            cpus: cpus_text.clone(),
        });
    }
    Ok(())
}

fn gpu(index: GpuIndex, affinity: &Affinity) -> Gpu {
    let several = affinity.numa.as_ref().filter(|nodes| nodes.len() > 1);
    let one = affinity.numa.as_ref().filter(|nodes| nodes.len() == 1);
    Gpu {
        index,
        cpus: affinity.cpus.clone(),
        numa: one.and_then(|nodes| nodes.first()).map(NumaId),
        numa_set: several.cloned(),
        memory_numa: affinity.gpu_numa,
        ..Gpu::default()
    }
}

fn links(header: &Header<'_>, rows: &[Row]) -> Result<Links, SmiError> {
    let mut links = Links::default();
    for row in rows {
        let (name, device) = header.devices[row.at];
        for ((other, column), cell) in header.devices.iter().zip(&row.cells) {
            let Some((kind, at)) = cell else { continue };
            if let Some(there) = links.set(device, *column, *kind).filter(|before| before != kind) {
                return Err(SmiError::Asymmetric {
                    position: place(row.line, *at),
                    row: name.to_owned(),
                    column: (*other).to_owned(),
                    here: *kind,
                    there,
                });
            }
        }
    }
    Ok(links)
}

/// Names the NICs as in the legend, wherever it is below the matrix.
fn name_nics(topology: &mut Topology, below: &[Vec<Word<'_>>]) {
    let mut legend: BTreeMap<&str, &str> = BTreeMap::new();
    for pair in below.iter().flat_map(|line| line.windows(2)) {
        if let Some(column) = pair[0].text.strip_suffix(':')
            && matches!(column.parse(), Ok(Device::Nic(_)))
        {
            legend.entry(column).or_insert(pair[1].text);
        }
    }
    let mut taken: BTreeSet<String> = topology.nics.iter().map(|nic| nic.name.clone()).collect();
    let mut nameless: Vec<&str> = Vec::new();
    for nic in &mut topology.nics {
        match legend.get(nic.name.as_str()) {
            Some(name) if taken.insert((*name).to_owned()) => nic.name = (*name).to_owned(),
            Some(name) if nic.name != *name => topology.notes.push(Note::new(
                &nic.name,
                format!("the legend calls it {name}, which is another's name, too"),
            )),
            Some(_) => {}
            None if matches!(nic.name.parse(), Ok(Device::Nic(_))) => nameless.push(&nic.name),
            None => {}
        }
    }
    if !nameless.is_empty() {
        let text = format!("no legend says which devices {} are", nameless.join(", "));
        topology.notes.push(Note::new("nics", text));
    }
}

/// Notes what the text omits.
fn notes(topology: &mut Topology, header: &Header<'_>, rows: &[Row], below: &[Vec<Word<'_>>]) {
    let mut notes = Vec::new();
    for row in rows {
        if is_cut(&row.affinity) {
            let text = format!(
                "its CPU list {} looks cut off by nvidia-smi; there may be more CPUs near it",
                row.affinity.cpus_text
            );
            notes.push(Note::new(header.devices[row.at].0, text));
        }
    }
    for heading in &header.unknown {
        notes.push(Note::new("columns", format!("{heading:?} is not known here; it is left out")));
    }
    let rowless = |(at, _): &(usize, &(&str, Device))| rows.iter().all(|row| row.at != *at);
    let rowless: Vec<&str> =
        header.devices.iter().enumerate().filter(rowless).map(|(_, (name, _))| *name).collect();
    if !rowless.is_empty() {
        let text = format!("{} have no rows; links between them are unknown", rowless.join(", "));
        notes.push(Note::new("nics", text));
    }
    let legend = |word: &str| below.iter().flatten().any(|other| other.text == word);
    if legend("PIX") && legend("SYS") && !legend("NV#") {
        topology.nvlinks_untold = true;
        let text = "the legend does not mention NVLink, as with `topo -mp`; there may be some";
        notes.push(Note::new("links", text));
    }
    topology.notes.extend(notes);
}

/// Whether a CPU list looks as old versions of `nvidia-smi` leave it when their 13-byte buffer is
/// full: single CPUs, evenly spaced.
fn is_cut(affinity: &Affinity) -> bool {
    let ids: Vec<u32> = affinity.cpus.iter().flat_map(|cpus| cpus.iter()).collect();
    let steps: BTreeSet<u32> = ids.windows(2).map(|pair| pair[1] - pair[0]).collect();
    (10..=13).contains(&affinity.cpus_text.len())
        && !affinity.cpus_text.contains('-')
        && steps.len() == 1
        && !steps.contains(&1)
}
