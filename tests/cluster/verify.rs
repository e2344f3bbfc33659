//! Links seen from outside: `verify`, `up --verify`, `bench links`, and the libucp that was chosen.

use std::collections::BTreeSet;
use std::process::Command;
use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::Value;

use super::sandbox::{Said, Sandbox, eventually};

const TWO: [&str; 6] = ["--topology", "dgx-h100", "--simulate", "--n-workers", "2", "--detach"];

fn up(sandbox: &Sandbox, arguments: &[&str], variables: &[(&str, &str)]) -> Said {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuda-cluster"));
    command.arg("up").args(TWO).args(arguments).envs(variables.iter().copied());
    sandbox.spawn_program(command).wait()
}

#[test]
fn a_cluster_that_uses_shared_memory_is_verified_before_it_is_ready() {
    let sandbox = Sandbox::new();
    let said = up(&sandbox, &["--name", "good", "--verify"], &[]);
    assert_eq!(said.code, 0, "{said}");
    assert!(!said.stderr.contains("ignored"), "{said}");
    let (verified, ready) = (said.stderr.find("verified: 2 ways"), said.stderr.find("READY:"));
    assert!(verified.is_some() && verified < ready, "{said}");
    let events = sandbox.run(&["events", "good"]).stdout;
    let phases: Vec<_> = events.lines().filter_map(|line| line.split("cluster: ").nth(1)).collect();
    assert_eq!(phases, ["starting", "verifying", "READY"], "{events}");
    let said = sandbox.run(&["verify", "good"]);
    assert!(said.stdout.starts_with("2 of 2 ok: host memory "), "the answer comes first: {said}");
    // On a busy machine a pair may be slow, which is said in a table after an empty line.
    let slow = said.stdout.matches("  slow: ").count();
    let more = if slow > 0 { slow + 2 } else { 0 };
    assert_eq!(said.stdout.lines().count(), 1 + more, "nothing else is not as expected: {said}");
    let table = sandbox.run(&["verify", "good", "-o", "table", "--rounds", "1"]);
    assert_eq!(table.stdout.lines().count(), 3, "{table}");
    assert!(table.stdout.contains("µs one way"), "{table}");
    let said = sandbox.run(&["verify", "good", "-o", "json"]);
    assert_eq!(said.code, 0, "{said}");
    let document: Value = serde_json::from_str(&said.stdout).expect("JSON");
    let pairs = document["pairs"].as_array().expect("pairs");
    assert_eq!(pairs.len(), 2);
    for pair in pairs {
        assert_eq!(pair["link"], "host memory");
        assert!(pair["gb_per_s"].as_f64().is_some_and(|figure| figure > 0.0), "{pair}");
        assert!(pair["lanes"].to_string().contains("cma/memory"), "{pair}");
    }
    assert_eq!(sandbox.run(&["down", "good"]).code, 0);
    sandbox.assert_nothing_is_left();
}

/// The pairs of workers that are connected, as the state tells.
fn connected(state: &Value) -> BTreeSet<[String; 2]> {
    let name = |value: &Value| value.as_str().expect("a name").to_owned();
    let workers = state["workers"].as_array().expect("workers").iter();
    let pairs = workers.flat_map(|worker| {
        let peers = worker["peers"].as_array().expect("peers").iter();
        peers.map(|peer| {
            let mut pair = [name(&worker["name"]), name(&peer["peer"])];
            pair.sort();
            pair
        })
    });
    pairs.collect()
}

