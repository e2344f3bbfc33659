//! What was seen of a job's processes: values with a text form.
//!
//! Judges nothing.
//!
//! *Invariant:* what could not be seen is missing and named in [`Evidence::unseen`], never a
//! value that looks as if it had been seen. No environment and no argument of a process is in it.

mod kernel;
mod tasks;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

pub use kernel::KernelMessage;
pub(crate) use kernel::{Told, tells};
pub use tasks::{Fetch, Held, Paused, Placed, Tasks};

/// The version of the JSON form.
pub const VERSION: u32 = 1;

/// What was seen of a job within some hundred milliseconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Evidence {
    pub version: u32,
    /// When, as RFC 3339.
    pub at: String,
    /// The time between the two looks that differences are taken of.
    pub interval_ms: u64,
    /// Whether its processes wait for requests when nothing is wrong: a scheduler and workers.
    #[serde(default)]
    pub serves: bool,
    /// The ranks (or workers, and the scheduler) that are there or were to be, in order.
    pub ranks: Vec<Rank>,
    /// The processes, of the ranks and of those that they have started.
    pub processes: Vec<Process>,
    /// Processes that are not of the job, but that it waits for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub outside: Vec<Outsider>,
    /// Share of the last ten seconds in which some process waited for memory, in percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_pressure: Option<f64>,
    /// What its engine says of its tasks, if it has some and has answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tasks: Option<Tasks>,
    /// What the kernel and the GPUs' driver have written since the job's start, as far as it tells
    /// something of jobs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kernel: Vec<KernelMessage>,
    /// What could not be seen, and why.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unseen: Vec<Unseen>,
}

/// One member of the job.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Rank {
    /// `gpu3`, `scheduler`.
    pub name: String,
    /// Its first process; `None` if it is not running.
    pub pid: Option<u32>,
    /// Its number, where its program knows it by one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub number: Option<u32>,
    /// The PCI address of its GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<String>,
    /// Its last process, if it has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_pid: Option<u32>,
    /// How its last process ended, if it has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<String>,
    /// Since when it has written nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub silent_for_ms: Option<u64>,
}

/// A process that is not of the job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outsider {
    pub pid: u32,
    pub name: String,
    /// Whether it used a processor, within a tenth of a second.
    pub works: bool,
    /// Whether its main thread sleeps for a time.
    pub sleeps: bool,
}

/// What could not be seen, and why.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Unseen {
    pub what: String,
    pub why: String,
}

/// A process of the job.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Process {
    pub pid: u32,
    pub parent: u32,
    /// The name of the rank that it belongs to.
    pub rank: String,
    /// The kernel's name of it, at most 15 characters.
    pub name: String,
    pub state: State,
    /// The process that traces it: a debugger.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tracer: Option<Tracer>,
    /// `3.11.7`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub python: Option<String>,
    /// The first is the main thread.
    pub threads: Vec<Thread>,
    #[serde(default)]
    pub resident_bytes: u64,
    #[serde(default)]
    pub swapped_bytes: u64,
    /// Pages that had to be read from a disk, between the two looks.
    #[serde(default)]
    pub major_faults: u64,
    /// Bytes that it has read and written, by any means, between the two looks.
    #[serde(default)]
    pub moved_bytes: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<Group>,
    /// Its connections.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub connections: Vec<Connection>,
    /// Files that it has open and of which another process has a lock; looked for where a thread
    /// tries something again and again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub locked: Vec<Locked>,
    /// The devices that it has open: `/dev/nvidia0`, `/dev/infiniband/uverbs0`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<String>,
}

/// A file of which a process has a lock (flock(2), fcntl(2)).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Locked {
    pub path: String,
    pub holder: u32,
}

/// What is said in place of the file system of a named pipe.
pub const NAMED_PIPE: &str = "named pipe";

/// Whether a file is one of NVIDIA's, AMD's or InfiniBand's drivers.
pub(crate) fn is_a_device(path: &str) -> bool {
    ["/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/infiniband"].iter().any(|it| path.starts_with(it))
}

