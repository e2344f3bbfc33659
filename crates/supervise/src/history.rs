//! Writes what the processes used into the run directory, so that it can be looked at later.
//!
//! *Invariant:* a cluster goes on without its history: what can't be written is left out, and seen
//! as a gap.

use std::time::{Duration, Instant};

use super::gpu::GpuWatch;
use super::ring_file::{Clock, RingFile};
use super::{Launch, ProcessPhase, ProcessState};
use cuda_cluster_machine::os::process;
use cuda_cluster_machine::os::run_directory::Paths;
use cuda_cluster_model::plan::EngineKind;
use cuda_cluster_wire::history::{Figure, Rings, Shape, Span, State};
use cuda_cluster_wire::status::Work;

/// What was not looked at for longer than this times the usual is a gap.
const LATE: u32 = 2;

/// What is known of a process now.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    pub(super) pid: Option<u32>,
    state: State,
    /// As of its last answer.
    work: Option<Work>,
    pool_bytes: Option<u64>,
    connections: usize,
    /// Processor time that it has used.
    pub(super) used: Option<Duration>,
    /// How busy its GPU was since the last reading.
    gpu_busy: Figure,
}

impl Seen {
    /// What a process's state says, and what `gpus` say of its GPU since a moment.
    pub(super) fn of(process: &ProcessState, gpus: Option<&dyn GpuWatch>, since: Instant) -> Self {
        // Of a process that is not there nothing is told, also not what others do on its GPU.
        let gpu = process.gpu.as_ref().filter(|_| process.pid.is_some());
        let at_work = matches!(process.state, ProcessPhase::Ready | ProcessPhase::Unresponsive);
        Self {
            pid: process.pid,
            state: State {
                phase: phase(process.state),
                up: if process.pid.is_some() { 100 } else { 0 },
                restarts: u16::try_from(process.restarts).unwrap_or(u16::MAX),
            },
            work: process.work.filter(|_| at_work),
            pool_bytes: process.device_pool.filter(|_| at_work).map(|pool| pool.held_bytes),
            connections: process.peers.len(),
            used: None,
            gpu_busy: Figure::over(
                gpus.zip(gpu).and_then(|(gpus, gpu)| gpus.busy_since(gpu, since)),
            ),
        }
    }
}

/// A phase's place in `wire::history::PHASES`.
fn phase(phase: ProcessPhase) -> u8 {
    match phase {
        ProcessPhase::Waiting => 0,
        ProcessPhase::Starting => 1,
        ProcessPhase::Ready => 2,
        ProcessPhase::Unresponsive => 3,
        ProcessPhase::Stopping => 4,
        ProcessPhase::Restarting => 5,
        ProcessPhase::Failed => 6,
        ProcessPhase::Stopped => 7,
    }
}

/// A process as it was read, and as it was read before.
struct Reading<'a> {
    now: &'a Seen,
    before: &'a Before,
    /// Seconds since then.
    seconds: f64,
}

/// What is remembered of a process.
#[derive(Clone, Copy, Debug, Default)]
struct Before {
    pid: Option<u32>,
    used: Duration,
    /// Its last answer, and what it did per second until then: tasks, bytes.
    work: Option<Work>,
    rates: [Option<f64>; 2],
}

impl Before {
    /// Remembers a process; its rates change when there is a new answer.
    fn update(&mut self, seen: &Seen) {
        if self.pid != seen.pid || seen.work.is_none() {
            (self.work, self.rates) = (None, [None; 2]);
        }
        if self.work != seen.work
            && let Some(work) = seen.work
        {
            let last = self.work.unwrap_or_default();
            let rate = |now: u64, then: u64| {
                let ms = work.at_ms.checked_sub(last.at_ms).filter(|ms| *ms > 0)?;
                Some(now.checked_sub(then)? as f64 * 1000.0 / ms as f64)
            };
            let received = work.received_bytes;
            let received = received.and_then(|now| rate(now, last.received_bytes.unwrap_or(0)));
            self.rates = [rate(work.tasks, last.tasks), received];
            self.work = Some(work);
        }
        (self.pid, self.used) = (seen.pid, seen.used.unwrap_or_default());
    }
}

