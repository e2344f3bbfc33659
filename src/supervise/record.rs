//! What happened: one line of `events.jsonl`, one event of the control API's stream.
//!
//! Holds the values; `core` makes them, `service` writes them.
//!
//! *Invariant:* a record is complete in itself; a reader needs no earlier one to understand it.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::ClusterPhase;
use crate::wire::process::Exit;

/// One thing that happened, and when.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// When, RFC 3339 with milliseconds.
    pub at: String,
    /// To which process; `None` for the cluster.
    pub process: Option<String>,
    /// What.
    #[serde(flatten)]
    pub what: What,
}

impl Record {
    /// Whether nothing follows any more: the cluster has ended.
    pub fn is_last(&self) -> bool {
        matches!(self.what, What::Cluster { state, .. } if state.is_end())
    }
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "event")]
pub enum What {
    /// The cluster's phase changed.
    Cluster {
        /// To this.
        state: ClusterPhase,
        /// Why, where there is a reason.
        cause: Option<Cause>,
    },
    /// A process was started.
    Started {
        /// Its process id.
        pid: u32,
        /// How often it was started before.
        restarts: u32,
    },
    /// A process began a step of its start.
    Step {
        /// The step.
        step: String,
    },
    /// A process is READY.
    Ready {
        /// Milliseconds from its spawning.
        after_ms: u64,
    },
    /// A process that was READY does not answer; without a process, the guardian.
    NotAnswering {
        /// Since then, RFC 3339.
        since: String,
        /// Why, as far as it is known.
        reason: String,
    },
    /// It answers again.
    Answers {
        /// After this many milliseconds without an answer.
        after_ms: u64,
    },
    /// A process was told to end.
    Stopping {
        /// Why.
        reason: String,
    },
    /// A process had to be killed.
    Killed {
        /// Why.
        reason: String,
    },
    /// A process ended.
    Exited {
        /// How.
        exit: Exit,
        /// In a sentence.
        reason: String,
    },
    /// A process will be started again.
    Restarting {
        /// After this many milliseconds.
        in_ms: u64,
        /// How often in a row it died while it was READY.
        #[serde(default)]
        deaths_at_work: u32,
    },
    /// A process is not tried again.
    Failed {
        /// Why.
        reason: String,
    },
    /// Something worth knowing.
    Note {
        /// What.
        text: String,
    },
}

/// Why a cluster did not become READY, or did not stay so.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cause {
    /// The process where it began; `None` for the cluster as a whole.
    pub process: Option<String>,
    /// What happened, in a sentence without a full stop: `gpu3 was ended by signal 9 (SIGKILL)`.
    pub text: String,
    /// How that process ended, when it did.
    pub exit: Option<Exit>,
    /// The last lines of its log.
    pub log_tail: Vec<String>,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)?;
        if let (Some(process), false) = (&self.process, self.log_tail.is_empty()) {
            write!(f, "\nlast lines of {process}'s log:")?;
            for line in &self.log_tail {
                write!(f, "\n  {line}")?;
            }
        }
        Ok(())
    }
}

/// An error that the GPU's driver reported (Xid event).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuError {
    /// NVIDIA's number for it.
    pub xid: u64,
    /// What it means.
    pub text: String,
}

impl fmt::Display for GpuError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Xid {} ({})", self.xid, self.text)
    }
}

/// How a cluster ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Somebody asked. With the cause, if it was `degraded` then.
    Stopped {
        /// Why it was `degraded`.
        degraded: Option<Cause>,
    },
    /// All workers of a run to completion ended with status 0.
    Finished,
    /// It did not become READY in time; everything is torn down.
    NotReady(Cause),
    /// It could not start, or could not go on; everything is torn down.
    Failed(Cause),
}

impl Outcome {
    /// Whether nothing went wrong.
    pub fn is_good(&self) -> bool {
        matches!(self, Outcome::Finished | Outcome::Stopped { degraded: None })
    }
}
