//! `up`: plans and starts a cluster, shows its progress to READY, and stays until it ends.
//!
//! Does not supervise anything; a process of its own does, and this one follows its reports.
//!
//! *Invariant:* READY is printed only after the supervisor has reported it.

mod audience;
pub(super) mod member;
mod owner;
mod proof;

use std::path::{Path, PathBuf};
use std::pin::Pin;

use clap::Args;

use audience::Audience;
use owner::Owner;
pub(super) use proof::prove;

use super::failure::{Exit, Failure};
use super::flags::keys::{Keys, in_flags};
use super::flags::{self, Asked, Flags, whole};
use super::output::Form;
use super::service_manager::{self, ServiceManager};
use super::signals::Signals;
use super::{audit, doctor, gathering, hosts, output, plan, reach, screen, source, verify};
use crate::cluster::{self, Detached, Lifetime, PrepareError, Prepared, Report, Start, UpError};
use crate::os::{memory, process};
use crate::plan::{EnginePlan, Origin, Plan, difference};
use crate::preflight::grouped;
use crate::spec::Request;
use crate::supervise::{Cause, ClusterPhase, ClusterState, Escalation, Outcome};

/// Number of signals after which a supervisor that is still running is killed.
const MOST_SIGNALS: u32 = 3;

/// Arguments of `up`.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  cuda-cluster up --enable-nvlink --name demo      # until Ctrl-C
  cuda-cluster up -f cluster.yaml --detach
  cuda-cluster up --topology dgx-h100 --simulate   # without GPUs")]
pub(super) struct Arguments {
    #[command(flatten)]
    asked: Asked,
    /// Return when the cluster is READY, and leave it running
    #[arg(long)]
    detach: bool,
    /// Run a plan printed by 'plan -o yaml' or '-o json' ('-' for standard input); can be combined
    /// only with --name, --verify and --detach
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with = "file",
        conflicts_with_all = flags::deciding(),
    )]
    plan: Option<PathBuf>,
    /// Print the plan without starting anything
    #[arg(long)]
    dry_run: bool,
    /// Run all checks of 'doctor' first, and start nothing if one is an error for the plan
    #[arg(long)]
    preflight: bool,
    /// Output format; JSON has a line for READY, each event, and the end
    #[arg(short, long, value_enum, default_value_t, value_name = "FORM")]
    output: Form,
    /// Show where the time of the start went, and where the files are
    #[arg(short, long)]
    verbose: bool,
    /// For programs that start clusters: end the cluster when this process ends, or standard input
    /// is closed
    #[arg(long, value_name = "PID", conflicts_with = "detach", value_parser = whole::<u32>)]
    owner: Option<u32>,
}

impl Arguments {
    fn show(&self, plan: &Plan) -> Result<Exit, Failure> {
        match self.output {
            Form::Table => plan::show(plan),
            Form::Json => output::print_json(plan).map(|()| Exit::Done),
        }
    }
}

/// Starts a cluster.
pub(super) fn run(arguments: &Arguments) -> Result<Exit, Failure> {
    let done = bring_up(arguments);
    if let (Form::Json, Err(failure)) = (arguments.output, &done) {
        audience::tell_failure(failure);
    }
    done
}

fn bring_up(arguments: &Arguments) -> Result<Exit, Failure> {
    let mut prepared = match &arguments.plan {
        Some(path) => {
            let plan = filed(path, &arguments.asked.flags)?;
            if arguments.dry_run {
                return arguments.show(&plan);
            }
            screen::open();
            noted(cluster::prepare_plan(plan), &Request::default())?
        }
        None => {
            let mut request = arguments.asked.request()?;
            let place = gathering::settle(&mut request, !arguments.dry_run)?;
            hosts::settle(&mut request)?;
            if arguments.dry_run {
                return arguments.show(&plan::planned(&request)?);
            }
            if let (Form::Json, Some(place)) = (arguments.output, &place) {
                audience::tell_place(place)?;
            }
            screen::open();
            if let Some(exit) = prove(&mut request)? {
                return Ok(exit);
            }
            prepare(&request)?
        }
    };
    if arguments.preflight {
        doctor::refuse(&prepared.launched)?;
        if let EnginePlan::Dask(dask) = &mut prepared.plan.engine {
            dask.preflight = true;
        }
    }
    // Dask's workers verify their own connections.
    prepared.to_be_verified =
        prepared.plan.requirements.verify && matches!(prepared.plan.engine, EnginePlan::Native(_));
    let lifetime = if arguments.detach { Lifetime::Free } else { Lifetime::Owned };
    let mut owner = Owner::watch(arguments.owner)?;
    let plan = prepared.plan.clone();
    // Before anything is shown that a Ctrl-C may answer.
    let runtime = reach::runtime()?;
    let signals = runtime.block_on(async { Signals::new() })?;
    let audience = match arguments.output {
        Form::Table => Audience::person(&plan, arguments.verbose),
        Form::Json => Audience::Program,
    };
    let mut ready = false;
    let purpose = Purpose { lifetime, proof: false };
    let ended = attend(prepared, purpose, audience, signals, &mut owner, &mut ready);
    let ended = runtime.block_on(ended);
    if !ready {
        cluster::forget_failed_start(&plan.name);
    }
    ended
}

