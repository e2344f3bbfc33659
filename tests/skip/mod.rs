//! A test that cannot run here says so where somebody counts.
//!
//! libtest knows no skip at run time: a test that returns early has passed, and what it printed is
//! not shown. So each skip is a line of the file that `CUDA_CLUSTER_SKIPS` names, which
//! `scripts/test.sh` counts and shows, and a failure where `CUDA_CLUSTER_REQUIRE` has what lacks.

use std::io::Write;

/// Skips the test that calls it, for want of `what` (`dask`, `root`): the caller returns.
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
    // Cargo ends the name with a hash.
    let binary = binary.rsplit_once('-').map_or(binary, |(name, _)| name);
    let line = format!("{what}: {binary} {}: {reason}\n", thread.name().unwrap_or("?"));
    // Not `eprintln!`, which the test harness keeps to itself.
    let _ = std::io::stderr().write_all(format!("skipped for want of {line}").as_bytes());
    if let Some(file) = std::env::var_os("CUDA_CLUSTER_SKIPS") {
        let file = std::fs::OpenOptions::new().append(true).create(true).open(file);
        file.and_then(|mut file| file.write_all(line.as_bytes())).expect("the skip is counted");
    }
}
