//! The connections of a running cluster: `verify`, `bench links`, and the lanes in `ps`.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::Value;

use super::fake_machine::FakeMachine;
use super::proof::PLAIN;
use super::python::{self, has_direct};
use super::{down, packages, run_directory, try_up, try_up_direct, up, worker};
use crate::sandbox::{Said, Sandbox, eventually};

const TWO: [&str; 2] = ["--n-workers", "2"];

/// Waits until each worker of a cluster shows lanes to all others, and returns those of `gpu0`.
fn shown_lanes(sandbox: &Sandbox, name: &str) -> Vec<String> {
    let peers = |worker: &Value| worker["peers"].as_array().map_or(0, Vec::len);
    eventually("the lanes of all pairs", Duration::from_secs(60), || {
        let state = sandbox.state(name);
        let workers = state["workers"].as_array().expect("workers");
        workers.iter().all(|worker| peers(worker) == workers.len() - 1)
    });
    let lanes = worker(&sandbox.state(name), "gpu0")["peers"][0]["lanes"].clone();
    serde_json::from_value(lanes).expect("texts")
}

/// A preload whose workers answer those that ask for bytes by an expression, in which `answer` is
/// the true answer.
fn preload(folder: &Path, expression: &str) -> String {
    let path = folder.join("otherwise.py");
    let program = format!(
        "import os, signal\n\
         def dask_setup(worker):\n    \
             true = worker.handlers['cuda_cluster_bytes']\n    \
             def otherwise(**asked):\n        \
                 answer = true(**asked)\n        \
                 {expression}\n        \
                 return answer\n    \
             if os.environ['CUDA_CLUSTER_PROCESS'] == 'gpu1':\n        \
                 worker.handlers['cuda_cluster_bytes'] = otherwise\n"
    );
    std::fs::write(&path, program).expect("written");
    path.display().to_string()
}

/// Verifies a cluster whose connections are as they should be; all pairs use one of `lanes`.
fn is_verified(sandbox: &Sandbox, name: &str, lanes: &[&str]) {
    let said = sandbox.run(&["verify", name, "-o", "json"]);
    assert_eq!(said.code, 0, "{said}");
    let document: Value = serde_json::from_str(&said.stdout).expect("JSON");
    let pairs = document["pairs"].as_array().expect("pairs");
    assert_eq!(pairs.len(), 2, "{said}");
    for pair in pairs {
        assert_eq!((&pair["size_bytes"], &pair["memory"]), (&(16 << 20).into(), &"host".into()));
        assert!(pair["gb_per_s"].as_f64().is_some_and(|figure| figure > 0.0), "{pair}");
        assert!(pair["latency_us"].as_f64().is_some_and(|figure| figure > 0.0), "{pair}");
        let used = pair["lanes"].as_array().expect("lanes");
        let expected = used.iter().any(|lane| lanes.iter().any(|one| lane == one));
        assert!(expected, "{pair}");
    }
}

#[test]
fn a_running_cluster_is_verified_over_each_protocol() {
    if !packages() {
        return;
    }
    for (protocol, lanes) in
        [("tcp", &["tcp"][..]), ("ucxx", &["posix/memory", "cma/memory", "sysv/memory"])]
    {
        let sandbox = Sandbox::new();
        up(&sandbox, "links", &[&TWO[..], &["--protocol", protocol]].concat());
        is_verified(&sandbox, "links", lanes);
        assert!(lanes.contains(&shown_lanes(&sandbox, "links")[0].as_str()));
        let said = sandbox.run(&["verify", "links"]);
        assert!(said.stdout.starts_with("2 of 2 ok: host memory "), "{said}");
        let said = sandbox.run(&["bench", "links", "links", "--size", "8,1MiB", "-o", "table"]);
        assert_eq!((said.code, said.stdout.lines().count()), (0, 5), "{said}");
        let said = sandbox.run(&["verify", "links", "--pin", "0,1"]);
        assert_eq!(said.code, 2, "{said}");
        assert!(said.stderr.contains("--pin") && said.stderr.contains("hint: "), "{said}");
        down(&sandbox, "links");
    }
}

#[test]
fn over_direct_the_ways_that_carry_the_bytes_are_shown() {
    if !has_direct() {
        return;
    }
    let sandbox = Sandbox::new();
    let said = try_up_direct(&sandbox, "ours", &TWO, &[]);
    assert_eq!(said.code, 0, "{said}");
    is_verified(&sandbox, "ours", &["direct/copy", "direct/mapped"]);
    let said = sandbox.run(&["bench", "links", "ours", "--size", "8", "-o", "json"]);
    assert!(said.stdout.contains("direct/unix"), "small messages are on the socket: {said}");
    assert!(!said.stdout.contains("downgraded"), "as they should be: {said}");
    let wide = sandbox.run(&["ps", "ours", "-o", "wide"]).stdout;
    assert!(wide.contains("direct/copy"), "{wide}");
    down(&sandbox, "ours");
}

