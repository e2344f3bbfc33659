//! Writes what went from which worker to which into the run directory, so that it can be looked at
//! later.
//!
//! Workers count what they receive, and say so in their answers, twice a minute; the supervisor
//! looks at the answers when it reads what its processes use.
//!
//! *Invariant:* as that of `history`: a cluster goes on without.

use std::time::Instant;

use super::ring_file::{Clock, RingFile};
use super::{Launch, ProcessState};
use cuda_cluster_machine::os::run_directory::Paths;
use cuda_cluster_model::plan::EngineKind;
use cuda_cluster_wire::history::pairs::{Counts, Rings, Said, Shape};

/// Records, each with its place in the file.
type Due = Vec<(u64, Vec<u8>)>;

/// Writes the history of one cluster's pairs.
#[derive(Debug)]
pub(super) struct PairRecorder {
    file: RingFile,
    rings: Rings,
    counts: Counts,
    clock: Clock,
}

impl PairRecorder {
    /// `None` where there are no pairs, or nobody counts what goes between them.
    pub(super) fn new(launch: &Launch, paths: &Paths, clock: Clock) -> Option<Self> {
        if launch.engine == EngineKind::Command || launch.workers.len() < 2 {
            return None;
        }
        let names: Vec<String> = launch.workers.iter().map(|spec| spec.name.clone()).collect();
        Some(Self {
            file: RingFile::new(paths.history_pairs()),
            counts: Counts::new(&names, clock.at(clock.began())),
            rings: Rings::new(Shape::new(names)),
            clock,
        })
    }

    /// What is to be written of the workers' last answers, in the order of the launch; nothing if
    /// none is new.
    pub(super) fn due(&mut self, now: Instant, workers: &[ProcessState]) -> Due {
        for (number, worker) in workers.iter().enumerate() {
            if let Some(address) = &worker.address {
                self.counts.know(address, number);
            }
        }
        // Also of one that has ended since: nobody else says what it has received.
        let said = workers.iter().map(|worker| {
            let (pid, at_ms) = (worker.pid, worker.work?.at_ms);
            Some(Said { pid, at_ms, received_from: &worker.received_from })
        });
        let span = self.counts.since(self.clock.at(now), &said.collect::<Vec<_>>());
        span.map(|span| self.rings.add(&span)).unwrap_or_default()
    }

    /// Writes records. Without room, or without its directory, there is a gap.
    pub(super) fn write(&mut self, due: &[(u64, Vec<u8>)]) {
        if !due.is_empty() {
            let _ = self.file.write(self.rings.header(), due);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuda_cluster_model::plan::{Program, Supervision};
    use cuda_cluster_wire::history::pairs::History;
    use cuda_cluster_wire::process::Containment;
    use cuda_cluster_wire::status::Work;
    use serde_json::json;
    use std::os::unix::fs::MetadataExt;
    use std::time::{Duration, UNIX_EPOCH};

    use crate::ClusterState;

    const TEN: Duration = Duration::from_secs(10);

    fn launch(engine: &str, workers: usize) -> Launch {
        let worker = |number| {
            json!({
                "name": format!("gpu{number}"), "program": Program::default(), "ready": "said",
                "memory_limit_bytes": null, "gpu": null,
            })
        };
        let launch = json!({
            "name": "demo", "engine": engine, "simulated": true, "strict": false,
            "supervision": Supervision::default(), "scheduler": null,
            "workers": (0..workers).map(worker).collect::<Vec<_>>(),
        });
        serde_json::from_value(launch).expect("a launch")
    }

    #[test]
    fn what_workers_say_is_in_the_file_under_their_names() {
        let folder = tempfile::tempdir().expect("a directory");
        let paths = Paths::at(folder.path());
        let began = UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        let launch = launch("dask", 3);
        let containment = Containment::Subreaper;
        let mut state =
            ClusterState::initial(&launch, 1, containment, folder.path(), |_| "log".into(), began);
        let clock = Clock::from(began);
        let mut recorder = PairRecorder::new(&launch, &paths, clock).expect("it has pairs");
        let mut look = |state: &ClusterState, after: u32| {
            let due = recorder.due(clock.began() + TEN * after, &state.workers);
            recorder.write(&due);
        };
        look(&state, 1);
        assert!(!paths.history_pairs().exists(), "nobody has said anything");
        state.workers[0].address = Some("tcp://127.0.0.1:1".to_owned());
        let says = |worker: &mut ProcessState, pid, at_ms, from: &str, bytes| {
            worker.pid = Some(pid);
            worker.work = Some(Work { at_ms, ..Work::default() });
            worker.received_from = [(from.to_owned(), bytes)].into();
        };
        says(&mut state.workers[1], 7, 9000, "tcp://127.0.0.1:1", 50);
        says(&mut state.workers[2], 8, 9000, "gpu1", 30);
        look(&state, 2);
        look(&state, 3);
        // Both sender and receiver are other processes now, and one of them is gone.
        state.workers[0].address = Some("tcp://127.0.0.1:2".to_owned());
        says(&mut state.workers[1], 9, 4000, "tcp://127.0.0.1:2", 5);
        says(&mut state.workers[2], 8, 39_000, "gpu1", 31);
        state.workers[2].pid = None;
        look(&state, 4);
        let bytes = std::fs::read(paths.history_pairs()).expect("a file");
        let history = History::read(&bytes).expect("a history");
        let flows = history.flows(None, None).pairs;
        let told: Vec<(&str, &str, u64)> =
            flows.iter().map(|flow| (&*flow.from, &*flow.to, flow.bytes)).collect();
        assert_eq!(told, [("gpu0", "gpu1", 55), ("gpu1", "gpu2", 31)]);
        let begun = 1_800_000_000_000;
        assert_eq!(history.bounds(), Some((begun, begun + 40_000)));
        let mode = std::fs::metadata(paths.history_pairs()).expect("a file").mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn there_is_no_file_where_there_are_no_pairs_or_nobody_counts() {
        let paths = Paths::at(std::path::Path::new("/nowhere"));
        let clock = Clock::from(UNIX_EPOCH);
        for (engine, workers) in [("native", 1), ("command", 4), ("dask", 0)] {
            assert!(PairRecorder::new(&launch(engine, workers), &paths, clock).is_none());
        }
    }
}
