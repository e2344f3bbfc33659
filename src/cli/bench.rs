//! `bench`: measures the performance of a cluster.

use std::io::IsTerminal;

use anyhow::anyhow;
use clap::{Args, Subcommand};

use super::failure::{Exit, Failure};
use super::flags::positive;
use super::measure::{Against, Form, Outcome, Ways, measured, unmeasured};
use super::signals::Signals;
use super::{output, reach, source, workloads};
use crate::cluster::measure::{Memory, Subject, Together, Wanted};
use crate::cluster::{Cluster, FindError};
use crate::ids::ClusterName;
use crate::units::{HumanBytes, Size};
use crate::wire::links::{Pair, Verdict};

/// The machine to simulate where there is no GPU and `--topology` is not given.
const SIMULATED: &str = "dgx-h100";

/// Number of workers of a cluster that `bench links` starts on simulated GPUs.
const SIMULATED_WORKERS: u32 = 2;

/// Arguments of `bench`.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  cuda-cluster bench links demo --size 1MiB,64MiB
  cuda-cluster bench tasks demo")]
pub(super) struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand, Debug)]
enum What {
    /// Bandwidth and latency between workers
    Links(LinksArguments),
    /// Overhead per task, measured with tasks that do nothing
    Tasks(workloads::TasksArguments),
    /// `(x + x.T).sum()` on a chunked matrix
    Transpose(workloads::TransposeArguments),
    /// Join of two tables by hash partition
    Merge(workloads::MergeArguments),
}

/// Arguments of `bench links`.
#[derive(Args, Debug)]
struct LinksArguments {
    /// The cluster [default: the running one, or a new one for this measurement]
    #[arg(value_name = "NAME")]
    name: Option<ClusterName>,
    #[command(flatten)]
    ways: Ways,
    /// Message sizes, up to 8GiB
    #[arg(long, value_delimiter = ',', default_value = "8,4KiB,64KiB,1MiB,16MiB,64MiB,1GiB")]
    size: Vec<Size>,
    /// Measure both directions of each pair at the same time
    #[arg(long, conflicts_with = "all_to_all")]
    bidirectional: bool,
    /// Measure all pairs at the same time
    #[arg(long)]
    all_to_all: bool,
    /// Compare the largest messages in device memory with what the topology says they should
    /// reach, and name the part of the machine that explains most of what is missing
    #[arg(long, value_enum, value_name = "WHAT")]
    against: Option<Against>,
    /// Machine whose GPUs are simulated if no cluster is running
    #[arg(long, value_name = "SRC", conflicts_with = "name")]
    topology: Option<String>,
    /// Number of workers to start if no cluster is running
    #[arg(long, value_name = "COUNT", conflicts_with = "name", value_parser = positive::<u32>)]
    n_workers: Option<u32>,
    /// Output format [default: heat on a terminal, otherwise table]
    #[arg(short, long, value_enum, value_name = "FORM")]
    output: Option<Form>,
}

/// Runs one of the benchmarks.
pub(super) fn run(arguments: &Arguments) -> Result<Exit, Failure> {
    match &arguments.what {
        What::Links(links) => measure_links(links),
        What::Tasks(tasks) => workloads::tasks(tasks),
        What::Transpose(transpose) => workloads::transpose(transpose),
        What::Merge(merge) => workloads::merge(merge),
    }
}

fn measure_links(links: &LinksArguments) -> Result<Exit, Failure> {
    let (outcome, end) = reach::runtime()?.block_on(links.measure())?;
    let usual = if std::io::stdout().is_terminal() { Form::Heat } else { Form::Table };
    let whole = matches!(end, Ok(None));
    if whole || !outcome.pairs().is_empty() {
        outcome.show(links.output.unwrap_or(usual))?;
    }
    if !whole {
        let count = outcome.pairs().len();
        output::note(&match count {
            0 => "it was ended before anything was measured".to_owned(),
            1 => "it was ended after 1 measurement".to_owned(),
            _ => format!("it was ended after {count} measurements"),
        });
    }
    if let Some(number) = end? {
        return Ok(Exit::Signal(number));
    }
    let failed = |pair: &Pair| matches!(pair.verdict, Verdict::Failed(_));
    Ok(if outcome.pairs().iter().any(failed) { Exit::Failed } else { Exit::Done })
}

