//! The last steps of a supervisor: deliver the processes' output, end the guardian, and remove the
//! run directory or keep it for inspection.
//!
//! *Invariant:* after an [`Actor`] has been dropped, its processes have ended or its guardian ends
//! them.

use std::sync::Arc;
use std::time::Duration;

use super::{Actor, LAST_WORDS};
use crate::handle::ControlRequest;
use crate::{Escalation, Outcome};

/// How long the run directory waits for who reads it to the end.
const LAST_LOOK: Duration = Duration::from_secs(5);

impl Actor {
    /// Ends everything in order, and returns the outcome.
    pub(super) async fn finish(mut self, outcome: Outcome) -> Outcome {
        if self.output.is_none() {
            self.hear_nobody();
        }
        let bundles = std::mem::take(&mut self.bundles);
        self.keep |= self.paths.crashes().exists() || !bundles.is_empty();
        // Bundles that are not written by now are abandoned.
        let _ = tokio::time::timeout(LAST_WORDS * 4, bundles.join_all()).await;
        if !self.abandoned {
            if self.output.take().is_some() {
                let stopped = matches!(outcome, Outcome::Stopped { .. });
                self.deliver(stopped).await;
                self.hear_nobody();
            }
            let guardian = Arc::clone(&self.guardian);
            // The guardian takes some milliseconds to end, in which subscribers are told of the
            // cluster's end.
            let ended = tokio::task::spawn_blocking(move || guardian.end()).await;
            debug_assert!(ended.is_ok(), "ending a guardian does not panic");
            self.control.finish().await;
            if let Some(mut reader) = self.reader.take() {
                let has_read = async { while reader.changed().await.is_ok() {} };
                let _ = tokio::time::timeout(LAST_LOOK, has_read).await;
            }
        }
        // Waiting for the guardian's end blocks for some milliseconds.
        let done = tokio::task::spawn_blocking(move || drop(self)).await;
        debug_assert!(done.is_ok(), "dropping an actor does not panic");
        outcome
    }

    /// Answers all requests, now and later, with the cluster's end.
    fn hear_nobody(&mut self) {
        self.requests.close();
        // A request without an answer ends when its sender is dropped.
        while self.requests.try_recv().is_ok() {}
    }

    /// Waits until the workers' output is delivered and the guardian ends. A request to end skips
    /// output that nobody reads.
    async fn deliver(&mut self, mut hurry: bool) {
        let mut asked = self.guardian.deliver(hurry).is_ok();
        while asked {
            tokio::select! {
                report = self.guardian.report() => asked = report.is_some(),
                Some(request) = self.requests.recv() => if let ControlRequest::Stop { how, .. } = request {
                    asked = how == Escalation::Graceful && !hurry;
                    hurry = true;
                    // A guardian that accepts no requests has ended.
                    asked &= self.guardian.deliver(hurry).is_ok();
                },
            }
        }
    }
}

impl Drop for Actor {
    /// Ends every process, then removes the run directory: all of it after a success, only secret
    /// and sockets after a failure.
    fn drop(&mut self) {
        let ended = if self.abandoned {
            self.guardian.let_go(LAST_WORDS)
        } else {
            self.guardian.end();
            true
        };
        // The guardian still writes to the directory, so it stays; the next cluster of this name
        // cleans it.
        self.keep |= !ended;
        if let Some(path) = &self.launch.supervision.pid_file {
            // If it was already taken away, nothing is left to do.
            let _ = std::fs::remove_file(path);
        }
        self.contacts.clear();
        let Some(directory) = self.directory.take() else { return };
        // Ignore errors: missing files need no removal, and others can't be reported any more.
        if !self.keep {
            let _ = directory.remove();
        } else if ended {
            directory.retire();
        }
    }
}
