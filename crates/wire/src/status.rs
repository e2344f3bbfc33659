//! What a process reports to its supervisor: JSON lines on the status pipe.
//!
//! The file descriptor's number is in [`FD_VARIABLE`]. It is a stream socket: the shim writes
//! [`Status::Bound`] before it executes the program; the program then writes its steps, and
//! `ready` once. After that the supervisor writes [`QUESTION`] from time to time, and the process
//! answers [`Status::Alive`] once each of its event loops has run; a process that has closed its
//! end is not asked. READY and answers carry the process's [`Condition`]. Programs that do not
//! know the pipe (the command engine's) are ready once the shim has executed them.
//!
//! *Invariant:* one line is one message, at most [`LINE_LIMIT`] bytes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use cuda_cluster_model::cpuset::{CpuSet, NodeSet};
use cuda_cluster_model::ids::PciAddress;

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
    /// A scheduler forks workers when it is asked to, from now on.
    Forks,
    /// A worker has found in its own configuration when it is to be killed for its memory.
    KilledAt {
        /// The percentage of its memory limit; `None` for never.
        percent: Option<f64>,
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
        /// What else it reports about itself.
        #[serde(default, skip_serializing_if = "Condition::is_empty")]
        condition: Condition,
    },
    /// A worker that is ready begins its first task: from now on a task can be the cause of its
    /// end.
    Working,
    /// The answer to a [`QUESTION`].
    Alive {
        /// What it reports about itself now.
        #[serde(default, skip_serializing_if = "Condition::is_empty")]
        condition: Condition,
    },
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
        /// Whether the scheduler that a worker had joined is not there any more.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        lost: bool,
    },
    /// A worker of another supervisor, or of none, has joined the scheduler.
    Joined { worker: JoinedWorker },
    /// Such a worker is not the scheduler's any more.
    Parted {
        /// Its name.
        name: String,
        /// Whether nobody wished that.
        lost: bool,
        /// Why, as far as the scheduler knows.
        reason: String,
    },
    /// The process cannot start, or cannot continue; it ends after this.
    Failed {
        /// Why, with a hint if there is one.
        reason: String,
    },
}

/// A worker that has joined a scheduler from elsewhere. What only cuda-cluster's own workers say of
/// themselves is missing for others.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinedWorker {
    /// Its name for the scheduler.
    pub name: String,
    /// Where others reach it.
    pub address: String,
    /// The name of its machine, or its address.
    pub host: String,
    /// The cluster there that it belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<String>,
    /// Its name in that cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<String>,
    /// Its GPU, by NVML's index there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<u32>,
    /// The GPU's PCI address there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pci: Option<PciAddress>,
    /// CPUs in force.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<CpuSet>,
    /// NUMA nodes of the memory policy in force.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mems: Option<NodeSet>,
    /// Planned NIC ports.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nics: Vec<String>,
    /// Which machine that is: hosts may share a name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<String>,
}

/// What happens after a process's requested end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AfterLeaving {
    /// It is no longer needed.
    Rest,
    /// The scheduler elsewhere that all have joined has ended: neither is it needed nor whoever is
    /// not READY.
    Disband,
    /// It is restarted at once; this does not count as a failure.
    Return,
    /// The whole cluster ends.
    EndCluster,
}

/// What a worker knows about itself and its supervisor can't see.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Condition {
    /// Its pool of device memory, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_pool: Option<DevicePool>,
    /// Planned NIC ports that it can't use now.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing_ports: Vec<MissingPort>,
    /// The lanes of its connections, if they are not those that it reported last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peers: Option<Vec<PeerLanes>>,
    /// What it has done, and what it keeps where.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub work: Option<Work>,
    /// The bytes of [`Work::received_bytes`] by sender: a worker's name, or the address at which
    /// it was reached.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub received_from: BTreeMap<String, u64>,
}

impl Condition {
    /// Whether there is nothing to report.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// What a worker has done since its start, and what it keeps now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Work {
    /// Milliseconds since its start, by its own clock.
    pub at_ms: u64,
    /// Tasks that it has run to their ends.
    pub tasks: u64,
    /// Bytes that it has received from peers for its tasks, if it counts them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub received_bytes: Option<u64>,
    /// Bytes of its objects that are in device memory, if it knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_bytes: Option<u64>,
    /// Bytes of them that are on its disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spilled_bytes: Option<u64>,
}

/// A worker's pool of device memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DevicePool {
    /// Allocations of the driver.
    pub slabs: u64,
    /// Their bytes.
    pub held_bytes: u64,
    /// Bytes of them that are in use.
    pub used_bytes: u64,
    /// The largest piece that can be taken without another allocation.
    pub largest_free_bytes: u64,
    /// Most bytes that the peers have mapped, summed over the peers.
    pub mapped_by_peers_bytes: u64,
    /// Bytes that were given back to the driver, but that peers may still have mapped.
    #[serde(default)]
    pub freed_but_mapped_bytes: u64,
    /// Most that the pool may hold, if the plan limits it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub maximum_bytes: Option<u64>,
}

impl DevicePool {
    /// The share of its free bytes that is not in the largest free piece, from 0 to 1.
    pub fn fragmentation(&self) -> f64 {
        let free = self.held_bytes.saturating_sub(self.used_bytes);
        if free == 0 { 0.0 } else { 1.0 - self.largest_free_bytes as f64 / free as f64 }
    }
}

/// A planned NIC port that a worker can't use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MissingPort {
    /// The port, like `mlx5_0:1`.
    pub port: String,
    /// Why, like `it is DOWN`.
    pub why: String,
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
            condition: Condition {
                device_pool: Some(DevicePool { slabs: 2, held_bytes: 9, ..DevicePool::default() }),
                ..Condition::default()
            },
        };
        let line = encode(&status);
        assert_eq!(line.matches('\n').count(), 1);
        assert_eq!(decode(line.trim_end()).ok(), Some(status));
    }

    #[test]
    fn an_answer_without_a_condition_is_an_answer() {
        let alive = Status::Alive { condition: Condition::default() };
        assert_eq!(encode(&alive), "{\"status\":\"alive\"}\n", "what Dask's processes write");
        assert_eq!(decode("{\"status\":\"alive\"}").ok(), Some(alive));
    }

    #[test]
    fn fragmentation_is_the_share_outside_the_largest_free_piece() {
        let pool = |largest_free_bytes| DevicePool {
            held_bytes: 100,
            used_bytes: 60,
            largest_free_bytes,
            ..DevicePool::default()
        };
        assert!(pool(40).fragmentation().abs() < 1e-9);
        assert!((pool(10).fragmentation() - 0.75).abs() < 1e-9);
        assert!(DevicePool::default().fragmentation().abs() < 1e-9, "nothing is free");
    }

    #[test]
    fn bytes_by_sender_are_read_where_they_are_told() {
        let line = r#"{"status":"alive","condition":{"work":{"at_ms":5,"tasks":1},"received_from":{"gpu1":70}}}"#;
        let Ok(Status::Alive { condition }) = decode(line) else { panic!("an answer") };
        assert_eq!(condition.received_from, BTreeMap::from([("gpu1".to_owned(), 70)]));
        let of_before = r#"{"status":"alive","condition":{"work":{"at_ms":5,"tasks":1}}}"#;
        let Ok(Status::Alive { condition }) = decode(of_before) else { panic!("an answer") };
        assert!(condition.received_from.is_empty());
        assert_eq!(encode(&Status::Alive { condition }).trim_end(), of_before);
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
