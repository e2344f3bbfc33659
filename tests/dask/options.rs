//! Options and the plan, seen from inside the workers.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::{down, packages, run_directory, up, worker};
use crate::sandbox::Sandbox;

fn cpus(list: &str) -> Vec<u64> {
    let number = |text: &str| text.parse::<u64>().expect("a number");
    let part = |part: &str| match part.split_once('-') {
        Some((low, high)) => (number(low)..=number(high)).collect::<Vec<_>>(),
        None => vec![number(part)],
    };
    list.split(',').flat_map(part).collect()
}

#[test]
fn every_thread_and_variable_of_a_worker_is_as_planned() {
    if !packages() {
        return;
    }
    let sandbox = Sandbox::new();
    let cluster = up(&sandbox, "plan", &["--n-workers", "4", "--protocol", "ucxx"]);
    let found = cluster.tell("look");
    let state = sandbox.state("plan");
    let plan: Value = {
        let text = std::fs::read(run_directory(&sandbox, "plan").join("plan.json"));
        serde_json::from_slice(&text.expect("the plan")).expect("JSON")
    };
    for planned in plan["workers"].as_array().expect("workers") {
        let name = planned["name"].as_str().expect("a name");
        let inside = &found["workers"][name];
        let shown = worker(&state, name);
        let in_force = cpus(shown["cpus"].as_str().expect("CPUs in force"));
        assert!(shown["notes"].as_array().is_some_and(Vec::is_empty), "{name} was forked: {shown}");
        for affinity in inside["affinities"].as_array().expect("threads") {
            assert_eq!(*affinity, json!(in_force), "a thread of {name}");
        }
        for (variable, value) in planned["env"].as_object().expect("variables") {
            if variable.starts_with("UCX") || variable.starts_with("CUDA_") {
                assert_eq!(inside["environment"][variable], *value, "{name}: {variable}");
            }
        }
        assert_eq!(inside["environment"]["CUDA_CLUSTER_PROCESS"], name);
        assert_eq!(inside["pid"], shown["pid"]);
        assert_eq!(inside["parent"], state["guardian_pid"], "the guardian adopted {name}");
        assert_eq!(inside["threads"], planned["threads"]);
        assert_eq!(inside["data"], "DeviceHostFile");
        assert_eq!(inside["device_memory_limit"], planned["device_memory_limit_bytes"]);
    }
    let draws = found["workers"].as_object().expect("workers").values();
    let draws: BTreeSet<String> = draws.map(|inside| inside["draw"].to_string()).collect();
    assert_eq!(draws.len(), 4, "forked workers draw different numbers");
    down(&sandbox, "plan");
}

#[test]
fn the_options_of_dask_cuda_arrive() {
    if !packages() {
        return;
    }
    let sandbox = Sandbox::new();
    let folder = tempfile::tempdir().expect("a directory");
    let local = folder.path().join("spill").display().to_string();
    let file = folder.path().join("scheduler.json").display().to_string();
    let preload = folder.path().join("loaded.py");
    std::fs::write(&preload, "import os\nos.environ['STORY_PRELOADED'] = 'yes'\n")
        .expect("written");
    let preload = preload.display().to_string();
    let flags = [
        "--n-workers",
        "2",
        "--threads-per-worker",
        "3",
        "--memory-limit",
        "1GiB",
        "--device-memory-limit",
        "10GB",
        "--local-directory",
        &local,
        "--scheduler-file",
        &file,
        "--preload",
        &preload,
        "--pre-import",
        "colorsys",
        "--resources",
        "GPU=1 MEM=10e9",
        "--death-timeout",
        "120",
        "--lifetime",
        "1h",
        "--dashboard-prefix",
        "front",
        "--worker-class",
        "distributed.Worker",
        "--worker-port",
        "29100:29103",
        "--dashboard-address",
        "127.0.0.1:29180",
        "--scheduler-port",
        "29190:29199",
        "--disable-nvlink",
    ];
    let cluster = up(&sandbox, "options", &flags);
    let found = cluster.tell("look");
    for inside in found["workers"].as_object().expect("workers").values() {
        assert_eq!(inside["threads"], 3);
        assert_eq!(inside["memory_limit"], 1 << 30);
        assert_eq!(inside["device_memory_limit"], 10_000_000_000u64);
        assert!(inside["local_directory"].as_str().is_some_and(|path| path.starts_with(&local)));
        assert_eq!(inside["preloaded"], "yes");
        assert_eq!(inside["imported"], json!(["colorsys"]));
        assert_eq!(inside["resources"], json!({ "GPU": 1.0, "MEM": 10e9 }));
        assert_eq!(inside["death_timeout"], 120.0);
        assert_eq!(inside["lifetime"], 3600.0);
        assert_eq!(inside["dashboard_prefix"], "front");
        assert_eq!(inside["class"], "distributed.worker.Worker");
        let lanes = inside["environment"]["UCX_TLS"].as_str().expect("a list");
        assert!(!lanes.contains("cuda_ipc") && lanes.contains("posix"), "{lanes}");
    }
    assert_eq!(found["ucxx"], json!([true, true]), "a UCX option means UCX");
    let found = cluster.tell("ports");
    assert_eq!(found["scheduler"], "ucxx://127.0.0.1:29190");
    assert_eq!(found["workers"]["gpu0"], "ucxx://127.0.0.1:29100");
    assert_eq!(found["workers"]["gpu1"], "ucxx://127.0.0.1:29101");
    assert_eq!(found["health"], json!(["ok", "ok"]));
    assert!(std::path::Path::new(&file).exists());
    down(&sandbox, "options");
    assert!(!std::path::Path::new(&file).exists(), "the scheduler file goes with the scheduler");
}

#[test]
fn relative_files_of_a_detached_cluster_lie_where_its_user_stands() {
    if !packages() {
        return;
    }
    for method in ["fork", "spawn"] {
        let sandbox = Sandbox::new();
        let folder = tempfile::tempdir().expect("a directory");
        let files = ["--scheduler-file", "found.json", "--pid-file", "own.pid"];
        let flags = [&files[..], &["--n-workers", "1", "--start-method", method]].concat();
        let said = super::try_up_in(&sandbox, folder.path(), "files", &flags);
        assert_eq!(said.code, 0, "{said}");
        let found = std::fs::read_to_string(folder.path().join("found.json")).expect("the file");
        let found: serde_json::Value = serde_json::from_str(&found).expect("JSON");
        let address = sandbox.state("files")["scheduler"]["address"].clone();
        assert_eq!(found["address"], address, "{method}");
        assert!(folder.path().join("own.pid").exists());
        down(&sandbox, "files");
        let left: Vec<_> = std::fs::read_dir(folder.path()).expect("a directory").collect();
        assert!(left.is_empty(), "{method}: {left:?}");
    }
}
