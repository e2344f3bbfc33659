//! Crash bundles: a directory with everything known about an abnormal exit, with secrets masked.
//!
//! *Invariant:* a bundle has no values of variables whose names suggest a secret.

use std::collections::BTreeMap;
use std::fs;
use std::io;
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
