//! Data beyond the memory limit, with a supervisor that ends any worker that reaches it.

use serde_json::Value;

use crate::sandbox::Sandbox;

/// Twice as much data as the two workers' limits leave room for.
#[test]
fn data_beyond_the_memory_limit_go_to_the_disk_and_no_worker_is_ended_for_it() {
    let sandbox = Sandbox::new();
    let folder = tempfile::tempdir().expect("a directory");
    let local = folder.path().join("made/when/needed");
    let local_directory = local.display().to_string();
    let machine = ["up", "--topology", "dgx-h100", "--simulate", "--n-workers", "2"];
    let limits = ["--memory-limit", "100MB", "--device-memory-limit", "60MB"];
    let place = ["--local-directory", &local_directory, "--name", "full", "--detach"];
    let up = sandbox.run(&[&machine[..], &limits, &place].concat());
    assert_eq!(up.code, 0, "{up}");

    let size = ["--chunks", "9", "--chunk-size", "512", "--runs", "1"];
    let bench = ["bench", "transpose", "full", "--check", "-o", "json"];
    let said = sandbox.run(&[&bench[..], &size].concat());
    assert_eq!(said.code, 0, "{said}");
    let document: Value = serde_json::from_str(&said.stdout).expect("JSON");
    assert_eq!(document["same_as_in_one_process"], true);
    for worker in document["workers"].as_array().expect("workers") {
        let spilled = worker["memory"]["disk"]["demoted_bytes"].as_u64().expect("bytes");
        assert!(spilled > 0, "{worker} wrote nothing to the disk");
    }
    let state = sandbox.state("full");
    assert_eq!(state["state"], "ready");
    for worker in state["workers"].as_array().expect("workers") {
        assert_eq!(worker["restarts"], 0, "{worker}");
    }

    let gpu0 = state["workers"][0]["pid"].as_u64().expect("a pid");
    sandbox.kill(gpu0);
    let down = sandbox.run(&["down", "full"]);
    assert_eq!(down.code, 0, "{down}");
    assert_eq!(std::fs::read_dir(&local).expect("it was made").count(), 0, "files are left");
}
