//! Unexpected ends, and processes that don't answer: there is always a way down, and always a
//! message that says what happened.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, SystemTime};

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::sandbox::{Said, Sandbox, eventually};

/// Two shells on simulated GPUs, which need no UCX.
fn up(sandbox: &Sandbox, name: &str, script: &str, more: &str) -> Said {
    let argv = serde_json::json!(["sh", "-c", script]);
    let spec = tempfile::NamedTempFile::new().expect("a file");
    let text = format!(
        "version: 1\ntopology: dgx-h100\nsimulate: true\nworkers: 2\nengine: command\n\
         command: {{argv: {argv}}}\n{more}"
    );
    fs::write(spec.path(), text).expect("written");
    let path = spec.path().to_str().expect("a path");
    sandbox.run(&["up", "-f", path, "--name", name, "--detach"])
}

fn up_well(sandbox: &Sandbox, name: &str) -> (u64, u64) {
    let said = up(sandbox, name, "exec sleep 1000", "");
    assert_eq!(said.code, 0, "{said}");
    let state = sandbox.state(name);
    let pid = |key: &str| state[key].as_u64().expect("a pid");
    (pid("supervisor_pid"), pid("guardian_pid"))
}

/// Kills the supervisor, after which the guardian ends the rest.
fn bereave(sandbox: &Sandbox, name: &str) -> u64 {
    let (supervisor, guardian) = up_well(sandbox, name);
    sandbox.kill(supervisor);
    eventually("the guardian has done its work", Duration::from_secs(60), || {
        !sandbox.pids().contains(&guardian)
    });
    supervisor
}

#[test]
fn a_cluster_whose_programs_have_all_done_their_work_is_over() {
    let sandbox = Sandbox::new();
    let folder = tempfile::tempdir().expect("a directory");
    let enough = folder.path().join("enough");
    let script = format!("while [ ! -e {} ]; do sleep 0.1; done", enough.display());
    let said = up(&sandbox, "done", &script, "");
    assert_eq!(said.code, 0, "{said}");
    assert_eq!(sandbox.state("done")["state"], "ready");
    fs::write(enough, "").expect("written");
    eventually("it is over", Duration::from_secs(60), || sandbox.try_state("done").is_none());
    sandbox.assert_nothing_is_left();
}

#[test]
fn a_start_that_another_command_ends_is_a_failure() {
    let sandbox = Sandbox::new();
    let folder = tempfile::tempdir().expect("a directory");
    let hangs = folder.path().join("hangs");
    fs::write(&hangs, "#!/bin/sh\nexec sleep 1000\n").expect("written");
    fs::set_permissions(&hangs, fs::Permissions::from_mode(0o755)).expect("executable");
    let spec = folder.path().join("spec.yaml");
    let text = format!("version: 1\nnative: {{program: {}}}\n", hangs.display());
    fs::write(&spec, text).expect("written");
    let path = spec.to_str().expect("a path");
    for (name, more) in
        [("free", &["--detach"][..]), ("owned", &[]), ("proven", &["--detach", "--verify"])]
    {
        let machine = ["--topology", "dgx-h100", "--simulate", "--n-workers", "1"];
        let up = sandbox.spawn(&[&["up", "-f", path, "--name", name], &machine[..], more].concat());
        eventually("it starts", Duration::from_secs(60), || sandbox.try_state(name).is_some());
        assert_eq!(sandbox.run(&["down", name]).code, 0);
        let said = up.wait();
        assert_eq!(said.code, 1, "{said}");
        let failure = format!("error: {name} was taken down before it was READY");
        assert!(said.stderr.contains(&failure), "{said}");
        assert!(said.stderr.contains("hint: "), "{said}");
        sandbox.assert_nothing_is_left();
    }
}

