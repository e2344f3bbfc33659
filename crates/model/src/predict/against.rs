//! Measurements beside the prediction, and the part that explains most of what is missing.
//!
//! *Invariant:* a part is suspected only if a slow pair passes it; how many good ones do is said.

use std::collections::BTreeMap;

use serde::Serialize;

use super::ways::Parts;
use super::{Component, Figure, alone, ordered, sum, together};
use crate::ids::GpuIndex;
use crate::topology::{Gpu, Topology};

/// What else was going on while a pair was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    /// Nothing.
    Alone,
    /// The pair's other direction; the figure is one direction's.
    BothWays,
    /// All pairs at once.
    All,
}

/// A bandwidth that was measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// The GPU that the copies read.
    pub from: GpuIndex,
    /// The GPU that they write.
    pub to: GpuIndex,
    /// In 10⁹ bytes per second.
    pub gb_per_s: f64,
}

/// All measurements beside the prediction.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Each pair that was measured.
    pub pairs: Vec<Compared>,
    /// The parts that most of the slow pairs share and few of the others; several only if all slow
    /// pairs pass each. Empty if no pair is slow, or no part explains it.
    pub suspects: Vec<Suspect>,
}

/// A measurement beside its prediction.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Compared {
    /// The GPU that the copies read.
    pub from: GpuIndex,
    /// The GPU that they write.
    pub to: GpuIndex,
    /// In 10⁹ bytes per second.
    pub measured_gb_per_s: f64,
    /// What it should be.
    pub predicted: Figure,
    /// Whether it is below the share of the prediction that is asked for.
    pub is_slow: bool,
}

impl Compared {
    /// The measured share of the prediction; `None` if there is none.
    pub fn share(&self) -> Option<f64> {
        Some(self.measured_gb_per_s / self.predicted.gb_per_s()?)
    }
}

/// A part, and how many of the pairs that pass it are slow.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Suspect {
    /// The part.
    pub component: Component,
    /// Slow pairs that pass it.
    pub slow: usize,
    /// Other pairs that pass it.
    pub good: usize,
}

/// The most suspects that are named.
const SUSPECTS: usize = 4;

/// Compares measurements of a machine with its prediction. What is below `share` of it is slow.
pub fn against(topology: &Topology, load: Load, measured: &[Measured], share: f64) -> Comparison {
    let is_measured =
        |gpu: &&Gpu| measured.iter().any(|pair| pair.from == gpu.index || pair.to == gpu.index);
    let gpus: Vec<&Gpu> = topology.gpus.iter().filter(is_measured).collect();
    let mut parts = Parts::of(topology);
    let among: Vec<_> =
        ordered(&gpus).map(|(from, to)| ((from, to), parts.between(from, to))).collect();
    let ways: Vec<_> = among.iter().map(|(_, way)| way.clone()).collect();
    let all = if load == Load::All { together(&parts, &ways) } else { Vec::new() };
    let mut pairs = Vec::new();
    let mut passed: BTreeMap<Component, [usize; 2]> = BTreeMap::new();
    for (at, ((from, to), way)) in among.iter().enumerate() {
        let ends = (from.index, to.index);
        let Some(one) = measured.iter().find(|one| (one.from, one.to) == ends) else { continue };
        let back = || {
            let back = among.iter().find(|((a, b), _)| (b.index, a.index) == ends);
            back.map_or_else(|| way.clone(), |(_, way)| way.clone())
        };
        let predicted = match load {
            Load::Alone => alone(&parts, way),
            Load::BothWays => sum(&parts, &[way.clone(), back()]).times(0.5),
            Load::All => all[at].clone(),
        };
        let is_slow = predicted.gb_per_s().is_some_and(|most| one.gb_per_s < most * share);
        let known = predicted.gb_per_s().and(way.as_ref().ok());
        for part in known.into_iter().flatten() {
            let counts = passed.entry(parts.components[*part].clone()).or_default();
            counts[usize::from(!is_slow)] += 1;
        }
        let measured_gb_per_s = one.gb_per_s;
        pairs.push(Compared { from: ends.0, to: ends.1, measured_gb_per_s, predicted, is_slow });
    }
    let slow = pairs.iter().filter(|pair| pair.is_slow).count();
    Comparison { suspects: suspects(passed, slow), pairs }
}

