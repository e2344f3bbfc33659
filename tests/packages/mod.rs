//! Runs what needs the Python packages of `.venv`, with the binary under test.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::skip::skip;

/// The project's directory.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The Python of the tests.
pub(crate) fn python() -> PathBuf {
    root().join(".venv/bin/python")
}

/// Whether the Python of the tests has what they need; the test that asks is skipped where not.
pub(crate) fn packages() -> bool {
    let needed = "import distributed, pytest, pytest_timeout, pandas, bokeh";
    let there = Command::new(python()).args(["-c", needed]).output();
    let there = there.is_ok_and(|output| output.status.success());
    if !there {
        skip("dask", ".venv has no pytest or no Dask; scripts/setup.sh --tests");
    }
    there
}

/// Runs a command to its end, which must be a success; returns what it printed.
pub(crate) fn passes(command: &mut Command) -> String {
    command.env("CUDA_CLUSTER_BIN", env!("CARGO_BIN_EXE_cuda-cluster"));
    command.env_remove("CUDA_VISIBLE_DEVICES").env("PYTHONDONTWRITEBYTECODE", "1");
    let output = command.output().expect("Python starts");
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}\n{out}\n{err}", output.status);
    out.into_owned()
}
