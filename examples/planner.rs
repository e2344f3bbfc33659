//! Plans for a machine that may be elsewhere, and says why. Launches nothing, needs no GPU, and is
//! built without any feature of the crate.
//!
//! `cargo run --no-default-features --example planner dgx-h100 configs/nvlink.yaml`; in place of a
//! built-in machine a file: `cuda-cluster topo -o yaml`, `nvidia-smi topo -m`, NCCL's or hwloc's
//! XML.
#![allow(clippy::print_stdout, clippy::print_stderr)]

use std::error::Error;
use std::fs;
use std::process::ExitCode;

use cuda_cluster::plan::{CallerEnvironment, PlanError, plan};
use cuda_cluster::spec::{self, ClusterSpec, Request};
use cuda_cluster::topology;

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let machine = arguments.next().ok_or("planner MACHINE [SPEC]")?;
    let machine = match topology::builtin(&machine) {
        Some(text) => topology::parse(text)?,
        None => topology::parse(&fs::read_to_string(&machine)?)?,
    };
    let asked = match arguments.next() {
        Some(path) => spec::parse(&fs::read_to_string(&path)?, &path)?,
        None => ClusterSpec::default(),
    };
    // What the shell that launches would add: variables, its CPUs, the libraries that it has.
    let caller = CallerEnvironment::default();
    let plan = match plan(&machine, &Request::of(asked)?, &caller) {
        Ok(plan) => plan,
        Err(error) => return Ok(refused(&error)),
    };
    for worker in &plan.workers {
        let cpus = worker.binding.cpus.as_ref().map_or("all".to_owned(), ToString::to_string);
        let nics: Vec<String> = worker.nics.iter().map(ToString::to_string).collect();
        println!("{}: CPUs {cpus}, NICs {}", worker.name, nics.join(" "));
        for why in &worker.why {
            println!("  {}: {}, because {}", why.choice, why.chosen, why.reason);
        }
    }
    for note in &plan.notes {
        println!("note: {note}");
    }
    // `Plan::parse` reads this again, and `Builder::stored_plan` launches it.
    println!("{} bytes as JSON", serde_json::to_string(&plan)?.len());
    Ok(ExitCode::SUCCESS)
}

/// A request that the machine can't satisfy is no bug: it is told, with what to do.
fn refused(error: &PlanError) -> ExitCode {
    eprintln!("error: {error}");
    if let Some(hint) = error.hint() {
        eprintln!("hint: {hint}");
    }
    ExitCode::from(2)
}
