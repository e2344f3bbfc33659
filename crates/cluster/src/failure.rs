//! Why a cluster could not be launched.
//!
//! *Invariant:* a hint names settings as keys of the spec, never as flags.

use std::path::PathBuf;

use super::{PrepareError, UpError};
use cuda_cluster_machine::os::run_directory::RunDirectoryError;
use cuda_cluster_model::ids::ClusterName;
use cuda_cluster_model::spec::SpecError;
use cuda_cluster_model::topology::{self, ParseError};
use cuda_cluster_supervise::{Cause, Outcome};

/// Why a cluster could not be launched; no process of it is left. The text does not contain that of
/// the cause, which is the [`source`](std::error::Error::source).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum LaunchFailure {
    /// The spec is invalid.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The topology that the spec names can't be read.
    #[error("cannot read topology {name}")]
    Topology {
        /// Its name or path.
        name: String,
        #[source]
        source: std::io::Error,
    },
    /// The topology that the spec names is not one.
    #[error("cannot read topology {name}")]
    Machine {
        /// Its name or path.
        name: String,
        #[source]
        source: ParseError,
    },
    /// A stored plan is to be launched, and something that it decides was asked for besides.
    #[error("'{key}' cannot be set beside a stored plan, which has decided it")]
    Planned {
        /// The first such key.
        key: String,
    },
    /// There is no plan that this machine can run.
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    /// A cluster of this name is running.
    #[error("a cluster named {name} is already running in {}", path.display())]
    NameTaken {
        name: ClusterName,
        /// Its run directory.
        path: PathBuf,
    },
    /// A native cluster that was to be verified (`verify: true`) could not be measured, or moves
    /// data over other lanes than it should.
    #[error("the verification failed, so the cluster was taken down: {}", objections.join("; "))]
    Unverified {
        /// What was found, one sentence for each pair of workers.
        objections: Vec<String>,
    },
    /// It could not start.
    #[error(transparent)]
    Up(UpError),
    /// It did not become READY, and was torn down.
    #[error("the cluster did not become READY{}: {cause}", if *late { " in time" } else { "" })]
    NotReady {
        /// Whether the time limit was exceeded.
        late: bool,
        cause: Cause,
    },
}

impl From<UpError> for LaunchFailure {
    fn from(error: UpError) -> Self {
        match error {
            UpError::RunDirectory(RunDirectoryError::Taken { name, path }) => {
                LaunchFailure::NameTaken { name, path }
            }
            error => LaunchFailure::Up(error),
        }
    }
}

impl LaunchFailure {
    /// A hint for the user, in which a setting has the name of its key.
    pub fn hint(&self) -> Option<String> {
        match self {
            LaunchFailure::Spec(error) => error.hint(),
            LaunchFailure::Topology { .. } => {
                let all: Vec<&str> = topology::builtin_names().collect();
                Some(format!("name a file, or one of the built-in machines: {}", all.join(", ")))
            }
            LaunchFailure::Machine { source, .. } => source.hint(),
            LaunchFailure::Planned { .. } => {
                Some("set it before planning, or leave it out here".to_owned())
            }
            LaunchFailure::Prepare(error) => error.hint(),
            LaunchFailure::NameTaken { name, path } => {
                RunDirectoryError::Taken { name: name.clone(), path: path.clone() }.hint()
            }
            LaunchFailure::Up(error) => error.hint(),
            LaunchFailure::Unverified { .. } | LaunchFailure::NotReady { .. } => None,
        }
    }
}

/// The failure for a cluster that ended before it was READY.
pub(super) fn not_ready(outcome: Outcome) -> LaunchFailure {
    let stopped = || Cause::of_cluster("it was stopped while it started");
    let late = matches!(outcome, Outcome::NotReady(_));
    let cause = match outcome {
        Outcome::NotReady(cause) | Outcome::Failed(cause) => cause,
        Outcome::Stopped { degraded } => degraded.unwrap_or_else(stopped),
        Outcome::Finished => stopped(),
    };
    LaunchFailure::NotReady { late, cause }
}