#[test]
fn a_cluster_is_down_when_its_supervisor_has_ended_too() {
    let sandbox = Sandbox::new();
    let spec = tempfile::NamedTempFile::new().expect("a file");
    let text = "version: 1\ntopology: dgx-h100\nsimulate: true\nworkers: 8\nengine: command\n\
                command: {argv: [sleep, '1000']}\n";
    fs::write(spec.path(), text).expect("written");
    let path = spec.path().to_str().expect("a path");
    let mut up = sandbox.spawn(&["up", "-f", path, "--name", "unheard"]);
    up.wait_for_a_line();
    eventually("READY", Duration::from_secs(60), || sandbox.state("unheard")["state"] == "ready");
    let supervisor = sandbox.state("unheard")["supervisor_pid"].as_u64().expect("a pid");
    // Its starter reads nothing, so the supervisor has to wait for it at the end.
    up.signal(Signal::SIGSTOP);
    for _ in 0..6 {
        assert_eq!(sandbox.run(&["scale", "unheard", "1"]).code, 0);
        assert_eq!(sandbox.run(&["scale", "unheard", "8"]).code, 0);
    }
    let down = sandbox.run(&["down", "unheard"]);
    assert_eq!(down.code, 0, "{down}");
    assert!(!sandbox.pids().contains(&supervisor), "it is down, but its supervisor lives: {down}");
    up.signal(Signal::SIGCONT);
    up.wait();
    sandbox.assert_nothing_is_left();
}

#[test]
fn a_stopped_supervisor_does_not_answer_and_is_killed_with_its_cluster() {
    let sandbox = Sandbox::new();
    let (healthy, _) = up_well(&sandbox, "healthy");
    let (supervisor, _) = up_well(&sandbox, "stopped");
    sandbox.signal(supervisor, Signal::SIGSTOP);
    for arguments in [&["down", "stopped"][..], &["down", "--all"]] {
        let down = sandbox.run(&[arguments, &["--timeout", "1s"]].concat());
        assert_eq!(down.code, 1, "{down}");
        assert!(down.stderr.contains("the supervisor of stopped does not answer"), "{down}");
        assert!(down.stderr.contains("hint: cuda-cluster down --kill stopped"), "{down}");
    }
    assert!(!sandbox.pids().contains(&healthy), "the other one is down");
    let kill = sandbox.run(&["down", "--kill", "stopped"]);
    assert_eq!(kill.code, 0, "{kill}");
    assert!(kill.stderr.contains("stopped is down"), "{kill}");
    sandbox.assert_nothing_is_left();
}

#[test]
fn a_cluster_whose_supervisor_and_guardian_are_stopped_is_killed_too() {
    let sandbox = Sandbox::new();
    for arguments in [["down", "--kill", "d"], ["down", "--all", "--kill"]] {
        let (supervisor, guardian) = up_well(&sandbox, "d");
        sandbox.signal(guardian, Signal::SIGSTOP);
        sandbox.signal(supervisor, Signal::SIGSTOP);
        let kill = sandbox.run(&arguments);
        assert_eq!(kill.code, 0, "{kill}");
        sandbox.assert_nothing_is_left();
    }
    // Only the guardian is killed: the supervisor notices, but can do little.
    let (_, guardian) = up_well(&sandbox, "d");
    sandbox.signal(guardian, Signal::SIGSTOP);
    let kill = sandbox.run(&["down", "--kill", "d"]);
    assert_eq!(kill.code, 0, "{kill}");
    sandbox.assert_nothing_is_left();
}

