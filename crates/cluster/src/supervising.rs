//! The supervisor process: the plan and later requests come from its starter, and reports go to it
//! (`detached`).
//!
//! The supervisor never waits for a slow starter: newer states replace unread ones, and at the end
//! it waits only briefly.
//!
//! *Invariant:* an owned cluster ends when its starter has ended, or has closed the connection.

use std::future::Future;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::pin::Pin;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::unistd::getppid;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::net::unix::pipe::{Receiver, Sender};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{broadcast, oneshot, watch};
use tokio::task::JoinHandle;

use super::UpError;
use super::detached::{Instructions, Lifetime, NOT_READY, OutputForm, Report, USAGE, Word};
use super::start::{Started, start};
use cuda_cluster_machine::os::exhausted::Exhausted;
use cuda_cluster_machine::os::guardian::GuardianError;
use cuda_cluster_machine::os::pidfd::{self, PidFd};
use cuda_cluster_machine::os::run_directory::RunDirectoryError;
use cuda_cluster_machine::os::{self, event_loop, memory, process};
use cuda_cluster_supervise::{
    ClusterState, Escalation, Input, Outcome, OutputPipe, Record, Requests, StartError, Stopper,
    Supervisor,
};
use cuda_cluster_why::audit::Audit;

/// How long to wait for a starter to take the last report.
const FAREWELL: Duration = Duration::from_secs(1);

/// How long the end of a cluster waits for its last audit.
const LAST_AUDIT: Duration = Duration::from_secs(3);

/// Runs the subcommand: becomes the supervisor of the plan on standard input.
pub(super) fn main() -> ExitCode {
    let starter = parent();
    process::become_session_leader();
    os::ignore_file_size_signal();
    let worked = match event_loop::new() {
        Ok(runtime) => runtime.block_on(work(starter)),
        Err(error) => Err(refusal(UpError::Runtime(error))),
    };
    match worked {
        Ok(code) => code,
        Err(refused) => {
            // No other thread writes yet, and a line fits into an empty pipe.
            if let Ok(line) = line(&refused) {
                let _ = std::io::stdout().lock().write_all(&line);
            }
            ExitCode::from(USAGE)
        }
    }
}

