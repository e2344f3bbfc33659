//! `run` and `exec`: any program, one rank per GPU.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::sandbox::{Sandbox, eventually};

const LONG: Duration = Duration::from_secs(60);

const MACHINE: [&str; 5] = ["--topology", "dgx-1-v100", "--simulate", "--n-workers", "3"];

fn run(sandbox: &Sandbox, flags: &[&str], script: &str) -> crate::sandbox::Said {
    sandbox.run(&[&["run"], &MACHINE[..], flags, &["--", "sh", "-c", script]].concat())
}

#[test]
fn every_rank_is_told_its_place_and_its_output_is_passed_on() {
    let sandbox = Sandbox::new();
    let script = "echo $RANK/$LOCAL_RANK of $WORLD_SIZE/$LOCAL_WORLD_SIZE at $MASTER_ADDR; \
                  test \"$MASTER_PORT\" -gt 0 && echo a port";
    let said = run(&sandbox, &["--prefix"], script);
    assert_eq!(said.code, 0, "{said}");
    let mut lines: Vec<&str> = said.stdout.lines().collect();
    lines.sort_unstable();
    // The best-connected three of a DGX-1 are not 0, 1, 2.
    let names = ["gpu0", "gpu2", "gpu3"];
    let mut wanted: Vec<String> = names
        .iter()
        .enumerate()
        .map(|(rank, name)| format!("[{name}] {rank}/{rank} of 3/3 at 127.0.0.1"))
        .chain(names.iter().map(|name| format!("[{name}] a port")))
        .collect();
    wanted.sort_unstable();
    assert_eq!(lines, wanted, "{said}");
    sandbox.assert_nothing_is_left();
}

#[test]
fn the_first_failed_rank_stops_the_others_and_names_the_cause() {
    let sandbox = Sandbox::new();
    let said = run(&sandbox, &[], "if [ $RANK = 1 ]; then echo oh no; exit 7; fi; exec sleep 100");
    assert_eq!(said.code, 7, "{said}");
    assert!(said.stdout.contains("oh no"), "{said}");
    assert!(said.stderr.contains("rank 1: gpu2 ended with status 7"), "{said}");
    assert!(said.stderr.contains("/crashes"), "{said}");
}

#[test]
fn the_ways_between_the_devices_are_verified_before_ranks_start() {
    let sandbox = Sandbox::new();
    let said = run(&sandbox, &["--verify"], "echo rank $RANK");
    assert_eq!(said.code, 0, "{said}");
    assert_eq!(said.stdout.matches("rank ").count(), 3, "{said}");
    assert!(said.stderr.contains("verified: 6 ways use the lanes that they should"), "{said}");
    assert!(!said.stderr.contains("ignored"), "{said}");
    sandbox.assert_nothing_is_left();
}

#[test]
fn no_rank_starts_after_a_verification_that_failed() {
    let sandbox = Sandbox::new();
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuda-cluster"));
    let verified = [&["run"], &MACHINE[..], &["--verify", "--", "sh", "-c", "echo rank $RANK"]];
    command.args(verified.concat()).env("UCX_TLS", "tcp");
    let said = sandbox.spawn_program(command).wait();
    assert_eq!(said.code, 4, "{said}");
    assert_eq!(said.stdout, "", "{said}");
    assert!(said.stderr.contains("downgraded") && !said.stderr.contains("[1m"), "{said}");
    assert!(said.stderr.contains("so the program is not started"), "{said}");
    // One process alone has no pairs.
    let exec = [&["exec"], &MACHINE[..], &["--verify", "--rank", "0", "--", "true"]].concat();
    let said = sandbox.run(&exec);
    assert_eq!(said.code, 2, "{said}");
    assert!(said.stderr.contains("no pair can be verified"), "{said}");
    sandbox.assert_nothing_is_left();
}

