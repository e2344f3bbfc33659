//! A few lines of one file of a log, and where they are in it.
//!
//! *Invariant:* a window's size is bounded, whatever the file holds; its edges are where lines
//! begin.

use std::cell::OnceCell;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::{Duration, SystemTime};

use cuda_cluster_model::text::LogLevel;
use memchr::{memchr, memchr_iter, memrchr};

use super::super::log_file::part_of;
use super::{LONGEST, Place, Stamp};

/// Most bytes of a window, unless it is a single line.
const WINDOW: u64 = 128 << 10;

/// Bytes of a block in which the end of a line is looked for.
const BLOCK: u64 = 64 << 10;

/// How far before a line without a level the line may begin whose level it has, and how much
/// earlier it may have come: a traceback is written at once.
const REACH: u64 = 16 << 10;
const SPELL: Duration = Duration::from_secs(1);

/// A file of a log.
#[derive(Debug)]
pub(super) struct Part {
    file: File,
    pub(super) number: u64,
    /// Where its last line ends.
    pub(super) end: u64,
    /// Whether lines may still be added.
    pub(super) is_current: bool,
}

impl Part {
    pub(super) fn new(file: File, is_current: bool) -> io::Result<Self> {
        let mut begin = [0; 64];
        let length = file.read_at(&mut begin, 0)?;
        let number = part_of(&begin[..length]);
        let mut part = Self { file, number, end: 0, is_current };
        part.measure()?;
        Ok(part)
    }

    /// Looks again where its last line ends. A line without an end counts only in a file that is
    /// not written any more.
    pub(super) fn measure(&mut self) -> io::Result<()> {
        let length = self.file.metadata()?.len();
        self.end = if self.is_current { self.line_start(length)? } else { length };
        Ok(())
    }

    /// The bytes of a range, or as many as there are.
    fn read(&self, from: u64, to: u64) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(to.saturating_sub(from)).unwrap_or(0)];
        let mut filled = 0;
        while filled < bytes.len() {
            match self.file.read_at(&mut bytes[filled..], from + filled as u64) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        bytes.truncate(filled);
        Ok(bytes)
    }

    /// Where the line begins that the byte before `place` belongs to, or ends before it.
    fn line_start(&self, place: u64) -> io::Result<u64> {
        let mut to = place;
        while to > 0 {
            let from = to.saturating_sub(BLOCK);
            let bytes = self.read(from, to)?;
            if let Some(at) = memrchr(b'\n', &bytes) {
                return Ok(from + at as u64 + 1);
            }
            to = from;
        }
        Ok(0)
    }

    /// Where the first line begins at `place` or after it; the end of the lines if none does.
    pub(super) fn next_start(&self, place: u64) -> io::Result<u64> {
        if place == 0 {
            return Ok(0);
        }
        let mut from = place - 1;
        while from < self.end {
            let bytes = self.read(from, self.end.min(from + BLOCK))?;
            if let Some(at) = memchr(b'\n', &bytes) {
                return Ok((from + at as u64 + 1).min(self.end));
            }
            if bytes.is_empty() {
                break;
            }
            from += bytes.len() as u64;
        }
        Ok(self.end)
    }

    /// The lines that end at `end`, where a line begins or the last one ends.
    pub(super) fn window_before(&self, end: u64) -> io::Result<Window> {
        let from = end.saturating_sub(WINDOW);
        let mut bytes = self.read(from, end)?;
        if from == 0 {
            return Ok(Window::new(self.number, 0, bytes, end));
        }
        // The last byte is the end of the last line.
        let whole = &bytes[..bytes.len().saturating_sub(1)];
        match memchr(b'\n', whole) {
            Some(at) => {
                let lines = bytes.split_off(at + 1);
                Ok(Window::new(self.number, from + at as u64 + 1, lines, end))
            }
            None => self.single(self.line_start(from)?, end),
        }
    }

    /// The lines that begin at `from`, where a line begins that is not the end.
    pub(super) fn window_after(&self, from: u64) -> io::Result<Window> {
        let to = self.end.min(from + WINDOW);
        let mut bytes = self.read(from, to)?;
        if to == self.end {
            return Ok(Window::new(self.number, from, bytes, to));
        }
        match memrchr(b'\n', &bytes) {
            Some(at) => {
                bytes.truncate(at + 1);
                let end = from + bytes.len() as u64;
                Ok(Window::new(self.number, from, bytes, end))
            }
            None => self.single(from, self.next_start(to + 1)?),
        }
    }

    /// A line that is longer than a window.
    fn single(&self, from: u64, end: u64) -> io::Result<Window> {
        let bytes = self.read(from, end.min(from + (Stamp::LENGTH + LONGEST) as u64))?;
        let mut window = Window::new(self.number, from, bytes, end);
        let cut = end - from - window.bytes.len() as u64;
        if let Some(line) = window.lines.first_mut() {
            // With its line feed, if it has one.
            let feed = cut > 0 && self.read(end - 1, end)? == b"\n";
            line.cut = cut - u64::from(feed);
        }
        Ok(window)
    }

    /// The lines shortly before a window, which may tell the level of its first ones.
    fn context_of(&self, window: &Window) -> io::Result<Window> {
        let from = self.next_start(window.base.saturating_sub(REACH))?.min(window.base);
        let bytes = self.read(from, window.base)?;
        Ok(Window::new(self.number, from, bytes, window.base))
    }

    /// The levels of a window's lines.
    pub(super) fn levels<'a>(&self, window: &'a Window) -> io::Result<&'a [Option<LogLevel>]> {
        if let Some(levels) = window.levels.get() {
            return Ok(levels);
        }
        let context = self.context_of(window)?;
        let mut told = None;
        for line in &context.lines {
            context.level(line, &mut told);
        }
        let levels = window.lines.iter().map(|line| window.level(line, &mut told)).collect();
        Ok(window.levels.get_or_init(|| levels))
    }

    /// The line that is being written, if any: its beginning.
    pub(super) fn unfinished(&self) -> io::Result<Window> {
        let mut length = self.file.metadata()?.len().max(self.end);
        let mut bytes = self.read(self.end, length.min(self.end + WINDOW))?;
        // Lines that were added meanwhile are told with the next ones.
        if let Some(at) = memchr(b'\n', &bytes) {
            bytes.truncate(at);
            length = self.end + at as u64;
        }
        Ok(Window::new(self.number, self.end, bytes, length))
    }
}

