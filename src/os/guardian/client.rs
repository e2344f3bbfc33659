//! The supervisor's side of the guardian.
//!
//! *Invariant:* when a [`Guardian`] was dropped, the guardian's process has ended and with it every
//! process of the cluster, but for those that even SIGKILL cannot end.

use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::channel::Channel;
use super::descendants::kill_marked;
use super::process::{CHANNEL_FD, LOCK_FD, NO_CGROUP, OUTPUT_FD, WITH_OUTPUT};
use super::{Report, Request, SUBCOMMAND, Start};
use crate::os::containment::Cgroup;
use crate::os::pidfd::PidFd;
use crate::os::run_directory::RunDirectory;
use crate::os::shared_memory;
use crate::os::shim::Instructions;
use crate::wire::process::{Containment, Key};

/// Longest wait for the guardian's end when the supervisor lets go of it.
const LAST_WAIT: Duration = Duration::from_secs(5);

/// Longest wait for the guardian to be at its post.
const FIRST_WAIT: Duration = Duration::from_secs(10);

/// Why there is no guardian, or none any more.
#[derive(Debug, thiserror::Error)]
pub enum GuardianError {
    /// Its process could not be started.
    #[error("cannot start {} as guardian", helper.display())]
    Spawn {
        /// The program.
        helper: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The program does not do a guardian's work.
    #[error("{} does not answer as guardian", helper.display())]
    Mute {
        /// The program.
        helper: PathBuf,
    },
    /// It does not take requests.
    #[error("the guardian (process {pid}) does not take requests")]
    Deaf {
        /// Its process id.
        pid: u32,
        /// Why.
        #[source]
        source: io::Error,
    },
}

impl GuardianError {
    /// What the user can do.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Mute { .. } => Some(
                "a program that starts clusters calls cuda_cluster::os::dispatch() first in main, \
                 or names the cuda-cluster binary as its helper"
                    .to_owned(),
            ),
            Self::Spawn { .. } | Self::Deaf { .. } => None,
        }
    }
}

/// A guardian at its post.
#[derive(Debug)]
pub struct Guardian {
    channel: AsyncFd<Channel>,
    pid: Pid,
    process: PidFd,
    cgroup: Option<Cgroup>,
    shared_memory: PathBuf,
    mark: String,
    /// Whether it was told to end everything; locked while somebody waits for that.
    released: Mutex<bool>,
}

impl Guardian {
    /// Starts the guardian and waits until it watches.
    ///
    /// `label` names the control group, without one there is none; `mark` is an entry
    /// (`VARIABLE=value`) of the environment of every process of the cluster, and of no other;
    /// the guardian holds the lock of `directory` too. What processes write that are started with
    /// `deliver_as` goes into `output`, as `wire::output` has it.
    ///
    /// # Errors
    /// If `helper` cannot be started or is no program of ours.
    pub async fn start(
        helper: &Path,
        directory: &RunDirectory,
        label: Option<&str>,
        mark: String,
        output: Option<BorrowedFd<'_>>,
    ) -> Result<Self, GuardianError> {
        let failed = |source| GuardianError::Spawn { helper: helper.to_owned(), source };
        let (here, there) = Channel::pair().map_err(failed)?;
        let cgroup = label.and_then(|label| Cgroup::create(label).ok());
        let shared_memory = directory.paths().shared_memory();
        let mut arguments = vec![SUBCOMMAND.to_owned(), std::process::id().to_string()];
        arguments.push(shared_memory.display().to_string());
        let group = cgroup.as_ref().map(|group| group.path().display().to_string());
        arguments.push(group.unwrap_or_else(|| NO_CGROUP.to_owned()));
        let mut descriptors =
            vec![(there.as_raw_fd(), CHANNEL_FD), (directory.lock().as_raw_fd(), LOCK_FD)];
        if let Some(output) = output {
            arguments.push(WITH_OUTPUT.to_owned());
            descriptors.push((output.as_raw_fd(), OUTPUT_FD));
        }
        let pid = super::helper::spawn_at(helper, &arguments, &descriptors).map_err(failed)?;
        drop(there);
        let process = PidFd::open(pid).map_err(|errno| failed(errno.into()))?;
        // SAFETY: a channel holds one open descriptor for all its life, and never another.
        let channel = unsafe { AsyncFd::register(here) }.map_err(|error| failed(error.into()))?;
        let mut guardian = Self {
            channel,
            pid,
            process,
            cgroup,
            shared_memory,
            mark,
            released: Mutex::new(false),
        };
        let first = tokio::time::timeout(FIRST_WAIT, guardian.report()).await;
        if !matches!(first, Ok(Some(Report::Watching))) {
            return Err(GuardianError::Mute { helper: helper.to_owned() });
        }
        // It entered the group before it answered, or has no right to.
        if !guardian.cgroup.as_ref().is_some_and(Cgroup::is_populated) {
            guardian.cgroup.take().inspect(|group| {
                group.remove();
            });
        }
        Ok(guardian)
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.pid.as_raw().cast_unsigned()
    }

    /// The mechanism in use.
    pub fn containment(&self) -> Containment {
        if self.cgroup.is_some() { Containment::Cgroup } else { Containment::Subreaper }
    }

