//! `run`: one rank of a program per GPU, bound and supervised, until the first fails or all are
//! done.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use clap::Args;

use super::failure::{Exit, Failure};
use super::flags::Asked;
use super::signals::Signals;
use super::{output, reach, up};
use crate::cluster::{self, Prepared};
use crate::os::log_file::{LogReader, Selection};
use crate::os::process;
use crate::os::run_directory::{Paths, RunDirectory};
use crate::os::session;
use crate::spec::EngineKind;
use crate::supervise::{ClusterState, Escalation, Outcome, ProcessState};

/// How often the ranks' output is looked at.
const LOOK: Duration = Duration::from_millis(50);

/// Arguments of `run`.
#[derive(Args, Debug)]
pub(super) struct Arguments {
    #[command(flatten)]
    asked: Asked,
    /// Begin each line of output with its rank's name
    #[arg(long)]
    prefix: bool,
    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "CMD")]
    command: Vec<String>,
}

/// Runs a program on every GPU.
pub(super) fn run(arguments: &Arguments) -> Result<Exit, Failure> {
    let request = arguments.asked.request_with(|spec| {
        spec.engine = Some(EngineKind::Command);
        spec.command.argv = Some(arguments.command.clone());
        // Two runs at once are two clusters.
        spec.name = spec.name.take().or_else(|| format!("run-{}", std::process::id()).parse().ok());
    })?;
    let prepared = Prepared { to_completion: true, ..up::prepare(&request)? };
    reach::runtime()?.block_on(attend(&prepared, arguments.prefix))
}

/// Passes the ranks' output on until they have ended.
async fn attend(prepared: &Prepared, prefix: bool) -> Result<Exit, Failure> {
    let plan = &prepared.plan;
    let mut signals = Signals::new()?;
    let program = session::own_program();
    let supervisor = cluster::start(prepared, &program).await.map_err(up::refused)?;
    let mut output =
        Output::new(&Paths::of(&plan.name), plan.workers.iter().map(|w| &w.name), prefix);
    let mut state = supervisor.state();
    loop {
        tokio::select! {
            changed = state.changed() => {
                if changed.is_err() || state.borrow_and_update().state.is_end() {
                    break;
                }
            }
            number = signals.next() => supervisor.stop(signals.escalation(number)),
            () = tokio::time::sleep(LOOK) => output.pass_on().inspect_err(|_| {
                // Nobody reads any more: the ranks are to end as a pipe's writers do.
                supervisor.stop(Escalation::Graceful);
            })?,
        }
    }
    let outcome = supervisor.wait().await;
    let last = state.borrow().clone();
    output.pass_on()?;
    if outcome.is_good()
        && let Ok(directory) = RunDirectory::acquire(&plan.name)
    {
        // Everything in it has been shown; what cannot be removed is cleaned by the next owner.
        let _ = directory.remove();
    }
    match (outcome, signals.first()) {
        (_, Some(number)) => Ok(Exit::Signal(number)),
        (Outcome::Finished | Outcome::Stopped { .. }, None) => Ok(Exit::Done),
        (Outcome::Failed(cause) | Outcome::NotReady(cause), None) => {
            let root = root(&last, &cause.text);
            output::status(&format!("run: {root}; the other ranks were stopped"));
            let crashes = Paths::of(&plan.name).crashes();
            if let Some(kept) = bundle(&last).or_else(|| crashes.is_dir().then_some(crashes)) {
                output::status(&format!("run: what is known of it is in {}", kept.display()));
            }
            Ok(cause.exit.map_or(Exit::Failed, program_exit))
        }
    }
}

/// The rank where it began, and what happened to it.
fn root(state: &ClusterState, text: &str) -> String {
    match state.workers.iter().position(|worker| began_at(state, worker)) {
        Some(rank) => format!("rank {rank}: {text}"),
        None => text.to_owned(),
    }
}

/// The crash bundle of the rank where it began.
fn bundle(state: &ClusterState) -> Option<PathBuf> {
    let worker = state.workers.iter().find(|worker| began_at(state, worker))?;
    worker.last_exit.as_ref()?.bundle.clone()
}

fn began_at(state: &ClusterState, worker: &ProcessState) -> bool {
    let process = state.cause.as_ref().and_then(|cause| cause.process.as_ref());
    process == Some(&worker.name)
}

/// A run ends as its first failed rank did.
fn program_exit(exit: process::Exit) -> Exit {
    let byte = |number: i32| u8::try_from(number).ok();
    match (exit.code.and_then(byte), exit.signal.and_then(byte)) {
        (Some(code), _) => Exit::Program(code),
        (None, Some(signal)) => Exit::Signal(signal),
        (None, None) => Exit::Failed,
    }
}

/// What the ranks write, read from their logs.
struct Output {
    ranks: Vec<Rank>,
    prefix: bool,
    since: SystemTime,
}

struct Rank {
    name: String,
    log: PathBuf,
    reader: Option<LogReader>,
}

impl Output {
    fn new<'a>(paths: &Paths, names: impl Iterator<Item = &'a String>, prefix: bool) -> Self {
        let rank = |name: &String| Rank { name: name.clone(), log: paths.log(name), reader: None };
        Self { ranks: names.map(rank).collect(), prefix, since: SystemTime::UNIX_EPOCH }
    }

    /// Prints what was written since the last time.
    fn pass_on(&mut self) -> Result<(), Failure> {
        let unreadable = |error| Failure::new(Exit::Failed, anyhow::Error::new(error));
        let wanted = Selection { tail: None, since: Some(self.since) };
        for rank in &mut self.ranks {
            let lines = match &mut rank.reader {
                Some(reader) => reader.appended().map_err(unreadable)?,
                None => {
                    let (reader, lines) = LogReader::open(&rank.log, wanted).map_err(unreadable)?;
                    rank.reader = Some(reader);
                    lines
                }
            };
            for line in lines {
                match self.prefix {
                    true => output::print(&format!("[{}] {}\n", rank.name, line.text))?,
                    false => output::print(&format!("{}\n", line.text))?,
                }
            }
        }
        Ok(())
    }
}
