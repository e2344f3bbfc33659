//! Recognises from a failed call which resource of the machine or user has run out.
//!
//! Such a failure is never caused by wrong input, and its remedy does not depend on the call.

use std::error::Error;
use std::fmt;
use std::io;

use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit};

use super::tasks::Tasks;

/// The exhausted resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exhausted {
    /// Disk space or quota.
    Disk,
    /// Descriptors of this process.
    Descriptors,
    /// Descriptors of the whole machine.
    MachineDescriptors,
    /// Processes and threads of this user, a control group, or the machine.
    Processes,
    /// Memory.
    Memory,
    /// The size that a file may have.
    FileSize,
}

impl Exhausted {
    /// Finds the resource in an error or its causes.
    pub fn behind(error: &(dyn Error + 'static)) -> Option<Self> {
        let mut next = Some(error);
        while let Some(error) = next {
            let code = error.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error);
            let code = code.map(Errno::from_raw).or(error.downcast_ref::<Errno>().copied());
            if let Some(exhausted) = code.and_then(Self::of) {
                return Some(exhausted);
            }
            next = error.source();
        }
        None
    }

    /// The resource that an error number stands for, if any.
    fn of(errno: Errno) -> Option<Self> {
        match errno {
            Errno::ENOSPC | Errno::EDQUOT => Some(Self::Disk),
            Errno::EMFILE => Some(Self::Descriptors),
            Errno::ENFILE => Some(Self::MachineDescriptors),
            // From fork(2) and clone(2); a read or write that would block is never reported to
            // users.
            Errno::EAGAIN => Some(Self::Processes),
            Errno::ENOMEM => Some(Self::Memory),
            Errno::EFBIG => Some(Self::FileSize),
            _ => None,
        }
    }

    /// A hint for the user.
    pub fn hint(self) -> String {
        match self {
            Self::Disk => "free some space; run directories lie in XDG_RUNTIME_DIR, else in /tmp, \
                           and shared memory in /dev/shm"
                .to_owned(),
            Self::Descriptors => {
                format!(
                    "a process may have {} open files: raise 'ulimit -n'",
                    soft(Resource::RLIMIT_NOFILE)
                )
            }
            Self::MachineDescriptors => "raise the machine's fs.file-max".to_owned(),
            // The kernel does not say which limit it was: the one with the least room. If there is
            // room everywhere, a thread found no addresses for its stack.
            Self::Processes => match Tasks::limits().into_iter().min_by_key(Tasks::room) {
                Some(tasks) if tasks.room() > ROOM && soft_limits(Resource::RLIMIT_AS) => format!(
                    "a process may have {} bytes of memory and addresses: raise 'ulimit -v'",
                    soft(Resource::RLIMIT_AS)
                ),
                Some(tasks) => format!("{tasks}: {}", tasks.hint()),
                None => "raise 'ulimit -u', or pids.max of the control group".to_owned(),
            },
            Self::Memory => "free some memory, or raise 'ulimit -v'".to_owned(),
            Self::FileSize => format!(
                "a file may have {} bytes: raise 'ulimit -f', or LimitFSIZE of a unit",
                soft(Resource::RLIMIT_FSIZE)
            ),
        }
    }
}

/// Room for so many processes and threads is not too little.
const ROOM: u64 = 100;

/// Whether there is a limit.
fn soft_limits(resource: Resource) -> bool {
    getrlimit(resource).is_ok_and(|(soft, _)| soft != libc::RLIM_INFINITY)
}

/// A limit as text.
fn soft(resource: Resource) -> String {
    match getrlimit(resource) {
        Ok((libc::RLIM_INFINITY, _)) => "any number of".to_owned(),
        Ok((soft, _)) => soft.to_string(),
        Err(_) => "a limited number of".to_owned(),
    }
}

/// A failed call on one line, with a hint if a resource has run out.
#[derive(Clone, Copy, Debug)]
pub struct Explained<'a>(pub &'a io::Error);

impl fmt::Display for Explained<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)?;
        match Exhausted::behind(self.0) {
            Some(exhausted) => write!(f, "; {}", exhausted.hint()),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_found_below_other_errors() {
        #[derive(Debug, thiserror::Error)]
        #[error("cannot write")]
        struct Outer(#[source] io::Error);
        let full = Outer(io::Error::from_raw_os_error(libc::ENOSPC));
        assert_eq!(Exhausted::behind(&full), Some(Exhausted::Disk));
        let absent = Outer(io::Error::from_raw_os_error(libc::ENOENT));
        assert_eq!(Exhausted::behind(&absent), None);
        let many = io::Error::from_raw_os_error(libc::EMFILE);
        assert!(Explained(&many).to_string().contains("ulimit -n"));
    }
}
