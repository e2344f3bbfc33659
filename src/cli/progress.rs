//! Progress towards READY on a terminal: one line with the number of READY workers and the state of
//! the others.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::sanitize::sanitized;
use super::screen;
use crate::plan::{EnginePlan, Plan};
use crate::supervise::{ClusterState, ProcessPhase};

/// A line on standard error that disappears at the end; nothing is shown if standard error is no
/// terminal.
pub(super) struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// Starts the display.
    pub(super) fn new(plan: &Plan) -> Self {
        let hosts = match &plan.engine {
            EnginePlan::Dask(dask) => dask.hosts.len(),
            EnginePlan::Native(_) | EnginePlan::Command(_) => 0,
        };
        let workers = (plan.workers.len() + hosts) as u64;
        let bar = ProgressBar::with_draw_target(Some(workers), screen::progress());
        if let Ok(style) = ProgressStyle::with_template("{spinner} {pos}/{len} READY  {wide_msg}") {
            bar.set_style(style);
        }
        // The tick needs a thread, and indicatif panics if it can't start one.
        if !bar.is_hidden() && std::thread::Builder::new().spawn(|| ()).is_ok() {
            bar.enable_steady_tick(Duration::from_millis(120));
        }
        Self { bar }
    }

    /// Shows a state.
    pub(super) fn show(&mut self, state: &ClusterState) {
        let counted = state.workers.iter().chain(&state.hosts);
        let ready = counted.filter(|one| one.state == ProcessPhase::Ready).count();
        self.bar.set_position(ready as u64);
        let all = state.processes();
        let waiting = all.filter(|process| process.state == ProcessPhase::Starting);
        let steps = waiting.map(|process| match &process.step {
            Some(step) => format!("{}: {step}", process.name),
            None => process.name.clone(),
        });
        let message = steps.take(3).collect::<Vec<_>>().join(", ");
        let message = sanitized(message.as_bytes());
        self.bar.set_message(String::from_utf8_lossy(&message).into_owned());
    }

    /// Removes the line.
    pub(super) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

/// Progress of a measurement; nothing is shown if standard error is no terminal.
pub(super) struct Measuring {
    bar: ProgressBar,
}

impl Measuring {
    /// Starts the display; `quiet` shows nothing.
    pub(super) fn new(all: u64, quiet: bool) -> Self {
        let target = if quiet { ProgressDrawTarget::hidden() } else { screen::progress() };
        let bar = ProgressBar::with_draw_target(Some(all), target);
        if let Ok(style) =
            ProgressStyle::with_template("{pos}/{len} measured, about {eta} left  {wide_msg}")
        {
            bar.set_style(style);
        }
        Self { bar }
    }

    /// Whether anybody sees it.
    pub(super) fn is_seen(&self) -> bool {
        !self.bar.is_hidden()
    }

    /// Shows that the rest is looked at, but not measured.
    pub(super) fn hurry(&self) {
        self.bar.set_message("the time is over: looking at the lanes of the others");
    }

    /// Shows the connections being measured.
    pub(super) fn show(&self, ways: &[(String, String)]) {
        let names: Vec<String> =
            ways.iter().take(3).map(|(from, to)| format!("{from} to {to}")).collect();
        self.bar.set_message(names.join(", "));
    }

    /// Counts measured connections.
    pub(super) fn done(&self, ways: u64) {
        self.bar.inc(ways);
    }
}

impl Drop for Measuring {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