#[test]
fn a_detached_cluster_that_died_is_explained_until_its_name_is_used_again() {
    let sandbox = Sandbox::new();
    let supervisor = bereave(&sandbox, "d");
    let cause = format!("the supervisor (process {supervisor}) ended without a word");

    let ps = sandbox.run(&["ps"]);
    assert!(ps.stderr.contains("1 has ended: cuda-cluster ps -a"), "{ps}");
    let all = sandbox.run(&["ps", "-a"]);
    assert_eq!(all.code, 0, "{all}");
    let first = all.stdout.lines().next().expect("a line");
    assert!(first.starts_with("d: failed at 2") && first.ends_with(&cause), "{all}");
    assert!(all.stdout.contains("gpu0") && !all.stdout.contains("READY"), "{all}");

    let json = sandbox.run(&["ps", "-a", "-o", "json"]);
    let list: Value = serde_json::from_str(&json.stdout).expect("JSON");
    let state = &list["clusters"][0];
    assert_eq!((&state["name"], &state["state"]), (&"d".into(), &"failed".into()), "{json}");
    assert_eq!(state["cause"]["text"], Value::from(cause.as_str()));
    assert!(state["ended_at"].is_string() && state["workers"][0]["pid"].is_null(), "{json}");
    let alone = sandbox.run(&["ps", "-a", "d", "-o", "json"]);
    assert_eq!(&serde_json::from_str::<Value>(&alone.stdout).expect("JSON"), state);

    for arguments in [&["events", "d"][..], &["logs", "d"], &["events", "d", "--follow"]] {
        let said = sandbox.run(arguments);
        assert_eq!(said.code, 0, "{said}");
        let first = said.stderr.lines().next().expect("a line");
        assert!(first.starts_with("d failed at 2") && first.ends_with(&cause), "{said}");
    }
    assert!(sandbox.run(&["events", "d"]).stdout.contains("cluster: READY"));
    // Commands that need a running cluster say why there is none.
    for arguments in [&["ps", "d"][..], &["env", "d"], &["restart", "d", "gpu0"]] {
        let said = sandbox.run(arguments);
        assert_eq!(said.code, 2, "{said}");
        assert!(said.stderr.contains("d is not running: it failed at 2"), "{said}");
        assert!(said.stderr.contains(&cause) && said.stderr.contains("hint:"), "{said}");
    }
    let down = sandbox.run(&["down", "d"]);
    assert_eq!(down.code, 0, "{down}");
    assert!(down.stderr.contains(&cause), "{down}");

    up_well(&sandbox, "d");
    let all = sandbox.run(&["ps", "-a"]);
    assert!(all.stdout.starts_with("d: READY") && !all.stdout.contains("failed"), "{all}");
    assert_eq!(sandbox.run(&["down", "d"]).code, 0);
    sandbox.assert_nothing_is_left();
    assert!(sandbox.run(&["ps", "-a"]).stdout.is_empty(), "who asked for an end needs no story");
}

#[test]
fn who_follows_the_events_hears_that_the_supervisor_was_killed() {
    let sandbox = Sandbox::new();
    let (supervisor, _) = up_well(&sandbox, "d");
    let mut follow = sandbox.spawn(&["events", "d", "--follow"]);
    // It listens before it prints.
    follow.wait_for_a_line();
    sandbox.kill(supervisor);
    let said = follow.wait();
    assert_eq!(said.code, 1, "{said}");
    assert!(said.stderr.contains("d is not running: it failed at 2"), "{said}");
}

#[test]
fn a_cluster_that_failed_says_so_and_why_when_it_is_gone() {
    let sandbox = Sandbox::new();
    let said = up(&sandbox, "d", "sleep 0.5; echo bang; exit 3", "supervision: {restart: never}\n");
    assert_eq!(said.code, 0, "{said}");
    eventually("it has failed", Duration::from_secs(60), || {
        let said = sandbox.run(&["ps", "d"]);
        said.stderr.contains("d is not running: it failed at 2")
    });
    let all = sandbox.run(&["ps", "-a"]);
    let first = all.stdout.lines().next().expect("a line");
    assert!(first.starts_with("d: failed at ") && first.contains("ended with status 3"), "{all}");
    assert!(all.stdout.contains("\n  bang\n"), "{all}");
    let logs = sandbox.run(&["logs", "d"]);
    assert!(logs.stderr.contains("ended with status 3") && logs.stdout.contains("bang"), "{logs}");
    sandbox.assert_only_the_causes_are_left("d");
}

