//! What a machine should deliver: bandwidths of copies from the topology alone.
//!
//! Copies are flows over the parts of the machine: PCIe links, uplinks of switches, the
//! interconnect of the sockets, NVLinks, NVLink-C2C, ports. Each part has a capacity, flows share
//! it max-min fair, and the part that is full names what limits a figure. Measures nothing, and
//! knows no latency. `tests/figures.rs` compares the predictions with published measurements.
//!
//! [`link_rates`] says what each link carries by itself, for pictures.
//!
//! *Invariant:* a figure that the topology cannot tell is unknown, with the reason; what is assumed
//! is listed.

mod against;
mod capacity;
mod component;
mod fair;
#[cfg(test)]
mod laws;
mod links;
mod rings;
mod ways;

use serde::Serialize;

pub use against::{Compared, Comparison, Load, Measured, Suspect, against};
pub(crate) use capacity::port;
pub use component::{Component, ComponentKind};
pub use links::link_rates;

use crate::ids::GpuIndex;
use crate::topology::{Gpu, Nic, Topology};
use ways::{Parts, Way};

/// A bandwidth, and what limits it.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Figure {
    /// The topology tells it.
    Known {
        /// In 10⁹ bytes per second.
        gb_per_s: f64,
        /// What is full at this rate.
        limited_by: Component,
    },
    /// It does not.
    Unknown {
        /// What is missing.
        unknown: String,
    },
}

impl Figure {
    /// The bandwidth, if it is known.
    pub fn gb_per_s(&self) -> Option<f64> {
        match self {
            Figure::Known { gb_per_s, .. } => Some(*gb_per_s),
            Figure::Unknown { .. } => None,
        }
    }

    /// What limits it, if it is known.
    pub fn limited_by(&self) -> Option<&Component> {
        match self {
            Figure::Known { limited_by, .. } => Some(limited_by),
            Figure::Unknown { .. } => None,
        }
    }

    fn times(self, factor: f64) -> Self {
        match self {
            Figure::Known { gb_per_s, limited_by } => {
                Figure::Known { gb_per_s: gb_per_s * factor, limited_by }
            }
            Figure::Unknown { .. } => self,
        }
    }
}

/// All figures of a machine.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Prediction {
    /// The machine's name.
    pub machine: Option<String>,
    /// From each GPU to each other.
    pub pairs: Vec<PairFigures>,
    /// Of each GPU.
    pub gpus: Vec<GpuFigures>,
    /// From each GPU to each NIC with an active port.
    pub nics: Vec<NicFigure>,
    /// The bus bandwidth of an all-reduce of all GPUs, as nccl-tests counts it.
    pub all_reduce: Figure,
    /// What no topology tells, and what is taken instead.
    pub assumed: Vec<String>,
}

/// The figures of a pair of GPUs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PairFigures {
    /// The GPU that the copy reads.
    pub from: GpuIndex,
    /// The GPU that it writes.
    pub to: GpuIndex,
    /// One copy alone.
    pub one_way: Figure,
    /// Copies in both directions at once: their sum.
    pub both_ways: Figure,
}

/// The figures of one GPU.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GpuFigures {
    /// The GPU.
    pub gpu: GpuIndex,
    /// What it sends while all GPUs send as much to all others.
    pub all_pairs: Figure,
    /// From the host's memory, alone.
    pub from_host: Figure,
    /// To the host's memory, alone.
    pub to_host: Figure,
    /// From the host's memory, while all other GPUs copy from there, too.
    pub from_host_with_all: Figure,
    /// To the host's memory, while all other GPUs copy there, too.
    pub to_host_with_all: Figure,
}

/// The figure of a GPU and a NIC.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NicFigure {
    /// The GPU.
    pub gpu: GpuIndex,
    /// The NIC's name.
    pub nic: String,
    /// What the GPU sends through it, alone.
    pub figure: Figure,
}

/// Predicts all figures of a machine.
pub fn predict(topology: &Topology) -> Prediction {
    predict_among(topology, &topology.gpus.iter().map(|gpu| gpu.index).collect::<Vec<_>>())
}

