//! Both ends of the connection between a supervisor process and its starter.
//!
//! The plan and later requests arrive on standard input. Reports go to standard output, until READY
//! or, for a starter that attends, until the end. The output of a run's ranks goes to standard
//! error, encoded by `wire::output`. The supervisor never waits for a slow starter: newer states
//! replace unread ones, and at the end it waits only briefly.
//!
//! With [`Lifetime::Owned`], the cluster ends when standard input is closed.

use std::io::{PipeReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::net::unix::pipe::{Receiver, Sender};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{broadcast, oneshot, watch};
use tokio::task::JoinHandle;

use super::{Prepared, UpError, start};
use crate::ids::ClusterName;
use crate::os::exhausted::Exhausted;
use crate::os::run_directory::RunDirectoryError;
use crate::os::{event_loop, memory, process};
use crate::supervise::{
    ClusterState, Escalation, Outcome, OutputPipe, Record, Stopper, Supervisor,
};

/// The hidden subcommand.
pub const SUBCOMMAND: &str = "__supervise";

/// How long to wait for a starter to take the last report.
const FAREWELL: Duration = Duration::from_secs(1);

/// Whether a cluster outlives its starter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lifetime {
    /// It runs until it is stopped.
    Free,
    /// It runs until its owner closes the pipe or dies.
    Owned,
}

/// The first message to the supervisor process, one JSON line.
#[derive(Serialize, Deserialize)]
struct Instructions {
    prepared: Prepared,
    lifetime: Lifetime,
    /// Whether the starter reads reports until the end, rather than until READY.
    attended: bool,
    output: Option<OutputForm>,
}

/// How to deliver the ranks' output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputForm {
    /// Whether a rank's standard output and standard error are two streams, rather than one that
    /// keeps their common order.
    pub separate_streams: bool,
}

/// Later messages from the starter, one JSON line each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Word {
    /// The cluster has been verified.
    Verified,
    /// The cluster is to end.
    Stop {
        how: Escalation,
        /// The signal that the ranks of a run receive.
        signal: Option<i32>,
    },
}

/// Messages from the supervisor process, one JSON line each.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "a field that says nothing more has its name")]
pub enum Report {
    /// The state has changed.
    State(Box<ClusterState>),
    /// An event; only for a starter that attends.
    Event(Box<Record>),
    /// The cluster is READY for the first time.
    Ready(Box<ClusterState>),
    /// The supervisor could not start.
    Refused {
        /// The error with its causes.
        message: String,
        /// What to do.
        hint: Option<String>,
        /// Whether a resource has run out, so that the request is not to blame.
        #[serde(default)]
        exhausted: bool,
        /// The name and the run directory of a running cluster that is in the way.
        #[serde(default)]
        taken: Option<(ClusterName, PathBuf)>,
    },
    /// The cluster has ended, and nothing of it is left.
    Ended {
        outcome: Outcome,
        /// Its last state.
        state: Box<ClusterState>,
    },
}

/// How to start a supervisor process.
#[derive(Clone, Copy, Debug)]
pub struct Start<'a> {
    /// A `cuda-cluster` binary, or one that embeds this crate.
    pub program: &'a Path,
    /// Whether the cluster outlives the starter.
    pub lifetime: Lifetime,
    /// Whether the starter reads reports until the end.
    pub attended: bool,
    /// Whether and how the starter reads the ranks' output.
    pub output: Option<OutputForm>,
}

/// The starter's end of a supervisor process.
#[derive(Debug)]
pub struct Detached {
    child: Child,
    reports: Lines<BufReader<ChildStdout>>,
    /// Standard input of the supervisor; closing it ends an owned cluster.
    words: Option<ChildStdin>,
    program: PathBuf,
    /// Whether a report has been read, so that the program is known to be a supervisor.
    has_reported: bool,
}

