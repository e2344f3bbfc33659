//! The native engine: a scheduler process and worker processes that are connected over UCX.
//!
//! | module | what it is |
//! |---|---|
//! | [`scheduler`] | the scheduler's process: workers and clients connect to it |
//! | [`tasks`] | the task scheduler, a part of that process: which task runs where |
//! | [`worker`] | a worker's process: runs tasks, keeps objects, fetches inputs |
//! | [`plane`] | the worker's thread that owns UCX and moves objects between workers |
//! | [`client`] | asks the scheduler for measurements |
//! | `connection` | frames over the sockets, and the greeting in which both sides authenticate |
//! | `process` | what a process is given when it starts, and how it reports |
//! | `random` | numbers from a seed |
//!
//! Does not start or supervise processes. They run [`scheduler::main`] and [`worker::main`].
//!
//! *Invariant:* a worker reports READY only after checked bytes, proven to come from the cluster,
//! have passed to every peer that it is expected to reach.

#![allow(missing_docs, reason = "a part of the house; what users see is documented there")]

pub mod client;
pub mod connection;
pub mod error;
mod listener;
pub mod plane;
mod process;
mod random;
pub mod scheduler;
pub mod tasks;
pub mod worker;

pub use error::{ConversationError, Error};
