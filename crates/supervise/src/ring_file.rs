//! A file of fixed size in the run directory, with the records of a history in their places.
//!
//! It stays open, because closing a file that was written would wake the supervisor, which watches
//! its directory.
//!
//! *Invariant:* nothing but a regular file of its own is written to.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::PathBuf;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// The clock of a cluster's events, which never goes back.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock(SystemTime, Instant);

impl From<SystemTime> for Clock {
    /// The clock of a cluster that began then, which is now.
    fn from(began: SystemTime) -> Self {
        Self(began, Instant::now())
    }
}

impl Clock {
    /// When the cluster began.
    pub(super) fn began(&self) -> Instant {
        self.1
    }

    /// A moment in milliseconds since 1970.
    pub(super) fn at(&self, now: Instant) -> u64 {
        let at = self.0 + now.saturating_duration_since(self.1);
        let at = at.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
        u64::try_from(at).unwrap_or(u64::MAX)
    }
}

/// A file that is made when there is something to write.
#[derive(Debug)]
pub(super) struct RingFile {
    path: PathBuf,
    file: Option<File>,
}

impl RingFile {
    pub(super) fn new(path: PathBuf) -> Self {
        Self { path, file: None }
    }

    /// Writes records to their places, in a file with this beginning.
    pub(super) fn write(&mut self, header: &[u8], due: &[(u64, Vec<u8>)]) -> io::Result<()> {
        let file = self.file(header)?;
        due.iter().try_for_each(|(place, record)| file.write_all_at(record, *place))
    }

    /// The file, with its beginning; made again if it was removed.
    fn file(&mut self, header: &[u8]) -> io::Result<&File> {
        let removed = |file: &File| file.metadata().is_ok_and(|there| there.nlink() == 0);
        if self.file.as_ref().is_none_or(removed) {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(true).mode(0o600);
            options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
            let mut file = options.open(&self.path)?;
            if let Some(mut removed) = self.file.take() {
                // What was known is in the file without a name. Without it the history begins now.
                let _ = removed.rewind().and_then(|()| io::copy(&mut removed, &mut file));
            }
            self.file = Some(file);
        }
        let file = self.file.as_ref().ok_or(io::ErrorKind::NotFound)?;
        let there = file.metadata()?;
        if !there.is_file() {
            return Err(io::ErrorKind::InvalidData.into());
        }
        if there.len() < header.len() as u64 {
            file.write_all_at(header, 0)?;
        }
        Ok(file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_file_is_not_written_to() {
        let folder = tempfile::tempdir().expect("a directory");
        let path = folder.path().join("history");
        std::os::unix::fs::symlink("/dev/null", &path).expect("a link");
        let mut file = RingFile::new(path.clone());
        assert!(file.write(b"header", &[(6, vec![1])]).is_err(), "a link is not followed");
        std::fs::remove_file(&path).expect("removed");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
        assert!(file.write(b"header", &[(6, vec![1])]).is_err());
        std::fs::remove_file(&path).expect("removed");
        file.write(b"header", &[(6, vec![1])]).expect("a new file");
        assert_eq!(std::fs::read(&path).expect("a file"), b"header\x01");
    }
}
