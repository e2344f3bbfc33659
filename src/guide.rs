//! Guides: one for each kind of program, with an example that is run by the tests.
//!
//! - [A service that owns a cluster](service)
//! - [Plan for a captured machine](planning)
//! - [Functions, objects, failures](tasks)
//! - [An async program](asynchronous)
//!
//! Contains no code. The examples are in the repository's folder `examples`.
//!
//! *Invariant:* code in a guide is compiled, or is an example that a test runs.

#[cfg(feature = "native")]
#[doc = include_str!("guide/service.md")]
#[doc = "# The whole program\n\n```ignore"]
#[doc = include_str!("../examples/service.rs")]
#[doc = "```"]
pub mod service {}

#[doc = include_str!("guide/planning.md")]
#[doc = "# The whole program\n\n```ignore"]
#[doc = include_str!("../examples/planner.rs")]
#[doc = "```"]
pub mod planning {}

#[cfg(feature = "native")]
#[doc = include_str!("guide/tasks.md")]
#[doc = "# The whole program\n\n```ignore"]
#[doc = include_str!("../examples/data_job.rs")]
#[doc = "```"]
pub mod tasks {}

#[cfg(feature = "native")]
#[doc = include_str!("guide/asynchronous.md")]
pub mod asynchronous {}
