//! The command line: one file per subcommand, and the only place that prints.
//!
//! Does not decide or act; it parses, calls the floors below, and shows.
//!
//! *Invariant:* standard output carries what was asked for and nothing else; everything that is
//! about the asking goes to standard error. Exit codes are those of [`Exit`].

mod failure;
mod flags;
mod output;
mod plan;
mod source;
mod spec;
mod topo;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::engine::native;

pub(crate) use failure::{Exit, Failure};

/// Brings up one worker process per GPU on one machine.
#[derive(Parser, Debug)]
#[command(name = "cuda-cluster", version, about, max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Shows a machine: its GPUs, NICs, CPUs, and how they reach each other.
    Topo(topo::Arguments),
    /// Shows what would run, bound to what, and why.
    Plan(Box<plan::Arguments>),
    /// Checks specs, and prints their JSON Schema.
    Spec(spec::Arguments),
    /// What the native engine's scheduler process runs.
    #[command(name = "__scheduler", hide = true)]
    NativeScheduler,
    /// What the native engine's worker processes run.
    #[command(name = "__worker", hide = true)]
    NativeWorker,
}

/// Runs the command line of this process and returns its exit code.
pub fn main() -> ExitCode {
    if let Some(code) = crate::os::dispatch() {
        return code;
    }
    output::die_quietly_on_broken_pipe();
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => {
            let code = if error.use_stderr() { Exit::Usage } else { Exit::Done };
            // Nothing to do when even the terminal is gone.
            let _ = error.print();
            return code.into();
        }
    };
    match run(arguments.command) {
        Ok(exit) => exit.into(),
        Err(failure) => {
            output::failure(&failure);
            failure.exit.into()
        }
    }
}

/// A process of the native engine that did not end in good order.
fn engine_failure(error: native::Error) -> Failure {
    let hint = error.hint();
    Failure::new(Exit::Failed, error).maybe_hint(hint)
}

fn run(command: Command) -> Result<Exit, Failure> {
    match command {
        Command::Topo(arguments) => topo::run(&arguments),
        Command::Plan(arguments) => plan::run(&arguments),
        Command::Spec(arguments) => spec::run(&arguments),
        Command::NativeScheduler => {
            native::scheduler::main().map(|()| Exit::Done).map_err(engine_failure)
        }
        Command::NativeWorker => {
            native::worker::main().map(|()| Exit::Done).map_err(engine_failure)
        }
    }
}
