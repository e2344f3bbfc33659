//! A supervisor in a process of its own: both ends of the pipe between it and whoever started it.
//!
//! The plan goes in on standard input. Reports come out on standard output, until READY or the end.
//! With [`Lifetime::Owned`] standard input stays open, and its end is the owner's.

use std::io::Write;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{ExitCode, Stdio};

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::net::unix::pipe::Receiver;
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::{Prepared, UpError, start};
use crate::os::{rest, session};
use crate::supervise::{Cause, ClusterState, Escalation, Outcome, Supervisor};

/// The hidden subcommand.
pub const SUBCOMMAND: &str = "__supervise";

/// Whether a cluster lives on without whoever started it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lifetime {
    /// Until somebody takes it down.
    Free,
    /// Until its owner closes the pipe or dies.
    Owned,
}

/// What the supervisor process is told, one JSON line.
#[derive(Serialize, Deserialize)]
struct Instructions {
    prepared: Prepared,
    lifetime: Lifetime,
}

/// What the supervisor process tells, a JSON line each.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Report {
    /// The state changed.
    State(Box<ClusterState>),
    /// It could not begin.
    Refused {
        /// The error with its causes.
        message: String,
        /// What to do.
        hint: Option<String>,
    },
    /// It ended instead of becoming READY.
    Ended {
        /// Whether time ran out.
        late: bool,
        /// Why; `None` if somebody asked.
        cause: Option<Cause>,
    },
}

impl From<Outcome> for Report {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::NotReady(cause) => Report::Ended { late: true, cause: Some(cause) },
            Outcome::Failed(cause) => Report::Ended { late: false, cause: Some(cause) },
            Outcome::Stopped { degraded } => Report::Ended { late: false, cause: degraded },
            Outcome::Finished => Report::Ended { late: false, cause: None },
        }
    }
}

/// The starter's end of a supervisor process.
#[derive(Debug)]
pub struct Detached {
    child: Child,
    reports: Lines<BufReader<ChildStdout>>,
    /// Held while the cluster is to live, if it is owned.
    leash: Option<ChildStdin>,
}

impl Detached {
    /// Starts `program __supervise` in a session of its own, and hands it a plan.
    ///
    /// # Errors
    /// If the process cannot be started.
    pub async fn spawn(
        prepared: Prepared,
        lifetime: Lifetime,
        program: &Path,
    ) -> Result<Self, UpError> {
        let mut text =
            serde_json::to_vec(&Instructions { prepared, lifetime }).map_err(UpError::Plan)?;
        text.push(b'\n');
        let failed = |source| UpError::Spawn { program: program.to_owned(), source };
        let missing = || failed(std::io::ErrorKind::BrokenPipe.into());
        let mut child = Command::new(program)
            .arg(SUBCOMMAND)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(failed)?;
        let mut stdin = child.stdin.take().ok_or_else(missing)?;
        stdin.write_all(&text).await.map_err(failed)?;
        let reports = BufReader::new(child.stdout.take().ok_or_else(missing)?).lines();
        let leash = (lifetime == Lifetime::Owned).then_some(stdin);
        Ok(Self { child, reports, leash })
    }

    /// Process id of the supervisor, while it lives.
    pub fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    /// The next report; `None` when there will be none, because it is READY. Dropping the future
    /// loses nothing.
    ///
    /// # Errors
    /// If it could not begin, or died.
    pub async fn next(&mut self) -> Result<Option<Report>, UpError> {
        match self.reports.next_line().await {
            Ok(Some(line)) => match serde_json::from_str(&line) {
                Ok(Report::Refused { message, hint }) => Err(UpError::Refused { message, hint }),
                Ok(report) => Ok(Some(report)),
                Err(error) => Err(UpError::Silent { status: error.to_string() }),
            },
            Ok(None) => match self.child.try_wait() {
                Ok(Some(status)) if !status.success() => {
                    Err(UpError::Silent { status: status.to_string() })
                }
                _ => Ok(None),
            },
            Err(error) => Err(UpError::Silent { status: error.to_string() }),
        }
    }

    /// Lets go of an owned cluster, and waits until its supervisor has ended.
    pub async fn end(mut self) {
        drop(self.leash.take());
        // It cannot be waited for when somebody else has reaped it, and then it has ended.
        let _ = self.child.wait().await;
    }
}

