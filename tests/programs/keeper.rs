//! A program with an embedded supervisor: keeps one cluster in the foreground, for the tests.
//!
//! `keeper BASE LAUNCH.json [without-control-groups]` prints `READY STATE` and `ENDED OUTCOME`,
//! each on one line. Each SIGTERM requests the end, more urgently than the one before.
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a test program speaks by printing")]

use std::process::ExitCode;

use cuda_cluster::os::run_directory::{LAST_MOMENTS, RunDirectory};
use cuda_cluster::supervise::{Escalation, Launch, Options, Supervisor};
use tokio::signal::unix::{SignalKind, signal};

fn main() -> ExitCode {
    if let Some(code) = cuda_cluster::os::dispatch() {
        return code;
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(keep())
}

async fn keep() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let launch = std::fs::read(&arguments[1]).unwrap();
    let launch: Launch = serde_json::from_slice(&launch).unwrap();
    let base = arguments[0].as_ref();
    let directory = match RunDirectory::acquire_within(base, &launch.name, LAST_MOMENTS) {
        Ok(directory) => directory,
        Err(error) => {
            println!("REFUSED {error}");
            return ExitCode::FAILURE;
        }
    };
    let control_groups = arguments.get(2).is_none_or(|word| word != "without-control-groups");
    let options = Options { control_groups, ..Options::default() };
    let supervisor = Supervisor::start(launch, directory, options).await.unwrap();
    let stopper = supervisor.stopper();
    tokio::spawn(async move {
        let mut terms = signal(SignalKind::terminate()).unwrap();
        for count in 1.. {
            terms.recv().await;
            stopper.stop(Escalation::of_request(count));
        }
    });
    if supervisor.ready().await.is_ok() {
        let state = supervisor.state().borrow().clone();
        println!("READY {}", serde_json::to_string(&state).unwrap());
    }
    println!("ENDED {:?}", supervisor.wait().await);
    ExitCode::SUCCESS
}
