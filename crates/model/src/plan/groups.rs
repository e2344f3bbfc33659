//! Which GPUs each of several programs gets: a group whose members reach each other best.
//!
//! Uses the bandwidth that the topology tells (`subset`), and does not weigh the links between
//! groups: a program's own ranks talk most.
//!
//! *Invariant:* no GPU is in two groups. If there are at most [`WAYS`] ways to share them out, no
//! other way has a better slowest pair in its worst group, then in the next, and so on, and of
//! those that are as good none has a larger sum; ties go to the first in order.

use super::context::{Chosen, Selected};
use super::error::PlanError;
use super::form::Rejected;
use super::subset::{self, Pairs};
use crate::spec::{ChooseBy, ClusterSpec, GpuSelection};
use crate::topology::{Gpu, Note, Topology};

/// Up to so many ways all are tried (70 for two groups of four of eight GPUs, 12,870 for two of
/// eight of sixteen).
const WAYS: u64 = 100_000;

/// Shares the GPUs out among the programs of a job, which need so many each. Those that are kept
/// for others that fail come last.
pub(super) fn share<'a>(
    topology: &Topology,
    spec: &ClusterSpec,
    mut selected: Selected<'a>,
    sizes: &[u32],
    notes: &mut Vec<Note>,
) -> Result<Selected<'a>, PlanError> {
    let usable = selected.chosen.len();
    let spares = spec.command.spares.unwrap_or(0);
    let wanted = sizes.iter().fold(spares, |sum, size| sum.saturating_add(*size));
    if wanted as usize > usable {
        return Err(PlanError::TooFewGpus { wanted, usable });
    }
    let by = match &spec.gpus {
        Some(GpuSelection::Choose(choose)) => choose.choose,
        _ => ChooseBy::default(),
    };
    let gpus: Vec<&Gpu> = selected.chosen.iter().map(|chosen| chosen.gpu).collect();
    let sizes: Vec<usize> = sizes.iter().map(|size| *size as usize).collect();
    let (pairs, step_by_step) = (Pairs::of(topology, &gpus), ways(usable, &sizes) > WAYS);
    let groups = match (by, step_by_step) {
        (ChooseBy::First, _) => in_order(&sizes),
        (_, false) => pairs.best_groups(&sizes),
        (_, true) => pairs.grown_groups(topology, &gpus, &sizes),
    };
    if step_by_step && by != ChooseBy::First {
        let text = format!("chosen step by step: {usable} GPUs can be shared out in too many ways");
        notes.push(Note::new("gpus", text));
    }
    let name = |at: &usize| selected.chosen[*at].name();
    let names = |group: &[usize]| group.iter().map(name).collect::<Vec<_>>().join(", ");
    let reason = |group: &Vec<usize>| match (by, group.as_slice()) {
        (ChooseBy::First, _) => format!("{}: the next in order", names(group)),
        (_, [_]) => format!("{}: one GPU has no pair", names(group)),
        _ => {
            format!("{} reach each other best: slowest pair {}", names(group), pairs.slowest(group))
        }
    };
    selected.groups = groups.iter().map(reason).collect();
    let mut order: Vec<usize> = groups.concat();
    let rest: Vec<usize> = (0..usable).filter(|at| !order.contains(at)).collect();
    let (kept, left) = rest.split_at(spares as usize);
    order.extend(kept);
    let why = "no program needs it, and others reach each other better".to_owned();
    let rejected = |at: &usize| Rejected { what: name(at), why: why.clone() };
    let rejected: Vec<Rejected> = left.iter().map(rejected).collect();
    selected.rejected.extend(rejected);
    selected.chosen = order.iter().map(|at| selected.chosen[*at]).collect::<Vec<Chosen<'a>>>();
    selected.reason = format!("a group for each program; {}", selected.reason);
    Ok(selected)
}

/// The first GPUs for the first program, the next for the next.
fn in_order(sizes: &[usize]) -> Vec<Vec<usize>> {
    let mut next = 0;
    let group = |size: &usize| {
        let from = next;
        next += size;
        (from..next).collect()
    };
    sizes.iter().map(group).collect()
}

/// In how many ways groups of these sizes can be made of so many; too many to count are
/// `u64::MAX`.
fn ways(mut all: usize, sizes: &[usize]) -> u64 {
    let mut ways = 1u64;
    for size in sizes {
        let mut choices = 1u64;
        for at in 0..*size.min(&(all - size)) {
            // Whole in each step: a product of neighbours.
            let Some(product) = choices.checked_mul((all - at) as u64) else { return u64::MAX };
            choices = product / (at as u64 + 1);
        }
        ways = ways.saturating_mul(choices);
        all -= size;
    }
    ways
}

/// How good groups are: the larger, the better.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Score {
    /// The slowest pair of each group, the worst group first.
    slowest: Vec<u64>,
    /// All pairs within groups.
    sum: u128,
}

