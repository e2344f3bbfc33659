//! What Dask's users expect of nannies, which these workers do not have.

use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};

use super::python::{Story, path};
use super::{down, packages, run_directory, try_up, up, worker};
use crate::sandbox::{Sandbox, eventually};

#[test]
fn tasks_that_end_their_workers_cost_nobody_the_cluster_and_are_told() {
    if !packages() {
        return;
    }
    let sandbox = Sandbox::new();
    let cluster = up(&sandbox, "bad", &["--n-workers", "2"]);
    let scheduler = sandbox.state("bad")["scheduler"]["pid"].clone();
    cluster.tell("bad_tasks");
    eventually("all are READY", Duration::from_secs(60), || {
        sandbox.state("bad")["state"] == "ready"
    });
    let state = sandbox.state("bad");
    assert_eq!(state["scheduler"]["pid"], scheduler, "{state}");
    let deaths = |name| worker(&state, name)["deaths_at_work"].as_u64().expect("a number");
    assert!(deaths("gpu0") + deaths("gpu1") >= 8, "{state}");
    let words = "times in a row while READY, perhaps of a task";
    for command in ["ps", "events"] {
        let said = sandbox.run(&[command, "bad"]);
        assert!(said.stdout.contains(words), "{said}");
    }
    assert_eq!(sandbox.run(&["down", "bad"]).code, 0);
    sandbox.assert_only_the_causes_are_left("bad");
}

#[test]
fn workers_that_cannot_start_any_more_leave_the_scheduler_to_whoever_mends_them() {
    if !packages() {
        return;
    }
    let sandbox = Sandbox::new();
    let folder = tempfile::tempdir().expect("a directory");
    let (preload, broken) = (folder.path().join("preload.py"), folder.path().join("broken"));
    let program = format!("import os\nassert not os.path.exists({broken:?})\n");
    std::fs::write(&preload, program).expect("written");
    let spec = folder.path().join("spec.yaml").display().to_string();
    std::fs::write(&spec, "version: 1\nsupervision: {limit: 2, backoff: 10ms}\n").expect("written");
    let preload = preload.display().to_string();
    up(&sandbox, "stays", &["-f", &spec, "--n-workers", "1", "--preload", &preload]);
    let scheduler = sandbox.state("stays")["scheduler"]["pid"].clone();
    std::fs::write(&broken, "").expect("written");
    sandbox.kill(worker(&sandbox.state("stays"), "gpu0")["pid"].as_u64().expect("a pid"));
    eventually("it is degraded", Duration::from_secs(120), || {
        sandbox.state("stays")["state"] == "degraded"
    });
    let said = sandbox.run(&["ps", "stays"]);
    assert!(said.stdout.contains("without becoming READY"), "{said}");
    assert!(said.stdout.contains("by 'cuda-cluster restart stays gpu0'"), "{said}");
    std::fs::remove_file(&broken).expect("removed");
    let said = sandbox.run(&["restart", "stays", "gpu0"]);
    assert_eq!(said.code, 0, "{said}");
    eventually("it is READY", Duration::from_secs(120), || {
        sandbox.state("stays")["state"] == "ready"
    });
    assert_eq!(sandbox.state("stays")["scheduler"]["pid"], scheduler);
    assert_eq!(sandbox.run(&["down", "stays"]).code, 0);
    sandbox.assert_only_the_causes_are_left("stays");
}

#[test]
fn nanny_plugins_and_restarts_work_without_a_nanny() {
    if !packages() {
        return;
    }
    for method in ["fork", "spawn"] {
        let sandbox = Sandbox::new();
        let folder = tempfile::tempdir().expect("a directory");
        let local = folder.path().display().to_string();
        let flags = ["--n-workers", "2", "--start-method", method, "--local-directory", &local];
        up(&sandbox, "nanny", &flags).tell("nanny");
        down(&sandbox, "nanny");
        let scratch = std::fs::read_dir(folder.path().join("dask-scratch-space")).expect("made");
        let left = scratch.flatten().filter(|entry| entry.path().is_dir());
        assert_eq!(left.count(), 0, "what was uploaded goes with the worker");
    }
}

