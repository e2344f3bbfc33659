//! A cluster from the outside: the real binary, real processes, a run directory for each test.

#![cfg(feature = "cli")]

mod access;
mod alerts;
mod bad_days;
mod bandwidth;
mod browser;
mod dashboard;
mod driver;
mod embedded;
mod ends;
#[path = "../fake-machine/mod.rs"]
mod fake_machine;
mod first_day;
mod gpu_check;
mod gpus;
mod history;
mod hosts;
mod inputs;
mod kernels;
mod liveness;
mod memory;
mod neighbours;
#[allow(dead_code, reason = "a part is for Python's own tests")]
#[path = "../packages/mod.rs"]
mod packages;
mod page;
mod page_logs;
mod page_overview;
mod page_tasks;
mod preflight;
mod programs;
mod readme;
mod run;
mod sandbox;
mod screen;
#[path = "../skip/mod.rs"]
mod skip;
mod stuck;
mod surroundings;
mod terminals;
mod top;
mod verify;
mod versions;
mod wires;

use std::time::{Duration, Instant};

use sandbox::{Sandbox, eventually};

const UP: [&str; 8] = [
    "up",
    "--topology",
    "dgx-1-v100",
    "--simulate",
    "--enable-nvlink",
    "--enable-infiniband",
    "--net-devices",
    "auto",
];

#[test]
fn a_detached_cluster_is_seen_by_ps_and_logs_and_taken_down() {
    let sandbox = Sandbox::new();
    let up = sandbox.run(&[&UP[..], &["--name", "demo", "--detach"]].concat());
    assert_eq!(up.code, 0, "{up}");
    let ready = "READY: demo, 8 workers, native engine, simulated GPUs; stop it with: ";
    assert!(up.stderr.contains(ready), "{up}");
    assert!(up.stdout.contains("gpu7"), "{up}");

    let state = sandbox.state("demo");
    assert_eq!(state["version"], 1);
    assert_eq!(state["name"], "demo");
    assert_eq!(state["engine"], "native");
    assert_eq!(state["state"], "ready");
    assert_eq!(state["simulated"], true);
    assert_eq!(state["scheduler"]["state"], "ready");
    let address = state["scheduler"]["address"].as_str().expect("an address");
    assert!(address.starts_with("unix://"), "{address}");
    let workers = state["workers"].as_array().expect("workers");
    assert_eq!(workers.len(), 8);
    for (rank, worker) in workers.iter().enumerate() {
        assert_eq!(worker["name"], format!("gpu{rank}"));
        assert_eq!(worker["state"], "ready");
        assert_eq!(worker["restarts"], 0);
        assert_eq!(worker["gpu"]["index"], rank);
        let peers = worker["peers"].as_array().expect("peers");
        assert_eq!(peers.len(), 7, "every worker is connected to every other: {worker}");
        for peer in peers {
            assert!(!peer["lanes"].as_array().expect("lanes").is_empty(), "{peer}");
        }
    }

    let env = sandbox.run(&["env", "demo"]);
    assert!(env.stdout.lines().all(|line| line.starts_with("export ")), "{env}");
    assert!(env.stdout.contains("CUDA_CLUSTER_RUN_DIR="), "{env}");

    let events = sandbox.run(&["events", "demo"]);
    assert!(events.stdout.contains("gpu7: READY"), "{events}");
    let last = sandbox.run(&["events", "demo", "--tail", "2"]);
    let end: Vec<&str> = events.stdout.lines().rev().take(2).collect();
    assert_eq!(last.stdout.lines().rev().collect::<Vec<_>>(), end, "{last}");
    assert_eq!(sandbox.run(&["events", "demo", "--since", "1h"]).stdout, events.stdout);
    let none = sandbox.run(&["events", "demo", "--since", "1ms"]);
    assert!(none.stderr.contains("nothing happened in the last 1ms"), "{none}");
    assert_eq!((none.code, none.stdout.as_str()), (0, ""), "{none}");

    let logs = sandbox.run(&["logs", "demo", "gpu3"]);
    assert_eq!(logs.code, 0, "{logs}");
    assert!(!logs.stdout.is_empty(), "{logs}");

    let down = sandbox.run(&["down", "demo"]);
    assert_eq!(down.code, 0, "{down}");
    sandbox.assert_nothing_is_left();
}