/// Reads a plan, and applies `--name` and `--verify`.
fn filed(path: &Path, flags: &Flags) -> Result<Plan, Failure> {
    let mut plan = plan::load(path)?;
    if let Some(verify) = flags.verify() {
        plan.requirements.verify = verify;
        plan.origins.insert("verify".to_owned(), Origin::Flag);
    }
    if let Some(name) = flags.name() {
        plan.name = name.clone();
        plan.origins.insert("name".to_owned(), Origin::Flag);
    }
    Ok(plan)
}

/// Plans a request, and checks that this machine can run the plan. Notes go to standard error.
pub(super) fn prepare(request: &Request) -> Result<Prepared, Failure> {
    let machine = request.spec.topology.as_deref().map(source::load).transpose()?;
    noted(cluster::prepare(request, machine.as_ref()), request)
}

/// A prepared plan whose notes another one has, too; or the error, translated.
fn noted_quietly(
    prepared: Result<Prepared, PrepareError>,
    request: &Request,
) -> Result<Prepared, Failure> {
    prepared.map_err(|error| Keys::of(request).unprepared(error))
}

/// Prints the notes of a prepared plan, or translates the error.
fn noted(prepared: Result<Prepared, PrepareError>, request: &Request) -> Result<Prepared, Failure> {
    let keys = Keys::of(request);
    let prepared = noted_quietly(prepared, request)?;
    for note in prepared.plan.notes.iter().chain(&prepared.notes) {
        output::note(&keys.note(note));
    }
    for finding in grouped(&prepared.preflight).iter().filter(|it| it.is_bad() && !it.is_noted()) {
        output::remark("preflight", &in_flags(finding.one_line()));
    }
    Ok(prepared)
}

/// As [`prepare`], for all GPUs, whichever of them this process may see.
pub(super) fn prepare_whole(request: &Request) -> Result<Prepared, Failure> {
    let machine = request.spec.topology.as_deref().map(source::load).transpose()?;
    noted(cluster::prepare_whole(request, machine.as_ref()), request)
}

/// What a cluster is brought up for.
#[derive(Clone, Copy, Debug)]
struct Purpose {
    lifetime: Lifetime,
    /// Only to be verified: it ends when it is READY.
    proof: bool,
}