/// A way to share GPUs out that is being tried.
struct Search<'a> {
    pairs: &'a Pairs,
    sizes: &'a [usize],
    all: usize,
    groups: Vec<Vec<usize>>,
    best: Option<(Score, Vec<Vec<usize>>)>,
}

impl Search<'_> {
    /// Adds one more GPU, in rising order, to the group that is being filled; gives up when its
    /// slowest pair is already slower than the worst of the best way so far.
    fn grow(&mut self) {
        let Some(last) = self.groups.last() else { return };
        if last.len() == self.sizes[self.groups.len() - 1] {
            if self.groups.len() < self.sizes.len() {
                self.groups.push(Vec::new());
                self.grow();
                self.groups.pop();
            } else {
                self.judge();
            }
            return;
        }
        let from = last.last().map_or(0, |last| last + 1);
        for next in from..self.all {
            if self.groups.iter().any(|group| group.contains(&next)) || !self.is_hopeful(next) {
                continue;
            }
            self.put(next);
            self.grow();
            self.take();
        }
    }

    fn is_hopeful(&self, next: usize) -> bool {
        let Some((best, _)) = &self.best else { return true };
        let worst = best.slowest.first().copied().unwrap_or(0);
        let group = self.groups.last().map_or(&[][..], Vec::as_slice);
        group.iter().all(|at| self.pairs.between(*at, next) >= worst)
    }

    fn put(&mut self, next: usize) {
        if let Some(group) = self.groups.last_mut() {
            group.push(next);
        }
    }

    fn take(&mut self) {
        if let Some(group) = self.groups.last_mut() {
            group.pop();
        }
    }

    fn judge(&mut self) {
        let score = self.pairs.score_of(&self.groups);
        if self.best.as_ref().is_none_or(|(best, _)| score > *best) {
            self.best = Some((score, self.groups.clone()));
        }
    }
}

impl Pairs {
    fn score_of(&self, groups: &[Vec<usize>]) -> Score {
        let scores = groups.iter().map(|group| self.score(group));
        let (mut slowest, sums): (Vec<u64>, Vec<u64>) = scores.unzip();
        slowest.sort_unstable();
        Score { slowest, sum: sums.into_iter().map(u128::from).sum() }
    }

    fn best_groups(&self, sizes: &[usize]) -> Vec<Vec<usize>> {
        // A program whose ranks have no GPU has an empty group.
        let groups = vec![Vec::new()];
        let mut search = Search { pairs: self, sizes, all: self.count(), groups, best: None };
        search.grow();
        search.best.map(|(_, groups)| groups).unwrap_or_default()
    }

    /// The largest group first, of those that are left; then two GPUs change places as long as that
    /// is better.
    fn grown_groups(&self, topology: &Topology, gpus: &[&Gpu], sizes: &[usize]) -> Vec<Vec<usize>> {
        let mut groups = vec![Vec::new(); sizes.len()];
        let mut left: Vec<usize> = (0..gpus.len()).collect();
        let mut largest_first: Vec<usize> = (0..sizes.len()).filter(|at| sizes[*at] > 0).collect();
        largest_first.sort_by_key(|at| std::cmp::Reverse(sizes[*at]));
        for at in largest_first {
            let among: Vec<&Gpu> = left.iter().map(|place| gpus[*place]).collect();
            let choice = subset::choose(topology, &among, sizes[at], ChooseBy::default());
            groups[at] = choice.positions.iter().map(|place| left[*place]).collect();
            left.retain(|place| !groups[at].contains(place));
        }
        groups.push(left);
        while let Some(better) = self.better(&groups) {
            groups = better;
        }
        groups.pop();
        groups.iter_mut().for_each(|group| group.sort_unstable());
        groups
    }

