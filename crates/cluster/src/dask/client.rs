//! Asks the workers of a running Dask cluster to measure what they receive from each other.
//!
//! Each worker answers over a socket of its own in the run directory (`python/measure.py`): one
//! JSON line a question, one the answer. Those of other machines are asked by the scheduler
//! (`python/between.py`), which has such a socket, too. Does not know the workers' addresses; its
//! caller does.
//!
//! *Invariant:* every question has one result, and an error names the worker that it is about.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::task::JoinSet;

use cuda_cluster_machine::os::run_directory::Paths;
use cuda_cluster_model::ids::SCHEDULER;
use cuda_cluster_why::evidence::{Held, Paused, Placed};
use cuda_cluster_wire::links::Measured;
use cuda_cluster_wire::native::{Measurement, Samples};
use cuda_cluster_wire::peer::MemoryKind;
use cuda_cluster_wire::tasks::{FunctionOverview, Waiting};

/// Longest answer, in bytes: millions of rounds.
const ANSWER_LIMIT: u64 = 32 << 20;

/// The scheduler's socket, by its name without the ending. `scheduler.sock` is that of the native
/// engine, whose clients would wait for an answer.
const BETWEEN: &str = "between";

/// A client of the workers in one run directory.
#[derive(Clone, Debug)]
pub struct Client {
    paths: Paths,
}

/// What a worker is asked.
#[derive(Serialize)]
#[serde(tag = "ask", rename_all = "snake_case")]
enum Question<'a> {
    /// To fetch from a sender.
    Measure {
        peer: &'a str,
        address: &'a str,
        memory: MemoryKind,
        size: u64,
        messages: u32,
        rounds: u32,
        warmup: u32,
        #[serde(flatten)]
        elsewhere: Option<Elsewhere<'a>>,
        /// Its NIC ports whose bytes are asked for, too.
        #[serde(skip_serializing_if = "<[String]>::is_empty")]
        ports: &'a [String],
    },
    /// Whether it can measure device memory.
    Device,
    /// Where the scheduler is.
    Machine,
    /// What the scheduler's tasks wait for.
    Queued,
    /// What it fetches from other workers.
    Fetching,
    /// What the scheduler's tasks do.
    Tasks,
}

/// A worker that the scheduler is to ask.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Elsewhere<'a> {
    /// Its address.
    #[serde(rename = "at")]
    pub address: &'a str,
    /// Its name, for errors.
    pub name: &'a str,
}

/// Who is asked what comes to it.
#[derive(Clone, Copy, Debug)]
pub enum Receiver<'a> {
    /// A worker of this machine, by its process's name.
    Here(&'a str),
    /// One of another.
    Elsewhere(Elsewhere<'a>),
}

/// What a worker received from one of another machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fetched {
    /// How long each round took.
    pub rounds_ns: Vec<u64>,
    /// What carried it.
    pub lanes: Vec<String>,
    /// Why there is no better lane.
    pub cause: Option<String>,
    /// Bytes that its ports have received meanwhile, as far as they count.
    pub ports: BTreeMap<String, u64>,
}

/// What the tasks of Dask's scheduler do (`python/tasks.py`).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Tasks {
    /// Prefixes of tasks, those with the most first.
    pub functions: Vec<FunctionOverview>,
    /// What tasks wait for.
    pub waiting: Vec<Waiting>,
    /// The scheduler's workers.
    pub workers: Vec<WorkerTasks>,
    /// Whether Dask's own pages can be shown.
    pub has_pages: bool,
}

/// The tasks of one of Dask's workers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WorkerTasks {
    /// Its name for the scheduler.
    pub name: String,
    /// Its process; `None` on another machine.
    pub pid: Option<u32>,
    /// Tasks that were sent to it.
    pub processing: u64,
    /// Results that it keeps.
    pub kept: u64,
    /// Transfers from other workers until now.
    pub transfers: u64,
    /// Bytes that are coming from them.
    pub incoming_bytes: u64,
    /// Bytes that it has sent until now, to workers and to clients; `None` if it does not tell.
    #[serde(default)]
    pub sent_bytes: Option<u64>,
}

/// What a worker answers.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Answer {
    rounds_ns: Vec<u64>,
    lanes: Vec<String>,
    /// Why there is no better lane.
    cause: Option<String>,
    ports: BTreeMap<String, u64>,
    machine: Option<String>,
    host: Option<String>,
    queued: Option<Queued>,
    fetching: Option<Vec<Fetching>>,
    error: Option<String>,
}

/// What the scheduler's tasks wait for (`python/queued.py`).
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Queued {
    /// Tasks that wait for the results of others.
    pub waiting: u64,
    /// Tasks that could run, and for which no worker has room.
    pub ready: u64,
    /// Tasks that no worker may run.
    pub unplaced: u64,
    /// The first of those.
    pub held: Vec<Held>,
    /// Tasks that workers have.
    pub placed: Vec<OfWorker<Placed>>,
    /// Workers that are given none.
    pub paused: Vec<OfWorker<Paused>>,
}

/// What a worker fetches from another in one message (`python/fetching.py`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Fetching {
    /// The key of the largest result.
    pub name: String,
    /// How many others come with it.
    pub others: u64,
    /// The address of the worker that has them.
    pub source: String,
    /// What Dask expects them to be together.
    pub bytes: u64,
    /// For how long, in milliseconds.
    pub millis: u64,
    /// Tasks that wait for them there.
    pub tasks: u64,
}

/// What is said of a worker, whose rank is its name for Dask.
#[derive(Clone, Debug, Deserialize)]
pub struct OfWorker<T> {
    /// Its process, if this cluster's supervisor has it.
    pub pid: Option<u32>,
    /// What is said of it.
    #[serde(flatten)]
    pub said: T,
}

