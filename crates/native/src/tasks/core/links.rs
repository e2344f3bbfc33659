//! The bandwidth of links between workers: an estimate from the topology, then measurements.
//!
//! Does not choose a link; `placement` does.
//!
//! Small transfers are dominated by latency and large ones by bandwidth, so each pair has an
//! average per size class. Processes come and go but links stay, so they are kept by worker name.

use std::collections::{BTreeMap, VecDeque};

use crate::random;
use cuda_cluster_wire::tasks::LinkOverview;

/// Default without an estimate: an average PCIe link, in bytes per second.
const DEFAULT_BANDWIDTH: f64 = 10e9;

/// Time that any transfer takes at least, in seconds.
const LATENCY: f64 = 50e-6;

/// Weight of the newest measurement.
const WEIGHT: f64 = 0.3;

/// Number of recent measurements kept for the quartiles.
const KEPT: usize = 256;

/// One placement in this many tries a link that has not been used for long.
const PROBE_EVERY: u64 = 100;

/// Sizes that are averaged together: below 64 KiB, 1 MiB, 16 MiB, and above.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum SizeClass {
    Small,
    Medium,
    Large,
    Huge,
}

impl SizeClass {
    pub(super) fn of(bytes: u64) -> Self {
        match bytes {
            0..0x1_0000 => SizeClass::Small,
            0x1_0000..0x10_0000 => SizeClass::Medium,
            0x10_0000..0x100_0000 => SizeClass::Large,
            _ => SizeClass::Huge,
        }
    }

    fn nearest_first(self) -> [SizeClass; 3] {
        use SizeClass::{Huge, Large, Medium, Small};
        match self {
            Small => [Medium, Large, Huge],
            Medium => [Large, Small, Huge],
            Large => [Huge, Medium, Small],
            Huge => [Large, Medium, Small],
        }
    }
}

/// So many transfers, and their bytes together.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Many {
    pub(super) count: u64,
    pub(super) bytes: u64,
}

#[derive(Default)]
struct Link {
    /// Bytes per second, by size.
    averages: BTreeMap<SizeClass, f64>,
    latest: VecDeque<f64>,
    transfers: u64,
    bytes: u64,
    /// When it was last measured, in microseconds.
    measured: u64,
}

/// All links.
pub(super) struct Links {
    names: BTreeMap<String, usize>,
    priors: BTreeMap<(usize, usize), f64>,
    links: BTreeMap<(usize, usize), Link>,
    state: u64,
}

impl Links {
    pub(super) fn new(priors: BTreeMap<(String, String), f64>, seed: u64) -> Self {
        let mut links = Self {
            names: BTreeMap::new(),
            priors: BTreeMap::new(),
            links: BTreeMap::new(),
            state: seed | 1,
        };
        for ((from, to), bandwidth) in priors {
            let pair = (links.place(&from), links.place(&to));
            links.priors.insert(pair, bandwidth);
        }
        links
    }

    /// Where a worker of this name stands here.
    pub(super) fn place(&mut self, name: &str) -> usize {
        let next = self.names.len();
        if let Some(place) = self.names.get(name) {
            return *place;
        }
        self.names.insert(name.to_owned(), next);
        next
    }

    /// Seconds that transfers, all of one size class, are expected to take.
    pub(super) fn seconds(&self, pair: (usize, usize), class: SizeClass, many: Many) -> f64 {
        many.count as f64 * LATENCY + many.bytes as f64 / self.bandwidth(pair, class)
    }

    /// Bytes per second: as measured for this size, else for the nearest measured size, else
    /// estimated.
    fn bandwidth(&self, pair: (usize, usize), class: SizeClass) -> f64 {
        let measured = self.links.get(&pair).and_then(|link| {
            let exact = link.averages.get(&class);
            exact.or_else(|| class.nearest_first().iter().find_map(|c| link.averages.get(c)))
        });
        let known = measured.or_else(|| self.priors.get(&pair));
        known.copied().unwrap_or(DEFAULT_BANDWIDTH)
    }

    /// When the link was last measured, in microseconds; 0 for never.
    pub(super) fn measured(&self, pair: (usize, usize)) -> u64 {
        self.links.get(&pair).map_or(0, |link| link.measured)
    }

    /// Learns from a transfer.
    pub(super) fn learn(&mut self, pair: (usize, usize), bytes: u64, micros: u64, now: u64) {
        let rate = bytes as f64 / (micros.max(1) as f64 * 1e-6);
        let link = self.links.entry(pair).or_default();
        link.transfers += 1;
        link.bytes += bytes;
        link.measured = now.max(1);
        if link.latest.len() == KEPT {
            link.latest.pop_front();
        }
        link.latest.push_back(rate);
        link.averages
            .entry(SizeClass::of(bytes))
            .and_modify(|average| *average += WEIGHT * (rate - *average))
            .or_insert(rate);
    }