#[test]
fn when_the_guardian_is_killed_too_nobody_makes_up_the_time() {
    let sandbox = Sandbox::new();
    let (supervisor, guardian) = up_well(&sandbox, "d");
    // The guardian goes first: the kernel would wake it when the supervisor's end orphans its
    // group.
    sandbox.signal(supervisor, Signal::SIGSTOP);
    sandbox.kill(guardian);
    sandbox.kill(supervisor);
    eventually("nothing lives", Duration::from_secs(60), || sandbox.pids().is_empty());
    let all = sandbox.run(&["ps", "-a"]);
    let first = all.stdout.lines().next().expect("a line");
    assert!(first.starts_with("d: failed: the supervisor"), "{all}");
    assert!(first.contains("ended without a word some time after 2"), "{all}");
    // Everything else is removed, but the record of the cluster stays.
    assert_eq!(sandbox.run(&["down", "--all"]).code, 0);
    sandbox.assert_no_shared_memory_is_left();
    for gone in ["secret", "owners.json", "control.sock"] {
        assert!(!sandbox.base().join("d").join(gone).exists(), "{gone}");
    }
    assert!(sandbox.run(&["ps", "-a"]).stdout.starts_with(first));
}

#[test]
fn down_and_up_right_after_the_death_of_a_supervisor_do_their_work() {
    let sandbox = Sandbox::new();
    for _ in 0..5 {
        let (supervisor, _) = up_well(&sandbox, "d");
        sandbox.kill(supervisor);
        let down = sandbox.run(&["down", "d"]);
        // Its guardian may have ended all before anybody could ask.
        let is_gone = down.code == 2 && down.stderr.contains("no cluster named d is running");
        assert!(down.code == 0 || is_gone, "{down}");
        let (supervisor, _) = up_well(&sandbox, "d");
        sandbox.kill(supervisor);
        let (supervisor, _) = up_well(&sandbox, "d");
        let taken = up(&sandbox, "d", "exec sleep 1000", "");
        assert_eq!(taken.code, 2, "{taken}");
        assert!(taken.stderr.contains("a cluster named d is already running"), "{taken}");
        sandbox.kill(supervisor);
    }
    assert_eq!(sandbox.run(&["down", "--all"]).code, 0);
    eventually("nothing lives", Duration::from_secs(60), || sandbox.pids().is_empty());
    sandbox.assert_no_shared_memory_is_left();
}

#[test]
fn failed_runs_leave_the_youngest_few_of_their_directories() {
    let sandbox = Sandbox::new();
    let run = || {
        let flags = ["run", "--topology", "dgx-h100", "--simulate", "--n-workers", "1"];
        let said = sandbox.run(&[&flags[..], &["--", "sh", "-c", "exit 3"]].concat());
        assert_eq!(said.code, 3, "{said}");
        said.stderr.split_once("what is known of it is in ").expect("a place").1.trim().to_owned()
    };
    let left = || fs::read_dir(sandbox.base()).expect("there").flatten().collect::<Vec<_>>();
    let places: Vec<String> = (0..10).map(|_| run()).collect();
    for place in &places {
        assert!(fs::exists(place).expect("readable"), "somebody was just told to look at {place}");
    }
    let yesterday = SystemTime::now() - Duration::from_secs(86_400);
    for directory in left() {
        File::open(directory.path()).and_then(|it| it.set_modified(yesterday)).expect("set");
    }
    let last = run();
    assert!(fs::exists(&last).expect("readable"), "{last}");
    assert_eq!(left().len(), 8 + 1);
}

