//! Turns what workers say that they have received until now into what was moved since.
//!
//! *Invariant:* each byte that is told is counted once, however often it is told, also if the
//! worker that has told it ends; a worker that counts from zero again adds what it has counted
//! since, and no more.

use std::collections::{BTreeMap, HashMap};

use super::{Pair, Span};

/// A worker's last answer.
#[derive(Clone, Copy, Debug)]
pub struct Said<'a> {
    /// Which process of it says so; `None` if it has ended meanwhile.
    pub pid: Option<u32>,
    /// Milliseconds since its start, by its own clock.
    pub at_ms: u64,
    /// The bytes that it has received since its start, by sender.
    pub received_from: &'a BTreeMap<String, u64>,
}

/// What the workers had said before.
#[derive(Debug)]
pub struct Counts {
    /// Until when that was, in milliseconds since 1970.
    until: u64,
    workers: Vec<Last>,
    /// By their names.
    names: HashMap<String, u16>,
    /// By the addresses that they have, and have had.
    addresses: HashMap<String, u16>,
}

/// A worker's answer before.
#[derive(Clone, Debug, Default)]
struct Last {
    pid: Option<u32>,
    at_ms: Option<u64>,
    received_from: BTreeMap<String, u64>,
}

impl Counts {
    /// Nothing was received until a moment, in milliseconds since 1970.
    pub fn new(workers: &[String], until: u64) -> Self {
        let number = |(at, name): (usize, &String)| Some((name.clone(), u16::try_from(at).ok()?));
        let names = workers.iter().enumerate().filter_map(number).collect();
        let addresses = HashMap::new();
        Self { until, workers: vec![Last::default(); workers.len()], names, addresses }
    }

    /// From now on a worker is also known by this address. Those that it had before are still
    /// known, because others may have received from there.
    pub fn know(&mut self, address: &str, worker: usize) {
        let Some(worker) = u16::try_from(worker).ok().filter(|_| worker < self.workers.len())
        else {
            return;
        };
        if self.addresses.get(address) == Some(&worker) {
            return;
        }
        if self.addresses.len() >= MOST_ADDRESSES * self.workers.len() {
            // Most of them are of processes that have ended long ago.
            self.addresses.retain(|_, known| *known != worker);
        }
        self.addresses.insert(address.to_owned(), worker);
    }

    #[cfg(test)]
    pub(super) fn known_addresses(&self) -> usize {
        self.addresses.len()
    }

    /// What was moved until a moment, by the last answers of all workers; `None` if none of them
    /// has answered since the last time. What comes from an unknown sender is left out.
    pub fn since(&mut self, at: u64, said: &[Option<Said>]) -> Option<Span> {
        let ms = u32::try_from(at.saturating_sub(self.until)).unwrap_or(u32::MAX);
        let mut is_new = false;
        let mut moved: BTreeMap<(u16, u16), (u64, f32)> = BTreeMap::new();
        for (to, (said, last)) in said.iter().zip(&mut self.workers).enumerate() {
            let (Some(said), Ok(to)) = (said, u16::try_from(to)) else { continue };
            let is_other = said.pid.is_some_and(|pid| last.pid.is_some_and(|known| known != pid));
            if is_other || last.at_ms.is_some_and(|known| said.at_ms < known) {
                *last = Last::default();
            }
            if last.at_ms == Some(said.at_ms) {
                continue;
            }
            is_new = true;
            let took = said.at_ms - last.at_ms.unwrap_or_default();
            for (sender, bytes) in said.received_from {
                let before = last.received_from.get(sender).copied().unwrap_or_default();
                let more = bytes.checked_sub(before).unwrap_or(*bytes);
                let from = self.names.get(sender).or_else(|| self.addresses.get(sender));
                if let Some(from) = from.filter(|from| **from != to && more > 0) {
                    let (sum, highest) = moved.entry((*from, to)).or_default();
                    *sum = sum.saturating_add(more);
                    *highest = rate(*sum, took.max(u64::from(ms)));
                }
            }
            last.received_from.clone_from(said.received_from);
            (last.at_ms, last.pid) = (Some(said.at_ms), said.pid.or(last.pid));
        }
        if !is_new {
            return None;
        }
        self.until = at;
        let pair = |((from, to), (bytes, highest))| Pair { from, to, bytes, highest };
        Some(Span { at, ms, pairs: moved.into_iter().map(pair).collect() })
    }
}

/// How many addresses a worker may have had, on average.
const MOST_ADDRESSES: usize = 16;

/// Bytes per second. Neither is known to more than seven digits.
#[allow(clippy::cast_possible_truncation, reason = "seven digits are enough for a rate")]
fn rate(bytes: u64, ms: u64) -> f32 {
    (bytes as f64 * 1000.0 / ms.max(1) as f64) as f32
}
