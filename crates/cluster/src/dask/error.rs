//! Why the Dask engine cannot be used.

use std::io;
use std::path::PathBuf;

use super::requirement::{Missing, install_line};

/// Why the Dask engine cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum DaskError {
    /// No Python was found.
    #[error("no Python found to run Dask with: looked for {}", looked_for.join(", "))]
    NoPython {
        /// Where it could have been.
        looked_for: Vec<String>,
    },
    /// The Python that was asked for does not exist or is not executable.
    #[error("{} is not a Python that can be run", path.display())]
    NotThere {
        /// The path, as the user gave it.
        path: PathBuf,
    },
    /// It could not be run.
    #[error("cannot run {}", path.display())]
    Run {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The program runs, but is not a Python interpreter.
    #[error("{} did not answer like a Python interpreter: {output}", path.display())]
    Mute {
        path: PathBuf,
        /// The last line that it wrote to standard error.
        output: String,
    },
    /// It is too old.
    #[error("{} is Python {version}, and Dask needs at least {least}", path.display())]
    OldPython {
        path: PathBuf,
        version: String,
        /// The oldest that will do.
        least: &'static str,
    },
    /// Packages are missing, or too old.
    #[error("{} lacks {}", path.display(), list(missing))]
    Missing {
        path: PathBuf,
        missing: Vec<Missing>,
        /// CUDA's major version, if an installed package reveals it.
        cuda_major: Option<u32>,
    },
    /// The installed packages are for different CUDA versions.
    #[error("{} has packages for different CUDA versions: {}", path.display(), packages.join(", "))]
    CudaMismatch { path: PathBuf, packages: Vec<String> },
    /// `dask` and `distributed` are released together, and these versions don't match.
    #[error("{} has dask {dask} and distributed {distributed}, which don't match", path.display())]
    VersionMismatch {
        path: PathBuf,
        /// Version of `dask`.
        dask: String,
        /// Version of `distributed`.
        distributed: String,
    },
    /// Our package could not be written into the run directory.
    #[error("cannot write {}", path.display())]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

fn list(missing: &[Missing]) -> String {
    let texts: Vec<String> = missing.iter().map(ToString::to_string).collect();
    texts.join(", and ")
}

impl DaskError {
    /// What the user can do.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::NoPython { .. } | Self::NotThere { .. } => Some(
                "activate an environment with Dask, or name its Python: 'dask.python'".to_owned(),
            ),
            Self::OldPython { .. } | Self::Mute { .. } | Self::Run { .. } => {
                Some("name another Python: 'dask.python'".to_owned())
            }
            Self::Missing { path, missing, cuda_major } => {
                Some(install_line(path, missing, *cuda_major))
            }
            Self::CudaMismatch { .. } => {
                Some("keep the packages of one CUDA version, and uninstall the others".to_owned())
            }
            Self::VersionMismatch { path, distributed, .. } => {
                let path = path.display();
                Some(format!("{path} -m pip install dask=={distributed}"))
            }
            Self::Write { .. } => None,
        }
    }
}
