//! What the two processes say to each other.
//!
//! *Invariant:* a way is named by its number in the order.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::Way;
use cuda_cluster_model::cpuset::CpuSet;
use cuda_cluster_model::ids::{GpuIndex, PciAddress};

/// An end of a way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum End {
    Host,
    Gpu(GpuIndex),
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            End::Host => f.write_str("host"),
            End::Gpu(gpu) => write!(f, "GPU{gpu}"),
        }
    }
}

/// What to measure.
#[derive(Serialize, Deserialize)]
pub(super) struct Order {
    pub(super) gpus: Vec<Wanted>,
    pub(super) ways: Vec<(End, End)>,
}

/// A GPU to measure.
#[derive(Serialize, Deserialize)]
pub(super) struct Wanted {
    pub(super) index: GpuIndex,
    pub(super) pci: PciAddress,
    /// The CPUs near it.
    pub(super) cpus: Option<CpuSet>,
}

/// What the other process says, a line each.
#[derive(Serialize, Deserialize)]
pub(super) enum Told {
    /// A context is being made on a GPU.
    Opens(GpuIndex),
    /// A GPU can't be used; because its memory is taken, if `is_full`.
    Unopened { gpu: GpuIndex, text: String, is_full: bool },
    /// A way is being measured.
    Begins(usize),
    /// What was found of it.
    Did { at: usize, did: Did },
    /// It is not measured.
    LeftOut { at: usize, text: String },
    /// Every way has an answer.
    Done,
}

/// What was found of a way.
#[derive(Serialize, Deserialize)]
pub(super) struct Did {
    pub(super) figures: Option<Figures>,
    pub(super) way: Option<Way>,
    pub(super) fault: Option<Fault>,
    pub(super) remark: Option<String>,
}

/// What is wrong with a way.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Fault {
    /// Other bytes arrive than were sent.
    WrongBytes(String),
    /// The GPU that sends has them already.
    SentWrong(String),
    /// The driver refused.
    Refused(String),
}

/// How fast a way is.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Figures {
    /// Of each copy.
    pub(super) bytes: u64,
    pub(super) gb_per_s: f64,
    pub(super) latency_us: f64,
}

/// All ways: those of the host first, then the pairs, each GPU as often as the others at any time,
/// so that none is left out alone if the time runs out.
pub(super) fn ways(gpus: &[GpuIndex]) -> Vec<(End, End)> {
    let count = gpus.len();
    let end = |at: usize| End::Gpu(gpus[at % count]);
    let host = (0..count).flat_map(|at| [(End::Host, end(at)), (end(at), End::Host)]);
    let pairs = (1..count).flat_map(|by| (0..count).map(move |at| (at, at + by)));
    host.chain(pairs.map(|(from, to)| (end(from), end(to)))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn each_ordered_pair_is_measured_once() {
        for count in 0..5 {
            let gpus: Vec<GpuIndex> = (0..count).map(GpuIndex).collect();
            let ways = ways(&gpus);
            let all: BTreeSet<(End, End)> = ways.iter().copied().collect();
            let count = gpus.len();
            assert_eq!((ways.len(), all.len()), (count * (count + 1), count * (count + 1)));
            assert!(all.iter().all(|(from, to)| from != to));
        }
    }
}
