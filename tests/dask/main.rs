//! The Dask engine with real Dask: what its users do, and the results.
//!
//! Needs the packages of `tests/python/requirements.txt` in `.venv`; without them the tests are
//! skipped, and with `CUDA_CLUSTER_REQUIRE=dask` they fail.

#![cfg(feature = "cli")]

mod environment;
mod errors;
#[path = "../fake-machine/mod.rs"]
mod fake_machine;
mod life;
mod links;
mod nanny;
mod options;
mod proof;
mod python;
// These stories need less of a sandbox than those of the native engine.
#[allow(dead_code)]
#[path = "../cluster/sandbox.rs"]
mod sandbox;
#[path = "../skip/mod.rs"]
mod skip;
mod slurm;
mod strangers;
mod table;
mod work;

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use python::{Story, packages};
use sandbox::{Said, Sandbox};

/// A machine with eight GPUs that is not here.
const MACHINE: [&str; 4] = ["--topology", "dgx-a100", "--simulate", "--engine"];

/// Starts a cluster of Dask workers; the caller takes it down or has it killed.
fn up<'a>(sandbox: &'a Sandbox, name: &str, flags: &[&str]) -> Story<'a> {
    let said = try_up(sandbox, name, flags);
    assert_eq!(said.code, 0, "{said}");
    Story::of(sandbox, name)
}

fn try_up(sandbox: &Sandbox, name: &str, flags: &[&str]) -> Said {
    try_up_in(sandbox, Path::new("."), name, flags)
}

/// As [`try_up`], from another working directory.
fn try_up_in(sandbox: &Sandbox, directory: &Path, name: &str, flags: &[&str]) -> Said {
    let mut up = command(name, flags);
    up.current_dir(directory);
    sandbox.spawn_program(up).wait()
}

fn command(name: &str, flags: &[&str]) -> Command {
    let mut up = Command::new(env!("CARGO_BIN_EXE_cuda-cluster"));
    up.arg("up").args(MACHINE).args(["dask", "--name", name, "--detach", "--python"]);
    // On a busy machine, importing `distributed` takes long.
    up.arg(python::path()).args(["--ready-within", "10m"]).args(flags);
    up
}

/// As [`try_up`], over `direct://`, with variables of the user's.
fn try_up_direct(sandbox: &Sandbox, name: &str, flags: &[&str], env: &[(&str, &str)]) -> Said {
    let mut up = command(name, flags);
    up.args(["--protocol", "direct"]).env("PYTHONPATH", python::package());
    up.envs(env.iter().copied());
    sandbox.spawn_program(up).wait()
}

fn down(sandbox: &Sandbox, name: &str) {
    let said = sandbox.run(&["down", name]);
    assert_eq!(said.code, 0, "{said}");
    sandbox.assert_nothing_is_left();
}

fn run_directory(sandbox: &Sandbox, name: &str) -> PathBuf {
    sandbox.state(name)["run_directory"].as_str().expect("a path").into()
}

/// The workers of `ps -o json`, by name.
fn worker<'a>(state: &'a Value, name: &str) -> &'a Value {
    let workers = state["workers"].as_array().expect("workers");
    workers.iter().find(|worker| worker["name"] == name).expect("the worker")
}
