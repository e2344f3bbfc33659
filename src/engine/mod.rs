//! What runs inside a cluster's processes.
//!
//! Does not start or supervise processes; `cluster` hands them to `supervise`.
//!
//! *Invariant:* an engine learns everything from its plan and its environment variables.

pub mod command;
pub mod dask;
pub mod native;
