//! Brings up the workers of another machine over ssh, as a process of this cluster.
//!
//! The process runs ssh, which runs `cuda-cluster __member` there (`src/cli/up/member.rs`), and
//! tells its supervisor of READY, notes and failures as any other process does. What it says to
//! the other end, and what it makes of the answers, decides `course`; words for both are in
//! `words`.
//!
//! *Invariant:* the workers there live as long as the connection: the other end's standard input is
//! closed when this process, ssh, or the network ends.

mod course;
mod words;

use std::fs::File;
use std::future::pending;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::pin::Pin;
use std::process::{ExitCode, Stdio};
use std::time::Duration;

use serde::Deserialize;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::process::{Child, ChildStdin, Command};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use crate::{dask, report};
use course::{Act, Course, Event};
use cuda_cluster_machine::os::run_directory::Paths;
use cuda_cluster_machine::os::{event_loop, process};
use cuda_cluster_model::plan::{EnginePlan, HostPlan, Plan, TlsFiles};
use cuda_cluster_model::spec::ClusterSpec;
use cuda_cluster_wire::status::{
    self, FD_VARIABLE, PROCESS_VARIABLE, RUN_DIRECTORY_VARIABLE, Status,
};
pub use words::{Assignment, LONGEST_ASSIGNMENT, QUESTION, Said, TlsTexts};

/// The hidden subcommand.
pub(crate) const SUBCOMMAND: &str = "__host";

/// Dask's configuration for the secret of `direct://`.
pub const SECRET_FILE: &str = "distributed.comm.direct.secret-file";

/// Longest line that is taken from ssh as one.
const LONGEST_LINE: usize = 64 << 10;

/// How often to look for the scheduler's address.
const LOOK: Duration = Duration::from_millis(50);

/// Standard output and standard error.
const STREAMS: usize = 2;

/// How long ssh's last words are waited for when it has ended.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Why this process cannot begin.
#[derive(Debug, thiserror::Error)]
enum BeginError {
    #[error("the environment does not have {0}, which the supervisor sets")]
    Variable(&'static str),
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("'{key}': cannot read {path}, which the other machines are given")]
    Tls {
        key: &'static str,
        path: String,
        #[source]
        source: io::Error,
    },
    #[error("{} has no host for this process", path.display())]
    Plan { path: PathBuf },
    #[error("cannot start an event loop")]
    Loop(#[source] io::Error),
}

/// What this process is to do.
struct Task {
    host: HostPlan,
    there: ClusterSpec,
    paths: Paths,
    /// Whether the workers there are to know the cluster's secret.
    secret: bool,
    tls: Option<TlsTexts>,
    preflight: bool,
}

impl Task {
    fn read() -> Result<Self, BeginError> {
        let variable = |name| std::env::var(name).map_err(|_| BeginError::Variable(name));
        let name = variable(PROCESS_VARIABLE)?;
        let paths = Paths::at(&PathBuf::from(variable(RUN_DIRECTORY_VARIABLE)?));
        let path = paths.plan();
        let text = std::fs::read_to_string(&path)
            .map_err(|source| BeginError::Read { path: path.clone(), source })?;
        let missing = || BeginError::Plan { path: path.clone() };
        let plan = Plan::parse(&text).map_err(|_| missing())?;
        let EnginePlan::Dask(dask) = plan.engine else { return Err(missing()) };
        let host = dask.hosts.into_iter().find(|host| host.process == name);
        let (host, there) = host.zip(dask.there).ok_or_else(missing)?;
        let tls = dask.tls.as_ref().map(texts).transpose()?;
        let secret = dask.protocol == "direct";
        Ok(Self { host, there, paths, secret, tls, preflight: dask.preflight })
    }

