//! A process's log: written line by line with time stamps, rotated by size, and read back.
//!
//! The process writes into a pipe, and a thread of the guardian writes the file. If the process
//! wrote to the file itself, rotation would lose lines or require every program to reopen it, and a
//! full disk would make the program's own writes fail. The guardian outlives a killed supervisor,
//! so the supervisor's death neither loses nor blocks output. If the guardian is killed, the kernel
//! kills the process too, and only the pipe's contents (64 KiB) are lost.
//!
//! Readers report parts of a log that have been rotated away. For that, every file of a log except
//! the first begins with its number: `# part 3 of this log`.
//!
//! *Invariant:* each line begins with the time at which its first byte arrived, and is otherwise
//! unchanged; output that could not be written is counted and reported, and so are the errors that
//! UCX repeats (`log_repeats`).

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::Serialize;

use super::log_repeats::{Repeats, Verdict};

/// Length in bytes of a time stamp with its space: `2026-01-31T23:59:59.000Z `.
const STAMP: usize = 25;

/// Prefix of the line that contains a file's number; the first file, number 0, has no such line.
const PART: &str = "# part ";

/// The number of the file that begins with these bytes.
pub(super) fn part_of(text: &[u8]) -> u64 {
    let number = text.strip_prefix(PART.as_bytes()).and_then(|rest| {
        let digits = rest.iter().position(|byte| !byte.is_ascii_digit())?;
        std::str::from_utf8(&rest[..digits]).ok()?.parse().ok()
    });
    number.unwrap_or(0)
}

/// Writes one log file.
#[derive(Debug)]
pub(super) struct LogWriter {
    path: PathBuf,
    limit: u64,
    keep: u32,
    file: Option<File>,
    size: u64,
    /// The number of the current file.
    part: u64,
    inside_line: bool,
    lost: u64,
    repeats: Repeats,
}

impl LogWriter {
    /// A writer of `path` that rotates files above `limit` bytes and keeps `keep` old ones.
    pub(super) fn new(path: PathBuf, limit: u64, keep: u32) -> Self {
        let repeats = Repeats::default();
        Self {
            path,
            limit,
            keep,
            file: None,
            size: 0,
            part: 0,
            inside_line: false,
            lost: 0,
            repeats,
        }
    }

    /// Writes output that arrived at `now`. Never fails: output that a full disk refuses is
    /// counted, and reported when there is room again.
    pub(super) fn append(&mut self, output: &[u8], now: SystemTime) {
        if output.is_empty() {
            return;
        }
        if self.size > self.limit.saturating_mul(2) {
            // An endless line must not prevent rotation.
            self.end_line(now);
        }
        self.append_raw(output, now);
    }

    fn append_raw(&mut self, output: &[u8], now: SystemTime) {
        let stamp = format!("{} ", humantime::format_rfc3339_millis(now));
        let mut text = Vec::with_capacity(output.len() + 8 * STAMP);
        if self.lost > 0 {
            let missing = format!("[{} bytes of output could not be written here]\n", self.lost);
            text.extend_from_slice(if self.inside_line { b"\n" } else { b"" });
            text.extend_from_slice(stamp.as_bytes());
            text.extend_from_slice(missing.as_bytes());
            self.inside_line = false;
        }
        let mut inside = self.inside_line;
        for line in output.split_inclusive(|byte| *byte == b'\n') {
            let complete = line.ends_with(b"\n");
            match if complete && !inside { self.repeats.judge(line) } else { Verdict::Write } {
                Verdict::Write => {}
                Verdict::WriteAfter { left_out } => text.extend(left_out_line(&stamp, left_out)),
                Verdict::LeaveOut => continue,
            }
            if !inside {
                text.extend_from_slice(stamp.as_bytes());
            }
            text.extend_from_slice(line);
            inside = !complete;
        }
        match self.write(&text) {
            Ok(()) => {
                self.inside_line = inside;
                self.lost = 0;
            }
            Err(_) => {
                self.lost += output.len() as u64;
                // The next attempt opens the file again.
                self.file = None;
            }
        }
    }

