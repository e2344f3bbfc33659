//! The Dask engine: real `distributed` schedulers and workers, in processes that we supervise.
//!
//! Finds a Python, checks its packages, writes our small package for it into the run directory,
//! and turns a plan into the arguments of each process. Starts nothing and restarts nothing:
//! `supervise` does, and so there are no nannies.
//!
//! *Invariant:* everything that a process is told stands in its arguments and its environment;
//! no file of the user's is read or changed by us.

mod error;
mod inspect;
mod package;
mod packages;
mod prepare;
mod python;
mod settings;

pub use error::DaskError;
pub use inspect::{Inspection, inspect};
pub use packages::{Missing, Need, needs};
pub use prepare::{Arguments, Prepared, prepare};
pub use python::{Found, find};
pub use settings::{SchedulerSettings, WorkerSettings, client_file};
