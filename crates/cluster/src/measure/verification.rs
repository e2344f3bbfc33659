//! What has come of a measurement.
//!
//! *Invariant:* a pair that failed has a row that says so, and pairs without one are counted.

use std::collections::BTreeMap;

use super::{Between, Way};
use cuda_cluster_wire::links::Pair;
use cuda_cluster_wire::peer::MemoryKind;

/// Figures of a cluster's connections, for each ordered pair of workers, kind of memory and size.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Verification {
    /// The pairs.
    pub pairs: Vec<Pair>,
    /// What was not measured, and why.
    pub notes: Vec<String>,
    /// Pairs for whose figures the time did not suffice, counted once for each kind of memory.
    pub left_out: usize,
    /// Pairs with workers of other machines; `None` if none has joined, or nobody asked for them.
    pub between: Option<Between>,
}

impl Verification {
    /// The pairs of this machine that don't use the lanes that they should, or could not be
    /// measured.
    pub fn objections(&self) -> impl Iterator<Item = &Pair> {
        self.pairs.iter().filter(|pair| !pair.verdict.is_good(false))
    }
}

/// Sorts what has been measured when it is dropped, even if the measurement is: the order of the
/// measurements is not the one in which they are read.
pub(super) struct Sorted<'a> {
    pub(super) verification: &'a mut Verification,
    pub(super) ways: &'a [Way],
}

impl Drop for Sorted<'_> {
    fn drop(&mut self) {
        let sizes = |pair: &Pair| (pair.memory == MemoryKind::Device, pair.size_bytes);
        let place: BTreeMap<&Way, usize> =
            self.ways.iter().enumerate().map(|(at, way)| (way, at)).collect();
        let at = |pair: &Pair| place.get(&(pair.from.clone(), pair.to.clone())).copied();
        self.verification.pairs.sort_by_cached_key(|pair| (sizes(pair), at(pair)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuda_cluster_wire::links::{Expected, Verdict};

    #[test]
    fn what_is_measured_is_in_the_order_of_the_workers_also_when_it_is_broken_off() {
        let name = |at: usize| format!("gpu{at}");
        let ways: Vec<Way> = [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
            .map(|(from, to)| (name(from), name(to)))
            .to_vec();
        let mut verification = Verification::default();
        let sorted = Sorted { verification: &mut verification, ways: &ways };
        for at in [4, 1, 3] {
            for memory in [MemoryKind::Device, MemoryKind::Host] {
                let (from, to) = ways[at].clone();
                sorted.verification.pairs.push(Pair {
                    from,
                    to,
                    memory,
                    lanes: Vec::new(),
                    expected: Expected::AnyLane,
                    size_bytes: 8,
                    gb_per_s: None,
                    mean_gb_per_s: None,
                    latency_us: None,
                    mean_latency_us: None,
                    link: None,
                    limit_gb_per_s: None,
                    usual_gb_per_s: None,
                    verdict: Verdict::Failed(String::new()),
                });
            }
        }
        // As when a signal ends it.
        drop(sorted);
        let found: Vec<(MemoryKind, Way)> = verification
            .pairs
            .into_iter()
            .map(|pair| (pair.memory, (pair.from, pair.to)))
            .collect();
        let of = |memory| [1, 3, 4].map(|at: usize| (memory, ways[at].clone()));
        assert_eq!(found, [of(MemoryKind::Host), of(MemoryKind::Device)].concat());
    }
}
