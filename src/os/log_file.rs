//! One process's log: written line by line with time stamps, rotated by size, and read back.
//!
//! The process writes into a pipe and the guardian's thread writes the file. A file handed to the
//! process itself could not be rotated without losing lines or asking every program to reopen it,
//! and a full disk would make the program's own writes fail. The guardian outlives a supervisor
//! that is killed, so its death neither loses nor blocks output; were the guardian killed, the
//! kernel would end the process too, and only what is still in the pipe (64 KiB) would be lost.
//!
//! *Invariant:* each line of the file begins with the time at which its first byte came, and the
//! rest is as the process wrote it; what could not be written is counted and said.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::Serialize;

/// Bytes of a stamp with its blank: `2026-01-31T23:59:59.000Z `.
const STAMP: usize = 25;

/// Writes one log file.
#[derive(Debug)]
pub(super) struct LogWriter {
    path: PathBuf,
    limit: u64,
    keep: u32,
    file: Option<File>,
    size: u64,
    inside_line: bool,
    lost: u64,
}

impl LogWriter {
    /// A writer of `path`, rotated when it is larger than `limit` bytes, `keep` old ones kept.
    pub(super) fn new(path: PathBuf, limit: u64, keep: u32) -> Self {
        Self { path, limit, keep, file: None, size: 0, inside_line: false, lost: 0 }
    }

    /// Writes output that came at `now`. Never fails: what a full disk refuses is counted, and
    /// said as soon as there is room again.
    pub(super) fn append(&mut self, output: &[u8], now: SystemTime) {
        if output.is_empty() {
            return;
        }
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
            if !inside {
                text.extend_from_slice(stamp.as_bytes());
            }
            text.extend_from_slice(line);
            inside = !line.ends_with(b"\n");
        }
        match self.write(&text) {
            Ok(()) => {
                self.inside_line = inside;
                self.lost = 0;
            }
            Err(_) => {
                self.lost += output.len() as u64;
                // The next attempt begins with the file's name again.
                self.file = None;
            }
        }
    }

    fn write(&mut self, text: &[u8]) -> io::Result<()> {
        self.open()?;
        if self.size > 0 && !self.inside_line && self.size + text.len() as u64 > self.limit {
            // When it cannot be rotated, a log that is too large is better than none.
            let _ = self.rotate();
            self.open()?;
        }
        let file = self.file.as_mut().ok_or(io::ErrorKind::NotFound)?;
        let before = self.size;
        file.write_all(text).inspect_err(|_| {
            // Half a text would be taken for all of it. If this fails too, nothing can be done.
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
        if let Some(parent) = self.path.parent() {
            // Where it exists, or its own parent does not, opening the file tells.
            let _ = fs::DirBuilder::new().mode(0o700).create(parent);
        }
        let file = OpenOptions::new().append(true).create(true).mode(0o600).open(&self.path)?;
        self.size = file.metadata()?.len();
        self.file = Some(file);
        Ok(())
    }

    fn rotate(&mut self) -> io::Result<()> {
        self.file = None;
        for age in (1..self.keep).rev() {
            // A gap in the ages is no fault.
            let _ = fs::rename(aged(&self.path, age), aged(&self.path, age + 1));
        }
        match self.keep {
            0 => fs::remove_file(&self.path),
            _ => fs::rename(&self.path, aged(&self.path, 1)),
        }
    }
}

/// The `age`-th rotated file of a log: `gpu3.log.1` is the youngest.
fn aged(path: &Path, age: u32) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{age}"));
    name.into()
}

/// One line of a log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Line {
    /// When its first byte came; RFC 3339 as text.
    #[serde(serialize_with = "as_rfc3339")]
    pub at: SystemTime,
    /// The text, without its line feed.
    pub text: String,
}

fn as_rfc3339<S: serde::Serializer>(at: &SystemTime, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&humantime::format_rfc3339_millis(*at))
}

/// Takes a stored line apart; `None` for one without a stamp.
fn parse(line: &[u8]) -> Option<Line> {
    let (stamp, text) = line.split_at_checked(STAMP)?;
    let at = humantime::parse_rfc3339(std::str::from_utf8(stamp).ok()?.trim_end()).ok()?;
    Some(Line { at, text: String::from_utf8_lossy(text).into_owned() })
}

/// Reads a log, its rotated files included, and then what is appended to it.
#[derive(Debug)]
pub struct LogReader {
    path: PathBuf,
    /// The file being read, its inode, and how far it was read.
    current: Option<(File, u64)>,
    rest: Vec<u8>,
}

/// Which of a log's old lines are wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    /// At most this many of the last.
    pub tail: Option<usize>,
    /// None before this.
    pub since: Option<SystemTime>,
}

impl LogReader {
    /// A reader of the log at `path`, and the lines that it has, oldest first.
    ///
    /// A log that does not exist yet has no lines.
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
        let mut age = 1;
        while !enough(&lines)
            && let Some(older) = whole(&aged(path, age))?
        {
            lines.splice(0..0, older);
            age += 1;
        }
        lines.retain(|line| wanted.since.is_none_or(|since| line.at >= since));
        let surplus = wanted.tail.map_or(0, |tail| lines.len().saturating_sub(tail));
        lines.drain(..surplus);
        Ok((reader, lines))
    }

    /// Complete lines that were appended since the last call. A rotation in between is followed.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn appended(&mut self) -> io::Result<Vec<Line>> {
        if let Some((file, inode)) = &mut self.current {
            file.read_to_end(&mut self.rest)?;
            let named = fs::metadata(&self.path).map(|metadata| metadata.ino());
            if named.ok() == Some(*inode) {
                return Ok(self.take_lines());
            }
            // It was rotated; what was written to it between the two looks is its end.
            file.read_to_end(&mut self.rest)?;
        }
        match File::open(&self.path) {
            Ok(mut file) => {
                file.read_to_end(&mut self.rest)?;
                let inode = file.metadata()?.ino();
                self.current = Some((file, inode));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        Ok(self.take_lines())
    }

    fn take_lines(&mut self) -> Vec<Line> {
        let end = self.rest.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        let complete: Vec<u8> = self.rest.drain(..end).collect();
        complete.split(|byte| *byte == b'\n').filter_map(parse).collect()
    }
}

fn whole(path: &Path) -> io::Result<Option<Vec<Line>>> {
    match fs::read(path) {
        Ok(text) => Ok(Some(text.split(|byte| *byte == b'\n').filter_map(parse).collect())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The last `count` lines of a log without their stamps, an unfinished one included; none if it
/// cannot be read. Reads at most the last 64 KiB.
pub fn last_lines(path: &Path, count: usize) -> Vec<String> {
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
    let mut lines: Vec<String> =
        text.split(|byte| *byte == b'\n').filter_map(parse).map(|line| line.text).collect();
    lines.drain(..lines.len().saturating_sub(count));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, UNIX_EPOCH};

    fn at(secs: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(secs)
    }

    fn texts(lines: &[Line]) -> Vec<&str> {
        lines.iter().map(|line| line.text.as_str()).collect()
    }

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
        assert_eq!(texts(&all), ["line 2", "line 3", "line 4", "line 5", "line 6", "line 7"]);
        let last = Selection { tail: Some(3), since: None };
        let (_, last) = LogReader::open(&path, last).expect("readable");
        assert_eq!(texts(&last), ["line 5", "line 6", "line 7"]);
        let recent = Selection { tail: None, since: Some(at(6)) };
        let (_, recent) = LogReader::open(&path, recent).expect("readable");
        assert_eq!(texts(&recent), ["line 6", "line 7"]);
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
