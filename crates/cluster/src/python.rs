//! Our Python packages, carried inside this program and written out for the processes.
//!
//! *Invariant:* the package that is written is the one that this program was built with.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// A package: its name, and its files.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Package {
    pub(crate) name: &'static str,
    pub(crate) files: &'static [(&'static str, &'static str)],
}

/// Processes that are forked instead of executed, whatever they do then.
pub(crate) const FORK: Package = Package {
    name: "cuda_cluster_fork",
    files: &[
        ("__init__.py", include_str!("python/cuda_cluster_fork/__init__.py")),
        ("__main__.py", include_str!("python/cuda_cluster_fork/__main__.py")),
        ("birth.py", include_str!("python/cuda_cluster_fork/birth.py")),
        ("failure.py", include_str!("python/cuda_cluster_fork/failure.py")),
        ("pipe.py", include_str!("python/cuda_cluster_fork/pipe.py")),
        ("server.py", include_str!("python/cuda_cluster_fork/server.py")),
        ("warm.py", include_str!("python/cuda_cluster_fork/warm.py")),
    ],
};

impl Package {
    /// Writes the package into a directory; returns the path that Python is to run.
    ///
    /// # Errors
    /// If the directory or a file cannot be written; with its path.
    pub(crate) fn write(self, directory: &Path) -> Result<PathBuf, (PathBuf, io::Error)> {
        let package = directory.join(self.name);
        fs::create_dir_all(&package).map_err(|error| (package.clone(), error))?;
        for (name, text) in self.files {
            let path = package.join(name);
            fs::write(&path, text).map_err(|error| (path, error))?;
        }
        Ok(package)
    }
}
