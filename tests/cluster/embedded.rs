//! A cluster inside a program.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use cuda_cluster::cluster::Client;
use nix::sys::signal::Signal;
use nix::unistd::Pid;

use crate::packages::{packages, python};
use crate::sandbox::{Sandbox, eventually};

/// An example program, which Cargo builds beside the tests.
fn path_of(example: &str) -> PathBuf {
    let program = Path::new(env!("CARGO_BIN_EXE_cuda-cluster"));
    program.with_file_name("examples").join(example)
}

fn example() -> Command {
    Command::new(path_of("embedded"))
}

/// `cuda-cluster up` starts workers that have the functions of another program.
#[test]
fn workers_of_a_program_named_in_the_spec_run_its_functions() {
    let sandbox = Sandbox::new();
    let folder = tempfile::tempdir().expect("a directory");
    symlink(path_of("data_job"), folder.path().join("worker")).expect("a link");
    let file = folder.path().join("cluster.yaml");
    let spec = |program: &str| {
        let text = format!("version: 1\nname: own\nnative: {{program: {program}}}\n");
        std::fs::write(&file, text).expect("written");
        let machine = ["--topology", "dgx-1-v100", "--simulate", "--n-workers", "2"];
        let file = file.to_str().expect("text");
        sandbox.run(&[&["up", "-f", file, "--detach"], &machine[..]].concat())
    };
    let missing = spec("./no-worker");
    assert_eq!(missing.code, 2, "{missing}");
    assert!(missing.stderr.contains("native.program"), "{missing}");
    // It is below the file's directory, whatever the current directory is.
    let up = spec("./worker");
    assert_eq!(up.code, 0, "{up}");
    let client = Client::connect(&sandbox.base().join("own")).expect("the scheduler answers");
    let numbers = client.submit("range", &(0u32, 4usize), &[]).expect("submitted");
    let scaled = client.submit("scale", &2.0f32, &[&numbers]).expect("submitted");
    assert_eq!(scaled.numbers::<f32>().expect("computed"), [0.0, 2.0, 4.0, 6.0]);
    assert_eq!(sandbox.run(&["down", "own"]).code, 0);
    sandbox.assert_nothing_is_left();
}

#[test]
fn a_program_launches_a_cluster_as_itself_and_takes_it_down() {
    let sandbox = Sandbox::new();
    let said = sandbox.spawn_program(example()).wait();
    assert_eq!(said.code, 0, "{said}");
    assert_eq!(said.stdout.lines().count(), 4, "{said}");
    for line in said.stdout.lines() {
        assert!(line.contains("READY with 3 peers"), "{said}");
    }
    sandbox.assert_nothing_is_left();
}

#[test]
fn a_program_that_is_not_a_supervisor_is_refused_with_what_to_do() {
    let sandbox = Sandbox::new();
    let forgetful = |program: Option<&str>| {
        let mut command = Command::new(path_of("forgetful"));
        command.args(program);
        sandbox.spawn_program(command).wait()
    };
    for (program, did) in [
        (None, "forgetful did not become a supervisor: it wrote \"a line before the launch\""),
        (Some("/bin/true"), "/bin/true did not become a supervisor: it ended without a report"),
        (Some("/bin/false"), "/bin/false did not become a supervisor: it ended without a report"),
        (Some("/bin/echo"), "/bin/echo did not become a supervisor: it wrote \"__supervise\""),
        (Some("/no/such/program"), "cannot start a supervisor process from /no/such/program"),
    ] {
        let said = forgetful(program);
        assert_eq!(said.code, 2, "{said}");
        assert!(said.stderr.contains(did), "{said}");
        assert!(program.is_some() || said.stderr.contains("cluster::dispatch()"), "{said}");
    }
    sandbox.assert_nothing_is_left();
}

#[test]
fn a_cluster_ends_when_its_owner_is_killed() {
    let sandbox = Sandbox::new();
    let mut command = example();
    command.arg("--stay");
    let mut owner = sandbox.spawn_program(command);
    eventually("READY", Duration::from_secs(30), || {
        let said = sandbox.run(&["ps", "-o", "json"]);
        said.code == 0 && said.stdout.contains("\"state\": \"ready\"")
    });
    owner.signal(Signal::SIGKILL);
    assert_eq!(owner.wait().code, -9);
    sandbox.assert_nothing_is_left();
}

