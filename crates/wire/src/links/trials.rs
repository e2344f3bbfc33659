//! Fits measurements into a time budget.
//!
//! *Invariant:* a measurement that was fitted measures the same connection as before.

use std::time::{Duration, Instant};

use super::{Measured, median};
use crate::native::{Measurement, Quantity, Samples};

/// Messages of a trial.
const TRIAL_PINGS: u32 = 20;

/// What measures connections between workers.
pub trait Measures {
    /// Why nothing can be measured at all.
    type Error;

    /// Runs all of these measurements at the same time. A measurement that fails has a result that
    /// says why. If not all have a result in time (see [`patience`]), this fails.
    fn measure(
        &mut self,
        all: &[Measurement],
        within: Duration,
    ) -> impl Future<Output = Result<Vec<Measured>, Self::Error>> + Send;
}

/// Longest time without results, besides that of the measurements: far beyond that in which a busy
/// machine answers, and in which a worker that is killed or blocked is noticed and reported.
const SILENCE: Duration = Duration::from_secs(30);

/// Less than any connection carries within a machine, in bytes per second.
const SLOWEST: f64 = 1e8;

/// How long to wait for measurements that fit into a budget, or for a trial of them: after that, a
/// process hangs.
pub fn patience(all: &[Measurement], budget: Duration) -> Duration {
    // At least one message and one before it, in each direction, and a trial's two rounds of two.
    let bytes: f64 = all.iter().map(|measurement| 4.0 * measurement.size as f64).sum();
    SILENCE + 4 * budget + Duration::from_secs_f64(bytes / SLOWEST)
}

/// What to do about measurements without results.
pub const SILENT_HINT: &str =
    "'cuda-cluster ps' shows which process does not answer, and 'restart' starts a worker again";

/// The connections of measurements, for an error: `gpu0 to gpu1`.
pub fn named(all: &[Measurement]) -> String {
    let ways = all.iter().map(|one| format!("{} to {}", one.from, one.to));
    ways.collect::<Vec<_>>().join(", ")
}

/// Limits each measurement to what fits a time budget, by running trials that grow until the
/// time is used up.
///
/// # Errors
/// Those of [`Measures::measure`].
pub async fn fitted<M: Measures>(
    meter: &mut M,
    all: Vec<Measurement>,
    budget: Duration,
) -> Result<Vec<Measurement>, M::Error> {
    let begin = Instant::now();
    let mut trials: Vec<Measurement> = all.iter().map(trial).collect();
    let took = loop {
        let before = begin.elapsed();
        let took = meter.measure(&trials, patience(&trials, budget)).await?;
        let spent = begin.elapsed();
        let larger: Option<Vec<Measurement>> =
            trials.iter().zip(&all).map(|(trial, full)| larger(trial, full)).collect();
        match larger.filter(|_| spent + 4 * (spent - before) < budget) {
            Some(larger) => trials = larger,
            None => break took,
        }
    };
    let left = budget.saturating_sub(begin.elapsed());
    let fitted = all.into_iter().zip(&trials).map(|(full, trial)| {
        let own = took.iter().find(|took| took.from == full.from && took.to == full.to);
        match own.map(|own| &own.result) {
            Some(Ok(samples)) => within(left, full, trial, samples),
            // The measurement itself will report why it fails.
            _ => full,
        }
    });
    Ok(fitted.collect())
}

/// A small part of a measurement, to estimate how long all of it takes.
fn trial(full: &Measurement) -> Measurement {
    match full.what {
        Quantity::Latency => Measurement {
            rounds: full.rounds.min(TRIAL_PINGS),
            warmup: full.warmup.min(1),
            ..full.clone()
        },
        Quantity::Bandwidth => {
            Measurement { messages: full.messages.min(2), rounds: 1, warmup: 1, ..full.clone() }
        }
    }
}

