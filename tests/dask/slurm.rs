//! The Slurm script for several nodes, under a stand-in for `srun` that starts two tasks here.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use nix::sys::signal::Signal;

use super::MACHINE;
use super::python::{self, Story, packages};
use crate::sandbox::{Sandbox, eventually};

/// Runs the command after its options once for each of two nodes, each with its own directory for
/// run directories, and forwards signals, as `srun` does.
const SRUN: &str = r#"#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for node in 0 1; do
    mkdir -m 700 -p "$XDG_RUNTIME_DIR/$node"
    SLURM_NODEID=$node SLURM_PROCID=$node SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 \
        SLURM_STEP_TASKS_PER_NODE='1(x2)' XDG_RUNTIME_DIR=$XDG_RUNTIME_DIR/$node "$@" &
    tasks+=($!)
done
trap 'kill -TERM "${tasks[@]}"' TERM
for task in "${tasks[@]}"; do
    # A signal ends `wait` early; then wait again.
    while kill -0 "$task" 2>/dev/null; do wait "$task" || true; done
done
"#;

#[test]
fn the_nodes_of_a_slurm_job_form_one_dask_cluster() {
    if !packages() {
        return;
    }
    let sandbox = Sandbox::new();
    let folder = tempfile::tempdir().expect("a directory");
    let programs = folder.path().join("bin");
    std::fs::create_dir(&programs).expect("made");
    let srun = programs.join("srun");
    std::fs::write(&srun, SRUN).expect("written");
    std::fs::set_permissions(&srun, std::fs::Permissions::from_mode(0o755)).expect("its mode");
    symlink(env!("CARGO_BIN_EXE_cuda-cluster"), programs.join("cuda-cluster")).expect("a link");
    let file = folder.path().join("scheduler.json");

    let mut job = Command::new("bash");
    job.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/dask-multi-node.slurm"))
        .args(&MACHINE[..3])
        .args(["--n-workers", "2", "--python"])
        .arg(python::path())
        .env("PATH", format!("{}:{}", programs.display(), std::env::var("PATH").expect("a path")))
        .env("SLURM_JOB_ID", "7")
        .env("INTERFACE", "lo")
        .env("SCHEDULER_FILE", &file);
    let mut job = sandbox.spawn_program(job);
    eventually("the scheduler file", Duration::from_secs(120), || file.exists());
    let found = Story::by_file(&sandbox, &file).tell("four");
    assert_eq!(found["workers"].as_array().map(Vec::len), Some(4), "{found}");
    job.signal(Signal::SIGTERM);
    let said = job.wait();
    eventually("no process", Duration::from_secs(30), || sandbox.pids().is_empty());
    assert!(!file.exists(), "the scheduler file goes with the scheduler: {said}");
}
