//! The Python package of the Dask engine.
//!
//! *Invariant:* what it imports of ours is written beside it.

use std::path::{Path, PathBuf};

use super::DaskError;
use crate::python::{FORK, Package};

macro_rules! files {
    ($($name:literal,)*) => { &[$(($name, include_str!(concat!("../python/cuda_cluster_dask/", $name)))),*] };
}

pub(super) const DASK: Package = Package {
    name: "cuda_cluster_dask",
    files: files![
        "__init__.py",
        "__main__.py",
        "adaptive.py",
        "between.py",
        "by_kind.py",
        "by_wires.py",
        "control.py",
        "dashboard.py",
        "fetching.py",
        "fork_server.py",
        "frames.py",
        "gpu.py",
        "hooks.py",
        "imports.py",
        "internals.py",
        "joined.py",
        "kept_ports.py",
        "kinds.py",
        "lanes.py",
        "meanwhile.py",
        "measure.py",
        "nanny.py",
        "ports.py",
        "process.py",
        "queued.py",
        "received.py",
        "retirement.py",
        "scheduler.py",
        "sent_as.py",
        "settings.py",
        "silence.py",
        "status.py",
        "storage.py",
        "tasks.py",
        "verify.py",
        "wakeup.py",
        "wires.py",
        "worker.py",
    ],
};

/// Writes the package into a directory; returns the path that Python is to run.
///
/// # Errors
/// If the directory or a file cannot be written.
pub(super) fn write(directory: &Path) -> Result<PathBuf, DaskError> {
    let failed = |(path, source)| DaskError::Write { path, source };
    FORK.write(directory).map_err(failed)?;
    DASK.write(directory).map_err(failed)
}
