//! The files of a run directory, and whether its cluster is running.
//!
//! *Invariant:* checking leaves no traces, and concurrent checks do not disturb each other.

use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockType, UnixAddr, connect, send, socket,
};

use super::{RunDirectoryError, base, check_own, open_directory};
use crate::os::shared_memory;
use cuda_cluster_model::ids::{CONTROL, ClusterName, PMIX};
use cuda_cluster_wire::secret::{Secret, SecretError};

const PLAN: &str = "plan.json";
const WORKERS_PLAN: &str = "workers-plan.json";
const TOPOLOGY: &str = "topology.json";
const PREFLIGHT: &str = "preflight.json";
const STALL: &str = "stall.json";
const AUDIT: &str = "audit.json";
const AUDIT_LOGS: &str = "audit";
const SECRET: &str = "secret";
const CARRIED: &str = "carried";
const EVENTS: &str = "events.jsonl";
const HISTORY: &str = "history";
const HISTORY_PAIRS: &str = "history-pairs";
const LOGS: &str = "logs";
const CRASHES: &str = "crashes";
const CGROUP: &str = "cgroup";
const OWNERS: &str = "owners.json";
const STATE: &str = "state.json";
const NCCL: &str = "nccl-topology.xml";
/// Created by a guardian whose supervisor has disappeared.
pub(super) const ORPHANED: &str = "orphaned";

/// How long to wait for a supervisor's answer.
const ANSWER: Duration = Duration::from_secs(1);

/// Why a cluster's secret can't be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum SecretFileError {
    /// The file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file is malformed.
    #[error("{} holds no secret", path.display())]
    Content { path: PathBuf, source: SecretError },
}

/// The paths of a run directory's files, whether or not they exist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paths {
    root: PathBuf,
}

impl Paths {
    /// The paths for a cluster below this user's [`base`].
    pub fn of(name: &ClusterName) -> Self {
        Self::below(&base(), name)
    }

    /// The paths for a cluster below another base directory.
    pub fn below(base: &Path, name: &ClusterName) -> Self {
        Self { root: base.join(name.as_str()) }
    }

