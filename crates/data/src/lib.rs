//! The data plane: memory and how it moves, between processes of a machine, over UCX and by the
//! CUDA driver.
//!
//! Does not know clusters, plans of runs, or what the bytes mean; engines frame their messages.
//!
//! *Invariant:* `unsafe` stays in here, and each use says why it is sound.

#![allow(missing_docs, reason = "a part of the house; what users see is documented there")]

pub mod copy;
pub mod cuda;
mod functions;
pub mod memory;
#[cfg(feature = "ucx")]
pub mod ucx;
