//! `cuda-cluster spec`: checks spec files, prints their JSON Schema for editors, and writes a first
//! one.
//!
//! *Invariant:* every file is checked, even if an earlier one is invalid.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::failure::{Exit, Failure};
use super::{flags, input, output, source};
use crate::cluster::{self, PathError};
use crate::plan;
use crate::spec::{self, ClusterSpec, Request, SpecError};
use crate::text::{self, in_full};

/// Arguments of `spec`.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  cuda-cluster spec check cluster.yaml --topology dgx-h100
  cuda-cluster spec check -f base.yaml -f mine.yaml   # as plan and up merge them
  cuda-cluster spec schema > schema.json")]
pub(super) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Print the JSON Schema of a spec
    Schema,
    /// Print the flags that set keys of a spec, as JSON
    Flags,
    /// Print a commented spec for a machine, to begin with
    Init {
        /// Machine: a file, or a built-in name like dgx-h100 [default: this machine]
        #[arg(long, value_name = "SRC")]
        topology: Option<String>,
    },
    /// Check spec files ('-' for standard input), and say what they would do
    Check {
        /// The files to check
        #[arg(required_unless_present = "file", conflicts_with = "file", value_name = "SPEC")]
        files: Vec<PathBuf>,
        /// Spec file to check; several are also checked as `plan -f` merges them, later ones win
        #[arg(short = 'f', long = "file", value_name = "SPEC")]
        file: Vec<PathBuf>,
        /// Machine: a file, or a built-in name like dgx-h100 [default: the specs', else this
        /// machine]
        #[arg(long, value_name = "SRC")]
        topology: Option<String>,
        /// Also check what they are together, as with -f
        #[arg(long)]
        merged: bool,
    },
}

/// Checks specs or prints their schema.
pub(super) fn run(arguments: &Arguments) -> Result<Exit, Failure> {
    match &arguments.command {
        Command::Schema => output::print_json(&spec::schema())?,
        Command::Flags => output::print_json(&spec::flags().collect::<Vec<_>>())?,
        Command::Init { topology } => {
            let machine = match topology {
                Some(name) => source::load(name)?,
                None => source::live()?.topology,
            };
            let caller = crate::probe::caller();
            output::print(&plan::starter(&machine, topology.as_deref(), &caller))?;
        }
        Command::Check { files, file, topology, merged } => {
            let all: Vec<PathBuf> = files.iter().chain(file).cloned().collect();
            return check(&all, topology.as_deref(), *merged || file.len() > 1);
        }
    }
    Ok(Exit::Done)
}

fn check(files: &[PathBuf], topology: Option<&str>, merged: bool) -> Result<Exit, Failure> {
    let mut exit = Exit::Done;
    let mut specs = Vec::new();
    for file in files {
        match flags::read_spec_and_text(file) {
            Ok((mut spec, text)) => {
                spec.topology = topology.map(str::to_owned).or(spec.topology);
                let would = outcome(Request::of(spec.clone()));
                let name = input::shown(file);
                let unusable = cluster::unusable_paths(&spec);
                let paths = paths(&unusable, &text, &name);
                let missing = unreadable(&unusable, &name);
                let verdict = if missing.is_some() { "wrong" } else { "right" };
                output::print_text(&format!("{name}: {verdict}; {would}{paths}\n"))?;
                if let Some(failure) = missing {
                    output::failure(&failure);
                    exit = failure.exit;
                }
                specs.push(spec);
            }
            Err(failure) => {
                output::failure(&failure);
                exit = failure.exit;
            }
        }
    }
    if merged && exit == Exit::Done {
        let together = Request::merge(&specs, &ClusterSpec::default())
            .map_err(|error| flags::keys::contradiction(&error, &specs))?;
        output::print_text(&format!("together: {}\n", outcome(Ok(together))))?;
    }
    Ok(exit)
}

/// The failure of a spec that names files that can't be read, which nothing will make: TLS
/// certificates, say. Directories and programs may still be made.
fn unreadable(unusable: &[PathError], name: &str) -> Option<Failure> {
    let missing: Vec<_> =
        unusable.iter().filter(|it| matches!(it, PathError::Unreadable { .. })).collect();
    let hint = missing.first()?.hint();
    let files = match missing.len() {
        1 => "1 file".to_owned(),
        count => format!("{count} files"),
    };
    let error = anyhow::anyhow!("{name} names {files} that cannot be read");
    Some(Failure::new(Exit::Usage, error).hint(hint))
}

/// The paths of a spec that cannot be used on this machine, a line each.
fn paths(unusable: &[PathError], text: &str, name: &str) -> String {
    let line = |error: &PathError| {
        let place = text::find(text, error.key(), 1);
        let place = place.map(|it| format!(":{}:{}", it.key.line, it.key.column));
        let place = place.unwrap_or_default();
        format!("\n  {name}{place}: {}", in_full(error))
    };
    unusable.iter().map(line).collect()
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