    /// The paths for this run directory.
    pub fn at(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// The directory itself.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The plan, as JSON.
    pub fn plan(&self) -> PathBuf {
        self.root.join(PLAN)
    }

    /// What native workers read of the plan, as JSON.
    pub fn workers_plan(&self) -> PathBuf {
        self.root.join(WORKERS_PLAN)
    }

    /// The machine that was planned for, as JSON.
    pub fn topology(&self) -> PathBuf {
        self.root.join(TOPOLOGY)
    }

    /// What preflight has found, as JSON; only of a cluster for this machine.
    pub fn preflight(&self) -> PathBuf {
        self.root.join(PREFLIGHT)
    }

    /// What was seen when its processes could last not go on, as `why --save` writes it.
    pub fn stall(&self) -> PathBuf {
        self.root.join(STALL)
    }

    /// The last audit of the bytes between its processes, as JSON.
    pub fn audit(&self) -> PathBuf {
        self.root.join(AUDIT)
    }

    /// The folder for what NCCL says of its wires.
    pub fn audit_logs(&self) -> PathBuf {
        self.root.join(AUDIT_LOGS)
    }

    /// Where the program of a rank may say why it fails, as PyTorch's `record` does.
    pub fn rank_error(&self, rank: u32) -> PathBuf {
        self.root.join(format!("error-{rank}.json"))
    }

    /// The control API's socket.
    pub fn control(&self) -> PathBuf {
        self.socket(CONTROL)
    }

    /// The cluster's secret.
    pub fn secret(&self) -> PathBuf {
        self.root.join(SECRET)
    }

    /// The folder for files of another machine that this cluster's processes read.
    pub fn carried(&self) -> PathBuf {
        self.root.join(CARRIED)
    }

    /// Reads the cluster's secret.
    ///
    /// # Errors
    /// If the file is missing or malformed.
    pub fn read_secret(&self) -> Result<Secret, SecretFileError> {
        let path = self.secret();
        let text = super::super::reading::text(&path)
            .map_err(|source| SecretFileError::Read { path: path.clone(), source })?;
        text.parse().map_err(|source| SecretFileError::Content { path, source })
    }

    /// The socket of a process, or another of [`RESERVED`](cuda_cluster_model::ids::RESERVED).
    pub fn socket(&self, process: &str) -> PathBuf {
        self.root.join(format!("{process}.sock"))
    }

    /// The events, one JSON object per line.
    pub fn events(&self) -> PathBuf {
        self.root.join(EVENTS)
    }

    /// What its processes used over time: `wire::history`.
    pub fn history(&self) -> PathBuf {
        self.root.join(HISTORY)
    }

    /// What went between its workers over time: `wire::history::pairs`.
    pub fn history_pairs(&self) -> PathBuf {
        self.root.join(HISTORY_PAIRS)
    }

    /// The directory of logs.
    pub fn logs(&self) -> PathBuf {
        self.root.join(LOGS)
    }

    /// The log of one process.
    pub fn log(&self, process: &str) -> PathBuf {
        self.logs().join(format!("{process}.log"))
    }

    /// The directory of crash bundles.
    pub fn crashes(&self) -> PathBuf {
        self.root.join(CRASHES)
    }

    /// Contains the path of the cluster's control group, if it has one, for clean-up.
    pub fn cgroup(&self) -> PathBuf {
        self.root.join(CGROUP)
    }

    /// The owners of the cluster: `os::owners`, as JSON.
    pub fn owners(&self) -> PathBuf {
        self.root.join(OWNERS)
    }

    /// The state as of the last change of the cluster's phase, as JSON.
    pub fn state(&self) -> PathBuf {
        self.root.join(STATE)
    }

    /// Contains the time at which the guardian noticed that its supervisor was gone.
    pub fn orphaned(&self) -> PathBuf {
        self.root.join(ORPHANED)
    }

    /// The cluster's directory for shared memory files, which is elsewhere.
    pub fn shared_memory(&self) -> PathBuf {
        shared_memory::beside(&self.root)
    }

    /// The machine as NCCL reads it, where it can't see it by itself.
    pub fn nccl(&self) -> PathBuf {
        self.root.join(NCCL)
    }

    /// The directory for the files of libpmix and of Open MPI's ranks.
    pub fn pmix(&self) -> PathBuf {
        self.root.join(PMIX)
    }

    /// Whether a supervisor or a guardian owns the directory; a directory that can't be read counts
    /// as owned.
    pub fn is_alive(&self) -> bool {
        self.look().unwrap_or(true)
    }

    /// Whether a supervisor or a guardian owns the directory.
    ///
    /// # Errors
    /// If the directory can't be read, or is not this user's.
    pub fn look(&self) -> Result<bool, RunDirectoryError> {
        let io = |source| RunDirectoryError::Io { action: "read", path: self.root.clone(), source };
        check_own(&self.root)?;
        let directory = match open_directory(&self.root) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            opened => opened.map_err(io)?,
        };
        // A shared lock, so that concurrent checks do not take each other for a supervisor.
        match Flock::lock(directory, FlockArg::LockSharedNonblock) {
            Ok(_) => Ok(false),
            Err((_, Errno::EWOULDBLOCK)) => Ok(true),
            Err((_, errno)) => Err(io(errno.into())),
        }
    }

    /// Whether a supervisor is working. A supervisor that was just killed may still hold its
    /// socket; one that is stopped does not answer, and counts as working.
    pub(super) fn has_supervisor(&self) -> bool {
        match self.ask() {
            Ok(answer) => !answer.is_empty(),
            Err(error) => matches!(error.kind(), io::ErrorKind::WouldBlock),
        }
    }

    /// Asks the supervisor for its health, and returns the first bytes of the answer, or none if it
    /// hung up. An error of kind `WouldBlock` means no answer, or no room for the request.
    fn ask(&self) -> io::Result<Vec<u8>> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let end = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
        connect(end.as_raw_fd(), &UnixAddr::new(&self.control())?)?;
        let mut stream = UnixStream::from(end);
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(ANSWER))?;
        // A closed connection must not kill this process by SIGPIPE.
        send(stream.as_raw_fd(), b"GET /health HTTP/1.0\r\n\r\n", MsgFlags::MSG_NOSIGNAL)?;
        let mut answer = vec![0; 1024];
        let length = stream.read(&mut answer)?;
        answer.truncate(length);
        Ok(answer)
    }
}
