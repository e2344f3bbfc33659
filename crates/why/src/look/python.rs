//! The stacks of a Python process, read from its memory by py-spy while it goes on.
//!
//! *Invariant:* the process is never stopped, so a stack of a thread that runs may be torn; then
//! the look fails, and is tried again.

use std::collections::BTreeMap;
use std::fs;
use std::io;

use cuda_cluster_model::text::masked_line;
use py_spy::config::LockingStrategy;
use py_spy::{Config, PythonSpy};

use super::ends::is_local;
use crate::evidence::Frame;

/// How often a torn stack is tried again.
const TRIES: usize = 3;

/// The longest line of a program that is shown, in characters.
const LONGEST_LINE: usize = 100;

/// Frames of a stack that are kept: the innermost ones, and the outermost.
const INNERMOST: usize = 24;
const OUTERMOST: usize = 8;

/// A process of which the interpreter was found.
pub(super) struct Python {
    spy: PythonSpy,
}

/// The stack of one thread.
#[derive(Clone, Debug, Default)]
pub(super) struct Stack {
    pub(super) frames: Vec<Frame>,
    pub(super) has_gil: bool,
}

impl Python {
    /// Finds the interpreter in a process; `Ok(None)` if it is not Python.
    pub(super) fn find(pid: u32) -> Result<Option<Self>, String> {
        match is_python(pid) {
            Ok(true) => {}
            Ok(false) => return Ok(None),
            Err(error) => return Err(format!("/proc/{pid}/exe: {error}")),
        }
        let config = Config { blocking: LockingStrategy::NonBlocking, ..Config::default() };
        match PythonSpy::new(pid.cast_signed(), &config) {
            Ok(spy) => Ok(Some(Self { spy })),
            Err(error) => Err(format!("{error:#}")),
        }
    }

    pub(super) fn version(&self) -> String {
        let version = &self.spy.version;
        format!("{}.{}.{}", version.major, version.minor, version.patch)
    }

    /// The stacks by thread. Before Python 3.11 the interpreter does not know the kernel's number
    /// of a thread; then `main` alone is known, and only if it is the only one.
    pub(super) fn stacks(&mut self, main: u32) -> Result<BTreeMap<u32, Stack>, String> {
        let mut result = self.spy.get_stack_traces();
        for _ in 1..TRIES {
            if result.is_ok() {
                break;
            }
            result = self.spy.get_stack_traces();
        }
        let traces = result.map_err(|error| format!("{error:#}"))?;
        let alone = traces.len() == 1;
        let stack = |trace: py_spy::StackTrace| {
            let tid = trace.os_thread_id.and_then(|tid| u32::try_from(tid).ok());
            let tid = tid.or(alone.then_some(main))?;
            let frames = trace.frames.into_iter().map(|frame| Frame {
                function: frame.name,
                file: frame.filename,
                line: frame.line,
                code: None,
            });
            Some((tid, Stack { frames: shortened(frames.collect()), has_gil: trace.owns_gil }))
        };
        Ok(traces.into_iter().filter_map(stack).collect())
    }
}

fn shortened(mut frames: Vec<Frame>) -> Vec<Frame> {
    if frames.len() > INNERMOST + OUTERMOST {
        frames.drain(INNERMOST..frames.len() - OUTERMOST);
    }
    frames
}

/// Whether a process has Python's interpreter: as its program, or as a library.
fn is_python(pid: u32) -> io::Result<bool> {
    let program = match fs::read_link(format!("/proc/{pid}/exe")) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Err(error),
        // It ends, or is one of the kernel's.
        found => found.unwrap_or_default(),
    };
    let name = program.file_name().unwrap_or_default().to_string_lossy();
    let library = || {
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
        maps.contains("/libpython3")
    };
    Ok(name.starts_with("python") || library())
}

/// Adds the text of each line, as far as the files can be read: as the process sees them.
pub(super) fn with_code(pid: u32, frames: &mut [Frame], files: &mut Files) {
    for frame in frames {
        frame.code = files.line(pid, &frame.file, frame.line);
    }
}

/// The lines of source files that were read.
#[derive(Default)]
pub(super) struct Files {
    /// Whether those on file systems of servers are read, too.
    remote: bool,
    read: BTreeMap<(u64, String), Option<Vec<String>>>,
}

impl Files {
    pub(super) fn new(remote: bool) -> Self {
        Self { remote, ..Self::default() }
    }

    fn line(&mut self, pid: u32, file: &str, number: i32) -> Option<String> {
        let index = usize::try_from(number).ok()?.checked_sub(1)?;
        // The process may have another root: a container's.
        let root = mount_namespace(pid);
        let remote = self.remote;
        let text = || {
            // A server that does not answer would hold the one who looks, too.
            if !is_local(pid, file) && !remote {
                return None;
            }
            let path = format!("/proc/{pid}/root{file}");
            let short = fs::metadata(&path).is_ok_and(|it| it.is_file() && it.len() < 4 << 20);
            let text = short.then(|| fs::read_to_string(&path).ok()).flatten()?;
            Some(text.lines().map(str::to_owned).collect::<Vec<_>>())
        };
        let lines = self.read.entry((root, file.to_owned())).or_insert_with(text);
        let line = lines.as_ref()?.get(index)?.trim();
        Some(masked_line(&line.chars().take(LONGEST_LINE).collect::<String>()))
    }
}

fn mount_namespace(pid: u32) -> u64 {
    use std::os::unix::fs::MetadataExt as _;
    fs::metadata(format!("/proc/{pid}/ns/mnt")).map_or(0, |data| data.ino())
}
