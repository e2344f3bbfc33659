//! The command line: one file per subcommand, and the only place that prints.
//!
//! Does not decide or act; it parses, calls the floors below, and shows.
//!
//! *Invariant:* standard output carries only the answer; notes, progress and errors go to standard
//! error. Exit codes are those of `failure::Exit`.

mod audit;
mod bench;
mod dashboard;
mod doctor;
mod down;
mod env;
mod events;
mod exec;
mod explain;
mod failure;
mod fallen;
mod flags;
mod gathering;
mod heat;
mod history;
mod hosts;
mod input;
mod logs;
mod measure;
mod output;
mod pages;
mod plan;
mod predict;
mod progress;
mod ps;
mod reach;
mod relay;
mod report;
mod restart;
mod run;
mod sanitize;
mod screen;
mod service_manager;
mod signals;
mod source;
mod spec;
mod standard_input;
mod top;
mod topo;
mod up;
mod verify;
mod why;
mod wires;
mod workers;
mod workloads;

use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue};
use clap::{CommandFactory, Parser, Subcommand};

pub(crate) use failure::{Exit, Failure};

/// Runs one worker process per GPU on this machine, bound to nearby hardware and supervised
#[derive(Parser, Debug)]
#[command(name = "cuda-cluster", version, about, max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Show a machine: its GPUs, NICs and CPUs, and how they are connected
    Topo(topo::Arguments),
    /// Show what would run, where it would be bound, and why
    Plan(Box<plan::Arguments>),
    /// Check spec files, or print their JSON Schema
    Spec(spec::Arguments),
    /// Start a cluster; if any process fails to become READY, nothing is left running
    Up(Box<up::Arguments>),
    /// Run a program with one rank per GPU, until one rank fails or all have finished
    Run(Box<run::Arguments>),
    /// Bind this process by its local rank and execute a program (under srun, torchrun, …)
    Exec(Box<exec::Arguments>),
    /// Show running clusters and their processes; with -a, also clusters that have ended and why
    Ps(ps::Arguments),
    /// Watch running clusters on a terminal: their processes, GPUs, lanes and events, live
    Top(top::Arguments),
    /// Show the output of a cluster's processes, also after it has ended
    Logs(logs::Arguments),
    /// Show the events of a cluster, also after it has ended
    Events(events::Arguments),
    /// Show what a cluster's processes used over time, also after it has ended
    History(history::Arguments),
    /// Show clusters in a browser: the machine, its workers and links, live
    Dashboard(dashboard::Arguments),
    /// Write what is known about a cluster into a file for an issue, without secrets
    Report(report::Arguments),
    /// Find out why a job hangs: which rank keeps the others waiting, where, and for what
    Why(why::Arguments),
    /// Explain why a task is not running, or why it ran where it did
    Explain(explain::Arguments),
    /// Print the environment variables that clients of a running cluster need
    Env(env::Arguments),
    /// Restart a process of a running cluster
    Restart(restart::Restart),
    /// Change the number of running workers
    Scale(restart::Scale),
    /// Check whether this machine is ready to run clusters
    Doctor(Box<doctor::Arguments>),
    /// Stop a cluster: SIGTERM, then SIGKILL after the grace period
    Down(down::Arguments),
    /// Check that the workers of a running cluster communicate over the expected links
    Verify(verify::Arguments),
    /// Measure the performance of a running cluster
    Bench(bench::Arguments),
    /// Print completions for a shell
    Completions(pages::Completions),
    /// Bring up this machine's part of a cluster, for 'up' on another machine
    #[command(name = "__member", hide = true)]
    Member,
    /// Write manual pages
    #[command(hide = true)]
    Man(pages::Man),
}

/// Runs the command line of this process and returns its exit code.
pub fn main() -> ExitCode {
    if let Some(code) = crate::cluster::dispatch() {
        return code;
    }
    crate::os::ignore_file_size_signal();
    crate::os::wait_for_children();
    let done = match Arguments::try_parse() {
        Ok(arguments) => run(arguments.command),
        Err(error) => output::usage(&error, elsewhere(&error).as_deref()),
    };
    let exit = done.unwrap_or_else(|failure| {
        output::failure(&failure);
        failure.exit
    });
    match screen::close(exit).map_err(output::unwritable) {
        Err(failure) if exit == Exit::Done => {
            output::failure(&failure);
            // Standard error may fail as well; then there is no way left to report it.
            let _ = screen::close(failure.exit);
            failure.exit.into()
        }
        _ => exit.into(),
    }
}

/// Where the word is a command that clap did not find: below another one.
fn elsewhere(error: &clap::Error) -> Option<String> {
    let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidSubcommand) else {
        return None;
    };
    let program = Arguments::command();
    let below = program.get_subcommands().filter(|one| one.find_subcommand(word).is_some());
    let whole: Vec<String> =
        below.map(|one| format!("{} {} {word}", program.get_name(), one.get_name())).collect();
    (!whole.is_empty()).then(|| whole.join(", or: "))
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
        Command::Top(arguments) => top::run(&arguments),
        Command::Logs(arguments) => logs::run(&arguments),
        Command::Events(arguments) => events::run(&arguments),
        Command::History(arguments) => history::run(&arguments),
        Command::Dashboard(arguments) => dashboard::run(&arguments),
        Command::Report(arguments) => report::run(&arguments),
        Command::Why(arguments) => why::run(&arguments),
        Command::Explain(arguments) => explain::run(&arguments),
        Command::Env(arguments) => env::run(&arguments),
        Command::Restart(arguments) => restart::restart(&arguments),
        Command::Scale(arguments) => restart::scale(&arguments),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Down(arguments) => down::run(&arguments),
        Command::Verify(arguments) => verify::run(&arguments),
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Completions(arguments) => pages::completions(&arguments),
        Command::Member => up::member::run(),
        Command::Man(arguments) => pages::man(&arguments),
    }
}
