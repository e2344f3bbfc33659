//! Why a run directory can't be used, and what its user can do.
//!
//! Does not decide which error is which.
//!
//! *Invariant:* every error names the path.

use std::io;
use std::path::PathBuf;

use super::SOCKET_PATH_LIMIT;
use cuda_cluster_model::ids::ClusterName;

/// Why a run directory can't be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum RunDirectoryError {
    /// Another supervisor (or its guardian) owns it.
    #[error("a cluster named {name} is already running in {}", path.display())]
    Taken { name: ClusterName, path: PathBuf },
    /// It belongs to another user.
    #[error("{} belongs to user {owner}, not to user {wanted}", path.display())]
    Foreign {
        path: PathBuf,
        owner: u32,
        /// This user.
        wanted: u32,
    },
    /// There is a link or a file in place of the directory.
    #[error("{} is {what}, not a directory", path.display())]
    NoDirectory {
        path: PathBuf,
        /// The kind of file.
        what: &'static str,
    },
    /// Other users may write to it.
    #[error("{} is open to other users (mode {mode:03o})", path.display())]
    Open {
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// The socket's path would not fit into a socket address.
    #[error("{} has {length} bytes, and a socket's path at most {SOCKET_PATH_LIMIT}", path.display())]
    TooLong {
        /// The socket's path.
        path: PathBuf,
        length: usize,
    },
    /// A system call failed.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// The attempted action.
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl RunDirectoryError {
    /// A hint for the user.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Taken { name, .. } => {
                Some(format!("choose another 'name', or end that one: cuda-cluster down {name}"))
            }
            Self::Foreign { path, .. } | Self::NoDirectory { path, .. } => Some(format!(
                "remove {}, or set XDG_RUNTIME_DIR to a directory of your own",
                path.display()
            )),
            Self::Open { path, .. } => Some(format!("chmod 700 {}", path.display())),
            Self::TooLong { .. } => {
                Some("choose a shorter 'name', or a shorter XDG_RUNTIME_DIR".to_owned())
            }
            Self::Io { path, source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
                Some(format!("ls -ld {} says whose it is", path.display()))
            }
            Self::Io { source, .. } => {
                let nowhere = [
                    io::ErrorKind::NotFound,
                    io::ErrorKind::NotADirectory,
                    io::ErrorKind::ReadOnlyFilesystem,
                ];
                nowhere.contains(&source.kind()).then(|| {
                    "set XDG_RUNTIME_DIR, below which run directories are, to a directory of your \
                     own that can be written"
                        .to_owned()
                })
            }
        }
    }
}
