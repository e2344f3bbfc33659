//! How processes end, and which ones there are.
//!
//! Starts nothing: the `guardian` does.
//!
//! *Invariant:* an [`Exit`] has a status or a signal, never both.

use std::fmt;

use nix::sys::signal::Signal;
use nix::sys::wait::WaitStatus;
use serde::{Deserialize, Serialize};

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

    /// What `waitpid` said, when that was an end.
    pub(crate) fn from_wait(status: WaitStatus) -> Option<Self> {
        match status {
            WaitStatus::Exited(_, code) => Some(Self::status(code)),
            WaitStatus::Signaled(_, signal, core_dumped) => {
                Some(Self { core_dumped, ..Self::by_signal(signal as i32) })
            }
            _ => None,
        }
    }
}

impl fmt::Display for Exit {
    /// `ended with status 1`, `was ended by signal 9 (SIGKILL)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.code, self.signal) {
            (Some(code), _) => write!(f, "ended with status {code}")?,
            (None, Some(signal)) => {
                write!(f, "was ended by signal {signal}")?;
                if let Ok(known) = Signal::try_from(signal) {
                    write!(f, " ({})", known.as_str())?;
                }
            }
            (None, None) => f.write_str("ended")?,
        }
        if self.core_dumped { f.write_str(", core dumped") } else { Ok(()) }
    }
}

/// Resident memory of a process in bytes; `None` if there is no such process.
pub fn resident_bytes(pid: u32) -> Option<u64> {
    // The second field counts pages, proc(5).
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    let pages: u64 = statm.split(' ').nth(1)?.parse().ok()?;
    let page = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok()??;
    Some(pages * u64::try_from(page).ok()?)
}

/// Largest core file of this process and those that it starts, in bytes; `None` for no limit.
pub fn core_limit_bytes() -> Option<u64> {
    let limit = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_CORE);
    let (soft, _) = limit.ok()?;
    (soft != nix::sys::resource::RLIM_INFINITY).then_some(soft)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exit_names_its_status_or_its_signal() {
        assert_eq!(Exit::status(3).to_string(), "ended with status 3");
        assert_eq!(Exit::by_signal(9).to_string(), "was ended by signal 9 (SIGKILL)");
        assert_eq!(Exit::by_signal(64).to_string(), "was ended by signal 64");
        let dumped = Exit { core_dumped: true, ..Exit::by_signal(11) };
        assert_eq!(dumped.to_string(), "was ended by signal 11 (SIGSEGV), core dumped");
    }
}
