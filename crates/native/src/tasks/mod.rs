//! The task scheduler: which task runs where, and which objects are still needed.
//!
//! `core` decides; `service` carries its events and actions to and from the connections; `record`
//! writes both down and replays them.
//!
//! Does not run tasks or move bytes; workers do, on the scheduler's orders.
//!
//! *Invariant:* what `core::Core` decides depends only on its events and their times, so that a
//! recorded run can be replayed.

pub(crate) mod core;
mod record;
pub(super) mod service;

pub use record::{ReplayError, Replayed, replay};
