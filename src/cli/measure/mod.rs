//! The flags of `bench links` and `verify`, and the progress of their measurements.
//!
//! `cluster::measure` measures, `wire::links` judges, and [`outcome`] shows the results.
//!
//! *Invariant:* an error names what was asked for as it was typed.

mod against;
mod between;
mod outcome;

use std::path::Path;
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::failure::{Exit, Failure};
use super::flags::keys::in_flags;
use super::flags::positive;
use super::output;
use super::progress::Measuring;
use crate::cluster::MeasureError;
use crate::cluster::measure::{self, Step, Subject, Wanted};
use crate::probe::ProbeError;
use crate::units::Span;
pub(super) use against::Against;
pub(super) use outcome::{Form, Outcome};

/// A measurement that may take this long is announced, unless there is a progress bar.
const LONG: Duration = Duration::from_secs(10);

/// What to measure: connections and kinds of memory.
#[derive(Args, Clone, Debug)]
pub(super) struct Ways {
    /// Measure only connections from this worker
    #[arg(long, value_name = "WORKER")]
    from: Option<String>,
    /// Measure only connections to this worker
    #[arg(long, value_name = "WORKER")]
    to: Option<String>,
    /// Memory to measure [default: host; 'verify' also measures GPUs if there are any, under Dask
    /// those that RMM reaches]
    #[arg(long, value_enum)]
    memory: Option<Memory>,
    /// Number of rounds; the median is reported
    #[arg(
        long,
        default_value_t = measure::ROUNDS,
        value_name = "COUNT",
        value_parser = positive::<u32>
    )]
    rounds: u32,
    /// Time limit per connection and size; slow lanes get fewer measurements
    #[arg(long, default_value_t = Span(measure::BUDGET), value_name = "SPAN")]
    budget: Span,
    /// Time limit for all connections: near and distant peers of all workers come first, and what
    /// is left out is said ('verify' still looks at its lanes) [default: 20s; with --strict as long
    /// as it takes]
    #[arg(long, value_name = "SPAN")]
    within: Option<Span>,
    /// Measure every connection, however long it takes; 'verify' also every one between hosts,
    /// instead of each host with each other and each NIC once
    #[arg(long, conflicts_with = "within")]
    all: bool,
    /// CPUs for the native engine's UCX threads of sender and receiver, such as 0,1
    /// [default: for latencies two different ones of theirs, otherwise all of theirs]
    #[arg(long, value_name = "CPU,CPU", value_parser = parse_cpus)]
    pin: Option<(u32, u32)>,
}

fn parse_cpus(text: &str) -> Result<(u32, u32), String> {
    let wrong = || format!("{text:?} is not two CPU numbers like 0,1");
    let (sender, receiver) = text.split_once(',').ok_or_else(wrong)?;
    Ok((sender.parse().map_err(|_| wrong())?, receiver.parse().map_err(|_| wrong())?))
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Memory {
    /// Host memory
    Host,
    /// Device memory, or that of simulated devices
    Device,
    /// Both, one after the other
    Both,
}

impl From<Memory> for measure::Memory {
    fn from(memory: Memory) -> Self {
        match memory {
            Memory::Host => Self::Host,
            Memory::Device => Self::Device,
            Memory::Both => Self::Both,
        }
    }
}

impl Ways {
    /// Whether every connection is asked for.
    pub(super) fn are_all(&self) -> bool {
        self.all
    }

    /// What is asked for, in addition to the rest of a verification; `every` connection if nobody
    /// limits the time.
    pub(super) fn wanted(&self, subject: &Subject, every: bool) -> Result<Wanted, Failure> {
        if self.pin.is_some() && subject.is_dask() {
            let error = anyhow::anyhow!("--pin: Dask's workers measure on their event loops");
            let failure = Failure::new(Exit::Usage, error);
            return Err(failure.hint("leave it out: it moves the native engine's UCX threads"));
        }
        let is_there = |cpu: &u32| Path::new(&format!("/sys/devices/system/cpu/cpu{cpu}")).exists();
        if let Some((sender, receiver)) = self.pin
            && let Some(cpu) = [sender, receiver].into_iter().find(|cpu| !is_there(cpu))
        {
            let error = anyhow::anyhow!("--pin: this machine has no CPU {cpu}");
            return Err(Failure::new(Exit::Usage, error));
        }
        Ok(Wanted {
            from: self.from.clone(),
            to: self.to.clone(),
            memory: self.memory.map(Into::into),
            rounds: self.rounds,
            budget: self.budget.0,
            pin: self.pin,
            within: match &self.within {
                Some(within) => Some(within.0),
                None => (!self.all && !every).then_some(measure::WITHIN),
            },
            ..Wanted::verification(subject)
        })
    }
}

/// Measures, and shows the progress, unless another display is on the screen (`quiet`). What is
/// measured is in the outcome at once.
pub(super) async fn measured(
    wanted: &Wanted,
    subject: &Subject,
    quiet: bool,
    outcome: &mut Outcome,
) -> Result<(), Failure> {
    let mut progress = None;
    let mut tell = |step: Step<'_>| match (step, &progress) {
        (Step::Begins { measurements, longest }, _) => {
            let bar = Measuring::new(measurements as u64, quiet);
            if longest >= LONG && !quiet && !bar.is_seen() {
                let at_most = Span(longest);
                output::note(&format!(
                    "{measurements} measurements, which may take {at_most}; --within, --from and \
                     --to shorten this"
                ));
            }
            progress = Some(bar);
        }
        (Step::Measures(ways), Some(progress)) => progress.show(ways),
        (Step::Done(ways), Some(progress)) => progress.done(ways as u64),
        (Step::Hurries, Some(progress)) => progress.hurry(),
        (Step::Measures(_) | Step::Done(_) | Step::Hurries, None) => {}
    };
    let done = wanted.measure(subject, &mut tell, &mut outcome.measured).await;
    done.map_err(unmeasured)?;
    let left_out = outcome.measured.left_out;
    if let Some(within) = wanted.within.filter(|_| left_out > 0) {
        let rest = if wanted.lanes_of_all { ": only their lanes were looked at" } else { "" };
        outcome.measured.notes.push(format!(
            "{left_out} pairs have no figure, because {} were over{rest}; --all measures every one",
            Span(within)
        ));
    }
    Ok(())
}

/// Measures pairs with workers of other machines that have joined, and shows the progress.
pub(super) async fn measured_between(
    wanted: &Wanted,
    subject: &Subject,
    every: bool,
    outcome: &mut Outcome,
) -> Result<(), Failure> {
    let mut progress = None;
    let mut tell = |done: usize, all: usize| {
        let bar = progress.get_or_insert_with(|| Measuring::new(all as u64, false));
        bar.done(u64::from(done > 0));
    };
    let found = wanted.between(subject, every, &mut tell).await.map_err(unmeasured)?;
    outcome.measured.between = found;
    Ok(())
}

/// Why a cluster can't be measured.
pub(super) fn unmeasured(error: MeasureError) -> Failure {
    let exit = match error {
        MeasureError::Engine { .. }
        | MeasureError::NoWorker { .. }
        | MeasureError::Itself { .. }
        | MeasureError::Probe(ProbeError::Limit(_)) => Exit::Usage,
        _ => Exit::Failed,
    };
    let hint = error.hint().map(in_flags);
    Failure::new(exit, error).maybe_hint(hint)
}
