//! `completions` and `man`: what shells and `man` know of the commands, from `--help`.
//!
//! *Invariant:* nothing is said here that `--help` does not say.

use std::path::PathBuf;

use clap::{Args, CommandFactory};

use super::failure::{Exit, Failure};
use super::output;

/// Arguments of `completions`.
#[derive(Args, Debug)]
pub(super) struct Completions {
    /// The shell
    shell: clap_complete::Shell,
}

/// Arguments of `man`.
#[derive(Args, Debug)]
pub(super) struct Man {
    /// Directory for the pages, one for each subcommand
    directory: PathBuf,
}

/// Prints what a shell evaluates.
pub(super) fn completions(arguments: &Completions) -> Result<Exit, Failure> {
    let mut command = super::Arguments::command();
    let mut text = Vec::new();
    clap_complete::generate(arguments.shell, &mut command, "cuda-cluster", &mut text);
    output::print(&String::from_utf8_lossy(&text))?;
    Ok(Exit::Done)
}

/// Writes the manual pages.
pub(super) fn man(arguments: &Man) -> Result<Exit, Failure> {
    let written = clap_mangen::generate_to(super::Arguments::command(), &arguments.directory);
    written.map(|()| Exit::Done).map_err(|error| {
        let what = format!("cannot write manual pages to {}", arguments.directory.display());
        Failure::new(Exit::Failed, anyhow::Error::new(error).context(what))
    })
}
