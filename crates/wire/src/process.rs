//! A process as others speak of it: which start it is, what holds it, where it is, how it ended.
//!
//! Holds the values; `os` sees to it that they are true.
//!
//! *Invariant:* an [`Exit`] has a status or a signal, never both.

use std::fmt;

use serde::{Deserialize, Serialize};

use cuda_cluster_model::cpuset::CpuSet;

/// Names one start of one process, for as long as the guardian lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Key(pub u64);

/// What keeps the processes of a cluster together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, strum::Display)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Containment {
    /// A version 2 control group, ended as a whole by `cgroup.kill`.
    Cgroup,
    /// A process group, and a guardian that adopts whatever leaves it (subreaper).
    Subreaper,
}

/// Where the threads and the memory of a living process really are.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Observed {
    /// Number of threads.
    pub threads: usize,
    /// CPUs that any of them may run on.
    pub cpus: CpuSet,
    /// Threads that may run on a CPU outside the asked-for ones.
    pub threads_outside: usize,
    /// Share of its resident pages that lie on the asked-for nodes, from 0 to 1; `None` where the
    /// kernel does not tell, or no node was asked for.
    pub local_memory: Option<f64>,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exit {
    /// Its exit status, when it ended itself.
    pub code: Option<i32>,
    /// The signal that ended it, otherwise.
    pub signal: Option<i32>,
    /// Whether the kernel wrote a core file.
    pub core_dumped: bool,
}

impl Exit {
    /// An exit with a status.
    pub const fn status(code: i32) -> Self {
        Self { code: Some(code), signal: None, core_dumped: false }
    }

    /// An end by a signal.
    pub const fn by_signal(signal: i32) -> Self {
        Self { code: None, signal: Some(signal), core_dumped: false }
    }

    /// Whether it ended itself with status 0.
    pub fn is_success(&self) -> bool {
        self.code == Some(0)
    }
}

impl fmt::Display for Exit {
    /// `ended with status 1`, `was ended by signal 9 (SIGKILL)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.code, self.signal) {
            (Some(code), _) => write!(f, "ended with status {code}")?,
            (None, Some(signal)) => {
                write!(f, "was ended by signal {signal}")?;
                if let Some(name) = signal_name(signal) {
                    write!(f, " ({name})")?;
                }
            }
            (None, None) => f.write_str("ended")?,
        }
        if self.core_dumped { f.write_str(", core dumped") } else { Ok(()) }
    }
}

/// The standard signals from 1 on, signal(7), as x86-64 and 64-bit Arm number them.
const SIGNALS: [&str; 31] = [
    "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2",
    "PIPE", "ALRM", "TERM", "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG",
    "XCPU", "XFSZ", "VTALRM", "PROF", "WINCH", "IO", "PWR", "SYS",
];

/// The name of a signal: `SIGKILL` for 9.
pub fn signal_name(signal: i32) -> Option<String> {
    let place = usize::try_from(signal).ok()?.checked_sub(1)?;
    SIGNALS.get(place).map(|name| format!("SIG{name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_told_in_a_sentence() {
        let dumped = Exit { core_dumped: true, ..Exit::by_signal(11) };
        let told = [
            (Exit::status(1), "ended with status 1"),
            (Exit::by_signal(9), "was ended by signal 9 (SIGKILL)"),
            (Exit::by_signal(31), "was ended by signal 31 (SIGSYS)"),
            (Exit::by_signal(34), "was ended by signal 34"),
            (Exit::by_signal(0), "was ended by signal 0"),
            (dumped, "was ended by signal 11 (SIGSEGV), core dumped"),
        ];
        for (exit, text) in told {
            assert_eq!(exit.to_string(), text);
        }
        assert!(Exit::status(0).is_success());
        assert!(!Exit::status(1).is_success() && !Exit::by_signal(9).is_success());
    }
}
