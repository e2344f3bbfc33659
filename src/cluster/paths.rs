//! Checks that the directories and files named in a plan are usable before anything is started;
//! otherwise a worker would notice only when it spills for the first time.
//!
//! *Invariant:* a check leaves nothing behind: it removes whatever it has created.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::plan::{EnginePlan, Plan};

/// A path that can't be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum PathError {
    /// A directory that can't be created, or written to.
    #[error("'{key}': nothing can be written into {}", path.display())]
    Directory {
        /// The key of the spec that names it.
        key: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// A program that can't be run.
    #[error("'{key}': {} cannot be run", path.display())]
    Program {
        /// The key of the spec that names it.
        key: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// A file that can't be written.
    #[error("'{key}': {} cannot be written", path.display())]
    File {
        /// The key of the spec that names it.
        key: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl PathError {
    /// A hint for the user.
    pub fn hint(&self) -> String {
        match self {
            Self::Directory { .. } => "name a directory that is yours, or one that can be made",
            Self::Program { .. } => "name a program that is there and that you may execute",
            Self::File { .. } => "name a file in a directory that is there and yours",
        }
        .to_owned()
    }
}

/// Checks all paths that the plan's processes will use.
///
/// # Errors
/// If one of them can't be used.
pub(super) fn check(plan: &Plan) -> Result<(), PathError> {
    if let Some(path) = &plan.supervision.pid_file {
        file("worker.pid_file", path)?;
    }
    match &plan.engine {
        EnginePlan::Command(_) => {}
        EnginePlan::Native(native) => {
            if let Some(path) = &native.local_directory {
                directory("worker.local_directory", path)?;
            }
            if let Some(path) = &native.program {
                program("native.program", path)?;
            }
        }
        EnginePlan::Dask(dask) => {
            if let Some(path) = &dask.local_directory {
                directory("worker.local_directory", path)?;
            }
            if let Some(path) = &dask.scheduler_file {
                file("scheduler.file", path)?;
            }
            let pools = plan.workers.iter().filter_map(|worker| worker.rmm.as_ref());
            if let Some(path) = pools.filter_map(|rmm| rmm.log_directory.as_ref()).next() {
                directory("rmm.log_directory", path.as_ref())?;
            }
        }
    }
    Ok(())
}

/// Creates a directory with its parents, writes into it, and removes everything again.
fn directory(key: &'static str, path: &Path) -> Result<(), PathError> {
    let above = path.ancestors().filter(|part| !part.as_os_str().is_empty());
    let missing: Vec<&Path> = above.take_while(|part| !part.exists()).collect();
    let written = fs::create_dir_all(path).and_then(|()| write_in(path));
    for made in missing {
        // Removal fails if it was not created, or if it contains files of others.
        let _ = fs::remove_dir(made);
    }
    written.map_err(|source| PathError::Directory { key, path: path.to_owned(), source })
}

/// Creates a file with a unique name, and removes it.
fn write_in(directory: &Path) -> io::Result<()> {
    let trial = directory.join(format!(".cuda-cluster-{}", std::process::id()));
    OpenOptions::new().write(true).create_new(true).open(&trial)?;
    fs::remove_file(&trial)
}

/// Checks that a file could be written, without changing an existing one.
fn file(key: &'static str, path: &Path) -> Result<(), PathError> {
    let looked = match fs::metadata(path) {
        Ok(there) if there.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
        Ok(_) => OpenOptions::new().append(true).open(path).map(drop),
        Err(_) => {
            let above = path.parent().filter(|above| !above.as_os_str().is_empty());
            write_in(above.unwrap_or(Path::new(".")))
        }
    };
    looked.map_err(|source| PathError::File { key, path: path.to_owned(), source })
}

/// Checks that a program could be run. One without a slash is searched when it is run.
fn program(key: &'static str, path: &Path) -> Result<(), PathError> {
    if path.components().count() == 1 && path.is_relative() {
        return Ok(());
    }
    let runs = |there: fs::Metadata| there.is_file() && there.permissions().mode() & 0o111 != 0;
    let looked = match fs::metadata(path).map(runs) {
        Ok(true) => return Ok(()),
        Ok(false) => io::ErrorKind::PermissionDenied.into(),
        Err(error) => error,
    };
    Err(PathError::Program { key, path: path.to_owned(), source: looked })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_look_leaves_nothing_behind() {
        let folder = tempfile::tempdir().expect("a directory");
        directory("worker.local_directory", &folder.path().join("a/b/c")).expect("it can be made");
        file("scheduler.file", &folder.path().join("address.json")).expect("it can be written");
        assert_eq!(fs::read_dir(folder.path()).expect("readable").count(), 0);
    }

    #[test]
    fn what_cannot_be_written_is_named_with_its_cause() {
        let folder = tempfile::tempdir().expect("a directory");
        let taken = folder.path().join("file");
        fs::write(&taken, "kept").expect("written");
        for path in [Path::new("/proc/nope"), &taken, &taken.join("below")] {
            let error = directory("worker.local_directory", path).expect_err("no directory");
            assert!(error.to_string().contains(&path.display().to_string()), "{error}");
        }
        assert!(file("scheduler.file", folder.path()).is_err(), "a directory is no file");
        assert!(file("scheduler.file", &folder.path().join("no/file")).is_err());
        file("scheduler.file", &taken).expect("a file that is there can be written again");
        assert_eq!(fs::read_to_string(&taken).expect("still there"), "kept");
    }
}
