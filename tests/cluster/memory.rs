//! Data beyond the memory limit, with a supervisor that ends any worker that reaches it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use crate::sandbox::{Sandbox, eventually};
use crate::skip::skip;

/// A control group with little memory, which goes when it is dropped.
struct Cramped(PathBuf);

impl Cramped {
    /// In the first version of control groups, or in the second where this group may have children.
    fn new(bytes: u64) -> Option<Self> {
        let name = format!("cuda-cluster-test-{}", std::process::id());
        for (top, limit) in
            [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")]
        {
            let group = Path::new(top).join(&name);
            if fs::create_dir(&group).is_err() {
                continue;
            }
            let group = Self(group);
            if fs::write(group.0.join(limit), bytes.to_string()).is_ok() {
                return Some(group);
            }
        }
        None
    }
}

impl Drop for Cramped {
    fn drop(&mut self) {
        let gone = || fs::remove_dir(&self.0).is_ok();
        eventually("the control group is empty", Duration::from_secs(60), gone);
    }
}

#[test]
fn a_worker_that_the_kernel_ends_for_want_of_memory_is_told_as_such() {
    let Some(group) = Cramped::new(100 << 20) else {
        return skip("memory-cgroup", "no control group with a limit of memory can be made");
    };
    let sandbox = Sandbox::new();
    let eats = "import time\nkept = bytearray(1 << 30)\ntime.sleep(1000)\n";
    let spec = tempfile::NamedTempFile::new().expect("a file");
    let argv = serde_json::json!(["python3", "-c", eats]);
    let text = format!("version: 1\nengine: command\ncommand: {{argv: {argv}}}\n");
    fs::write(spec.path(), text).expect("written");
    let path = spec.path().to_str().expect("a path");
    let script = format!("echo $$ >{}/cgroup.procs && exec \"$@\"", group.0.display());
    let mut up = Command::new("sh");
    up.args(["-c", &script, "sh", env!("CARGO_BIN_EXE_cuda-cluster")]);
    up.args(["up", "--topology", "dgx-h100", "--simulate", "--n-workers", "1", "--name", "eaten"]);
    up.args(["--restart", "never", "-f", path]);
    let said = sandbox.spawn_program(up).wait();
    assert_eq!(said.code, 1, "{said}");
    assert!(said.stderr.contains("ended by signal 9 (SIGKILL)"), "{said}");
    assert!(said.stderr.contains("the kernel ended processes for want of memory"), "{said}");
    sandbox.assert_only_the_causes_are_left("eaten");
}

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