/// Those whose pairs are most nearly the slow ones.
fn suspects(passed: BTreeMap<Component, [usize; 2]>, all_slow: usize) -> Vec<Suspect> {
    // How many are in both of all that are in one.
    let score = |suspect: &Suspect| suspect.slow as f64 / (all_slow + suspect.good) as f64;
    let suspects = passed.into_iter().filter(|(_, [slow, _])| *slow > 0);
    let mut suspects: Vec<Suspect> =
        suspects.map(|(component, [slow, good])| Suspect { component, slow, good }).collect();
    suspects.sort_by(|a, b| score(b).total_cmp(&score(a)).then(a.component.cmp(&b.component)));
    let best = suspects.first().map(score);
    suspects.retain(|suspect| Some(score(suspect)) == best);
    // Several of which none is in all are as good as any: all is slow.
    if suspects.len() > 1 && suspects.iter().any(|suspect| suspect.slow < all_slow) {
        suspects.clear();
    }
    suspects.truncate(SUSPECTS);
    suspects
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::predict::{ComponentKind, predict};
    use crate::topology::{builtin, parse};

    /// A machine, and what it should deliver.
    fn machine(name: &str) -> (Topology, Vec<Measured>) {
        let topology = parse(builtin(name).expect("built in")).expect("it reads");
        let good = predict(&topology).pairs.into_iter().map(|pair| Measured {
            from: pair.from,
            to: pair.to,
            gb_per_s: pair.one_way.gb_per_s().expect("known"),
        });
        (topology.clone(), good.collect())
    }

    #[test]
    fn what_is_as_predicted_has_no_suspect() {
        let (topology, measured) = machine("dgx-h100");
        let comparison = against(&topology, Load::Alone, &measured, 0.8);
        assert!(comparison.pairs.iter().all(|pair| pair.share() == Some(1.0)));
        assert_eq!(comparison.suspects, []);
    }

    #[test]
    fn a_gpu_with_slow_links_is_suspected_by_them() {
        let (topology, mut measured) = machine("dgx-h100");
        for pair in &mut measured {
            if pair.from.0 == 5 || pair.to.0 == 5 {
                pair.gb_per_s /= 3.0;
            }
        }
        let comparison = against(&topology, Load::Alone, &measured, 0.8);
        let [suspect] = &comparison.suspects[..] else { panic!("{:?}", comparison.suspects) };
        assert_eq!(suspect.component.kind, ComponentKind::NvLink);
        assert!(suspect.component.name.contains("gpu5"), "{suspect:?}");
        assert_eq!((suspect.slow, suspect.good), (14, 0));
    }

    #[test]
    fn what_is_slow_everywhere_is_no_parts_fault() {
        let (topology, mut measured) = machine("dgx-h100");
        measured.iter_mut().for_each(|pair| pair.gb_per_s /= 3.0);
        let comparison = against(&topology, Load::Alone, &measured, 0.8);
        assert!(comparison.pairs.iter().all(|pair| pair.is_slow));
        assert_eq!(comparison.suspects, []);
    }

    #[test]
    fn slow_sockets_are_told_from_slow_gpus() {
        let (topology, mut measured) = machine("l40s-8");
        let node = |index: GpuIndex| topology.gpus[index.0 as usize].numa;
        for pair in &mut measured {
            if node(pair.from) != node(pair.to) {
                pair.gb_per_s /= 2.0;
            }
        }
        let comparison = against(&topology, Load::Alone, &measured, 0.8);
        let first = comparison.suspects.first().expect("slow pairs share something");
        assert_eq!(first.component.kind, ComponentKind::Sockets, "{:?}", comparison.suspects);
        assert_eq!((first.slow, first.good), (32, 0));
    }

    #[test]
    fn with_all_at_once_less_is_expected() {
        let (topology, measured) = machine("l40s-8");
        let expected = |load| {
            let found = against(&topology, load, &measured, 0.8).pairs;
            found.iter().filter_map(|pair| pair.predicted.gb_per_s()).sum::<f64>()
        };
        assert!(expected(Load::All) < expected(Load::Alone));
        assert!(expected(Load::BothWays) <= expected(Load::Alone));
    }
}
