//! A starter's end of the connection to its supervisor process, and what goes over it. The other
//! end is `supervising`.
//!
//! The plan and later requests go to the supervisor's standard input. Reports come from its
//! standard output, until READY or, for a starter that attends, until the end. The output of a
//! run's ranks comes from its standard error, encoded by `wire::output`.
//!
//! With [`Lifetime::Owned`], the cluster ends when standard input is closed, or the starter ends.

use std::io::PipeReader;
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use super::takedown::ANSWER;
use super::{Control, ControlError, Handle, Prepared, UpError};
use cuda_cluster_machine::os::process;
use cuda_cluster_machine::os::run_directory::{Paths, RunDirectoryError};
use cuda_cluster_model::ids::ClusterName;
use cuda_cluster_supervise::{ClusterState, Escalation, Outcome, Record};
use cuda_cluster_why::audit::Audit;

/// The hidden subcommand.
pub const SUBCOMMAND: &str = "__supervise";

/// Exit code of the program for a wrong usage, spec or input, and of a supervisor that refuses to
/// start.
pub const USAGE: u8 = 2;

/// Exit code of both for a cluster that is not READY in time.
pub const NOT_READY: u8 = 3;

/// How often to ask a supervisor whether it still answers.
const LOOK: Duration = Duration::from_millis(500);

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
pub(super) struct Instructions {
    pub(super) prepared: Prepared,
    pub(super) lifetime: Lifetime,
    /// Whether the starter reads reports until the end, rather than until READY.
    pub(super) attended: bool,
    pub(super) output: Option<OutputForm>,
    /// The rank that has a standard input, and the number of the descriptor here.
    pub(super) input: Option<(u32, RawFd)>,
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
pub(super) enum Word {
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
        /// Whether a resource has run out, or a process was killed, so that the request is not to
        /// blame.
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
        /// The bytes between its processes, if they were to be counted; or why they were not.
        #[serde(default)]
        audit: Option<Box<Result<Audit, String>>>,
    },
}

/// A rank's standard input; that of the others is empty.
#[derive(Debug)]
pub struct RankInput {
    /// Which rank of the first start.
    pub rank: u32,
    /// What it reads.
    pub from: OwnedFd,
}

/// How to start a supervisor process.
#[derive(Debug)]
pub struct Start<'a> {
    /// A `cuda-cluster` binary, or one that embeds this crate.
    pub program: &'a Path,
    /// Whether the cluster outlives the starter.
    pub lifetime: Lifetime,
    /// Whether the starter reads reports until the end.
    pub attended: bool,
    /// Whether and how the starter reads the ranks' output.
    pub output: Option<OutputForm>,
    /// The rank that has a standard input, if one does.
    pub input: Option<RankInput>,
}

/// The starter's end of a supervisor process.
#[derive(Debug)]
pub struct Detached {
    child: Child,
    reports: Lines<BufReader<ChildStdout>>,
    /// Standard input of the supervisor; closing it ends an owned cluster.
    words: Option<ChildStdin>,
    program: PathBuf,
    /// The cluster's name.
    name: ClusterName,
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
        let Start { program, lifetime, attended, output, input } = start;
        // A supervisor starts no supervisor: its `main` has come here without `dispatch`. The
        // process that started it reads the line that `main` writes, or its exit status.
        if std::env::args_os().nth(1).is_some_and(|argument| argument == SUBCOMMAND) {
            let did = "launches a cluster when it is started as a supervisor".to_owned();
            return Err(UpError::NotASupervisor { program: process::own_program(), did });
        }
        let name = prepared.plan.name.clone();
        let failed = |source| UpError::Spawn { program: program.to_owned(), source };
        let mut command = Command::new(program);
        process::without_descriptors(command.as_std_mut());
        let input = input.map(|RankInput { rank, from }| {
            (rank, process::with_descriptor(command.as_std_mut(), from))
        });
        let instructions = Instructions { prepared, lifetime, attended, output, input };
        let mut text = serde_json::to_vec(&instructions).map_err(UpError::plan)?;
        text.push(b'\n');
        let missing = || failed(std::io::ErrorKind::BrokenPipe.into());
        let pipe = output.map(|_| std::io::pipe()).transpose().map_err(failed)?;
        let (reader, writer) = pipe.unzip();
        command.arg(SUBCOMMAND).stdin(Stdio::piped()).stdout(Stdio::piped());
        command.stderr(writer.map_or_else(Stdio::null, Stdio::from));
        // A Ctrl-C does not reach it, not even before it has a session of its own.
        command.process_group(0);
        let mut child = command.spawn().map_err(failed)?;
        // Its descriptors are the supervisor's alone now.
        drop(command);
        let mut words = child.stdin.take().ok_or_else(missing)?;
        match words.write_all(&text).await {
            // What has ended already is no supervisor; its exit status will tell.
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {}
            written => written.map_err(failed)?,
        }
        let reports = BufReader::new(child.stdout.take().ok_or_else(missing)?).lines();
        let program = program.to_owned();
        let words = Some(words);
        let detached = Self { child, reports, words, program, name, has_reported: false };
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
            // By SIGINT.
            Ok(status) if status.signal() == Some(2) => Err(UpError::Interrupted),
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

    /// Completes when the supervisor, which was asked to end the cluster, has not answered for some
    /// time: it hangs, or somebody has stopped it.
    pub fn silence(&self) -> impl Future<Output = ()> + use<> {
        let control = Control::new(Paths::of(&self.name).control());
        let pid = self.pid();
        async move {
            let mut heard = Instant::now();
            while heard.elapsed() < ANSWER {
                match control.ping(ANSWER.saturating_sub(heard.elapsed())).await {
                    Err(ControlError::Silent { .. }) => return,
                    Ok(()) => heard = Instant::now(),
                    // It does not listen yet, or no longer.
                    Err(_) if pid.and_then(process::is_stopped) != Some(true) => {
                        heard = Instant::now();
                    }
                    Err(_) => {}
                }
                tokio::time::sleep(LOOK).await;
            }
        }
    }

    /// Kills the cluster of a supervisor that is silent, and returns when nothing of it is left.
    /// The error tells who did not answer.
    pub async fn put_down(&mut self) -> UpError {
        let Some(pid) = self.pid() else {
            return UpError::Silent { status: "it has ended".to_owned() };
        };
        let did = match process::is_stopped(pid) {
            Some(true) => "was stopped (SIGSTOP, or a debugger)",
            _ => "did not answer",
        };
        let cluster = Handle::new(self.name.clone());
        // Before it has a run directory, it has no processes either.
        if cluster.is_supervised_by(pid)
            && let Err(error) = cluster.kill_at_once().await
        {
            return UpError::TakeDown(error);
        }
        self.kill();
        self.reap().await;
        UpError::Killed { name: self.name.clone(), pid, did }
    }

    /// Waits until the supervisor, which was asked to end the cluster, has ended.
    ///
    /// # Errors
    /// If it does not answer; the cluster is killed then.
    pub async fn outlast(&mut self) -> Result<(), UpError> {
        let silence = self.silence();
        tokio::select! {
            () = self.reap() => Ok(()),
            () = silence => Err(self.put_down().await),
        }
    }

    /// Waits until the supervisor has ended. May be dropped at any time.
    pub async fn reap(&mut self) {
        // Waiting fails if someone else has reaped it, and then it has ended.
        let _ = self.child.wait().await;
    }

    /// Closes the connection to an owned cluster, and waits until its supervisor has ended.
    pub async fn end(mut self) {
        self.let_go();
        // Why the cluster ends is told otherwise.
        let _ = self.outlast().await;
    }
}
