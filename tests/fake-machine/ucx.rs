//! The libucp that knows CUDA, for tests that move device memory: PyPI's `libucx-cu13`.
//!
//! *Invariant:* only the repository's own Python environments are looked at, which
//! `scripts/setup.sh --tests` makes, unless `CUDA_CLUSTER_TEST_UCX` names a directory of another.

use std::path::{Path, PathBuf};

/// The variable that names another one, in an environment or where pip put it (`--target`).
const OTHER: &str = "CUDA_CLUSTER_TEST_UCX";

/// `libucp.so.0` with its CUDA transports.
pub fn with_cuda() -> Option<PathBuf> {
    if let Some(other) = std::env::var_os(OTHER) {
        let libraries = Path::new(&other).join("libucx/lib");
        assert!(libraries.join("libucp.so.0").exists(), "{OTHER}: {}", libraries.display());
        return Some(libraries.join("libucp.so.0"));
    }
    let pythons = Path::new(env!("CARGO_MANIFEST_DIR")).join(".venv/lib").read_dir();
    let libraries = pythons.into_iter().flatten().flatten();
    let mut libraries = libraries.map(|python| python.path().join("site-packages/libucx/lib"));
    let libraries = libraries.find(|lib| lib.join("ucx/libuct_cuda.so.0").exists())?;
    Some(libraries.join("libucp.so.0"))
}