/// Starts a plan under a supervisor process, and shows the progress to READY. Returns then if the
/// cluster is [`Lifetime::Free`], otherwise when it has ended. Tells whether it `became_ready`.
async fn attend(
    prepared: Prepared,
    Purpose { lifetime, proof }: Purpose,
    mut audience: Audience<'_>,
    mut signals: Signals,
    owner: &mut Owner,
    became_ready: &mut bool,
) -> Result<Exit, Failure> {
    let plan = prepared.plan.clone();
    let program = process::own_program();
    let attended = lifetime == Lifetime::Owned;
    let start = Start { program: &program, lifetime, attended, output: None, input: None };
    service_manager::starting(&plan);
    let (mut supervisor, _) = Detached::spawn(prepared, start).await.map_err(refused)?;
    let mut verification = Verification::default();
    let mut unverified = None;
    let mut manager = ServiceManager::default();
    let mut owner_is_gone = false;
    // Begins when the cluster is asked to end.
    let mut silence: Pin<Box<dyn Future<Output = ()>>> = Box::pin(std::future::pending());
    loop {
        let report = tokio::select! {
            report = supervisor.next() => report.map_err(refused),
            verified = verification.end() => {
                match verified {
                    Ok(said) => {
                        output::status(&said);
                        supervisor.verified().await;
                    }
                    Err(failure) => {
                        unverified = Some(failure);
                        supervisor.stop(Escalation::Graceful, None).await;
                        silence = Box::pin(supervisor.silence());
                    }
                }
                continue;
            }
            number = signals.next() => {
                audience.finish();
                insist(&mut supervisor, &mut signals, number, *became_ready).await;
                silence = Box::pin(supervisor.silence());
                continue;
            }
            () = manager.beat() => continue,
            () = owner.gone() => {
                owner_is_gone = true;
                supervisor.stop(Escalation::Graceful, None).await;
                silence = Box::pin(supervisor.silence());
                continue;
            }
            () = &mut silence => {
                audience.finish();
                return Err(refused(supervisor.put_down().await));
            }
        };
        match report.inspect_err(|_| audience.finish()).map_err(|it| told_apart(it, &plan))? {
            Some(Report::State(state)) => {
                audience.state(&state);
                verification.begin_when_due(&state, &audience);
                manager.tell(&state);
            }
            Some(Report::Ready(state)) => {
                audience.finish();
                *became_ready = true;
                audience.ready(&state, lifetime)?;
                if proof {
                    supervisor.stop(Escalation::Graceful, None).await;
                    silence = Box::pin(supervisor.silence());
                    continue;
                }
                if lifetime == Lifetime::Free {
                    return Ok(Exit::Done);
                }
                manager = ServiceManager::stand_by(&state);
                memory::give_back_memory();
            }
            Some(Report::Event(record)) => audience.event(&record)?,
            Some(Report::Ended { outcome, audit, .. }) => {
                audience.finish();
                tell_stopped(&signals, *became_ready);
                audit::conclude("up", &plan, &audit);
                let by_whom = (signals.first(), *became_ready || owner_is_gone);
                let unproven = unverified.is_some();
                let verdict = verdict(outcome.clone(), by_whom, unverified, &plan);
                // A start that somebody else has ended is told by its error alone.
                if verdict.is_ok() || *became_ready || unproven {
                    audience.ended(&outcome)?;
                }
                return verdict;
            }
            Some(Report::Refused { .. }) | None => {
                audience.finish();
                tell_stopped(&signals, *became_ready);
                let as_wanted = *became_ready || owner_is_gone;
                return match (supervisor.unsaid().await, signals.first()) {
                    (Ok(outcome), signal) => {
                        verdict(outcome, (signal, as_wanted), unverified, &plan)
                    }
                    (Err(_), Some(number)) => Ok(Exit::Signal(number)),
                    (Err(UpError::Interrupted), None) => {
                        output::status("stopped");
                        Ok(Exit::INTERRUPTED)
                    }
                    (Err(error), None) => Err(refused(error)),
                };
            }
        }
    }
}

/// The failure of a start that another command or program has ended: nothing is READY.
fn taken_down(plan: &Plan) -> Failure {
    let text = format!("{} was taken down before it was READY", plan.name);
    Failure::new(Exit::Failed, anyhow::Error::msg(text))
        .hint("somebody has asked it to stop, for example by cuda-cluster down")
}

/// Tells who has interrupted a start that it is over.
fn tell_stopped(signals: &Signals, became_ready: bool) {
    if signals.first().is_some() && !became_ready {
        output::status("stopped");
    }
}

/// Forwards a signal: the first asks the supervisor to stop, the second to kill, and after
/// [`MOST_SIGNALS`] the supervisor itself is killed.
pub(super) async fn insist(
    supervisor: &mut Detached,
    signals: &mut Signals,
    number: u8,
    tell: bool,
) {
    let Some(how) = signals.escalation(number) else { return };
    if tell {
        output::status(match how {
            Escalation::Graceful if number == 2 => "stopping; Ctrl-C again kills",
            Escalation::Graceful => "stopping: asked by a signal",
            Escalation::Kill | Escalation::Abandon => "killing",
        });
    }
    supervisor.stop(how, Some(number.into())).await;
    if signals.count() > MOST_SIGNALS {
        supervisor.kill();
    }
}