    /// What the other end is asked for, once the scheduler has an address.
    async fn assignment(&self) -> Assignment {
        #[derive(Deserialize)]
        struct Scheduler {
            address: String,
        }
        let address = loop {
            let text = std::fs::read(dask::scheduler_file(&self.paths));
            let read = text.ok().and_then(|text| serde_json::from_slice::<Scheduler>(&text).ok());
            match read {
                Some(scheduler) => break scheduler.address,
                None => tokio::time::sleep(LOOK).await,
            }
        };
        let secret = self.paths.read_secret().ok().filter(|_| self.secret);
        let mut spec = self.there.clone();
        spec.dask.join = Some(address);
        let asked = spec.topology.is_some();
        Assignment {
            spec,
            secret: secret.map(|secret| secret.to_hex()),
            machine: report::recorded_machine(&self.paths).filter(|_| asked),
            tls: self.tls.clone(),
            preflight: self.preflight,
        }
    }
}

fn texts(files: &TlsFiles) -> Result<TlsTexts, BeginError> {
    let text = |key, path: &String| {
        std::fs::read_to_string(path).map_err(|source| BeginError::Tls {
            key,
            path: path.clone(),
            source,
        })
    };
    Ok(TlsTexts {
        ca_file: text("tls.ca_file", &files.ca_file)?,
        cert: text("tls.cert", &files.cert)?,
        key: text("tls.key", &files.key)?,
    })
}

/// Runs the subcommand.
pub(crate) fn main() -> ExitCode {
    let begun = Task::read().and_then(|task| {
        let runtime = event_loop::new().map_err(BeginError::Loop)?;
        Ok(runtime.block_on(work(task)))
    });
    begun.unwrap_or_else(|error| {
        let mut pipe = Pipe::open();
        pipe.say(&Status::Failed { reason: format!("{:#}", anyhow::Error::new(error)) });
        ExitCode::FAILURE
    })
}

/// The status pipe. Without a supervisor it leads nowhere.
struct Pipe(Option<File>);

impl Pipe {
    fn open() -> Self {
        let number = std::env::var(FD_VARIABLE).ok().and_then(|number| number.parse().ok());
        Self(number.and_then(|number| process::inherited(number).ok()).map(File::from))
    }

    fn say(&mut self, status: &Status) {
        if let Some(file) = &mut self.0 {
            // A supervisor that has gone need not be told; it has this process ended.
            let _ = file.write_all(status::encode(status).as_bytes());
        }
    }

