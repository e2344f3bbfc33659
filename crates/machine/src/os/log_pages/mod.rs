//! Pages through a log, its rotated files included, in either direction and from any place.
//!
//! [`LogReader`](super::log_file::LogReader) returns all lines at once; here memory is bounded,
//! whatever the log holds: it is read in windows, and of a line its first MiB.
//!
//! *Invariant:* the lines before a place and those from it on are all of the log's lines, each once
//! and in order, also while lines are added and files rotated; only what a rotation has removed is
//! missing, and that is said.

mod merge;
mod window;

use std::fmt;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::SystemTime;

use cuda_cluster_model::text::LogLevel;

use super::log_file::aged;
pub use merge::Merged;
use window::{Part, Window};

/// Most bytes of a line that are read; a longer one says how much is missing.
pub const LONGEST: usize = 1 << 20;

/// Where a line of a log begins: the number of the file, and the byte in it. A rotation changes
/// neither.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// The number of the file, from 0.
    pub part: u64,
    /// The byte in the file.
    pub offset: u64,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.part, self.offset)
    }
}

/// A text that is no [`Place`].
#[derive(Debug, thiserror::Error)]
#[error("{text:?} is no place in a log, such as 0:1234")]
pub struct NoPlace {
    /// The text.
    pub text: String,
}

impl FromStr for Place {
    type Err = NoPlace;

    fn from_str(text: &str) -> Result<Self, NoPlace> {
        let numbers = text.split_once(':').and_then(|(part, offset)| {
            Some(Self { part: part.parse().ok()?, offset: offset.parse().ok()? })
        });
        numbers.ok_or_else(|| NoPlace { text: text.to_owned() })
    }
}

/// When the first byte of a line arrived, as the log has it; ordered as the times are.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stamp([u8; 24]);

impl Stamp {
    /// Length in a log, with the space after it.
    pub(super) const LENGTH: usize = 25;

    /// The stamp that a stored line begins with.
    pub(super) fn of(line: &[u8]) -> Option<Self> {
        let (stamp, rest) = line.split_first_chunk::<24>()?;
        let shape = b"0000-00-00T00:00:00.000Z".iter().zip(stamp);
        let fits = |(shape, byte): (&u8, &u8)| match shape {
            b'0' => byte.is_ascii_digit(),
            _ => shape == byte,
        };
        let is_stamp = rest.first() == Some(&b' ') && { shape }.all(fits);
        is_stamp.then_some(Self(*stamp))
    }

    /// As text, in RFC 3339.
    pub fn as_str(&self) -> &str {
        // It was made of ASCII.
        std::str::from_utf8(&self.0).unwrap_or_default()
    }

    /// The time; `None` if there is no such day.
    pub fn time(&self) -> Option<SystemTime> {
        humantime::parse_rfc3339(self.as_str()).ok()
    }
}

impl fmt::Debug for Stamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A line of a log.
#[derive(Clone, Copy, Debug)]
pub struct Found<'a> {
    /// Where it is.
    pub place: Place,
    /// When its first byte arrived.
    pub stamp: Stamp,
    /// Its first bytes, without its line feed; at most [`LONGEST`].
    pub text: &'a [u8],
    /// Number of bytes that come after these.
    pub cut: u64,
}

/// In which direction a log is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the newest line to the oldest.
    Back,
    /// From the oldest to the newest.
    Forth,
}

/// Where reading begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// At the end of what is there.
    End,
    /// At a place: the lines that begin before it, or those that begin there and later.
    At(Place),
}

/// Reads one log line by line.
#[derive(Debug)]
pub struct Pages {
    path: PathBuf,
    direction: Direction,
    part: Option<Part>,
    /// Where in the part what is not in the window ends, or begins.
    edge: u64,
    window: Option<Window>,
    /// How many of the window's lines have been passed.
    passed: usize,
    /// Where those that go on from here begin.
    boundary: Place,
    misses: bool,
}

