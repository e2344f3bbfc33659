//! Brings up one worker process per GPU on one machine.
//!
//! The parts, from the ground up (a module uses lower floors only; `src/ARCHITECTURE.md`):
//!
//! - words: [`ids`], [`cpuset`], [`units`]
//! - values: [`topology`], [`spec`], [`wire`]
//! - decisions: [`plan`]
//! - the outside world: `probe`, `os`, `ucx`, `cuda`
//! - long-running parts: `engine`, `supervise`
//! - the embedded API: `cluster`

pub mod cpuset;
pub mod ids;
pub mod plan;
pub mod spec;
pub mod topology;
pub mod units;
pub mod wire;