fn refusal<E: Into<anyhow::Error>>(error: E) -> Report {
    let error = error.into();
    let up = error.downcast_ref::<UpError>();
    let exhausted = Exhausted::behind(error.as_ref());
    Report::Refused {
        message: format!("{error:#}"),
        hint: up.and_then(UpError::hint).or_else(|| exhausted.map(Exhausted::hint)),
        exhausted: exhausted.is_some()
            || matches!(
                up,
                Some(
                    UpError::Limits(_)
                        | UpError::Supervisor(StartError::Guardian(GuardianError::Ended { .. }))
                )
            ),
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

/// The process that has started this one; `None` if it has ended already, or can't be watched.
fn parent() -> Option<PidFd> {
    let pid = getppid();
    let process = (pid.as_raw() > 0).then(|| PidFd::open(pid).ok()).flatten();
    process.filter(|_| getppid() == pid)
}

async fn work(starter: Option<PidFd>) -> Result<ExitCode, Report> {
    let mut signals = Signals::new().map_err(refusal)?;
    let stdin = Receiver::from_owned_fd(duplicate(std::io::stdin())?).map_err(refusal)?;
    let mut stdin = BufReader::new(stdin);
    let mut first = String::new();
    stdin.read_line(&mut first).await.map_err(refusal)?;
    let Instructions { prepared, lifetime, attended, output, input } =
        serde_json::from_str(&first).map_err(refusal)?;
    let output = match output {
        Some(OutputForm { separate_streams }) => {
            let pipe = Arc::new(duplicate(std::io::stderr())?);
            Some(OutputPipe { pipe, separate_streams })
        }
        None => None,
    };
    let taken = |(worker, number): (u32, RawFd)| {
        let from = Arc::new(process::left_to_us(number)?);
        Ok(Input { worker: worker as usize, from })
    };
    let input = input.map(taken).transpose().map_err(refusal::<std::io::Error>)?;
    let program = process::own_program();
    let started = start(&prepared, &program, output, input).await.map_err(refusal)?;
    let Started { supervisor, audit } = started;
    let reports = Sender::from_owned_fd(duplicate(std::io::stdout())?).map_err(refusal)?;
    let reports = Reports::begin(reports, attended, &supervisor);
    // From here on only the report task and the guardian write to the standard streams.
    let _ = process::let_go_of_output();
    let to_be_verified = prepared.to_be_verified;
    drop(prepared);
    let gone: Gone = match starter {
        Some(process) => Box::pin(pidfd::until_ended(process)),
        None => Box::pin(std::future::pending()),
    };
    let mut starter = Starter { words: Some((stdin.lines(), gone)), lifetime, to_be_verified };
    let (stopper, mut state) = (supervisor.stopper(), supervisor.state());
    let mut ready = false;
    let mut ended = Box::pin(supervisor.wait());
    let outcome = loop {
        tokio::select! {
            outcome = &mut ended => break outcome,
            word = starter.next() => starter.obey(word, &stopper),
            (how, signal) = signals.next() => {
                stopper.signalled(signal);
                stopper.stop(how);
            }
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
        Outcome::NotReady(_) => ExitCode::from(NOT_READY),
    };
    let audit = match audit {
        Some(audit) => Some(Box::new(concluded(audit).await)),
        None => None,
    };
    let state = Box::new(state.borrow().clone());
    reports.end(Report::Ended { outcome, state, audit }).await;
    Ok(code)
}

/// The last audit, which is due when the cluster has ended.
async fn concluded(audit: JoinHandle<Result<Audit, String>>) -> Result<Audit, String> {
    let late = |_| "it took too long".to_owned();
    let audit = tokio::time::timeout(LAST_AUDIT, audit).await.map_err(late)?;
    audit.unwrap_or_else(|error| Err(error.to_string()))
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

/// The starter's end.
type Gone = Pin<Box<dyn Future<Output = ()>>>;

/// The starter of this process. Its end also ends an owned cluster, and one that is not verified
/// yet.
struct Starter {
    /// What it says, and its end: a child that it has forked may hold its pipe for longer.
    words: Option<(Lines<BufReader<Receiver>>, Gone)>,
    lifetime: Lifetime,
    to_be_verified: bool,
}

impl Starter {
    /// Waits for the next message; `None` is the starter's end, which is returned once.
    /// Cancel-safe.
    async fn next(&mut self) -> Option<Word> {
        let Some((words, gone)) = &mut self.words else { return std::future::pending().await };
        loop {
            let line = tokio::select! {
                biased;
                line = words.next_line() => line,
                () = &mut *gone => Ok(None),
            };
            let Ok(Some(line)) = line else { break };
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
    requests: Requests,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hangup: signal(SignalKind::hangup())?,
            requests: Requests::default(),
        })
    }

    /// The next one's number, and what it asks for.
    async fn next(&mut self) -> (Escalation, i32) {
        loop {
            let number = tokio::select! {
                _ = self.interrupt.recv() => libc::SIGINT,
                _ = self.terminate.recv() => libc::SIGTERM,
                _ = self.hangup.recv() => libc::SIGHUP,
            };
            if let Some(how) = self.requests.hear(number == libc::SIGTERM, Instant::now()) {
                return (how, number);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuda_cluster_wire::process::Exit;

    #[test]
    fn a_killed_guardian_is_no_mistake_of_the_request() {
        let guardian = GuardianError::Ended { pid: 7, exit: Exit::by_signal(9) };
        let refused = refusal(UpError::from(StartError::Guardian(guardian)));
        let Report::Refused { message, hint, exhausted, .. } = refused else { panic!() };
        assert!(message.contains("the guardian (process 7) was ended by signal 9"), "{message}");
        assert!(exhausted && hint.is_none(), "{hint:?}");
    }
}
