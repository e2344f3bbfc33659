//! Topologies: every form that is read or written, and the command that shows them.

#[cfg(feature = "cli")]
mod commands;
#[allow(dead_code, reason = "pictures need a part")]
#[path = "../compact/mod.rs"]
mod compact;
mod corpus;
mod forms;
mod fuzz;
mod matrix;
mod pictures;
mod readers;
#[path = "../skip/mod.rs"]
mod skip;