impl Detached {
    /// Starts `program __supervise` in a session of its own, and sends it a plan. With
    /// [`Start::output`], the caller must keep reading the output pipe, because ranks whose output
    /// is not read block.
    ///
    /// # Errors
    /// If the process cannot be started.
    pub async fn spawn(
        prepared: Prepared,
        start: Start<'_>,
    ) -> Result<(Self, Option<PipeReader>), UpError> {
        let Start { program, lifetime, attended, output } = start;
        // A supervisor starts no supervisor: its `main` has come here without `dispatch`. The
        // process that started it reads the line that `main` writes, or its exit status.
        if std::env::args_os().nth(1).is_some_and(|argument| argument == SUBCOMMAND) {
            let did = "launches a cluster when it is started as a supervisor".to_owned();
            return Err(UpError::NotASupervisor { program: process::own_program(), did });
        }
        let instructions = Instructions { prepared, lifetime, attended, output };
        let mut text = serde_json::to_vec(&instructions).map_err(UpError::plan)?;
        text.push(b'\n');
        let failed = |source| UpError::Spawn { program: program.to_owned(), source };
        let missing = || failed(std::io::ErrorKind::BrokenPipe.into());
        let pipe = output.map(|_| std::io::pipe()).transpose().map_err(failed)?;
        let (reader, writer) = pipe.unzip();
        let mut child = Command::new(program)
            .arg(SUBCOMMAND)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(writer.map_or_else(Stdio::null, Stdio::from))
            // A Ctrl-C does not reach it, not even before it has a session of its own.
            .process_group(0)
            .spawn()
            .map_err(failed)?;
        let mut words = child.stdin.take().ok_or_else(missing)?;
        match words.write_all(&text).await {
            // What has ended already is no supervisor; its exit status will tell.
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {}
            written => written.map_err(failed)?,
        }
        let reports = BufReader::new(child.stdout.take().ok_or_else(missing)?).lines();
        let program = program.to_owned();
        let detached = Self { child, reports, words: Some(words), program, has_reported: false };
        Ok((detached, reader))
    }

    /// Process id of the supervisor, while it is running.
    pub fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    /// The next report; `None` after the last. Cancel-safe.
    ///
    /// # Errors
    /// If the supervisor could not start, or died before its last report.
    pub async fn next(&mut self) -> Result<Option<Report>, UpError> {
        match self.reports.next_line().await {
            Ok(Some(line)) => match serde_json::from_str(&line) {
                Ok(Report::Refused { taken: Some((name, path)), .. }) => {
                    Err(RunDirectoryError::Taken { name, path }.into())
                }
                Ok(Report::Refused { message, hint, exhausted, taken: None }) => {
                    Err(UpError::Refused { message, hint, exhausted })
                }
                Ok(report) => {
                    self.has_reported = true;
                    Ok(Some(report))
                }
                Err(_) if !self.has_reported => {
                    let line: String = line.chars().take(80).collect();
                    Err(self.not_a_supervisor(format!("wrote {line:?}")))
                }
                // A supervisor that could not wait for this reader has stopped reporting.
                Err(error) if error.is_eof() => Ok(None),
                Err(error) => Err(UpError::Silent { status: error.to_string() }),
            },
            Ok(None) => Ok(None),
            Err(error) => Err(UpError::Silent { status: error.to_string() }),
        }
    }

    /// The outcome of a cluster whose supervisor has stopped reporting: its exit status shows
    /// whether it was stopped.
    ///
    /// # Errors
    /// If it failed, or died.
    pub async fn unsaid(&mut self) -> Result<Outcome, UpError> {
        match self.child.wait().await {
            Ok(status) if !self.has_reported && status.code().is_some() => {
                Err(self.not_a_supervisor(format!("ended without a report ({status})")))
            }
            Ok(status) if status.success() => Ok(Outcome::Stopped { degraded: None }),
            Ok(status) => Err(UpError::Silent { status: status.to_string() }),
            Err(error) => Err(UpError::Silent { status: error.to_string() }),
        }
    }

    fn not_a_supervisor(&self, did: String) -> UpError {
        UpError::NotASupervisor { program: self.program.clone(), did }
    }

    /// Reports that the cluster has been verified, if READY waits for that; a cluster that is free
    /// then outlives its starter.
    pub async fn verified(&mut self) {
        self.say(Word::Verified).await;
    }

    /// Requests the end; reports continue until then. The ranks of a run receive `signal`, if
    /// given.
    pub async fn stop(&mut self, how: Escalation, signal: Option<i32>) {
        self.say(Word::Stop { how, signal }).await;
    }

    async fn say(&mut self, word: Word) {
        let Some(words) = &mut self.words else { return };
        let Ok(mut line) = serde_json::to_vec(&word) else { return };
        line.push(b'\n');
        // If the supervisor has ended, its reports say so.
        let _ = words.write_all(&line).await;
    }

