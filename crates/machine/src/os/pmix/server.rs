//! The starter's side of a server of PMIx.
//!
//! *Invariant:* when a [`Server`] has been dropped, or the process that has it has ended somehow,
//! the server's process has ended, too.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::Signal;
use nix::unistd::Pid;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::unix::pipe::Receiver;
use tokio::sync::oneshot;

use super::{Answer, Job, SUBCOMMAND, is_of_another};
use crate::os::pidfd::PidFd;
use crate::os::process::{own_program, without_descriptors};

/// How long libpmix may take to begin; it looks at the machine's topology meanwhile.
const BEGINNING: Duration = Duration::from_secs(60);
/// How long it may take to end when it is told to.
const ENDING: Duration = Duration::from_secs(1);

/// Why there is no server.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum ServerError {
    /// No libpmix can be opened.
    #[error("no libpmix can be opened: {}", .0.join("; "))]
    Missing(Vec<String>),
    /// libpmix does not serve.
    #[error("libpmix does not serve: {0}")]
    Refused(String),
    /// The process has ended without an answer, or does not answer.
    #[error("the server of PMIx {did}; its log is {}", log.display())]
    Silent {
        /// What it did instead.
        did: String,
        log: PathBuf,
    },
    /// It can't be started.
    #[error("the server of PMIx cannot be started")]
    Start(#[from] io::Error),
}

/// A running server.
#[derive(Debug)]
pub struct Server {
    /// What libpmix calls itself.
    pub version: String,
    /// Each rank's variables.
    pub variables: Vec<BTreeMap<String, String>>,
    process: Process,
}

#[derive(Debug)]
struct Process {
    /// Its end tells the process to end.
    input: Option<ChildStdin>,
    process: PidFd,
    /// How it has ended, in words.
    ended: oneshot::Receiver<String>,
    directory: PathBuf,
}

impl Server {
    /// Starts the server of a job. What libpmix says is written to `log`.
    ///
    /// # Errors
    /// If there is no libpmix, or it does not serve.
    pub async fn start(job: &Job, log: &Path) -> Result<Self, ServerError> {
        DirBuilder::new().mode(0o700).create(&job.directory)?;
        let (mut process, output) = Process::start(job, log).await.inspect_err(|_| {
            let _ = fs::remove_dir_all(&job.directory);
        })?;
        let mut line = String::new();
        let mut output = BufReader::new(Receiver::from_owned_fd(OwnedFd::from(output))?);
        let answer = tokio::time::timeout(BEGINNING, output.read_line(&mut line)).await;
        let silent = |did| ServerError::Silent { did, log: log.to_owned() };
        if answer.is_err() {
            return Err(silent(format!("has not answered within {} s", BEGINNING.as_secs())));
        }
        match serde_json::from_str(&line) {
            Ok(Answer::Serves { version, variables }) => Ok(Self { version, variables, process }),
            Ok(Answer::Missing(tried)) => Err(ServerError::Missing(tried)),
            Ok(Answer::Refused(reason)) => Err(ServerError::Refused(reason)),
            Err(_) if line.is_empty() => Err(silent(process.end().await)),
            Err(_) => Err(silent("says what is no answer".to_owned())),
        }
    }

    /// Waits for its end, which nobody has asked for; returns how it has ended.
    pub async fn ended(&mut self) -> String {
        self.process.end().await
    }
}

impl Process {
    async fn start(job: &Job, log: &Path) -> io::Result<(Self, ChildStdout)> {
        if let Some(folder) = log.parent() {
            fs::create_dir_all(folder)?;
        }
        let log = OpenOptions::new().create(true).append(true).mode(0o600).open(log)?;
        let (begun, started) = oneshot::channel();
        let (over, ended) = oneshot::channel();
        // The kernel kills the server when the thread that has started it ends. So this one stays.
        let watch = move || {
            let child = spawn(log);
            let (parts, child) = match child {
                Ok((parts, child)) => (Ok(parts), Some(child)),
                Err(error) => (Err(error), None),
            };
            // If nobody waits for it any more, its standard input is closed here.
            drop(begun.send(parts));
            let Some(mut child) = child else { return };
            let text = match child.wait() {
                Ok(status) => format!("ended ({status})"),
                Err(error) => format!("is lost ({error})"),
            };
            let _ = over.send(text);
        };
        std::thread::Builder::new().name("pmix".to_owned()).spawn(watch)?;
        let (mut input, output, process) = started.await.map_err(io::Error::other)??;
        let mut line = serde_json::to_vec(job)?;
        line.push(b'\n');
        // If it has ended already, its end says why.
        let _ = input.write_all(&line);
        let directory = job.directory.clone();
        Ok((Self { input: Some(input), process, ended, directory }, output))
    }

    async fn end(&mut self) -> String {
        (&mut self.ended).await.unwrap_or_else(|_| "is lost".to_owned())
    }
}

type Parts = (ChildStdin, ChildStdout, PidFd);

/// Starts the process, in a group of its own: a terminal's signals are for the ranks.
fn spawn(log: File) -> io::Result<(Parts, std::process::Child)> {
    let mut command = Command::new(own_program());
    command.arg(SUBCOMMAND).process_group(0);
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(is_of_another) {
            command.env_remove(name);
        }
    }
    without_descriptors(&mut command);
    let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log);
    let mut child = piped.spawn()?;
    // A child that has not been waited for is still this one.
    let process = PidFd::open(Pid::from_raw(child.id().cast_signed()))?;
    match (child.stdin.take(), child.stdout.take()) {
        (Some(input), Some(output)) => Ok(((input, output, process), child)),
        _ => Err(io::ErrorKind::BrokenPipe.into()),
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.input.take());
        if !self.process.wait(ENDING) {
            self.process.signal(Signal::SIGKILL);
            self.process.wait(ENDING);
        }
        // If it can't be removed, the run directory's next owner does.
        let _ = fs::remove_dir_all(&self.directory);
    }
}