impl Pages {
    /// Opens the log at `path`. One that does not exist yet has no lines.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn open(path: &Path, start: Start, direction: Direction) -> io::Result<Self> {
        let (part, edge, misses) = match start {
            Start::End => {
                let part = older(path, u64::MAX)?;
                let end = part.as_ref().map_or(0, |part| part.end);
                (part, end, false)
            }
            Start::At(place) => begin(path, place, direction)?,
        };
        let boundary = match (&part, start) {
            (Some(part), _) => Place { part: part.number, offset: edge },
            (None, Start::At(place)) if direction == Direction::Forth => place,
            (None, _) => Place::default(),
        };
        let path = path.to_owned();
        Ok(Self { path, direction, part, edge, window: None, passed: 0, boundary, misses })
    }

    /// The next line in the direction.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn line(&mut self) -> io::Result<Option<Found<'_>>> {
        if !self.fill()? {
            return Ok(None);
        }
        let line = self.window.as_ref().and_then(|window| window.line(self.index(window)));
        Ok(line.map(|line| Found {
            place: line.place,
            stamp: line.stamp,
            text: line.text,
            cut: line.cut,
        }))
    }

    /// The level of the line: its own, or that of a line shortly before it.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn level(&mut self) -> io::Result<Option<LogLevel>> {
        if !self.fill()? {
            return Ok(None);
        }
        let Some((part, window)) = self.part.as_ref().zip(self.window.as_ref()) else {
            return Ok(None);
        };
        Ok(part.levels(window)?.get(self.index(window)).copied().flatten())
    }

    /// Goes on to the line after this one, in the direction.
    pub fn pass(&mut self) {
        let window = self.window.as_ref();
        if let Some(line) = window.and_then(|window| window.line(self.index(window))) {
            let end = Place { part: line.place.part, offset: line.end };
            self.boundary = if self.direction == Direction::Back { line.place } else { end };
            self.passed += 1;
        }
    }

    /// What parts the lines that have been passed from those that have not: the latter begin
    /// before it, or at it and later.
    pub fn boundary(&self) -> Place {
        self.boundary
    }

    /// Whether lines are missing, because a rotation has removed their file.
    pub fn misses(&self) -> bool {
        self.misses
    }

    /// Which line of the window comes next.
    fn index(&self, window: &Window) -> usize {
        match self.direction {
            Direction::Forth => self.passed,
            // One past the first is none.
            Direction::Back => window.len().wrapping_sub(self.passed + 1),
        }
    }

    /// Whether there is a line; reads the next window for it.
    fn fill(&mut self) -> io::Result<bool> {
        while self.window.as_ref().is_none_or(|window| self.passed >= window.len()) {
            let more = match self.direction {
                Direction::Back => self.back()?,
                Direction::Forth => self.forth()?,
            };
            if !more {
                return Ok(false);
            }
            self.passed = 0;
        }
        Ok(true)
    }

    fn back(&mut self) -> io::Result<bool> {
        let Some(part) = &self.part else { return Ok(false) };
        if self.edge > 0 {
            let window = part.window_before(self.edge)?;
            self.edge = window.base;
            self.window = Some(window);
            return Ok(true);
        }
        let number = part.number;
        let before = older(&self.path, number)?;
        self.misses |= number > before.as_ref().map_or(0, |before| before.number + 1);
        let Some(before) = before else { return Ok(false) };
        (self.edge, self.window) = (before.end, None);
        self.part = Some(before);
        Ok(true)
    }

    fn forth(&mut self) -> io::Result<bool> {
        let after = match &mut self.part {
            Some(part) if self.edge < part.end => {
                let window = part.window_after(self.edge)?;
                self.edge = window.end;
                self.window = Some(window);
                return Ok(true);
            }
            Some(part) => {
                let after = newer(&self.path, part.number)?;
                // Nothing more is written to a file that has a successor, but much may have been.
                part.is_current &= after.is_none();
                part.measure()?;
                if self.edge < part.end {
                    return Ok(true);
                }
                self.misses |= after.as_ref().is_some_and(|after| after.number > part.number + 1);
                after
            }
            None => None,
        };
        let Some(after) = after else { return Ok(false) };
        (self.edge, self.window) = (0, None);
        self.boundary = Place { part: after.number, offset: 0 };
        self.part = Some(after);
        Ok(true)
    }
}

