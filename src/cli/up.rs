//! `up`: plans, starts, shows the way to READY, and stays until the cluster is taken down.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::Instant;

use clap::Args;
use tokio::sync::watch;

use super::failure::{Exit, Failure};
use super::flags::{self, Asked, Flags};
use super::progress::Progress;
use super::signals::Signals;
use super::{output, plan, reach, service_manager, source, verify, workers};
use crate::cluster::{self, Detached, Lifetime, PrepareError, Prepared, Report, UpError};
use crate::os::{rest, session};
use crate::plan::{EngineKind, Origin, Plan, difference};
use crate::spec::Request;
use crate::supervise::{Cause, ClusterPhase, ClusterState, Escalation, Outcome, Supervisor};

/// Arguments of `up`.
#[derive(Args, Debug)]
pub(super) struct Arguments {
    #[command(flatten)]
    asked: Asked,
    /// Return when the cluster is READY, and leave it running
    #[arg(long)]
    detach: bool,
    /// Run this plan, as 'plan -o yaml' or '-o json' printed it ('-' for standard input); beside it
    /// only --name and --verify have a say
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["file", "topology", "simulate", "strict"],
        conflicts_with_all = flags::deciding(),
    )]
    plan: Option<PathBuf>,
    /// Show the plan that would run, and start nothing
    #[arg(long)]
    dry_run: bool,
}

/// Brings a cluster up.
pub(super) fn run(arguments: &Arguments) -> Result<Exit, Failure> {
    let (mut prepared, verify) = match &arguments.plan {
        Some(path) => {
            let plan = filed(path, &arguments.asked.flags)?;
            if arguments.dry_run {
                return plan::show(&plan);
            }
            (noted(cluster::prepare_plan(plan))?, arguments.asked.flags.verify())
        }
        None => {
            let request = arguments.asked.request()?;
            if arguments.dry_run {
                return plan::show(&plan::planned(&request)?);
            }
            (prepare(&request)?, request.spec.dask.verify == Some(true))
        }
    };
    // Dask's workers prove their ways themselves.
    let native = prepared.plan.engine == EngineKind::Native;
    prepared.to_be_verified = native && verify;
    if arguments.detach { detached(&prepared) } else { foreground(&prepared) }
}

/// Reads a plan, to be run under the name that is asked for, if one is.
fn filed(path: &Path, flags: &Flags) -> Result<Plan, Failure> {
    let mut plan = plan::load(path)?;
    if plan.engine == EngineKind::Dask && flags.verify() {
        let error = anyhow::anyhow!("--verify is part of a plan of the Dask engine");
        return Err(Failure::new(Exit::Usage, error).hint("plan it with --verify"));
    }
    if let Some(name) = flags.name() {
        plan.name = name.clone();
        plan.origins.insert("name".to_owned(), Origin::Flag);
    }
    Ok(plan)
}

/// Plans a request, and makes sure that this machine can run the plan. Notes go to standard error.
pub(super) fn prepare(request: &Request) -> Result<Prepared, Failure> {
    let machine = request.spec.topology.as_deref().map(source::load).transpose()?;
    noted(cluster::prepare(request, machine.as_ref()))
}

/// Says what is worth knowing of a prepared plan, or why there is none.
fn noted(prepared: Result<Prepared, PrepareError>) -> Result<Prepared, Failure> {
    let prepared = prepared.map_err(|error| {
        let hint = error.hint();
        Failure::new(Exit::Usage, error).maybe_hint(hint)
    })?;
    for note in prepared.plan.notes.iter().chain(&prepared.notes) {
        output::note(note);
    }
    Ok(prepared)
}

