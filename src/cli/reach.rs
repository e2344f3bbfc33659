//! Finds the cluster that a command line names, and sends requests to it.

use std::future::Future;
use std::time::{Duration, Instant};

use super::failure::{Exit, Failure};
use super::flags::keys::in_flags;
use super::output;
use crate::cluster::{self, ControlError, FindError, Handle};
use crate::ids::ClusterName;
use crate::os::event_loop;
use crate::os::run_directory::{Paths, RunDirectoryError};

/// How long to wait for the other processes of a cluster whose supervisor is unreachable.
const LAST_MOMENTS: Duration = Duration::from_secs(1);

/// How often to check them.
const LOOK: Duration = Duration::from_millis(10);

/// The running cluster of this name, or the only one.
pub(super) fn find(name: Option<&ClusterName>) -> Result<Handle, Failure> {
    cluster::find(name).map_err(not_found)
}

/// There is no such running cluster, or it can't be determined.
pub(super) fn not_found(error: FindError) -> Failure {
    let exit = match error {
        FindError::Unreadable(_) | FindError::Unclear { .. } => Exit::Failed,
        _ => Exit::Usage,
    };
    let hint = error.hint().map(in_flags);
    Failure::new(exit, error).maybe_hint(hint)
}

/// The files of the running cluster of this name, or of an ended one, which a status line points
/// out.
pub(super) fn find_also_ended(
    name: Option<&ClusterName>,
) -> Result<(Paths, Option<Handle>), Failure> {
    match cluster::find(name) {
        Ok(found) => Ok((found.paths.clone(), Some(found))),
        Err(FindError::Ended(ended)) => {
            output::status(&format!("{} {}", ended.name, ended.summary()));
            Ok((ended.paths, None))
        }
        Err(error) => Err(not_found(error)),
    }
}

/// A run directory that cannot be used.
pub(super) fn unusable(error: RunDirectoryError) -> Failure {
    let hint = error.hint().map(in_flags);
    Failure::new(Exit::Failed, error).maybe_hint(hint)
}

/// Prints all failures but the last, which becomes the command's own.
pub(super) fn last_of(mut failures: Vec<Failure>) -> Result<Exit, Failure> {
    let last = failures.pop();
    failures.iter().for_each(output::failure);
    last.map_or(Ok(Exit::Done), Err)
}

/// Waits for a supervisor's answer.
pub(super) fn block_on<T>(
    answer: impl Future<Output = Result<T, ControlError>>,
) -> Result<T, Failure> {
    runtime()?.block_on(answer).map_err(lost)
}

/// The failure of a request to a supervisor.
pub(super) fn lost(error: ControlError) -> Failure {
    match error {
        // The supervisor knows what exists, so the request was wrong.
        ControlError::Refused { status, .. } if (400..500).contains(&status) => {
            Failure::new(Exit::Usage, error)
        }
        _ => {
            let hint = error.hint().map(in_flags);
            Failure::new(Exit::Failed, error).maybe_hint(hint)
        }
    }
}

/// How a cluster that was running a moment ago has ended; `None` if it is still running. Waits
/// briefly, because the supervisor may end some milliseconds before the other processes, and before
/// it is written down why.
pub(super) fn ended_meanwhile(cluster: &Handle) -> Option<FindError> {
    let deadline = Instant::now() + LAST_MOMENTS;
    loop {
        let is_told = !cluster.paths.is_alive();
        let found = cluster::find(Some(&cluster.name)).err();
        let is_told = is_told
            && (matches!(found, Some(FindError::Ended(_))) || !cluster.paths.root().exists());
        if is_told || Instant::now() >= deadline {
            return found;
        }
        std::thread::sleep(LOOK);
    }
}

/// An event loop on this thread.
pub(super) fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    event_loop::new().map_err(|error| {
        Failure::new(Exit::Failed, anyhow::Error::new(error).context("cannot start an event loop"))
    })
}