/// Does the subcommand's work: becomes the supervisor of the plan on standard input.
pub fn main() -> ExitCode {
    session::become_session_leader();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let worked = match runtime {
        Ok(runtime) => runtime.block_on(work()),
        Err(error) => Err(refusal(error)),
    };
    match worked {
        Ok(code) => code,
        Err(refused) => {
            tell(&refused);
            ExitCode::from(2)
        }
    }
}

fn refusal(error: impl Into<anyhow::Error>) -> Report {
    Report::Refused { message: format!("{:#}", error.into()), hint: None }
}

async fn work() -> Result<ExitCode, Report> {
    let mut signals = Signals::new().map_err(refusal)?;
    let stdin = std::io::stdin().as_fd().try_clone_to_owned().map_err(refusal)?;
    let stdin = Receiver::from_owned_fd(stdin).map_err(refusal)?;
    let mut stdin = BufReader::new(stdin);
    let mut line = String::new();
    stdin.read_line(&mut line).await.map_err(refusal)?;
    let Instructions { prepared, lifetime } = serde_json::from_str(&line).map_err(refusal)?;
    let supervisor = start(&prepared, &session::own_program()).await.map_err(|error| {
        let hint = error.hint();
        Report::Refused { message: format!("{:#}", anyhow::Error::new(error)), hint }
    })?;
    // Only an owner's pipe says anything by its end.
    let mut owner = (lifetime == Lifetime::Owned).then_some(stdin);
    until_settled(&supervisor, &mut signals, &mut owner).await;
    if supervisor.ready().await.is_ok() {
        // Whoever started this process sees the end of the pipe, and goes on. An owner's pipe is
        // not among the three.
        let _ = session::let_go_of_output();
        rest::give_back_memory();
    }
    let mut state = supervisor.state();
    while !state.borrow_and_update().state.is_end() {
        tokio::select! {
            changed = state.changed() => if changed.is_err() { break },
            () = gone(&mut owner) => supervisor.stop(Escalation::Graceful),
            how = signals.next() => supervisor.stop(how),
        }
    }
    let outcome = supervisor.wait().await;
    let code = match outcome {
        Outcome::Stopped { .. } | Outcome::Finished => ExitCode::SUCCESS,
        Outcome::Failed(_) => ExitCode::FAILURE,
        Outcome::NotReady(_) => ExitCode::from(3),
    };
    tell(&Report::from(outcome));
    Ok(code)
}

/// Reports every state until the cluster is READY, or clearly will not be.
async fn until_settled(
    supervisor: &Supervisor,
    signals: &mut Signals,
    owner: &mut Option<BufReader<Receiver>>,
) {
    let mut state = supervisor.state();
    loop {
        tokio::select! {
            settled = supervisor.ready() => {
                if settled.is_ok() {
                    tell(&Report::State(Box::new(state.borrow().clone())));
                }
                return;
            }
            Ok(()) = state.changed() => {
                tell(&Report::State(Box::new(state.borrow_and_update().clone())));
            }
            () = gone(owner) => supervisor.stop(Escalation::Graceful),
            how = signals.next() => supervisor.stop(how),
        }
    }
}

/// Waits for the end of the owner's pipe, once; never, where there is no owner.
async fn gone(owner: &mut Option<BufReader<Receiver>>) {
    if let Some(pipe) = owner {
        let mut byte = [0u8; 64];
        // An owner has nothing more to say; what it says all the same is passed over.
        while matches!(pipe.read(&mut byte).await, Ok(read) if read > 0) {}
        *owner = None;
    } else {
        std::future::pending().await
    }
}

/// A line for whoever started this process; nobody reads it after READY.
fn tell(report: &Report) {
    if let Ok(line) = serde_json::to_string(report) {
        let mut out = std::io::stdout().lock();
        let _ = writeln!(out, "{line}").and_then(|()| out.flush());
    }
}

/// The signals that ask a supervisor to end.
struct Signals {
    interrupt: Signal,
    terminate: Signal,
    count: u32,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        let (interrupt, terminate) =
            (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        Ok(Self { interrupt, terminate, count: 0 })
    }

    async fn next(&mut self) -> Escalation {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
        self.count += 1;
        Escalation::of_request(self.count)
    }
}