/// Starts a plan and stays until the cluster has ended.
fn foreground(prepared: &Prepared) -> Result<Exit, Failure> {
    let plan = &prepared.plan;
    reach::runtime()?.block_on(async {
        let began = Instant::now();
        let mut signals = Signals::new()?;
        let supervisor = cluster::start(prepared, &session::own_program())
            .await
            .map_err(|error| told_apart(refused(error), plan))?;
        let mut progress = Progress::new(plan);
        let mut verification = Verification::default();
        let mut state = supervisor.state();
        loop {
            tokio::select! {
                changed = state.changed() => {
                    let now = state.borrow_and_update().clone();
                    progress.show(&now);
                    verification.begin_when_due(&now, &progress);
                    if now.ready_after_ms.is_some() || changed.is_err() {
                        break;
                    }
                }
                verified = verification.end() => match verified {
                    Ok(said) => {
                        output::status(&said);
                        supervisor.verified();
                    }
                    Err(failure) => {
                        supervisor.stop(Escalation::Graceful);
                        // A worker's death tells more than the verification that it broke.
                        return match supervisor.wait().await {
                            Outcome::Failed(cause) => Err(failed(Exit::Failed, &cause)),
                            _ => Err(failure),
                        };
                    }
                },
                ended = supervisor.ready() => {
                    if ended.is_err() {
                        break;
                    }
                }
                number = signals.next() => supervisor.stop(signals.escalation(number)),
            }
        }
        let now = state.borrow_and_update().clone();
        progress.finish();
        if now.ready_after_ms.is_some() && supervisor.ready().await.is_ok() {
            output::print(&workers::table(&now, plan, false))?;
            announce(&now, began);
            output::status("Ctrl-C takes it down.");
            service_manager::stand_by(supervisor.state());
            rest::give_back_memory();
        }
        attend(supervisor, state, signals).await
    })
}

/// Stays with a cluster until it has ended, and tells what changes.
async fn attend(
    supervisor: Supervisor,
    mut state: watch::Receiver<ClusterState>,
    mut signals: Signals,
) -> Result<Exit, Failure> {
    let mut events = supervisor.events();
    loop {
        tokio::select! {
            changed = state.changed() => {
                if changed.is_err() || state.borrow_and_update().state.is_end() {
                    break;
                }
            }
            number = signals.next() => {
                let how = signals.escalation(number);
                match how {
                    Escalation::Graceful => output::status("stopping; Ctrl-C again kills"),
                    Escalation::Kill | Escalation::Abandon => output::status("killing"),
                }
                supervisor.stop(how);
            }
            Ok(record) = events.recv() => {
                let ready = state.borrow().ready_after_ms.is_some();
                if let Some(line) = workers::remark(&record).filter(|_| ready) {
                    output::status(&line);
                }
            }
        }
    }
    match (supervisor.wait().await, signals.first()) {
        (Outcome::NotReady(cause), _) => Err(failed(Exit::NotReady, &cause)),
        (Outcome::Failed(cause), _) => Err(failed(Exit::Failed, &cause)),
        (Outcome::Stopped { .. } | Outcome::Finished, Some(number)) => Ok(Exit::Signal(number)),
        (Outcome::Stopped { degraded: Some(cause) }, None) => Err(failed(Exit::Failed, &cause)),
        (Outcome::Stopped { degraded: None } | Outcome::Finished, None) => Ok(Exit::Done),
    }
}

/// Starts a plan under a supervisor of its own, and returns when it is READY.
fn detached(prepared: &Prepared) -> Result<Exit, Failure> {
    let plan = &prepared.plan;
    reach::runtime()?.block_on(async {
        let began = Instant::now();
        let mut signals = Signals::new()?;
        let mut supervisor =
            Detached::spawn(prepared.clone(), Lifetime::Free, &session::own_program())
                .await
                .map_err(refused)?;
        let mut progress = Progress::new(plan);
        let mut last = None;
        let mut verification = Verification::default();
        let mut unverified = None;
        loop {
            let report = tokio::select! {
                report = supervisor.next() => report,
                verified = verification.end() => {
                    match verified {
                        Ok(said) => {
                            output::status(&said);
                            // One that has ended says so in its reports.
                            let _ = supervisor.verified().await;
                        }
                        Err(failure) => {
                            unverified = Some(failure);
                            supervisor.let_go();
                        }
                    }
                    continue;
                }
                number = signals.next() => {
                    // The supervisor tears everything down and then says that it has ended.
                    signals.escalation(number);
                    if let Some(pid) = supervisor.pid() {
                        session::terminate(pid);
                    }
                    continue;
                }
            };
            let report = report.inspect_err(|_| progress.finish()).map_err(refused);
            match report.map_err(|failure| told_apart(failure, plan))? {
                Some(Report::State(state)) => {
                    progress.show(&state);
                    verification.begin_when_due(&state, &progress);
                    last = Some(state);
                }
                Some(Report::Ended { late, cause }) => {
                    progress.finish();
                    return match (cause, signals.first()) {
                        (_, Some(number)) => Ok(Exit::Signal(number)),
                        (Some(cause), None) if late => Err(failed(Exit::NotReady, &cause)),
                        // A worker's death tells more than the verification that it broke.
                        (Some(cause), None) => Err(failed(Exit::Failed, &cause)),
                        (None, None) => unverified.map_or(Ok(Exit::Done), Err),
                    };
                }
                Some(Report::Refused { .. }) | None => break,
            }
        }
        progress.finish();
        let Some(state) = last.filter(|state| state.ready_after_ms.is_some()) else {
            let error = anyhow::anyhow!("the supervisor ended before the cluster was READY");
            return Err(Failure::new(Exit::Failed, error));
        };
        output::print(&workers::table(&state, plan, false))?;
        announce(&state, began);
        output::status(&format!("take it down with: cuda-cluster down {}", plan.name));
        Ok(Exit::Done)
    })
}

