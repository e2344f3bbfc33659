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

/// The same, or the reason to skip a test, loudly; an error where CI says that it must be there.
#[allow(clippy::print_stderr, reason = "a skipped test says so")]
pub fn or_skip(test: &str) -> Option<PathBuf> {
    let found = with_cuda();
    if found.is_none() {
        let required = std::env::var("CUDA_CLUSTER_REQUIRE").unwrap_or_default();
        let why = "libucx-cu13 is not in .venv: scripts/setup.sh --tests installs it";
        assert!(!required.split(',').any(|wanted| wanted == "ucx-cuda"), "{why}");
        eprintln!("SKIPPED {test}: {why}");
    }
    found
}
