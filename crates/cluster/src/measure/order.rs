//! In which order connections are measured, and which of them side by side.
//!
//! Pure.
//!
//! *Invariant:* each connection is in one group of one pass. Connections that are measured side by
//! side have no worker in common, and nothing on their way that one of them could fill.

use std::collections::{BTreeMap, BTreeSet};

use super::{Together, Way};
use cuda_cluster_model::cpuset::CpuSet;

/// CPUs among which there must be an end of a connection in host memory, for another connection to
/// be measured beside it. One end keeps one core busy, and some ten cores fill a memory controller.
const CPUS_OF_AN_END: usize = 8;

/// CPUs that there must be for each end, whatever memory it is in: its thread polls, and the
/// process has others.
const CPUS_AT_LEAST: usize = 2;

/// Passes in each of which a worker sends at most once, and receives at most once. So all workers
/// are seen alike when the rest is left out, and near and distant peers are, because the distances
/// of successive passes differ much: 1, then half of the workers, a quarter, three quarters, …
pub(super) fn passes(ways: &[Way], workers: &[&str]) -> Vec<Vec<Way>> {
    let place: BTreeMap<&str, usize> =
        workers.iter().enumerate().map(|(at, name)| (*name, at)).collect();
    let count = workers.len().max(1);
    let bits = count.next_power_of_two().trailing_zeros();
    let mut passes = BTreeMap::<(bool, usize), Vec<Way>>::new();
    for way in ways {
        let at = |name: &String| place.get(name.as_str()).copied().unwrap_or_default();
        let distance = (at(&way.1) + count - at(&way.0)) % count;
        let turned = distance.reverse_bits() >> (usize::BITS - bits.max(1));
        passes.entry((distance != 1, turned)).or_default().push(way.clone());
    }
    passes.into_values().collect()
}

/// What a connection needs, as far as others may need it, too.
pub(super) enum Need {
    /// Cores for its two ends, among the CPUs of its workers, and their memory controllers.
    Cores([CpuSet; 2]),
    /// Two GPUs, of which each is reached over links of its own.
    Gpus([u32; 2]),
    /// It may share its path with any other.
    Everything,
}

/// Splits the connections of a pass into groups that are measured at the same time. Where nothing
/// should run together, those that cannot disturb one another do; `cores` is how many all processes
/// may keep busy, which a control group may limit without taking CPUs away.
pub(super) fn groups(
    pass: &[Way],
    together: Together,
    cores: usize,
    need: impl Fn(&Way) -> Need,
) -> Vec<Vec<Way>> {
    match together {
        Together::All => vec![pass.to_vec()],
        Together::None => side_by_side(pass, cores, need),
        Together::BothWays => {
            let back = |(from, to): &Way| (to.clone(), from.clone());
            let first = |way: &&Way| way.0 < way.1 || !pass.contains(&back(way));
            let both = |way: &Way| {
                let pair = [way.clone(), back(way)];
                pair.into_iter().filter(|way| pass.contains(way)).collect()
            };
            pass.iter().filter(first).map(both).collect()
        }
    }
}

/// What the connections of a group use.
#[derive(Default)]
struct Used {
    workers: BTreeSet<String>,
    ends: Vec<CpuSet>,
    gpus: BTreeSet<u32>,
    everything: bool,
}

impl Used {
    fn has_room(&self, way: &Way, need: &Need, cores: usize) -> bool {
        if self.workers.is_empty() {
            return true;
        }
        let is_crowded = (self.workers.len() + 2) * CPUS_AT_LEAST > cores;
        let takes_part = |name: &String| self.workers.contains(name);
        if self.everything || is_crowded || takes_part(&way.0) || takes_part(&way.1) {
            return false;
        }
        match need {
            Need::Everything => false,
            Need::Gpus(gpus) => {
                gpus[0] != gpus[1] && gpus.iter().all(|gpu| !self.gpus.contains(gpu))
            }
            Need::Cores(ends) => {
                let all: Vec<&CpuSet> = self.ends.iter().chain(ends).collect();
                all.len() * CPUS_OF_AN_END <= cores
                    && all.iter().all(|set| {
                        let beside = all.iter().filter(|other| !other.intersection(set).is_empty());
                        beside.count() * CPUS_OF_AN_END <= set.len()
                    })
            }
        }
    }

    fn add(&mut self, way: &Way, need: Need) {
        self.workers.extend([way.0.clone(), way.1.clone()]);
        match need {
            Need::Cores(ends) => self.ends.extend(ends),
            Need::Gpus(gpus) => self.gpus.extend(gpus),
            Need::Everything => self.everything = true,
        }
    }
}