    /// Resets the counters. Learned bandwidths stay.
    pub(super) fn count_anew(&mut self) {
        for link in self.links.values_mut() {
            link.latest.clear();
            (link.transfers, link.bytes) = (0, 0);
        }
    }

    /// Whether the current placement should try an idle link instead of the best one.
    pub(super) fn wants_probe(&mut self) -> bool {
        self.state = random::following(self.state);
        self.state.is_multiple_of(PROBE_EVERY)
    }

    /// The names of the workers, by their places.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        let mut names = vec![""; self.names.len()];
        for (name, place) in &self.names {
            names[*place] = name;
        }
        names.into_iter()
    }

    pub(super) fn overview(&self) -> Vec<LinkOverview> {
        let names: Vec<&str> = self.names().collect();
        self.links
            .iter()
            .filter(|(_, link)| link.transfers > 0)
            .map(|(&(from, to), link)| LinkOverview {
                from: names[from].to_owned(),
                to: names[to].to_owned(),
                transfers: link.transfers,
                bytes: link.bytes,
                quartiles: quartiles(&link.latest),
            })
            .collect()
    }
}

fn quartiles(rates: &VecDeque<f64>) -> [f64; 3] {
    let mut sorted: Vec<f64> = rates.iter().copied().collect();
    sorted.sort_by(f64::total_cmp);
    let last = sorted.len().saturating_sub(1);
    [1, 2, 3].map(|quarter| sorted.get(last * quarter / 4).copied().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_measurement_replaces_the_prior_for_its_size_and_its_neighbours() {
        let names = ("a".to_owned(), "b".to_owned());
        let mut links = Links::new([(names, 4e9)].into(), 1);
        let (there, back) =
            ((links.place("a"), links.place("b")), (links.place("b"), links.place("a")));
        assert_eq!(links.bandwidth(there, SizeClass::Large), 4e9);
        assert_eq!(links.bandwidth(back, SizeClass::Large), DEFAULT_BANDWIDTH);
        links.learn(there, 10 << 20, 10 << 20, 5);
        assert!((links.bandwidth(there, SizeClass::Large) - 1e6).abs() < 1.0);
        assert!((links.bandwidth(there, SizeClass::Small) - 1e6).abs() < 1.0);
    }

    #[test]
    fn many_transfers_take_as_long_as_each_of_them_after_the_other() {
        let mut links = Links::new(BTreeMap::new(), 1);
        let pair = (links.place("a"), links.place("b"));
        links.learn(pair, 3 << 20, 1000, 5);
        let class = SizeClass::of(3 << 20);
        let one = links.seconds(pair, class, Many { count: 1, bytes: 3 << 20 });
        let ten = links.seconds(pair, class, Many { count: 10, bytes: 30 << 20 });
        assert!((ten - 10.0 * one).abs() < 1e-9, "{ten} {one}");
    }

    #[test]
    fn an_average_follows_a_link_that_changes() {
        let mut links = Links::new(BTreeMap::new(), 1);
        let pair = (links.place("a"), links.place("b"));
        links.learn(pair, 1_000_000, 1_000_000, 1);
        for now in 0..20 {
            links.learn(pair, 1_000_000, 100_000, now);
        }
        let learned = links.bandwidth(pair, SizeClass::of(1_000_000));
        assert!((9.9e6..=10e6).contains(&learned), "{learned}");
    }

    #[test]
    fn quartiles_are_those_of_the_latest_transfers() {
        let mut links = Links::new(BTreeMap::new(), 1);
        let pair = (links.place("a"), links.place("b"));
        // The slow ones are the oldest, and no longer kept.
        for _ in 0..7 {
            links.learn(pair, 1, 1_000_000, 1);
        }
        for rate in 1..=KEPT as u64 {
            links.learn(pair, rate * 1000, 1_000_000, 1);
        }
        let overview = links.overview();
        assert_eq!(overview.len(), 1);
        assert_eq!(overview[0].transfers, KEPT as u64 + 7);
        let last = KEPT - 1;
        let expected = [1, 2, 3].map(|quarter| (last * quarter / 4 + 1) as f64 * 1000.0);
        for (found, expected) in overview[0].quartiles.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-6, "{:?}", overview[0].quartiles);
        }
    }

    #[test]
    fn about_one_placement_in_a_hundred_is_a_probe() {
        let mut links = Links::new(BTreeMap::new(), 7);
        let probes = (0..100_000).filter(|_| links.wants_probe()).count();
        assert!((800..1200).contains(&probes), "{probes}");
    }
}