#[test]
fn pairs_of_many_workers_connect_on_first_use() {
    let sandbox = Sandbox::new();
    let many = ["--gpus", "none", "--cpu-workers", "20", "--name", "many", "--detach"];
    let said = sandbox.run(&[&["up"], &many[..]].concat());
    assert_eq!(said.code, 0, "{said}");
    let before = connected(&sandbox.state("many"));
    // 16 workers have all of theirs, the others those before them by 1, 2, 4, 8 and 16.
    assert_eq!(before.len(), 120 + 5 * 4, "{before:?}");
    let told = "note: 140 of 190 pairs of workers are connected, the others connect on first use";
    assert!(said.stderr.contains(told), "{said}");
    let names: Vec<String> = (0..20).map(|number| format!("cpu{number}")).collect();
    let pairs = names.iter().flat_map(|a| names.iter().map(move |b| [a.clone(), b.clone()]));
    let apart: Vec<_> = pairs.filter(|pair| pair[0] < pair[1] && !before.contains(pair)).collect();
    assert_eq!(apart.len(), 50, "{apart:?}");
    let [one, other] = &apart[7];
    let link = ["bench", "links", "many", "--from", one, "--to", other, "--rounds", "1"];
    let said = sandbox.run(&link);
    assert_eq!(said.code, 0, "{said}");
    eventually("it is told", Duration::from_secs(30), || {
        connected(&sandbox.state("many")).contains(&apart[7])
    });
    let state = sandbox.state("many");
    assert_eq!(connected(&state).len(), 141, "no other has been opened");
    // A successor reaches some again, and whoever needs it reaches it.
    let workers = state["workers"].as_array().expect("workers");
    let worker = workers.iter().find(|worker| worker["name"] == other.as_str()).expect("there");
    sandbox.kill(worker["pid"].as_u64().expect("alive"));
    let transpose = ["bench", "transpose", "many", "--chunks", "8", "--chunk-size", "64"];
    let said = sandbox.run(&[&transpose[..], &["--check", "--runs", "1"]].concat());
    assert_eq!(said.code, 0, "{said}");
    eventually("READY again", Duration::from_secs(40), || {
        sandbox.state("many")["state"] == "ready"
    });
    assert_eq!(sandbox.run(&link).code, 0);
    let said = sandbox.run(&["verify", "many", "--rounds", "1", "--within", "1s"]);
    assert_eq!(said.code, 0, "{said}");
    eventually("verify has connected all", Duration::from_secs(30), || {
        connected(&sandbox.state("many")).len() == 190
    });
    assert_eq!(sandbox.run(&["down", "many"]).code, 0);
    sandbox.assert_only_the_causes_are_left("many");
}

#[test]
fn messages_that_a_workers_memory_limit_has_no_room_for_are_not_measured() {
    let sandbox = Sandbox::new();
    let two = ["up", "--gpus", "none", "--cpu-workers", "2", "--memory-limit", "1GB"];
    let said = sandbox.run(&[&two[..], &["--name", "small", "--detach"]].concat());
    assert_eq!(said.code, 0, "{said}");
    let links = ["bench", "links", "small", "--rounds", "1", "--size"];
    let said = sandbox.run(&[&links[..], &["64KiB,1GiB"]].concat());
    assert_eq!(said.code, 0, "{said}");
    let why = "1.0 GiB cannot be measured there: a worker may have 953.7 MiB of host memory";
    assert!(said.stderr.contains(why) && !said.stdout.contains("GiB  "), "{said}");
    let said = sandbox.run(&[&links[..], &["1GiB"]].concat());
    assert!(said.code == 2 && said.stderr.contains(why), "{said}");
    assert_eq!(sandbox.run(&["down", "small"]).code, 0);
    sandbox.assert_nothing_is_left();
}

#[test]
fn who_has_just_restarted_or_scaled_verifies_those_who_are_wanted() {
    let sandbox = Sandbox::new();
    let said = up(&sandbox, &["--name", "changes"], &[]);
    assert_eq!(said.code, 0, "{said}");
    for _ in 0..10 {
        assert_eq!(sandbox.run(&["restart", "changes", "gpu1"]).code, 0);
        let said = sandbox.run(&["verify", "changes", "--rounds", "1"]);
        assert_eq!(said.code, 0, "{said}");
        assert!(said.stdout.starts_with("2 of 2 ok"), "{said}");
    }
    for _ in 0..5 {
        sandbox.kill(sandbox.state("changes")["scheduler"]["pid"].as_u64().expect("alive"));
        let said = sandbox.run(&["verify", "changes", "--rounds", "1"]);
        // It may have begun before the death was known.
        let told = said.code == 1 && said.stderr.contains("error: ");
        assert!(told || said.stdout.starts_with("2 of 2 ok"), "{said}");
        eventually("READY again", Duration::from_secs(40), || {
            sandbox.state("changes")["state"] == "ready"
        });
    }
    let itself = ["verify", "changes", "--from", "gpu0", "--to", "gpu0"];
    let said = sandbox.run(&itself);
    assert!(said.code == 2 && said.stderr.contains("gpu0 has no connection to itself"), "{said}");
    for (wrong, why) in [
        (&["verify", "changes", "--rounds", "0"][..], "it must be at least 1"),
        (&["verify", "changes", "--pin", "0,9999"], "this machine has no CPU 9999"),
        (&["bench", "tasks", "changes", "--count", "0"], "it must be at least 1"),
        (&["bench", "merge", "changes", "--runs", "0"], "it must be at least 1"),
    ] {
        let said = sandbox.run(wrong);
        assert!(said.code == 2 && said.stderr.contains(why), "{said}");
    }
    assert_eq!(sandbox.run(&["scale", "changes", "1"]).code, 0);
    let said = sandbox.run(&["verify", "changes"]);
    assert!(said.code == 0 && said.stdout.starts_with("nothing to verify: "), "{said}");
    assert_eq!(sandbox.run(&["scale", "changes", "2"]).code, 0);
    let said = sandbox.run(&["verify", "changes"]);
    assert!(said.code == 0 && said.stdout.starts_with("2 of 2 ok"), "{said}");
    assert_eq!(sandbox.run(&["down", "changes"]).code, 0);
}