    /// Ends the output of a process: terminates an unfinished line, so that later output does not
    /// continue it, and counts what was left out.
    pub(super) fn end(&mut self, now: SystemTime) {
        self.end_line(now);
        let left_out = self.repeats.finish();
        if left_out > 0 {
            self.append_raw(count_of(left_out).as_bytes(), now);
        }
    }

    fn end_line(&mut self, now: SystemTime) {
        if self.inside_line {
            self.append_raw(b"\n", now);
        }
    }

    fn write(&mut self, text: &[u8]) -> io::Result<()> {
        self.open()?;
        if self.size > 0 && !self.inside_line && self.size + text.len() as u64 > self.limit {
            // If rotation fails, a log that is too large is better than none.
            let _ = self.rotate();
            self.open()?;
        }
        let file = self.file.as_mut().ok_or(io::ErrorKind::NotFound)?;
        let before = self.size;
        file.write_all(text).inspect_err(|_| {
            // A partial text would be taken for a complete one. If removing it fails too, nothing
            // more can be done.
            let _ = file.set_len(before);
        })?;
        self.size += text.len() as u64;
        Ok(())
    }

    /// Opens the file, unless it is open and still has a name.
    fn open(&mut self) -> io::Result<()> {
        if let Some(file) = &self.file
            && file.metadata().is_ok_and(|metadata| metadata.nlink() > 0)
        {
            return Ok(());
        }
        if self.file.take().is_some() {
            // The file was removed, so its contents are missing.
            self.part += 1;
        }
        if let Some(parent) = self.path.parent() {
            // Ignore errors: opening the file fails if the directory is missing.
            let _ = fs::DirBuilder::new().mode(0o700).create(parent);
        }
        let mut options = OpenOptions::new();
        let mut file = options.read(true).append(true).create(true).mode(0o600).open(&self.path)?;
        self.size = file.metadata()?.len();
        if self.size > 0 {
            let mut begin = [0; 64];
            let length = file.read(&mut begin)?;
            self.part = part_of(&begin[..length]);
        } else if self.part > 0 {
            let heading = format!("{PART}{} of this log\n", self.part);
            file.write_all(heading.as_bytes())?;
            self.size = heading.len() as u64;
        }
        self.file = Some(file);
        Ok(())
    }

    fn rotate(&mut self) -> io::Result<()> {
        self.file = None;
        for age in (1..self.keep).rev() {
            // A gap between rotated files is not an error.
            let _ = fs::rename(aged(&self.path, age), aged(&self.path, age + 1));
        }
        match self.keep {
            0 => fs::remove_file(&self.path)?,
            _ => fs::rename(&self.path, aged(&self.path, 1))?,
        }
        self.part += 1;
        Ok(())
    }
}

fn left_out_line(stamp: &str, left_out: u64) -> Vec<u8> {
    format!("{stamp}{}", count_of(left_out)).into_bytes()
}

fn count_of(left_out: u64) -> String {
    format!("[{left_out} more lines like the next or an earlier one are left out]\n")
}

/// The `age`-th rotated file of a log; `gpu3.log.1` is the youngest.
pub(super) fn aged(path: &Path, age: u32) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{age}"));
    name.into()
}

/// A line of a log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Line {
    /// When its first byte arrived; serialized as RFC 3339.
    #[serde(serialize_with = "as_rfc3339")]
    pub at: SystemTime,
    /// The line as written by the process, without its line feed; when serialized, invalid UTF-8
    /// becomes U+FFFD.
    #[serde(serialize_with = "as_text")]
    pub text: Vec<u8>,
}

fn as_rfc3339<S: serde::Serializer>(at: &SystemTime, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&humantime::format_rfc3339_millis(*at))
}

fn as_text<S: serde::Serializer>(text: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&String::from_utf8_lossy(text))
}

impl Line {
    /// Parses a stored line; `None` if it has no time stamp.
    fn parse(line: &[u8]) -> Option<Self> {
        let (stamp, text) = line.split_at_checked(STAMP)?;
        let at = humantime::parse_rfc3339(std::str::from_utf8(stamp).ok()?.trim_end()).ok()?;
        Some(Self { at, text: text.to_vec() })
    }

    /// A line that reports missing output before `next`.
    fn gap(next: Option<&Line>) -> Self {
        let at = next.map_or(SystemTime::UNIX_EPOCH, |line| line.at);
        Self { at, text: b"[output is missing here: the log was rotated]".to_vec() }
    }
}

