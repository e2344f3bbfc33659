//! What the core is told, and what it asks for.
//!
//! *Invariant:* an event says what was observed, and an action what is to be done; neither says
//! why.

use std::path::PathBuf;

use super::SlotNumber;
use crate::record::GpuError;
use crate::{Escalation, Outcome, Record, Stall};
use cuda_cluster_wire::process::{Exit, Key};
use cuda_cluster_wire::status::Status;

/// What happened.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Event {
    /// Everything is prepared.
    Begin,
    /// A shim has been started.
    Started { key: Key, pid: u32 },
    /// A shim could not be started.
    NotStarted { key: Key, reason: String },
    /// A process wrote on its status pipe.
    Said { key: Key, status: Status },
    /// A process's status pipe has no writer any more: the program does not use it, or has ended.
    StatusClosed { key: Key },
    /// A process has ended according to the kernel; the guardian will report how.
    Gone { key: Key },
    /// A check has found that the processes with these keys are stopped.
    Looked { stopped: Vec<Key>, guardian_stopped: bool },
    /// Current answers of all processes are wanted.
    AskAll,
    /// The guardian has answered.
    GuardianAlive,
    /// The last lines of the log of a process that did not become READY in time were read.
    LogRead { slot: SlotNumber, log_tail: Vec<String> },
    /// A process has ended. `starved`: while it ran, the kernel has ended processes of this machine
    /// for want of memory.
    Exited { key: Key, exit: Exit, log_tail: Vec<String>, starved: bool },
    /// A process's resident memory is so near its limit that it is to be killed.
    MemoryReached { key: Key, resident_bytes: u64, limit_bytes: u64 },
    /// The GPU of a dead process was checked.
    Gpu { slot: SlotNumber, finding: GpuFinding },
    /// The crash bundle of an exit was written.
    Bundled { slot: SlotNumber, at: String, path: PathBuf, gpu_errors: Vec<GpuError> },
    /// The copy of a process's output is not written any more.
    NotCopied { key: Key, path: PathBuf, reason: String },
    /// A remark to record; what `lasts` is shown with the state until the next about the same.
    Noted { about: Subject, text: String, lasts: bool },
    /// Since when it was last told, processes can't go on, or go on again.
    Stalled(Option<Stall>),
    /// The end was requested.
    Stop(Escalation),
    /// A restart of a process was requested.
    Restart(SlotNumber),
    /// This number of workers was requested.
    Scale(usize),
    /// The cluster was verified.
    Verified,
    /// What the ranks of the next start are told is made, or could not be.
    Met(Result<Vec<Option<String>>, String>),
    /// The guardian is gone.
    GuardianLost,
    /// What all processes need is gone.
    Broken { reason: String },
    /// A deadline has passed.
    Tick,
}

impl Event {
    /// That stalls are not seen, or are seen again.
    pub(crate) fn unseen(why: Option<String>) -> Self {
        let lasts = why.is_some();
        let text = match why {
            Some(why) => format!("supervision.stalled_after: stalls are not noticed: {why}"),
            None => "supervision.stalled_after: stalls are noticed again".to_owned(),
        };
        Self::Noted { about: Subject::Sight, text, lasts }
    }

    /// That a signal is why the end is requested: a batch system's, which says nothing else.
    pub(crate) fn signalled(name: &str) -> Self {
        Self::Noted { about: Subject::End, text: format!("asked to end by {name}"), lasts: true }
    }
}

/// What a remark is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Subject {
    /// The run directory.
    Directory,
    /// The file of the events in it.
    Journal,
    /// Whether its processes go on.
    Progress,
    /// Whether anybody can look whether they do.
    Sight,
    /// Why it ends.
    End,
}

/// The state of a dead process's GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum GpuFinding {
    /// Its memory is free.
    Free,
    /// Its memory is still in use after the longest wait; the text names the processes.
    Held(String),
    /// The GPU has fallen off the bus or must be reset; the text says why.
    Lost(String),
}

/// An action for the actor.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Action {
    /// Start the process of a slot.
    Start { slot: SlotNumber, key: Key },
    /// Send SIGTERM to its group.
    Terminate { key: Key },
    /// Send SIGKILL to a process and its descendants.
    Kill { key: Key },
    /// Ask a process for an answer.
    Ask { key: Key },
    /// Ask the guardian for an answer.
    AskGuardian,
    /// Check which processes are stopped.
    Look,
    /// Read the last lines of the log of a process that did not become READY in time.
    ReadLog { slot: SlotNumber },
    /// Wait until a dead process's GPU is free, and report it.
    AwaitGpu { slot: SlotNumber },
    /// Make anew what ranks are told of each other: these workers, in the order of their ranks.
    Meet { restart: u32, members: Vec<usize> },
    /// Write a crash bundle for an abnormal exit.
    Bundle { slot: SlotNumber },
    /// Publish a record.
    Record(Record),
    /// The cluster has ended.
    End(Outcome),
}
