//! `run`: runs one rank of a program per GPU, bound and supervised, until one fails or all have
//! finished.

use std::ffi::OsString;
use std::path::Path;
use std::pin::Pin;

use clap::Args;

use super::failure::{Exit, Failure};
use super::flags::{Asked, positive};
use super::relay::Relay;
use super::signals::Signals;
use super::standard_input::{self, Reader};
use super::workers::sentence;
use super::{audit, fallen, output, reach, screen, up};
use crate::cluster::{Detached, Lifetime, OutputForm, Prepared, RankInput, Report, Start, UpError};
use crate::os;
use crate::os::argument::encoded;
use crate::os::run_directory::Paths;
use crate::plan::WorkerPlan;
use crate::spec::{ClusterSpec, EngineKind, ProgramSpec, Request};
use crate::supervise::record::{Record, What};
use crate::supervise::{Escalation, Outcome, Stall};
use crate::wire::process;

/// Arguments of `run`.
#[derive(Args, Debug)]
#[command(after_help = "\
What ranks write is handed on byte for byte, of several ranks in whole lines. Their standard input
is empty, but for that of the rank that --stdin names. Ctrl-C reaches them as SIGINT, SIGTERM as
SIGTERM; a second signal kills them. Ctrl-Z stops only this command, and the ranks when nobody takes
their output any more.

Examples:
  cuda-cluster run --prefix -- python train.py
  cuda-cluster run -n 2 -- ./solver
  cuda-cluster run --program trainer=4 --program rollout=4 -- python train.py : python rollout.py
  cuda-cluster run -f job.yaml                     # its command.argv")]
pub(super) struct Arguments {
    #[command(flatten)]
    asked: Asked,
    /// Number of ranks, as other launchers call it; `gpu` or `auto` for one per GPU
    #[arg(short, long = "nproc-per-node", aliases = ["nproc_per_node", "np"], value_name = "N",
          value_parser = ranks, conflicts_with = "n-workers")]
    number: Option<Ranks>,
    /// Rank that reads the standard input of this command; the others' is empty
    #[arg(long, value_name = "RANK|none", value_parser = standard_input::reader,
          default_value = "none", hide_default_value = true)]
    stdin: Reader,
    /// Prefix each line of output with its rank's name
    #[arg(long, aliases = ["tag-output", "label"])]
    prefix: bool,
    /// The program and its arguments, or with --program several, parted by ':' [default: those of
    /// the spec]
    #[arg(last = true, value_name = "CMD")]
    command: Vec<OsString>,
}

/// A number of ranks, or as many as there are GPUs.
#[derive(Clone, Copy, Debug)]
enum Ranks {
    Each,
    Some(u32),
}

fn ranks(text: &str) -> Result<Ranks, String> {
    match text {
        "gpu" | "auto" => Ok(Ranks::Each),
        "p" => Err("-np N is -n N here".to_owned()),
        number => positive(number).map(Ranks::Some),
    }
}

/// Runs a program on every GPU.
pub(super) fn run(arguments: &Arguments) -> Result<Exit, Failure> {
    let mut request = requested(&arguments.asked, &arguments.command, |spec| {
        // Two runs at the same time are two clusters.
        spec.name = spec.name.take().or_else(|| format!("run-{}", std::process::id()).parse().ok());
        if let Some(Ranks::Some(number)) = arguments.number {
            spec.workers = Some(number);
        }
    })?;
    program_of(&request)?;
    readable(arguments, &request)?;
    screen::open();
    let verified = request.spec.verify == Some(true);
    if let Some(exit) = up::prove(&mut request)? {
        return Ok(exit);
    }
    let prepared = Prepared { to_completion: true, ..up::prepare(&request)? };
    let input = input(arguments.stdin, &prepared)?;
    reach::runtime()?.block_on(attend(prepared, arguments.prefix, input, verified))
}

/// Checks that standard input can be a rank's.
fn readable(arguments: &Arguments, request: &Request) -> Result<(), Failure> {
    let refuse = |text: &str, hint: &str| {
        Err(Failure::new(Exit::Usage, anyhow::anyhow!("--stdin: {text}")).hint(hint))
    };
    let Reader::Rank(_) = arguments.stdin else { return Ok(()) };
    if request.spec.command.restarts.unwrap_or(0) > 0 {
        return refuse(
            "what a rank has read before a restart is gone, and would be missing after it",
            "leave --restarts out, or give the program its input in a file",
        );
    }
    if arguments.asked.file.iter().any(|file| file.as_os_str() == "-") {
        return refuse("the spec is read from standard input", "put the spec into a file");
    }
    if request.spec.topology.as_deref() == Some("-") {
        return refuse("the machine is read from standard input", "put the machine into a file");
    }
    Ok(())
}

