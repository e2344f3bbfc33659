//! Writes `events.jsonl`, and knows what is missing there.
//!
//! A full disk does not stop a cluster, whose events go on to whoever listens. Where records are
//! missing, the file says how many.
//!
//! *Invariant:* the file has whole lines, and no gap without a line about it.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;

use crate::record::{Record, What};
use cuda_cluster_machine::os::run_directory::Paths;

/// The file of a cluster's events.
#[derive(Debug)]
pub(super) struct Journal {
    file: io::Result<File>,
    /// Records that could not be written since the last that was.
    missing: u64,
}

impl Journal {
    /// Opens `events.jsonl`; the cluster also runs without it.
    pub(super) fn open(paths: &Paths) -> Self {
        Self { file: file_at(paths), missing: 0 }
    }

    /// Opens it in a directory that was made again. What was missing before is still to be told.
    pub(super) fn reopen(&mut self, paths: &Paths) {
        self.file = file_at(paths);
    }

    /// Writes a record; returns what is new about the file, and whether that lasts.
    pub(super) fn write(&mut self, record: &Record) -> Option<(String, bool)> {
        let written = self.try_write(record);
        match written {
            Err(error) => {
                self.missing += 1;
                let text = format!("events cannot be written to events.jsonl: {error}");
                (self.missing == 1).then_some((text, true))
            }
            Ok(()) if self.missing > 0 => {
                let text = gap(std::mem::take(&mut self.missing));
                Some((format!("events are written again; {text}"), false))
            }
            Ok(()) => None,
        }
    }

    fn try_write(&mut self, record: &Record) -> io::Result<()> {
        let file =
            self.file.as_mut().map_err(|error| io::Error::new(error.kind(), error.to_string()))?;
        let mut lines = Vec::new();
        if self.missing > 0 {
            let text = gap(self.missing);
            let about = Record { at: record.at.clone(), process: None, what: What::Note { text } };
            serde_json::to_writer(&mut lines, &about)?;
            lines.push(b'\n');
        }
        serde_json::to_writer(&mut lines, record)?;
        lines.push(b'\n');
        let before = file.metadata()?.len();
        file.write_all(&lines).inspect_err(|_| {
            // Half a line would damage the next. To shorten a file takes no room.
            let _ = file.set_len(before);
        })
    }
}

fn file_at(paths: &Paths) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(0o600).open(paths.events())
}

fn gap(missing: u64) -> String {
    match missing {
        1 => "one event before this is missing here".to_owned(),
        some => format!("{some} events before this are missing here"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(text: &str) -> Record {
        let what = What::Note { text: text.to_owned() };
        Record { at: "2026-01-01T00:00:00.000Z".to_owned(), process: None, what }
    }

    #[test]
    fn what_a_full_disk_swallowed_is_told_once_and_the_gap_stands_in_the_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let paths = Paths::at(folder.path());
        let mut journal = Journal::open(&paths);
        assert_eq!(journal.write(&record("first")), None);
        let full = OpenOptions::new().append(true).open("/dev/full").expect("a full disk");
        let disk = std::mem::replace(&mut journal.file, Ok(full));
        let (text, lasts) = journal.write(&record("second")).expect("it is told");
        assert!(lasts && text.contains("No space left on device"), "{text}");
        assert_eq!(journal.write(&record("third")), None, "it is told once");
        drop(disk);
        journal.reopen(&paths);
        let (text, lasts) = journal.write(&record("fourth")).expect("it is told");
        assert!(!lasts && text.contains("2 events"), "{text}");
        assert_eq!(journal.write(&record("fifth")), None);
        let text = std::fs::read_to_string(paths.events()).expect("the file");
        let told = |line: &str| match serde_json::from_str::<Record>(line).expect("a record").what {
            What::Note { text } => text,
            other => panic!("{other:?}"),
        };
        let told: Vec<String> = text.lines().map(told).collect();
        let gap = "2 events before this are missing here";
        assert_eq!(told, ["first", gap, "fourth", "fifth"]);
    }
}
