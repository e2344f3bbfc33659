//! A copy of a process's output in a file of the user's, as tee(1) makes it.
//!
//! Does not rotate, stamp or limit it; that is the log's part.
//!
//! *Invariant:* the file holds the first bytes of the stream, unchanged and without a gap: after a
//! failure nothing more is written, and the failure is told once.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use cuda_cluster_wire::output::Stream;

/// The file, which is opened for the first bytes at the latest.
#[derive(Debug)]
pub(super) struct Copy {
    path: PathBuf,
    state: State,
}

#[derive(Debug)]
enum State {
    New,
    Open(File),
    /// It has failed.
    Given,
}

impl Copy {
    /// The copy of a stream; `stem` is the path without its ending.
    pub(super) fn of(stem: &Path, stream: Stream) -> Self {
        let ending = match stream {
            Stream::Output => "out",
            Stream::Error => "err",
        };
        let mut path = stem.as_os_str().to_owned();
        path.push(".");
        path.push(ending);
        Self { path: path.into(), state: State::New }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Writes bytes; without any, only makes the file.
    ///
    /// # Errors
    /// The first failure, in words; later calls do nothing.
    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), String> {
        let file = match &mut self.state {
            State::Given => return Ok(()),
            State::Open(file) => Ok(file),
            State::New => open(&self.path).map(|file| {
                self.state = State::Open(file);
                let State::Open(file) = &mut self.state else { unreachable!("just opened") };
                file
            }),
        };
        let written = file.and_then(|file| file.write_all(bytes));
        written.map_err(|error| {
            self.state = State::Given;
            error.to_string()
        })
    }
}

/// Opens the file, empty. A pipe in its place is not waited for.
fn open(path: &Path) -> io::Result<File> {
    if let Some(directory) = path.parent() {
        DirBuilder::new().recursive(true).create(directory)?;
    }
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).custom_flags(libc::O_NONBLOCK);
    options.open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_has_the_bytes_and_replaces_what_was_there() {
        let place = tempfile::tempdir().expect("a directory");
        let stem = place.path().join("restart1").join("rank0");
        for text in ["long ago", "now"] {
            let mut copy = Copy::of(&stem, Stream::Error);
            copy.write(b"").expect("made");
            copy.write(text.as_bytes()).expect("written");
            assert_eq!(std::fs::read_to_string(copy.path()).expect("a file"), text);
        }
        assert!(place.path().join("restart1/rank0.err").exists());
    }

    #[test]
    fn a_failure_is_told_once_and_leaves_no_gap() {
        let place = tempfile::tempdir().expect("a directory");
        std::os::unix::fs::symlink("/dev/full", place.path().join("rank0.out")).expect("a link");
        let mut copy = Copy::of(&place.path().join("rank0"), Stream::Output);
        copy.write(b"").expect("it opens");
        let refused = copy.write(b"x").expect_err("it is full");
        assert!(refused.contains("No space left"), "{refused}");
        assert_eq!(copy.write(b"y"), Ok(()));
        nix::unistd::mkfifo(&place.path().join("pipe.out"), nix::sys::stat::Mode::S_IRWXU)
            .expect("a pipe");
        let mut pipe = Copy::of(&place.path().join("pipe"), Stream::Output);
        assert!(pipe.write(b"z").is_err(), "nobody reads it, and nobody waits");
    }
}
