//! The libucp that knows CUDA, for tests that move device memory: PyPI's `libucx-cu13`.
//!
//! *Invariant:* only the repository's own Python environment is looked at, which
//! `scripts/setup.sh --tests` makes.

use std::path::{Path, PathBuf};

/// `libucp.so.0` with its CUDA transports.
pub fn with_cuda() -> Option<PathBuf> {
    let pythons = Path::new(env!("CARGO_MANIFEST_DIR")).join(".venv/lib").read_dir();
    let libraries = pythons.into_iter().flatten().flatten();
    let mut libraries = libraries.map(|python| python.path().join("site-packages/libucx/lib"));
    let libraries = libraries.find(|lib| lib.join("ucx/libuct_cuda.so.0").exists())?;
    Some(libraries.join("libucp.so.0"))
}
