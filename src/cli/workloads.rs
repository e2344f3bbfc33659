//! `bench tasks`, `bench transpose` and `bench merge`: workloads on a running cluster.

use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use serde::Serialize;

use super::failure::{Exit, Failure};
use super::flags::keys::in_flags;
use super::flags::{positive, whole};
use super::output::{self, Form};
use super::reach;
use crate::cluster::workloads::{Matrix, Merge, Shape, queued_task_bytes, small_tasks};
use crate::cluster::{Client, ClientError};
use crate::ids::ClusterName;
use crate::wire::tasks::{Counters, LinkOverview, Overview};

/// The version of the JSON form.
const VERSION: u32 = 1;

/// The options that all workloads share.
#[derive(Args, Debug)]
struct Common {
    /// The cluster; optional if only one is running
    #[arg(value_name = "NAME")]
    name: Option<ClusterName>,
    /// Number of runs; the figures are those of the median run
    #[arg(long, default_value_t = 3, value_name = "COUNT", value_parser = positive::<u32>)]
    runs: u32,
    /// Output format
    #[arg(short, long, value_enum, default_value_t, value_name = "FORM")]
    output: Form,
}

/// Arguments of `bench tasks`.
#[derive(Args, Debug)]
pub(super) struct TasksArguments {
    #[command(flatten)]
    common: Common,
    /// Number of tasks
    #[arg(long, default_value_t = 100_000, value_name = "COUNT", value_parser = positive::<usize>)]
    count: usize,
    /// How tasks depend on each other [default: all three patterns]
    #[arg(long, value_enum)]
    shape: Option<ShapeName>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ShapeName {
    Flat,
    Chains,
    Fans,
}

impl ShapeName {
    fn shape(self) -> Shape {
        match self {
            ShapeName::Flat => Shape::Flat,
            ShapeName::Chains => Shape::Chains,
            ShapeName::Fans => Shape::Fans,
        }
    }
}

/// Arguments of `bench transpose`.
#[derive(Args, Debug)]
pub(super) struct TransposeArguments {
    #[command(flatten)]
    common: Common,
    /// Number of chunks in each direction
    #[arg(long, default_value_t = 8, value_name = "COUNT", value_parser = positive::<u64>)]
    chunks: u64,
    /// Elements per chunk in each direction (8 bytes each)
    #[arg(long, default_value_t = 1024, value_name = "COUNT", value_parser = positive::<u64>)]
    chunk_size: u64,
    /// Seed of the random elements
    #[arg(long, default_value_t = 1, value_parser = whole::<u64>)]
    seed: u64,
    /// Compare the result with that of a single process
    #[arg(long)]
    check: bool,
}

/// Arguments of `bench merge`.
#[derive(Args, Debug)]
pub(super) struct MergeArguments {
    #[command(flatten)]
    common: Common,
    /// Number of parts of each table
    #[arg(long, default_value_t = 8, value_name = "COUNT", value_parser = positive::<u32>)]
    parts: u32,
    /// Rows per part (16 bytes each)
    #[arg(long, default_value_t = 1_000_000, value_name = "COUNT", value_parser = positive::<u64>)]
    rows: u64,
    /// Seed of the random keys and values
    #[arg(long, default_value_t = 1, value_parser = whole::<u64>)]
    seed: u64,
    /// Compare the result with that of a single process
    #[arg(long)]
    check: bool,
}

/// The JSON form.
#[derive(Serialize)]
struct Document {
    version: u32,
    bench: &'static str,
    runs: Vec<Run>,
    workers: Vec<WorkerFigures>,
    /// Of all transfers since the bench began.
    links: Vec<LinkOverview>,
    /// Of the scheduler's memory per queued task.
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes_per_queued_task: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    same_as_in_one_process: Option<bool>,
}

/// One run.
#[derive(Serialize)]
struct Run {
    #[serde(skip_serializing_if = "Option::is_none")]
    shape: Option<String>,
    seconds: f64,
    /// Tasks or bytes.
    amount: u64,
    unit: &'static str,
    per_second: f64,
}

#[derive(Serialize)]
struct WorkerFigures {
    name: String,
    finished: u64,
    memory: Counters,
}

fn failed(error: ClientError) -> Failure {
    let hint = error.hint().map(in_flags);
    Failure::new(Exit::Failed, error).maybe_hint(hint)
}

fn client(common: &Common) -> Result<Client, Failure> {
    let client = reach::find(common.name.as_ref())?.client().map_err(failed)?;
    client.count_anew().map_err(failed)?;
    Ok(client)
}

/// Runs `bench tasks`.
pub(super) fn tasks(arguments: &TasksArguments) -> Result<Exit, Failure> {
    let client = client(&arguments.common)?;
    // Runs first, before the scheduler has freed memory to reuse.
    let queued = queued_task_bytes(&client, arguments.count).map_err(failed)?;
    let all = [ShapeName::Flat, ShapeName::Chains, ShapeName::Fans];
    let shapes = arguments.shape.map_or(all.to_vec(), |shape| vec![shape]);
    let mut runs = Vec::new();
    for shape in shapes {
        let one = || small_tasks(&client, shape.shape(), arguments.count);
        let (took, ()) = timed(arguments.common.runs, one)?;
        let shape = format!("{shape:?}").to_lowercase();
        runs.push(run(Some(shape), took, arguments.count as u64, "tasks"));
    }
    let found = Found { runs, bytes_per_queued_task: Some(queued), same: None };
    show(&arguments.common, &client, "tasks", found)
}

/// Runs `bench transpose`.
pub(super) fn transpose(arguments: &TransposeArguments) -> Result<Exit, Failure> {
    let TransposeArguments { common, chunks, chunk_size, seed, check } = arguments;
    let matrix = Matrix { chunks: *chunks, size: *chunk_size, seed: *seed };
    let client = client(common)?;
    let made = matrix.make(&client).map_err(failed)?;
    client.wait(&made).map_err(failed)?;
    let (took, sum) = timed(common.runs, || matrix.sum_with_transpose(&client, &made))?;
    let same = check.then(|| sum == matrix.sum_with_transpose_here());
    let runs = vec![run(None, took, matrix.bytes(), "bytes")];
    show(common, &client, "transpose", Found { runs, same, bytes_per_queued_task: None })
}

/// Runs `bench merge`.
pub(super) fn merge(arguments: &MergeArguments) -> Result<Exit, Failure> {
    let MergeArguments { common, parts, rows, seed, check } = arguments;
    let merge = Merge { parts: *parts, rows: *rows, seed: *seed };
    let client = client(common)?;
    let made = merge.make(&client).map_err(failed)?;
    client.wait(&made).map_err(failed)?;
    let (took, joined) = timed(common.runs, || merge.join(&client, &made))?;
    let same = check.then(|| joined == merge.join_here());
    let runs = vec![run(None, took, merge.bytes(), "bytes")];
    show(common, &client, "merge", Found { runs, same, bytes_per_queued_task: None })
}

/// The run with the median time, and the last run's result.
fn timed<T>(
    runs: u32,
    mut one: impl FnMut() -> Result<T, ClientError>,
) -> Result<(Duration, T), Failure> {
    let mut times = Vec::new();
    loop {
        let start = Instant::now();
        let result = one().map_err(failed)?;
        times.push(start.elapsed());
        if times.len() >= runs.max(1) as usize {
            times.sort_unstable();
            return Ok((times[times.len() / 2], result));
        }
    }
}

fn run(shape: Option<String>, took: Duration, amount: u64, unit: &'static str) -> Run {
    let seconds = took.as_secs_f64();
    Run { shape, seconds, amount, unit, per_second: amount as f64 / seconds.max(1e-9) }
}

/// The results of a bench.
struct Found {
    runs: Vec<Run>,
    bytes_per_queued_task: Option<f64>,
    /// Whether the result equals that of a single process.
    same: Option<bool>,
}

fn show(
    common: &Common,
    client: &Client,
    bench: &'static str,
    found: Found,
) -> Result<Exit, Failure> {
    let Found { runs, bytes_per_queued_task, same } = found;
    let Overview { workers, links, .. } = client.overview().map_err(failed)?;
    let figures = |worker: crate::wire::tasks::WorkerOverview| {
        let memory = match client.counters(&worker.name) {
            Ok(memory) => memory,
            // The result is there all the same.
            Err(ClientError::NoWorker { worker }) => {
                output::note(&format!("{worker} has just ended, and its figures with it"));
                return None;
            }
            Err(error) => return Some(Err(error)),
        };
        Some(Ok(WorkerFigures { name: worker.name, finished: worker.finished, memory }))
    };
    let workers = workers.into_iter().filter_map(figures);
    let workers = workers.collect::<Result<_, ClientError>>().map_err(failed)?;
    let document = Document {
        version: VERSION,
        bench,
        runs,
        workers,
        links,
        bytes_per_queued_task,
        same_as_in_one_process: same,
    };
    match common.output {
        Form::Json => output::print_json(&document)?,
        Form::Table => output::print(&text(&document))?,
    }
    Ok(if same == Some(false) { Exit::Unverified } else { Exit::Done })
}

fn text(document: &Document) -> String {
    let mut text = String::new();
    let row = |run: &Run| {
        let amount = match run.unit {
            "bytes" => format!("{:.1} MB", run.amount as f64 / 1e6),
            _ => run.amount.to_string(),
        };
        let rate = match run.unit {
            "bytes" => format!("{:.3} GB/s", run.per_second / 1e9),
            _ => format!("{:.0} tasks/s", run.per_second),
        };
        let shape = run.shape.clone().unwrap_or_default();
        vec![document.bench.to_owned(), shape, amount, format!("{:.3} s", run.seconds), rate]
    };
    let rows = document.runs.iter().map(row);
    text += &output::table(&["bench", "shape", "amount", "time", "rate"], rows);
    if !document.links.is_empty() {
        let gb = |rate: f64| format!("{:.3}", rate / 1e9);
        let row = |link: &LinkOverview| {
            let [low, median, high] = link.quartiles.map(gb);
            let bytes = format!("{:.1} MB", link.bytes as f64 / 1e6);
            let transfers = link.transfers.to_string();
            vec![link.from.clone(), link.to.clone(), low, median, high, transfers, bytes]
        };
        let heads = ["from", "to", "25% GB/s", "50% GB/s", "75% GB/s", "transfers", "bytes"];
        text.push('\n');
        text += &output::table(&heads, document.links.iter().map(row));
    }
    if let Some(bytes) = document.bytes_per_queued_task {
        text += &format!("\na task that waits takes {bytes:.0} bytes of the scheduler's memory\n");
    }
    match document.same_as_in_one_process {
        Some(true) => text += "\nthe same as in one process\n",
        Some(false) => text += "\nNOT the same as in one process\n",
        None => {}
    }
    text
}
