//! What cuda-cluster decides: topologies, specs, plans and their reasons.
//!
//! Knows no files, clocks, threads or random numbers; every machine is an argument.
//!
//! *Invariant:* the same topology, spec and caller give the same plan, anywhere.

pub mod cpuset;
pub mod ids;
pub mod plan;
pub mod predict;
pub mod preflight;
pub mod spec;
pub mod text;
pub mod topology;
pub mod units;