#[test]
fn a_run_that_is_not_ready_in_time_says_so_by_its_exit_code() {
    let sandbox = Sandbox::new();
    let said = run(&sandbox, &["--name", "late", "--ready-within", "0"], "sleep 600");
    assert_eq!(said.code, 3, "{said}");
    assert!(said.stderr.contains("run: not ready within 0s: "), "{said}");
    sandbox.assert_no_shared_memory_is_left();
}

#[test]
fn a_run_that_another_command_or_a_signal_to_its_supervisor_ends_has_failed() {
    for by_command in [true, false] {
        let sandbox = Sandbox::new();
        let mut command = Command::new(env!("CARGO_BIN_EXE_cuda-cluster"));
        command.arg("run").args(MACHINE).args(["--name", "cut", "--", "sleep", "600"]);
        let running = sandbox.spawn_program(command);
        let ready = |state: &serde_json::Value| state["state"] == "ready";
        eventually("READY", LONG, || sandbox.try_state("cut").is_some_and(|state| ready(&state)));
        if by_command {
            assert_eq!(sandbox.run(&["down", "cut"]).code, 0);
        } else {
            let pid = sandbox.state("cut")["supervisor_pid"].as_i64().expect("a pid");
            let pid = Pid::from_raw(i32::try_from(pid).expect("a pid"));
            kill(pid, Signal::SIGTERM).expect("it lives");
        }
        let said = running.wait();
        assert_eq!(said.code, 1, "{said}");
        assert!(said.stderr.contains("ended from outside before its ranks had finished"), "{said}");
        sandbox.assert_nothing_is_left();
    }
}

#[test]
fn a_rank_ended_by_a_signal_gives_the_run_its_number() {
    let sandbox = Sandbox::new();
    let said = run(&sandbox, &[], "if [ $RANK = 0 ]; then kill -SEGV $$; fi; exec sleep 100");
    assert_eq!(said.code, 128 + 11, "{said}");
    assert!(said.stderr.contains("SIGSEGV"), "{said}");
}

#[test]
fn a_program_that_is_not_there_is_said_so() {
    let sandbox = Sandbox::new();
    let said = sandbox.run(&[&["run"], &MACHINE[..], &["--", "no-such-program"]].concat());
    assert_eq!(said.code, 127, "{said}");
    assert!(said.stderr.contains("cannot execute no-such-program"), "{said}");
}

#[test]
fn a_spec_has_the_program_beside_it_and_the_command_line_may_name_another() {
    let sandbox = Sandbox::new();
    let folder = tempfile::tempdir().expect("a directory");
    let written = |name: &str, mode: u32, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).expect("written");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).expect("its mode");
        path.display().to_string()
    };
    let spec = "version: 1\ntopology: dgx-1-v100\nsimulate: true\nworkers: 2\nengine: command\n";
    let job = written("job.yaml", 0o600, &format!("{spec}command: {{argv: [./job.sh, 010]}}\n"));
    let none = written("none.yaml", 0o600, spec);
    let check = || sandbox.run(&["spec", "check", &job]);
    assert!(check().stdout.contains("job.sh cannot be run"), "{}", check());
    written("job.sh", 0o700, "#!/bin/sh\necho job $1 of rank ${RANK:-none}\n");
    assert!(!check().stdout.contains("cannot be run"), "{}", check());

    let said = sandbox.run(&["run", "-f", &job]);
    assert_eq!(said.code, 0, "{said}");
    let mut lines: Vec<&str> = said.stdout.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["job 010 of rank 0", "job 010 of rank 1"], "{said}");
    let said = sandbox.run(&["run", "-f", &job, "--", "echo", "another"]);
    assert_eq!((said.code, said.stdout.as_str()), (0, "another\nanother\n"), "{said}");
    let said = sandbox.run(&["exec", "-f", &job, "--rank", "0"]);
    assert!(said.code == 0 && said.stdout.starts_with("job 010"), "{said}");
    for subcommand in ["run", "exec"] {
        let said = sandbox.run(&[subcommand, "-f", &none]);
        assert_eq!(said.code, 2, "{said}");
        assert!(said.stderr.contains("there is no program to run"), "{said}");
        assert!(said.stderr.contains("command.argv"), "{said}");
    }
    sandbox.assert_nothing_is_left();
}

