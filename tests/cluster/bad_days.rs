//! Failures of a cluster whose GPUs are seen through NVML: GPU errors, limits, crash loops.

use std::fs;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cuda_cluster::topology;
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::fake_machine::FakeMachine;
use crate::sandbox::{Running, Sandbox, eventually};

/// Two GPUs, each with a shell that runs a script.
struct Machine {
    sandbox: Sandbox,
    folder: tempfile::TempDir,
    fake: FakeMachine,
}

impl Machine {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a directory");
        let machine = topology::builtin("rtx-4090-2").expect("built in");
        let machine = topology::parse(machine).expect("a machine");
        let fake = FakeMachine::write(&machine, folder.path()).expect("written");
        let faults = format!("xids={}", folder.path().join("xids").display());
        Self { sandbox: Sandbox::new(), folder, fake: fake.with_faults(&faults) }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A spec whose workers run a script, with additional sections.
    fn spec(&self, script: &str, more: &str) -> PathBuf {
        let path = self.file("spec.yaml");
        let argv = serde_json::json!(["sh", "-c", script]);
        let text = format!(
            "version: 1\nname: bad\nengine: command\ngpus: all\ndisplay_gpus: use\n\
             command: {{argv: {argv}}}\n{more}"
        );
        fs::write(&path, text).expect("written");
        path
    }

    fn up(&self, spec: &Path, more: &[&str]) -> Running {
        let mut command = self.fake.command();
        command.arg("up").arg("-f").arg(spec).args(more);
        self.sandbox.spawn_program(command)
    }

    fn state(&self) -> Value {
        self.sandbox.state("bad")
    }
}

fn pid(worker: &Value) -> u64 {
    worker["pid"].as_u64().expect("a pid")
}

#[test]
fn what_a_gpu_reported_stands_beside_the_exit() {
    let machine = Machine::new();
    let quick = "supervision: {limit: 100, backoff: 1ms, backoff_max: 1ms}\n";
    let spec = machine.spec("exec sleep 1000", quick);
    let up = machine.up(&spec, &["--detach"]).wait();
    assert_eq!(up.code, 0, "{up}");
    fs::write(machine.file("xids"), "1 79\n").expect("written");
    // The first death may come before the driver's report; a later one finds it.
    eventually("an error beside an exit", Duration::from_secs(60), || {
        let before = machine.state();
        if before["state"] != "ready" {
            return false;
        }
        let dead = pid(&before["workers"][1]);
        machine.sandbox.kill(dead);
        let exit = |state: &Value| state["workers"][1]["last_exit"].clone();
        eventually("its bundle", Duration::from_secs(30), || {
            let exit = exit(&machine.state());
            exit["pid"] == dead && !exit["bundle"].is_null()
        });
        let errors = exit(&machine.state())["gpu_errors"].clone();
        errors[0]["xid"] == 79 && errors[0]["text"] == "GPU has fallen off the bus"
    });
    let state = machine.state();
    assert!(state["workers"][0]["last_exit"].is_null(), "{state}");
    let events = machine.sandbox.run(&["events", "bad"]);
    let told = "gpu1: GPU 1 reported Xid 79 (GPU has fallen off the bus)";
    assert!(events.stdout.contains(told), "{events}");
    assert_eq!(machine.sandbox.run(&["down", "bad"]).code, 0);
}

#[test]
fn limits_that_were_asked_for_hold_in_the_processes() {
    let machine = Machine::new();
    let script = "echo files $(ulimit -n) to $(ulimit -Hn), core $(ulimit -c); exec sleep 1000";
    let limits = "ulimits: {nofile: {soft: 200, hard: 300}, core: 0}\n";
    let spec = machine.spec(script, limits);
    let up = machine.up(&spec, &["--detach"]).wait();
    assert_eq!(up.code, 0, "{up}");
    for worker in ["gpu0", "gpu1"] {
        eventually("its limits in its log", Duration::from_secs(30), || {
            let logs = machine.sandbox.run(&["logs", "bad", worker]);
            logs.stdout.contains("files 200 to 300, core 0")
        });
    }
    let down = machine.sandbox.run(&["down", "bad"]);
    assert_eq!(down.code, 0, "{down}");
    machine.sandbox.assert_nothing_is_left();
}