/// Whether a place in the kernel is a wait for the server of a file system.
pub(crate) fn is_remote(kernel: Option<&str>) -> bool {
    const REMOTE: [&str; 7] =
        ["request_wait_answer", "fuse_", "nfs", "rpc_wait", "cifs", "ceph", "lustre"];
    kernel.is_some_and(|kernel| REMOTE.iter().any(|word| kernel.contains(word)))
}

/// What traces a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tracer {
    pub pid: u32,
    pub name: String,
}

/// The limits of a process's control group, where it has some.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Group {
    pub path: String,
    /// Time that its processes had to wait for the end of a period, between the two looks.
    #[serde(default)]
    pub throttled_us: u64,
    /// Processor time that they may have together in each period.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_limit: Option<CpuLimit>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frozen: Option<bool>,
    /// Share of the last ten seconds in which all of its processes waited for memory, in percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_pressure: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// What it may have before its pages are taken away or its processes slowed down.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_limit_bytes: Option<u64>,
}

/// `cpu.max`, or `cpu.cfs_quota_us` and `cpu.cfs_period_us`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuLimit {
    pub quota_us: u64,
    pub period_us: u64,
    /// In how many periods it was used up, since the control group was made.
    pub throttled: u64,
}

/// The kernel's state of a process or a thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    Running,
    #[default]
    Sleeping,
    /// In a wait that no signal ends, mostly for a device (D).
    Uninterruptible,
    Stopped,
    Traced,
    /// It has ended, and its parent has not asked how.
    Zombie,
    Other,
}

/// A thread.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Thread {
    pub tid: u32,
    pub name: String,
    pub state: State,
    /// Processor time between the two looks.
    #[serde(default)]
    pub cpu_ms: u64,
    /// How long ago it last ran, as far as the kernel says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asleep_for_ms: Option<u64>,
    /// How often it began to wait, between the two looks.
    #[serde(default)]
    pub waits_begun: u64,
    /// Where in the kernel it waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub call: Option<Call>,
    /// Python's frames, the innermost first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub frames: Vec<Frame>,
    /// The functions of native code that it is in, the innermost first; of processes without
    /// Python.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub functions: Vec<Function>,
    /// Whether both looks saw the same frames.
    #[serde(default)]
    pub same_frames: bool,
    /// Whether it had Python's interpreter lock, both times.
    #[serde(default)]
    pub has_gil: bool,
}

/// A function of a program in C, C++, Rust …
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Function {
    /// Its address in the file, if it has no name there.
    pub name: String,
    /// The file that it is in, without folders.
    pub module: String,
}

/// A line of a Python program.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Frame {
    pub function: String,
    pub file: String,
    pub line: i32,
    /// The text of the line, where the file could be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<String>,
}

/// A system call in which a thread waits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// `read`, `futex`; the number if it is none of those that we know.
    pub name: String,
    pub waits: Waits,
    /// How much of its time limit is left, if it has one, and it could be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left_ms: Option<u64>,
}

/// What a system call waits for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Waits {
    /// A lock or a condition in memory. `shared` if other processes may have it mapped; `sharers`
    /// are those that do, if all that may could be seen.
    Lock {
        address: u64,
        shared: bool,
        timed: bool,
        holder: Option<u32>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        sharers: Option<Vec<Holder>>,
    },
    /// A descriptor, to read from it or to write to it.
    Descriptor { end: End, writes: bool },
    /// One of several descriptors; `timed` if not for ever.
    Any { ends: Vec<End>, timed: bool },
    /// The end of a time; how much of it is left.
    Time { left_ms: Option<u64> },
    /// The end of a child; `None`: of any.
    Child { pid: Option<u32> },
    /// A lock on a file.
    FileLock { path: String, holder: Option<u32> },
    /// A file's name or content.
    File { path: Option<String>, filesystem: Option<String> },
    /// Nothing that we know.
    Unknown,
}

