//! The supervisor's side of the guardian.
//!
//! *Invariant:* after a [`Guardian`] has been dropped, its process and all processes of the cluster
//! have ended, except those that even SIGKILL cannot end.

use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::Signal;
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid};
use nix::unistd::Pid;
use tokio::io::unix::AsyncFd;
use tokio::io::{Interest, Ready};

use super::channel::Channel;
use super::outbox::Outbox;
use super::process::{CHANNEL_FD, LOCK_FD, NO_CGROUP, OUTPUT_FD, WITH_OUTPUT};
use super::{Report, Request, SUBCOMMAND, Start};
use crate::os::containment::Cgroup;
use crate::os::descendants::kill_marked;
use crate::os::pidfd::PidFd;
use crate::os::process;
use crate::os::run_directory::RunDirectory;
use crate::os::shared_memory;
use crate::os::shim::Instructions;
use cuda_cluster_wire::process::{Containment, Exit, Key};

/// How long dropping a [`Guardian`] waits for its process to end.
const LAST_WAIT: Duration = Duration::from_secs(5);

/// How long to wait until the guardian is ready.
const FIRST_WAIT: Duration = Duration::from_secs(10);

/// Why the guardian could not be started or no longer works.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum GuardianError {
    /// Its process could not be started.
    #[error("cannot start {} as guardian", helper.display())]
    Spawn {
        helper: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The program does not respond like a guardian.
    #[error("{} does not answer as guardian", helper.display())]
    Mute { helper: PathBuf },
    /// It can't hold the cluster's processes together here.
    #[error("the guardian cannot watch over processes here: {reason}")]
    Unable {
        /// What failed, and the kernel's words.
        reason: String,
    },
    /// It was ended before it was ready.
    #[error("the guardian (process {pid}) {exit} before it was ready")]
    Ended {
        /// Its process id.
        pid: u32,
        exit: Exit,
    },
    /// It accepts no requests.
    #[error("the guardian (process {pid}) does not take requests")]
    Deaf {
        /// Its process id.
        pid: u32,
        #[source]
        source: io::Error,
    },
}

impl GuardianError {
    /// A hint for the user.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Mute { .. } => Some(
                "a program that starts clusters calls cuda_cluster::cluster::dispatch() first in \
                 main, or names the cuda-cluster binary as its helper"
                    .to_owned(),
            ),
            Self::Unable { .. } => Some(
                "a kernel does this since Linux 5.3; a sandbox or an emulator of programs \
                 (qemu-user) may not"
                    .to_owned(),
            ),
            Self::Spawn { .. } | Self::Ended { .. } | Self::Deaf { .. } => None,
        }
    }
}

/// A running guardian.
#[derive(Debug)]
pub struct Guardian {
    channel: AsyncFd<Channel>,
    /// Requests that the guardian has not had time for.
    waiting: Outbox,
    pid: Pid,
    process: PidFd,
    cgroup: Option<Cgroup>,
    shared_memory: PathBuf,
    mark: String,
    /// Whether it was told to end everything; locked while a thread waits for that.
    released: Mutex<bool>,
}

