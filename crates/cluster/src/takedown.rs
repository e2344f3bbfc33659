//! Stops a running cluster, even if its supervisor does not answer.
//!
//! *Invariant:* only processes of this cluster are killed, as identified in its run directory.

use std::time::{Duration, Instant};

use super::{ControlError, Handle, ended};
use cuda_cluster_machine::os::run_directory::{RunDirectory, RunDirectoryError};
use cuda_cluster_model::ids::ClusterName;
use cuda_cluster_model::units::Span;
use cuda_cluster_supervise::Escalation;

/// How long to wait for a supervisor's answer before it counts as hung.
pub(super) const ANSWER: Duration = Duration::from_secs(10);

/// How long to wait for a supervisor that was asked to kill its cluster, before it is killed too.
const KILL: Duration = Duration::from_secs(3);

/// How long to wait for the end of each killed process.
const DEATH: Duration = Duration::from_secs(3);

/// How often to check a cluster that is ending.
const LOOK: Duration = Duration::from_millis(10);

/// Why a cluster could not be stopped.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message says what each field is")]
#[non_exhaustive]
pub enum TakeDownError {
    /// Its supervisor does not answer.
    #[error("the supervisor of {name} does not answer")]
    Unanswered {
        name: ClusterName,
        /// The failure of the request.
        #[source]
        source: ControlError,
    },
    /// It has not ended within the time limit.
    #[error("{name} is still ending after {within}")]
    StillEnding {
        name: ClusterName,
        /// The time limit.
        within: Span,
    },
    /// Its processes were killed, but the run directory is still in use.
    #[error("{name} was killed, and something of it is left")]
    Left {
        name: ClusterName,
        #[source]
        source: RunDirectoryError,
    },
}

impl TakeDownError {
    /// What the user can do; `None` if that depends on the cause.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Unanswered { name, .. } | Self::StillEnding { name, .. } => {
                Some(format!("cuda-cluster down --kill {name}"))
            }
            Self::Left { .. } => Some(
                "a driver or a dead disk may hold a process: ps -eo pid,stat,wchan,args shows it \
                 in state D"
                    .to_owned(),
            ),
        }
    }
}

impl Handle {
    /// Requests the cluster's end, and waits until no process of it is left.
    ///
    /// # Errors
    /// If the supervisor does not answer, or the cluster does not end within `within`.
    pub async fn stop(&self, how: Escalation, within: Duration) -> Result<(), TakeDownError> {
        if self.current().is_err() {
            return Ok(());
        }
        let deadline = Instant::now() + within;
        self.ask_to_end(how, deadline).await?;
        while self.has_processes() {
            if Instant::now() >= deadline {
                let (name, within) = (self.name.clone(), Span(within));
                return Err(TakeDownError::StillEnding { name, within });
            }
            tokio::time::sleep(LOOK).await;
        }
        self.sweep().await
    }

    /// Cleans up in case that supervisor and guardian were killed meanwhile.
    async fn sweep(&self) -> Result<(), TakeDownError> {
        let cluster = self.clone();
        let swept = tokio::task::spawn_blocking(move || {
            ended::sweep(&cluster.name, &cluster.paths)
                .map_err(|source| TakeDownError::Left { name: cluster.name, source })
        });
        // The task does not panic and is not cancelled.
        swept.await.unwrap_or(Ok(()))
    }

    /// Requests that the cluster be killed. If that fails within a few seconds, this process kills
    /// the supervisor, the guardian and all their processes, and removes the run directory.
    ///
    /// # Errors
    /// If a process is left that not even SIGKILL ends.
    pub async fn kill(&self, within: Duration) -> Result<(), TakeDownError> {
        if self.stop(Escalation::Kill, within.min(KILL)).await.is_ok() || !self.is_running() {
            return Ok(());
        }
        self.kill_at_once().await
    }

    /// Kills the supervisor, the guardian and all their processes, and removes the run directory.
    ///
    /// # Errors
    /// If a process is left that not even SIGKILL ends.
    pub(super) async fn kill_at_once(&self) -> Result<(), TakeDownError> {
        let cluster = self.clone();
        let killed = tokio::task::spawn_blocking(move || {
            RunDirectory::take_by_force(&cluster.name, &cluster.paths, DEATH)
                .and_then(|directory| directory.map_or(Ok(()), RunDirectory::remove))
                .map_err(|source| TakeDownError::Left { name: cluster.name, source })
        });
        // The task does not panic and is not cancelled.
        killed.await.unwrap_or(Ok(()))
    }

    /// Returns when the supervisor has accepted the request, or the cluster has ended meanwhile.
    async fn ask_to_end(&self, how: Escalation, deadline: Instant) -> Result<(), TakeDownError> {
        let path = format!("/v1/stop?how={how}");
        loop {
            let Ok(control) = self.current() else { return Ok(()) };
            let left = deadline.saturating_duration_since(Instant::now());
            let asked = control.order_within(&path, left.min(ANSWER)).await;
            let source = match asked {
                Ok(()) => return Ok(()),
                Err(_) if !self.is_running() => return Ok(()),
                Err(source) => source,
            };
            // A supervisor that is starting does not listen yet, and one that is ending no longer;
            // the guardian is there slightly longer.
            let passing =
                matches!(source, ControlError::Connect { .. } | ControlError::Lost { .. });
            if !passing || Instant::now() >= deadline {
                return Err(TakeDownError::Unanswered { name: self.name.clone(), source });
            }
            tokio::time::sleep(LOOK).await;
        }
    }
}
