//! Reads what a cluster's processes used over time, also of a cluster that has ended.
//!
//! *Invariant:* whatever stands in the file's place, no more than a limited part of it is read.

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use super::Paths;
use cuda_cluster_machine::os::reading;
use cuda_cluster_wire::history::{FILE_LIMIT, History, HistoryError, pairs};

/// Why there is no history to show.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum NoHistory {
    /// Nothing was written yet, or nothing is left.
    #[error("there is no history: it begins ten seconds after the start")]
    Missing,
    /// The file can't be read.
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// Something else is in the file.
    #[error("cannot use {}", path.display())]
    Content {
        path: PathBuf,
        #[source]
        source: HistoryError,
    },
}

/// The history in a run directory. Blocks.
///
/// # Errors
/// If there is none.
pub fn recorded_history(paths: &Paths) -> Result<History, NoHistory> {
    read(&paths.history(), History::read)
}

/// What went between the workers, from the same run directory. Blocks.
///
/// # Errors
/// If there is none, such as of a cluster whose workers do not count it.
pub fn recorded_pairs(paths: &Paths) -> Result<pairs::History, NoHistory> {
    read(&paths.history_pairs(), pairs::History::read)
}

fn read<T>(path: &Path, of: impl Fn(&[u8]) -> Result<T, HistoryError>) -> Result<T, NoHistory> {
    let mut bytes = Vec::new();
    let read = reading::open(path).and_then(|file| file.take(FILE_LIMIT).read_to_end(&mut bytes));
    let path = || path.to_owned();
    match read {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(NoHistory::Missing),
        Err(source) => Err(NoHistory::Read { path: path(), source }),
        Ok(_) => of(&bytes).map_err(|source| NoHistory::Content { path: path(), source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_history_is_named_with_its_cause() {
        let folder = tempfile::tempdir().expect("a directory");
        let paths = Paths::at(folder.path());
        assert!(matches!(recorded_history(&paths), Err(NoHistory::Missing)));
        std::fs::write(paths.history(), "hello").expect("written");
        assert!(matches!(recorded_history(&paths), Err(NoHistory::Content { .. })));
        std::fs::remove_file(paths.history()).expect("removed");
        std::fs::create_dir(paths.history()).expect("made");
        let error = recorded_history(&paths).expect_err("a directory");
        assert!(error.to_string().contains("cannot read"), "{error}");
    }
}