/// What a rank of the plan reads.
fn input(reader: Reader, prepared: &Prepared) -> Result<Option<RankInput>, Failure> {
    let Reader::Rank(rank) = reader else { return Ok(None) };
    let ranks = prepared.plan.workers.len();
    if rank as usize >= ranks {
        let error = anyhow::anyhow!("--stdin: there is no rank {rank}; the job has {ranks}");
        return Err(Failure::new(Exit::Usage, error).hint("ranks are numbered from 0"));
    }
    Ok(Some(RankInput { rank, from: standard_input::handed_on()? }))
}

/// The request for a program: the command line's, or else the spec's, if any.
pub(super) fn requested(
    asked: &Asked,
    command: &[OsString],
    change: impl FnOnce(&mut ClusterSpec),
) -> Result<Request, Failure> {
    let mut wrong = None;
    asked
        .request_with(|spec| {
            if let Some(engine) = spec.engine.filter(|engine| *engine != EngineKind::Command) {
                output::note(&format!(
                    "--engine {engine} is ignored: this runs a program of yours"
                ));
            }
            spec.engine = Some(EngineKind::Command);
            let typed = || command.iter().map(|text| encoded(text)).collect();
            match (&mut spec.command.programs, command) {
                (_, []) => {}
                (Some(programs), command) => share_out(command, programs, &mut wrong),
                (None, _) => spec.command.argv = Some(typed()),
            }
            change(spec);
        })
        .and_then(|request| wrong.map_or(Ok(request), Err))
}

/// Gives each program its command. Those that were typed are parted by a lone `:`.
fn share_out(command: &[OsString], programs: &mut [ProgramSpec], wrong: &mut Option<Failure>) {
    let commands: Vec<&[OsString]> = command.split(|word| word == ":").collect();
    if commands.len() != programs.len() {
        let names: Vec<&str> = programs.iter().map(|program| program.name.as_str()).collect();
        let number = |count: usize, what: &str| match count {
            1 => format!("1 {what}"),
            count => format!("{count} {what}s"),
        };
        let error = anyhow::anyhow!(
            "--program: {} ({}), and {} after --",
            number(programs.len(), "program"),
            names.join(", "),
            number(commands.len(), "command"),
        );
        let hint = "part the commands by a lone ':', in the order of --program";
        *wrong = Some(Failure::new(Exit::Usage, error).hint(hint));
        return;
    }
    for (program, words) in programs.iter_mut().zip(commands) {
        program.argv = Some(words.iter().map(|text| encoded(text)).collect());
    }
}

/// Checks that there is a program to run.
pub(super) fn program_of(request: &Request) -> Result<(), Failure> {
    let programs = request.spec.programs();
    if let Some(program) = programs.iter().find(|program| program.argv.is_none()) {
        let error = anyhow::anyhow!("there is no command for the program {}", program.name);
        let hint = "write the commands after --, parted by a lone ':', or each into the spec as \
                    its argv";
        return Err(Failure::new(Exit::Usage, error).hint(hint));
    }
    if programs.is_empty() && request.spec.command.argv.is_none() {
        let error = anyhow::anyhow!("there is no program to run");
        let hint = "write it after --, or into the spec as command.argv";
        return Err(Failure::new(Exit::Usage, error).hint(hint));
    }
    Ok(())
}