/// Lines of a file that follow each other.
#[derive(Debug)]
pub(super) struct Window {
    part: u64,
    /// Where the first line begins.
    pub(super) base: u64,
    /// Where the last line ends.
    pub(super) end: u64,
    bytes: Vec<u8>,
    lines: Vec<Span>,
    levels: OnceCell<Vec<Option<LogLevel>>>,
}

/// A line in a window's bytes.
#[derive(Clone, Copy, Debug)]
struct Span {
    from: usize,
    to: usize,
    stamp: Stamp,
    /// Bytes of it that are not in the window.
    cut: u64,
}

/// The last line that told its level.
struct Told {
    at: u64,
    stamp: Stamp,
    level: LogLevel,
}

/// A line of a window.
#[derive(Clone, Copy, Debug)]
pub(super) struct InWindow<'a> {
    pub(super) place: Place,
    pub(super) end: u64,
    pub(super) stamp: Stamp,
    pub(super) text: &'a [u8],
    pub(super) cut: u64,
}

impl Window {
    fn new(part: u64, base: u64, bytes: Vec<u8>, end: u64) -> Self {
        let mut lines = Vec::new();
        let mut from = 0;
        let unended = (bytes.last() != Some(&b'\n')).then_some(bytes.len());
        for to in memchr_iter(b'\n', &bytes).chain(unended) {
            // The line with the file's number has no time.
            if let Some(stamp) = Stamp::of(&bytes[from..to]) {
                lines.push(Span { from, to, stamp, cut: 0 });
            }
            from = to + 1;
        }
        Self { part, base, end, bytes, lines, levels: OnceCell::new() }
    }

    pub(super) fn len(&self) -> usize {
        self.lines.len()
    }

    pub(super) fn line(&self, at: usize) -> Option<InWindow<'_>> {
        let Span { from, to, stamp, cut } = *self.lines.get(at)?;
        let place = Place { part: self.part, offset: self.base + from as u64 };
        // Where the next line begins, which may follow one without a time.
        let next = self.lines.get(at + 1).map(|next| self.base + next.from as u64);
        let text = &self.bytes[from + Stamp::LENGTH..to];
        Some(InWindow { place, end: next.unwrap_or(self.end), stamp, text, cut })
    }

    fn level(&self, line: &Span, told: &mut Option<Told>) -> Option<LogLevel> {
        let at = self.base + line.from as u64;
        let own = LogLevel::of(&self.bytes[line.from + Stamp::LENGTH..line.to]);
        if let Some(level) = own {
            *told = Some(Told { at, stamp: line.stamp, level });
            return own;
        }
        let near = |told: &&Told| {
            let times = line.stamp.time().zip(told.stamp.time());
            let soon = |(own, told): (SystemTime, SystemTime)| {
                own.duration_since(told).is_ok_and(|apart| apart <= SPELL)
            };
            at - told.at <= REACH && times.is_some_and(soon)
        };
        told.as_ref().filter(near).map(|told| told.level)
    }
}
