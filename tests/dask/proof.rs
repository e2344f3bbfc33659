//! `--verify`: READY means that data went between all workers, over the expected transports.

use std::process::Command;

use super::{down, packages, python, try_up, up, worker};
use crate::sandbox::Sandbox;

/// Variables that remove shared memory from connections with error handling, which is also the
/// effect of leaving them unset.
pub(crate) const PLAIN: &str = "{UCX_POSIX_ERROR_HANDLING: n, UCX_CMA_MEMORY_INVALIDATE: n}";

const SHARED_MEMORY: [&str; 2] = ["posix/memory", "cma/memory"];

#[test]
fn every_pair_moves_data_over_shared_memory_before_ready_is_said() {
    if !packages() {
        return;
    }
    for (protocol, transports) in [("ucxx", &SHARED_MEMORY[..]), ("tcp", &["tcp"])] {
        let sandbox = Sandbox::new();
        up(&sandbox, "pairs", &["--n-workers", "3", "--verify", "--protocol", protocol]);
        let state = sandbox.state("pairs");
        for worker in state["workers"].as_array().expect("workers") {
            let peers = worker["peers"].as_array().expect("peers");
            assert_eq!(peers.len(), 2, "{worker}");
            for peer in peers {
                let lanes = peer["lanes"].as_array().expect("lanes");
                let lanes: Vec<&str> = lanes.iter().filter_map(|lane| lane.as_str()).collect();
                assert!(lanes.iter().any(|lane| transports.contains(lane)), "{worker}");
            }
        }
        down(&sandbox, "pairs");
    }
}

/// What a preloaded file does when the worker closes.
const CRASH: &str =
    "import os, signal\n\ndef dask_teardown(worker):\n    os.kill(os.getpid(), signal.SIGSEGV)\n";

#[test]
fn a_pair_that_fell_back_to_tcp_is_an_error_that_says_so_even_if_workers_crash_then() {
    if !packages() {
        return;
    }
    let sandbox = Sandbox::new();
    let folder = tempfile::tempdir().expect("a directory");
    let spec = folder.path().join("spec.yaml").display().to_string();
    std::fs::write(&spec, format!("version: 1\nucx: {{env: {PLAIN}}}\n")).expect("written");
    let crash = folder.path().join("crash.py").display().to_string();
    std::fs::write(&crash, CRASH).expect("written");
    for preload in [&[][..], &["--preload", &crash]] {
        let flags = ["--n-workers", "2", "--protocol", "ucxx", "--verify", "-f", &spec];
        let said = try_up(&sandbox, "fell", &[&flags[..], preload].concat());
        assert_eq!(said.code, 1, "{said}");
        assert!(said.stderr.contains("comes over tcp/"), "{said}");
        assert!(said.stderr.contains("expected was shared memory"), "{said}");
    }
}

#[test]
fn a_planned_port_that_ucx_has_not_opened_is_noted() {
    if !packages() {
        return;
    }
    let sandbox = Sandbox::new();
    let folder = tempfile::tempdir().expect("a directory");
    let spec = folder.path().join("spec.yaml").display().to_string();
    let env = "{UCX_NET_DEVICES: \"mlx5_9:1,lo\"}";
    std::fs::write(&spec, format!("version: 1\nucx: {{env: {env}}}\n")).expect("written");
    // This machine itself: one that is simulated gets only the devices that are here.
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuda-cluster"));
    command.args(["up", "--name", "ports", "--detach", "--engine", "dask", "-f", &spec]);
    command.args(["--protocol", "ucxx", "--gpus", "none", "--cpu-workers", "1", "--python"]);
    command.arg(python::path()).args(["--ready-within", "10m"]);
    let said = sandbox.spawn_program(command).wait();
    assert_eq!(said.code, 0, "{said}");
    let notes = worker(&sandbox.state("ports"), "cpu0")["notes"].to_string();
    assert!(notes.contains("mlx5_9:1 is planned, but UCX has not opened it"), "{notes}");
    down(&sandbox, "ports");
}
