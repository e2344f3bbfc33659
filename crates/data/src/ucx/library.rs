//! libucp, opened at run time.
//!
//! Does not choose among several installed libraries; it opens the one it is given.
//!
//! *Invariant:* an opened library stays open until the process ends, because UCX leaves threads
//! and exit handlers behind.

use std::ffi::c_uint;
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::Error;
use super::abi::Functions;
pub use cuda_cluster_model::plan::LIBRARY_VARIABLE;

/// The name of every libucp since 1.0; the loader looks in `LD_LIBRARY_PATH` and the system.
const SONAME: &str = "libucp.so.0";

/// The oldest UCX that has everything used here; also the version of the headers.
pub(super) const OLDEST: Version = Version { major: 1, minor: 12, patch: 0 };

/// A UCX version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// Always 1 so far.
    pub major: u32,
    /// Counts releases.
    pub minor: u32,
    /// Counts corrections.
    pub patch: u32,
}

impl Version {
    /// Whether it unmaps peers' device memory beyond a limit (`CUDA_IPC_CACHE_MAX_SIZE`).
    pub fn limits_mappings(self) -> bool {
        self >= Version { major: 1, minor: 21, patch: 0 }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// An open libucp.
pub struct Library {
    /// Never closed; see the module's invariant.
    _handle: ManuallyDrop<libloading::Library>,
    pub(super) functions: Functions,
    name: PathBuf,
    version: Version,
}

impl Library {
    /// Opens the libucp at `path`, which may also be its directory or the installation's; without a
    /// path, the one that the dynamic loader finds.
    ///
    /// # Errors
    /// If there is none, or it is too old.
    #[doc(alias = "ucp_get_version")]
    pub fn open(path: Option<&Path>) -> Result<Arc<Self>, Error> {
        let name = path.map_or_else(|| PathBuf::from(SONAME), file);
        // SAFETY: libucp's initialisers have no preconditions; a file that is no libucp is refused
        // below for its missing functions.
        let handle = unsafe { libloading::Library::new(&name) }
            .map_err(|source| Error::Open { name: name.clone(), source })?;
        let handle = ManuallyDrop::new(handle);
        // SAFETY: these functions have had these signatures since UCX 1.12, and the handle is never
        // closed.
        let functions = unsafe { Functions::find(&handle) }.map_err(|(function, source)| {
            Error::Function { name: name.clone(), function, source }
        })?;
        let (mut major, mut minor, mut patch): (c_uint, c_uint, c_uint) = (0, 0, 0);
        // SAFETY: three valid places for three numbers.
        unsafe { (functions.ucp_get_version)(&raw mut major, &raw mut minor, &raw mut patch) };
        let version = Version { major, minor, patch };
        if version < OLDEST {
            return Err(Error::TooOld { name, found: version });
        }
        Ok(Arc::new(Self { _handle: handle, functions, name, version }))
    }

    /// The file name or path that was opened.
    pub fn name(&self) -> &Path {
        &self.name
    }

    /// The library's version.
    pub fn version(&self) -> Version {
        self.version
    }
}

/// The library at a path that may name a directory.
fn file(path: &Path) -> PathBuf {
    let within = ["", "lib"].map(|folder| path.join(folder).join(SONAME));
    let found = path.is_dir().then(|| within.into_iter().find(|file| file.exists()));
    found.flatten().unwrap_or_else(|| path.to_path_buf())
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library").field("name", &self.name).field("version", &self.version).finish()
    }
}
