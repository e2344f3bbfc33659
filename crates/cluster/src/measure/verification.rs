//! What has come of a measurement.
//!
//! *Invariant:* a pair that failed has a row that says so, and pairs without one are counted.

use super::Between;
use cuda_cluster_wire::links::Pair;

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
    /// The pairs of this machine that don't use the lanes that they should, or could not be measured.
    pub fn objections(&self) -> impl Iterator<Item = &Pair> {
        self.pairs.iter().filter(|pair| !pair.verdict.is_good(false))
    }
}
