//! `top` and `ps --watch`: clusters on a terminal, alive.

use cuda_cluster::units::HumanBytes;
use nix::sys::signal::Signal;
use serde_json::Value;

use super::sandbox::Sandbox;
use super::screen::{CTRL_C, Screen};

fn up(sandbox: &Sandbox, name: &str) {
    let machine = ["--topology", "dgx-1-v100", "--simulate", "--n-workers", "2"];
    let up = sandbox.run(&[&["up"], &machine[..], &["--name", name, "--detach"]].concat());
    assert_eq!(up.code, 0, "{up}");
}

fn down(sandbox: &Sandbox, name: &str) {
    let down = sandbox.run(&["down", name]);
    assert_eq!(down.code, 0, "{down}");
}

#[test]
fn top_shows_a_worker_die_and_come_back_and_gives_the_terminal_back() {
    let sandbox = Sandbox::new();
    up(&sandbox, "alive");
    let mut top = Screen::start(&sandbox, (80, 24), &["top", "alive"]);
    top.wait_for("2 of 2 READY");
    top.wait_for("READY after");
    top.wait_until("memory in use", |text| text.lines().any(|line| line.contains("░ ")));
    for line in top.text().lines() {
        assert!(line.chars().count() <= 80, "{line}");
    }
    let dead = sandbox.state("alive")["workers"][0]["pid"].as_u64().expect("a pid");
    sandbox.kill(dead);
    top.wait_for("gpu0: was ended by signal 9 (SIGKILL)");
    top.wait_until("its restart", |text| {
        let row = text.lines().find(|line| line.starts_with("gpu0 ")).unwrap_or_default();
        row.contains("READY") && text.contains("restart 1") && text.contains("2 of 2 READY")
    });
    top.type_in("j");
    top.wait_for("gpu0: process");
    top.resize(120, 40);
    top.wait_for(" PID");
    top.type_in("q");
    assert_eq!(top.wait(), Some(0));
    top.assert_restored();
    assert!(!top.text().contains("gpu0"), "the picture is gone: {}", top.text());
    down(&sandbox, "alive");
    sandbox.assert_only_the_causes_are_left("alive");
}

#[test]
fn top_goes_from_cluster_to_cluster_and_keeps_the_picture_of_one_that_ends() {
    let sandbox = Sandbox::new();
    up(&sandbox, "one");
    up(&sandbox, "two");
    let mut top = Screen::start(&sandbox, (80, 24), &["top"]);
    top.wait_until("the first", |text| {
        text.starts_with("one  READY") && text.contains("Tab next of 2 clusters")
    });
    top.type_in("\t");
    top.wait_until("the second", |text| text.starts_with("two  READY"));
    top.type_in("\t");
    top.wait_until("the first again", |text| text.starts_with("one  READY"));
    down(&sandbox, "one");
    top.wait_until("its end, with its workers", |text| {
        text.starts_with("one  ended: ") && text.contains("gpu0")
    });
    top.signal(Signal::SIGTERM);
    assert_eq!(top.wait(), Some(128 + 15));
    top.assert_restored();
    let mut top = Screen::start(&sandbox, (120, 40), &["top"]);
    top.wait_until("the only one", |text| text.starts_with("two  READY"));
    top.type_in(CTRL_C);
    assert_eq!(top.wait(), Some(0));
    top.assert_restored();
    down(&sandbox, "two");
    sandbox.assert_nothing_is_left();
}

