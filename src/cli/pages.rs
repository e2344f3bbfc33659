//! `completions` and `man`: what shells and `man` know of the commands, from `--help`.
//!
//! *Invariant:* nothing is said here that `--help` does not say.

use std::path::PathBuf;

use clap::{Args, CommandFactory};

use super::failure::{Exit, Failure};
use super::output;

/// Arguments of `completions`.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  cuda-cluster completions bash > ~/.local/share/bash-completion/completions/cuda-cluster")]
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_help_of_each_command_has_examples_that_it_accepts() {
        let program = super::super::Arguments::command();
        for command in program.get_subcommands().filter(|command| !command.is_hide_set()) {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let examples = help.split_once("Examples:\n").map(|(_, examples)| examples);
            let examples = examples.unwrap_or_else(|| panic!("{} has none", command.get_name()));
            for line in examples.lines() {
                let Some(("  ", example)) = line.split_once("cuda-cluster ") else { continue };
                let words = example.split(['#', '|', '>']).next().unwrap_or_default();
                let words = ["cuda-cluster"].into_iter().chain(words.split_whitespace());
                let read = program.clone().try_get_matches_from(words);
                assert!(read.is_ok(), "{line}: {}", read.expect_err("wrong"));
            }
        }
    }
}
