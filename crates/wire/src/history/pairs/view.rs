//! Says what went between workers in a span of time.
//!
//! *Invariant:* what is told of all of the time is each byte once; no mean is above its highest.

use std::collections::BTreeMap;

use serde::Serialize;

use super::History;
use crate::history::form::Timed;

/// Most pairs of an answer: the busiest.
const MOST: usize = 20_000;

/// What went between workers in a span of time.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Flows {
    /// When that begins and ends, in milliseconds since 1970; `None` if nothing is known of it.
    pub since: Option<u64>,
    pub until: Option<u64>,
    /// Pairs that moved something, those that moved most first.
    pub pairs: Vec<Flow>,
}

/// What went from one worker to another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Flow {
    pub from: String,
    pub to: String,
    pub bytes: u64,
    /// Over the whole span.
    pub mean_bytes_per_s: u64,
    /// Of what the worker has received between two of its answers, or in ten seconds if these are
    /// longer.
    pub highest_bytes_per_s: u64,
}

impl History {
    /// What was moved after `from` and until `to`; in all of the time without bounds. Of a span
    /// that is only partly within them, as much is told as of its time is.
    pub fn flows(&self, from: Option<u64>, to: Option<u64>) -> Flows {
        let Some((first, last)) = self.bounds() else { return Flows::default() };
        let (from, to) = (from.unwrap_or(first).max(first), to.unwrap_or(last).min(last));
        if to <= from {
            return Flows::default();
        }
        let mut sums: BTreeMap<(u16, u16), (u64, f32)> = BTreeMap::new();
        for span in &self.spans {
            let within = span.at.min(to).saturating_sub(span.begin().max(from));
            let all = span.at - span.begin();
            for pair in &span.pairs {
                let bytes = match all {
                    0 if span.at > from && span.at <= to => pair.bytes,
                    0 => 0,
                    _ => part(pair.bytes, within, all),
                };
                if bytes > 0 {
                    let (sum, highest) = sums.entry((pair.from, pair.to)).or_default();
                    *sum = sum.saturating_add(bytes);
                    *highest = highest.max(pair.highest);
                }
            }
        }
        let seconds = (to - from) as f64 / 1000.0;
        let name = |number: u16| self.shape.workers.get(usize::from(number)).cloned();
        let flow = |((from, to), (bytes, highest)): (_, (u64, f32))| {
            // What was told in a short span was received in a longer one.
            let mean = (bytes as f64 / seconds).min(f64::from(highest));
            Some(Flow {
                from: name(from)?,
                to: name(to)?,
                bytes,
                mean_bytes_per_s: rounded(mean),
                highest_bytes_per_s: rounded(f64::from(highest)),
            })
        };
        let mut pairs: Vec<Flow> = sums.into_iter().filter_map(flow).collect();
        pairs.sort_by_key(|flow| std::cmp::Reverse(flow.bytes));
        pairs.truncate(MOST);
        Flows { since: Some(from), until: Some(to), pairs }
    }
}

/// The part of a sum that belongs to a part of its time.
fn part(bytes: u64, within: u64, all: u64) -> u64 {
    let product = u128::from(bytes) * u128::from(within.min(all));
    u64::try_from(product / u128::from(all.max(1))).unwrap_or(u64::MAX)
}

#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "it saturates, and no rate is negative"
)]
fn rounded(rate: f64) -> u64 {
    rate.round() as u64
}