#[test]
fn ps_says_how_long_processes_run_and_what_they_use_and_watches_a_cluster_to_its_end() {
    let sandbox = Sandbox::new();
    up(&sandbox, "used");
    let worker = &sandbox.state("used")["workers"][0];
    for key in ["resident_bytes", "cpu_ms", "age_ms"] {
        assert!(worker[key].is_u64(), "{key}: {worker}");
    }
    let table = sandbox.run(&["ps", "used"]);
    assert!(table.stdout.starts_with("used: READY, native engine, simulated GPUs, up "), "{table}");
    let row = table.stdout.lines().find(|line| line.starts_with("gpu0 ")).expect("a row");
    for words in [" s ", " %", "iB"] {
        assert!(row.contains(words), "{words:?} in {table}");
    }
    assert!(!table.stdout.contains("GPU MEMORY"), "no GPU is there to tell: {table}");
    let wide = sandbox.run(&["ps", "used", "-o", "wide"]);
    assert!(wide.stdout.contains("MEMORY LIMIT"), "{wide}");
    // Not the plan's, which is for another machine.
    let plan = sandbox.run(&["plan", "--topology", "dgx-1-v100", "--n-workers", "2", "-o", "json"]);
    let plan: Value = serde_json::from_str(&plan.stdout).expect("JSON");
    let limit = |of: &Value| of["workers"][0]["memory_limit_bytes"].as_u64().expect("a limit");
    let held = limit(&sandbox.state("used"));
    assert!(held < limit(&plan), "{held} of {plan}");
    assert!(wide.stdout.contains(&HumanBytes(held).to_string()), "{wide}");

    let mut watch = Screen::start(&sandbox, (80, 24), &["ps", "used", "--watch"]);
    watch.wait_until("the table", |text| text.contains("used: READY") && text.contains("gpu0"));
    for line in watch.text().lines() {
        assert!(line.chars().count() <= 80, "{line}");
    }
    let dead = sandbox.state("used")["workers"][0]["pid"].as_u64().expect("a pid");
    sandbox.kill(dead);
    watch.wait_until("the restart, in the table", |text| {
        let row = text.lines().find(|line| line.starts_with("gpu0 ")).unwrap_or_default();
        row.split_whitespace().skip_while(|word| *word != "READY").nth(1) == Some("1")
    });
    watch.type_in(CTRL_C);
    assert_eq!(watch.wait(), Some(130));
    watch.assert_restored();
    watch.wait_until("a new line for the prompt", |text| text.trim_end().ends_with("^C"));

    let mut watch = Screen::start(&sandbox, (120, 40), &["ps", "used", "--watch"]);
    watch.wait_for("used: READY");
    let mut all = Screen::start(&sandbox, (120, 40), &["ps", "--watch"]);
    all.wait_for("used: READY");
    down(&sandbox, "used");
    assert_eq!(watch.wait(), Some(0));
    watch.wait_for("used stopped at ");
    assert!(watch.text().contains("gpu0"), "the last table stays: {}", watch.text());
    assert_eq!(all.wait(), Some(0));
    all.wait_for("no cluster is running any more");
    sandbox.assert_only_the_causes_are_left("used");
}

#[test]
fn ctrl_c_during_the_start_takes_the_progress_away_and_says_stopped() {
    let sandbox = Sandbox::new();
    let folder = tempfile::tempdir().expect("a directory");
    let hangs = folder.path().join("hangs");
    std::fs::write(&hangs, "#!/bin/sh\nexec sleep 1000\n").expect("written");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&hangs, mode).expect("its mode");
    let spec = folder.path().join("spec.yaml");
    let text = format!("version: 1\nnative: {{program: {}}}\n", hangs.display());
    std::fs::write(&spec, text).expect("written");
    let spec = spec.to_str().expect("a path");
    let machine = ["--topology", "dgx-1-v100", "--simulate", "--n-workers", "2"];
    let up = [&["up", "-f", spec, "--name", "early"], &machine[..]].concat();
    let mut up = Screen::start(&sandbox, (80, 24), &up);
    up.wait_for("0/2 READY");
    up.type_in(CTRL_C);
    assert_eq!(up.wait(), Some(130), "{}", up.text());
    up.wait_for("stopped");
    up.assert_restored();
    let text = up.text();
    assert!(!text.contains("0/2") && !text.contains("^C"), "the line is clean: {text}");
    assert_eq!(text.lines().next_back(), Some("stopped"), "{text}");
    sandbox.assert_nothing_is_left();
}

#[test]
fn top_needs_a_terminal_and_a_cluster() {
    let sandbox = Sandbox::new();
    let refused = sandbox.run(&["top"]);
    assert_eq!(refused.code, 2, "{refused}");
    assert!(refused.stderr.contains("needs a terminal"), "{refused}");
    assert!(refused.stderr.contains("hint: for a program: cuda-cluster ps -o json"), "{refused}");
    let mut top = Screen::start(&sandbox, (80, 24), &["top"]);
    assert_eq!(top.wait(), Some(2));
    top.wait_for("no cluster is running");
    top.assert_restored();
    sandbox.assert_nothing_is_left();
}
