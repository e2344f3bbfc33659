//! Runs a test program again with each libucp of this machine, because a process can open only one.
#![allow(dead_code, clippy::print_stdout, reason = "each test program uses a part")]

use std::path::{Path, PathBuf};
use std::process::Command;

use cuda_cluster::ucx::LIBRARY_VARIABLE;

/// The libucp to test, if this process was started by [`each`].
pub(crate) fn named() -> Option<PathBuf> {
    std::env::var_os(LIBRARY_VARIABLE).map(PathBuf::from)
}

/// Every libucp of this machine that a cluster might use, and that of the repository's own Python
/// environment.
fn installed() -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = cuda_cluster::probe::caller()
        .ucx_libraries
        .iter()
        .flatten()
        .map(|one| one.path.clone().into())
        .collect();
    let top = Path::new(env!("CARGO_MANIFEST_DIR"));
    let oldest = top.join("target/oldest-ucx/lib/libucp.so.0");
    if oldest.exists() {
        found.push(oldest);
    }
    let pythons = top.join(".venv/lib").read_dir();
    for python in pythons.into_iter().flatten().flatten() {
        let path = python.path().join("site-packages/libucx/lib/libucp.so.0");
        if path.exists() && !found.contains(&path) {
            found.push(path);
        }
    }
    found
}

/// Runs the tests with these names in a process for each libucp, and prints the libraries.
pub(crate) fn each(tests: &[&str]) {
    // Such a process starts no more of them.
    if named().is_some() {
        return;
    }
    let libraries = installed();
    for wanted in ["libucx/lib", "hpcx", "oldest-ucx"] {
        if !libraries.iter().any(|path| path.to_string_lossy().contains(wanted)) {
            println!("not tested, for it is not here: a libucp in {wanted}");
        }
    }
    for library in libraries {
        let output = Command::new(std::env::current_exe().expect("a test program"))
            .args(["--exact", "--nocapture"])
            .args(tests)
            .env(LIBRARY_VARIABLE, &library)
            // Cargo sets it to the libucp that ucx1-sys built, whose parts must not be mixed in.
            .env_remove("LD_LIBRARY_PATH")
            .output()
            .expect("a process");
        let (out, err) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{}: {}\n{out}\n{err}", library.display(), output.status);
        let ran = format!("test result: ok. {} passed", tests.len());
        assert!(out.contains(&ran), "{}:\n{out}", library.display());
        println!("tested: {}", library.display());
    }
}