#[test]
fn a_crash_loop_leaves_the_others_working_and_is_told_by_the_exit_code() {
    let machine = Machine::new();
    let script = "test $RANK = 0 && exec sleep 1000; sleep 0.2; echo bang; exit 3";
    let spec = machine.spec(script, "supervision: {limit: 2, backoff: 10ms}\n");
    let up = machine.up(&spec, &[]);
    eventually("it is degraded", Duration::from_secs(60), || {
        machine.sandbox.try_state("bad").is_some_and(|state| state["state"] == "degraded")
    });
    let state = machine.state();
    assert_eq!(state["workers"][0]["state"], "ready", "{state}");
    assert_eq!(state["workers"][1]["state"], "failed", "{state}");
    assert_eq!(state["workers"][1]["restarts"], 2, "{state}");
    let cause = state["cause"]["text"].as_str().expect("a cause");
    assert_eq!(cause, "gpu1 ended with status 3, and it was restarted 2 times within 1m");
    let down = machine.sandbox.run(&["down", "bad"]);
    assert_eq!(down.code, 0, "{down}");
    let up = up.wait();
    assert_eq!(up.code, 1, "{up}");
    let last = up.stderr.trim_end().lines().rev().find(|line| line.starts_with("error: "));
    assert!(last.is_some_and(|line| line.contains("gpu1 ended with status 3")), "{up}");
    machine.sandbox.assert_only_the_causes_are_left("bad");
}

#[test]
fn when_every_worker_crashes_up_ends_with_the_cause() {
    let machine = Machine::new();
    let spec = machine.spec("sleep 0.2; echo bang; exit 3", "supervision: {restart: never}\n");
    let up = machine.up(&spec, &[]).wait();
    assert_eq!(up.code, 1, "{up}");
    assert!(up.stderr.contains("ended with status 3") && up.stderr.contains("bang"), "{up}");
    machine.sandbox.assert_only_the_causes_are_left("bad");
}

#[test]
fn a_service_manager_hears_how_long_it_starts_and_that_it_is_ready_alive_and_ending() {
    let machine = Machine::new();
    let spec = machine.spec("exec sleep 1000", "supervision: {ready_within: 5m, grace: 20s}\n");
    let socket = machine.file("notify");
    let manager = UnixDatagram::bind(&socket).expect("a socket");
    manager.set_read_timeout(Some(Duration::from_secs(60))).expect("a time");
    let hear = || {
        let mut words = [0u8; 4096];
        let length = manager.recv(&mut words).expect("a message in time");
        String::from_utf8_lossy(&words[..length]).into_owned()
    };
    let mut command = machine.fake.command();
    command.arg("up").arg("-f").arg(&spec);
    command.env("NOTIFY_SOCKET", &socket).env("WATCHDOG_USEC", "200000");
    let mut up = machine.sandbox.spawn_program(command);
    assert_eq!(hear(), "EXTEND_TIMEOUT_USEC=325000000");
    assert_eq!(hear(), "READY=1\nSTATUS=bad: 2 of 2 workers READY");
    while hear() != "WATCHDOG=1" {}
    up.signal(Signal::SIGTERM);
    while hear() != "STOPPING=1" {}
    assert_eq!(up.wait().code, 128 + 15);
    machine.sandbox.assert_nothing_is_left();
}

#[test]
fn following_events_ends_with_the_cluster() {
    let machine = Machine::new();
    let spec = machine.spec("exec sleep 1000", "");
    let up = machine.up(&spec, &["--detach"]).wait();
    assert_eq!(up.code, 0, "{up}");
    let mut follow = machine.sandbox.spawn(&["events", "bad", "--follow"]);
    // It listens before it prints.
    follow.wait_for_a_line();
    let down = machine.sandbox.run(&["down", "bad"]);
    assert_eq!(down.code, 0, "{down}");
    let events = follow.wait();
    assert_eq!(events.code, 0, "{events}");
    assert!(events.stdout.trim_end().ends_with("cluster: stopped"), "{events}");
    assert_eq!(events.stdout.matches("cluster: stopped").count(), 1, "{events}");
    machine.sandbox.assert_nothing_is_left();
}
