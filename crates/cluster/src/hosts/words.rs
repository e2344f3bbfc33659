//! What the two ends of a connection to another machine say: JSON, a line each.
//!
//! *Invariant:* the first line of the other end says its version, and nothing is asked of another
//! version.

use std::fmt;

use serde::{Deserialize, Serialize};

use cuda_cluster_model::spec::ClusterSpec;

/// What the other end is asked from time to time, to know that it is there.
pub const QUESTION: &str = "?";

/// Most bytes of an assignment.
pub const LONGEST_ASSIGNMENT: u64 = 16 << 20;

/// What the other end is to bring up: the first line that it reads.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub struct Assignment {
    /// Its workers, with the address of the scheduler that they join.
    pub spec: ClusterSpec,
    /// The secret of the cluster, if its workers need it.
    pub secret: Option<String>,
}

impl fmt::Debug for Assignment {
    /// Without secrets, which variables may be, too.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Assignment(…)")
    }
}

/// What the other end says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "member")]
#[allow(missing_docs, reason = "a field that says nothing more has its name")]
pub enum Said {
    /// It is there.
    Hello { version: String },
    /// Its workers are READY.
    Ready,
    /// It answers a question.
    Alive,
    /// It could not start, or go on, and has left nothing.
    Failed { message: String, causes: Vec<String>, hint: Option<String> },
    /// Its workers are not wanted any more, by whoever uses the scheduler.
    Ended,
}
