#![doc = include_str!("../README.md")]

pub mod completions;
mod connection;
mod engine;
#[cfg(fuzzing)]
pub mod fuzzed;
pub mod greeting;
mod incoming;
pub mod listener;
pub mod outbox;
mod peer;
#[cfg(feature = "plane")]
pub mod plane;
mod reader;
mod remembered;
mod routes;
pub mod wire;

#[cfg(feature = "python")]
mod python;

// What it sends is tested without UCX, too.
#[cfg(test)]
#[cfg(not(feature = "plane"))]
#[path = "plane/wire.rs"]
mod plane_wire;

pub use connection::{Connection, Ending, Receipt, Submitted};
pub use engine::{Engine, Route, Settings};