/// The line that a log's process is writing, which has no end yet: its time and its beginning.
///
/// # Errors
/// If the file cannot be read.
pub fn unfinished(path: &Path) -> io::Result<Option<(Stamp, Vec<u8>, u64)>> {
    let Some(part) = older(path, u64::MAX)?.filter(|part| part.is_current) else {
        return Ok(None);
    };
    let window = part.unfinished()?;
    Ok(window.line(0).map(|line| {
        let cut = window.end - window.base - (Stamp::LENGTH + line.text.len()) as u64;
        (line.stamp, line.text.to_vec(), cut)
    }))
}

/// Where the first line begins that arrived at this time or later, in a log whose clock was not
/// set back.
///
/// # Errors
/// If a file cannot be read.
pub fn place_of(path: &Path, time: Stamp) -> io::Result<Place> {
    let first = |part: &Part, from: u64| -> io::Result<Option<Stamp>> {
        let window = if from < part.end { Some(part.window_after(from)?) } else { None };
        Ok(window.and_then(|window| window.line(0).map(|line| line.stamp)))
    };
    let mut later = u64::MAX;
    let part = loop {
        let Some(part) = older(path, later)? else { return Ok(Place::default()) };
        if first(&part, 0)?.is_some_and(|stamp| stamp < time) {
            break part;
        }
        later = part.number;
    };
    // All lines before `low` came earlier.
    let (mut low, mut high) = (0, part.end);
    while high - low > 64 << 10 {
        let middle = low + (high - low) / 2;
        let start = part.next_start(middle)?;
        if start < high && first(&part, start)?.is_some_and(|stamp| stamp < time) {
            low = start;
        } else {
            high = middle;
        }
    }
    let start = Start::At(Place { part: part.number, offset: low });
    let mut pages = Pages::open(path, start, Direction::Forth)?;
    while pages.line()?.is_some_and(|line| line.stamp < time) {
        pages.pass();
    }
    Ok(pages.boundary())
}

/// The part with a place, where in it the lines are parted there, and whether the part is gone.
fn begin(path: &Path, place: Place, to: Direction) -> io::Result<(Option<Part>, u64, bool)> {
    let Place { part: number, offset } = place;
    let found = older(path, number.saturating_add(1))?;
    match (found, to) {
        (Some(part), _) if part.number == number => {
            let edge = part.next_start(offset.min(part.end))?;
            Ok((Some(part), edge, false))
        }
        (Some(part), Direction::Back) => {
            let end = part.end;
            Ok((Some(part), end, false))
        }
        (None, Direction::Back) => Ok((None, 0, false)),
        (_, Direction::Forth) => {
            let part = newer(path, number)?;
            let misses = part.is_some();
            Ok((part, 0, misses))
        }
    }
}

/// The files of a log, newest first. One that is rotated meanwhile comes twice.
fn parts(path: &Path) -> impl Iterator<Item = io::Result<Part>> {
    let open = |age: u32| {
        let path = if age == 0 { path.to_owned() } else { aged(path, age) };
        match File::open(path) {
            Ok(file) => Some(Part::new(file, age == 0)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => Some(Err(error)),
        }
    };
    // Between two steps of a rotation, there is no current file.
    let current = open(0);
    current.into_iter().chain((1..).map_while(open))
}

/// The newest file before that of a number.
fn older(path: &Path, number: u64) -> io::Result<Option<Part>> {
    let fits = |part: &io::Result<Part>| part.as_ref().map_or(true, |part| part.number < number);
    parts(path).find(fits).transpose()
}

/// The oldest file after that of a number.
fn newer(path: &Path, number: u64) -> io::Result<Option<Part>> {
    let mut found = None;
    for part in parts(path) {
        let part = part?;
        if part.number <= number {
            break;
        }
        found = Some(part);
    }
    Ok(found)
}

#[cfg(test)]
mod tests;
