//! The embedded API: launches plans, finds running clusters, and talks to them.
//!
//! Prints nothing, and decides nothing about hardware.
//!
//! *Invariant:* a launched cluster is READY, or nothing of it is left.

mod aside;
mod audit;
pub mod blocking;
#[cfg(feature = "native")]
mod client;
#[doc(hidden)]
pub mod command;
mod control;
#[doc(hidden)]
pub mod dask;
#[doc(hidden)]
pub mod detached;
#[cfg(feature = "native")]
#[doc(hidden)]
pub mod doctor;
mod embedded;
mod ended;
mod environment;
mod failure;
mod find;
mod gpus;
mod handle;
mod history;
#[doc(hidden)]
pub mod hosts;
mod launch;
mod logs;
#[doc(hidden)]
pub mod measure;
#[cfg(feature = "native")]
mod native;
mod paths;
mod prepare;
mod processes;
mod profile;
mod python;
mod queued;
mod ranks;
mod report;
mod run;
mod secret;
mod stalls;
mod start;
mod supervising;
mod takedown;
mod warm;
#[cfg(feature = "native")]
#[doc(hidden)]
pub mod workloads;

use std::process::ExitCode;

pub use control::in_url;
pub use control::{Control, ControlError};
pub use embedded::{Builder, Cluster};
pub use ended::Ended;
pub use failure::LaunchFailure;
pub use find::{Clusters, FindError, clusters, find};
pub use handle::{Events, Handle};
pub use launch::LaunchError;
#[doc(hidden)]
pub use logs::logged;
pub use measure::{MeasureError, Verification};
pub use paths::PathError;
pub use prepare::PrepareError;
pub use run::{RunEnd, Written};
pub use start::UpError;
pub use takedown::TakeDownError;

// Types of other modules that an embedding program uses.
pub use cuda_cluster_machine::os::run_directory::Paths;
pub use cuda_cluster_supervise::record::{GpuError, What};
pub use cuda_cluster_supervise::{
    Cause, ClusterPhase, ClusterState, Escalation, Outcome, ProcessPhase, ProcessState, Record,
};
pub use cuda_cluster_wire::links::{Pair, Verdict};
pub use cuda_cluster_wire::output::{Source, Stream};
pub use cuda_cluster_wire::process::Exit;

#[cfg(feature = "native")]
pub use {
    client::{AsCompleted, Client, ClientError, Remote, Task},
    cuda_cluster_data::cuda::{Kernel, Scalar},
    cuda_cluster_data::ucx::Buffer,
    cuda_cluster_native::worker::built_in::{CudaParameter, CudaTask},
    cuda_cluster_native::worker::registry::{
        Cancelled, Context, FunctionError, Input, Outputs, Registry,
    },
    cuda_cluster_wire::numbers::Number,
    cuda_cluster_wire::tasks::{ObjectId, TaskError},
    cuda_cluster_wire::value::ValueError,
    native::dispatch_with,
};

// For the command line.
#[doc(hidden)]
pub use control::Lines;
#[doc(hidden)]
pub use cuda_cluster_machine::os::run_directory::{forget_ended, forget_failed_start};
#[doc(hidden)]
pub use cuda_cluster_model::ids::SCHEDULER;
#[doc(hidden)]
pub use detached::{Detached, Lifetime, OutputForm, RankInput, Report, Start};
#[doc(hidden)]
pub use environment::{EnvironmentError, client_environment};
#[doc(hidden)]
pub use history::{NoHistory, recorded_history, recorded_pairs};
#[doc(hidden)]
pub use launch::{Surroundings, launch};
#[doc(hidden)]
pub use paths::unusable_paths;
#[doc(hidden)]
pub use prepare::{
    Prepared, check_gpus, check_here, check_interface, decide, examine, prepare, prepare_plan,
    prepare_whole,
};
#[doc(hidden)]
pub use profile::profile_of;
#[doc(hidden)]
pub use report::{
    BugReport, crashes, recorded_audit, recorded_machine, recorded_plan, recorded_preflight,
};
#[doc(hidden)]
pub use stalls::look_at;

/// Runs a hidden subcommand, if this process was started for one: the guardian, the shim, the
/// supervisor, and the native engine's scheduler and workers.
///
/// A program that launches clusters calls this at the start of `main`, before it starts a thread,
/// and exits with the returned code.
pub fn dispatch() -> Option<ExitCode> {
    #[cfg(feature = "native")]
    return dispatch_with(Registry::built_in);
    #[cfg(not(feature = "native"))]
    return supervision();
}

/// The subcommands of clusters of all engines.
fn supervision() -> Option<ExitCode> {
    let own = || match std::env::args_os().nth(1)?.to_str()? {
        detached::SUBCOMMAND => Some(supervising::main()),
        stalls::SUBCOMMAND => Some(stalls::main()),
        audit::SUBCOMMAND => Some(audit::main()),
        profile::SUBCOMMAND => Some(profile::main()),
        hosts::SUBCOMMAND => Some(hosts::main()),
        _ => None,
    };
    cuda_cluster_machine::os::dispatch().or_else(own)
}