fn side_by_side(pass: &[Way], cores: usize, need: impl Fn(&Way) -> Need) -> Vec<Vec<Way>> {
    let mut groups: Vec<(Used, Vec<Way>)> = Vec::new();
    for way in pass {
        let need = need(way);
        let at = groups.iter().position(|(used, _)| used.has_room(way, &need, cores));
        let at = at.unwrap_or_else(|| {
            groups.push((Used::default(), Vec::new()));
            groups.len() - 1
        });
        if let Some((used, group)) = groups.get_mut(at) {
            used.add(way, need);
            group.push(way.clone());
        }
    }
    groups.into_iter().map(|(_, group)| group).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn names(count: usize) -> Vec<String> {
        (0..count).map(|at| format!("gpu{at}")).collect()
    }

    fn all(names: &[String]) -> Vec<Way> {
        let to = |from: &String| {
            let others = names.iter().filter(|to| *to != from).cloned();
            others.map(|to| (from.clone(), to)).collect::<Vec<_>>()
        };
        names.iter().flat_map(to).collect()
    }

    fn in_passes(count: usize) -> Vec<Vec<Way>> {
        let names = names(count);
        passes(&all(&names), &names.iter().map(String::as_str).collect::<Vec<_>>())
    }

    proptest! {
        #[test]
        fn a_pass_has_each_worker_once_at_each_end_and_passes_have_each_way_once(count in 0usize..40) {
            let passes = in_passes(count);
            prop_assert_eq!(passes.len(), count.saturating_sub(1));
            for pass in &passes {
                let senders: BTreeSet<_> = pass.iter().map(|way| &way.0).collect();
                let receivers: BTreeSet<_> = pass.iter().map(|way| &way.1).collect();
                prop_assert_eq!((senders.len(), receivers.len()), (count, count));
            }
            let mut seen = passes.concat();
            seen.sort();
            let mut all = all(&names(count));
            all.sort();
            prop_assert_eq!(seen, all);
        }

        #[test]
        fn what_is_measured_side_by_side_shares_nothing(
            count in 2usize..12,
            cpus in 1u32..96,
            quota in 1usize..96,
            kinds in proptest::collection::vec(0u8..3, 144),
        ) {
            let number = |name: &String| name[3..].parse::<usize>().expect("a number");
            // Two workers on each GPU.
            let gpu = |name: &String| u32::try_from(number(name) / 2).expect("few");
            let need = |(from, to): &Way| match kinds[number(from) * 12 + number(to)] {
                0 => Need::Everything,
                1 if gpu(from) == gpu(to) => Need::Everything,
                1 => Need::Gpus([gpu(from), gpu(to)]),
                _ => Need::Cores([(); 2].map(|()| (0..cpus).collect())),
            };
            for pass in in_passes(count) {
                let groups = groups(&pass, Together::None, quota, need);
                prop_assert_eq!(groups.concat().len(), pass.len());
                for group in groups.iter().filter(|group| group.len() > 1) {
                    let ends: Vec<_> = group.iter().flat_map(|way| [&way.0, &way.1]).collect();
                    prop_assert_eq!(ends.iter().collect::<BTreeSet<_>>().len(), ends.len());
                    prop_assert!(ends.len() * CPUS_AT_LEAST <= quota);
                    let (mut cores, mut gpus) = (0, Vec::new());
                    for way in group {
                        match need(way) {
                            Need::Everything => prop_assert!(false, "{group:?}"),
                            Need::Gpus(two) => gpus.extend(two),
                            Need::Cores(_) => cores += 2,
                        }
                    }
                    prop_assert!(cores <= 2 || cores * CPUS_OF_AN_END <= quota.min(cpus as usize));
                    prop_assert_eq!(gpus.iter().collect::<BTreeSet<_>>().len(), gpus.len());
                }
            }
        }
    }

    #[test]
    fn near_and_distant_workers_come_early() {
        let distances: Vec<usize> = in_passes(8)
            .iter()
            .map(|pass| pass.iter().find(|way| way.0 == "gpu0").expect("all send"))
            .map(|way| way.1[3..].parse().expect("a number"))
            .collect();
        assert_eq!(distances, [1, 4, 2, 6, 5, 3, 7]);
    }

    #[test]
    fn four_pairs_of_a_machine_with_two_sockets_are_measured_at_once() {
        let socket = |name: &String| match name[3..].parse::<u32>() {
            Ok(0..4) => (0..56).collect::<CpuSet>(),
            _ => (56..112).collect(),
        };
        let need = |(from, to): &Way| Need::Cores([socket(from), socket(to)]);
        let pass = in_passes(8).swap_remove(0);
        let sizes: Vec<usize> =
            groups(&pass, Together::None, 112, need).iter().map(Vec::len).collect();
        assert_eq!(sizes, [4, 4]);
    }
}
