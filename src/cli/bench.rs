//! `bench`: what a running cluster can do.

use std::collections::BTreeMap;

use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;

use super::failure::{Exit, Failure};
use super::{output, reach, workloads};
use crate::cluster::Found;
use crate::engine::native;
use crate::engine::native::client::{Client, Measured};
use crate::engine::native::links::{self, Pair, Verdict};
use crate::ids::ClusterName;
use crate::plan::{EngineKind, Plan};
use crate::units::Size;
use crate::wire::native::Measurement;
use crate::wire::peer::MemoryKind;

/// Arguments of `bench`.
#[derive(Args, Debug)]
pub(super) struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand, Debug)]
enum What {
    /// Bandwidth and latency between the workers of a running cluster
    Links(LinksArguments),
    /// Overhead per task: tasks that do nothing
    Tasks(workloads::TasksArguments),
    /// `(x + x.T).sum()` on a matrix in chunks
    Transpose(workloads::TransposeArguments),
    /// Two tables joined by hash partition
    Merge(workloads::MergeArguments),
}

/// Arguments of `bench links`.
#[derive(Args, Debug)]
struct LinksArguments {
    #[command(flatten)]
    target: Target,
    /// Message sizes, up to 8GiB
    #[arg(long, value_delimiter = ',', default_value = "4KiB,64KiB,1MiB,16MiB")]
    size: Vec<Size>,
    /// Both directions of each pair at the same time
    #[arg(long, conflicts_with = "all_to_all")]
    bidirectional: bool,
    /// All pairs at the same time
    #[arg(long)]
    all_to_all: bool,
}

/// Which cluster, pairs and memory; shared with `verify`.
#[derive(Args, Debug)]
pub(super) struct Target {
    /// The cluster; may be left out when only one runs
    #[arg(value_name = "NAME")]
    name: Option<ClusterName>,
    /// Only ways from this worker
    #[arg(long, value_name = "WORKER")]
    from: Option<String>,
    /// Only ways to this worker
    #[arg(long, value_name = "WORKER")]
    to: Option<String>,
    /// Where the bytes lie
    #[arg(long, value_enum, default_value_t)]
    memory: Memory,
    /// Rounds whose median is taken
    #[arg(long, default_value_t = 7, value_name = "COUNT")]
    rounds: u32,
    /// CPUs for the sender's and the receiver's UCX thread while they are measured, like 0,1
    #[arg(long, value_name = "CPU,CPU", value_parser = parse_cpus)]
    pin: Option<(u32, u32)>,
    /// The form to show it in
    #[arg(short, long, value_enum, default_value_t, value_name = "FORM")]
    output: Form,
}

fn parse_cpus(text: &str) -> Result<(u32, u32), String> {
    let wrong = || format!("{text:?} is not two CPU numbers like 0,1");
    let (sender, receiver) = text.split_once(',').ok_or_else(wrong)?;
    Ok((sender.parse().map_err(|_| wrong())?, receiver.parse().map_err(|_| wrong())?))
}

#[derive(ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Memory {
    /// Host memory.
    #[default]
    Host,
    /// Device memory, or a simulated device's.
    Device,
    /// One after the other.
    Both,
}

#[derive(ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Form {
    /// A row for each pair and size.
    #[default]
    Table,
    /// For programs.
    Json,
}

/// The stable JSON form.
#[derive(Serialize)]
struct Document<'a> {
    version: u32,
    name: &'a ClusterName,
    simulated: bool,
    pairs: &'a [Pair],
}

/// Measures what a cluster can do.
pub(super) fn run(arguments: &Arguments) -> Result<Exit, Failure> {
    match &arguments.what {
        What::Links(links) => measure_links(links),
        What::Tasks(tasks) => workloads::tasks(tasks),
        What::Transpose(transpose) => workloads::transpose(transpose),
        What::Merge(merge) => workloads::merge(merge),
    }
}

fn measure_links(links: &LinksArguments) -> Result<Exit, Failure> {
    // A share of nothing in particular: only absolute sizes make sense here.
    let sizes: Vec<u64> = links.size.iter().map(|size| size.of(0)).collect();
    let together = match (links.all_to_all, links.bidirectional) {
        (true, _) => Together::All,
        (_, true) => Together::BothWays,
        _ => Together::None,
    };
    let measured = links.target.measure(&sizes, together)?;
    measured.show(links.target.output)?;
    let failed = |pair: &Pair| matches!(pair.verdict, Verdict::Failed(_));
    Ok(if measured.pairs.iter().any(failed) { Exit::Failed } else { Exit::Done })
}

/// What is measured at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Together {
    /// One way at a time.
    None,
    /// The two ways of a pair.
    BothWays,
    /// Everything.
    All,
}

/// What came of a measurement of many ways.
pub(super) struct Outcome {
    cluster: Found,
    plan: Plan,
    pub(super) pairs: Vec<Pair>,
}

impl Target {
    /// Measures every way that was asked for, at each size.
    pub(super) fn measure(&self, sizes: &[u64], together: Together) -> Result<Outcome, Failure> {
        let cluster = reach::find(self.name.as_ref())?;
        let plan = self.plan(&cluster)?;
        let ways = self.ways(&plan)?;
        let memories: &[MemoryKind] = match self.memory {
            Memory::Host => &[MemoryKind::Host],
            Memory::Device => &[MemoryKind::Device],
            Memory::Both => &[MemoryKind::Host, MemoryKind::Device],
        };
        let mut pairs = Vec::new();
        let run = async {
            let mut client = Client::connect(cluster.paths.root()).await?;
            for &memory in memories {
                let latencies = self.latencies(&mut client, &ways, memory).await?;
                for &size in sizes {
                    for group in groups(&ways, together) {
                        let streams: Vec<Measurement> = group
                            .iter()
                            .map(|(from, to)| {
                                self.pinned(links::stream(from, to, memory, size, self.rounds))
                            })
                            .collect();
                        let results = client.measure(&streams).await?;
                        pairs.extend(rows(&plan, &streams, &results, &latencies));
                    }
                }
            }
            Ok::<(), native::Error>(())
        };
        reach::runtime()?.block_on(run).map_err(unmeasured)?;
        Ok(Outcome { cluster, plan, pairs })
    }

