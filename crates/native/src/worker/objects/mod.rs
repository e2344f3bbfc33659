//! A worker's objects: in device memory, in host memory, and in a file.
//!
//! `core::Tiers` decides which objects move down a tier when there is no room; `Store` moves
//! the bytes. Memory is reserved before it is used (`ledger`), and what the process uses besides
//! data is measured and left free (`budget`).
//!
//! Does not know tasks.
//!
//! *Invariant:* a pinned object stays in memory, and the bytes read from the file are the bytes
//! that were written.

mod budget;
mod core;
mod error;
mod ledger;
mod no_room;
mod place;
mod spill;
mod store;

pub use error::StoreError;
pub use ledger::Consumer;
pub use no_room::{DeviceShare, NoRoom, ProcessShare};
pub use place::Place;
pub use store::{Lent, Pinned, Settings, Store};
pub(super) use store::{Room, is_released, on_host};
