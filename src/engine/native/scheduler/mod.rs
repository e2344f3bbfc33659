//! The scheduler process: workers register here and learn of each other.
//!
//! `service` holds the connections, `core` decides who must know whom, `outbox` carries frames to a
//! connection, and `relay` carries measurements between clients and workers.
//!
//! Does not carry data; workers pass it among themselves over UCX. Tasks are the business of
//! [`super::tasks`].
//!
//! *Invariant:* nothing that a connection says is looked at before it has proven that it knows the
//! cluster's secret.

mod core;
mod outbox;
mod relay;
mod service;

pub use service::main;