/// Translates the end of a cluster into the result of the command that owned it. One that was
/// stopped without a signal to this command is a failure, unless that was `as_wanted`.
fn verdict(
    outcome: Outcome,
    (signal, as_wanted): (Option<u8>, bool),
    unverified: Option<Failure>,
    plan: &Plan,
) -> Result<Exit, Failure> {
    match (outcome, signal) {
        (Outcome::NotReady(cause), None) => Err(failed(Exit::NotReady, &cause)),
        (Outcome::Failed(cause), None) => {
            let is_program = matches!(plan.engine, EnginePlan::Command(_));
            let done = is_program && cause.exit.is_some_and(|exit| exit.is_success());
            let exit = match (cause.stalled, cause.scheduler_lost) {
                (true, _) => Exit::Stalled,
                (_, true) => Exit::SchedulerLost,
                _ => Exit::Failed,
            };
            let hint =
                "'up' is for programs that stay; cuda-cluster run -f SPEC runs one to its end";
            Err(failed(exit, &cause).maybe_hint(done.then(|| hint.to_owned())))
        }
        (Outcome::NotReady(cause) | Outcome::Failed(cause), Some(number)) => {
            output::status(&cause.to_string());
            Ok(Exit::Signal(number))
        }
        (Outcome::Stopped { .. } | Outcome::Finished, Some(number)) => Ok(Exit::Signal(number)),
        // A worker's death explains more than the verification that failed because of it.
        (Outcome::Stopped { degraded: Some(cause) }, None) => Err(failed(Exit::Failed, &cause)),
        (Outcome::Stopped { degraded: None }, None) if !as_wanted => {
            Err(unverified.unwrap_or_else(|| taken_down(plan)))
        }
        (Outcome::Stopped { degraded: None } | Outcome::Finished, None) => {
            unverified.map_or(Ok(Exit::Done), Err)
        }
    }
}

/// The verification of a cluster that is READY apart from it.
#[derive(Default)]
struct Verification(Option<Pin<Box<dyn Future<Output = Verified>>>>);

/// The result of a verification: a sentence or a failure.
type Verified = Result<String, Failure>;

impl Verification {
    /// Starts the verification as soon as the cluster is ready for it. Ends the progress display,
    /// because the verification may print.
    fn begin_when_due(&mut self, state: &ClusterState, audience: &Audience<'_>) {
        if state.state == ClusterPhase::Verifying && self.0.is_none() {
            audience.finish();
            let (name, form) = (state.name.clone(), audience.form());
            self.0 = Some(Box::pin(async move {
                let found = cluster::find(Some(&name));
                let found = found.map_err(|error| Failure::new(Exit::Failed, error))?;
                verify::verified(&found, form).await
            }));
        }
    }

    /// Waits for the result, which is returned once. Cancel-safe.
    async fn end(&mut self) -> Verified {
        let Some(verification) = &mut self.0 else { return std::future::pending().await };
        let verified = verification.await;
        // Prevents a second start: the phase may be seen once more before it changes.
        self.0 = Some(Box::pin(std::future::pending()));
        verified
    }
}

/// Prints how the running cluster of the same name differs from the requested one.
fn told_apart(failure: Failure, plan: &Plan) -> Failure {
    let Ok(found) = cluster::find(Some(&plan.name)) else { return failure };
    let Ok(running) = std::fs::read_to_string(found.paths.plan()) else { return failure };
    let Ok(running) = Plan::parse(&running) else { return failure };
    let lines = difference(&running, plan);
    match lines.is_empty() {
        true => output::status("the running cluster has this very plan"),
        false => lines.iter().for_each(|line| output::status(&format!("change: {line}"))),
    }
    failure
}

pub(super) fn refused(error: UpError) -> Failure {
    let hint = error.hint().map(in_flags);
    let exit = match error {
        UpError::RunDirectory(_)
        | UpError::Launch(_)
        | UpError::Refused { exhausted: false, .. } => Exit::Usage,
        _ => Exit::Failed,
    };
    Failure::new(exit, error).maybe_hint(hint)
}

fn failed(exit: Exit, cause: &Cause) -> Failure {
    let what = if exit == Exit::NotReady { "the cluster is not READY in time" } else { "" };
    let text = if what.is_empty() { cause.to_string() } else { format!("{what}: {cause}") };
    Failure::new(exit, anyhow::anyhow!(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_brings_up_a_program_that_ends_well_is_told_how_to_run_it() {
        let hint = |engine: &str, code: i32| {
            let text = format!("version: 1\nengine: {engine}\n");
            let request = Request::of(crate::spec::parse(&text, "test").expect("right"));
            let machine = source::load("dgx-1-v100").expect("built in");
            let plan = crate::plan::plan(&machine, &request.expect("right"), &Default::default());
            let exit = Some(crate::wire::process::Exit::status(code));
            let cause = Cause { exit, ..Cause::of_cluster("") };
            let outcome = Outcome::Failed(cause);
            let failure =
                verdict(outcome, (None, true), None, &plan.expect("a plan")).expect_err("failed");
            failure.hint.unwrap_or_default()
        };
        assert!(hint("command", 0).contains("run -f SPEC"), "{}", hint("command", 0));
        assert_eq!((hint("command", 1), hint("dask", 0)), (String::new(), String::new()));
    }
}
