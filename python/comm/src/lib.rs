#![doc = include_str!("../README.md")]

pub mod completions;
mod connection;
mod copy;
mod engine;
pub mod greeting;
mod lanes;
pub mod listener;
mod mapped;
pub mod memory;
pub mod outbox;
mod reader;
pub mod wire;

#[cfg(feature = "python")]
mod python;

pub use connection::{Connection, Ending, Receipt, Submitted};
pub use engine::{Engine, Lane, Settings};
