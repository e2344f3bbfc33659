//! Counts what a worker has done since its start, for its answers to the supervisor.

use std::collections::BTreeMap;
use std::time::Instant;

use super::objects::Store;
use cuda_cluster_wire::status::Work;
use cuda_cluster_wire::tasks::Report;

/// The counts.
pub(super) struct Tally {
    began: Instant,
    tasks: u64,
    received_bytes: u64,
    /// The same by sender: one entry for each worker of the cluster at most.
    received_from: BTreeMap<String, u64>,
}

impl Tally {
    /// Counts from now on.
    pub(super) fn new() -> Self {
        let received_from = BTreeMap::new();
        Self { began: Instant::now(), tasks: 0, received_bytes: 0, received_from }
    }

    /// Counts what the scheduler is told of.
    pub(super) fn count(&mut self, reports: &[Report]) {
        for report in reports {
            match report {
                Report::Done { .. } | Report::Failed { .. } => self.tasks += 1,
                Report::Fetched { bytes, source, .. } if *bytes > 0 => {
                    self.received_bytes += bytes;
                    *self.received_from.entry(source.name.clone()).or_default() += bytes;
                }
                _ => {}
            }
        }
    }

    /// What was received until now, by sender.
    pub(super) fn received_from(&self) -> &BTreeMap<String, u64> {
        &self.received_from
    }

    /// What was done, and what is where now.
    pub(super) fn work(&self, store: &Store) -> Work {
        let counters = store.counters();
        Work {
            at_ms: u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX),
            tasks: self.tasks,
            received_bytes: Some(self.received_bytes),
            device_bytes: store.device().map(|_| counters.device.bytes),
            spilled_bytes: Some(counters.disk.bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuda_cluster_wire::peer::Member;
    use cuda_cluster_wire::tasks::{ObjectId, Ran};

    #[test]
    fn tasks_count_when_they_have_ended_and_bytes_when_they_are_here() {
        let mut tally = Tally::new();
        let (task, products) = (ObjectId::new(1, 1), Vec::new());
        let source = Member { name: "gpu1".to_owned(), incarnation: 1 };
        let later = Member { incarnation: 2, ..source.clone() };
        let other = Member { name: "gpu2".to_owned(), incarnation: 1 };
        tally.count(&[
            Report::Done { task, products, ran: Ran::default() },
            Report::Returned { task },
            Report::Fetched { object: task, source, bytes: 70, micros: None },
            Report::Fetched { object: task, source: other.clone(), bytes: 5, micros: None },
            Report::Fetched { object: task, source: other, bytes: 0, micros: None },
            Report::Fetched { object: task, source: later, bytes: 30, micros: Some(1) },
        ]);
        assert_eq!((tally.tasks, tally.received_bytes), (1, 105));
        let by_sender = [("gpu1".to_owned(), 100), ("gpu2".to_owned(), 5)];
        assert_eq!(*tally.received_from(), BTreeMap::from(by_sender));
    }
}
