//! What the two ends of a connection to another machine say: JSON, a line each.
//!
//! *Invariant:* the first line of the other end says its version, and nothing is asked of another
//! version.

use std::fmt;

use serde::{Deserialize, Serialize};

use cuda_cluster_model::spec::ClusterSpec;
use cuda_cluster_model::topology::Topology;

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
    /// The machine that its workers are planned for, if it is not the one that they are on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<Topology>,
    /// The texts of the files of TLS, which the spec names where they lie here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsTexts>,
    /// Whether to run all checks first, and to bring up nothing if one is an error.
    #[serde(default)]
    pub preflight: bool,
}

/// What the files of TLS hold.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "as in the spec")]
pub struct TlsTexts {
    pub ca_file: String,
    pub cert: String,
    pub key: String,
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