/// Predicts the figures of some GPUs of a machine while the others are idle.
pub fn predict_among(topology: &Topology, chosen: &[GpuIndex]) -> Prediction {
    let gpus: Vec<&Gpu> = topology.gpus.iter().filter(|gpu| chosen.contains(&gpu.index)).collect();
    let mut parts = Parts::of(topology);
    let pairs = pairs(&mut parts, &gpus);
    let figures = of_gpus(&mut parts, &gpus);
    let nics = of_nics(&mut parts, &gpus, topology);
    let all_reduce = all_reduce(&mut parts, &gpus);
    let assumed = assumed(&parts);
    Prediction { machine: topology.name.clone(), pairs, gpus: figures, nics, all_reduce, assumed }
}

fn pairs(parts: &mut Parts<'_>, gpus: &[&Gpu]) -> Vec<PairFigures> {
    let mut figures = Vec::new();
    for (from, to) in ordered(gpus) {
        let there = parts.between(from, to);
        let back = parts.between(to, from);
        let one_way = alone(parts, &there);
        let both_ways = sum(parts, &[there, back]);
        figures.push(PairFigures { from: from.index, to: to.index, one_way, both_ways });
    }
    figures
}

/// Each GPU with each other, in both orders.
fn ordered<'a>(gpus: &'a [&'a Gpu]) -> impl Iterator<Item = (&'a Gpu, &'a Gpu)> {
    let with_others = move |from: &'a Gpu| {
        gpus.iter().filter(move |to| to.index != from.index).map(move |to| (from, *to))
    };
    gpus.iter().flat_map(move |from| with_others(from))
}

fn of_gpus(parts: &mut Parts<'_>, gpus: &[&Gpu]) -> Vec<GpuFigures> {
    let from: Vec<Way> = gpus.iter().map(|gpu| parts.host_to(gpu)).collect();
    let into: Vec<Way> = gpus.iter().map(|gpu| parts.host_from(gpu)).collect();
    let among: Vec<Way> = ordered(gpus).map(|(from, to)| parts.between(from, to)).collect();
    let (from_all, into_all) = (together(parts, &from), together(parts, &into));
    let all_pairs = together(parts, &among);
    let others = gpus.len().saturating_sub(1);
    let figures = gpus.iter().enumerate().map(|(at, gpu)| GpuFigures {
        gpu: gpu.index,
        all_pairs: slowest(&all_pairs[at * others..(at + 1) * others]).times(others as f64),
        from_host: alone(parts, &from[at]),
        to_host: alone(parts, &into[at]),
        from_host_with_all: from_all[at].clone(),
        to_host_with_all: into_all[at].clone(),
    });
    figures.collect()
}

fn of_nics(parts: &mut Parts<'_>, gpus: &[&Gpu], topology: &Topology) -> Vec<NicFigure> {
    let mut figures = Vec::new();
    let usable = |nic: &Nic| nic.kind.is_physical() && nic.ports.iter().any(ways::is_active);
    for gpu in gpus {
        for (at, nic) in (0_u32..).zip(&topology.nics).filter(|(_, nic)| usable(nic)) {
            let way = parts.through(gpu, at, nic);
            let figure = alone(parts, &way);
            figures.push(NicFigure { gpu: gpu.index, nic: nic.name.clone(), figure });
        }
    }
    figures
}

/// The bus bandwidth of rings over NVLinks, of NVSwitches that add up, or else of a ring in order.
fn all_reduce(parts: &mut Parts<'_>, gpus: &[&Gpu]) -> Figure {
    let [first, .., last] = gpus else {
        return Figure::Unknown { unknown: "one GPU reduces nothing".to_owned() };
    };
    let rings = rings::rings(&parts.bridges(gpus));
    if !rings.is_empty() {
        return over_rings(parts, gpus, &rings).times(capacity::RING_OVER_NVLINK);
    }
    let next = gpus.windows(2).filter_map(|pair| Some((*pair.first()?, *pair.last()?)));
    let ring: Vec<(&Gpu, &Gpu)> = next.chain([(*last, *first)]).collect();
    let ways: Vec<Way> = ring.iter().map(|(from, to)| parts.between(from, to)).collect();
    let figure = slowest(&together(parts, &ways));
    let is_nvlink = figure.limited_by().is_some_and(|part| part.kind == ComponentKind::NvLink);
    let switched = gpus.iter().all(|gpu| ways::is_switched(gpu));
    let adds = |gpu: &&Gpu| gpu.compute_capability.is_some_and(|capability| capability.major >= 9);
    let share = match is_nvlink {
        true if switched && gpus.iter().all(adds) => capacity::SWITCHES_ADD,
        true => capacity::RING_OVER_NVLINK,
        false => capacity::RING_OVER_PCIE,
    };
    figure.times(share)
}