#[test]
fn exec_binds_this_process_by_its_local_rank() {
    let sandbox = Sandbox::new();
    let become_sh = |rank: &[&str], script: &str| {
        sandbox.run(&[&["exec"], &MACHINE[..], rank, &["--", "sh", "-c", script]].concat())
    };
    let said = become_sh(&["--rank", "1"], "grep Cpus_allowed_list /proc/self/status; exit 5");
    assert_eq!(said.code, 5, "{said}");
    assert!(said.stdout.starts_with("Cpus_allowed_list:"), "{said}");
    let lost = become_sh(&[], "true");
    assert_eq!(lost.code, 2, "{lost}");
    assert!(lost.stderr.contains("SLURM_LOCALID"), "{lost}");
    let beyond = become_sh(&["--rank", "3"], "true");
    assert_eq!(beyond.code, 2, "{beyond}");
    assert!(beyond.stderr.contains("the plan has 3"), "{beyond}");
}

#[test]
fn a_process_of_somebody_elses_pool_is_bound_by_the_gpu_that_it_sees() {
    let sandbox = Sandbox::new();
    let tell = "echo $CUDA_VISIBLE_DEVICES/$UCX_TLS; grep Cpus_allowed_list /proc/self/status";
    let exec = |gpu: &str, variables: &[(&str, &str)]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cuda-cluster"));
        let machine = ["--topology", "dgx-1-v100", "--simulate"];
        command.args([&["exec"], &machine[..], &["--gpu", gpu, "--", "sh", "-c", tell]].concat());
        // What the sandbox takes away is given by a shell.
        let given = variables.iter().map(|(name, value)| format!("{name}={value}"));
        let mut shell = Command::new("env");
        shell.args(given).arg(command.get_program()).args(command.get_args());
        sandbox.spawn_program(shell).wait()
    };
    // Of a DGX-1, GPUs 4 to 7 get CPUs of another machine than this one: a CPU in turn.
    for (variables, seen) in [
        (&[("CUDA_VISIBLE_DEVICES", "5")][..], "5/"),
        (&[("CUDA_VISIBLE_DEVICES", "6,5"), ("LOCAL_RANK", "1")], "6,5/"),
        (&[("LOCAL_RANK", "5")], "0,1,2,3,4,5,6,7/"),
    ] {
        let said = exec("auto", variables);
        assert_eq!(said.code, 0, "{said}");
        assert!(said.stdout.starts_with(seen), "{variables:?}: {said}");
    }
    let machine = sandbox.run(&["topo", "--topology", "dgx-1-v100", "-o", "json"]);
    let machine: serde_json::Value = serde_json::from_str(&machine.stdout).expect("JSON");
    let uuid = machine["gpus"][5]["uuid"].as_str().expect("a UUID");
    let named = exec(uuid, &[]);
    assert!(named.stdout.starts_with("5,6,7,0,1,2,3,4/"), "its own is device 0: {named}");
    let named = exec("5", &[]);
    assert!(named.stdout.starts_with("5,6,7,0,1,2,3,4/"), "its own is device 0: {named}");
    for (gpu, variables, why) in [
        ("auto", &[("CUDA_VISIBLE_DEVICES", "6,5")][..], "no launcher says a rank"),
        ("auto", &[("CUDA_VISIBLE_DEVICES", "6,5"), ("LOCAL_RANK", "2")], "the local rank is 2"),
        ("auto", &[("CUDA_VISIBLE_DEVICES", "GPU-none")], "no worker for the GPU \"GPU-none\""),
        ("auto", &[], "no variable tells this process its rank"),
        ("8", &[], "the plan has 8"),
    ] {
        let said = exec(gpu, variables);
        assert_eq!((said.code, said.stdout.as_str()), (2, ""), "{said}");
        assert!(said.stderr.contains(why), "{variables:?}: {said}");
    }
    sandbox.assert_nothing_is_left();
}
