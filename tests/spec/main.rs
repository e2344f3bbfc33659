//! Specs: what the reader accepts, and what it says of the rest.

mod edges;
#[path = "../keys/mod.rs"]
mod keys;
mod mistakes;
mod schema;