#[test]
fn a_client_restarts_a_worker_that_answers_nobody() {
    if !packages() {
        return;
    }
    let sandbox = Sandbox::new();
    up(&sandbox, "stuck", &["--n-workers", "2"]).tell("unstick");
    assert_eq!(sandbox.run(&["down", "stuck"]).code, 0);
    eventually("no process", Duration::from_secs(20), || sandbox.pids().is_empty());
}

#[test]
fn workers_that_come_and_go_with_scale_were_not_restarted() {
    if !packages() {
        return;
    }
    let sandbox = Sandbox::new();
    up(&sandbox, "scale", &["--n-workers", "2"]);
    for (workers, phase) in [("1", "stopped"), ("2", "ready")] {
        assert_eq!(sandbox.run(&["scale", "scale", workers]).code, 0);
        eventually(phase, Duration::from_secs(60), || {
            worker(&sandbox.state("scale"), "gpu1")["state"] == phase
        });
    }
    assert_eq!(worker(&sandbox.state("scale"), "gpu1")["restarts"], 0);
    down(&sandbox, "scale");
}

/// Someone else's scheduler, as `dask scheduler` starts it.
#[test]
fn workers_at_a_scheduler_elsewhere_end_with_it() {
    if !packages() {
        return;
    }
    let sandbox = Sandbox::new();
    let folder = tempfile::tempdir().expect("a directory");
    let file = folder.path().join("scheduler.json");
    let mut scheduler = Command::new(path().with_file_name("dask"));
    scheduler.args(["scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard"]);
    scheduler.arg("--scheduler-file").arg(&file).current_dir(folder.path());
    let scheduler = sandbox.spawn_program(scheduler);
    eventually("the scheduler file", Duration::from_secs(60), || file.exists());
    let shown = file.display().to_string();
    let said = try_up(&sandbox, "guest", &["--n-workers", "2", "--join", &shown]);
    assert_eq!(said.code, 0, "{said}");

    let said = sandbox.run(&["env", "guest", "-o", "json"]);
    let env: Value = serde_json::from_str(&said.stdout).expect("JSON");
    let text = std::fs::read(&file).expect("the scheduler file");
    let elsewhere: Value = serde_json::from_slice(&text).expect("JSON");
    assert_eq!(env["env"]["DASK_SCHEDULER_ADDRESS"], elsewhere["address"], "{said}");

    let story = Story::by_file(&sandbox, &file);
    story.tell("joined_nanny");
    story.tell("shutdown");
    eventually("the cluster is gone", Duration::from_secs(60), || {
        sandbox.try_state("guest").is_none()
    });
    scheduler.wait();
    // It did not end itself, so it says why.
    let ended = sandbox.run(&["ps", "-a", "guest"]).stdout;
    let why = "its workers are not wanted any more: the scheduler at tcp://127.0.0.1:";
    assert!(ended.contains(why), "{ended}");
    std::fs::remove_dir_all(sandbox.base().join("guest")).expect("removed");
    sandbox.assert_nothing_is_left();
}

#[test]
fn workers_of_two_clusters_at_one_scheduler_are_restarted_together() {
    if !packages() {
        return;
    }
    let sandbox = Sandbox::new();
    let first = up(&sandbox, "host", &["--gpus", "0"]);
    let file = run_directory(&sandbox, "host").join("scheduler.json").display().to_string();
    let said = try_up(&sandbox, "guest", &["--gpus", "0", "--join", &file]);
    assert_eq!(said.code, 0, "{said}");
    first.tell("joined_nanny");
    assert_eq!(first.tell("spread")["workers"].as_array().map(Vec::len), Some(2));
    assert_eq!(sandbox.state("guest")["state"], json!("ready"));
    assert_eq!(sandbox.run(&["down", "guest"]).code, 0);
    down(&sandbox, "host");
}
