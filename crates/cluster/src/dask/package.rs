//! Our Python package, carried inside this program and written out for the processes.
//!
//! *Invariant:* the package that is written is the one that this program was built with.

use std::fs;
use std::path::{Path, PathBuf};

use super::DaskError;

/// The package's name, and that of its directory.
const NAME: &str = "cuda_cluster_dask";

macro_rules! files {
    ($($name:literal,)*) => { [$(($name, include_str!(concat!("python/cuda_cluster_dask/", $name)))),*] };
}

pub(super) const FILES: [(&str, &str); 26] = files![
    "__init__.py",
    "__main__.py",
    "adaptive.py",
    "birth.py",
    "control.py",
    "dashboard.py",
    "failure.py",
    "fork_server.py",
    "gpu.py",
    "imports.py",
    "internals.py",
    "kept_ports.py",
    "lanes.py",
    "measure.py",
    "nanny.py",
    "ports.py",
    "process.py",
    "retirement.py",
    "scheduler.py",
    "sent_as.py",
    "settings.py",
    "status.py",
    "storage.py",
    "verify.py",
    "wakeup.py",
    "worker.py",
];

/// Writes the package into a directory; returns the path that Python is to run.
///
/// # Errors
/// If the directory or a file cannot be written.
pub(super) fn write(directory: &Path) -> Result<PathBuf, DaskError> {
    let package = directory.join(NAME);
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| DaskError::Write { path, source }
    };
    fs::create_dir_all(&package).map_err(failed(&package))?;
    for (name, text) in FILES {
        let path = package.join(name);
        fs::write(&path, text).map_err(failed(&path))?;
    }
    Ok(package)
}
