//! The embedded API: launches plans, finds running clusters, and talks to them.
//!
//! Prints nothing; decides nothing about hardware.
//!
//! *Invariant:* a cluster that was launched is READY, or nothing of it is left.

mod control;
mod find;
mod launch;
mod start;

pub use control::{Control, ControlError, Lines};
pub use find::{FindError, Found, find, running};
pub use launch::{LaunchError, SCHEDULER, Surroundings, launch};
pub use start::{Detached, Prepared, Report, UpError, start};
