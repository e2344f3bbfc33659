//! Takes a running cluster down, also one whose supervisor does not answer.
//!
//! *Invariant:* what is killed is this cluster's, by the names that its run directory gives.

use std::time::{Duration, Instant};

use super::{ControlError, Found};
use crate::ids::ClusterName;
use crate::os::run_directory::{Paths, RunDirectory, RunDirectoryError};
use crate::supervise::Escalation;
use crate::units::Span;

/// Longest wait for a supervisor's answer before it counts as hung.
const ANSWER: Duration = Duration::from_secs(10);

/// Longest wait for a supervisor that was told to kill its cluster before it is killed with it.
const KILL: Duration = Duration::from_secs(3);

/// Longest wait for each of those that were killed.
const DEATH: Duration = Duration::from_secs(3);

/// How often a cluster that ends is looked at.
const LOOK: Duration = Duration::from_millis(10);

/// Longest wait for somebody who only looks at a run directory.
const LOOKERS: Duration = Duration::from_millis(500);

/// Why a cluster is not down.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum TakeDownError {
    /// Its supervisor hears nothing.
    #[error("the supervisor of {name} does not answer")]
    Unanswered {
        name: ClusterName,
        /// What it did instead.
        #[source]
        source: ControlError,
    },
    /// It takes longer than it was given.
    #[error("{name} is still ending after {within}")]
    StillEnding {
        name: ClusterName,
        /// The time that it was given.
        within: Span,
    },
    /// Even killed, something of it holds the run directory.
    #[error("{name} was killed, and something of it is left")]
    Left {
        name: ClusterName,
        /// What is in the way.
        #[source]
        source: RunDirectoryError,
    },
}

impl TakeDownError {
    /// What the user can do.
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

/// Ends what a cluster that does not live has left running; its story stays.
pub(super) fn sweep(name: &ClusterName, paths: &Paths) -> Result<(), RunDirectoryError> {
    match RunDirectory::left_over(name, paths, LOOKERS) {
        Ok(left) => left.iter().for_each(RunDirectory::sweep),
        // Who uses the name again has swept already.
        Err(RunDirectoryError::Taken { .. }) => {}
        Err(error) => return Err(error),
    }
    Ok(())
}

impl Found {
    /// Asks for the cluster's end, and waits until no process of it is left.
    ///
    /// # Errors
    /// If the supervisor does not answer, or the end takes longer than `within`.
    pub async fn stop(&self, how: Escalation, within: Duration) -> Result<(), TakeDownError> {
        let deadline = Instant::now() + within;
        self.ask_to_end(how, deadline).await?;
        // The lock of the run directory is free when no process of the cluster is left.
        while self.paths.is_alive() {
            if Instant::now() >= deadline {
                let (name, within) = (self.name.clone(), Span(within));
                return Err(TakeDownError::StillEnding { name, within });
            }
            tokio::time::sleep(LOOK).await;
        }
        self.sweep().await
    }

    /// Ends what a supervisor and a guardian left that were killed meanwhile.
    async fn sweep(&self) -> Result<(), TakeDownError> {
        let cluster = self.clone();
        let swept = tokio::task::spawn_blocking(move || {
            sweep(&cluster.name, &cluster.paths)
                .map_err(|source| TakeDownError::Left { name: cluster.name, source })
        });
        // It does not panic, and nobody cancels it.
        swept.await.unwrap_or(Ok(()))
    }

    /// Has the cluster killed. If nobody does, within a few seconds, this process kills the
    /// supervisor, the guardian and all that they started, and removes the run directory.
    ///
    /// # Errors
    /// If something is left that not even SIGKILL ends.
    pub async fn kill(&self, within: Duration) -> Result<(), TakeDownError> {
        if self.stop(Escalation::Kill, within.min(KILL)).await.is_ok() {
            return Ok(());
        }
        let cluster = self.clone();
        let killed = tokio::task::spawn_blocking(move || {
            RunDirectory::take_by_force(&cluster.name, &cluster.paths, DEATH)
                .and_then(|directory| directory.map_or(Ok(()), RunDirectory::remove))
                .map_err(|source| TakeDownError::Left { name: cluster.name, source })
        });
        // It does not panic, and nobody cancels it.
        killed.await.unwrap_or(Ok(()))
    }

    /// Returns when the supervisor has heard, or the cluster has ended meanwhile.
    async fn ask_to_end(&self, how: Escalation, deadline: Instant) -> Result<(), TakeDownError> {
        let control = self.control();
        let path = format!("/v1/stop?how={how}");
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let asked = control.order_within(&path, left.min(ANSWER)).await;
            let source = match asked {
                Ok(()) => return Ok(()),
                Err(_) if !self.paths.is_alive() => return Ok(()),
                Err(source) => source,
            };
            // A supervisor that begins does not listen yet, and one that ends not any more: the
            // guardian is there a moment longer.
            let passing =
                matches!(source, ControlError::Connect { .. } | ControlError::Lost { .. });
            if !passing || Instant::now() >= deadline {
                return Err(TakeDownError::Unanswered { name: self.name.clone(), source });
            }
            tokio::time::sleep(LOOK).await;
        }
    }
}