#[test]
fn a_cluster_ends_with_its_owner_though_a_child_of_that_holds_its_descriptors() {
    let sandbox = Sandbox::new();
    let mut command = Command::new(path_of("embedder"));
    command.arg("forked");
    let said = sandbox.spawn_program(command).wait();
    assert_eq!(said.code, 0, "{said}");
    let child = Pid::from_raw(said.stdout.trim().parse().expect("a process id"));
    eventually("the cluster ends", Duration::from_secs(60), || {
        !sandbox.base().join("forked").exists()
    });
    nix::sys::signal::kill(child, Signal::SIGKILL).expect("it is there still");
    sandbox.assert_nothing_is_left();
}

/// Runs the test program `embedder`, which checks what it is told, to its end.
fn embed(sandbox: &Sandbox, way: &str) {
    let mut command = Command::new(path_of("embedder"));
    command.arg(way);
    let said = sandbox.spawn_program(command).wait();
    assert_eq!((said.code, said.stdout.as_str()), (0, "done\n"), "{said}");
}

/// One test of a way of embedding, which leaves nothing.
macro_rules! embedding {
    ($($name:ident: $way:literal)*) => {
        $(#[test]
        fn $name() {
            let sandbox = Sandbox::new();
            embed(&sandbox, $way);
            sandbox.assert_nothing_is_left();
        })*
    };
}

embedding! {
    blocking_calls_work_without_an_event_loop: "blocking"
    blocking_calls_work_inside_an_event_loop: "blocking-in-tokio"
    a_name_is_free_at_once_after_stop_and_after_drop: "again"
    a_name_that_is_taken_is_a_refusal_of_its_own_type: "taken"
    an_owner_learns_that_another_handle_has_stopped_its_cluster: "stopped"
    an_owner_ends_a_cluster_whose_supervisor_is_stopped: "silent"
    a_handle_leaves_a_later_cluster_of_its_name_alone: "later"
    a_start_that_fails_leaves_no_directory_and_a_wrong_key_is_named: "not-ready"
    a_stored_plan_is_launched_and_cannot_be_changed: "stored"
    a_spec_is_laid_over_what_was_asked_before_and_names_its_machine: "topology"
    a_program_is_told_why_its_cluster_is_not_verified: "unverified"
    a_program_is_given_a_verified_cluster_with_its_figures: "verified"
    a_program_is_run_on_each_gpu_to_its_end: "run"
    a_program_with_an_event_loop_waits_for_tasks_and_frees_workers: "client"
}

#[test]
fn a_program_measures_a_cluster_of_any_engine_that_answers() {
    if !packages() {
        return;
    }
    let sandbox = Sandbox::new();
    let mut command = Command::new(path_of("embedder"));
    command.arg("dask").arg(python());
    let said = sandbox.spawn_program(command).wait();
    assert_eq!((said.code, said.stdout.as_str()), (0, "done\n"), "{said}");
    sandbox.assert_nothing_is_left();
}

#[test]
fn the_end_of_a_cluster_is_told_with_its_cause_even_if_its_supervisor_was_killed() {
    let sandbox = Sandbox::new();
    embed(&sandbox, "killed");
    sandbox.assert_no_shared_memory_is_left();
    eventually("nothing lives", Duration::from_secs(60), || sandbox.pids().is_empty());
}

#[test]
fn a_detached_cluster_outlives_the_program_that_launched_it() {
    let sandbox = Sandbox::new();
    embed(&sandbox, "detached");
    assert_eq!(sandbox.state("free")["state"], "ready");
    assert_eq!(sandbox.run(&["down", "free"]).code, 0);
    sandbox.assert_nothing_is_left();
}

#[test]
fn a_program_that_is_killed_while_it_launches_leaves_nothing() {
    let sandbox = Sandbox::new();
    for file in ["", "plan.json", "control.sock", "scheduler.sock"] {
        let mut command = example();
        command.arg("--stay");
        let mut owner = sandbox.spawn_program(command);
        eventually("the launch has come so far", Duration::from_secs(30), || {
            let clusters = std::fs::read_dir(sandbox.base()).into_iter().flatten().flatten();
            clusters.into_iter().any(|cluster| cluster.path().join(file).exists())
        });
        owner.signal(Signal::SIGKILL);
        assert_eq!(owner.wait().code, -9);
        sandbox.assert_nothing_is_left();
    }
}
