//! What processor time the processes had used a while ago, so that whoever asks once is told a rate
//! and does not wait for it.
//!
//! *Invariant:* a reading is of the process that it is told of, and old enough for a rate.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::ClusterState;
use super::state::CpuReading;
use cuda_cluster_machine::os::process;

/// Time between two readings: as rare as the checks of an idle cluster's memory.
const EVERY: Duration = Duration::from_secs(10);

/// The kernel counts in steps of 10 ms, which are to be 1 % of a CPU at most.
const LEAST: Duration = Duration::from_secs(1);

/// A process's id, and the processor time that it had used.
type Used = BTreeMap<u32, Duration>;

/// The last two.
#[derive(Debug, Default)]
struct Kept([Option<(Instant, Used)>; 2]);

impl Kept {
    fn add(&mut self, now: Instant, used: Used) {
        self.0.swap(0, 1);
        self.0[0] = Some((now, used));
    }

    /// The newest that is old enough, and how old it is.
    fn old_enough(&self, now: Instant) -> Option<(Duration, &Used)> {
        let all = self.0.iter().flatten();
        let mut aged = all.map(|(at, used)| (now.saturating_duration_since(*at), used));
        aged.find(|(ago, _)| *ago >= LEAST)
    }
}

/// The last readings.
#[derive(Debug, Default)]
pub(super) struct Readings(Mutex<Kept>);

impl Readings {
    /// Reads the processes' time now and then. Never ends.
    pub(super) async fn keep(&self, state: watch::Receiver<ClusterState>) {
        loop {
            tokio::time::sleep(EVERY).await;
            let pids: Vec<u32> = processes(&state.borrow()).collect();
            let read = pids.into_iter().filter_map(|pid| Some((pid, process::cpu_time(pid)?)));
            self.kept().add(Instant::now(), read.collect());
        }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the newest reading that is old enough to each process's state.
    pub(super) fn add_to(&self, state: &mut ClusterState) {
        let kept = self.kept();
        let Some((ago, used)) = kept.old_enough(Instant::now()) else { return };
        let milliseconds = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        for process in state.processes_mut() {
            let cpu = process.pid.and_then(|pid| used.get(&pid));
            process.cpu_before =
                cpu.map(|cpu| CpuReading { cpu_ms: milliseconds(*cpu), ago_ms: milliseconds(ago) });
        }
    }
}

fn processes(state: &ClusterState) -> impl Iterator<Item = u32> {
    state.processes().filter_map(|process| process.pid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_reading_that_is_old_enough_is_told() {
        let mut kept = Kept::default();
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let told = |kept: &Kept, ms| kept.old_enough(at(ms)).map(|(ago, used)| (ago, used[&7]));
        assert_eq!(told(&kept, 0), None);
        let used = |ms| Used::from([(7, Duration::from_millis(ms))]);
        kept.add(at(0), used(100));
        assert_eq!(told(&kept, 999), None, "too young for a rate");
        assert_eq!(told(&kept, 1000), Some((LEAST, Duration::from_millis(100))));
        kept.add(at(10_000), used(500));
        let (ago, before) = (Duration::from_millis(10_500), Duration::from_millis(100));
        assert_eq!(told(&kept, 10_500), Some((ago, before)));
        assert_eq!(told(&kept, 11_000), Some((LEAST, Duration::from_millis(500))));
        kept.add(at(20_000), used(600));
        assert_eq!(told(&kept, 20_000), Some((EVERY, Duration::from_millis(500))), "two are kept");
    }
}