/// What all rings carry together, in both directions.
fn over_rings(parts: &mut Parts<'_>, gpus: &[&Gpu], rings: &[Vec<usize>]) -> Figure {
    let mut ways = Vec::new();
    for ring in rings {
        let next = ring.iter().cycle().skip(1);
        let there: Vec<(&usize, &usize)> = ring.iter().zip(next).collect();
        let pair = |parts: &mut Parts<'_>, a: usize, b: usize| parts.between(gpus[a], gpus[b]);
        ways.extend(there.iter().map(|(a, b)| pair(parts, **a, **b)));
        ways.extend(there.iter().map(|(a, b)| pair(parts, **b, **a)));
    }
    let figures = together(parts, &ways);
    let each: Vec<Figure> = figures.chunks(gpus.len()).map(slowest).collect();
    let total: Option<f64> = each.iter().map(Figure::gb_per_s).sum();
    match (slowest(&each), total) {
        (Figure::Known { limited_by, .. }, Some(gb_per_s)) => {
            Figure::Known { gb_per_s, limited_by }
        }
        (unknown, _) => unknown,
    }
}

fn assumed(parts: &Parts<'_>) -> Vec<String> {
    let uplinks = "the uplink of a PCIe switch is as fast as the fastest link below it, where the \
                   topology does not tell it";
    let sockets = "the interconnect of the sockets carries what such servers were measured with: \
                   no topology tells its speed";
    let notes = [(parts.assumed_uplinks, uplinks), (parts.assumed_sockets, sockets)];
    notes.iter().filter(|(is, _)| *is).map(|(_, text)| (*text).to_owned()).collect()
}

/// The figure of a copy alone. Of parts that limit it equally, a GPU's own link is named first.
fn alone(parts: &Parts<'_>, way: &Way) -> Figure {
    let figure = slowest(&together(parts, std::slice::from_ref(way)));
    let (Figure::Known { gb_per_s, .. }, Ok(flow)) = (&figure, way) else { return figure };
    let is_full = |part: &&usize| parts.capacities[**part] <= gb_per_s * (1.0 + 1e-9);
    let full = flow.iter().filter(is_full).map(|part| &parts.components[*part]).min();
    match full {
        Some(part) => Figure::Known { gb_per_s: *gb_per_s, limited_by: part.clone() },
        None => figure,
    }
}

/// The sum of copies at the same time; what limits it is what limits the slowest.
fn sum(parts: &Parts<'_>, ways: &[Way]) -> Figure {
    let figures = together(parts, ways);
    let total: Option<f64> = figures.iter().map(Figure::gb_per_s).sum();
    match (slowest(&figures), total) {
        (Figure::Known { limited_by, .. }, Some(gb_per_s)) => {
            Figure::Known { gb_per_s, limited_by }
        }
        (unknown, _) => unknown,
    }
}

/// The figures of copies at the same time, in their order. All are unknown if one way is.
fn together(parts: &Parts<'_>, ways: &[Way]) -> Vec<Figure> {
    let flows: Result<Vec<Vec<usize>>, String> = ways.iter().cloned().collect();
    let flows = match flows {
        Ok(flows) => flows,
        Err(unknown) => return vec![Figure::Unknown { unknown }; ways.len()],
    };
    let shares = fair::shares(&parts.capacities, &flows).into_iter();
    let figure = |share: Option<fair::Share>| match share {
        Some(fair::Share { rate, full }) => {
            Figure::Known { gb_per_s: rate, limited_by: parts.components[full].clone() }
        }
        None => Figure::Unknown { unknown: "the copy passes no known link".to_owned() },
    };
    shares.map(figure).collect()
}

/// The slowest of some figures; unknown if one is, or if there are none.
fn slowest(figures: &[Figure]) -> Figure {
    let unknown = figures.iter().find(|figure| figure.gb_per_s().is_none());
    let rate = |figure: &&Figure| figure.gb_per_s().unwrap_or(0.0);
    let least = figures.iter().min_by(|a, b| rate(a).total_cmp(&rate(b)));
    let none = || Figure::Unknown { unknown: "there is no other GPU".to_owned() };
    unknown.or(least).cloned().unwrap_or_else(none)
}