#[test]
fn every_process_has_the_binding_of_its_plan() {
    let sandbox = Sandbox::new();
    let up = sandbox.run(&[&UP[..], &["--name", "bound", "--detach"]].concat());
    assert_eq!(up.code, 0, "{up}");
    let state = sandbox.state("bound");
    for worker in state["workers"].as_array().expect("workers") {
        let pid = worker["pid"].as_u64().expect("a pid");
        let asked = worker["asked"]["cpus"].as_str().expect("CPUs");
        for thread in std::fs::read_dir(format!("/proc/{pid}/task")).expect("threads") {
            let status = thread.expect("a thread").path().join("status");
            let status = std::fs::read_to_string(status).expect("its status");
            let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:\t"));
            assert_eq!(allowed, Some(asked), "{worker}");
        }
        let environment = std::fs::read(format!("/proc/{pid}/environ")).expect("its environment");
        let environment = String::from_utf8_lossy(&environment);
        let uuid = worker["gpu"]["uuid"].as_str().expect("an identity");
        let visible = format!("CUDA_VISIBLE_DEVICES={uuid},");
        assert!(environment.contains(&visible), "{visible} in {environment}");
    }
    assert_eq!(sandbox.run(&["down"]).code, 0);
    sandbox.assert_nothing_is_left();
}

#[test]
fn ctrl_c_takes_a_foreground_cluster_down() {
    let sandbox = Sandbox::new();
    let mut up = sandbox.spawn(&[&UP[..], &["--name", "front"]].concat());
    eventually("READY", Duration::from_secs(30), || {
        sandbox.try_state("front").is_some_and(|state| state["state"] == "ready")
    });
    up.signal(nix::sys::signal::Signal::SIGINT);
    let up = up.wait();
    assert_eq!(up.code, 130, "{up}");
    assert!(up.stdout.contains("gpu0") && up.stderr.contains("READY: front"), "{up}");
    sandbox.assert_nothing_is_left();
}

#[test]
fn killing_the_supervisor_leaves_no_process() {
    let sandbox = Sandbox::new();
    let up = sandbox.run(&[&UP[..], &["--name", "doomed", "--detach"]].concat());
    assert_eq!(up.code, 0, "{up}");
    let state = sandbox.state("doomed");
    let mut pids: Vec<u64> = state["workers"]
        .as_array()
        .expect("workers")
        .iter()
        .filter_map(|w| w["pid"].as_u64())
        .collect();
    pids.extend(state["scheduler"]["pid"].as_u64());
    assert_eq!(pids.len(), 9);
    sandbox.kill(state["supervisor_pid"].as_u64().expect("a pid"));
    let alive = |pid: &u64| std::path::Path::new(&format!("/proc/{pid}")).exists();
    let killed = Instant::now();
    eventually("no process of the cluster", Duration::from_secs(20), || !pids.iter().any(alive));
    println!("all gone {:?} after the supervisor was killed", killed.elapsed());
    // What the dead supervisor left behind is removed by the next one of that name.
    let again = sandbox.run(&[&UP[..], &["--name", "doomed", "--detach"]].concat());
    assert_eq!(again.code, 0, "{again}");
    assert_eq!(sandbox.run(&["down", "doomed"]).code, 0);
    sandbox.assert_nothing_is_left();
}

#[test]
fn a_killed_worker_comes_back_and_reaches_its_peers() {
    let sandbox = Sandbox::new();
    let up = sandbox.run(&[&UP[..], &["--name", "back", "--detach"]].concat());
    assert_eq!(up.code, 0, "{up}");
    let before = sandbox.state("back")["workers"][3]["pid"].as_u64().expect("a pid");
    sandbox.kill(before);
    eventually("gpu3 READY again", Duration::from_secs(20), || {
        let state = sandbox.state("back");
        let worker = &state["workers"][3];
        worker["pid"].as_u64().is_some_and(|pid| pid != before)
            && worker["restarts"] == 1
            && state["state"] == "ready"
    });
    let worker = &sandbox.state("back")["workers"][3];
    assert_eq!(worker["peers"].as_array().map(Vec::len), Some(7), "{worker}");
    assert_eq!(worker["last_exit"]["signal"], 9, "{worker}");
    assert_eq!(sandbox.run(&["down", "back"]).code, 0);
    sandbox.assert_only_the_causes_are_left("back");
}

