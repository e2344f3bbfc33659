//! `cuda-cluster spec`: checks spec files, prints their JSON Schema for editors, and writes a first
//! one.
//!
//! *Invariant:* every file is checked, even if an earlier one is invalid.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::failure::{Exit, Failure};
use super::{flags, output, source};
use crate::plan;
use crate::spec::{self, ClusterSpec, Request};

/// Arguments of `spec`.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  cuda-cluster spec check cluster.yaml
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
    /// Check spec files ('-' for standard input)
    Check {
        /// The files to check
        #[arg(required = true, value_name = "SPEC")]
        files: Vec<PathBuf>,
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
        Command::Check { files } => return check(files),
    }
    Ok(Exit::Done)
}

fn check(files: &[PathBuf]) -> Result<Exit, Failure> {
    let mut exit = Exit::Done;
    for file in files {
        match flags::read_spec(file) {
            Ok(spec) => {
                let would = outcome(spec);
                output::print_text(&format!("{}: right; {would}\n", file.display()))?;
            }
            Err(failure) => {
                output::failure(&failure);
                exit = failure.exit;
            }
        }
    }
    Ok(exit)
}

/// What a spec would do on its machine, in a sentence. That it cannot be planned here does not make
/// it wrong.
fn outcome(spec: ClusterSpec) -> String {
    let planned = Request::of(spec).map_err(|error| error.to_string());
    let planned = planned.and_then(|request| {
        super::plan::planned(&request).map_err(|failure| format!("{:#}", failure.error))
    });
    match planned {
        Err(error) => format!("it cannot run: {error}"),
        Ok(plan) => {
            let name = plan.machine.name.as_deref().unwrap_or("this machine");
            let gpus = plan.workers.iter().filter(|worker| worker.gpu.is_some()).count();
            let notes = match plan.notes.len() {
                0 => String::new(),
                1 => ", 1 note".to_owned(),
                notes => format!(", {notes} notes"),
            };
            let engine = plan.engine.kind();
            let count = plan.workers.len();
            format!("on {name}: {count} {engine} workers, {gpus} with a GPU{notes}")
        }
    }
}
