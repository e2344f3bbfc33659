//! `cuda-cluster spec`: checks spec files, and prints their JSON Schema for editors.
//!
//! Does not plan; a valid spec may still not fit a machine.
//!
//! *Invariant:* every file is checked, even if an earlier one is invalid.

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
    /// Print the JSON Schema of a spec
    Schema,
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