#[test]
fn a_name_that_is_taken_is_refused_and_the_running_cluster_is_left_alone() {
    let sandbox = Sandbox::new();
    let up = [&UP[..], &["--name", "one", "--detach", "--n-workers", "2"]].concat();
    assert_eq!(sandbox.run(&up).code, 0);
    let second = sandbox.run(&up);
    assert_eq!(second.code, 2, "{second}");
    assert!(second.stderr.contains("already running"), "{second}");
    assert!(second.stderr.contains("hint:"), "{second}");
    assert!(second.stderr.contains("has this very plan"), "{second}");
    let other = sandbox.run(&[&up[..], &["--threads-per-worker", "3"]].concat());
    assert_eq!(other.code, 2, "{other}");
    assert!(other.stderr.contains("threads 1 → 3"), "{other}");
    assert_eq!(sandbox.state("one")["state"], "ready");
    assert_eq!(sandbox.run(&["down", "one"]).code, 0);
    sandbox.assert_nothing_is_left();
}

#[test]
fn without_a_gpu_and_without_simulate_it_says_what_to_try() {
    if std::path::Path::new("/dev/nvidiactl").exists() {
        skip::skip("no-gpu", "this machine has an NVIDIA driver");
        return;
    }
    let sandbox = Sandbox::new();
    let up = sandbox.run(&["up"]);
    assert_eq!(up.code, 2, "{up}");
    assert!(up.stderr.contains("no NVIDIA"), "{up}");
    assert!(up.stderr.contains("--simulate"), "{up}");
    let elsewhere = sandbox.run(&["up", "--topology", "dgx-h100"]);
    assert_eq!(elsewhere.code, 2, "{elsewhere}");
    assert!(elsewhere.stderr.contains("--simulate"), "{elsewhere}");
    sandbox.assert_nothing_is_left();
}

#[test]
fn a_printed_plan_runs_as_it_stands() {
    let sandbox = Sandbox::new();
    let asked = ["--topology", "dgx-1-v100", "--simulate", "--n-workers", "2", "--name", "filed"];
    let plan = sandbox.run(&[&["plan"], &asked[..], &["-o", "yaml"]].concat());
    assert_eq!(plan.code, 0, "{plan}");
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), &plan.stdout).expect("written");
    let path = file.path().to_str().expect("a path");
    let up = sandbox.run(&["up", "--plan", path, "--detach"]);
    assert_eq!(up.code, 0, "{up}");
    assert_eq!(sandbox.state("filed")["workers"].as_array().map(Vec::len), Some(2));
    let again = sandbox.run(&["up", "--plan", path, "--name", "again", "--detach"]);
    assert_eq!(again.code, 0, "{again}");
    assert_eq!(sandbox.state("again")["state"], "ready");
    assert_eq!(sandbox.run(&["down", "again"]).code, 0);
    assert_eq!(sandbox.run(&["down", "filed"]).code, 0);
    let shown = sandbox.run(&["up", "--plan", path, "--name", "again", "--dry-run"]);
    assert!(shown.stdout.contains("again: 2 workers"), "{shown}");
    for more in [&["--gpus", "0"][..], &["--ucx", "auto"], &["--no-dashboard"], &["--strict"]] {
        let refused = sandbox.run(&[&["up", "--plan", path], more].concat());
        assert_eq!(refused.code, 2, "a plan is whole: {refused}");
        let which = format!("'--plan <FILE>' cannot be used with '{}", more[0]);
        assert!(refused.stderr.contains(&which), "{refused}");
    }
    for (text, words) in [
        ("version: 99".to_owned(), ["version 99 is not", "hint: plan again"]),
        (plan.stdout.replace("placement:", "plaecment:"), ["engine.native.plaecment", "hint: "]),
        (
            plan.stdout.replace("strict: false", "strict: perhaps"),
            ["requirements.strict", "hint: "],
        ),
    ] {
        std::fs::write(file.path(), text).expect("written");
        let wrong = sandbox.run(&["up", "--plan", path]);
        assert_eq!(wrong.code, 2, "{wrong}");
        for word in [path, words[0], words[1]] {
            assert!(wrong.stderr.contains(word), "{word:?} is missing: {wrong}");
        }
    }
    sandbox.assert_nothing_is_left();
}

#[test]
fn a_relative_pid_file_of_a_detached_cluster_lies_where_its_user_stands() {
    let sandbox = Sandbox::new();
    let folder = tempfile::tempdir().expect("a directory");
    let mut up = std::process::Command::new(env!("CARGO_BIN_EXE_cuda-cluster"));
    up.args(&UP[..4]).args(["--name", "pid", "--detach", "--n-workers", "1"]);
    up.args(["--pid-file", "own.pid"]).current_dir(folder.path());
    let said = sandbox.spawn_program(up).wait();
    assert_eq!(said.code, 0, "{said}");
    let file = folder.path().join("own.pid");
    let pid = std::fs::read_to_string(&file).expect("the pid file");
    assert_eq!(pid.trim(), sandbox.state("pid")["supervisor_pid"].to_string());
    assert_eq!(sandbox.run(&["down", "pid"]).code, 0);
    sandbox.assert_nothing_is_left();
    assert!(!file.exists(), "the pid file goes with the supervisor");
}

