//! The scheduler process: workers register here and learn of each other.
//!
//! `service` holds the connections, `core` decides which workers must know each other, `outbox`
//! carries frames to a connection, and `relay` carries measurements between clients and workers.
//!
//! Does not carry data; workers exchange it among themselves over UCX. [`super::tasks`] schedules
//! tasks.
//!
//! *Invariant:* a connection's messages are read only after it has proven that it knows the
//! cluster's secret.

mod core;
mod outbox;
mod relay;
mod service;

pub use service::main;