    /// Closes the connection: the cluster ends if it is owned or not yet verified. Reports continue
    /// until then.
    pub fn let_go(&mut self) {
        self.words = None;
    }

    /// Kills a supervisor that does not answer; the guardian then ends its processes.
    pub fn kill(&mut self) {
        // An ended supervisor needs no killing.
        let _ = self.child.start_kill();
    }

    /// Waits until the supervisor has ended. May be dropped at any time.
    pub async fn reap(&mut self) {
        // Waiting fails if someone else has reaped it, and then it has ended.
        let _ = self.child.wait().await;
    }

    /// Closes the connection to an owned cluster, and waits until its supervisor has ended.
    pub async fn end(mut self) {
        self.let_go();
        self.reap().await;
    }
}

/// Runs the subcommand: becomes the supervisor of the plan on standard input.
pub fn main() -> ExitCode {
    process::become_session_leader();
    let worked = match event_loop::new() {
        Ok(runtime) => runtime.block_on(work()),
        Err(error) => Err(refusal(UpError::Runtime(error))),
    };
    match worked {
        Ok(code) => code,
        Err(refused) => {
            // No other thread writes yet, and a line fits into an empty pipe.
            if let Ok(line) = line(&refused) {
                let _ = std::io::stdout().lock().write_all(&line);
            }
            ExitCode::from(2)
        }
    }
}

fn refusal(error: impl Into<anyhow::Error>) -> Report {
    let error = error.into();
    let up = error.downcast_ref::<UpError>();
    let exhausted = Exhausted::behind(error.as_ref());
    Report::Refused {
        message: format!("{error:#}"),
        hint: up.and_then(UpError::hint).or_else(|| exhausted.map(Exhausted::hint)),
        exhausted: exhausted.is_some() || matches!(up, Some(UpError::Limits(_))),
        taken: match up {
            Some(UpError::RunDirectory(RunDirectoryError::Taken { name, path })) => {
                Some((name.clone(), path.clone()))
            }
            _ => None,
        },
    }
}

fn line(report: &Report) -> serde_json::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(report)?;
    line.push(b'\n');
    Ok(line)
}

fn duplicate(descriptor: impl AsFd) -> Result<OwnedFd, Report> {
    descriptor.as_fd().try_clone_to_owned().map_err(refusal)
}

async fn work() -> Result<ExitCode, Report> {
    let mut signals = Signals::new().map_err(refusal)?;
    let stdin = Receiver::from_owned_fd(duplicate(std::io::stdin())?).map_err(refusal)?;
    let mut stdin = BufReader::new(stdin);
    let mut first = String::new();
    stdin.read_line(&mut first).await.map_err(refusal)?;
    let Instructions { prepared, lifetime, attended, output } =
        serde_json::from_str(&first).map_err(refusal)?;
    let output = match output {
        Some(OutputForm { separate_streams }) => {
            let pipe = Arc::new(duplicate(std::io::stderr())?);
            Some(OutputPipe { pipe, separate_streams })
        }
        None => None,
    };
    let supervisor = start(&prepared, &process::own_program(), output).await.map_err(refusal)?;
    let reports = Sender::from_owned_fd(duplicate(std::io::stdout())?).map_err(refusal)?;
    let reports = Reports::begin(reports, attended, &supervisor);
    // From here on only the report task and the guardian write to the standard streams.
    let _ = process::let_go_of_output();
    let to_be_verified = prepared.to_be_verified;
    drop(prepared);
    let mut starter = Starter { words: Some(stdin.lines()), lifetime, to_be_verified };
    let (stopper, mut state) = (supervisor.stopper(), supervisor.state());
    let mut ready = false;
    let mut ended = Box::pin(supervisor.wait());
    let outcome = loop {
        tokio::select! {
            outcome = &mut ended => break outcome,
            word = starter.next() => starter.obey(word, &stopper),
            how = signals.next() => stopper.stop(how),
            Ok(()) = state.changed() => {
                let now = state.borrow_and_update().ready_after_ms.is_some();
                if now && !std::mem::replace(&mut ready, now) {
                    memory::give_back_memory();
                }
            }
        }
    };
    let code = match outcome {
        Outcome::Stopped { .. } | Outcome::Finished => ExitCode::SUCCESS,
        Outcome::Failed(_) => ExitCode::FAILURE,
        Outcome::NotReady(_) => ExitCode::from(3),
    };
    let state = Box::new(state.borrow().clone());
    reports.end(Report::Ended { outcome, state }).await;
    Ok(code)
}