/// Relays the ranks' output until they have ended. If the ways between their devices were
/// `verified`, the program has to use them.
async fn attend(
    prepared: Prepared,
    prefix: bool,
    input: Option<RankInput>,
    verified: bool,
) -> Result<Exit, Failure> {
    let plan = prepared.plan.clone();
    let mut signals = Signals::new()?;
    let program = os::process::own_program();
    let copies = plan.engine.output_dir();
    // Each stream has a copy of its own.
    let separate_streams = copies.is_some() || !output::streams_are_one();
    let form = OutputForm { separate_streams };
    let lifetime = Lifetime::Owned;
    let is_handed_on = input.is_some();
    let start = Start { program: &program, lifetime, attended: true, output: Some(form), input };
    let (mut supervisor, pipe) = Detached::spawn(prepared, start).await.map_err(up::refused)?;
    if is_handed_on {
        standard_input::let_go();
    }
    let names: Vec<String> = plan.workers.iter().map(shown).collect();
    let mut relay = Relay::begin(pipe, names, prefix, form.separate_streams)?;
    let mut unwritable = None;
    // Begins when the ranks are asked to end.
    let mut silence: Pin<Box<dyn Future<Output = ()>>> = Box::pin(std::future::pending());
    let ended = loop {
        let report = tokio::select! {
            report = supervisor.next() => report.map_err(up::refused)?,
            failure = relay.failed() => {
                // The reader has gone; the ranks end as if their own pipe had broken.
                unwritable = Some(failure);
                supervisor.stop(Escalation::Graceful, None).await;
                silence = Box::pin(supervisor.silence());
                continue;
            }
            number = signals.next() => {
                up::insist(&mut supervisor, &mut signals, number, false).await;
                silence = Box::pin(supervisor.silence());
                continue;
            }
            () = &mut silence => return Err(up::refused(supervisor.put_down().await)),
        };
        match report {
            Some(Report::Ended { outcome, state, audit }) => break Some((outcome, state, audit)),
            Some(Report::Event(record)) => tell(&record, copies),
            Some(_) => {}
            None => break None,
        }
    };
    if let Err(failure) = relay.finish(&mut signals).await {
        unwritable.get_or_insert(failure);
    }
    let Some((outcome, last, concluded)) = ended else {
        return match (supervisor.unsaid().await, signals.first()) {
            (_, Some(number)) => Ok(Exit::Signal(number)),
            (Ok(_), None) => Ok(ended_by_others()),
            (Err(UpError::Interrupted), None) => Ok(Exit::INTERRUPTED),
            (Err(error), None) => Err(up::refused(error)),
        };
    };
    let as_planned = audit::conclude("run", &plan, &concluded);
    match (outcome, signals.first()) {
        (_, Some(number)) => Ok(Exit::Signal(number)),
        _ if unwritable.is_some() => unwritable.map_or(Ok(Exit::Failed), Err),
        (Outcome::Finished, None) if verified && !as_planned => {
            output::status("run: the ranks have finished, but not over the wires of the plan");
            Ok(Exit::Unverified)
        }
        (Outcome::Finished, None) => Ok(Exit::Done),
        (Outcome::Stopped { .. }, None) => Ok(ended_by_others()),
        (Outcome::NotReady(cause), None) => {
            output::status(&format!("run: {}", cause.text));
            Ok(Exit::NotReady)
        }
        (Outcome::Failed(cause), None) if cause.stalled => {
            output::status("run: the ranks were ended, because they were stalled");
            Ok(Exit::Stalled)
        }
        (Outcome::Failed(cause), None) => {
            fallen::tell(&last, &cause.text, &Paths::of(&plan.name));
            Ok(cause.exit.map_or(Exit::Failed, program_exit))
        }
    }
}

/// What the lines of a rank begin with.
fn shown(worker: &WorkerPlan) -> String {
    match &worker.program {
        Some(program) => format!("{program}:{}", worker.name),
        None => worker.name.clone(),
    }
}

/// Says that the ranks are started again, with whom, and where their output is (`copies`), and
/// what of that cannot be written.
fn tell(record: &Record, copies: Option<&Path>) {
    match &record.what {
        What::Regrouping { restart, limit, rank, cause, .. } => {
            let place = copies.map(|copies| copies.join(format!("restart{restart}")));
            let place = place.map_or_else(String::new, |place| {
                format!("; their output goes to {}", place.display())
            });
            output::status(&format!(
                "run: rank {rank}: {}; all ranks are started again ({restart} of {limit}){place}",
                cause.text
            ));
        }
        What::NotCopied { path, reason } => output::status(&format!(
            "run: {} is not written any more: {reason}; the ranks go on",
            path.display()
        )),
        What::Stalled(Stall { text, evidence, .. }) => {
            output::status(&format!("run: {text}"));
            if let Some(path) = evidence {
                let path = path.display();
                output::status(&format!(
                    "run: what was seen is in {path} (cuda-cluster why --bundle {path})"
                ));
            }
        }
        What::GoesOn => output::status("run: the ranks go on"),
        What::Replaced { .. } => output::status(&format!("run: {}", sentence(record))),
        _ => {}
    }
}

/// The exit of a run that neither its ranks nor a signal to it has ended: what they were to do is
/// not done.
fn ended_by_others() -> Exit {
    output::status("run: it was ended from outside before its ranks had finished");
    Exit::Failed
}

/// A run exits like its first failed rank.
fn program_exit(exit: process::Exit) -> Exit {
    let byte = |number: i32| u8::try_from(number).ok();
    match (exit.code.and_then(byte), exit.signal.and_then(byte)) {
        (Some(code), _) => Exit::Program(code),
        (None, Some(signal)) => Exit::Signal(signal),
        (None, None) => Exit::Failed,
    }
}