#[test]
fn a_run_directory_that_cannot_be_read_is_not_no_cluster() {
    let sandbox = Sandbox::new();
    up_well(&sandbox, "d");
    let unreadable = sandbox.base().join("e");
    fs::create_dir(&unreadable).expect("made");
    let root = nix::unistd::Uid::effective().is_root();
    if root {
        // Root can read everything, but does not own everything.
        std::os::unix::fs::chown(&unreadable, Some(65534), None).expect("another owner");
    }
    let closed = fs::Permissions::from_mode(0o000);
    fs::set_permissions(&unreadable, closed).expect("its mode");
    let reason = if root { "belongs to user 65534" } else { "cannot read" };
    for arguments in [&["ps"][..], &["ps", "-a"], &["down", "e"], &["down", "--all"]] {
        let said = sandbox.run(arguments);
        assert_eq!(said.code, 1, "{said}");
        assert!(said.stderr.contains(reason) && !said.stderr.contains("no cluster"), "{said}");
        assert!(said.stderr.contains("hint:"), "{said}");
    }
    fs::remove_dir(&unreadable).expect("removed");
    sandbox.assert_nothing_is_left();

    // A directory cannot be read where there is a file.
    let _ = fs::remove_dir(sandbox.base());
    fs::write(sandbox.base(), "").expect("written");
    for arguments in [&["ps"][..], &["ps", "-a"], &["down", "d"], &["down", "--all"], &["env"]] {
        let said = sandbox.run(arguments);
        assert_eq!(said.code, 1, "{said}");
        assert!(said.stderr.contains("is a file, not a directory"), "{said}");
        assert!(said.stderr.contains("hint:"), "{said}");
    }
    fs::remove_file(sandbox.base()).expect("removed");
}

#[test]
fn the_end_of_a_cluster_whose_run_directory_could_not_be_written_is_told_from_its_events() {
    let sandbox = Sandbox::new();
    let folder = tempfile::tempdir().expect("a directory");
    let enough = folder.path().join("enough");
    let script = format!("until test -e {}; do sleep 0.05; done; exit 3", enough.display());
    let up = up(&sandbox, "d", &script, "supervision: {restart: never}\n");
    assert_eq!(up.code, 0, "{up}");
    // Nothing can be written where the draft of the state would be, also not by root.
    let in_the_way = sandbox.base().join("d/state.new/kept");
    fs::create_dir_all(&in_the_way).expect("made");
    fs::write(&enough, "").expect("written");
    eventually("it has ended", Duration::from_secs(60), || sandbox.pids().is_empty());
    let all = sandbox.run(&["ps", "-a"]);
    let first = all.stdout.lines().next().expect("a line");
    assert!(first.starts_with("d: failed at 2") && first.contains("status 3"), "{all}");
    assert!(!all.stdout.contains("without a word"), "{all}");
    sandbox.run(&["down", "--all"]);
}

#[test]
fn a_copy_of_a_running_clusters_directory_is_no_cluster_that_has_ended() {
    let sandbox = Sandbox::new();
    let (supervisor, _) = up_well(&sandbox, "d");
    let rank = sandbox.state("d")["workers"][0]["pid"].as_u64().expect("a pid");
    let mut copy = std::process::Command::new("cp");
    copy.arg("-r").arg(sandbox.base().join("d")).arg(sandbox.base().join("copy"));
    assert!(copy.status().expect("it runs").success());
    let all = sandbox.run(&["ps", "-a"]);
    assert!(all.stdout.starts_with("d: READY") && !all.stdout.contains("copy"), "{all}");
    assert_eq!(sandbox.run(&["down", "copy"]).code, 2);
    // Who takes the name kills nothing of what the copy tells of.
    let taken = up(&sandbox, "copy", "exec sleep 1000", "");
    assert_eq!(taken.code, 0, "{taken}");
    for pid in [supervisor, rank] {
        assert!(sandbox.pids().contains(&pid), "process {pid} of the cluster lives");
    }
    assert_eq!(sandbox.run(&["down", "--all"]).code, 0);
    sandbox.assert_nothing_is_left();
}

