//! Asks the workers of a running Dask cluster to measure what they receive from each other.
//!
//! Each worker answers over a socket of its own in the run directory (`python/measure.py`): one
//! JSON line a question, one the answer. Does not know the workers' addresses; its caller does.
//!
//! *Invariant:* every question has one result, and an error names the worker that it is about.

use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::task::JoinSet;

use cuda_cluster_machine::os::run_directory::Paths;
use cuda_cluster_wire::links::Measured;
use cuda_cluster_wire::native::{Measurement, Samples};
use cuda_cluster_wire::peer::MemoryKind;

/// Longest answer, in bytes: millions of rounds.
const ANSWER_LIMIT: u64 = 32 << 20;

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
    },
    /// Whether it can measure device memory.
    Device,
}

/// What a worker answers.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Answer {
    rounds_ns: Vec<u64>,
    lanes: Vec<String>,
    /// Why there is no better lane.
    cause: Option<String>,
    error: Option<String>,
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
        match self.ask(worker, &Question::Device).await {
            Ok(answer) => answer.error,
            Err(why) => Some(why),
        }
    }

    async fn measured(&self, measurement: Measurement, address: &str) -> Measured {
        let Measurement { from, to, memory, size, messages, rounds, warmup, .. } = measurement;
        let question =
            Question::Measure { peer: &from, address, memory, size, messages, rounds, warmup };
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

    async fn ask(&self, worker: &str, question: &Question<'_>) -> Result<Answer, String> {
        let path = self.paths.socket(worker);
        let stream = UnixStream::connect(&path).await.map_err(|error| {
            format!("{worker} cannot be asked to measure: {}: {error}", path.display())
        })?;
        converse(stream, question).await.map_err(|error| match error.kind() {
            io::ErrorKind::InvalidData => format!("{worker} answers in another way: {error}"),
            _ => format!("{worker} ended while it measured: {error}"),
        })
    }
}

async fn converse(stream: UnixStream, question: &Question<'_>) -> io::Result<Answer> {
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
