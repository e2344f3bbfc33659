//! The logs of a cluster's processes as one, for a page: pages of lines in either direction from
//! any line, by text and by level; a whole line; all of them as a file.
//!
//! The page keeps no state here: it says what it has by a cursor, which has a place in each log.
//!
//! *Invariant:* an answer takes bounded time, memory and bytes, whatever the logs hold; secrets are
//! masked, and searched as they are shown.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::os::log_pages::{
    Direction, Found, Merged, NoPlace, Pages, Place, Stamp, Start, place_of, unfinished,
};
use crate::os::run_directory::Paths;
use crate::text::{LogLevel, masked_line, without_escapes};

/// Most lines of an answer.
const LINES: usize = 150;

/// Most bytes of an answer's texts; one line more may be in it.
const BYTES: usize = 256 << 10;

/// Most bytes of a line in an answer.
const LINE_BYTES: usize = 4 << 10;

/// Longest search for one answer; the page asks for the next part.
const PATIENCE: Duration = Duration::from_millis(300);

/// Bytes that are read between two looks at the clock; a line counts for a few more than it has.
const LOOK: usize = 256 << 10;
const EXTRA: usize = 64;

/// A place in each of several logs.
pub(super) type Cursor = BTreeMap<String, Place>;

/// Reads a cursor: `gpu0:0:1234,gpu1:2:0`.
pub(super) fn cursor(text: &str) -> Result<Cursor, NoPlace> {
    let one = |word: &str| {
        let (process, place) = word.split_once(':').ok_or(NoPlace { text: word.to_owned() })?;
        Ok((process.to_owned(), place.parse()?))
    };
    text.split(',').filter(|word| !word.is_empty()).map(one).collect()
}

/// What lines are asked for.
#[derive(Clone, Debug, Default)]
pub(super) struct Filter {
    text: Option<String>,
    level: Option<LogLevel>,
}

impl Filter {
    /// Lines with this text, however its letters are written, and of this level or a higher one. An
    /// empty text is in all lines.
    pub(super) fn new(text: Option<&str>, level: Option<LogLevel>) -> Self {
        let text = text.filter(|text| !text.is_empty()).map(str::to_lowercase);
        Self { text, level }
    }

    /// Whether the text may be in a line, which costs little to find out.
    fn may_be_in(&self, line: &[u8]) -> bool {
        let Some(wanted) = &self.text else { return true };
        // What is shown differs from what is written: by masks and colours.
        let differs = !wanted.is_ascii() || wanted.contains('*') || line.contains(&0x1b);
        differs || contains_ignoring_case(line, wanted.as_bytes())
    }

    fn has_text(&self, shown: &str) -> bool {
        self.text.as_ref().is_none_or(|text| shown.to_lowercase().contains(text))
    }

    /// Lines without a level say what happens.
    fn has_level(&self, level: Option<LogLevel>) -> bool {
        self.level.is_none_or(|least| level.unwrap_or(LogLevel::Info) >= least)
    }
}

fn contains_ignoring_case(line: &[u8], lower: &[u8]) -> bool {
    let Some((first, rest)) = lower.split_first() else { return true };
    let last = line.len().saturating_sub(rest.len());
    let begins = |at: &usize| {
        line[*at].to_ascii_lowercase() == *first
            && line[at + 1..at + 1 + rest.len()].eq_ignore_ascii_case(rest)
    };
    (0..last).any(|at| begins(&at))
}

/// A line as a page shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Shown {
    process: String,
    place: String,
    at: String,
    level: Option<String>,
    text: String,
    /// Bytes that are not shown.
    more: u64,
}

/// What is shown of a line's text: masked, without colours, at most this many bytes; and how many
/// are missing.
fn shown(text: &[u8], cut: u64, most: usize) -> (String, u64) {
    // Cut before it is masked, which takes time: a secret comes after its name.
    let kept = &text[..text.len().min(most)];
    let more = (text.len() - kept.len()) as u64 + cut;
    (masked_line(&without_escapes(&String::from_utf8_lossy(kept))), more)
}