#[test]
fn a_link_in_place_of_a_run_directory_hides_no_other_cluster() {
    let sandbox = Sandbox::new();
    up_well(&sandbox, "d");
    let link = sandbox.base().join("link");
    std::os::unix::fs::symlink("/tmp", &link).expect("a link");
    for arguments in [&["ps"][..], &["ps", "-a"], &["ps", "d"], &["env"]] {
        let said = sandbox.run(arguments);
        assert_eq!(said.code, 0, "{said}");
    }
    let said = sandbox.run(&["ps", "link"]);
    assert_eq!(said.code, 1, "{said}");
    assert!(said.stderr.contains("cannot tell whether link is running"), "{said}");
    assert!(said.stderr.contains("link is a symbolic link, not a directory"), "{said}");
    assert_eq!(sandbox.run(&["down", "--all"]).code, 0);
    fs::remove_file(link).expect("removed");
    sandbox.assert_nothing_is_left();
}

#[test]
fn pipes_in_place_of_files_hold_nobody_up() {
    let sandbox = Sandbox::new();
    let place = sandbox.base().join("pipes");
    let mut private = std::fs::DirBuilder::new();
    std::os::unix::fs::DirBuilderExt::mode(&mut private, 0o700);
    private.recursive(true).create(&place).expect("a directory");
    for name in ["owners.json", "state.json", "events.jsonl"] {
        let mode = nix::sys::stat::Mode::S_IRUSR | nix::sys::stat::Mode::S_IWUSR;
        nix::unistd::mkfifo(&place.join(name), mode).expect("a pipe");
    }
    let said = sandbox.run(&["ps", "-a"]);
    assert_eq!(said.code, 0, "{said}");
    let machine = ["--topology", "dgx-h100", "--simulate", "--n-workers", "1"];
    let said = sandbox.run(&[&["up", "--name", "pipes", "--detach"], &machine[..]].concat());
    assert_eq!(said.code, 0, "{said}");
    assert_eq!(sandbox.run(&["down", "pipes"]).code, 0);
}

#[test]
fn a_cluster_whose_directories_were_removed_is_reached_and_starts_workers_again() {
    let sandbox = Sandbox::new();
    let machine = ["--topology", "dgx-h100", "--simulate", "--n-workers", "2"];
    let said = sandbox.run(&[&["up", "--name", "tidied", "--detach"], &machine[..]].concat());
    assert_eq!(said.code, 0, "{said}");
    let paths = cuda_cluster::os::run_directory::Paths::at(&sandbox.base().join("tidied"));
    let is_ready = || sandbox.try_state("tidied").is_some_and(|state| state["state"] == "ready");
    let works = || {
        let verified = sandbox.run(&["verify", "tidied", "--rounds", "1"]);
        verified.code == 0
            && sandbox.run(&["bench", "tasks", "tidied", "--count", "10", "--runs", "1"]).code == 0
    };
    let restarts = || {
        let worker = |state: &serde_json::Value| state["workers"][0]["pid"].as_u64();
        let before = worker(&sandbox.state("tidied"));
        sandbox.kill(before.expect("alive"));
        eventually("READY again", Duration::from_secs(40), || {
            is_ready() && worker(&sandbox.state("tidied")) != before
        });
        assert!(works());
    };
    std::fs::remove_dir_all(paths.root()).expect("removed");
    eventually("it is reached", Duration::from_secs(40), || is_ready() && works());
    restarts();
    for socket in ["scheduler.sock", "gpu1.sock"] {
        std::fs::remove_file(paths.root().join(socket)).expect("removed");
        eventually("it listens again", Duration::from_secs(40), works);
    }
    // As session managers do at the last logout.
    std::fs::remove_dir_all(paths.shared_memory()).expect("removed");
    restarts();
    assert_eq!(sandbox.run(&["down", "tidied"]).code, 0);
    assert!(!paths.shared_memory().exists());
}