#[test]
fn a_cluster_that_falls_back_to_tcp_is_taken_down_with_exit_code_4() {
    let sandbox = Sandbox::new();
    let said = up(&sandbox, &["--name", "slow", "--verify"], &[("UCX_TLS", "tcp,self")]);
    assert_eq!(said.code, 4, "{said}");
    let because = "downgraded: shared memory expected, tcp/lo used because UCX_TLS=tcp,self";
    assert!(said.stdout.contains(because), "{said}");
    assert!(said.stdout.starts_with("0 of 2 ok"), "{said}");
    assert!(!said.stderr.contains("READY:"), "{said}");
    sandbox.assert_nothing_is_left();
}

#[test]
fn pairs_for_which_the_time_does_not_suffice_are_told_and_their_lanes_judged() {
    let sandbox = Sandbox::new();
    let four = |name: &str, variables: &[(&str, &str)]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cuda-cluster"));
        command.args(["up", "--name", name, "--topology", "dgx-h100", "--simulate", "--detach"]);
        command.args(["--n-workers", "4"]).envs(variables.iter().copied());
        let said = sandbox.spawn_program(command).wait();
        assert_eq!(said.code, 0, "{said}");
    };
    let pairs = |said: &Said| -> Vec<Value> {
        let document: Value = serde_json::from_str(&said.stdout).expect("JSON");
        document["pairs"].as_array().expect("pairs").clone()
    };
    let figures = |pairs: &[Value]| pairs.iter().filter(|pair| !pair["gb_per_s"].is_null()).count();
    four("hasty", &[]);
    let said = sandbox.run(&["verify", "hasty", "--within", "1ms", "-o", "json"]);
    assert_eq!(said.code, 0, "{said}");
    let all = pairs(&said);
    assert_eq!((all.len(), figures(&all)), (12, 1), "{said}");
    assert!(all.iter().all(|pair| pair["lanes"].to_string().contains("cma/memory")), "{said}");
    assert!(said.stderr.contains("11 pairs have no figure, because 1ms were over"), "{said}");
    let strict = sandbox.run(&["verify", "hasty", "--within", "1ms", "--strict"]);
    assert_eq!(strict.code, 4, "a pair without a figure may be slow: {strict}");
    assert!(strict.stderr.contains("11 pairs have no figure"), "{strict}");
    // On a busy machine one may be slow; no figure is missing.
    let strict = sandbox.run(&["verify", "hasty", "--strict", "--rounds", "1", "-o", "json"]);
    assert_eq!((pairs(&strict).len(), figures(&pairs(&strict))), (12, 12), "{strict}");
    let whole = sandbox.run(&["verify", "hasty", "--all", "--rounds", "1", "-o", "json"]);
    assert_eq!((pairs(&whole).len(), figures(&pairs(&whole))), (12, 12), "{whole}");
    assert!(!whole.stderr.contains("no figure"), "{whole}");
    let links = ["bench", "links", "hasty", "--within", "1ms", "--size", "8", "-o", "json"];
    let links = sandbox.run(&links);
    assert_eq!((links.code, pairs(&links).len()), (0, 1), "{links}");
    assert!(links.stderr.contains("11 pairs have no figure"), "{links}");
    assert_eq!(sandbox.run(&["down", "hasty"]).code, 0);

    four("tcp", &[("UCX_TLS", "tcp,self")]);
    let said = sandbox.run(&["verify", "tcp", "--within", "1ms", "-o", "json"]);
    let downgraded =
        |pair: &Value| pair["verdict"].to_string().contains("downgraded: shared memory");
    let all = pairs(&said);
    assert_eq!((said.code, all.len(), figures(&all)), (4, 12, 1), "{said}");
    assert!(all.iter().all(downgraded), "{said}");
    assert_eq!(sandbox.run(&["down", "tcp"]).code, 0);
    sandbox.assert_nothing_is_left();
}