/// What a page is told.
#[derive(Debug, Default, Serialize)]
pub(super) struct Lines {
    /// All processes that have logs.
    processes: Vec<String>,
    /// Oldest first.
    lines: Vec<Shown>,
    /// The lines that are being written, if these are the last ones.
    unfinished: Vec<Shown>,
    /// Where what comes before these begins to be older.
    top: BTreeMap<String, String>,
    /// Where what comes after these begins.
    bottom: BTreeMap<String, String>,
    /// Whether there are no more in the direction that was asked for.
    done: bool,
    /// Up to which line was searched, if the time was over before the answer was full.
    searched_to: Option<String>,
    /// Processes of whose output a part is missing.
    missing: Vec<String>,
}

/// Where an answer begins.
#[derive(Clone, Debug)]
pub(super) enum Begin {
    /// At the newest lines.
    End,
    /// Before these places.
    Before(Cursor),
    /// At these places; a process without one is new.
    After(Cursor),
    /// At a line, with what came at that time in other logs.
    Line(String, Place),
}

/// What is asked for.
#[derive(Clone, Debug)]
pub(super) struct Ask {
    /// All if it is empty.
    pub(super) processes: BTreeSet<String>,
    pub(super) filter: Filter,
    pub(super) from: Begin,
}

/// Reads one answer. Blocks.
///
/// # Errors
/// If a log can't be read.
pub(super) fn look(paths: &Paths, ask: &Ask) -> io::Result<Lines> {
    let processes = crate::cluster::logged(paths)?;
    let is_wanted = |name: &&String| ask.processes.is_empty() || ask.processes.contains(*name);
    let wanted: Vec<String> = processes.iter().filter(is_wanted).cloned().collect();
    let direction = match ask.from {
        Begin::End | Begin::Before(_) => Direction::Back,
        Begin::After(_) | Begin::Line(..) => Direction::Forth,
    };
    let time = match &ask.from {
        // The word of a request becomes part of a path.
        Begin::Line(process, place) if processes.contains(process) => {
            time_of(&paths.log(process), *place)?
        }
        _ => None,
    };
    let open = |process: String| {
        let path = paths.log(&process);
        let start = match &ask.from {
            Begin::End => Start::End,
            Begin::Before(cursor) | Begin::After(cursor) => {
                Start::At(cursor.get(&process).copied().unwrap_or_default())
            }
            Begin::Line(own, place) if *own == process => Start::At(*place),
            Begin::Line(..) => {
                Start::At(time.map_or(Ok(Place::default()), |t| place_of(&path, t))?)
            }
        };
        Ok((process, Pages::open(&path, start, direction)?))
    };
    let logs: io::Result<Vec<_>> = wanted.iter().cloned().map(open).collect();
    let mut merged = Merged::new(logs?, direction)?;
    let places = |merged: &Merged| -> BTreeMap<String, String> {
        merged.boundaries().map(|(name, place)| (name.to_owned(), place.to_string())).collect()
    };
    let begin = places(&merged);
    let mut told = Lines { processes, ..Lines::default() };
    gather(&mut merged, &ask.filter, &mut told)?;
    told.missing = merged.missing().map(str::to_owned).collect();
    let end = places(&merged);
    (told.top, told.bottom) = match direction {
        Direction::Back => {
            told.lines.reverse();
            (end, begin)
        }
        Direction::Forth => (begin, end),
    };
    if matches!(ask.from, Begin::End) || (direction == Direction::Forth && told.done) {
        told.unfinished = being_written(paths, &wanted, &ask.filter)?;
    }
    Ok(told)
}

/// When a line arrived.
fn time_of(log: &Path, place: Place) -> io::Result<Option<Stamp>> {
    let mut pages = Pages::open(log, Start::At(place), Direction::Forth)?;
    Ok(pages.line()?.map(|line| line.stamp))
}

/// Takes lines until the answer is full, the time is over or there are no more.
fn gather(merged: &mut Merged, filter: &Filter, told: &mut Lines) -> io::Result<()> {
    let began = Instant::now();
    let (mut bytes, mut read) = (0, 0);
    while let Some((process, pages)) = merged.peek() {
        if told.lines.len() >= LINES || bytes > BYTES {
            return Ok(());
        }
        let Some(line) = pages.line()? else { break };
        read += line.text.len() + EXTRA;
        if read > LOOK {
            read = 0;
            if began.elapsed() > PATIENCE {
                told.searched_to = Some(line.stamp.as_str().to_owned());
                return Ok(());
            }
        }
        if let Some(line) = wanted(process, pages, filter)? {
            bytes += line.text.len();
            told.lines.push(line);
        }
        merged.pass()?;
    }
    told.done = true;
    Ok(())
}

