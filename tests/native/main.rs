//! The native engine's processes, without a supervisor.

#![cfg(feature = "cli")]

mod cluster;
mod engine;
mod gather;
mod measure;
mod memory;
mod seeds;
mod shared;
#[path = "../skip/mod.rs"]
mod skip;
mod tasks;
mod workloads;