/// Reports to the starter in a task of its own, so that only that task waits for a slow starter.
struct Reports {
    task: JoinHandle<()>,
    last: oneshot::Sender<Report>,
}

impl Reports {
    fn begin(pipe: Sender, attended: bool, supervisor: &Supervisor) -> Self {
        let (last, farewell) = oneshot::channel();
        let events = attended.then(|| supervisor.events());
        let task = tokio::spawn(tell(pipe, supervisor.state(), events, farewell));
        Self { task, last }
    }

    async fn end(self, report: Report) {
        // If nobody attends any more, the pipe is closed and the task has ended.
        let _ = self.last.send(report);
        let _ = tokio::time::timeout(FAREWELL, self.task).await;
    }
}

async fn tell(
    mut pipe: Sender,
    mut state: watch::Receiver<ClusterState>,
    mut events: Option<broadcast::Receiver<Record>>,
    mut farewell: oneshot::Receiver<Report>,
) {
    let mut ready = false;
    loop {
        let report = tokio::select! {
            biased;
            Some(record) = next_event(&mut events) => Report::Event(Box::new(record)),
            Ok(()) = state.changed() => {
                let now = state.borrow_and_update().clone();
                let first = now.ready_after_ms.is_some() && !ready;
                ready |= first;
                let now = Box::new(now);
                if first { Report::Ready(now) } else { Report::State(now) }
            }
            last = &mut farewell => {
                // Without a last report the exit status shows the outcome.
                if let Some(Ok(line)) = last.ok().map(|last| line(&last)) {
                    let _ = pipe.write_all(&line).await;
                }
                return;
            }
        };
        let Ok(line) = line(&report) else { continue };
        let gone = pipe.write_all(&line).await.is_err();
        // A starter that does not attend continues now; the end of the pipe shows it that no
        // reports will follow.
        if gone || (matches!(report, Report::Ready(_)) && events.is_none()) {
            return;
        }
    }
}

/// The next event; `None` after the last, or if nobody attends. A starter that lags behind misses
/// events, and finds them in `events.jsonl`.
async fn next_event(events: &mut Option<broadcast::Receiver<Record>>) -> Option<Record> {
    loop {
        match events.as_mut()?.recv().await {
            Ok(record) => return Some(record),
            Err(broadcast::error::RecvError::Lagged(_)) => {}
            Err(broadcast::error::RecvError::Closed) => return None,
        }
    }
}

/// The starter of this process. Its end also ends an owned cluster, and one that is not verified
/// yet.
struct Starter {
    words: Option<Lines<BufReader<Receiver>>>,
    lifetime: Lifetime,
    to_be_verified: bool,
}

impl Starter {
    /// Waits for the next message; `None` is the starter's end, which is returned once.
    /// Cancel-safe.
    async fn next(&mut self) -> Option<Word> {
        let Some(words) = &mut self.words else { return std::future::pending().await };
        while let Ok(Some(line)) = words.next_line().await {
            // Other messages are ignored.
            if let Ok(word) = serde_json::from_str(&line) {
                return Some(word);
            }
        }
        self.words = None;
        None
    }

    fn obey(&mut self, word: Option<Word>, stopper: &Stopper) {
        match word {
            Some(Word::Verified) => {
                self.to_be_verified = false;
                stopper.verified();
            }
            Some(Word::Stop { how, signal: Some(signal) }) => stopper.stop_with(how, signal),
            Some(Word::Stop { how, signal: None }) => stopper.stop(how),
            None if self.lifetime == Lifetime::Owned || self.to_be_verified => {
                stopper.stop(Escalation::Graceful);
            }
            None => {}
        }
    }
}

/// The signals that request a supervisor's end.
struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
    count: u32,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hangup: signal(SignalKind::hangup())?,
            count: 0,
        })
    }

    async fn next(&mut self) -> Escalation {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
            _ = self.hangup.recv() => {}
        }
        self.count += 1;
        Escalation::of_request(self.count)
    }
}