/// The line at which a log is, if it is asked for.
fn wanted(process: &str, pages: &mut Pages, filter: &Filter) -> io::Result<Option<Shown>> {
    if !pages.line()?.is_some_and(|line| filter.may_be_in(line.text)) {
        return Ok(None);
    }
    let level = pages.level()?;
    let Some(line) = pages.line()?.filter(|_| filter.has_level(level)) else { return Ok(None) };
    Ok(as_shown(process, &line, level, filter))
}

fn as_shown(
    process: &str,
    line: &Found<'_>,
    level: Option<LogLevel>,
    filter: &Filter,
) -> Option<Shown> {
    let (text, more) = shown(line.text, line.cut, LINE_BYTES);
    // Beyond what is shown, too.
    let is_there = filter.has_text(&text)
        || (more > line.cut && filter.has_text(&shown(line.text, 0, line.text.len()).0));
    is_there.then(|| Shown {
        process: process.to_owned(),
        place: line.place.to_string(),
        at: line.stamp.as_str().to_owned(),
        level: level.map(|level| level.to_string()),
        text,
        more,
    })
}

/// The lines without an end.
fn being_written(paths: &Paths, processes: &[String], filter: &Filter) -> io::Result<Vec<Shown>> {
    let mut lines = Vec::new();
    for process in processes {
        let Some((stamp, text, cut)) = unfinished(&paths.log(process))? else { continue };
        let level = LogLevel::of(&text);
        let line = Found { place: Place::default(), stamp, text: &text, cut };
        let shown = as_shown(process, &line, level, filter);
        lines.extend(shown.filter(|_| filter.has_level(level)));
    }
    Ok(lines)
}

/// A whole line, up to its first MiB; `None` if there is none at this place. Blocks.
///
/// # Errors
/// If the log can't be read.
pub(super) fn whole(log: &Path, place: Place) -> io::Result<Option<(String, u64)>> {
    let mut pages = Pages::open(log, Start::At(place), Direction::Forth)?;
    let line = pages.line()?.filter(|line| line.place == place);
    Ok(line.map(|line| shown(line.text, line.cut, line.text.len())))
}

/// All lines of these processes as text, piece by piece, until nobody takes them. Those of several
/// have the process's name. Blocks.
///
/// # Errors
/// If a log can't be read.
pub(super) fn pour(
    paths: &Paths,
    processes: &[String],
    mut take: impl FnMut(Vec<u8>) -> bool,
) -> io::Result<()> {
    let open = |process: &String| {
        let start = Start::At(Place::default());
        Ok((process.clone(), Pages::open(&paths.log(process), start, Direction::Forth)?))
    };
    let logs: io::Result<Vec<_>> = processes.iter().map(open).collect();
    let mut merged = Merged::new(logs?, Direction::Forth)?;
    let mut piece = Vec::new();
    while let Some((process, pages)) = merged.peek() {
        if let Some(line) = pages.line()? {
            piece.extend_from_slice(line.stamp.as_str().as_bytes());
            if processes.len() > 1 {
                piece.extend_from_slice(format!(" {process}").as_bytes());
            }
            piece.push(b' ');
            append_masked(&mut piece, line.text);
            if line.cut > 0 {
                piece.extend_from_slice(format!("… ({} more bytes)", line.cut).as_bytes());
            }
            piece.push(b'\n');
        }
        if piece.len() > BYTES && !take(std::mem::take(&mut piece)) {
            return Ok(());
        }
        merged.pass()?;
    }
    take(piece);
    Ok(())
}

/// The bytes as they are, unless something has to be masked.
fn append_masked(out: &mut Vec<u8>, text: &[u8]) {
    let words = String::from_utf8_lossy(text);
    let masked = masked_line(&words);
    out.extend_from_slice(if *masked == *words { text } else { masked.as_bytes() });
}

#[cfg(test)]
mod tests;