#[test]
fn the_doctor_checks_this_machine_and_says_what_to_do() {
    let sandbox = Sandbox::new();
    let json = sandbox.run(&["doctor", "-o", "json"]);
    let told: serde_json::Value = serde_json::from_str(&json.stdout).expect("JSON");
    let findings = told["findings"].as_array().expect("findings");
    for check in ["driver", "ucx", "other-users", "containment", "shared-memory", "python"] {
        assert!(findings.iter().any(|finding| finding["id"] == check), "{check}: {json}");
    }
    // The tests need UCX, so it is installed; a file that is not a library is an error with a hint.
    assert_eq!(json.code, 0, "{json}");
}

#[test]
fn a_worker_restarts_and_the_cluster_scales_when_asked() {
    let sandbox = Sandbox::new();
    let up = sandbox.run(&[&UP[..], &["--name", "wish", "--detach", "--n-workers", "3"]].concat());
    assert_eq!(up.code, 0, "{up}");
    let name = sandbox.state("wish")["workers"][1]["name"].as_str().expect("a name").to_owned();
    let before = sandbox.state("wish")["workers"][1]["pid"].clone();
    assert_eq!(sandbox.run(&["restart", "wish", &name]).code, 0);
    eventually("restarted", Duration::from_secs(20), || {
        let state = sandbox.state("wish");
        state["workers"][1]["pid"] != before && state["state"] == "ready"
    });
    let unknown = sandbox.run(&["restart", "gpu77"]);
    assert_eq!(unknown.code, 2, "{unknown}");
    assert!(unknown.stderr.contains(&name), "{unknown}");
    assert_eq!(sandbox.run(&["scale", "2"]).code, 0);
    eventually("two workers", Duration::from_secs(20), || {
        let state = sandbox.state("wish");
        let workers = state["workers"].as_array().expect("workers").iter();
        workers.filter(|worker| worker["state"] == "ready").count() == 2
    });
    assert_eq!(sandbox.run(&["down", "wish"]).code, 0);
    sandbox.assert_nothing_is_left();
}

#[test]
fn native_workers_that_die_at_work_are_back_without_delay() {
    let sandbox = Sandbox::new();
    let up = sandbox.run(&[&UP[..], &["--name", "busy", "--detach", "--n-workers", "2"]].concat());
    assert_eq!(up.code, 0, "{up}");
    let directory = sandbox.base().join("busy");
    let client = cuda_cluster::cluster::Client::connect(&directory).expect("the scheduler answers");
    let pid = |state: &serde_json::Value| state["workers"][0]["pid"].as_u64();
    let mut before = None;
    for round in 0..4_u64 {
        eventually("READY again", Duration::from_secs(40), || {
            let state = sandbox.state("busy");
            state["state"] == "ready" && pid(&state) != before
        });
        // Enough for both workers, and each has some of its own.
        let tasks = client.map("sleep", [2_000_000 + round; 16]).expect("submitted");
        std::thread::sleep(Duration::from_millis(500));
        before = pid(&sandbox.state("busy"));
        sandbox.kill(before.expect("alive"));
        drop(tasks);
    }
    eventually("READY again", Duration::from_secs(40), || {
        let state = sandbox.state("busy");
        state["state"] == "ready" && pid(&state) != before
    });
    let events = std::fs::read_to_string(directory.join("events.jsonl")).expect("events");
    let events = events.lines().map(|line| serde_json::from_str(line).expect("JSON"));
    let waits: Vec<serde_json::Value> = events
        .filter(|event: &serde_json::Value| event["event"] == "restarting")
        .map(|event| event["in_ms"].clone())
        .collect();
    assert_eq!(waits, [0, 0, 0, 0]);
    // Between two lives, its socket is there and nobody listens.
    let state = sandbox.state("busy");
    let supervisor = state["supervisor_pid"].as_i64().and_then(|pid| i32::try_from(pid).ok());
    let supervisor = nix::unistd::Pid::from_raw(supervisor.expect("a pid"));
    let tell = |signal| nix::sys::signal::kill(supervisor, signal).expect("it lives");
    tell(nix::sys::signal::Signal::SIGSTOP);
    sandbox.kill(pid(&state).expect("alive"));
    let told = || client.counters("gpu0").err().map(|error| error.to_string());
    eventually("no figures of nobody", Duration::from_secs(40), || {
        told().is_some_and(|error| error == "there is no worker gpu0")
    });
    tell(nix::sys::signal::Signal::SIGCONT);
    drop(client);
    assert_eq!(sandbox.run(&["down", "busy"]).code, 0);
    sandbox.assert_only_the_causes_are_left("busy");
}

