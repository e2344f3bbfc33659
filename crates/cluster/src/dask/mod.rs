//! The Dask engine: real `distributed` schedulers and workers, in processes that we supervise.
//!
//! Finds a Python, checks its packages, writes our small package for it into the run directory,
//! turns a plan into the arguments of each process, and asks running workers to measure. Does not
//! start or restart processes: `supervise` does, which is why there are no nannies.
//!
//! *Invariant:* a process gets all of its settings through its arguments and environment; we
//! neither read nor change any of the user's files.

mod client;
mod error;
mod inspect;
mod package;
mod packages;
mod prepare;
mod python;
mod requirement;
mod settings;

pub use client::{Client, Elsewhere, Fetched, Receiver, Tasks, WorkerTasks};
pub(crate) use client::{Fetching, OfWorker, Queued};
pub use error::DaskError;
pub use inspect::{Inspection, inspect};
pub use packages::needs;
pub use prepare::{Prepared, Process, prepare};
pub use python::{Found, find};
pub use requirement::{Missing, Need};
pub(crate) use settings::file as scheduler_file;
pub use settings::{SchedulerSettings, WorkerSettings, client_file};
