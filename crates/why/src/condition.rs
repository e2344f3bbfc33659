//! What a rank is doing, or waiting for: a value.
//!
//! *Invariant:* [`Kind::Deadlock`] is said only if no thread of the process can wake another.

use serde::{Deserialize, Serialize};

/// A wait of this length is called a stall, if nothing says that it is shorter by nature.
const PATIENCE_MS: u64 = 5_000;

/// A sleep of which more is left is not one between two tries.
pub(crate) const LONG_SLEEP_MS: u64 = 60_000;

/// Whether a wait has lasted for so long that it may be a stall; not if nobody knows for how long.
pub(crate) fn is_long(millis: Option<u64>) -> bool {
    millis.is_some_and(|millis| millis >= PATIENCE_MS)
}

/// What a rank is doing. The order is that in which causes are looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// It has ended.
    Gone,
    /// Stopped by a signal.
    Stopped,
    /// Stopped by a debugger.
    Traced,
    /// Its control group is frozen.
    Frozen,
    /// Each of its threads waits for a lock, and none is left that could release one.
    Deadlock,
    /// In a system call about a file that does not return.
    File,
    /// The other machine does not answer.
    Network,
    /// Its pages are on a disk, or it is slowed down because it has too much memory.
    Memory,
    /// Its control group has used up its processor time.
    Throttled,
    /// Another process has the lock on a file.
    FileLock,
    /// Waits for somebody to type.
    Input,
    /// What it writes is not read.
    Unread,
    /// Waits for a process that is not of the job.
    Outside,
    /// Sleeps until a time.
    Sleeps,
    /// A thread has the interpreter's lock and does not give it away.
    Interpreter,
    /// Waits for its GPU or its NIC.
    Device,
    /// Uses a processor.
    Works,
    /// Waits for a lock, and nothing says who has it.
    Lock,
    /// Waits for a process that it has started, which waits for it, or is not there.
    Child,
    /// In an operation that all ranks have to call.
    Collective,
    /// Waits for other ranks.
    Peer,
    /// No worker may run tasks that wait.
    Unplaced,
    /// Nothing to do: waits for connections or events.
    Idle,
    Unknown,
}

/// What a rank is doing, and where.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Condition {
    pub kind: Kind,
    pub pid: u32,
    /// A fragment that follows "it": `is stopped`, `reads /data/x on nfs4`.
    pub text: String,
    /// The operation, for [`Kind::Collective`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operation: Option<String>,
    /// `train.py:12 in step`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub place: Option<String>,
    /// The text of that line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<String>,
    /// How long it has not run; `None` if it runs, or if the kernel does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub for_ms: Option<u64>,
    /// The ranks that it waits for, as far as they are known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub on: Vec<String>,
    /// Whether it is a task of a pool that does it, while the main thread waits for events.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub in_task: bool,
    /// Whether its wait may be ended by somebody of whom nothing is known, or who does something:
    /// a process or a thread of its own that works or sleeps meanwhile, or a server elsewhere.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub open: bool,
    /// Whether its wait ends at a time, at the latest.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub timed: bool,
    /// Where the rank itself is, if it is another process that does it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub own_place: Option<String>,
    /// How long it will still sleep, or wait.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left_ms: Option<u64>,
}

impl Condition {
    /// Whether it sleeps for less than a second, as who asks again and again does.
    pub(crate) fn asks_again(&self) -> bool {
        let asleep = self.left_ms.zip(self.for_ms).map(|(left, so_far)| left + so_far);
        self.kind == Kind::Sleeps && asleep.is_some_and(|all| all < 1_000)
    }

    /// Nothing is known but a text.
    pub(crate) fn plain(pid: u32, text: String) -> Self {
        Self {
            kind: Kind::Unknown,
            pid,
            text,
            operation: None,
            place: None,
            code: None,
            for_ms: None,
            on: Vec::new(),
            in_task: false,
            open: false,
            timed: false,
            own_place: None,
            left_ms: None,
        }
    }
}

/// A time for people.
pub(crate) fn short(millis: u64) -> String {
    match millis / 1000 {
        0 => format!("{millis} ms"),
        seconds @ 1..120 => format!("{seconds} s"),
        seconds @ 120..7200 => format!("{} min", seconds / 60),
        seconds => format!("{} h", seconds / 3600),
    }
}
