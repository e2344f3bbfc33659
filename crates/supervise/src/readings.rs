//! What the processes use, read every ten seconds: so that whoever asks once is told a rate and
//! does not wait for it, and for the history.
//!
//! *Invariant:* a reading is of the process that it is told of, and old enough for a rate.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::watch;

use super::gpu::GpuWatch;
use super::history::{Recorder, Seen};
use super::pairs::PairRecorder;
use super::ring_file::Clock;
use super::state::CpuReading;
use super::{ClusterState, Launch, ProcessState};
use cuda_cluster_machine::os::process;
use cuda_cluster_machine::os::run_directory::Paths;

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

/// The last readings, and the history of all.
#[derive(Debug)]
pub(super) struct Readings {
    kept: Mutex<Kept>,
    recorder: Mutex<Recorder>,
    /// Where there are workers that say from whom they have received something.
    pairs: Mutex<Option<PairRecorder>>,
    gpus: Option<Arc<dyn GpuWatch>>,
    state: watch::Receiver<ClusterState>,
}

impl Readings {
    /// Of a cluster that has just begun, whose GPUs these watch.
    pub(super) fn new(
        launch: &Launch,
        gpus: Option<Arc<dyn GpuWatch>>,
        paths: &Paths,
        began: SystemTime,
        state: watch::Receiver<ClusterState>,
    ) -> Self {
        let clock = Clock::from(began);
        let recorder = Mutex::new(Recorder::new(launch, gpus.is_some(), paths, clock));
        let pairs = Mutex::new(PairRecorder::new(launch, paths, clock));
        Self { kept: Mutex::default(), recorder, pairs, gpus, state }
    }

    /// Reads the processes now and then. Never ends.
    pub(super) async fn keep(&self) {
        loop {
            tokio::time::sleep(EVERY).await;
            let since = self.recorder().last();
            let gpus = self.gpus.as_deref();
            let of = |process: &ProcessState| Seen::of(process, gpus, since);
            let mut seen: Vec<Seen> = self.state.borrow().processes().map(of).collect();
            let mut used = Used::new();
            for one in &mut seen {
                one.used = one.pid.and_then(process::cpu_time);
                used.extend(one.pid.zip(one.used));
            }
            let now = Instant::now();
            self.kept().add(now, used);
            self.recorder().add(now, &seen);
            self.add_pairs(now);
        }
    }

    /// Adds what workers have said before their end.
    pub(super) fn end(&self) {
        self.add_pairs(Instant::now());
    }

    /// Adds what went between workers, as far as they have said it.
    fn add_pairs(&self, now: Instant) {
        let mut pairs = self.pairs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pairs) = pairs.as_mut() {
            // Nobody waits for the state while a file is written.
            let due = pairs.due(now, &self.state.borrow().workers);
            pairs.write(&due);
        }
    }

    fn recorder(&self) -> MutexGuard<'_, Recorder> {
        self.recorder.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
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
