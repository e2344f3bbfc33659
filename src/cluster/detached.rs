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

/// What an owner says when it has verified the cluster.
const VERIFIED: u8 = b'V';

/// Whether a cluster lives on without whoever started it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lifetime {
    /// Until somebody takes it down.
    Free,
    /// Until its owner closes the pipe or dies.
    Owned,
}

impl Lifetime {
    /// Whether the cluster ends with its starter's pipe: who has yet to verify one owns it.
    fn holds(self, prepared: &Prepared) -> bool {
        self == Lifetime::Owned || prepared.to_be_verified
    }
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
    /// Held while the cluster is to live, if it is owned or still to be verified.
    leash: Option<ChildStdin>,
    lifetime: Lifetime,
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
        let held = lifetime.holds(&prepared);
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
        let leash = held.then_some(stdin);
        Ok(Self { child, reports, leash, lifetime })
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

    /// Says that the cluster is as it should be, where READY waits for that; one without an owner
    /// then lives on by itself.
    ///
    /// # Errors
    /// If the supervisor has ended.
    pub async fn verified(&mut self) -> std::io::Result<()> {
        if let Some(leash) = &mut self.leash {
            leash.write_all(&[VERIFIED]).await?;
        }
        if self.lifetime == Lifetime::Free {
            self.let_go();
        }
        Ok(())
    }

    /// Lets go of a cluster, which then ends if it is owned or still to be verified. The reports go
    /// on until it has.
    pub fn let_go(&mut self) {
        self.leash = None;
    }

    /// Lets go of an owned cluster, and waits until its supervisor has ended.
    pub async fn end(mut self) {
        self.let_go();
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
    let pipe = lifetime.holds(&prepared).then_some(stdin);
    let mut owner = Owner { pipe, lifetime };
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
            word = owner.word() => word.obey(&supervisor),
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
async fn until_settled(supervisor: &Supervisor, signals: &mut Signals, owner: &mut Owner) {
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
            word = owner.word() => word.obey(supervisor),
            how = signals.next() => supervisor.stop(how),
        }
    }
}

/// Who ends a cluster by its own end: for the cluster's life, or until it is verified.
struct Owner {
    pipe: Option<BufReader<Receiver>>,
    lifetime: Lifetime,
}

/// What an owner says.
enum Word {
    /// The cluster is as it should be.
    Verified,
    /// Nothing more: the owner is gone.
    Gone,
}

impl Owner {
    /// Waits for the next word; for ever, where there is no owner any more. Dropping the future
    /// loses nothing.
    async fn word(&mut self) -> Word {
        let Some(pipe) = &mut self.pipe else { return std::future::pending().await };
        let mut byte = [0u8];
        while matches!(pipe.read(&mut byte).await, Ok(read) if read > 0) {
            // What else it says is passed over.
            if byte == [VERIFIED] {
                self.pipe = self.pipe.take().filter(|_| self.lifetime == Lifetime::Owned);
                return Word::Verified;
            }
        }
        self.pipe = None;
        Word::Gone
    }
}

impl Word {
    fn obey(self, supervisor: &Supervisor) {
        match self {
            Word::Verified => supervisor.verified(),
            Word::Gone => supervisor.stop(Escalation::Graceful),
        }
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
