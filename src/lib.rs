//! Brings up one worker process per GPU on one machine.
//!
//! The parts, from the ground up (a module uses lower floors only; `src/ARCHITECTURE.md`):
//!
//! - words: [`ids`], [`cpuset`], [`units`], [`text`]
//! - values: [`topology`], [`spec`], [`wire`]
//! - decisions: [`plan`]
//! - the outside world: [`probe`], [`os`], [`ucx`], [`cuda`]
//! - long-running parts: [`engine`], [`supervise`]
//! - the embedded API: [`cluster`]
//! - the command line: [`cli`]

pub mod cli;
pub mod cluster;
pub mod cpuset;
pub mod cuda;
pub mod engine;
pub mod ids;
pub mod os;
pub mod plan;
pub mod probe;
pub mod spec;
pub mod supervise;
pub mod text;
pub mod topology;
pub mod ucx;
pub mod units;
pub mod wire;
