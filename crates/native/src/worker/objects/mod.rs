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
mod spill;
mod store;

pub use self::core::{NoRoom, Place, ProcessShare};
pub use error::StoreError;
pub use ledger::Consumer;
pub use store::{Lent, Pinned, Settings, Store};