    /// The same groups after the first exchange of two GPUs that makes them better. The last group
    /// is of those that are left, whose links do not matter.
    fn better(&self, groups: &[Vec<usize>]) -> Option<Vec<Vec<usize>>> {
        let score = |groups: &[Vec<usize>]| self.score_of(&groups[..groups.len() - 1]);
        let now = score(groups);
        let places =
            || (0..groups.len()).flat_map(|at| (0..groups[at].len()).map(move |n| (at, n)));
        for (a, n) in places() {
            for (b, m) in places().filter(|(b, _)| *b > a) {
                let mut other = groups.to_vec();
                (other[a][n], other[b][m]) = (groups[b][m], groups[a][n]);
                if score(&other) > now {
                    return Some(other);
                }
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::{builtin, parse};
    use proptest::prelude::*;

    fn machine(name: &str) -> Topology {
        parse(builtin(name).expect("built in")).expect("right")
    }

    fn groups(topology: &Topology, sizes: &[usize]) -> Vec<Vec<usize>> {
        let gpus: Vec<&Gpu> = topology.gpus.iter().collect();
        Pairs::of(topology, &gpus).best_groups(sizes)
    }

    fn grown(topology: &Topology, sizes: &[usize]) -> Vec<Vec<usize>> {
        let gpus: Vec<&Gpu> = topology.gpus.iter().collect();
        Pairs::of(topology, &gpus).grown_groups(topology, &gpus, sizes)
    }

    #[test]
    fn the_two_quads_of_a_dgx_1_are_two_programs() {
        let topology = machine("dgx-1-v100");
        for groups in [groups(&topology, &[4, 4]), grown(&topology, &[4, 4])] {
            assert_eq!(groups, [vec![0, 1, 2, 3], vec![4, 5, 6, 7]]);
        }
    }

    #[test]
    fn a_program_that_has_no_gpu_has_an_empty_group() {
        let topology = machine("dgx-1-v100");
        assert_eq!(groups(&topology, &[8, 0])[1], Vec::<usize>::new());
        assert_eq!(groups(&topology, &[0, 1]), [vec![], vec![0]]);
        assert!(groups(&topology, &[0, 0]).concat().is_empty());
        assert_eq!(grown(&topology, &[8, 0])[1], Vec::<usize>::new());
    }

    #[test]
    fn ways_are_counted_without_overflow() {
        assert_eq!(ways(8, &[4, 4]), 70);
        assert_eq!(ways(8, &[3, 3]), 560);
        assert_eq!(ways(16, &[8, 8]), 12_870);
        assert_eq!(ways(8, &[]), 1);
        assert!(ways(512, &[256, 128, 128]) > WAYS);
    }

    /// Any links, sizes that fit.
    fn cases() -> impl Strategy<Value = (Vec<u64>, Vec<usize>)> {
        (prop::collection::vec(1u64..5, 64), prop::collection::vec(0usize..4, 1..4))
    }

    fn pairs(speeds: &[u64]) -> Pairs {
        let between = |a: usize, b: usize| speeds[a.min(b) * 8 + a.max(b)];
        Pairs::made(8, between)
    }

    /// All ways, one after another.
    fn all_ways(left: &[usize], sizes: &[usize]) -> Vec<Vec<Vec<usize>>> {
        fn sets(left: &[usize], size: usize) -> Vec<Vec<usize>> {
            if size == 0 {
                return vec![Vec::new()];
            }
            let with = |at: usize| {
                let rest = sets(&left[at + 1..], size - 1).into_iter();
                rest.map(move |rest| [vec![left[at]], rest].concat())
            };
            (0..left.len()).flat_map(with).collect()
        }
        let Some((size, sizes)) = sizes.split_first() else { return vec![Vec::new()] };
        let further = |set: Vec<usize>| {
            let left: Vec<usize> = left.iter().copied().filter(|at| !set.contains(at)).collect();
            let rest = all_ways(&left, sizes).into_iter();
            rest.map(move |rest| [vec![set.clone()], rest].concat())
        };
        sets(left, *size).into_iter().flat_map(further).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

        #[test]
        fn no_other_way_is_better_and_the_first_of_equals_is_taken((speeds, sizes) in cases()) {
            prop_assume!(sizes.iter().sum::<usize>() <= 8);
            let pairs = pairs(&speeds);
            let found = pairs.best_groups(&sizes);
            let all: Vec<usize> = (0..8).collect();
            let ways = all_ways(&all, &sizes);
            let best = ways.iter().map(|way| pairs.score_of(way)).max().expect("one");
            let first = ways.iter().find(|way| pairs.score_of(way) == best).expect("one");
            prop_assert_eq!(&found, first);
        }

        #[test]
        fn groups_have_their_sizes_and_nobody_is_in_two((speeds, sizes) in cases()) {
            prop_assume!(sizes.iter().sum::<usize>() <= 8);
            let topology = machine("dgx-1-v100");
            let gpus: Vec<&Gpu> = topology.gpus.iter().collect();
            let pairs = pairs(&speeds);
            let grown = pairs.grown_groups(&topology, &gpus, &sizes);
            for groups in [pairs.best_groups(&sizes), grown] {
                prop_assert_eq!(groups.iter().map(Vec::len).collect::<Vec<_>>(), sizes.clone());
                let mut all = groups.concat();
                prop_assert!(groups.iter().all(|group| group.is_sorted()));
                all.sort_unstable();
                all.dedup();
                prop_assert_eq!(all.len(), sizes.iter().sum::<usize>());
            }
        }

        #[test]
        fn programs_that_fit_stay_on_their_islands(
            order in Just((0..8).collect::<Vec<usize>>()).prop_shuffle(),
            one in 1usize..5,
            other in 1usize..5,
        ) {
            // Two islands, whose GPUs are numbered in any order.
            let island = |at: usize| order[at] / 4;
            let pairs = Pairs::made(8, |a, b| if island(a) == island(b) { 50 } else { 10 });
            for group in pairs.best_groups(&[one, other]) {
                prop_assert!(group.iter().all(|at| island(*at) == island(group[0])), "{:?}", group);
            }
        }
    }
}
