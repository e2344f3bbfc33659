//! Who follows an `up`: a person at a terminal, or a program that reads JSON lines.
//!
//! Does not decide what happens; `up` does.
//!
//! *Invariant:* a program is told on standard output of READY, of each event after it, and of the
//! end or the failure, which is the last line; and before, of its place among several.

use std::time::Instant;

use serde::Serialize;

use crate::cli::failure::{Exit, Failure};
use crate::cli::gathering::Place;
use crate::cli::output::Form;
use crate::cli::progress::Progress;
use crate::cli::{output, workers};
use crate::cluster::Lifetime;
use crate::cluster::hosts::Said;
use crate::dashboard::Figures;
use crate::plan::Plan;
use crate::supervise::state::JoinedPhase;
use crate::supervise::{ClusterState, Outcome, Record};

/// Who follows.
pub(super) enum Audience<'a> {
    /// A person, who is shown the way to READY.
    Person {
        plan: &'a Plan,
        progress: Progress,
        began: Instant,
        ready: bool,
        /// Whether to show where the time went.
        verbose: bool,
    },
    /// A program.
    Program,
    /// The machine with the scheduler, which this one's workers join.
    Elsewhere,
    /// Nobody: what is brought up is a step of something else, which has standard output.
    Nobody,
}

/// What a program is told, a line each.
#[derive(Debug, Serialize)]
struct Line<'a> {
    version: u32,
    #[serde(flatten)]
    report: Report<'a>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case", tag = "report")]
