//! Random faults from a seed, and what must hold after each: no process left, no false READY, no
//! lost byte, causes recorded.
//!
//! `keeper` attacks a supervisor embedded in a test program; the others attack the program that
//! people use, from outside: `front` foreground `up` in a terminal, `output` the bytes of `run`,
//! `strangers` as another user, `memory` a store beyond its limits, `verify` links that are measured.
//!
//! `CHAOS_SEED` determines the faults, `CHAOS_FAULTS` how many of each kind, and `CHAOS_ONLY`
//! selects whose name contains it; `scripts/chaos.sh` runs hundreds.

#![cfg(feature = "cli")]
#![allow(clippy::print_stdout, reason = "prints what it has done")]

#[path = "../bench/mod.rs"]
mod bench;
mod front;
mod keeper;
mod memory;
mod output;
mod place;
#[path = "../cluster/sandbox.rs"]
#[allow(dead_code, reason = "written for another test program")]
mod sandbox;
#[path = "../skip/mod.rs"]
mod skip;
mod strangers;
#[path = "../programs/stream.rs"]
mod stream;
mod terminal;
mod verify;

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use stream::Random;

/// Long enough for any machine that works.
const LONG: Duration = Duration::from_secs(120);

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn seed() -> u64 {
    number("CHAOS_SEED", 1)
}

/// Number of faults, unless set.
fn faults(default: u64) -> u64 {
    number("CHAOS_FAULTS", default)
}

/// A random fault, among those selected.
fn draw<T: Copy + Debug>(faults: &[T], random: &mut Random) -> T {
    let only = std::env::var("CHAOS_ONLY").unwrap_or_default();
    let wanted = faults.iter().filter(|fault| format!("{fault:?}").contains(&only));
    let wanted: Vec<&T> = wanted.collect();
    assert!(!wanted.is_empty(), "CHAOS_ONLY is {only:?}, and there are {faults:?}");
    *wanted[random.below(wanted.len())]
}

/// Counts of the faults, and the longest time that an end took.
struct Tally {
    what: &'static str,
    begun: Instant,
    struck: BTreeMap<String, u32>,
    /// The longest time until everything was gone after an end or a kill, in microseconds.
    slowest_end: AtomicU64,
}

impl Tally {
    fn new(what: &'static str) -> Self {
        Self {
            what,
            begun: Instant::now(),
            struck: BTreeMap::new(),
            slowest_end: AtomicU64::new(0),
        }
    }

    fn count(&mut self, fault: impl Debug) {
        let fault = format!("{fault:?}");
        *self.struck.entry(fault.trim_matches('"').to_owned()).or_default() += 1;
    }

    fn ended_within(&self, time: Duration) {
        let time = time.as_micros().try_into().unwrap_or(u64::MAX);
        self.slowest_end.fetch_max(time, Ordering::Relaxed);
    }
}

impl Drop for Tally {
    /// Prints the counts, even if the test fails.
    fn drop(&mut self) {
        let (what, took) = (self.what, self.begun.elapsed());
        let faults: u32 = self.struck.values().sum();
        println!("{what}: seed {}: {faults} faults in {took:.1?}: {:?}", seed(), self.struck);
        let slowest = Duration::from_micros(self.slowest_end.load(Ordering::Relaxed));
        println!("{what}: after an end or a kill everything was gone within {slowest:.1?}");
    }
}
