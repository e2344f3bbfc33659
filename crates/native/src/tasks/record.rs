//! The log of the task scheduler's events and decisions, and its replay.
//!
//! A log is a frame with the [`Header`] and one frame per [`Entry`], encoded as on the wire: a
//! length of four bytes, little-endian, and a postcard message. Decisions are logged as a checksum,
//! which is enough to see that a replay decides the same.
//!
//! *Invariant:* a write error ends the log, never the scheduler.

use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::core::{Action, Core, Event, Settings};
use cuda_cluster_wire::frame::{FRAME_LIMIT, FrameError, decode, encode, length};

/// The version of the log.
const VERSION: u32 = 2;

#[derive(Serialize, Deserialize)]
struct Header {
    version: u32,
    settings: Settings,
}

/// One event, its time, and the checksum of what was decided.
#[derive(Serialize, Deserialize)]
struct Entry {
    event: Event,
    now: u64,
    decided: u32,
}

/// A log being written.
pub(super) struct Recorder {
    path: PathBuf,
    file: Option<BufWriter<File>>,
}

impl Recorder {
    /// Begins a log; it replaces an earlier one.
    pub(super) fn begin(path: &Path, settings: &Settings) -> Self {
        let file = match File::create(path) {
            Ok(file) => Some(BufWriter::with_capacity(1 << 18, file)),
            Err(error) => {
                tracing::error!(path = %path.display(), %error, "events are not recorded");
                None
            }
        };
        let mut recorder = Self { path: path.to_path_buf(), file };
        recorder.write(&Header { version: VERSION, settings: settings.clone() });
        recorder
    }

    pub(super) fn note(&mut self, event: Event, now: u64, actions: &[Action]) {
        self.write(&Entry { event, now, decided: digest(actions) });
    }

    fn write(&mut self, message: &impl Serialize) {
        let Some(file) = &mut self.file else { return };
        let frame = encode(message).map_err(std::io::Error::other);
        if let Err(error) = frame.and_then(|frame| file.write_all(&frame)) {
            tracing::error!(path = %self.path.display(), %error, "recording ends");
            self.file = None;
        }
    }

    /// Writes everything recorded so far to the file.
    pub(super) fn flush(&mut self) {
        if let Some(Err(error)) = self.file.as_mut().map(Write::flush) {
            tracing::error!(path = %self.path.display(), %error, "recording ends");
            self.file = None;
        }
    }
}

/// A checksum of the decisions. Postcard does not fail on plain values; if it did, both sides
/// would get the same checksum of nothing.
fn digest(actions: &[Action]) -> u32 {
    crc32c::crc32c(&postcard::to_stdvec(actions).unwrap_or_default())
}

/// Why a log cannot be replayed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum ReplayError {
    /// The file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The file is not a log.
    #[error("{} is not a log of a task scheduler", path.display())]
    Frame { path: PathBuf, source: FrameError },
    /// The log is of another version.
    #[error("{} is a log of version {version}, not {VERSION}", path.display())]
    Version { path: PathBuf, version: u32 },
}

/// The outcome of a replay.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Replayed {
    /// Events in the log.
    pub events: u64,
    /// Actions that were decided.
    pub actions: u64,
    /// The first event, counted from 0, at which the decisions differ from the recorded ones.
    pub differs_at: Option<u64>,
}

/// Has a new scheduler decide on every event of a log. An incomplete last frame is ignored.
///
/// # Errors
/// If the file is not a log of this version.
pub fn replay(path: &Path) -> Result<Replayed, ReplayError> {
    let read = |source| ReplayError::Read { path: path.to_path_buf(), source };
    let frame = |source| ReplayError::Frame { path: path.to_path_buf(), source };
    let mut file = BufReader::new(File::open(path).map_err(read)?);
    let first = next(&mut file).map_err(read)?.unwrap_or_default();
    let Header { version, settings } = decode(&first).map_err(frame)?;
    if version != VERSION {
        return Err(ReplayError::Version { path: path.to_path_buf(), version });
    }
    let mut core = Core::new(settings);
    let mut replayed = Replayed::default();
    while let Some(bytes) = next(&mut file).map_err(read)? {
        let Entry { event, now, decided } = decode(&bytes).map_err(frame)?;
        let actions = core.handle(event, now);
        if digest(&actions) != decided && replayed.differs_at.is_none() {
            replayed.differs_at = Some(replayed.events);
        }
        replayed.events += 1;
        replayed.actions += actions.len() as u64;
    }
    Ok(replayed)
}

/// The next frame's message; `None` at the end of the file.
fn next(file: &mut impl Read) -> std::io::Result<Option<Vec<u8>>> {
    let mut prefix = [0; 4];
    let whole = |read: std::io::Result<()>| match read {
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => Ok(false),
        read => read.map(|()| true),
    };
    if !whole(file.read_exact(&mut prefix))? {
        return Ok(None);
    }
    let mut bytes = vec![0; length(prefix, FRAME_LIMIT).map_err(std::io::Error::other)?];
    Ok(whole(file.read_exact(&mut bytes))?.then_some(bytes))
}