    /// The same pipe, for its questions.
    fn questions(&self) -> Option<UnixStream> {
        let own = self.0.as_ref()?.try_clone().ok()?;
        let socket = std::os::unix::net::UnixStream::from(OwnedFd::from(own));
        socket.set_nonblocking(true).ok()?;
        UnixStream::from_std(socket).ok()
    }
}

async fn work(task: Task) -> ExitCode {
    let mut pipe = Pipe::open();
    let mut course = Course::new(&task.host);
    pipe.say(&course.begins());
    let (events, mut heard) = mpsc::channel(64);
    if let Err(error) = stop_when_told(events.clone()) {
        pipe.say(&Status::Failed { reason: format!("cannot listen for signals: {error}") });
        return ExitCode::FAILURE;
    }
    if let Some(questions) = pipe.questions() {
        tokio::spawn(listen(BufReader::new(questions), events.clone(), |_| Event::Question));
    }
    let mut ssh = match spawn(&task.host, &events) {
        Ok(ssh) => ssh,
        Err(error) => {
            pipe.say(&Status::Failed { reason: course.without_ssh(&error.to_string()) });
            return ExitCode::FAILURE;
        }
    };
    let mut input = ssh.stdin.take();
    let mut assignment: Pin<Box<dyn Future<Output = Assignment> + '_>> = Box::pin(pending());
    let mut closed = 0;
    loop {
        let event = tokio::select! {
            biased;
            Some(event) = heard.recv() => event,
            assigned = &mut assignment => {
                assignment = Box::pin(pending());
                write_assignment(&mut input, &assigned).await;
                continue;
            }
            ended = ssh.wait() => {
                let last = last_words(&mut heard, closed, &mut course);
                // A process that has ssh's streams may live on.
                let _ = tokio::time::timeout(LAST_WORDS, last).await;
                let (code, how) = match &ended {
                    Ok(status) => (status.code(), status.to_string()),
                    Err(error) => (None, error.to_string()),
                };
                let (status, good) = course.ended(code, &how);
                status.iter().for_each(|status| pipe.say(status));
                return if good { ExitCode::SUCCESS } else { ExitCode::FAILURE };
            }
        };
        closed += usize::from(event == Event::Closed);
        for act in course.handle(event) {
            match act {
                Act::Say(status) => pipe.say(&status),
                Act::Ask => write(&mut input, format!("{QUESTION}\n").as_bytes()).await,
                Act::Assign => assignment = Box::pin(task.assignment()),
                Act::LetGo => input = None,
                Act::End => {
                    input = None;
                    // It has ended already if that fails.
                    let _ = ssh.start_kill();
                }
            }
        }
    }
}

async fn write_assignment(input: &mut Option<ChildStdin>, assignment: &Assignment) {
    if let Ok(mut line) = serde_json::to_vec(assignment) {
        line.push(b'\n');
        write(input, &line).await;
    }
}

/// Hears what ssh has said before its end, of whose streams so many have been closed.
async fn last_words(heard: &mut mpsc::Receiver<Event>, closed: usize, course: &mut Course) {
    let mut closed = closed;
    while closed < STREAMS
        && let Some(event) = heard.recv().await
    {
        closed += usize::from(event == Event::Closed);
        // There is nobody left for whom to act.
        course.handle(event);
    }
}

async fn write(input: &mut Option<ChildStdin>, bytes: &[u8]) {
    if let Some(pipe) = input
        && pipe.write_all(bytes).await.is_err()
    {
        // Its end tells why.
        *input = None;
    }
}

fn spawn(host: &HostPlan, events: &mpsc::Sender<Event>) -> io::Result<Child> {
    let (program, words) = host.argv.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    let mut command = Command::new(program);
    command.args(words).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut ssh = command.kill_on_drop(true).spawn()?;
    if let Some(stdout) = ssh.stdout.take() {
        tokio::spawn(listen(BufReader::new(stdout), events.clone(), Event::Line));
    }
    if let Some(stderr) = ssh.stderr.take() {
        tokio::spawn(listen(BufReader::new(stderr), events.clone(), |line| {
            eprint_line(&line);
            Event::Complaint(line)
        }));
    }
    Ok(ssh)
}

/// Writes into this process's log.
fn eprint_line(line: &str) {
    // A log that cannot be written is the guardian's to tell of.
    let _ = writeln!(io::stderr().lock(), "{line}");
}

fn stop_when_told(events: mpsc::Sender<Event>) -> io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::spawn(async move {
        loop {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            if events.send(Event::Stop).await.is_err() {
                return;
            }
        }
    });
    Ok(())
}

/// Sends each line as an event, and the end.
async fn listen(
    mut from: impl AsyncBufRead + Unpin,
    events: mpsc::Sender<Event>,
    event: impl Fn(String) -> Event,
) {
    while let Some(line) = next_line(&mut from).await {
        if events.send(event(line)).await.is_err() {
            return;
        }
    }
    // Nobody listens any more if that fails.
    let _ = events.send(Event::Closed).await;
}

/// The next line, of which no more than [`LONGEST_LINE`] bytes are kept; `None` at the end.
async fn next_line(from: &mut (impl AsyncBufRead + Unpin)) -> Option<String> {
    let mut line = Vec::new();
    loop {
        let piece = from.fill_buf().await.ok()?;
        if piece.is_empty() {
            return (!line.is_empty()).then(|| String::from_utf8_lossy(&line).into_owned());
        }
        let end = piece.iter().position(|byte| *byte == b'\n');
        let length = end.unwrap_or(piece.len());
        let room = LONGEST_LINE.saturating_sub(line.len());
        line.extend_from_slice(&piece[..length.min(room)]);
        from.consume(length + usize::from(end.is_some()));
        if end.is_some() {
            return Some(String::from_utf8_lossy(&line).trim_end_matches('\r').to_owned());
        }
    }
}
