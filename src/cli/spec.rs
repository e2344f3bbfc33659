//! `cuda-cluster spec`: checks spec files, prints their JSON Schema for editors, and writes a first
//! one.
//!
//! *Invariant:* every file is checked, even if an earlier one is invalid.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::failure::{Exit, Failure};
use super::{flags, output, source};
use crate::plan;
use crate::spec::{self, ClusterSpec, Request, SpecError};

/// Arguments of `spec`.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  cuda-cluster spec check cluster.yaml --topology dgx-h100
  cuda-cluster spec check base.yaml small.yaml --merged
  cuda-cluster spec schema > schema.json")]
pub(super) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Print the JSON Schema of a spec
    Schema,
    /// Print a commented spec for a machine, to begin with
    Init {
        /// Machine: a file, or a built-in name like dgx-h100 [default: this machine]
        #[arg(long, value_name = "SRC")]
        topology: Option<String>,
    },
    /// Check spec files ('-' for standard input), and say what they would do
    Check {
        /// The files to check
        #[arg(required = true, value_name = "SPEC")]
        files: Vec<PathBuf>,
        /// Machine: a file, or a built-in name like dgx-h100 [default: the specs', else this
        /// machine]
        #[arg(long, value_name = "SRC")]
        topology: Option<String>,
        /// Also check what they are together, as `-f SPEC -f SPEC` merges them
        #[arg(long)]
        merged: bool,
    },
}

/// Checks specs or prints their schema.
pub(super) fn run(arguments: &Arguments) -> Result<Exit, Failure> {
    match &arguments.command {
        Command::Schema => output::print_json(&spec::schema())?,
        Command::Init { topology } => {
            let machine = match topology {
                Some(name) => source::load(name)?,
                None => source::live()?.topology,
            };
            let caller = crate::probe::caller();
            output::print(&plan::starter(&machine, topology.as_deref(), &caller))?;
        }
        Command::Check { files, topology, merged } => {
            return check(files, topology.as_deref(), *merged);
        }
    }
    Ok(Exit::Done)
}

fn check(files: &[PathBuf], topology: Option<&str>, merged: bool) -> Result<Exit, Failure> {
    let mut exit = Exit::Done;
    let mut specs = Vec::new();
    for file in files {
        match flags::read_spec(file) {
            Ok(mut spec) => {
                spec.topology = topology.map(str::to_owned).or(spec.topology);
                let would = outcome(Request::of(spec.clone()));
                output::print_text(&format!("{}: right; {would}\n", file.display()))?;
                specs.push(spec);
            }
            Err(failure) => {
                output::failure(&failure);
                exit = failure.exit;
            }
        }
    }
    if merged && exit == Exit::Done {
        let together = Request::merge(&specs, &ClusterSpec::default());
        output::print_text(&format!("together: {}\n", outcome(together)))?;
    }
    Ok(exit)
}

/// What a spec would do on its machine, with its notes. That it cannot be planned here does not
/// make it wrong.
fn outcome(request: Result<Request, SpecError>) -> String {
    let planned = request.map_err(|error| error.to_string()).and_then(|request| {
        super::plan::planned(&request).map_err(|failure| format!("{:#}", failure.error))
    });
    match planned {
        Err(error) => format!("it cannot run: {error}"),
        Ok(plan) => {
            let name = plan.machine.name.as_deref().unwrap_or("this machine");
            let gpus = plan.workers.iter().filter(|worker| worker.gpu.is_some()).count();
            let engine = plan.engine.kind();
            let workers = match plan.workers.len() {
                1 => format!("1 {engine} worker"),
                count => format!("{count} {engine} workers"),
            };
            let notes: String = plan.notes.iter().map(|note| format!("\n  {note}")).collect();
            format!("on {name}: {workers}, {gpus} with a GPU{notes}")
        }
    }
}
