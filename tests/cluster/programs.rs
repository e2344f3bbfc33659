//! `up` for programs that start it: JSON lines, and an owner that it ends with.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::sandbox::{Sandbox, eventually};

/// Starts a cluster that belongs to a process.
fn owned(sandbox: &Sandbox, name: &str, owner: u32) -> Child {
    let mut up = Command::new(env!("CARGO_BIN_EXE_cuda-cluster"));
    up.args(["up", "--topology", "dgx-a100", "--simulate", "--n-workers", "2", "--name", name]);
    up.args(["-o", "json", "--owner", &owner.to_string()]);
    up.env("XDG_RUNTIME_DIR", sandbox.runtime()).env_remove("CUDA_VISIBLE_DEVICES");
    up.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    up.spawn().expect("the program starts")
}

fn reports(up: &mut Child) -> impl Iterator<Item = Value> + use<> {
    let lines = BufReader::new(up.stdout.take().expect("a pipe")).lines();
    lines.map(|line| serde_json::from_str(&line.expect("a line")).expect("JSON"))
}

fn ready(reports: &mut impl Iterator<Item = Value>) -> Value {
    reports.find(|report| report["report"] == "ready").expect("READY")
}

#[test]
fn a_program_reads_of_ready_and_of_the_end_and_ends_the_cluster_by_closing_its_pipe() {
    let sandbox = Sandbox::new();
    let mut up = owned(&sandbox, "pipe", std::process::id());
    let mut reports = reports(&mut up);
    let state = ready(&mut reports)["state"].clone();
    assert_eq!((&state["state"], &state["name"]), (&Value::from("ready"), &Value::from("pipe")));
    drop(up.stdin.take());
    let last = reports.last().expect("a last word");
    assert_eq!((&last["version"], &last["report"]), (&Value::from(1), &Value::from("ended")));
    assert!(last["outcome"]["stopped"].is_object(), "{last}");
    assert_eq!(up.wait().expect("it ends").code(), Some(0));
    sandbox.assert_nothing_is_left();
}

#[test]
fn a_cluster_ends_with_its_owner_though_somebody_else_holds_the_pipe() {
    let sandbox = Sandbox::new();
    let mut owner = Command::new("sleep").arg("1000").spawn().expect("a process");
    let mut up = owned(&sandbox, "owner", owner.id());
    ready(&mut reports(&mut up));
    owner.kill().expect("it lives");
    // Not reaped: a process that nobody waits for has ended, too.
    eventually("the end", Duration::from_secs(60), || up.try_wait().expect("waited").is_some());
    owner.wait().expect("it ended");
    sandbox.assert_nothing_is_left();
}

#[test]
fn a_program_is_told_why_there_is_no_cluster() {
    let sandbox = Sandbox::new();
    let wrong = ["up", "--topology", "dgx-a100", "--simulate", "--n-workers", "99", "-o", "json"];
    let said = sandbox.run(&wrong);
    let told: Value = serde_json::from_str(said.stdout.trim()).expect("one line");
    assert_eq!((said.code, &told["exit_code"]), (2, &Value::from(2)), "{said}");
    assert_eq!(told["report"], "failed");
    let message = told["message"].as_str().expect("a message");
    assert!(said.stderr.contains(message), "{said}");
}

#[test]
fn a_dry_run_is_shown_as_json_where_that_is_asked_for() {
    let sandbox = Sandbox::new();
    let said = sandbox.run(&["up", "--topology", "dgx-a100", "--dry-run", "-o", "json"]);
    let plan: Value = serde_json::from_str(&said.stdout).expect("a plan");
    assert_eq!(plan["workers"].as_array().map(Vec::len), Some(8), "{said}");
}
