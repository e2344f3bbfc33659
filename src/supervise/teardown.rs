//! The last steps of a supervisor: what the processes wrote is handed on, the guardian ends, and
//! the run directory goes, or is left to be read.
//!
//! *Invariant:* when an [`Actor`] was dropped, its processes have ended or its guardian ends them.

use std::sync::Arc;

use super::actor::{Actor, ControlRequest, LAST_WORDS};
use super::{Escalation, Outcome};

impl Actor {
    /// Lets everything come to its end, and says how it was.
    pub(super) async fn finish(mut self, outcome: Outcome) -> Outcome {
        if self.output.is_none() {
            self.hear_nobody();
        }
        let bundles = std::mem::take(&mut self.bundles);
        self.keep |= self.paths.crashes().exists() || !bundles.is_empty();
        // What is not written by then will not be.
        let _ = tokio::time::timeout(LAST_WORDS * 4, bundles.join_all()).await;
        if !self.abandoned {
            if self.output.take().is_some() {
                let stopped = matches!(outcome, Outcome::Stopped { .. });
                self.deliver(stopped).await;
                self.hear_nobody();
            }
            let guardian = Arc::clone(&self.guardian);
            // Its end takes some milliseconds, in which listeners hear of the cluster's.
            let ended = tokio::task::spawn_blocking(move || guardian.end()).await;
            debug_assert!(ended.is_ok(), "ending a guardian does not panic");
            self.control.finish().await;
        }
        // Waiting for the guardian's end blocks for some milliseconds.
        let done = tokio::task::spawn_blocking(move || drop(self)).await;
        debug_assert!(done.is_ok(), "dropping an actor does not panic");
        outcome
    }

    /// Tells whoever asks for something, now and later, that the cluster has ended.
    fn hear_nobody(&mut self) {
        self.requests.close();
        // A question without an answer is answered by its end.
        while self.requests.try_recv().is_ok() {}
    }

    /// Waits until what the workers wrote is handed on, and with it for the guardian's end. Who
    /// asks for the end meanwhile wants it without what nobody reads.
    async fn deliver(&mut self, mut hurry: bool) {
        let mut asked = self.guardian.deliver(hurry).is_ok();
        while asked {
            tokio::select! {
                report = self.guardian.report() => asked = report.is_some(),
                Some(request) = self.requests.recv() => if let ControlRequest::Stop { how, .. } = request {
                    asked = how == Escalation::Graceful && !hurry;
                    hurry = true;
                    // A guardian that takes no requests any more has ended.
                    asked &= self.guardian.deliver(hurry).is_ok();
                },
            }
        }
    }
}

impl Drop for Actor {
    /// Ends every process, then the run directory: all of it after a good end, the secret and the
    /// socket after a bad one.
    fn drop(&mut self) {
        let ended = if self.abandoned {
            self.guardian.let_go(LAST_WORDS)
        } else {
            self.guardian.end();
            true
        };
        // The directory stays while the guardian writes to it; the next to come cleans it.
        self.keep |= !ended;
        if let Some(path) = &self.launch.supervision.pid_file {
            // Who took it away already wanted the same.
            let _ = std::fs::remove_file(path);
        }
        self.contacts.clear();
        let Some(directory) = self.directory.take() else { return };
        // Files that are gone need no removing, and there is nobody left to tell of the rest.
        if !self.keep {
            let _ = directory.remove();
        } else if ended {
            directory.retire();
        }
    }
}
