//! Skips a test that cannot run here, and records that it was skipped.
//!
//! libtest has no skip at run time: a test that returns early has passed, and its output is not
//! shown. So each skip adds a line to the file named by `CUDA_CLUSTER_SKIPS`, which
//! `scripts/test.sh` counts and shows. It is a failure if `CUDA_CLUSTER_REQUIRE` lists what is
//! missing.

use std::io::Write;

/// Skips the calling test because `what` (`dask`, `root`) is missing: the caller must return.
///
/// # Panics
/// If `CUDA_CLUSTER_REQUIRE` lists `what`, or `all`.
pub(crate) fn skip(what: &str, reason: &str) {
    let required = std::env::var("CUDA_CLUSTER_REQUIRE").unwrap_or_default();
    let required = required.split(',').any(|word| word == what || word == "all");
    assert!(!required, "CUDA_CLUSTER_REQUIRE has {what:?}, and {reason}");
    let thread = std::thread::current();
    let binary = std::env::current_exe().ok();
    let binary = binary.as_ref().and_then(|path| path.file_stem()?.to_str()).unwrap_or("?");
    // Cargo appends a hash to the name.
    let binary = binary.rsplit_once('-').map_or(binary, |(name, _)| name);
    let line = format!("{what}: {binary} {}: {reason}\n", thread.name().unwrap_or("?"));
    // Not `eprintln!`, which the test harness captures.
    let _ = std::io::stderr().write_all(format!("skipped for want of {line}").as_bytes());
    if let Some(file) = std::env::var_os("CUDA_CLUSTER_SKIPS") {
        let file = std::fs::OpenOptions::new().append(true).create(true).open(file);
        file.and_then(|mut file| file.write_all(line.as_bytes())).expect("the skip is counted");
    }
}
