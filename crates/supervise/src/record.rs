//! Records of what happens: lines of `events.jsonl` and events of the control API's stream.
//!
//! Only holds the values; `core` creates them, `service` writes them.
//!
//! *Invariant:* a record can be understood without earlier ones.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::phase::ClusterPhase;
use cuda_cluster_wire::process::Exit;
use cuda_cluster_wire::status::JoinedWorker;

/// An event, with its time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// The time, as RFC 3339 with milliseconds.
    pub at: String,
    /// The process; `None` for the cluster.
    pub process: Option<String>,
    /// What happened.
    #[serde(flatten)]
    pub what: What,
}

impl Record {
    /// Whether this is the last record: the cluster has ended.
    pub fn is_last(&self) -> bool {
        matches!(self.what, What::Cluster { state, .. } if state.is_end())
    }

    /// How the cluster ended, if this is the last record. A cluster that was never READY in time
    /// has failed, like any other.
    pub fn outcome(&self) -> Option<Outcome> {
        let What::Cluster { state, cause } = &self.what else { return None };
        match state {
            ClusterPhase::Stopped => Some(Outcome::Stopped { degraded: cause.clone() }),
            ClusterPhase::Failed => {
                let unknown = || Cause::of_cluster("nothing tells why it failed");
                Some(Outcome::Failed(cause.clone().unwrap_or_else(unknown)))
            }
            _ => None,
        }
    }
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "event")]
#[allow(missing_docs, reason = "a field that says nothing more has its name")]
pub enum What {
    /// The cluster's phase changed.
    Cluster {
        /// The new phase.
        state: ClusterPhase,
        /// The reason, if any.
        cause: Option<Cause>,
    },
    /// A process was started.
    Started {
        /// Its process id.
        pid: u32,
        /// Number of earlier starts.
        restarts: u32,
    },
    /// A process has begun a step of its start.
    Step { step: String },
    /// A process is READY.
    Ready {
        /// Milliseconds since it was spawned.
        after_ms: u64,
    },
    /// A READY process does not answer; if no process is named, the guardian.
    NotAnswering {
        /// Since when, as RFC 3339.
        since: String,
        /// The reason, as far as known.
        reason: String,
    },
    /// The process answers again.
    Answers {
        /// Milliseconds without an answer.
        after_ms: u64,
    },
    /// A process was asked to end.
    Stopping { reason: String },
    /// A process was killed.
    Killed { reason: String },
    /// A process ended.
    Exited {
        /// Status or signal.
        exit: Exit,
        reason: String,
    },
    /// A process will be restarted.
    Restarting {
        /// Delay in milliseconds.
        in_ms: u64,
        /// Number of deaths in a row while it was READY.
        #[serde(default)]
        deaths_at_work: u32,
    },
    /// All workers will be started again together, because this one has failed.
    Regrouping {
        /// The number of this restart, from 1.
        restart: u32,
        /// How many there may be.
        limit: u32,
        /// The rank that has failed.
        rank: u32,
        /// Delay in milliseconds, once all have ended.
        in_ms: u64,
        /// What has failed.
        cause: Cause,
    },
    /// A worker whose GPU is lost takes no part any more.
    Replaced {
        /// The spare that takes its rank; `None`: there is one rank less.
        by: Option<String>,
    },
    /// A process is not restarted any more.
    Failed { reason: String },
    /// The copy of a process's output is not written any more.
    NotCopied {
        /// The file.
        path: PathBuf,
        reason: String,
    },
    /// The processes have not been able to go on for `supervision.stalled_after`.
    Stalled(Stall),
    /// The processes go on that were stalled.
    GoesOn,
    /// A worker from elsewhere has joined the scheduler.
    Joined { worker: Box<JoinedWorker> },
    /// A worker from elsewhere has gone.
    Parted {
        /// Its name for the scheduler.
        name: String,
        /// Its machine.
        host: String,
        /// Whether nobody wished that.
        lost: bool,
        reason: String,
    },
    /// Something that nobody has to act on, but that explains what is seen.
    Note { text: String },
}

/// Why a cluster did not become or stay READY.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cause {
    /// The process that failed first; `None` for the cluster as a whole.
    pub process: Option<String>,
    /// What happened, in a sentence without a full stop: `gpu3 was ended by signal 9 (SIGKILL)`.
    pub text: String,
    /// How that process ended, if it did.
    pub exit: Option<Exit>,
    /// The last lines of its log.
    pub log_tail: Vec<String>,
    /// Whether nothing had failed, but its processes could not go on by themselves.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stalled: bool,
    /// Whether nothing had failed here, but the scheduler elsewhere is not there any more.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub scheduler_lost: bool,
}

impl Cause {
    /// A cause that is no single process's.
    pub fn of_cluster(text: impl Into<String>) -> Self {
        let (process, exit, log_tail) = (None, None, Vec::new());
        let (stalled, scheduler_lost) = (false, false);
        Self { process, text: text.into(), exit, log_tail, stalled, scheduler_lost }
    }
}

/// Processes that can't go on by themselves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stall {
    /// Who, and why, in a sentence without a full stop.
    pub text: String,
    /// Those that the others wait for; empty if all wait for each other.
    pub processes: Vec<String>,
    /// What was seen, for `cuda-cluster why --bundle`; `None` if it could not be written.
    pub evidence: Option<PathBuf>,
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

/// An error reported by the GPU's driver (Xid event).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuError {
    /// NVIDIA's number for it.
    pub xid: u64,
    /// Its meaning, from NVIDIA's *Xid Errors* guide.
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
#[allow(missing_docs, reason = "a field that says nothing more has its name")]
pub enum Outcome {
    /// It was asked to end. If it was `degraded` then, with the cause.
    Stopped { degraded: Option<Cause> },
    /// All workers of a run ended with status 0.
    Finished,
    /// It did not become READY in time, and was torn down.
    NotReady(Cause),
    /// It could not start or continue, and was torn down.
    Failed(Cause),
}

impl Outcome {
    /// Whether the cluster ended without a failure.
    pub fn is_good(&self) -> bool {
        matches!(self, Outcome::Finished | Outcome::Stopped { degraded: None })
    }
}
