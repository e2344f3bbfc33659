//! What a process reports to its supervisor: JSON lines on the status pipe.
//!
//! The file descriptor's number is in [`FD_VARIABLE`]. It is a stream socket: the shim writes
//! [`Status::Bound`] before it executes the program; the program then writes its steps, and
//! `ready` once. After that the supervisor writes [`QUESTION`] from time to time, and the process
//! answers [`Status::Alive`] once each of its event loops has run; a process that has closed its
//! end is not asked. Programs that do not know the pipe (the command engine's) are ready once the
//! shim has executed them.
//!
//! *Invariant:* one line is one message, at most [`LINE_LIMIT`] bytes.

use serde::{Deserialize, Serialize};

use crate::cpuset::{CpuSet, NodeSet};

/// Names the environment variable with the status pipe's file descriptor number.
pub const FD_VARIABLE: &str = "CUDA_CLUSTER_STATUS_FD";

/// Names the environment variable with the run directory's path, set for every process.
pub const RUN_DIRECTORY_VARIABLE: &str = "CUDA_CLUSTER_RUN_DIR";

/// Names the environment variable with the process's own name (`scheduler`, `gpu3`).
pub const PROCESS_VARIABLE: &str = "CUDA_CLUSTER_PROCESS";

/// What a supervisor writes to ask whether a process answers. At most one of these is unanswered
/// at any time.
pub const QUESTION: &[u8] = b"?\n";

/// Longest line that a supervisor reads.
pub const LINE_LIMIT: usize = 256 * 1024;

/// One message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "status")]
pub enum Status {
    /// The shim applied the binding and read it back; `exec` comes next.
    Bound {
        /// CPUs in force.
        cpus: CpuSet,
        /// NUMA nodes of the memory policy in force; empty for the default policy.
        mems: NodeSet,
        /// What could not be applied, one sentence each.
        notes: Vec<String>,
    },
    /// The process begins a step of its start; a time-out error names the last one.
    Step {
        /// For example `connecting to gpu5`.
        step: String,
    },
    /// The process is ready.
    Ready {
        /// The address of a scheduler.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        address: Option<String>,
        /// Lanes of the connections to its peers, if it has any.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        peers: Vec<PeerLanes>,
        /// The UCX that it uses, for display: version, library, transports.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        ucx: Option<String>,
    },
    /// The answer to a [`QUESTION`].
    Alive,
    /// There is a web page that shows the process's work.
    Dashboard { link: String },
    /// A note for the user; the process continues.
    Note { text: String },
    /// The process will end with status 0 because of a request that did not come from its
    /// supervisor but from a client of the scheduler, or the scheduler.
    Leaving {
        /// What is to happen afterwards.
        then: AfterLeaving,
        /// Who requested it, or why.
        reason: String,
    },
    /// The process cannot start, or cannot continue; it ends after this.
    Failed {
        /// Why, with a hint if there is one.
        reason: String,
    },
}

/// What happens after a process's requested end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AfterLeaving {
    /// It is no longer needed.
    Rest,
    /// It is restarted at once; this does not count as a failure.
    Return,
    /// The whole cluster ends.
    EndCluster,
}

/// The UCX lanes of one connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerLanes {
    /// The peer worker's name.
    pub peer: String,
    /// Lanes by UCX's names, `transport/device`: `posix/memory`, `cma/memory`, `tcp/lo`.
    pub lanes: Vec<String>,
}

/// Reads one line.
///
/// # Errors
/// If it is not the JSON of a [`Status`].
pub fn decode(line: &str) -> Result<Status, serde_json::Error> {
    serde_json::from_str(line)
}

/// Writes one line, with its line feed.
pub fn encode(status: &Status) -> String {
    // A `Status` holds only strings, lists and sets, on which serde_json cannot fail.
    let mut line = serde_json::to_string(status).unwrap_or_default();
    line.push('\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_status_survives_its_line() {
        let status = Status::Ready {
            address: Some("unix:///run/x/scheduler.sock".to_owned()),
            peers: vec![PeerLanes {
                peer: "gpu1".to_owned(),
                lanes: vec!["posix/memory".to_owned()],
            }],
            ucx: Some("1.18.0 from libucp.so.0".to_owned()),
        };
        let line = encode(&status);
        assert_eq!(line.matches('\n').count(), 1);
        assert_eq!(decode(line.trim_end()).ok(), Some(status));
    }

    proptest! {
        #[test]
        fn any_text_survives_on_one_line(step in "\\PC*|.*\n.*") {
            let line = encode(&Status::Step { step: step.clone() });
            prop_assert_eq!(line.matches('\n').count(), 1);
            prop_assert_eq!(decode(line.trim_end()).ok(), Some(Status::Step { step }));
        }
    }
}