/// The verification of a cluster that is READY but for it.
#[derive(Default)]
struct Verification(Option<Pin<Box<dyn Future<Output = Verified>>>>);

/// What a verification found, in a sentence.
type Verified = Result<String, Failure>;

impl Verification {
    /// Begins when the cluster has come so far. It may print, and so the progress ends.
    fn begin_when_due(&mut self, state: &ClusterState, progress: &Progress) {
        if state.state == ClusterPhase::Verifying && self.0.is_none() {
            progress.finish();
            let name = state.name.clone();
            self.0 = Some(Box::pin(async move {
                let found = cluster::find(Some(&name));
                let found = found.map_err(|error| Failure::new(Exit::Failed, error))?;
                verify::verified(&found).await
            }));
        }
    }

    /// Waits for its end, which comes once. Dropping the future loses nothing.
    async fn end(&mut self) -> Verified {
        let Some(verification) = &mut self.0 else { return std::future::pending().await };
        let verified = verification.await;
        // Not begun again: the phase may be seen once more before it changes.
        self.0 = Some(Box::pin(std::future::pending()));
        verified
    }
}

/// Where to reach it, and a line: READY, after how long, and where the time went.
fn announce(state: &ClusterState, began: Instant) {
    let slowest = state.workers.iter().max_by_key(|worker| worker.timings.ready_ms);
    let scheduler = state.scheduler.as_ref().and_then(|process| process.timings.ready_ms);
    let mut parts = Vec::new();
    if let Some(ms) = scheduler {
        parts.push(format!("scheduler {ms} ms"));
    }
    if let Some((worker, ms)) = slowest.and_then(|w| Some((w, w.timings.ready_ms?))) {
        let bound = worker.timings.bound_ms.unwrap_or(0);
        parts.push(format!("slowest worker {} {ms} ms, {bound} of it until bound", worker.name));
    }
    let simulated = if state.simulated { ", simulated GPUs" } else { "" };
    workers::addresses(state).iter().for_each(|line| output::status(line));
    output::status(&format!(
        "READY: {} in {:.2} s ({}); {} engine{simulated}, {}",
        state.name,
        began.elapsed().as_secs_f64(),
        parts.join("; "),
        state.engine,
        state.run_directory.display(),
    ));
}

/// Says how the running cluster of a name differs from the one that was asked for now.
fn told_apart(failure: Failure, plan: &Plan) -> Failure {
    let Ok(found) = cluster::find(Some(&plan.name)) else { return failure };
    let Ok(running) = std::fs::read(found.paths.plan()) else { return failure };
    let Ok(running) = serde_json::from_slice::<Plan>(&running) else { return failure };
    let lines = difference(&running, plan);
    match lines.is_empty() {
        true => output::status("the running cluster has this very plan"),
        false => lines.iter().for_each(|line| output::status(&format!("change: {line}"))),
    }
    failure
}

pub(super) fn refused(error: UpError) -> Failure {
    let hint = error.hint();
    let exit = match error {
        UpError::RunDirectory(_) | UpError::Launch(_) | UpError::Refused { .. } => Exit::Usage,
        _ => Exit::Failed,
    };
    Failure::new(exit, error).maybe_hint(hint)
}

fn failed(exit: Exit, cause: &Cause) -> Failure {
    let what = if exit == Exit::NotReady { "the cluster is not READY in time" } else { "" };
    let text = if what.is_empty() { cause.to_string() } else { format!("{what}: {cause}") };
    Failure::new(exit, anyhow::anyhow!(text))
}
