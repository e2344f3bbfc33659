//! A program that launches a cluster as itself: supervisor, scheduler and workers are this binary.
//!
//! `cargo run --example embedded` runs on a simulated DGX-1, so that it needs no GPU.

#![allow(clippy::print_stdout, clippy::print_stderr)]

use std::process::ExitCode;

use cuda_cluster::cluster::{self, Cluster, LaunchFailure};
use cuda_cluster::topology;

fn main() -> ExitCode {
    // Must come first: this process may have been started as one of the cluster's.
    if let Some(code) = cluster::dispatch() {
        return code;
    }
    match work() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn work() -> Result<(), Box<dyn std::error::Error>> {
    let text = topology::builtin("dgx-1-v100").ok_or("a machine that is built in")?;
    let machine = topology::parse(text)?;
    let cluster = Cluster::builder().simulate(machine).workers(4).launch_blocking();
    let cluster = cluster.inspect_err(|error: &LaunchFailure| {
        if let Some(hint) = error.hint() {
            eprintln!("hint: {hint}");
        }
    })?;
    for worker in cluster.state()?.workers {
        let pid = worker.pid.unwrap_or_default();
        println!(
            "{} {} with {} peers, process {pid}",
            worker.name,
            worker.state,
            worker.peers.len()
        );
    }
    if std::env::args().any(|argument| argument == "--stay") {
        std::thread::park();
    }
    cluster.stop();
    Ok(())
}
