//! The phases of a cluster and of its processes.
//!
//! *Invariant:* the words are those of `ps` and of the control API.

use serde::{Deserialize, Serialize};

/// A cluster's phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, strum::Display)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum ClusterPhase {
    /// Not every process is READY for the first time yet.
    Starting,
    /// All processes are READY for the first time, and the cluster is being verified.
    Verifying,
    /// Every wanted process is READY.
    #[strum(to_string = "READY")]
    Ready,
    /// It was READY; some process is being restarted.
    Recovering,
    /// It was READY; some process, or the guardian, does not answer, and none is being restarted:
    /// nothing changes before it answers or ends.
    #[strum(to_string = "not answering")]
    Unresponsive,
    /// It was READY; some worker has failed and is not restarted.
    Degraded,
    /// All processes are being ended.
    Stopping,
    /// Ended on request, or because its work is done.
    Stopped,
    /// Ended because of a failure.
    Failed,
}

impl ClusterPhase {
    /// Whether it has not been READY yet but can become so.
    pub fn is_first(self) -> bool {
        matches!(self, ClusterPhase::Starting | ClusterPhase::Verifying)
    }

    /// Whether its processes may be at work: nothing is being started or ended.
    pub fn is_at_work(self) -> bool {
        matches!(self, ClusterPhase::Ready | ClusterPhase::Unresponsive | ClusterPhase::Degraded)
    }

    /// Whether this is a final phase.
    pub fn is_end(self) -> bool {
        matches!(self, ClusterPhase::Stopped | ClusterPhase::Failed)
    }
}

/// A process's phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, strum::Display)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum ProcessPhase {
    /// Not started: the scheduler is not READY, or the worker has not been requested.
    Waiting,
    /// Started, but not READY.
    Starting,
    /// Reported READY: a native worker is connected to every peer, a rank is executed.
    #[strum(to_string = "READY")]
    Ready,
    /// It was READY, but does not answer: it is stopped, hangs, or has ended unnoticed.
    #[strum(to_string = "not answering")]
    Unresponsive,
    /// Asked to end.
    Stopping,
    /// Dead, and waiting to be restarted.
    Restarting,
    /// Dead, and not restarted any more.
    Failed,
    /// Ended as requested.
    Stopped,
}
