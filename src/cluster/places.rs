//! Whether the directories and files that a plan names can be used, looked at before anything is
//! started: a worker would find out when it spills for the first time.
//!
//! *Invariant:* nothing is left of the look: what it made it removes.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::plan::{EnginePlan, Plan};

/// A place that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PlaceError {
    /// A directory that cannot be made, or written into.
    #[error("'{key}': nothing can be written into {}", path.display())]
    Directory {
        /// The key of the spec that names it.
        key: &'static str,
        /// The directory.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// A program that cannot be run.
    #[error("'{key}': {} cannot be run", path.display())]
    Program {
        /// The key of the spec that names it.
        key: &'static str,
        /// The program.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// A file that cannot be written.
    #[error("'{key}': {} cannot be written", path.display())]
    File {
        /// The key of the spec that names it.
        key: &'static str,
        /// The file.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
}

impl PlaceError {
    /// What the user can do.
    pub fn hint(&self) -> String {
        match self {
            Self::Directory { .. } => "name a directory that is yours, or one that can be made",
            Self::Program { .. } => "name a program that is there and that you may execute",
            Self::File { .. } => "name a file in a directory that is there and yours",
        }
        .to_owned()
    }
}

/// Looks at every place that the plan's processes are to use.
///
/// # Errors
/// At the first that cannot be used.
pub(super) fn check(plan: &Plan) -> Result<(), PlaceError> {
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

/// Makes a directory with those above it, writes into it, and removes all of it again.
fn directory(key: &'static str, path: &Path) -> Result<(), PlaceError> {
    let above = path.ancestors().filter(|part| !part.as_os_str().is_empty());
    let missing: Vec<&Path> = above.take_while(|part| !part.exists()).collect();
    let written = fs::create_dir_all(path).and_then(|()| write_in(path));
    for made in missing {
        // It is not there, or somebody has put something into it meanwhile.
        let _ = fs::remove_dir(made);
    }
    written.map_err(|source| PlaceError::Directory { key, path: path.to_owned(), source })
}

/// Makes a file of a name that nobody else uses, and removes it.
fn write_in(directory: &Path) -> io::Result<()> {
    let trial = directory.join(format!(".cuda-cluster-{}", std::process::id()));
    OpenOptions::new().write(true).create_new(true).open(&trial)?;
    fs::remove_file(&trial)
}

/// Looks whether a file could be written, without changing one that is there.
fn file(key: &'static str, path: &Path) -> Result<(), PlaceError> {
    let looked = match fs::metadata(path) {
        Ok(there) if there.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
        Ok(_) => OpenOptions::new().append(true).open(path).map(drop),
        Err(_) => {
            let above = path.parent().filter(|above| !above.as_os_str().is_empty());
            write_in(above.unwrap_or(Path::new(".")))
        }
    };
    looked.map_err(|source| PlaceError::File { key, path: path.to_owned(), source })
}

/// Looks whether a program could be run. One without a slash is looked up when it is.
fn program(key: &'static str, path: &Path) -> Result<(), PlaceError> {
    if path.components().count() == 1 && path.is_relative() {
        return Ok(());
    }
    let runs = |there: fs::Metadata| there.is_file() && there.permissions().mode() & 0o111 != 0;
    let looked = match fs::metadata(path).map(runs) {
        Ok(true) => return Ok(()),
        Ok(false) => io::ErrorKind::PermissionDenied.into(),
        Err(error) => error,
    };
    Err(PlaceError::Program { key, path: path.to_owned(), source: looked })
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