#[test]
fn a_scheduler_that_is_lost_after_a_scale_down_gets_its_workers_back() {
    let sandbox = Sandbox::new();
    let up = sandbox.run(&[&UP[..], &["--name", "few", "--detach", "--n-workers", "3"]].concat());
    assert_eq!(up.code, 0, "{up}");
    let ready_with = |workers: usize, state: &serde_json::Value| {
        let all = state["workers"].as_array().expect("workers").iter();
        let ready = all.filter(|worker| worker["state"] == "ready").count();
        state["state"] == "ready" && ready == workers
    };
    let eventually_ready_with = |workers: usize, former: Option<u64>| {
        eventually("READY with the workers that are wanted", Duration::from_secs(40), || {
            let state = sandbox.state("few");
            state["scheduler"]["pid"].as_u64() != former && ready_with(workers, &state)
        });
    };
    assert_eq!(sandbox.run(&["scale", "few", "2"]).code, 0);
    eventually_ready_with(2, None);
    let scheduler = sandbox.state("few")["scheduler"]["pid"].as_u64().expect("a pid");
    sandbox.kill(scheduler);
    eventually_ready_with(2, Some(scheduler));
    let scheduler = sandbox.state("few")["scheduler"]["pid"].as_u64().expect("a pid");
    assert_eq!(sandbox.run(&["restart", "few", "scheduler"]).code, 0);
    eventually_ready_with(2, Some(scheduler));
    assert_eq!(sandbox.run(&["scale", "few", "3"]).code, 0);
    eventually_ready_with(3, None);
    let verified = sandbox.run(&["verify", "few"]);
    assert!(verified.stdout.starts_with("6 of 6 ok"), "{verified}");
    assert_eq!(sandbox.run(&["down", "few"]).code, 0);
    sandbox.assert_only_the_causes_are_left("few");
}

#[test]
fn processes_are_started_again_after_the_program_was_deleted_or_replaced() {
    let sandbox = Sandbox::new();
    let built = std::path::Path::new(env!("CARGO_BIN_EXE_cuda-cluster"));
    let folder = tempfile::tempdir_in(built.parent().expect("a directory")).expect("a directory");
    let program = folder.path().join("cuda-cluster");
    std::fs::hard_link(built, &program).expect("a second name");
    let mut up = std::process::Command::new(&program);
    up.args([&UP[..], &["--name", "moved", "--detach", "--n-workers", "2"]].concat());
    let up = sandbox.spawn_program(up).wait();
    assert_eq!(up.code, 0, "{up}");
    assert!(!sandbox.run(&["ps", "moved"]).stdout.contains("former"), "nothing has happened to it");
    std::fs::remove_file(&program).expect("it is there");
    for what in ["deleted", "replaced"] {
        if what == "replaced" {
            std::fs::write(&program, "#!/bin/sh\nexit 3\n").expect("another program");
        }
        let note = format!("note: {} was {what}: ", program.display());
        let ps = sandbox.run(&["ps", "moved"]);
        assert!(ps.stdout.contains(&note), "{ps}");
        for process in ["/workers/0/pid", "/scheduler/pid"] {
            let pid = |state: &serde_json::Value| state.pointer(process).and_then(|it| it.as_u64());
            let before = pid(&sandbox.state("moved")).expect("a pid");
            sandbox.kill(before);
            eventually("it is READY again", Duration::from_secs(40), || {
                let state = sandbox.state("moved");
                state["state"] == "ready" && pid(&state).is_some_and(|pid| pid != before)
            });
        }
    }
    assert_eq!(sandbox.run(&["down", "moved"]).code, 0);
    sandbox.assert_only_the_causes_are_left("moved");
}

#[test]
fn questions_about_clusters_that_do_not_run_have_clear_answers() {
    let sandbox = Sandbox::new();
    for arguments in [["down", "nobody"], ["logs", "nobody"]] {
        let answer = sandbox.run(&arguments);
        assert_eq!(answer.code, 2, "{answer}");
        assert!(answer.stderr.contains("nobody"), "{answer}");
        assert!(answer.stderr.contains("hint:"), "{answer}");
    }
    let json = sandbox.run(&["ps", "-o", "json"]);
    assert_eq!(json.code, 2, "{json}");
    assert_eq!(sandbox.run(&["ps"]).code, 0);
}