/// The sizes of which a worker may hold two messages in host memory, as a receiver does. A worker
/// beyond its limit is killed.
fn with_room(sizes: Vec<u64>, limit: Option<u64>) -> Result<Vec<u64>, Failure> {
    let Some(limit) = limit else { return Ok(sizes) };
    let (fitting, beyond): (Vec<u64>, Vec<u64>) =
        sizes.into_iter().partition(|size| size.saturating_mul(2) <= limit / 10 * 8);
    if !beyond.is_empty() {
        let sizes: Vec<String> = beyond.iter().map(|size| HumanBytes(*size).to_string()).collect();
        let why = format!("a worker may have {} of host memory", HumanBytes(limit));
        let what = format!("{} cannot be measured there: {why}", sizes.join(", "));
        if fitting.is_empty() {
            return Err(Failure::new(Exit::Usage, anyhow!(what)));
        }
        output::note(&what);
    }
    Ok(fitting)
}

/// How a measurement ended: by a signal, or whole.
type End = Result<Option<u8>, Failure>;

impl LinksArguments {
    /// Measures a running cluster, or one that is started just for this measurement. Returns what
    /// was measured, and how it ended.
    async fn measure(&self) -> Result<(Outcome, End), Failure> {
        let own_machine = self.topology.is_some() || self.n_workers.is_some();
        let found = crate::cluster::find(self.name.as_ref());
        if own_machine || (self.name.is_none() && matches!(found, Err(FindError::None { .. }))) {
            let cluster = self.start().await?;
            let measured = self.measure_own(&cluster).await;
            cluster.stop().await;
            return measured;
        }
        let subject = Subject::of(&reach::find(self.name.as_ref())?).map_err(unmeasured)?;
        self.measured(&subject).await
    }

    async fn measure_own(&self, cluster: &Cluster) -> Result<(Outcome, End), Failure> {
        let plan = cluster.plan().clone();
        let root = cluster.paths().root().to_owned();
        let subject = Subject::new(plan.name.clone(), root, plan).map_err(unmeasured)?;
        self.measured(&subject).await
    }

    async fn measured(&self, subject: &Subject) -> Result<(Outcome, End), Failure> {
        // Relative sizes have nothing to be relative to here; only absolute ones make sense.
        let sizes: Vec<u64> = self.size.iter().map(|size| size.of(0)).collect();
        let together = match (self.all_to_all, self.bidirectional) {
            (true, _) => Together::All,
            (_, true) => Together::BothWays,
            _ => Together::None,
        };
        let wanted = self.ways.wanted(subject, false)?;
        if let Some(against) = self.against {
            against.check(subject, wanted.memory)?;
        }
        let usual = if self.against.is_some() { Memory::Device } else { Memory::Host };
        let memory = wanted.memory.unwrap_or(usual);
        let host_sizes = match memory {
            Memory::Device => Vec::new(),
            Memory::Host | Memory::Both => {
                with_room(sizes.clone(), subject.least_memory_limit().await)?
            }
        };
        let wanted = Wanted {
            memory: Some(memory),
            host_sizes,
            device_sizes: sizes,
            together,
            lanes_of_all: false,
            ..wanted
        };
        let (mut signals, mut outcome) = (Signals::new()?, Outcome::of(subject));
        let end = tokio::select! {
            done = measured(&wanted, subject, false, &mut outcome) => done.map(|()| None),
            number = signals.next() => Ok(Some(number)),
        };
        outcome.comparison =
            self.against.and_then(|against| against.compare(subject, outcome.pairs(), together));
        Ok((outcome, end))
    }

    /// Starts a cluster on this machine's GPUs, or on simulated ones.
    async fn start(&self) -> Result<Cluster, Failure> {
        let here = self.topology.is_none() && source::live()?.topology.gpus.len() > 1;
        let mut builder = Cluster::builder();
        if !here {
            let machine = self.topology.as_deref().unwrap_or(SIMULATED);
            let workers = self.n_workers.unwrap_or(SIMULATED_WORKERS);
            output::note(&format!(
                "no cluster is named: {workers} workers of a simulated {machine} are started"
            ));
            builder = builder.simulate(source::load(machine)?).workers(workers);
        } else if let Some(workers) = self.n_workers {
            builder = builder.workers(workers);
        }
        builder.launch().await.map_err(|error| {
            let hint = error.hint();
            Failure::new(Exit::Failed, error).maybe_hint(hint)
        })
    }
}
