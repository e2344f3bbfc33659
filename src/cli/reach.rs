//! From a name on the command line to a running cluster, and its answers.

use std::future::Future;

use super::failure::{Exit, Failure};
use crate::cluster::{self, ControlError, Found};
use crate::ids::ClusterName;
use crate::os::event_loop;

/// The running cluster of this name, or the only one.
pub(super) fn find(name: Option<&ClusterName>) -> Result<Found, Failure> {
    cluster::find(name).map_err(|error| {
        let hint = error.hint();
        Failure::new(Exit::Usage, error).maybe_hint(hint)
    })
}

/// Waits for a supervisor's answer.
pub(super) fn block_on<T>(
    answer: impl Future<Output = Result<T, ControlError>>,
) -> Result<T, Failure> {
    runtime()?.block_on(answer).map_err(lost)
}

/// Asks a supervisor for something to be done.
pub(super) fn order(cluster: &Found, path: &str) -> Result<(), Failure> {
    block_on(cluster.control().order(path))
}

/// A supervisor that could not be asked, or refused.
pub(super) fn lost(error: ControlError) -> Failure {
    match error {
        // It knows better than the user what there is: the wish was wrong.
        ControlError::Refused { status, .. } if status.is_client_error() => {
            Failure::new(Exit::Usage, error)
        }
        _ => Failure::new(Exit::Failed, error),
    }
}

/// An event loop on this thread.
pub(super) fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    event_loop::new().map_err(|error| {
        Failure::new(Exit::Failed, anyhow::Error::new(error).context("cannot start an event loop"))
    })
}
