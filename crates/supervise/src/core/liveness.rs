//! What is known about the answers of a process, and since when it is silent.
//!
//! Does not decide whom to ask or what follows; `questions` does.
//!
//! *Invariant:* a process has at most one unanswered question.

use std::time::Duration;

use super::Moment;
use cuda_cluster_model::units::Span;

/// The guardian reports an exit at most this long after the kernel, because it waits half a second
/// for the last output.
const REPORTED_WITHIN: Duration = Duration::from_secs(2);

/// What is known about a process's answers.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Liveness {
    /// When the unanswered question was asked.
    pub(super) asked: Option<Moment>,
    /// Whether the process was stopped at the last check.
    pub(super) stopped: bool,
    /// When it ended, until its exit is reported.
    pub(super) gone: Option<Moment>,
    /// Whether it has closed its status pipe, and receives no questions.
    pub(super) deaf: bool,
    /// Since when it has not answered, once that is established.
    pub(super) silent_since: Option<Moment>,
    /// When it will be restarted if it does not answer, once it is known to be unresponsive.
    pub(super) restart_at: Moment,
}

impl Liveness {
    /// Since when and why it does not answer; `None` if it may still answer.
    pub(super) fn silence(&self, patience: Span, now: Moment) -> Option<(Moment, String)> {
        let due = |at: Moment, within: Duration| at + within <= now;
        match *self {
            Self { gone: Some(at), .. } if due(at, REPORTED_WITHIN) => {
                Some((at, "it has ended, and the guardian does not tell how".to_owned()))
            }
            Self { stopped: true, asked, .. } => {
                Some((asked.unwrap_or(now), "it is stopped (SIGSTOP or a debugger)".to_owned()))
            }
            Self { asked: Some(at), .. } if due(at, patience.0) => {
                Some((at, format!("no answer within {patience}")))
            }
            _ => None,
        }
    }

    /// Whether nothing suggests that it does not answer.
    pub(super) fn may_answer(&self) -> bool {
        self.asked.is_none() && !self.stopped && self.gone.is_none()
    }

    /// When its status changes without an event.
    pub(super) fn deadline(&self, patience: Duration) -> Option<Moment> {
        let gone = self.gone.map(|at| at + REPORTED_WITHIN);
        gone.into_iter().chain(self.asked.map(|at| at + patience)).min()
    }
}
