//! The Python of the tests, and the stories that it runs.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use serde_json::Value;

use super::run_directory;
use super::sandbox::Sandbox;
use super::skip::skip;

/// The tests' own Python.
pub(crate) fn path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(".venv/bin/python")
}

/// Whether it has what the tests need; otherwise the calling test is skipped.
pub(crate) fn packages() -> bool {
    static THERE: OnceLock<bool> = OnceLock::new();
    let there = *THERE.get_or_init(|| {
        let needed = "import dask_cuda, distributed_ucxx, pandas, pyarrow, bokeh";
        let there = Command::new(path()).args(["-c", needed]).output();
        there.is_ok_and(|output| output.status.success())
    });
    if !there {
        let line =
            "python3 -m venv .venv && .venv/bin/pip install -r tests/python/requirements.txt";
        skip("dask", &format!(".venv has no Dask; {line}"));
    }
    there
}

/// The directory of our Python package, for `PYTHONPATH`, as if it were installed.
pub(crate) fn package() -> PathBuf {
    static KNOWN: OnceLock<()> = OnceLock::new();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    KNOWN.get_or_init(|| {
        let written = Command::new(path()).arg(root.join("scripts/source_tree.py")).status();
        assert!(written.expect("Python starts").success());
    });
    root.join("python")
}

/// Whether it has `direct://` too; otherwise the calling test is skipped.
pub(crate) fn has_direct() -> bool {
    let mut import = Command::new(path());
    import.args(["-c", "import cuda_cluster.comm"]).env("PYTHONPATH", package());
    let there = packages() && import.output().is_ok_and(|output| output.status.success());
    if !there {
        skip("dask", "direct:// is not built; cargo build --package cuda-cluster-comm");
    }
    there
}

/// Runs a program that can import the engine's own package; returns the JSON that it prints.
pub(crate) fn ask(program: &str) -> Value {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/cluster/src/python");
    let mut command = Command::new(path());
    command.env("PYTHONPATH", folder).env("PYTHONDONTWRITEBYTECODE", "1");
    let output = command.args(["-c", program]).output().expect("Python starts");
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    serde_json::from_str(out.trim()).unwrap_or_else(|error| panic!("{error}: {out}\n{err}"))
}

/// What a user does with a cluster.
pub(crate) struct Story<'a> {
    sandbox: &'a Sandbox,
    with: With,
}

/// How the cluster is found.
enum With {
    /// By its name.
    Name(String),
    /// By its scheduler file.
    File(PathBuf),
}

impl<'a> Story<'a> {
    /// Uses the cluster with this name.
    pub(crate) fn of(sandbox: &'a Sandbox, name: &str) -> Self {
        Self { sandbox, with: With::Name(name.to_owned()) }
    }

    /// Uses the cluster whose scheduler wrote this file.
    pub(crate) fn by_file(sandbox: &'a Sandbox, file: &Path) -> Self {
        Self { sandbox, with: With::File(file.to_owned()) }
    }

    /// Runs one of the stories of `tests/python/story.py`; returns its result.
    pub(crate) fn tell(&self, story: &str) -> Value {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python/story.py");
        let mut command = Command::new("sh");
        let prepare = match &self.with {
            With::Name(name) => {
                format!(". {}/client.env &&", run_directory(self.sandbox, name).display())
            }
            With::File(file) => {
                format!("export DASK_SCHEDULER_FILE={};", file.display())
            }
        };
        let shell = format!("{prepare} exec \"$@\"");
        command.args(["-c", &shell, "sh"]).arg(path()).arg(script).arg(story);
        let output = command.output().expect("a shell starts");
        let (out, err) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{story}: {}\n{out}\n{err}", output.status);
        let last = out.lines().last().expect("a story ends with what it found");
        serde_json::from_str(last).unwrap_or_else(|error| panic!("{error}: {last}"))
    }
}