/// A trial four times as large; `None` if that exceeds the full measurement.
///
/// A link can be quick for two messages and stall afterwards, so a trial's rate is trusted for
/// four times as many messages, not for a thousand times as many.
fn larger(trial: &Measurement, full: &Measurement) -> Option<Measurement> {
    let grown = |now: u32, most: u32| (now < most).then(|| now.saturating_mul(4).min(most));
    match full.what {
        Quantity::Latency => {
            grown(trial.rounds, full.rounds).map(|rounds| Measurement { rounds, ..trial.clone() })
        }
        Quantity::Bandwidth => grown(trial.messages, full.messages).map(|messages| Measurement {
            messages,
            warmup: 0,
            ..trial.clone()
        }),
    }
}

/// As much of a measurement as fits into a time, judged by its trial; at least one round.
fn within(budget: Duration, full: Measurement, trial: &Measurement, took: &Samples) -> Measurement {
    let Some(round_ns) = median(&took.rounds_ns) else { return full };
    let message_ns = round_ns / f64::from(trial.messages.max(1));
    let affordable = budget.as_nanos() as f64 / message_ns;
    let rounds = f64::from(full.rounds.saturating_add(full.warmup));
    if rounds * f64::from(full.messages) <= affordable {
        return full;
    }
    let whole = |number: f64, most: u32| {
        // A float is cast to the nearest number of the type.
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        (number as u32).clamp(1, most.max(1))
    };
    let messages = whole(affordable / rounds, full.messages);
    let rounds = affordable / f64::from(messages);
    let warmup = full.warmup.min(whole(rounds / 10.0, u32::MAX));
    let rounds = whole(rounds - f64::from(warmup), full.rounds);
    Measurement { messages, rounds, warmup, ..full }
}

#[cfg(test)]
mod tests {
    use super::super::{ping, stream};
    use super::*;
    use crate::native::Mapped;
    use crate::peer::MemoryKind;

    #[test]
    fn trials_grow_up_to_what_is_wanted() {
        let full = stream("a", "b", MemoryKind::Host, 1 << 20, 7);
        let trials = std::iter::successors(Some(trial(&full)), |trial| larger(trial, &full));
        assert_eq!(trials.map(|trial| trial.messages).collect::<Vec<_>>(), [2, 8, 32, 64]);
        let full = ping("a", "b", MemoryKind::Host);
        let trials = std::iter::successors(Some(trial(&full)), |trial| larger(trial, &full));
        assert_eq!(trials.map(|trial| trial.rounds).collect::<Vec<_>>(), [20, 80, 320, 1280, 2000]);
    }

    #[test]
    fn what_is_measured_fits_the_time_that_there_is() {
        let budget = Duration::from_secs(1);
        let fitted = |full: Measurement, message_ns: u64| {
            let trial = trial(&full);
            let rounds_ns = vec![message_ns * u64::from(trial.messages); trial.rounds as usize];
            let (lanes, mapped) = (vec![], Mapped::NotTried);
            within(budget, full, &trial, &Samples { rounds_ns, lanes, protocol: None, mapped })
        };
        let stream = || stream("a", "b", MemoryKind::Host, 1 << 20, 7);
        let ping = || ping("a", "b", MemoryKind::Host);
        assert_eq!(fitted(stream(), 100_000), stream(), "10 GB/s");
        assert_eq!(fitted(ping(), 1_000), ping());
        for (full, message_ns) in [
            (stream(), 20_000_000),
            (stream(), 800_000_000),
            (ping(), 4_000_000),
            (ping(), 3_000_000_000),
        ] {
            let less = fitted(full, message_ns);
            let all = u64::from(less.messages) * u64::from(less.rounds + less.warmup);
            assert!(less.rounds >= 1 && less.messages >= 1);
            let least = all == u64::from(less.messages) * (1 + u64::from(less.warmup));
            assert!(all * message_ns <= 1_100_000_000 || least, "{less:?}");
        }
    }
}