/// One file of a log.
struct Part {
    number: u64,
    lines: Vec<Line>,
}

impl Part {
    fn parse(text: &[u8]) -> Self {
        let lines = text.split(|byte| *byte == b'\n').filter_map(Line::parse).collect();
        Self { number: part_of(text), lines }
    }
}

/// Reads a log including its rotated files, and then follows it.
#[derive(Debug)]
pub struct LogReader {
    path: PathBuf,
    current: Option<Current>,
    /// Incomplete last line.
    rest: Vec<u8>,
}

/// The file being read.
#[derive(Debug)]
struct Current {
    file: File,
    inode: u64,
    part: u64,
}

/// Selects old lines of a log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    /// At most this many of the last lines.
    pub tail: Option<usize>,
    /// No lines before this time.
    pub since: Option<SystemTime>,
}

impl LogReader {
    /// Opens the log at `path`, and returns its existing lines, oldest first.
    ///
    /// A log that does not exist yet has no lines. A special line reports missing files.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn open(path: &Path, wanted: Selection) -> io::Result<(Self, Vec<Line>)> {
        let mut reader = Self { path: path.to_owned(), current: None, rest: Vec::new() };
        let mut lines = reader.appended()?;
        let enough = |lines: &[Line]| {
            wanted.tail.is_some_and(|tail| lines.len() >= tail)
                || wanted.since.is_some_and(|since| lines.first().is_some_and(|l| l.at < since))
        };
        let mut number = reader.current.as_ref().map_or(0, |current| current.part);
        let mut age = 1;
        while !enough(&lines)
            && let Some(older) = whole(&aged(path, age))?
        {
            if older.number + 1 < number {
                lines.insert(0, Line::gap(lines.first()));
            }
            // A file that was rotated in the meantime has been read already.
            if older.number < number || number == 0 {
                lines.splice(0..0, older.lines);
                number = older.number;
            }
            age += 1;
        }
        if number > 0 && !enough(&lines) {
            lines.insert(0, Line::gap(lines.first()));
        }
        lines.retain(|line| wanted.since.is_none_or(|since| line.at >= since));
        let surplus = wanted.tail.map_or(0, |tail| lines.len().saturating_sub(tail));
        lines.drain(..surplus);
        Ok((reader, lines))
    }

    /// Complete lines that were appended since the last call. Follows rotation; a special line
    /// reports missing files.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn appended(&mut self) -> io::Result<Vec<Line>> {
        let mut lines = Vec::new();
        let mut before = None;
        if let Some(current) = &mut self.current {
            current.file.read_to_end(&mut self.rest)?;
            let named = fs::metadata(&self.path).map(|metadata| metadata.ino());
            if named.ok() == Some(current.inode) {
                return Ok(self.take_lines());
            }
            // The file was rotated; the rest of it was written since the last call.
            current.file.read_to_end(&mut self.rest)?;
            before = Some(current.part);
            lines = self.take_lines();
        }
        match File::open(&self.path) {
            Ok(mut file) => {
                self.rest.clear();
                file.read_to_end(&mut self.rest)?;
                let (inode, part) = (file.metadata()?.ino(), part_of(&self.rest));
                self.current = Some(Current { file, inode, part });
                let new = self.take_lines();
                if let Some(before) = before {
                    lines.extend(self.between(before, part, new.first())?);
                }
                lines.extend(new);
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        Ok(lines)
    }

    /// The lines of the files between two, as far as they still exist.
    fn between(&self, before: u64, after: u64, next: Option<&Line>) -> io::Result<Vec<Line>> {
        let missing = after.saturating_sub(before).saturating_sub(1);
        let mut found = Vec::new();
        for age in (1..=u32::try_from(missing).unwrap_or(u32::MAX))
            .map_while(|age| aged(&self.path, age).exists().then_some(age))
        {
            let part = whole(&aged(&self.path, age))?;
            found.extend(part.filter(|part| before < part.number && part.number < after));
        }
        let whole = found.len() as u64 == missing;
        let mut lines: Vec<Line> = found.into_iter().rev().flat_map(|part| part.lines).collect();
        if !whole {
            lines.insert(0, Line::gap(lines.first().or(next)));
        }
        Ok(lines)
    }

    /// The unfinished last line.
    pub fn unfinished(&self) -> Option<Line> {
        Line::parse(&self.rest)
    }

    /// Length of the unfinished last line in bytes, with its time; 0 if there is none.
    pub fn unfinished_bytes(&self) -> usize {
        self.rest.len()
    }

    fn take_lines(&mut self) -> Vec<Line> {
        let end = self.rest.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        let complete: Vec<u8> = self.rest.drain(..end).collect();
        complete.split(|byte| *byte == b'\n').filter_map(Line::parse).collect()
    }
}

