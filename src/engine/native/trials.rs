//! Fits measurements into a time budget.
//!
//! *Invariant:* a measurement that was fitted measures the same connection as before.

use std::time::{Duration, Instant};

use super::client::Client;
use super::error::Error;
use crate::engine::links;
use crate::wire::native::Measurement;

/// Limits each measurement to what fits a time budget, by running trials that grow until the
/// time is used up.
///
/// # Errors
/// If the scheduler goes away.
pub async fn fitted(
    client: &mut Client,
    all: Vec<Measurement>,
    budget: Duration,
) -> Result<Vec<Measurement>, Error> {
    let begin = Instant::now();
    let mut trials: Vec<Measurement> = all.iter().map(links::trial).collect();
    let took = loop {
        let before = begin.elapsed();
        let took = client.measure(&trials).await?;
        let spent = begin.elapsed();
        let larger: Option<Vec<Measurement>> =
            trials.iter().zip(&all).map(|(trial, full)| links::larger(trial, full)).collect();
        match larger.filter(|_| spent + 4 * (spent - before) < budget) {
            Some(larger) => trials = larger,
            None => break took,
        }
    };
    let left = budget.saturating_sub(begin.elapsed());
    let fitted = all.into_iter().zip(&trials).map(|(full, trial)| {
        let own = took.iter().find(|took| took.from == full.from && took.to == full.to);
        match own.map(|own| &own.result) {
            Some(Ok(samples)) => links::within(left, full, trial, samples),
            // The measurement itself will report why it fails.
            _ => full,
        }
    });
    Ok(fitted.collect())
}
