//! Crash bundles: a directory with everything known about an abnormal exit, with secrets masked.
//!
//! *Invariant:* a bundle has no values of variables whose names suggest a secret.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::ProcessState;
use super::record::GpuError;
use cuda_cluster_machine::os::log_file;

/// Maximum number of bundles per cluster; the oldest are removed.
const KEPT: usize = 32;

/// Number of last log lines in a bundle.
const LINES: usize = 500;

/// The contents of `crash.json`.
#[derive(Debug, Serialize)]
pub(super) struct Crash<'a> {
    /// The process's state: exit and reason, requested and actual binding, lanes, timings.
    pub(super) process: &'a ProcessState,
    /// Its process id.
    pub(super) pid: Option<u32>,
    /// Program and arguments.
    pub(super) argv: &'a [String],
    /// Its environment, with secrets masked.
    pub(super) environment: BTreeMap<String, String>,
    /// Maximum core file size in bytes; `None` if unlimited.
    pub(super) core_limit_bytes: Option<u64>,
    /// Errors that the GPU's driver reported while the process ran.
    pub(super) gpu_errors: &'a [GpuError],
    /// What the program has written of its failure, as PyTorch's `record` does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) error: Option<String>,
}

/// Most of an error file that is read.
const ERROR_BYTES: u64 = 256 << 10;

/// Takes what a program has written of its failure.
pub(super) fn take_error(path: &Path) -> Option<String> {
    let error = read_error(path);
    // The next process of this rank writes its own.
    let _ = fs::remove_file(path);
    error
}

/// What a program has written of its failure: the call stack, or else the message.
pub fn read_error(path: &Path) -> Option<String> {
    let mut text = String::new();
    fs::File::open(path).ok()?.take(ERROR_BYTES).read_to_string(&mut text).ok()?;
    let said: serde_json::Value = serde_json::from_str(&text).ok()?;
    let message = &said["message"];
    let stack = &message["extraInfo"]["py_callstack"];
    let told = [stack, &message["message"], message].into_iter().find_map(|one| one.as_str())?;
    Some(told.trim_end().to_owned())
}

/// Writes a bundle below `crashes`, and removes the oldest if there are too many.
pub(super) fn write(crashes: &Path, crash: &Crash<'_>, log: &Path) -> io::Result<PathBuf> {
    private_directory(crashes)?;
    prune(crashes, KEPT - 1);
    let number = 1 + newest(crashes);
    let bundle = crashes.join(format!("{number:04}-{}", crash.process.name));
    private_directory(&bundle)?;
    fs::write(bundle.join("crash.json"), serde_json::to_vec_pretty(crash)?)?;
    let mut lines = log_file::last_lines(log, LINES).join("\n");
    lines.push('\n');
    fs::write(bundle.join("log.txt"), lines)?;
    Ok(bundle)
}

fn private_directory(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Bundles, oldest first; their names begin with a number.
fn bundles(crashes: &Path) -> Vec<(u32, PathBuf)> {
    let entries = fs::read_dir(crashes).into_iter().flatten().flatten();
    let numbered = entries.filter_map(|entry| {
        let name = entry.file_name();
        let number = name.to_str()?.split_once('-')?.0.parse().ok()?;
        Some((number, entry.path()))
    });
    let mut bundles: Vec<_> = numbered.collect();
    bundles.sort();
    bundles
}

fn newest(crashes: &Path) -> u32 {
    bundles(crashes).last().map_or(0, |(number, _)| *number)
}

fn prune(crashes: &Path, keep: usize) {
    let bundles = bundles(crashes);
    for (_, old) in &bundles[..bundles.len().saturating_sub(keep)] {
        // A bundle that can't be removed only takes space.
        let _ = fs::remove_dir_all(old);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_programs_own_words_are_taken_once() {
        let folder = tempfile::tempdir().expect("a directory");
        let path = folder.path().join("error.json");
        for (written, told) in [
            (
                r#"{"message": {"message": "E: x", "extraInfo": {"py_callstack": "Trace\nE: x\n"}}}"#,
                Some("Trace\nE: x"),
            ),
            (r#"{"message": {"message": "E: x"}}"#, Some("E: x")),
            (r#"{"message": "x"}"#, Some("x")),
            (r#"{"message": {"#, None),
            ("[]", None),
        ] {
            fs::write(&path, written).expect("a file");
            assert_eq!(take_error(&path).as_deref(), told, "{written}");
            assert_eq!(take_error(&path), None, "it is gone");
        }
    }

    #[test]
    fn the_oldest_bundles_go_first() {
        let folder = tempfile::tempdir().expect("a directory");
        for number in 1..6 {
            fs::create_dir(folder.path().join(format!("{number:04}-gpu0"))).expect("made");
        }
        prune(folder.path(), 2);
        let left: Vec<u32> = bundles(folder.path()).into_iter().map(|(number, _)| number).collect();
        assert_eq!(left, [4, 5]);
    }
}
