//! `cuda-cluster spec`: checks spec files, and prints the schema that editors complete from.
//!
//! Does not plan; a spec can be right and still not fit a machine.
//!
//! *Invariant:* every file is checked, also after a wrong one.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::failure::{Exit, Failure};
use super::{flags, output};
use crate::spec;

/// Arguments of `spec`.
#[derive(Args, Debug)]
pub(super) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Prints the JSON Schema of a spec.
    Schema,
    /// Checks spec files ('-' for standard input).
    Check {
        /// The files
        #[arg(required = true, value_name = "SPEC")]
        files: Vec<PathBuf>,
    },
}

/// Checks specs or prints their schema.
pub(super) fn run(arguments: &Arguments) -> Result<Exit, Failure> {
    match &arguments.command {
        Command::Schema => output::print_json(&spec::schema())?,
        Command::Check { files } => return check(files),
    }
    Ok(Exit::Done)
}

fn check(files: &[PathBuf]) -> Result<Exit, Failure> {
    let mut exit = Exit::Done;
    for file in files {
        match flags::read_spec(file) {
            Ok(_) => output::print(&format!("{}: right\n", file.display()))?,
            Err(failure) => {
                output::failure(&failure);
                exit = failure.exit;
            }
        }
    }
    Ok(exit)
}
