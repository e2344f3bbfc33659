//! A program that launches a cluster as itself and forgets to begin with `cluster::dispatch`; or,
//! given a path, whose supervisor is another program.

#![allow(clippy::print_stdout, clippy::print_stderr)]

use std::process::ExitCode;

use cuda_cluster::cluster::Cluster;
use cuda_cluster::topology;

fn main() -> ExitCode {
    println!("a line before the launch");
    let machine = topology::builtin("dgx-1-v100").map(topology::parse);
    let Some(Ok(machine)) = machine else { return ExitCode::FAILURE };
    let mut builder = Cluster::builder().simulate(machine).workers(1);
    if let Some(program) = std::env::args().nth(1).filter(|one| one.starts_with('/')) {
        builder = builder.program(program);
    }
    match builder.launch_blocking() {
        Ok(cluster) => {
            cluster.stop();
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            eprintln!("hint: {}", error.hint().unwrap_or_default());
            ExitCode::from(2)
        }
    }
}
