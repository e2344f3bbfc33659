//! This machine: what it has (`probe`), and its processes (`os`).
//!
//! Decides nothing; `plan` and `supervise` do.
//!
//! *Invariant:* what is told was read from the system, never assumed.

#![allow(missing_docs, reason = "a part of the house; what users see is documented there")]

pub mod os;
pub mod probe;
mod status;