/// What a descriptor leads to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// A pipe: the processes that have its other end, of the job and outside of it.
    Pipe {
        inode: u64,
        others: Vec<Holder>,
    },
    /// A connection; an index into [`Process::connections`].
    Connection(usize),
    /// A socket that waits for connections.
    Listener {
        address: String,
    },
    Terminal {
        path: String,
    },
    File {
        path: String,
        filesystem: Option<String>,
    },
    /// An event: no other process is known.
    Event,
    /// Changes of files, inotify(7) and fanotify(7): anybody may make them.
    Changes,
    /// A process, whose end it tells (pidfd_open(2)).
    Process {
        pid: u32,
    },
    /// It is ready at a time.
    Timer,
    Other(String),
}

/// A process that has an end of a pipe.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Holder {
    pub pid: u32,
    /// The rank that it belongs to, or `None` if it is not of the job.
    pub rank: Option<String>,
}

/// A connection of a process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Connection {
    pub local: String,
    pub remote: String,
    /// The process at the other end, if it is on this machine and could be seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<Holder>,
    /// Bytes that have come and were not read.
    #[serde(default)]
    pub unread_bytes: u64,
    /// Bytes that were written, and that the other end has not acknowledged or read.
    #[serde(default)]
    pub unsent_bytes: u64,
    /// How often in a row the kernel has sent the same bytes without an answer.
    #[serde(default)]
    pub unanswered: u32,
    /// Whether the other end has said that it ends, or is gone.
    #[serde(default)]
    pub closed: bool,
    /// Whether it is still being made.
    #[serde(default)]
    pub connecting: bool,
}

/// What [`Unseen::what`] begins with where a process's system calls could not be read.
pub(crate) const CALLS: &str = "system calls";

/// The same, where nothing of a process could be.
pub(crate) const ALL: &str = "process ";

impl Evidence {
    /// A process by its id.
    pub fn process(&self, pid: u32) -> Option<&Process> {
        self.processes.iter().find(|process| process.pid == pid)
    }

    /// Why nothing was seen of any process: what each waits for could not be read.
    pub fn nothing_seen(&self) -> Option<String> {
        let calls = self.unseen.iter().filter(|unseen| unseen.what.starts_with(CALLS));
        // Of each thread of a process it may have a line.
        let hidden: BTreeSet<&String> = calls.map(|unseen| &unseen.what).collect();
        let of = |unseen: &&Unseen| unseen.what.starts_with(CALLS) || unseen.what.starts_with(ALL);
        let first = self.unseen.iter().find(of).filter(|_| hidden.len() >= self.processes.len())?;
        Some(format!("{} can't be seen: {}", first.what, first.why))
    }

    /// The processes by the process that has started them.
    pub(crate) fn children(&self) -> BTreeMap<u32, Vec<&Process>> {
        let mut children: BTreeMap<u32, Vec<&Process>> = BTreeMap::new();
        for process in &self.processes {
            children.entry(process.parent).or_default().push(process);
        }
        children
    }
}

impl Frame {
    /// `train.py:12 in step`.
    pub fn place(&self) -> String {
        let file = self.file.rsplit('/').next().unwrap_or(&self.file);
        format!("{file}:{} in {}", self.line, self.function)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_seen_if_no_process_may_be_looked_at() {
        let unseen = |what: &str| Unseen { what: what.to_owned(), why: "not permitted".to_owned() };
        let process = |pid| Process { pid, ..Process::default() };
        let mut job = Evidence { processes: vec![process(1), process(2)], ..Evidence::default() };
        assert_eq!(job.nothing_seen(), None);
        job.unseen = vec![unseen("system calls of process 1"), unseen("system calls of process 1")];
        assert_eq!(job.nothing_seen(), None, "one of two");
        job.unseen.push(unseen("system calls of process 2"));
        let expected = "system calls of process 1 can't be seen: not permitted";
        assert_eq!(job.nothing_seen().as_deref(), Some(expected));
        let held = Evidence { unseen: vec![unseen("process 3")], ..Evidence::default() };
        assert!(held.nothing_seen().is_some());
        assert_eq!(Evidence::default().nothing_seen(), None, "nobody was there");
    }
}
