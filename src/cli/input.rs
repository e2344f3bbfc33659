//! Reads text from a file, a pipe, or standard input (`-`).
//!
//! Does not interpret the text.
//!
//! *Invariant:* reads at most the limit, even from endless files, and never hangs on a pipe that
//! has no writer.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::failure::{Exit, Failure};

/// How long to wait for a pipe's first writer.
const WRITER_WITHIN: Duration = Duration::from_secs(5);

/// How often to check an empty pipe.
const LOOK: Duration = Duration::from_millis(20);

/// Why the text could not be read.
#[derive(Debug, thiserror::Error)]
pub(super) enum InputError {
    #[error("it does not exist")]
    Absent,
    #[error("it is a directory")]
    Directory,
    #[error("it has more than {} MiB, which is the limit", .limit >> 20)]
    TooLarge { limit: usize },
    #[error("it is not UTF-8 text (byte {at})")]
    Encoding { at: usize },
    #[error("it is UTF-16 text")]
    Utf16,
    #[error("nobody writes into this pipe")]
    NoWriter,
    #[error(transparent)]
    Io(io::Error),
}

impl From<io::Error> for InputError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::NotFound => Self::Absent,
            io::ErrorKind::IsADirectory => Self::Directory,
            _ => Self::Io(error),
        }
    }
}

impl InputError {
    /// What the user can do.
    fn hint(&self, what: &str) -> Option<String> {
        Some(match self {
            Self::Absent => "check the path; '-' is standard input".to_owned(),
            Self::Directory => "name a file in it".to_owned(),
            Self::TooLarge { .. } => format!("no {what} is that large: is this the right file?"),
            Self::Encoding { .. } => format!("a {what} is UTF-8 text: is this the right file?"),
            Self::Utf16 => "save it as UTF-8; in PowerShell: Set-Content -Encoding utf8".to_owned(),
            Self::NoWriter => "start what writes into it first, or name a file".to_owned(),
            Self::Io(_) => return None,
        })
    }

    /// As the failure of a command that was to read `what` from `path`.
    pub(super) fn failure(self, what: &str, path: &Path) -> Failure {
        let hint = self.hint(what);
        let error = anyhow::Error::new(self).context(format!("cannot read {what} {}", shown(path)));
        Failure::new(Exit::Usage, error).maybe_hint(hint)
    }
}

/// How errors refer to a path.
pub(super) fn shown(path: &Path) -> String {
    if path.as_os_str() == "-" { "standard input".to_owned() } else { path.display().to_string() }
}

/// Where relative paths in a file begin: beside it. Nothing lies beside standard input or a shell's
/// `<(…)`, in which they are of the current directory.
pub(super) fn folder(path: &Path) -> PathBuf {
    let streams = [Path::new("/dev"), Path::new("/proc")];
    let is_stream = path.as_os_str() == "-" || streams.iter().any(|root| path.starts_with(root));
    let beside = path.parent().filter(|_| !is_stream);
    std::env::current_dir().unwrap_or_default().join(beside.unwrap_or(Path::new("")))
}

/// Reads at most `limit` bytes of UTF-8 text.
pub(super) fn read(path: &Path, limit: usize) -> Result<String, InputError> {
    String::from_utf8(bytes(path, limit)?)
        .map_err(|error| InputError::Encoding { at: error.utf8_error().valid_up_to() + 1 })
}

/// Reads at most `limit` bytes of a log, in which programs may have written anything.
pub(super) fn read_log(path: &Path, limit: usize) -> Result<String, InputError> {
    let bytes = bytes(path, limit)?;
    Ok(String::from_utf8(bytes)
        .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
}

fn bytes(path: &Path, limit: usize) -> Result<Vec<u8>, InputError> {
    let bytes = match path.as_os_str() == "-" {
        true => at_most(limit, &mut io::stdin().lock())?,
        false => from_file(path, limit)?,
    };
    if bytes.starts_with(&[0xff, 0xfe]) || bytes.starts_with(&[0xfe, 0xff]) {
        return Err(InputError::Utf16);
    }
    Ok(bytes)
}

fn from_file(path: &Path, limit: usize) -> Result<Vec<u8>, InputError> {
    // Opening a pipe in blocking mode would wait for its writer.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    let kind = file.metadata()?.file_type();
    if kind.is_dir() {
        return Err(InputError::Directory);
    }
    let mut source = Patient { source: file, pipe: kind.is_fifo(), begun: false };
    at_most(limit, &mut source)
}

fn at_most(limit: usize, source: &mut dyn Read) -> Result<Vec<u8>, InputError> {
    let mut bytes = Vec::new();
    let beyond = u64::try_from(limit).unwrap_or(u64::MAX).saturating_add(1);
    source.take(beyond).read_to_end(&mut bytes).map_err(|error| match error.kind() {
        io::ErrorKind::TimedOut => InputError::NoWriter,
        _ => error.into(),
    })?;
    if bytes.len() > limit { Err(InputError::TooLarge { limit }) } else { Ok(bytes) }
}

/// A file opened in non-blocking mode but read until its end: waits without limit for a writer that
/// has opened the pipe, and at most [`WRITER_WITHIN`] for the first one.
struct Patient<R> {
    source: R,
    pipe: bool,
    /// Whether a writer has written, or has the pipe open.
    begun: bool,
}

impl<R: Read> Read for Patient<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut waited = Duration::ZERO;
        loop {
            match self.source.read(buffer) {
                // The end, or a pipe that no writer has opened yet.
                Ok(0) if self.pipe && !self.begun => {
                    if waited >= WRITER_WITHIN {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.begun = true,
                done => {
                    self.begun = true;
                    return done;
                }
            }
            std::thread::sleep(LOOK);
            waited += LOOK;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_never_ends_is_given_up() {
        let error = read(Path::new("/dev/zero"), 1 << 20).expect_err("without an end");
        assert!(matches!(error, InputError::TooLarge { limit } if limit == 1 << 20), "{error}");
    }

    #[test]
    fn a_file_at_the_limit_is_read_and_one_beyond_is_not() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), "0123").expect("written");
        assert_eq!(read(file.path(), 4).expect("as long as it may be"), "0123");
        assert!(matches!(read(file.path(), 3), Err(InputError::TooLarge { limit: 3 })));
    }

    #[test]
    fn other_encodings_are_named() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), b"\xff\xfev\0e\0").expect("written");
        assert!(matches!(read(file.path(), 100), Err(InputError::Utf16)));
        std::fs::write(file.path(), b"name: caf\xe9").expect("written");
        assert!(matches!(read(file.path(), 100), Err(InputError::Encoding { at: 10 })));
    }

    #[test]
    fn a_pipe_whose_writer_comes_late_and_pauses_is_read_to_its_end() {
        let folder = tempfile::tempdir().expect("a directory");
        let pipe = folder.path().join("pipe");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
        let script = "sleep 0.1; (echo one; sleep 0.2; echo two) > \"$0\"";
        let mut writer = std::process::Command::new("sh");
        let mut writer = writer.args(["-c", script]).arg(&pipe).spawn().expect("a shell");
        assert_eq!(read(&pipe, 100).expect("its words"), "one\ntwo\n");
        assert!(writer.wait().expect("its end").success());
    }
}
