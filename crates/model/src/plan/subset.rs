//! Which `k` of the GPUs reach each other best.
//!
//! Uses the bandwidth that the topology tells; does not measure.
//!
//! *Invariant:* for up to [`EXACT`] GPUs the answer is optimal: no other set has a faster slowest
//! pair, and no set with an equally fast one has a larger sum; ties go to the first in order.

use crate::spec::ChooseBy;
use crate::topology::{Device, Gpu, LinkKind, Note, NvLinkPeer, Topology};

/// Up to this many GPUs every set is tried (12,870 sets for eight of sixteen).
const EXACT: usize = 16;

/// The chosen GPUs.
#[derive(Clone, Debug)]
pub(super) struct Choice {
    /// Positions in the given list, rising.
    pub(super) positions: Vec<usize>,
    /// Why these were chosen.
    pub(super) reason: String,
    /// The others, each with the reason.
    pub(super) why_not: String,
    /// Requests that could not be satisfied.
    pub(super) note: Option<Note>,
}

/// Chooses `count` of `gpus`; `count` is between 1 and their number.
pub(super) fn choose(topology: &Topology, gpus: &[&Gpu], count: usize, by: ChooseBy) -> Choice {
    if by == ChooseBy::First || count == 1 {
        return Choice {
            positions: (0..count).collect(),
            reason: format!("the first {count}"),
            why_not: "comes later in order".to_owned(),
            note: None,
        };
    }
    let pairs = Pairs::of(topology, gpus);
    let exact = gpus.len() <= EXACT;
    let positions = if exact { pairs.best(count) } else { pairs.grown(count) };
    let slowest = pairs.slowest(&positions);
    let note = (!exact).then(|| {
        let text = format!(
            "chosen step by step: trying every {count} of {} GPUs would take too long",
            gpus.len()
        );
        Note::new("gpus", text)
    });
    Choice {
        reason: format!("the best-connected {count}: slowest pair {slowest}"),
        why_not: format!("not in the best-connected {count}"),
        positions,
        note,
    }
}

/// Bandwidth of every pair, in MB/s; only comparisons matter.
pub(super) struct Pairs {
    bandwidth: Vec<Vec<u64>>,
    names: Vec<Vec<String>>,
}

impl Pairs {
    pub(super) fn of(topology: &Topology, gpus: &[&Gpu]) -> Self {
        let links = topology.known_links();
        let kind = |a: &Gpu, b: &Gpu| links.between(Device::Gpu(a.index), Device::Gpu(b.index));
        let row = |a: &&Gpu| gpus.iter().map(|b| bandwidth(a, b, kind(a, b))).collect();
        let names = |a: &&Gpu| {
            gpus.iter()
                .map(|b| kind(a, b).map_or_else(|| "unknown".to_owned(), |k| k.to_string()))
                .collect()
        };
        Self { bandwidth: gpus.iter().map(row).collect(), names: gpus.iter().map(names).collect() }
    }

    /// How many GPUs these are.
    pub(super) fn count(&self) -> usize {
        self.bandwidth.len()
    }

    pub(super) fn between(&self, one: usize, other: usize) -> u64 {
        self.bandwidth[one][other]
    }

    #[cfg(test)]
    pub(super) fn made(count: usize, between: impl Fn(usize, usize) -> u64) -> Self {
        let row = |a: usize| (0..count).map(|b| between(a, b)).collect();
        let names = vec![vec![String::new(); count]; count];
        Self { bandwidth: (0..count).map(row).collect(), names }
    }

