//! A cluster that belongs to a program.

use std::process::Command;
use std::time::Duration;

use nix::sys::signal::Signal;

use crate::sandbox::{Sandbox, eventually};

/// The example program, which Cargo builds beside the tests.
fn example() -> Command {
    let program = std::path::Path::new(env!("CARGO_BIN_EXE_cuda-cluster"));
    Command::new(program.with_file_name("examples").join("embedded"))
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
