//! Which task runs where, and which objects are still needed.
//!
//! Does not run tasks or move bytes; workers do, as the scheduler orders.
//!
//! *Invariant:* what [`core::Core`] decides depends on nothing but its events and their times, so
//! that a recorded run can be replayed.

pub(crate) mod core;