    /// Every set is built in rising order; a branch ends when its slowest pair is already slower
    /// than that of the best set so far.
    fn best(&self, count: usize) -> Vec<usize> {
        struct Search<'a> {
            pairs: &'a Pairs,
            count: usize,
            best: Option<(u64, u64, Vec<usize>)>,
        }
        impl Search<'_> {
            fn grow(&mut self, set: &mut Vec<usize>, slowest: u64, sum: u64) {
                if set.len() == self.count {
                    let better = self
                        .best
                        .as_ref()
                        .is_none_or(|(least, total, _)| (slowest, sum) > (*least, *total));
                    if better {
                        self.best = Some((slowest, sum, set.clone()));
                    }
                    return;
                }
                let from = set.last().map_or(0, |last| last + 1);
                let needed = self.count - set.len();
                let all = self.pairs.bandwidth.len();
                for next in from..=(all - needed) {
                    let row = &self.pairs.bandwidth[next];
                    let least = set.iter().map(|at| row[*at]).fold(slowest, u64::min);
                    let total = sum + set.iter().map(|at| row[*at]).sum::<u64>();
                    if self.best.as_ref().is_some_and(|(best, _, _)| least < *best) {
                        continue;
                    }
                    set.push(next);
                    self.grow(set, least, total);
                    set.pop();
                }
            }
        }
        let mut search = Search { pairs: self, count, best: None };
        search.grow(&mut Vec::new(), u64::MAX, 0);
        search.best.map(|(_, _, set)| set).unwrap_or_default()
    }

    /// Grows a set from every GPU by adding the best next one, and takes the best of these sets.
    fn grown(&self, count: usize) -> Vec<usize> {
        let all = self.bandwidth.len();
        let grow = |start: usize| {
            let mut set = vec![start];
            while set.len() < count {
                let rank = |next: &usize| {
                    let row = &self.bandwidth[*next];
                    let least = set.iter().map(|at| row[*at]).min();
                    (least, set.iter().map(|at| row[*at]).sum::<u64>(), std::cmp::Reverse(*next))
                };
                let next = (0..all).filter(|next| !set.contains(next)).max_by_key(rank);
                set.extend(next);
            }
            set.sort_unstable();
            set
        };
        let rank = |set: &Vec<usize>| {
            let (least, sum) = self.score(set);
            (least, sum, std::cmp::Reverse(set.clone()))
        };
        (0..all).map(grow).max_by_key(rank).unwrap_or_default()
    }

    fn pairs_of<'a>(&self, set: &'a [usize]) -> impl Iterator<Item = (usize, usize)> + 'a {
        set.iter().enumerate().flat_map(|(at, a)| set[at + 1..].iter().map(|b| (*a, *b)))
    }

    /// The slowest pair of a set, and the sum of all.
    pub(super) fn score(&self, set: &[usize]) -> (u64, u64) {
        let values = || self.pairs_of(set).map(|(a, b)| self.bandwidth[a][b]);
        (values().min().unwrap_or(u64::MAX), values().sum())
    }

    /// What joins the slowest pair.
    pub(super) fn slowest(&self, set: &[usize]) -> String {
        let slowest = self.pairs_of(set).min_by_key(|(a, b)| self.bandwidth[*a][*b]);
        slowest.map_or_else(|| "none".to_owned(), |(a, b)| self.names[a][b].clone())
    }
}

/// Bandwidth of a pair in MB/s, one direction.
///
/// NVLinks count with their own rate where the source tells it, else with the generation's (facts:
/// 20 GB/s a link for P100, 25 up to H100, 50 for B200). PCIe paths only have to be ordered below.
fn bandwidth(a: &Gpu, b: &Gpu, kind: Option<LinkKind>) -> u64 {
    match kind {
        None => 0,
        Some(LinkKind::Nv(links)) => u64::from(links) * link_mb_per_s(a, b),
        Some(LinkKind::X) => u64::MAX / 1024,
        Some(LinkKind::Pix) => 12_000,
        Some(LinkKind::Pxb) => 11_000,
        Some(LinkKind::Phb) => 10_000,
        Some(LinkKind::Node) => 9_000,
        Some(LinkKind::Sys) => 8_000,
    }
}

fn link_mb_per_s(a: &Gpu, b: &Gpu) -> u64 {
    let told = |gpu: &Gpu, peer: &Gpu| {
        let to_peer = |end: NvLinkPeer| {
            end == NvLinkPeer::Switch || peer.pci.is_some_and(|pci| end == NvLinkPeer::Gpu(pci))
        };
        let links = gpu.nvlinks.iter().filter(|link| link.active && to_peer(link.peer));
        links.filter_map(|link| link.gb_per_s).reduce(f64::min)
    };
    if let (Some(there), Some(back)) = (told(a, b), told(b, a)) {
        let mb = there.min(back) * 1000.0;
        // A link below 1 MB/s or beyond 1 TB/s is an error of the source.
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "clamped to a range that fits"
        )]
        return mb.clamp(1.0, 1e6) as u64;
    }
    let generation = |gpu: &Gpu| {
        gpu.compute_capability.map_or(25_000, |capability| match capability.major {
            0..=6 => 20_000,
            7..=9 => 25_000,
            _ => 50_000,
        })
    };
    generation(a).min(generation(b))
}
