//! The example program: its own functions on its own workers.

#![cfg(feature = "cli")]

use std::path::PathBuf;
use std::process::Command;

#[test]
fn a_program_of_under_eighty_lines_computes_on_a_cluster_of_itself() {
    let source = include_str!("../examples/saxpy.rs");
    assert!(source.lines().count() < 80, "{}", source.lines().count());
    // Cargo builds examples beside the tests' own binaries.
    let mut program = PathBuf::from(env!("CARGO_BIN_EXE_cuda-cluster"));
    program.set_file_name("examples");
    let directory = tempfile::tempdir().expect("a directory");
    let run = Command::new(program.join("saxpy"))
        .env("XDG_RUNTIME_DIR", directory.path())
        .env_remove("LD_LIBRARY_PATH")
        .output()
        .expect("the example is built");
    let text = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success(), "{run:?}");
    // 3 · (0 + 1 + … + 7999), as near as single precision adds.
    let sum = text.lines().find_map(|line| line.strip_prefix("the sum of 2x + x is "));
    let sum: f64 = sum.and_then(|sum| sum.parse().ok()).expect("a sum");
    assert!((sum / 95_988_000.0 - 1.0).abs() < 1e-3, "{text}");
    let panicked = text.contains("panicked on gpu") && text.contains("this one always does");
    assert!(panicked, "{text}");
}
