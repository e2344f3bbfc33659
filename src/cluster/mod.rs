//! The embedded API: launches plans, finds running clusters, and talks to them.
//!
//! Prints nothing; decides nothing about hardware.
//!
//! *Invariant:* a cluster that was launched is READY, or nothing of it is left.

pub mod blocking;
mod client;
mod control;
#[doc(hidden)]
pub mod detached;
#[doc(hidden)]
pub mod doctor;
mod embedded;
mod ended;
mod environment;
mod find;
mod gpus;
mod launch;
mod places;
mod prepare;
mod start;
mod takedown;
#[doc(hidden)]
pub mod workloads;

use std::process::ExitCode;

use crate::engine::native;

pub use client::{AsCompleted, Client, ClientError, Remote, Task};
pub use control::{Control, ControlError};
pub use embedded::{Builder, Cluster, Events, LaunchFailure};
pub use ended::Ended;
pub use find::{Clusters, FindError, Found, clusters, find};
pub use launch::LaunchError;
pub use places::PlaceError;
pub use prepare::PrepareError;
pub use start::UpError;
pub use takedown::TakeDownError;

// What other modules define, and a program that embeds a cluster handles.
pub use crate::cuda::{Kernel, Scalar};
pub use crate::engine::native::worker::built_in::{CudaParameter, CudaTask};
pub use crate::engine::native::worker::registry::{
    Context, FunctionError, Input, Outputs, Registry,
};
pub use crate::os::run_directory::Paths;
pub use crate::supervise::{
    Cause, ClusterPhase, ClusterState, Outcome, ProcessPhase, ProcessState, Record,
};

// For the command line.
#[doc(hidden)]
pub use crate::ids::SCHEDULER;
#[doc(hidden)]
pub use control::Lines;
#[doc(hidden)]
pub use detached::{Detached, Lifetime, OutputForm, Report, Start};
#[doc(hidden)]
pub use environment::{EnvironmentError, client_environment};
#[doc(hidden)]
pub use launch::{Surroundings, launch};
#[doc(hidden)]
pub use prepare::{Prepared, check_interface, check_libraries, prepare, prepare_plan};
#[doc(hidden)]
pub use start::start;

/// Does the work of a hidden subcommand, when this process was started for one: the guardian, the
/// shim, the supervisor, and the native engine's scheduler and workers.
///
/// A program that launches clusters as itself calls this first thing in `main`, before it starts a
/// thread, and exits with the code.
pub fn dispatch() -> Option<ExitCode> {
    dispatch_with(Registry::built_in)
}

/// As [`dispatch`], for a program whose workers run functions of its own.
pub fn dispatch_with(registry: impl FnOnce() -> Registry) -> Option<ExitCode> {
    if let Some(code) = crate::os::dispatch() {
        return Some(code);
    }
    let subcommand = std::env::args_os().nth(1)?;
    if subcommand == detached::SUBCOMMAND {
        return Some(detached::main());
    }
    let worked = match subcommand.to_str() {
        Some("__scheduler") => native::scheduler::main(),
        Some("__worker") => native::worker::main(registry()),
        _ => return None,
    };
    Some(match worked {
        Ok(()) => ExitCode::SUCCESS,
        // It has logged the error and told the supervisor.
        Err(_) => ExitCode::FAILURE,
    })
}
