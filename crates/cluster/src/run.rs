//! Runs a program to its end, once on each GPU: what `cuda-cluster run` does.
//!
//! *Invariant:* when a run has ended, nothing of it is left.

use std::ffi::OsString;
use std::io::{self, PipeReader};

use super::detached::{Detached, Lifetime, OutputForm, Report, Start};
use super::failure::not_ready;
use super::{Builder, LaunchFailure, Prepared, UpError};
use cuda_cluster_machine::os::argument;
use cuda_cluster_machine::os::run_directory::forget_failed_start;
use cuda_cluster_model::plan::EngineKind;
use cuda_cluster_supervise::{ClusterState, Outcome};
use cuda_cluster_wire::output::{self, Source};
use cuda_cluster_wire::process::Exit;

/// What a rank wrote.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Written<'a> {
    /// Which rank, and whether to its standard output or its standard error.
    pub source: Source,
    /// Its bytes; empty at the end of the stream.
    pub bytes: &'a [u8],
}

/// How a run ended.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RunEnd {
    /// [`Outcome::Finished`] if every rank ended with status 0; otherwise the first failure, which
    /// stopped the others.
    pub outcome: Outcome,
    /// How each rank ended, in rank order; `None` if it was not started.
    pub exits: Vec<Option<Exit>>,
}

impl Builder {
    /// Runs a program once on each GPU, bound and supervised, until all have ended or one has
    /// failed. `written` gets what they write, on a thread of its own; while it does not return,
    /// ranks that write wait. If this process ends or the future is dropped, so does the run.
    ///
    /// # Errors
    /// If there is no plan, or the run could not start. A rank that fails is no error: see
    /// [`RunEnd`].
    pub async fn run(
        self,
        command: impl IntoIterator<Item = impl Into<OsString>>,
        written: impl FnMut(Written<'_>) + Send + 'static,
    ) -> Result<RunEnd, LaunchFailure> {
        let argv: Vec<String> =
            command.into_iter().map(|word| argument::encoded(&word.into())).collect();
        let this = self.set("engine", EngineKind::Command).set("command.argv", argv);
        let (prepared, program, is_nameless) = this.prepared_run()?;
        let name = prepared.plan.name.clone();
        let prepared = Prepared { to_completion: true, ..prepared };
        let names: Vec<String> =
            prepared.plan.workers.iter().map(|worker| worker.name.clone()).collect();
        let form = OutputForm { separate_streams: true };
        let lifetime = Lifetime::Owned;
        let output = Some(form);
        let start = Start { program: &program, lifetime, attended: true, output, input: None };
        let (mut supervisor, pipe) = Detached::spawn(prepared, start).await?;
        let reader = std::thread::Builder::new()
            .name("output".to_owned())
            .spawn(move || pipe.map_or(Ok(()), |pipe| relay(pipe, written)))
            .map_err(UpError::Runtime)?;
        let ended = loop {
            match supervisor.next().await? {
                Some(Report::Ended { outcome, state, .. }) => break (outcome, Some(state)),
                Some(_) => {}
                None => break (supervisor.unsaid().await?, None),
            }
        };
        supervisor.end().await;
        // The pipe ends with the guardian, and a closure that panics is the caller's bug.
        let _ = tokio::task::spawn_blocking(move || reader.join()).await;
        if is_nameless {
            let forget = move || forget_failed_start(&name);
            let _ = tokio::task::spawn_blocking(forget).await;
        }
        let (outcome, state) = ended;
        match (outcome, state) {
            (outcome @ Outcome::NotReady(_), _) => Err(not_ready(outcome)),
            (outcome, state) => Ok(RunEnd { outcome, exits: exits(&names, state.as_deref()) }),
        }
    }
}

fn relay(mut pipe: PipeReader, mut written: impl FnMut(Written<'_>)) -> io::Result<()> {
    let mut bytes = Vec::new();
    while let Some(source) = output::read(&mut pipe, &mut bytes)? {
        written(Written { source, bytes: &bytes });
    }
    Ok(())
}

fn exits(names: &[String], state: Option<&ClusterState>) -> Vec<Option<Exit>> {
    let exit = |name: &String| {
        let worker = state?.workers.iter().find(|worker| worker.name == *name)?;
        worker.last_exit.as_ref().map(|last| last.exit)
    };
    names.iter().map(exit).collect()
}
