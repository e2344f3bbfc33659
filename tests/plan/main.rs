//! Plans: what is decided for a machine and a spec, and what the person reads.

#[cfg(feature = "cli")]
mod commands;
#[path = "../compact/mod.rs"]
mod compact;
mod configs;
mod edges;
mod every_key;
mod flags;
#[path = "../keys/mod.rs"]
mod keys;
mod laws;
mod machines;
mod nics;
mod rdma;
mod reasons;
mod values;