    /// The cluster's control group, where there is one.
    pub fn cgroup(&self) -> Option<&Cgroup> {
        self.cgroup.as_ref()
    }

    /// Starts a process; what becomes of it comes as reports. Returns the supervisor's end of its
    /// status pipe.
    ///
    /// # Errors
    /// If the guardian takes no requests, or descriptors have run out.
    pub fn spawn(
        &self,
        mut start: Start,
        mut instructions: Instructions,
    ) -> Result<UnixStream, GuardianError> {
        let deaf = |source| self.deaf(source);
        let group = self.cgroup.as_ref().map(|group| {
            let unique = format!("{}.{}", start.name, start.key.0);
            group.child(&unique).map(|child| child.path().to_owned())
        });
        start.cgroup = group.transpose().map_err(deaf)?;
        instructions.cgroup = start.cgroup.clone();
        let paper = write_down(&instructions).map_err(deaf)?;
        let (status, its_end) = UnixStream::pair().map_err(deaf)?;
        let descriptors = [paper.as_fd(), its_end.as_fd()];
        self.channel.get_ref().send(&Request::Start(start), &descriptors).map_err(deaf)?;
        Ok(status)
    }

    /// Sends a signal to a process and its group. One that has ended gets none.
    ///
    /// # Errors
    /// If the guardian takes no requests.
    pub fn signal(&self, key: Key, signal: i32) -> Result<(), GuardianError> {
        self.request(&Request::Signal { key, signal })
    }

    /// Sends SIGKILL to a process and everything that it started.
    ///
    /// # Errors
    /// If the guardian takes no requests.
    pub fn kill(&self, key: Key) -> Result<(), GuardianError> {
        self.request(&Request::Kill { key })
    }

    /// Asks for [`Report::Alive`].
    ///
    /// # Errors
    /// If the guardian takes no requests.
    pub fn ask(&self) -> Result<(), GuardianError> {
        self.request(&Request::Ask)
    }

    /// Asks the guardian to kill what is left, to hand on what the ranks wrote, and to end. With
    /// `hurry` it waits only while the reader takes something; it may be asked again so.
    ///
    /// # Errors
    /// If the guardian takes no requests.
    pub fn deliver(&self, hurry: bool) -> Result<(), GuardianError> {
        self.request(&Request::Deliver { hurry })
    }

    /// The next report; `None` when the guardian is gone.
    pub async fn report(&self) -> Option<Report> {
        let received =
            self.channel.async_io(Interest::READABLE, |channel| channel.receive::<Report>()).await;
        received.ok().flatten().map(|(report, _)| report)
    }

    /// Lets the guardian end everything, and waits for it: milliseconds, unless something cannot
    /// be killed. Whoever calls it meanwhile waits too; afterwards it does nothing.
    pub fn end(&self) {
        let mut released = self.released.lock().unwrap_or_else(PoisonError::into_inner);
        if std::mem::replace(&mut *released, true) {
            return;
        }
        self.say_farewell();
        if !self.process.wait(LAST_WAIT) {
            self.process.signal(Signal::SIGKILL);
            self.process.wait(LAST_WAIT);
        }
        self.bury();
    }

    /// Lets the guardian end everything, and waits at most this long; it goes on without us. Says
    /// whether it has ended, or was let go before.
    pub fn let_go(&self, patience: Duration) -> bool {
        let mut released = self.released.lock().unwrap_or_else(PoisonError::into_inner);
        if std::mem::replace(&mut *released, true) {
            return true;
        }
        self.say_farewell();
        let ended = self.process.wait(patience);
        if ended {
            self.bury();
        }
        ended
    }

    /// Asks the guardian to kill what is left, and to end. It would by the end of the channel
    /// alone, but then it says that this supervisor ended without a word.
    fn say_farewell(&self) {
        // One that takes no requests is killed in the end.
        let _ = self.request(&Request::Finish);
        self.channel.get_ref().close();
    }

    /// Reaps the guardian, and does what it did not.
    fn bury(&self) {
        let ended = waitpid(self.pid, Some(WaitPidFlag::WNOHANG));
        if !matches!(ended, Ok(WaitStatus::Exited(_, 0))) {
            self.stand_in();
        }
    }

    fn request(&self, request: &Request) -> Result<(), GuardianError> {
        self.channel.get_ref().send(request, &[]).map_err(|source| self.deaf(source))
    }

    fn deaf(&self, source: io::Error) -> GuardianError {
        GuardianError::Deaf { pid: self.pid(), source }
    }

    /// Does the guardian's work in its place: kills and removes the control group, or whatever
    /// carries the mark, and frees the shared memory.
    fn stand_in(&self) {
        match &self.cgroup {
            Some(group) => Cgroup::remove_left_over(group.path()),
            None => {
                kill_marked(&self.mark);
            }
        }
        shared_memory::remove(&self.shared_memory);
    }
}

impl Drop for Guardian {
    fn drop(&mut self) {
        self.end();
    }
}

/// Puts the instructions into a file without a name, which the shim inherits.
fn write_down(instructions: &Instructions) -> io::Result<File> {
    let mut file = File::from(memfd_create(c"instructions", MFdFlags::MFD_CLOEXEC)?);
    file.write_all(&serde_json::to_vec(instructions)?)?;
    file.rewind()?;
    Ok(file)
}
