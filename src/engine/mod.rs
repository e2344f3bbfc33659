//! What runs inside a cluster's processes.
//!
//! Does not start or supervise processes; `cluster` hands them to `supervise`.
//!
//! *Invariant:* an engine gets its settings only from its plan and its environment variables.

#[cfg(feature = "launch")]
pub mod command;
#[cfg(feature = "launch")]
pub mod dask;
#[cfg(feature = "launch")]
pub mod links;
#[cfg(feature = "native")]
pub mod native;

// What the native engine decides is tested without UCX, too.
#[cfg(test)]
#[cfg(not(feature = "native"))]
#[path = "native/tasks/core/mod.rs"]
mod tasks;
