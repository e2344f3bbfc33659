//! A worker process: registers with the scheduler, connects to every peer over UCX, runs tasks.
//!
//! `service` is its event loop. `runner` has threads `call` the functions of [`registry`]
//! (`built_in`: those of the stock program), `fetch` brings their inputs from peers, `objects`
//! keeps their outputs, and `bulk` serves objects to clients and peers over the worker's own
//! socket, where peers also read large ones in place (`views`). `context` is the state that they
//! share, and `tally` counts what was done.
//!
//! *Invariant:* the event loop never waits for UCX, and the UCX thread never waits for the event
//! loop.

pub mod built_in;
mod bulk;
mod call;
mod context;
mod fetch;
pub mod objects;
mod ports;
pub mod registry;
mod runner;
mod service;
mod tally;
mod views;

pub use service::main;