enum Report<'a> {
    /// It is one of several that make one cluster; first of all.
    Gathered {
        #[serde(flatten)]
        place: &'a Place,
    },
    /// It is READY for the first time.
    Ready { state: &'a ClusterState },
    /// Something happened.
    Event { event: &'a Record },
    /// It has ended, and nothing of it is left.
    Ended { outcome: &'a Outcome },
    /// There is no cluster.
    Failed { message: String, causes: Vec<String>, hint: Option<&'a str>, exit_code: u8 },
}

fn tell(report: Report<'_>) -> Result<(), Failure> {
    let line = serde_json::to_string(&Line { version: 1, report });
    output::print(&(line.map_err(|error| Failure::new(Exit::Failed, error))? + "\n"))
}

/// Tells a program which of several processes this is.
pub(super) fn tell_place(place: &Place) -> Result<(), Failure> {
    tell(Report::Gathered { place })
}

/// Writes a line for the machine with the scheduler.
pub(super) fn tell_elsewhere(said: &Said) -> Result<(), Failure> {
    let line = serde_json::to_string(said).map_err(|error| Failure::new(Exit::Failed, error))?;
    output::print(&(line + "\n"))
}

/// What has happened, and its causes.
pub(super) fn in_parts(error: &anyhow::Error) -> (String, Vec<String>) {
    (error.to_string(), error.chain().skip(1).map(ToString::to_string).collect())
}

/// Tells a program why there is no cluster; a person reads that on standard error.
pub(super) fn tell_failure(failure: &Failure) {
    let (message, causes) = in_parts(&failure.error);
    let report = Report::Failed {
        message,
        causes,
        hint: failure.hint.as_deref(),
        exit_code: failure.exit.code(),
    };
    // A program that has gone need not be told.
    let _ = tell(report);
}

impl<'a> Audience<'a> {
    /// The form of what goes to standard output.
    pub(super) fn form(&self) -> Form {
        match self {
            Self::Person { .. } => Form::Table,
            Self::Program | Self::Elsewhere | Self::Nobody => Form::Json,
        }
    }

    /// A person, from now on.
    pub(super) fn person(plan: &'a Plan, verbose: bool) -> Self {
        let (progress, began) = (Progress::new(plan), Instant::now());
        Self::Person { plan, progress, began, ready: false, verbose }
    }

    fn tell(&self, report: Report<'_>) -> Result<(), Failure> {
        match self {
            Self::Program => tell(report),
            Self::Person { .. } | Self::Elsewhere | Self::Nobody => Ok(()),
        }
    }

    /// Shows how far the cluster is.
    pub(super) fn state(&mut self, state: &ClusterState) {
        if let Self::Person { progress, .. } = self {
            progress.show(state);
        }
    }

    /// Takes the progress away, before something else is shown.
    pub(super) fn finish(&self) {
        if let Self::Person { progress, .. } = self {
            progress.finish();
        }
    }

    /// Tells of READY, and what ends the cluster.
    pub(super) fn ready(
        &mut self,
        state: &ClusterState,
        lifetime: Lifetime,
    ) -> Result<(), Failure> {
        let (plan, began, ready, verbose) = match self {
            Self::Person { plan, began, ready, verbose, .. } => (plan, began, ready, verbose),
            Self::Elsewhere => return tell_elsewhere(&Said::Ready),
            Self::Program | Self::Nobody => return self.tell(Report::Ready { state }),
        };
        *ready = true;
        output::print(&workers::table(state, plan, &Figures::default(), false))?;
        for line in workers::addresses(state).iter().chain(&workers::notes(state)) {
            output::status(line);
        }
        if let Some(some) = workers::connections(state) {
            output::status(&format!("note: {some}"));
        }
        if *verbose {
            output::status(&timings(state, *began));
        }
        let count = |many: usize, one: &str| match many {
            1 => format!("1 {one}"),
            several => format!("{several} {one}s"),
        };
        let mut workers = count(state.workers.len(), "worker");
        if !state.hosts.is_empty() {
            let there = state.joined.iter().filter(|one| one.state == JoinedPhase::Ready);
            let there = count(there.count(), "worker");
            let hosts = count(state.hosts.len(), "other machine");
            workers.push_str(&format!(" here and {there} of {hosts}"));
        }
        let simulated = if state.simulated { ", simulated GPUs" } else { "" };
        let end = match lifetime {
            Lifetime::Free => format!("stop it with: cuda-cluster down {}", plan.name),
            Lifetime::Owned => "Ctrl-C stops it".to_owned(),
        };
        let (name, engine) = (&state.name, state.engine);
        output::status(&format!("READY: {name}, {workers}, {engine} engine{simulated}; {end}"));
        Ok(())
    }

    /// Tells what happened: a person what is worth knowing of a running cluster, a program all.
    pub(super) fn event(&self, event: &Record) -> Result<(), Failure> {
        match self {
            Self::Program | Self::Elsewhere | Self::Nobody => self.tell(Report::Event { event }),
            Self::Person { ready, .. } => {
                if let Some(line) = workers::remark(event).filter(|_| *ready) {
                    output::status(&line);
                }
                Ok(())
            }
        }
    }

    /// Tells a program that a cluster which was READY has ended; why it failed is told otherwise.
    pub(super) fn ended(&self, outcome: &Outcome) -> Result<(), Failure> {
        match self {
            Self::Program if outcome.is_good() => self.tell(Report::Ended { outcome }),
            Self::Elsewhere if outcome.is_good() => tell_elsewhere(&Said::Ended),
            _ => Ok(()),
        }
    }
}

/// Where the time went, and where its files are.
fn timings(state: &ClusterState, began: Instant) -> String {
    let slowest = state.workers.iter().max_by_key(|worker| worker.timings.ready_ms);
    let scheduler = state.scheduler.as_ref().and_then(|process| process.timings.ready_ms);
    let mut parts = vec![format!("{:.2} s", began.elapsed().as_secs_f64())];
    if let Some(ms) = scheduler {
        parts.push(format!("scheduler {ms} ms"));
    }
    if let Some((worker, ms)) = slowest.and_then(|w| Some((w, w.timings.ready_ms?))) {
        let bound = worker.timings.bound_ms.unwrap_or(0);
        parts.push(format!("slowest worker {} {ms} ms, {bound} of it until bound", worker.name));
    }
    format!("start: {}; files in {}", parts.join(", "), state.run_directory.display())
}
