//! A worker's objects: in device memory, in host memory, and in a file.
//!
//! [`core::Tiers`] decides who goes down a level when there is no room; [`Store`] moves the bytes.
//! Memory is spoken for before it is used ([`ledger`]), and what the process takes beside its data
//! is measured and left free ([`budget`]).
//!
//! Does not know tasks.
//!
//! *Invariant:* an object that is pinned stays in memory, and the bytes that come back from the
//! file are the bytes that went there.

mod budget;
mod core;
mod error;
mod ledger;
mod spill;
mod store;

pub use self::core::{NoRoom, Place, ProcessShare};
pub use error::StoreError;
pub(crate) use ledger::Party;
pub(crate) use store::{Lent, Pinned, Settings, Store};
