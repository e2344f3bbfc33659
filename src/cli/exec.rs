//! `exec`: binds this process as the worker of its local rank, then executes a program.

use std::ffi::OsString;
use std::os::unix::process::{CommandExt, parent_id};

use clap::Args;

use super::failure::{Exit, Failure};
use super::flags::{Asked, whole};
use super::run::requested;
use super::{output, up};
use crate::cluster::command;
use crate::os::argument::decoded;
use crate::os::binding;
use crate::plan::EnginePlan;

/// Arguments of `exec`.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  srun --ntasks-per-node=8 cuda-cluster exec -- ./solver")]
pub(super) struct Arguments {
    #[command(flatten)]
    asked: Asked,
    /// Local rank [default: from the launcher's environment]
    #[arg(long, value_name = "N", value_parser = whole::<u32>)]
    rank: Option<u32>,
    /// The program and its arguments [default: command.argv of the spec]
    #[arg(last = true, value_name = "CMD")]
    command: Vec<OsString>,
}

/// The name of the rank's source when it was given on the command line.
const GIVEN: &str = "--rank";

/// Binds this process and executes the program; returns only on failure.
pub(super) fn run(arguments: &Arguments) -> Result<Exit, Failure> {
    let request = requested(&arguments.asked, &arguments.command, |_| ())?;
    if request.spec.verify == Some(true) {
        let error = anyhow::anyhow!("each process starts alone here, so no pair can be verified");
        let hint = "before the job: cuda-cluster up --verify --detach, then cuda-cluster down";
        return Err(Failure::new(Exit::Usage, error).hint(hint));
    }
    let (source, rank) = match arguments.rank {
        Some(rank) => (GIVEN, rank),
        None => command::local_rank(|name| std::env::var(name).ok()).map_err(|error| {
            let hint = error.hint();
            Failure::new(Exit::Usage, error).maybe_hint(hint)
        })?,
    };
    let prepared = up::prepare(&request)?;
    let workers = &prepared.launched.workers;
    let worker = workers.iter().find(|worker| worker.rank == rank).ok_or_else(|| {
        let error = anyhow::anyhow!(
            "there is no worker for rank {rank} (from {source}): the plan has {}",
            workers.len()
        );
        Failure::new(Exit::Usage, error).hint("cuda-cluster plan shows them")
    })?;
    let bound = binding::apply(&worker.binding);
    if !bound.notes.is_empty() && prepared.plan.requirements.strict {
        let error = anyhow::anyhow!("under --strict: {}", bound.notes.join("; "));
        return Err(Failure::new(Exit::Failed, error));
    }
    for note in &bound.notes {
        output::note(note);
    }
    let mut words = request.spec.command.argv.iter().flatten().map(|text| decoded(text));
    let program = words.next().ok_or_else(|| {
        Failure::new(Exit::Usage, anyhow::anyhow!("there is no program to become"))
    })?;
    let mut env = worker.env.clone();
    let variable = |name: &str| std::env::var(name).ok();
    let languages = match &prepared.plan.engine {
        EnginePlan::Command(told) => told.bootstrap.as_slice(),
        EnginePlan::Native(_) | EnginePlan::Dask(_) => &[],
    };
    let (given, starter) = (source == GIVEN, parent_id());
    env.extend(command::told_by_launcher(rank, given, starter, languages, variable));
    // Returns only if the program cannot be executed.
    // Otherwise the program would inherit that they are ignored.
    crate::os::default_ignored_signals();
    let error = std::process::Command::new(&program).args(words).envs(&env).exec();
    let exit = match error.kind() {
        std::io::ErrorKind::NotFound => Exit::Program(127),
        _ => Exit::Program(126),
    };
    Err(Failure::new(
        exit,
        anyhow::Error::new(error).context(format!("cannot execute {}", program.display())),
    ))
}
