//! The command line: one file per subcommand, and the only place that prints.
//!
//! Does not decide or act; it parses, calls the floors below, and shows.
//!
//! *Invariant:* standard output carries what was asked for and nothing else; everything that is
//! about the asking goes to standard error. Exit codes are those of [`Exit`].

mod bench;
mod doctor;
mod down;
mod env;
mod events;
mod exec;
mod explain;
mod failure;
mod flags;
mod heat;
mod input;
mod logs;
mod measure;
mod output;
mod pages;
mod plan;
mod progress;
mod ps;
mod reach;
mod relay;
mod restart;
mod run;
mod sanitize;
mod screen;
mod service_manager;
mod signals;
mod source;
mod spec;
mod topo;
mod up;
mod verify;
mod workers;
mod workloads;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

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
    /// Brings a cluster up: every process READY, or nothing left of it.
    Up(Box<up::Arguments>),
    /// Runs a program on every GPU, one rank each, until the first fails or all are done.
    Run(Box<run::Arguments>),
    /// Binds this one process by its local rank and becomes a program (under srun, torchrun, …).
    Exec(Box<exec::Arguments>),
    /// Shows running clusters and their processes; with -a also why others have ended.
    Ps(ps::Arguments),
    /// Shows what the processes of a cluster, running or ended, wrote.
    Logs(logs::Arguments),
    /// Shows what happened to a cluster, running or ended.
    Events(events::Arguments),
    /// Says why a task does not run, or why it ran where it did.
    Explain(explain::Arguments),
    /// Prints what a client of a running cluster needs in its environment.
    Env(env::Arguments),
    /// Starts a process of a running cluster again.
    Restart(restart::Restart),
    /// Changes how many workers of a running cluster run.
    Scale(restart::Scale),
    /// Checks what this machine has and lacks for clusters.
    Doctor(doctor::Arguments),
    /// Ends a cluster: SIGTERM, then SIGKILL after the grace.
    Down(down::Arguments),
    /// Checks that the workers of a running cluster use the links that they should.
    Verify(verify::Arguments),
    /// Measures what a running cluster can do.
    Bench(bench::Arguments),
    /// Prints completions for a shell.
    Completions(pages::Completions),
    /// Writes manual pages.
    #[command(hide = true)]
    Man(pages::Man),
}

/// Runs the command line of this process and returns its exit code.
pub fn main() -> ExitCode {
    if let Some(code) = crate::cluster::dispatch() {
        return code;
    }
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => {
            let code = if error.use_stderr() { Exit::Usage } else { Exit::Done };
            output::usage(&error);
            return code.into();
        }
    };
    let exit = run(arguments.command).unwrap_or_else(|failure| {
        output::failure(&failure);
        failure.exit
    });
    match screen::close(exit).map_err(output::unwritable) {
        Err(failure) if exit == Exit::Done => {
            output::failure(&failure);
            // Standard error may be refused, too, and then nobody is left to tell.
            let _ = screen::close(failure.exit);
            failure.exit.into()
        }
        _ => exit.into(),
    }
}

fn run(command: Command) -> Result<Exit, Failure> {
    match command {
        Command::Topo(arguments) => topo::run(&arguments),
        Command::Plan(arguments) => plan::run(&arguments),
        Command::Spec(arguments) => spec::run(&arguments),
        Command::Up(arguments) => up::run(&arguments),
        Command::Run(arguments) => run::run(&arguments),
        Command::Exec(arguments) => exec::run(&arguments),
        Command::Ps(arguments) => ps::run(&arguments),
        Command::Logs(arguments) => logs::run(&arguments),
        Command::Events(arguments) => events::run(&arguments),
        Command::Explain(arguments) => explain::run(&arguments),
        Command::Env(arguments) => env::run(&arguments),
        Command::Restart(arguments) => restart::restart(&arguments),
        Command::Scale(arguments) => restart::scale(&arguments),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Down(arguments) => down::run(&arguments),
        Command::Verify(arguments) => verify::run(&arguments),
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Completions(arguments) => pages::completions(&arguments),
        Command::Man(arguments) => pages::man(&arguments),
    }
}