impl Client {
    /// A client for the cluster with this run directory.
    pub fn new(run_directory: &Path) -> Self {
        Self { paths: Paths::at(run_directory) }
    }

    /// Runs these measurements at the same time, each with its sender's address. Results come in
    /// the order in which the measurements end.
    pub async fn measure(&self, all: Vec<(Measurement, String)>) -> Vec<Measured> {
        let mut asked = JoinSet::new();
        for (measurement, address) in all {
            let client = self.clone();
            asked.spawn(async move { client.measured(measurement, &address).await });
        }
        let mut results = Vec::new();
        while let Some(measured) = asked.join_next().await {
            results.extend(measured.ok());
        }
        results
    }

    /// Why a worker can't measure device memory; `None` if it can.
    pub async fn without_device_memory(&self, worker: &str) -> Option<String> {
        match self.ask::<Answer>(worker, &Question::Device).await {
            Ok(answer) => answer.error,
            Err(why) => Some(why),
        }
    }

    /// The scheduler's machine, as workers that have joined name theirs, and its host's name.
    ///
    /// # Errors
    /// Why it does not say so.
    pub async fn machine(&self) -> Result<(String, String), String> {
        let Answer { machine, host, .. } = self.ask(SCHEDULER, &Question::Machine).await?;
        machine.zip(host).ok_or_else(|| format!("{SCHEDULER} does not say where it is"))
    }

    /// What the scheduler's tasks wait for.
    ///
    /// # Errors
    /// Why it does not say so.
    pub async fn queued(&self) -> Result<Queued, String> {
        let Answer { queued, error, .. } = self.ask(SCHEDULER, &Question::Queued).await?;
        let silent = || format!("{SCHEDULER} does not tell: it is of an older version");
        queued.ok_or_else(|| error.unwrap_or_else(silent))
    }

    /// What a worker of this machine fetches from others, what has taken longest first.
    ///
    /// # Errors
    /// Why it does not say so.
    pub async fn fetching(&self, worker: &str) -> Result<Vec<Fetching>, String> {
        let answer = self.ask::<Answer>(worker, &Question::Fetching).await?;
        // An older one takes the question for one to measure.
        answer.fetching.ok_or_else(|| format!("{worker} does not tell: it is of an older version"))
    }

    /// What the scheduler's tasks do.
    ///
    /// # Errors
    /// Why it does not say so.
    pub async fn tasks(&self) -> Result<Tasks, String> {
        self.ask(SCHEDULER, &Question::Tasks).await
    }

    /// Has a worker fetch from one of another machine, whose name and address are these.
    ///
    /// # Errors
    /// Why nothing came.
    pub async fn fetch(
        &self,
        receiver: Receiver<'_>,
        (peer, address): (&str, &str),
        what: &Measurement,
        ports: &[String],
    ) -> Result<Fetched, String> {
        let (asked, name, elsewhere) = match receiver {
            Receiver::Here(name) => (name, name, None),
            Receiver::Elsewhere(worker) => (SCHEDULER, worker.name, Some(worker)),
        };
        let &Measurement { memory, size, messages, rounds, warmup, .. } = what;
        #[rustfmt::skip]
        let question = Question::Measure {
            peer, address, memory, size, messages, rounds, warmup, elsewhere, ports,
        };
        match self.ask(asked, &question).await? {
            Answer { error: Some(error), .. } if elsewhere.is_some() => Err(error),
            Answer { error: Some(error), .. } => Err(format!("{name}: {error}")),
            Answer { rounds_ns, lanes, cause, ports, .. } => {
                Ok(Fetched { rounds_ns, lanes, cause, ports })
            }
        }
    }

    async fn measured(&self, measurement: Measurement, address: &str) -> Measured {
        let Measurement { from, to, memory, size, messages, rounds, warmup, .. } = measurement;
        let (elsewhere, ports) = (None, &[][..]);
        #[rustfmt::skip]
        let question = Question::Measure {
            peer: &from, address, memory, size, messages, rounds, warmup, elsewhere, ports,
        };
        let (result, cause) = match self.ask(&to, &question).await {
            Ok(Answer { error: Some(error), .. }) => (Err(format!("{to}: {error}")), None),
            Ok(Answer { rounds_ns, lanes, cause, .. }) => {
                let samples =
                    Samples { rounds_ns, lanes, protocol: None, mapped: Default::default() };
                (Ok(samples), cause)
            }
            Err(why) => (Err(why), None),
        };
        Measured { from, to, result, cause }
    }

    async fn ask<A: DeserializeOwned>(
        &self,
        worker: &str,
        question: &Question<'_>,
    ) -> Result<A, String> {
        let path = self.paths.socket(if worker == SCHEDULER { BETWEEN } else { worker });
        let stream = UnixStream::connect(&path)
            .await
            .map_err(|error| format!("{worker} cannot be asked: {}: {error}", path.display()))?;
        converse(stream, question).await.map_err(|error| match error.kind() {
            io::ErrorKind::InvalidData => format!("{worker} answers in another way: {error}"),
            _ => format!("{worker} ended before it answered: {error}"),
        })
    }
}

async fn converse<A: DeserializeOwned>(
    stream: UnixStream,
    question: &Question<'_>,
) -> io::Result<A> {
    let mut stream = BufReader::new(stream);
    let mut line = serde_json::to_vec(question)?;
    line.push(b'\n');
    stream.write_all(&line).await?;
    // The stream stays open both ways: a worker stops measuring for whoever hangs up.
    let mut answer = String::new();
    (&mut stream).take(ANSWER_LIMIT).read_line(&mut answer).await?;
    if !answer.ends_with('\n') {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(serde_json::from_str(&answer)?)
}