#[test]
fn a_downgrade_of_a_running_cluster_is_exit_code_4_and_has_its_cause() {
    if !packages() {
        return;
    }
    let sandbox = Sandbox::new();
    let folder = tempfile::tempdir().expect("a directory");
    let spec = folder.path().join("spec.yaml").display().to_string();
    std::fs::write(&spec, format!("version: 1\nucx: {{env: {PLAIN}}}\n")).expect("written");
    up(&sandbox, "plain", &[&TWO[..], &["--protocol", "ucxx", "-f", &spec]].concat());
    let said = sandbox.run(&["verify", "plain"]);
    assert_eq!(said.code, 4, "{said}");
    assert!(said.stdout.starts_with("0 of 2 ok"), "{said}");
    assert!(said.stdout.contains("downgraded: shared memory expected, tcp/"), "{said}");
    assert!(said.stdout.contains("because UCX_POSIX_ERROR_HANDLING=n"), "{said}");
    down(&sandbox, "plain");
    if !has_direct() {
        return;
    }
    let env = [("DASK_DISTRIBUTED__COMM__DIRECT__ROUTE", "socket")];
    let said = try_up_direct(&sandbox, "socket", &TWO, &env);
    assert_eq!(said.code, 0, "{said}");
    let said = sandbox.run(&["verify", "socket"]);
    assert_eq!(said.code, 4, "{said}");
    let because = "downgraded: shared memory expected, direct/unix used because \
                   distributed.comm.direct.route is socket";
    assert!(said.stdout.contains(because), "{said}");
    down(&sandbox, "socket");
    let said = try_up_direct(&sandbox, "proof", &[&TWO[..], &["--verify"]].concat(), &env);
    assert_eq!(said.code, 1, "{said}");
    assert!(said.stderr.contains("comes over direct/unix; expected was shared memory"), "{said}");
    sandbox.assert_only_the_causes_are_left("proof");
}

#[test]
fn bytes_that_arrive_changed_are_noticed() {
    if !packages() {
        return;
    }
    let sandbox = Sandbox::new();
    let folder = tempfile::tempdir().expect("a directory");
    let preload = preload(folder.path(), "answer['data'].data[-1] ^= 1");
    let flags = [&TWO[..], &["--preload", &preload]].concat();
    up(&sandbox, "changed", &flags);
    let said = sandbox.run(&["verify", "changed"]);
    assert_eq!(said.code, 4, "{said}");
    assert!(said.stdout.starts_with("1 of 2 ok"), "{said}");
    let (from, to) = (15 << 20, 16 << 20);
    let why =
        format!("failed: gpu0: data from gpu1 arrives changed, between bytes {from} and {to}");
    assert!(said.stdout.contains(&why), "{said}");
    down(&sandbox, "changed");
    let said = try_up(&sandbox, "proof", &[&flags[..], &["--verify"]].concat());
    assert_eq!(said.code, 1, "{said}");
    assert!(said.stderr.contains("data from gpu1 arrives changed"), "{said}");
    sandbox.assert_only_the_causes_are_left("proof");
}

#[test]
fn a_worker_that_is_stopped_or_dies_while_it_is_measured_is_named() {
    if !packages() {
        return;
    }
    let sandbox = Sandbox::new();
    let folder = tempfile::tempdir().expect("a directory");
    let deadly = "asked['size'] >= 1 << 20 and os.kill(os.getpid(), signal.SIGKILL)";
    let preload = preload(folder.path(), deadly);
    up(&sandbox, "mortal", &[&TWO[..], &["--preload", &preload]].concat());
    let pid = worker(&sandbox.state("mortal"), "gpu1")["pid"].as_u64().expect("a pid");
    sandbox.signal(pid, Signal::SIGSTOP);
    let said = sandbox.run(&["verify", "mortal"]);
    sandbox.signal(pid, Signal::SIGCONT);
    assert_eq!(said.code, 1, "{said}");
    assert!(said.stderr.contains("gpu1 is not answering since"), "{said}");
    assert!(said.stderr.contains("hint: let it go on"), "{said}");
    eventually("READY again", Duration::from_secs(60), || {
        sandbox.state("mortal")["state"] == "ready"
    });
    let said = sandbox.run(&["verify", "mortal", "--from", "gpu1"]);
    assert_eq!(said.code, 4, "{said}");
    assert!(said.stdout.starts_with("0 of 1 ok"), "{said}");
    let dead = ["no data from gpu1: ", "gpu1 is "].into_iter().any(|why| said.stdout.contains(why));
    assert!(dead, "{said}");
    assert_eq!(sandbox.run(&["down", "mortal"]).code, 0);
    sandbox.assert_only_the_causes_are_left("mortal");
}