impl Guardian {
    /// Starts the guardian and waits until it is ready.
    ///
    /// `label` names the control group (`None`: no group). `mark` is an environment entry
    /// (`VARIABLE=value`) that all processes of the cluster have, and no others. The guardian also
    /// holds the lock of `directory`. Output of processes that are started with `deliver_as` goes
    /// to `output`, encoded by `wire::output`.
    ///
    /// # Errors
    /// If `helper` can't be started or is not one of our programs.
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
            waiting: Outbox::default(),
            pid,
            process,
            cgroup,
            shared_memory,
            mark,
            released: Mutex::new(false),
        };
        let first = tokio::time::timeout(FIRST_WAIT, guardian.report()).await;
        if let Ok(Some(Report::Unable { reason })) = first {
            return Err(GuardianError::Unable { reason });
        }
        if !matches!(first, Ok(Some(Report::Watching))) {
            if let Some(exit) = guardian.ended_by_a_signal() {
                return Err(GuardianError::Ended { pid: guardian.pid(), exit });
            }
            return Err(GuardianError::Mute { helper: helper.to_owned() });
        }
        // The guardian joins the group before it answers, or is not permitted to.
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

    /// How it ended, if by a signal: no program that is not a guardian ends so.
    fn ended_by_a_signal(&self) -> Option<Exit> {
        // Its end of the channel is closed a moment before it has ended.
        self.process.wait(LAST_WAIT);
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        let exit = process::exit(waitid(Id::Pid(self.pid), flags).ok()?);
        exit.filter(|exit| exit.signal.is_some())
    }

    /// The containment mechanism in use.
    pub fn containment(&self) -> Containment {
        if self.cgroup.is_some() { Containment::Cgroup } else { Containment::Subreaper }
    }

    /// The cluster's control group, if it has one.
    pub fn cgroup(&self) -> Option<&Cgroup> {
        self.cgroup.as_ref()
    }

    /// Starts a process, whose fate arrives in reports. Its standard input is `input`, or empty.
    /// Returns the supervisor's end of its status pipe.
    ///
    /// # Errors
    /// If the guardian accepts no requests, or descriptors have run out.
    pub fn spawn(
        &self,
        mut start: Start,
        mut instructions: Instructions,
        input: Option<OwnedFd>,
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
        let descriptors = [paper.into(), its_end.into()].into_iter().chain(input).collect();
        self.request(&Request::Start(start), descriptors)?;
        Ok(status)
    }

    /// Sends a signal to a process and its group; does nothing if it has ended.
    ///
    /// # Errors
    /// If the guardian accepts no requests.
    pub fn signal(&self, key: Key, signal: i32) -> Result<(), GuardianError> {
        self.request(&Request::Signal { key, signal }, Vec::new())
    }

    /// Sends SIGKILL to a process and all its descendants.
    ///
    /// # Errors
    /// If the guardian accepts no requests.
    pub fn kill(&self, key: Key) -> Result<(), GuardianError> {
        self.request(&Request::Kill { key }, Vec::new())
    }

    /// Asks for [`Report::Alive`].
    ///
    /// # Errors
    /// If the guardian accepts no requests.
    pub fn ask(&self) -> Result<(), GuardianError> {
        self.request(&Request::Ask, Vec::new())
    }

    /// Asks the guardian to kill the remaining processes, to deliver the ranks' remaining output,
    /// and to end. With `hurry` it waits only as long as the reader makes progress; it can be
    /// called again with `hurry`.
    ///
    /// # Errors
    /// If the guardian accepts no requests.
    pub fn deliver(&self, hurry: bool) -> Result<(), GuardianError> {
        self.request(&Request::Deliver { hurry }, Vec::new())
    }

    /// The next report; `None` if the guardian is gone. Requests that wait are sent meanwhile, so
    /// this is to be called anew after each.
    pub async fn report(&self) -> Option<Report> {
        loop {
            let waits = !self.waiting.is_empty();
            let interest =
                if waits { Interest::READABLE | Interest::WRITABLE } else { Interest::READABLE };
            let mut ready = self.channel.ready(interest).await.ok()?;
            if ready.ready().is_writable() && waits {
                self.waiting.flush(self.channel.get_ref()).ok()?;
                if !self.waiting.is_empty() {
                    ready.clear_ready_matching(Ready::WRITABLE);
                }
            }
            if ready.ready().is_readable() {
                // An error means that there was nothing to read after all.
                let received = ready.try_io(|channel| channel.get_ref().receive::<Report>());
                if let Ok(received) = received {
                    return received.ok().flatten().map(|(report, _)| report);
                }
            }
        }
    }

    /// Lets the guardian end everything, and waits for it: milliseconds, unless a process can't be
    /// killed. Concurrent callers wait too; later calls do nothing.
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

    /// Lets the guardian end everything, and waits at most this long; the guardian continues on its
    /// own. Returns whether it has ended.
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

    /// Asks the guardian to kill the remaining processes and end. Closing the channel has the same
    /// effect, but the guardian then records that the supervisor disappeared.
    fn say_farewell(&self) {
        // A guardian that accepts no requests is killed at the end; those that wait are in vain.
        let _ = Outbox::default().send(self.channel.get_ref(), &Request::Finish, Vec::new());
        self.channel.get_ref().close();
    }

    /// Reaps the guardian, and does the clean-up that it has not done.
    fn bury(&self) {
        let ended = waitpid(self.pid, Some(WaitPidFlag::WNOHANG));
        if !matches!(ended, Ok(WaitStatus::Exited(_, 0))) {
            self.stand_in();
        }
    }

    fn request(&self, request: &Request, descriptors: Vec<OwnedFd>) -> Result<(), GuardianError> {
        let sent = self.waiting.send(self.channel.get_ref(), request, descriptors);
        sent.map_err(|source| self.deaf(source))
    }

    fn deaf(&self, source: io::Error) -> GuardianError {
        GuardianError::Deaf { pid: self.pid(), source }
    }

    /// Does the guardian's clean-up: kills and removes the control group, or all processes with the
    /// mark, and frees the shared memory.
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

/// Writes the instructions to an unnamed file that the shim inherits.
fn write_down(instructions: &Instructions) -> io::Result<File> {
    let mut file = File::from(memfd_create(c"instructions", MFdFlags::MFD_CLOEXEC)?);
    file.write_all(&serde_json::to_vec(instructions)?)?;
    file.rewind()?;
    Ok(file)
}
