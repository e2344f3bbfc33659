//! The guardian: one small process per cluster, the parent of all its processes.
//!
//! The supervisor may live in any program, with threads, children and SIGCHLD handling of its own,
//! and it may be killed. So the processes of a cluster are children of a separate process. One
//! thread starts every child and lives as long as the guardian, because the parent-death signal is
//! tied to the *thread*. The guardian adopts orphaned descendants (subreaper), reaps everything,
//! writes the logs, and watches the supervisor through a pidfd: when the supervisor is gone, it
//! kills all its descendants and ends.
//!
//! What happens on each death:
//! - the supervisor's: the guardian kills the control groups, or, without them, all its
//!   descendants, until none is left;
//! - the guardian's: the kernel kills its children (parent-death signal), and the supervisor the
//!   control group or, without one, every process that carries this cluster's mark in its
//!   environment;
//! - both at once: the kernel kills the children; what they left in the control group, or with the
//!   mark, is ended by whoever next takes the run directory.
//!
//! Makes no decisions: the supervisor decides what to start, signal and kill.
//!
//! *Invariant:* the guardian signals only processes that it has not reaped, so it never hits a
//! process with a reused id.

mod channel;
mod client;
mod copy;
mod fork;
mod helper;
mod outbox;
mod output;
mod process;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use cuda_cluster_wire::process::{Exit, Key};
use cuda_cluster_wire::status::PROCESS_VARIABLE;

pub use client::{Guardian, GuardianError};
pub(super) use process::main;

/// The hidden subcommand.
pub(super) const SUBCOMMAND: &str = "__guard";

/// The part of a start request that concerns the guardian; the rest is in the shim's instructions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    /// Identifies this start.
    pub key: Key,
    /// The process's name.
    pub name: String,
    /// Its log file.
    pub log: PathBuf,
    /// Size in bytes at which the log is rotated.
    pub log_rotate_bytes: u64,
    /// Rotated logs kept.
    pub log_keep: u32,
    /// The rank under which its output is delivered to the reader of the ranks' output.
    pub deliver_as: Option<u32>,
    /// Whether standard output and standard error are two streams.
    pub separate_streams: bool,
    /// Where they also go, without the endings `.out` and `.err`.
    pub copy: Option<PathBuf>,
    /// Its existing control group.
    pub cgroup: Option<PathBuf>,
    /// The socket of a fork server to use instead of executing a shim.
    pub fork_server: Option<PathBuf>,
}

impl Start {
    /// An environment entry (`VARIABLE=value`) that identifies the process's descendants after they
    /// have left all groups.
    fn mark(&self) -> String {
        format!("{PROCESS_VARIABLE}={}", self.name)
    }
}

/// Requests from the supervisor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Request {
    /// Start a shim. Instructions, status pipe and, if it has one, standard input are sent along as
    /// descriptors.
    Start(Start),
    /// Send a signal to a process group.
    Signal { key: Key, signal: i32 },
    /// Send SIGKILL to a process and all its descendants.
    Kill { key: Key },
    /// Send [`Report::Alive`].
    Ask,
    /// Kill the remaining processes, deliver the ranks' output, and end; with `hurry`, wait only as
    /// long as the reader makes progress.
    Deliver { hurry: bool },
    /// Kill the remaining processes, and end.
    Finish,
}

/// Reports to the supervisor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "a field that says nothing more has its name")]
pub enum Report {
    /// The guardian is ready.
    Watching,
    /// The guardian ends, because the kernel refuses what it needs.
    Unable { reason: String },
    /// The guardian answers a request.
    Alive,
    /// A shim has been started.
    Started {
        key: Key,
        /// Its process id, which is also that of its group.
        pid: u32,
    },
    /// A shim could not be started.
    NotStarted { key: Key, reason: String },
    /// A copy of a process's output is not written any more.
    NotCopied {
        key: Key,
        /// The file.
        path: PathBuf,
        reason: String,
    },
    /// A process has ended, its group has been killed, and its output is in the log.
    Exited {
        key: Key,
        /// How it ended.
        exit: Exit,
    },
}