#[test]
fn the_lanes_of_pairs_that_work_together_are_shown_without_a_proof() {
    if !packages() {
        return;
    }
    let sandbox = Sandbox::new();
    let cluster = up(&sandbox, "works", &TWO);
    assert!(worker(&sandbox.state("works"), "gpu0")["peers"].as_array().is_some_and(Vec::is_empty));
    cluster.tell("work");
    assert_eq!(shown_lanes(&sandbox, "works"), ["tcp"]);
    let state = sandbox.state("works");
    assert_eq!(worker(&state, "gpu0")["peers"][0]["peer"], "gpu1");
    down(&sandbox, "works");
}

/// Starts two workers on GPUs that a stand-in for the driver has; returns what runs further commands.
fn on_gpus<'a>(
    sandbox: &'a Sandbox,
    fake: &'a FakeMachine,
    flags: &[&str],
    path: &'a str,
) -> impl Fn(&[&str]) -> Said + 'a {
    let run = move |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cuda-cluster"));
        command.args(arguments).env("PYTHONPATH", path).envs(
            // Which UCX is for Python to say.
            fake.environment().into_iter().filter(|(name, _)| *name != "CUDA_CLUSTER_UCX"),
        );
        sandbox.spawn_program(command).wait()
    };
    let python = python::path().display().to_string();
    let up = ["up", "--engine", "dask", "--name", "gpus", "--detach", "--ready-within", "10m"];
    let said = run(&[&up[..], &["--python", &python], flags].concat());
    assert_eq!(said.code, 0, "{said}");
    run
}

fn two_gpus(folder: &Path) -> FakeMachine {
    let machine = cuda_cluster::topology::builtin("rtx-4090-2").expect("built in");
    let machine = cuda_cluster::topology::parse(machine).expect("a machine");
    let fake = FakeMachine::write(&machine, folder).expect("written");
    fake.with_driver("").expect("written")
}

#[test]
fn device_memory_that_this_python_cannot_have_is_noted_and_never_ok() {
    if !packages() {
        return;
    }
    let (sandbox, folder) = (Sandbox::new(), tempfile::tempdir().expect("a directory"));
    let fake = two_gpus(folder.path());
    let run = on_gpus(&sandbox, &fake, &["--protocol", "tcp"], "");
    let said = run(&["verify", "gpus"]);
    assert_eq!(said.code, 0, "{said}");
    assert!(said.stdout.starts_with("2 of 2 ok: host memory "), "{said}");
    assert!(said.stderr.contains("note: device memory was not measured: gpu1: "), "{said}");
    let said = run(&["verify", "gpus", "--memory", "device"]);
    assert_eq!(said.code, 4, "{said}");
    assert!(said.stdout.starts_with("0 of 2 ok"), "{said}");
    assert!(said.stdout.contains("failed: gpu1: ") && said.stdout.contains("rmm"), "{said}");
    down(&sandbox, "gpus");
}

#[test]
fn device_memory_is_measured_over_the_lanes_that_carry_it() {
    if !has_direct() {
        return;
    }
    let (sandbox, folder) = (Sandbox::new(), tempfile::tempdir().expect("a directory"));
    let fake = two_gpus(folder.path());
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python");
    let (package, stand_in) = (python::package(), tests.join("stand_in"));
    let path = format!("{}:{}:{}", package.display(), stand_in.display(), tests.display());
    let run = on_gpus(&sandbox, &fake, &["--protocol", "direct"], &path);
    let said = run(&["verify", "gpus", "-o", "json"]);
    let document: Value = serde_json::from_str(&said.stdout).expect("JSON");
    let of = |memory: &str| -> Vec<Value> {
        let pairs = document["pairs"].as_array().expect("pairs").iter();
        pairs.filter(|pair| pair["memory"] == memory).cloned().collect()
    };
    assert_eq!((of("host").len(), of("device").len()), (2, 2), "{said}");
    for pair in of("device") {
        assert_eq!(pair["expected"], "cuda_ipc", "{pair}");
        assert!(pair["lanes"].to_string().contains("cuda_ipc/cuda"), "{pair}");
        assert!(!pair["verdict"].as_str().expect("a text").contains("downgraded"), "{pair}");
    }
    down(&sandbox, "gpus");
}

#[test]
fn workers_that_joined_a_scheduler_elsewhere_are_measured_without_the_others() {
    if !packages() {
        return;
    }
    let sandbox = Sandbox::new();
    up(&sandbox, "home", &["--n-workers", "1"]);
    let file = run_directory(&sandbox, "home").join("scheduler.json").display().to_string();
    let said = try_up(&sandbox, "guests", &["--gpus", "0-1", "--join", &file]);
    assert_eq!(said.code, 0, "{said}");
    is_verified(&sandbox, "guests", &["tcp"]);
    assert_eq!(shown_lanes(&sandbox, "guests"), ["tcp"]);
    assert_eq!(sandbox.run(&["down", "guests"]).code, 0);
    down(&sandbox, "home");
}
