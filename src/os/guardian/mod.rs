//! The guardian: one small process per cluster, the parent of all its processes.
//!
//! The supervisor may live in any program, with threads, children and a SIGCHLD handling of its
//! own, and it may be killed. So the processes of a cluster are children of a process that does
//! nothing else. It is single-threaded where that matters: one thread starts every child, and
//! lives as long as the guardian, because the parent-death signal follows the *thread*. It adopts
//! grandchildren that lost their parents (subreaper), reaps everything, writes the logs, and
//! watches the supervisor through a pidfd: when that is gone, it kills everything that descends
//! from it, and ends.
//!
//! Which death is covered by what:
//! - the supervisor's: the guardian kills the control groups, or, without them, all its
//!   descendants, until none is left;
//! - the guardian's: the kernel kills its children (parent-death signal), and the supervisor the
//!   control group or, without one, every process that carries this cluster's mark in its
//!   environment;
//! - both at once: the kernel kills the children; what they left in the control group, or with the
//!   mark, is ended by whoever next takes the run directory.
//!
//! Decides nothing else: the supervisor says what is started, signalled and killed.
//!
//! *Invariant:* the guardian signals only processes that it has not reaped, so a number that the
//! kernel gave to somebody else is never hit.

mod channel;
mod client;
mod descendants;
mod fork;
mod helper;
mod output;
mod process;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::wire::process::{Exit, Key};
use crate::wire::status::PROCESS_VARIABLE;

pub use client::{Guardian, GuardianError};
pub(super) use descendants::kill_marked;
pub(super) use process::main;

/// The hidden subcommand.
pub(super) const SUBCOMMAND: &str = "__guard";

/// What is started, as far as it concerns the guardian; the rest is in the shim's instructions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    /// Names this start.
    pub key: Key,
    /// The process's name.
    pub name: String,
    /// Its log file.
    pub log: PathBuf,
    /// Size in bytes at which the log is rotated.
    pub log_rotate_bytes: u64,
    /// Rotated logs kept.
    pub log_keep: u32,
    /// The rank as which its output is handed on to whoever reads the ranks' output.
    pub deliver_as: Option<u32>,
    /// Whether its standard output and its standard error are two streams, rather than one.
    pub separate_streams: bool,
    /// Its control group, which exists.
    pub cgroup: Option<PathBuf>,
    /// The socket of a server to ask for a fork, rather than executing a shim.
    pub fork_server: Option<PathBuf>,
}

impl Start {
    /// The entry of its environment (`VARIABLE=value`) by which its descendants are known when they
    /// left every group.
    fn mark(&self) -> String {
        format!("{PROCESS_VARIABLE}={}", self.name)
    }
}

/// What the supervisor asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Request {
    /// Start a shim. The instructions and the status pipe come along as descriptors.
    Start(Start),
    /// Send a signal to a process group.
    Signal { key: Key, signal: i32 },
    /// Send SIGKILL to a process and everything that it started.
    Kill { key: Key },
    /// Say [`Report::Alive`].
    Ask,
    /// Kill what is left, wait until the ranks' output is handed on, and end; with `hurry`, wait
    /// only while its reader takes something.
    Deliver { hurry: bool },
    /// Kill what is left, and end.
    Finish,
}

/// What the guardian tells.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Report {
    /// It is at its post.
    Watching,
    /// It was asked whether it answers.
    Alive,
    /// A shim runs.
    Started {
        /// Which.
        key: Key,
        /// Its process id, which is also its group's.
        pid: u32,
    },
    /// A shim could not be started.
    NotStarted {
        /// Which.
        key: Key,
        /// Why.
        reason: String,
    },
    /// A process has ended, its group was killed, and its output is in the log.
    Exited {
        /// Which.
        key: Key,
        /// How.
        exit: Exit,
    },
}