/// A figure of the history: its name, and how it is read.
type Column = (&'static str, fn(&Reading) -> Option<f64>);

/// What is known of any program.
const OF_PROGRAMS: [Column; 2] = [
    ("cpus", |reading| {
        let Reading { now, before, seconds } = reading;
        let used = now.used?;
        if before.pid == now.pid {
            return Some(used.checked_sub(before.used)?.as_secs_f64() / seconds);
        }
        // What it used since its start.
        let age = process::age(now.pid?)?.as_secs_f64();
        (age <= seconds + 1.0).then(|| used.as_secs_f64() / age.max(0.1))
    }),
    ("resident_bytes", |reading| Some(process::resident_bytes(reading.now.pid?)? as f64)),
];

/// What engines' workers answer, too.
const OF_WORKERS: [Column; 5] = [
    ("device_bytes", |reading| {
        let of_objects = reading.now.work.and_then(|work| work.device_bytes);
        Some(reading.now.pool_bytes.or(of_objects)? as f64)
    }),
    ("spilled_bytes", |reading| Some(reading.now.work?.spilled_bytes? as f64)),
    ("tasks_per_s", |reading| reading.before.rates[0]),
    ("received_bytes_per_s", |reading| reading.before.rates[1]),
    ("connections", |reading| reading.now.work.map(|_| reading.now.connections as f64)),
];

/// What is known of workers with GPUs that a driver knows: the share of the time in which a kernel
/// ran on the GPU, also one of another worker.
const OF_GPUS: &str = "gpu_busy_percent";

/// Writes the history of one cluster.
#[derive(Debug)]
pub(super) struct Recorder {
    file: RingFile,
    rings: Rings,
    columns: Vec<Column>,
    /// Whether there is [`OF_GPUS`] after the columns.
    has_gpus: bool,
    clock: Clock,
    last: Instant,
    before: Vec<Before>,
}

impl Recorder {
    /// `watches_gpus`: whether there is somebody who says how busy they are.
    pub(super) fn new(launch: &Launch, watches_gpus: bool, paths: &Paths, clock: Clock) -> Self {
        let has_gpus = watches_gpus && launch.processes().any(|spec| spec.gpu.is_some());
        let more: &[Column] = if launch.engine == EngineKind::Command { &[] } else { &OF_WORKERS };
        let columns = [&OF_PROGRAMS, more].concat();
        let names = launch.processes().map(|spec| spec.name.clone()).collect();
        let figures = columns.iter().map(|(name, _)| *name).chain(has_gpus.then_some(OF_GPUS));
        let figures = figures.map(str::to_owned).collect();
        Self {
            file: RingFile::new(paths.history()),
            rings: Rings::new(Shape::new(names, figures)),
            columns,
            has_gpus,
            clock,
            last: clock.began(),
            before: vec![Before::default(); launch.processes().count()],
        }
    }

    /// When it was last added to.
    pub(super) fn last(&self) -> Instant {
        self.last
    }

    /// Adds what was seen now, in the order of the launch.
    pub(super) fn add(&mut self, now: Instant, seen: &[Seen]) {
        let span = self.span(now, seen);
        let due = self.rings.add(&span);
        // Without room, or without its directory, there is a gap.
        let _ = self.file.write(self.rings.header(), &due);
    }

    fn span(&mut self, now: Instant, seen: &[Seen]) -> Span {
        let since = now.saturating_duration_since(std::mem::replace(&mut self.last, now));
        let usual = self.rings.shape().levels[0].every_ms;
        let mut figures = Vec::with_capacity(seen.len() * (self.columns.len() + 1));
        for (now, before) in seen.iter().zip(&mut self.before) {
            let was = *before;
            before.update(now);
            let before = Before { rates: before.rates, ..was };
            let reading = Reading { now, before: &before, seconds: since.as_secs_f64().max(0.001) };
            figures.extend(self.columns.iter().map(|(_, read)| Figure::of(read(&reading))));
            figures.extend(self.has_gpus.then_some(now.gpu_busy));
        }
        Span {
            at: self.clock.at(now),
            ms: u32::try_from(since.as_millis()).unwrap_or(u32::MAX).min(LATE * usual),
            states: seen.iter().map(|seen| seen.state).collect(),
            figures,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuda_cluster_model::plan::{Program, Supervision};
    use cuda_cluster_wire::history::{History, PHASES};
    use serde_json::json;
    use std::os::unix::fs::MetadataExt;
    use std::time::UNIX_EPOCH;

    const TEN: Duration = Duration::from_secs(10);

    fn recorder(paths: &Paths) -> Recorder {
        recorder_of(json!(null), true, paths)
    }

    fn recorder_of(gpu: serde_json::Value, watches_gpus: bool, paths: &Paths) -> Recorder {
        let worker = json!({
            "name": "gpu0", "program": Program::default(), "ready": "said",
            "memory_limit_bytes": null, "gpu": gpu,
        });
        let launch = json!({
            "name": "demo", "engine": "native", "simulated": true, "strict": false,
            "supervision": Supervision::default(), "scheduler": null, "workers": [worker],
        });
        let launch: Launch = serde_json::from_value(launch).expect("a launch");
        // At the beginning of a minute: what ends with one is in the coarser levels too.
        let began = UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        Recorder::new(&launch, watches_gpus, paths, Clock::from(began))
    }

    /// This process as a worker that has answered so.
    fn seen(at_ms: u64, tasks: u64) -> Seen {
        let work = Work { at_ms, tasks, spilled_bytes: Some(70), ..Work::default() };
        Seen {
            pid: Some(std::process::id()),
            state: State { phase: phase(ProcessPhase::Ready), up: 100, restarts: 2 },
            work: Some(work),
            pool_bytes: None,
            connections: 3,
            used: process::cpu_time(std::process::id()),
            gpu_busy: Figure::over(Some((30.0, 50.0))),
        }
    }

    fn read(paths: &Paths) -> History {
        History::read(&std::fs::read(paths.history()).expect("a file")).expect("a history")
    }

    #[test]
    fn the_words_for_phases_are_those_of_the_state() {
        for (code, phase_of) in [
            (0, ProcessPhase::Waiting),
            (1, ProcessPhase::Starting),
            (2, ProcessPhase::Ready),
            (3, ProcessPhase::Unresponsive),
            (4, ProcessPhase::Stopping),
            (5, ProcessPhase::Restarting),
            (6, ProcessPhase::Failed),
            (7, ProcessPhase::Stopped),
        ] {
            assert_eq!(phase(phase_of), code);
            assert_eq!(json!(phase_of), json!(PHASES[usize::from(code)]));
        }
    }

    #[test]
    fn rates_are_those_between_two_answers_and_stay_until_the_next() {
        let folder = tempfile::tempdir().expect("a directory");
        let paths = Paths::at(folder.path());
        let mut recorder = recorder(&paths);
        let began = recorder.last;
        let gone = Seen { pid: None, work: None, used: None, ..seen(0, 0) };
        let gone = Seen { state: State { phase: 5, up: 0, restarts: 3 }, ..gone };
        let steps = [seen(1000, 100), seen(1000, 100), seen(31_000, 400), gone, seen(500, 1)];
        for (step, seen) in steps.iter().enumerate() {
            recorder.add(began + TEN * (u32::try_from(step).expect("few") + 1), &[*seen]);
        }
        let curves = read(&paths).curves(None, None, 100);
        let process = &curves.processes[0];
        let tasks = &process.figures["tasks_per_s"].mean;
        assert_eq!(*tasks, [Some(100.0), Some(100.0), Some(10.0), None, Some(2.0)]);
        assert_eq!(process.up, [100, 100, 100, 0, 100].map(Some));
        assert_eq!(process.restarts, [2, 2, 2, 3, 2].map(Some));
        assert_eq!(process.figures["spilled_bytes"].highest[2], Some(70.0));
        assert_eq!(process.figures["connections"].mean[3], None);
        let resident = process.figures["resident_bytes"].mean[0].expect("this process has memory");
        assert!(resident > 1e6, "{resident}");
        let mode = std::fs::metadata(paths.history()).expect("a file").mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn the_use_of_gpus_has_its_place_only_where_somebody_tells_it() {
        let gpu = || json!({ "index": 0, "uuid": null, "pci": null });
        let figures = |mut recorder: Recorder, paths: &Paths| {
            let began = recorder.last;
            recorder.add(began + TEN, &[seen(1, 1)]);
            let unknown = Seen { gpu_busy: Figure::UNKNOWN, ..seen(2, 2) };
            recorder.add(began + TEN * 2, &[unknown]);
            read(paths).curves(None, None, 100).processes.remove(0).figures
        };
        let folder = tempfile::tempdir().expect("a directory");
        let paths = Paths::at(folder.path());
        let known = figures(recorder_of(gpu(), true, &paths), &paths);
        let busy = &known[OF_GPUS];
        assert_eq!(busy.mean, [Some(30.0), None]);
        assert_eq!(busy.highest, [Some(50.0), None]);
        assert_eq!(known["spilled_bytes"].mean, [Some(70.0); 2], "the others are where they were");
        // Simulated GPUs, and none.
        for other in [recorder_of(gpu(), false, &paths), recorder_of(json!(null), true, &paths)] {
            assert!(!figures(other, &paths).contains_key(OF_GPUS));
        }
    }

    #[test]
    fn a_file_that_was_removed_is_made_again_with_what_was_known() {
        let folder = tempfile::tempdir().expect("a directory");
        let root = folder.path().join("run");
        let paths = Paths::at(&root);
        let mut recorder = recorder(&paths);
        let began = recorder.last;
        // As long as there is no directory, there are gaps.
        recorder.add(began + TEN, &[seen(1, 1)]);
        std::fs::create_dir(&root).expect("made");
        recorder.add(began + TEN * 2, &[seen(2, 2)]);
        std::fs::remove_dir_all(&root).expect("removed");
        recorder.add(began + TEN * 3, &[seen(3, 3)]);
        std::fs::create_dir(&root).expect("made");
        recorder.add(began + TEN * 4, &[seen(4, 4)]);
        let curves = read(&paths).curves(None, None, 100);
        assert_eq!(curves.ms, [10_000, 0, 10_000], "the third could not be written");
        std::fs::write(paths.history(), "").expect("emptied");
        recorder.add(began + TEN * 5, &[seen(5, 5)]);
        assert_eq!(read(&paths).curves(None, None, 100).ms, [10_000]);
    }
}