#[test]
fn a_cluster_that_nobody_verifies_any_more_goes() {
    let sandbox = Sandbox::new();
    let mut up =
        sandbox.spawn(&[&["up"], &TWO[..3], &["--detach", "--name", "mine", "--verify"]].concat());
    eventually("a cluster", Duration::from_secs(60), || sandbox.try_state("mine").is_some());
    up.signal(Signal::SIGKILL);
    up.wait();
    // If it became READY just before, it continues to run.
    let settled = |state: Value| matches!(state["state"].as_str(), Some("ready" | "stopped"));
    eventually("its end", Duration::from_secs(60), || {
        sandbox.try_state("mine").is_none_or(settled)
    });
    if sandbox.try_state("mine").is_some_and(|state| state["state"] == "ready") {
        assert_eq!(sandbox.run(&["down", "mine"]).code, 0);
    }
    sandbox.assert_nothing_is_left();
}

#[test]
fn links_are_measured_where_no_cluster_runs_and_nothing_is_left() {
    let sandbox = Sandbox::new();
    let said = sandbox.run(&["bench", "links", "--size", "8,64KiB", "-o", "svg"]);
    assert_eq!(said.code, 0, "{said}");
    let picture = roxmltree::Document::parse(&said.stdout).expect("XML");
    assert_eq!(picture.root_element().tag_name().name(), "svg");
    sandbox.assert_nothing_is_left();
}

#[test]
fn a_libucp_that_is_not_there_is_refused_before_anything_is_started() {
    let sandbox = Sandbox::new();
    let folder = tempfile::tempdir().expect("a directory");
    let empty = folder.path().display().to_string();
    let file = std::env::current_exe().expect("a program").with_extension("d");
    for (path, why) in [
        ("/nowhere/libucp.so.0", "No such file"),
        (&empty, "neither libucp.so.0 nor lib/libucp.so.0"),
        (&format!("{empty}/libucp.so.0"), "No such file"),
        (&file.display().to_string(), "is no libucp"),
    ] {
        for engine in ["native", "dask"] {
            let flags = ["--engine", engine, "--enable-tcp-over-ucx", "--ucx", path];
            let said = up(&sandbox, &flags, &[]);
            assert_eq!(said.code, 2, "{said}");
            assert!(said.stderr.contains(path) && said.stderr.contains(why), "{said}");
            assert!(said.stderr.contains("hint: check the path"), "{said}");
        }
    }
    let said = up(&sandbox, &["--name", "none"], &[("CUDA_CLUSTER_UCX", "/nowhere")]);
    assert_eq!(said.code, 2, "{said}");
    assert!(said.stderr.contains("\"/nowhere\""), "{said}");
    let alone = ["--gpus", "none", "--cpu-workers", "1", "--ucx", "/nowhere", "--", "true"];
    let said = sandbox.run(&[&["run"][..], &alone].concat());
    assert_eq!(said.code, 2, "{said}");
    assert!(said.stderr.contains("\"/nowhere\""), "{said}");
    sandbox.assert_nothing_is_left();
}

#[test]
fn the_libucp_of_another_machine_need_not_be_here_to_plan_for_it() {
    let sandbox = Sandbox::new();
    let there = ["--topology", "dgx-h100", "--ucx", "/there/lib"];
    for command in [&["plan"][..], &["up", "--dry-run"]] {
        let said = sandbox.run(&[command, &there].concat());
        assert_eq!(said.code, 0, "{said}");
        assert!(said.stdout.contains("/there/lib"), "{said}");
    }
    let here = ["plan", "--gpus", "none", "--cpu-workers", "1", "--ucx", "/nowhere"];
    let said = sandbox.run(&here);
    assert_eq!(said.code, 2, "what is planned here must be here: {said}");
    assert!(said.stderr.contains("/nowhere"), "{said}");
}