    fn plan(&self, cluster: &Found) -> Result<Plan, Failure> {
        let path = cluster.paths.plan();
        let text = std::fs::read_to_string(&path).map_err(|error| {
            let error =
                anyhow::Error::new(error).context(format!("cannot read {}", path.display()));
            Failure::new(Exit::Failed, error)
        })?;
        let plan: Plan = serde_json::from_str(&text).map_err(|error| {
            let error =
                anyhow::Error::new(error).context(format!("cannot read {}", path.display()));
            Failure::new(Exit::Failed, error)
        })?;
        if plan.engine == EngineKind::Native {
            return Ok(plan);
        }
        let error = anyhow::anyhow!("{} runs the {} engine", cluster.name, plan.engine);
        Err(Failure::new(Exit::Usage, error).hint("only native workers can be measured"))
    }

    /// The ordered pairs that were asked for.
    fn ways(&self, plan: &Plan) -> Result<Vec<(String, String)>, Failure> {
        let names: Vec<&String> = plan.workers.iter().map(|worker| &worker.name).collect();
        for asked in [&self.from, &self.to].into_iter().flatten() {
            if !names.contains(&asked) {
                let error = anyhow::anyhow!("there is no worker {asked}");
                return Err(Failure::new(Exit::Usage, error));
            }
        }
        let wanted = |asked: &Option<String>, name: &String| {
            asked.as_ref().is_none_or(|asked| asked == name)
        };
        let mut ways = Vec::new();
        for from in names.iter().filter(|name| wanted(&self.from, name)) {
            for to in names.iter().filter(|name| wanted(&self.to, name) && name != &from) {
                ways.push(((*from).clone(), (*to).clone()));
            }
        }
        Ok(ways)
    }

    fn pinned(&self, measurement: Measurement) -> Measurement {
        Measurement { cpus: self.pin, ..measurement }
    }

    async fn latencies(
        &self,
        client: &mut Client,
        ways: &[(String, String)],
        memory: MemoryKind,
    ) -> Result<BTreeMap<(String, String), f64>, native::Error> {
        let mut latencies = BTreeMap::new();
        for (from, to) in ways {
            let ping = self.pinned(links::ping(from, to, memory));
            for Measured { result, .. } in client.measure(&[ping]).await? {
                let latency = result.ok().as_ref().and_then(links::latency);
                latencies.extend(latency.map(|latency| ((from.clone(), to.clone()), latency)));
            }
        }
        Ok(latencies)
    }
}

fn unmeasured(error: native::Error) -> Failure {
    let hint = error.hint();
    Failure::new(Exit::Failed, error).maybe_hint(hint)
}

/// The ways that are measured at the same time, group by group.
fn groups(ways: &[(String, String)], together: Together) -> Vec<Vec<(String, String)>> {
    match together {
        Together::All => vec![ways.to_vec()],
        Together::None => ways.iter().map(|way| vec![way.clone()]).collect(),
        Together::BothWays => {
            let first = |(from, to): &&(String, String)| {
                from < to || !ways.contains(&(to.clone(), from.clone()))
            };
            let both = |(from, to): &(String, String)| {
                let back = (to.clone(), from.clone());
                [(from.clone(), to.clone()), back]
                    .into_iter()
                    .filter(|w| ways.contains(w))
                    .collect()
            };
            ways.iter().filter(first).map(both).collect()
        }
    }
}

/// The rows of streams that were measured together, in their order.
fn rows(
    plan: &Plan,
    streams: &[Measurement],
    results: &[Measured],
    latencies: &BTreeMap<(String, String), f64>,
) -> Vec<Pair> {
    let result_of = |stream: &Measurement| {
        results.iter().find(|result| result.from == stream.from && result.to == stream.to)
    };
    streams
        .iter()
        .filter_map(|stream| Some(links::row(plan, stream, result_of(stream)?, latencies)))
        .collect()
}

impl Outcome {
    /// Shows the rows.
    fn show(&self, form: Form) -> Result<(), Failure> {
        let simulated = self.plan.machine.simulated;
        match form {
            Form::Json => output::print_json(&Document {
                version: 1,
                name: &self.cluster.name,
                simulated,
                pairs: &self.pairs,
            }),
            Form::Table => {
                let headings = ["from", "to", "memory", "size", "GB/s", "µs", "lanes", "verdict"];
                output::print(&output::table(&headings, self.pairs.iter().map(cells)))?;
                if simulated {
                    output::note(&"the GPUs are simulated: these are figures of host memory");
                }
                Ok(())
            }
        }
    }
}

impl Target {
    /// Shows what came of its measurement.
    pub(super) fn show(&self, outcome: &Outcome) -> Result<(), Failure> {
        outcome.show(self.output)
    }
}

fn cells(pair: &Pair) -> Vec<String> {
    let number = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.2}"));
    vec![
        pair.from.clone(),
        pair.to.clone(),
        pair.memory.to_string(),
        Size::Bytes(pair.size_bytes).to_string(),
        number(pair.gb_per_s),
        number(pair.latency_us),
        pair.lanes.join(" "),
        pair.verdict.to_string(),
    ]
}