fn whole(path: &Path) -> io::Result<Option<Part>> {
    match fs::read(path) {
        Ok(text) => Ok(Some(Part::parse(&text))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The last `count` lines of a log without time stamps, including an unfinished one; none if the
/// log can't be read.
pub fn last_lines(path: &Path, count: usize) -> Vec<String> {
    let lines = last_stored(path).into_iter();
    let mut lines: Vec<String> =
        lines.map(|line| String::from_utf8_lossy(&line.text).into_owned()).collect();
    lines.drain(..lines.len().saturating_sub(count));
    lines
}

/// The lines in the last 64 KiB of a log's current file; none if it can't be read.
pub(super) fn last_stored(path: &Path) -> Vec<Line> {
    const REACH: u64 = 64 << 10;
    let read = || -> io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let size = file.metadata()?.len();
        file.seek(SeekFrom::Start(size.saturating_sub(REACH)))?;
        let mut text = Vec::new();
        file.take(REACH).read_to_end(&mut text)?;
        Ok(text)
    };
    let text = read().unwrap_or_default();
    text.split(|byte| *byte == b'\n').filter_map(Line::parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, UNIX_EPOCH};

    fn at(secs: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(secs)
    }

    fn texts(lines: &[Line]) -> Vec<String> {
        lines.iter().map(|line| String::from_utf8_lossy(&line.text).into_owned()).collect()
    }

    const GAP: &str = "[output is missing here: the log was rotated]";

    #[test]
    fn a_line_is_stamped_once_however_it_arrives() {
        let folder = tempfile::tempdir().expect("a directory");
        let path = folder.path().join("gpu0.log");
        let mut writer = LogWriter::new(path.clone(), 1 << 20, 1);
        for (second, chunk) in [(1, "one\ntw"), (2, "o"), (3, "\nthree\nfour")] {
            writer.append(chunk.as_bytes(), at(second));
        }
        let text = fs::read_to_string(&path).expect("written");
        let expected = "\
1970-01-01T00:00:01.000Z one
1970-01-01T00:00:01.000Z two
1970-01-01T00:00:03.000Z three
1970-01-01T00:00:03.000Z four";
        assert_eq!(text, expected);
        assert_eq!(last_lines(&path, 2), ["three", "four"]);
    }

    #[test]
    fn rotation_keeps_the_asked_for_files_and_a_reader_follows_it() {
        let folder = tempfile::tempdir().expect("a directory");
        let path = folder.path().join("gpu0.log");
        let mut writer = LogWriter::new(path.clone(), 64, 2);
        writer.append(b"first\n", at(0));
        let (mut reader, old) = LogReader::open(&path, Selection::default()).expect("readable");
        assert_eq!(texts(&old), ["first"]);
        for second in 1..8 {
            writer.append(format!("line {second}\n").as_bytes(), at(second));
            assert_eq!(
                texts(&reader.appended().expect("readable")),
                [format!("line {second}")],
                "nothing twice, nothing lost"
            );
        }
        assert!(aged(&path, 1).exists() && aged(&path, 2).exists() && !aged(&path, 3).exists());
        let (_, all) = LogReader::open(&path, Selection::default()).expect("readable");
        assert_eq!(texts(&all), [GAP, "line 5", "line 6", "line 7"], "the first files are gone");
        let last = Selection { tail: Some(3), since: None };
        let (_, last) = LogReader::open(&path, last).expect("readable");
        assert_eq!(texts(&last), ["line 5", "line 6", "line 7"]);
        let recent = Selection { tail: None, since: Some(at(6)) };
        let (_, recent) = LogReader::open(&path, recent).expect("readable");
        assert_eq!(texts(&recent), ["line 6", "line 7"]);
    }

    #[test]
    fn a_reader_that_falls_behind_finds_what_is_still_there_and_says_what_is_not() {
        let folder = tempfile::tempdir().expect("a directory");
        let path = folder.path().join("gpu0.log");
        let mut writer = LogWriter::new(path.clone(), 16, 2);
        let mut line = |second| writer.append(format!("line {second}\n").as_bytes(), at(second));
        line(0);
        let (mut reader, _) = LogReader::open(&path, Selection::default()).expect("readable");
        (1..4).for_each(&mut line);
        let appended = reader.appended().expect("readable");
        assert_eq!(texts(&appended), ["line 1", "line 2", "line 3"], "each in a file of its own");
        (4..9).for_each(&mut line);
        let appended = reader.appended().expect("readable");
        assert_eq!(texts(&appended), [GAP, "line 6", "line 7", "line 8"]);
    }

    #[test]
    fn a_line_without_an_end_is_kept_and_does_not_keep_the_log_from_rotation() {
        let folder = tempfile::tempdir().expect("a directory");
        let path = folder.path().join("gpu0.log");
        let mut writer = LogWriter::new(path.clone(), 100, 2);
        for second in 0..10 {
            writer.append(&[b'x'; 99], at(second));
        }
        let sizes = |path: &Path| fs::metadata(path).map_or(0, |found| found.len());
        assert!(sizes(&path) < 400 && sizes(&aged(&path, 1)) < 400);
        let (reader, _) = LogReader::open(&path, Selection::default()).expect("readable");
        assert!(reader.unfinished().is_some(), "dying words need no line feed");
        writer.end(at(10));
        let (reader, _) = LogReader::open(&path, Selection::default()).expect("readable");
        assert_eq!(reader.unfinished(), None);
    }

    #[test]
    fn what_a_full_disk_refuses_is_counted_and_said() {
        let folder = tempfile::tempdir().expect("a directory");
        let path = folder.path().join("gpu0.log");
        let mut writer = LogWriter::new(path.clone(), 1 << 20, 1);
        writer.append(b"before\n", at(0));
        // Every write to this device fails with ENOSPC, as on a full disk.
        writer.file = OpenOptions::new().append(true).open("/dev/full").ok();
        writer.append(b"lost\n", at(1));
        writer.append(b"after\n", at(2));
        let expected = ["before", "[5 bytes of output could not be written here]", "after"];
        assert_eq!(last_lines(&path, 9), expected);
    }

    #[test]
    fn an_error_that_ucx_repeats_for_ever_does_not_fill_the_log() {
        let folder = tempfile::tempdir().expect("a directory");
        let path = folder.path().join("gpu0.log");
        let mut writer = LogWriter::new(path.clone(), 1 << 20, 1);
        let repeated = "[1700000000.1] [host:1 :0]  ib_md.c:300  UCX  ERROR ibv_reg_mr failed\n";
        (0..100).for_each(|second| writer.append(repeated.as_bytes(), at(second)));
        writer.append(b"own words\n", at(100));
        writer.end(at(101));
        let lines = last_lines(&path, 200);
        assert_eq!(lines.iter().filter(|line| line.contains("ibv_reg_mr")).count(), 11);
        let counts = lines.iter().filter_map(|line| line.strip_prefix('[')?.split_once(" more"));
        let left_out: u32 = counts.filter_map(|(count, _)| count.parse::<u32>().ok()).sum();
        assert_eq!(left_out, 89, "{lines:#?}");
        assert!(lines.contains(&"own words".to_owned()));
    }

    #[test]
    fn a_removed_log_is_made_again() {
        let folder = tempfile::tempdir().expect("a directory");
        let path = folder.path().join("logs/gpu0.log");
        let mut writer = LogWriter::new(path.clone(), 1 << 20, 1);
        writer.append(b"before\n", at(0));
        fs::remove_dir_all(folder.path().join("logs")).expect("removed");
        writer.append(b"after\n", at(1));
        assert_eq!(last_lines(&path, 9), ["after"]);
    }
}
