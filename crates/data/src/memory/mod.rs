//! Host memory: pages, what is kept of them for later, and what processes share.
//!
//! Does not lock or register it, and knows nothing of devices.
//!
//! *Invariant:* memory has one owner, and goes back to where it came from when that is gone.
#![allow(unsafe_code)]

pub mod arena;
mod host;
mod kept;
mod lease;
mod limits;
pub mod mapped;
mod mapping;
mod pace;
mod pages;
mod pool;
mod prepare;
mod reserve;
mod sizes;
pub mod spare;
pub mod view;

pub use host::{HostMemory, SHAREABLE};
pub use lease::Lease;
pub use limits::Limits;
pub(crate) use pages::HUGE;
pub use pages::PAGE;
pub use pool::{Block, KEEP, POOLED, Pool};
