//! Measures the connections of a cluster, for `bench links` and `verify`.
//!
//! Does not judge the results; `wire::links` does. [`outcome`] shows them.
//!
//! *Invariant:* only measurements that the command asked to run together overlap; all others run
//! one after another.

mod outcome;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::failure::{Exit, Failure};
use super::flags::whole;
use super::meter::Meter;
use super::progress::Measuring;
use super::{output, source};
use crate::cluster::{self, Control, Handle};
use crate::ids::ClusterName;
use crate::os::run_directory::Paths;
use crate::plan::{EnginePlan, Plan, WorkerPlan};
use crate::supervise::{ClusterState, ProcessPhase, ProcessState};
use crate::topology::Topology;
use crate::units::Span;
use crate::wire::links::trials::{self, Measures as _};
use crate::wire::links::{self, Background, Figure, Measured, Pair};
use crate::wire::native::Measurement;
use crate::wire::peer::MemoryKind;
use crate::wire::status::MissingPort;
pub(super) use outcome::{Form, Outcome};

/// An ordered pair of workers.
type Way = (String, String);

/// What to measure: connections and kinds of memory.
#[derive(Args, Clone, Debug)]
pub(super) struct Ways {
    /// Measure only connections from this worker
    #[arg(long, value_name = "WORKER")]
    from: Option<String>,
    /// Measure only connections to this worker
    #[arg(long, value_name = "WORKER")]
    to: Option<String>,
    /// Memory to measure [default: host; 'verify' also measures GPUs if there are any, under Dask
    /// those that RMM reaches]
    #[arg(long, value_enum)]
    memory: Option<Memory>,
    /// Number of rounds; the median is reported
    #[arg(long, default_value_t = 7, value_name = "COUNT", value_parser = whole::<u32>)]
    rounds: u32,
    /// Time limit per connection and size; slow lanes get fewer measurements
    #[arg(long, default_value = "1s", value_name = "SPAN")]
    budget: Span,
    /// CPUs for the native engine's UCX threads of sender and receiver, such as 0,1
    /// [default: for latencies two different ones of theirs, otherwise all of theirs]
    #[arg(long, value_name = "CPU,CPU", value_parser = parse_cpus)]
    pin: Option<(u32, u32)>,
    /// Whether another progress display is on the screen.
    #[arg(skip)]
    quiet: bool,
}

impl Default for Ways {
    fn default() -> Self {
        Self {
            from: None,
            to: None,
            memory: None,
            rounds: 7,
            budget: Span::secs(1),
            pin: None,
            quiet: true,
        }
    }
}

fn parse_cpus(text: &str) -> Result<(u32, u32), String> {
    let wrong = || format!("{text:?} is not two CPU numbers like 0,1");
    let (sender, receiver) = text.split_once(',').ok_or_else(wrong)?;
    Ok((sender.parse().map_err(|_| wrong())?, receiver.parse().map_err(|_| wrong())?))
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Memory {
    /// Host memory
    Host,
    /// Device memory, or that of simulated devices
    Device,
    /// Both, one after the other
    Both,
}

/// Which measurements run at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Together {
    /// One connection at a time.
    None,
    /// Both directions of a pair.
    BothWays,
    /// All connections.
    All,
}

/// A cluster to measure, of the native engine or of Dask.
pub(super) struct Subject {
    name: ClusterName,
    root: PathBuf,
    plan: Plan,
    /// The machine that contains its GPUs; `None` if they are simulated.
    machine: Option<Topology>,
}

impl Subject {
    /// The subject for a running cluster.
    pub(super) fn found(cluster: &Handle) -> Result<Self, Failure> {
        let path = cluster.paths.plan();
        let plan = read_plan(&path).map_err(|error| {
            Failure::new(Exit::Failed, error.context(format!("cannot read {}", path.display())))
        })?;
        Self::new(cluster.name.clone(), cluster.paths.root().to_owned(), plan)
    }

    /// The subject for a cluster with this plan and run directory.
    pub(super) fn new(name: ClusterName, root: PathBuf, plan: Plan) -> Result<Self, Failure> {
        if matches!(plan.engine, EnginePlan::Command(_)) {
            let error = anyhow::anyhow!("{name} runs the command engine");
            let failure = Failure::new(Exit::Usage, error);
            let hint = "its ranks answer no questions: only native and Dask workers are measured";
            return Err(failure.hint(hint));
        }
        let machine = match plan.machine.simulated {
            true => None,
            false => Some(source::live()?.topology),
        };
        Ok(Self { name, root, plan, machine })
    }

    /// Whether its workers are Dask's.
    pub(super) fn is_dask(&self) -> bool {
        matches!(self.plan.engine, EnginePlan::Dask(_))
    }

    /// All kinds of memory that the workers can move.
    pub(super) fn memories(&self) -> Memory {
        let has_gpu = |worker: &&WorkerPlan| worker.gpu.is_some();
        let gpus = self.plan.workers.iter().filter(has_gpu).count();
        if gpus > 1 && self.machine.is_some() { Memory::Both } else { Memory::Host }
    }
}

fn read_plan(path: &Path) -> anyhow::Result<Plan> {
    Ok(Plan::parse(&std::fs::read_to_string(path)?)?)
}

/// Time between two checks whether the measured processes still answer.
const LOOK: Duration = Duration::from_secs(2);

/// A measurement that may take this long is announced.
const LONG: Duration = Duration::from_secs(60);

/// Returns a failure as soon as a process that the measurement needs stops answering.
async fn not_answering(subject: &Subject, ways: &[Way]) -> Failure {
    let control = Control::new(Paths::at(&subject.root).control());
    let needed = |process: &&ProcessState| {
        let name = &process.name;
        name == cluster::SCHEDULER || ways.iter().any(|(from, to)| name == from || name == to)
    };
    loop {
        // A missing supervisor is no reason to fail the measurement.
        if let Ok(state) = control.read::<ClusterState>("/v1/state").await
            && let Some(process) = state.unresponsive().find(needed)
        {
            let error = anyhow::anyhow!("{} is {}", process.name, process.standing());
            let hint = format!(
                "let it go on (kill -CONT), or: cuda-cluster restart {} {}",
                subject.name, process.name
            );
            return Failure::new(Exit::Failed, error).hint(hint);
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// The workers as they are now; none without a supervisor to tell.
async fn workers(subject: &Subject) -> Vec<ProcessState> {
    let control = Control::new(Paths::at(&subject.root).control());
    let state = control.read::<ClusterState>("/v1/state?fresh=true").await;
    state.map(|state| state.workers).unwrap_or_default()
}

impl Ways {
    /// Measures each requested connection at the sizes that fit the memory; `usual` is the memory
    /// measured unless another kind was requested. What is measured is in the outcome at once, so
    /// that it can be shown if the rest fails or this is dropped.
    pub(super) async fn measure(
        &self,
        subject: &Subject,
        usual: Memory,
        sizes: impl Fn(MemoryKind) -> Vec<u64>,
        together: Together,
        outcome: &mut Outcome,
    ) -> Result<(), Failure> {
        if self.pin.is_some() && subject.is_dask() {
            let error = anyhow::anyhow!("--pin: Dask's workers measure on their event loops");
            let failure = Failure::new(Exit::Usage, error);
            return Err(failure.hint("leave it out: it moves the native engine's UCX threads"));
        }
        let ways = self.ordered_pairs(&subject.plan)?;
        let memory = self.memory.unwrap_or(usual);
        tokio::select! {
            measured = self.measure_these(&ways, subject, memory, sizes, together, outcome) => measured,
            failure = not_answering(subject, &ways) => Err(failure),
        }
    }

    async fn measure_these(
        &self,
        ways: &[Way],
        subject: &Subject,
        memory: Memory,
        sizes: impl Fn(MemoryKind) -> Vec<u64>,
        together: Together,
        outcome: &mut Outcome,
    ) -> Result<(), Failure> {
        let workers = workers(subject).await;
        let ways = &self.of_started(&subject.plan, ways, &workers);
        let mut meter = Meter::connect(&subject.root, &subject.plan).await?;
        let mut memories = match memory {
            Memory::Host => vec![MemoryKind::Host],
            Memory::Device => vec![MemoryKind::Device],
            Memory::Both => vec![MemoryKind::Host, MemoryKind::Device],
        };
        if memory == Memory::Both && self.memory.is_none() {
            let with_gpu = self.with_memory(&subject.plan, ways, MemoryKind::Device);
            let receiver = with_gpu.first().map(|(_, to)| to);
            if let Some(receiver) = receiver
                && let Some(why) = meter.without_device_memory(receiver).await
            {
                outcome.notes.push(format!("device memory was not measured: {receiver}: {why}"));
                memories.pop();
            }
        }
        let missing_ports: BTreeMap<String, Vec<MissingPort>> = workers
            .iter()
            .map(|worker| (worker.name.clone(), worker.missing_ports.clone()))
            .collect();
        let all: usize =
            memories.iter().map(|memory| ways.len() * (1 + sizes(*memory).len())).sum();
        self.tell_longest(
            all,
            memories
                .iter()
                .map(|memory| ways.len() + groups(ways, together).len() * sizes(*memory).len())
                .sum(),
        );
        let progress = Measuring::new(all as u64, self.quiet);
        for &memory in &memories {
            let ways = self.with_memory(&subject.plan, ways, memory);
            let latencies = self.latencies(&mut meter, &workers, &ways, memory, &progress);
            let latencies = latencies.await?;
            let background = Background {
                plan: &subject.plan,
                machine: subject.machine.as_ref(),
                latencies: &latencies,
                missing_ports: &missing_ports,
                alone: together == Together::None,
            };
            for size in sizes(memory) {
                for group in groups(&ways, together) {
                    let stream = |(from, to): &Way| {
                        self.pinned(links::stream(from, to, memory, size, self.rounds))
                    };
                    let mut streams: Vec<Measurement> = group.iter().map(stream).collect();
                    if let (Together::BothWays, [_, back]) = (together, &mut streams[..]) {
                        // A worker keeps its CPU in both directions.
                        back.cpus = back.cpus.map(|(first, second)| (second, first));
                    }
                    progress.show(&group);
                    let streams = trials::fitted(&mut meter, streams, self.budget.0).await?;
                    let results =
                        meter.measure(&streams, trials::patience(&streams, self.budget.0)).await?;
                    outcome.pairs.extend(rows(background, &streams, &results));
                    progress.done(group.len() as u64);
                }
            }
        }
        Ok(())
    }

    /// Tells how long the measurements take at most, if that is more than somebody expects of a
    /// command that shows nothing; `one_by_one` of them are not at the same time as others.
    fn tell_longest(&self, all: usize, one_by_one: usize) {
        let longest = u32::try_from(one_by_one).map(|count| self.budget.0.saturating_mul(count));
        if let Ok(longest) = longest
            && longest >= LONG
            && !self.quiet
        {
            output::note(&format!(
                "{all} measurements may take {} with a budget of {} each, and longer over slow \
                 lanes; --budget, --from and --to shorten this",
                Span(longest),
                self.budget
            ));
        }
    }

    /// The ordered pairs that were requested.
    fn ordered_pairs(&self, plan: &Plan) -> Result<Vec<Way>, Failure> {
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

    /// The pairs whose workers are wanted now: a Dask cluster that adapts to its work rests others.
    fn of_started(&self, plan: &Plan, ways: &[Way], workers: &[ProcessState]) -> Vec<Way> {
        use ProcessPhase::{Stopped, Waiting};
        let rests = |name: &String| {
            let asked = [&self.from, &self.to].into_iter().flatten().any(|asked| asked == name);
            let resting = |worker: &ProcessState| {
                worker.name == *name && matches!(worker.state, Waiting | Stopped)
            };
            matches!(plan.engine, EnginePlan::Dask(_)) && !asked && workers.iter().any(resting)
        };
        ways.iter().filter(|(from, to)| !rests(from) && !rests(to)).cloned().collect()
    }

    /// The pairs that have this kind of memory at both ends; all pairs if the kind was requested
    /// explicitly.
    fn with_memory(&self, plan: &Plan, ways: &[Way], memory: MemoryKind) -> Vec<Way> {
        let asked = self.memory == Some(Memory::Device);
        let has = |name: &String| {
            let worker = plan.workers.iter().find(|worker| worker.name == *name);
            asked || memory == MemoryKind::Host || worker.is_some_and(|worker| worker.gpu.is_some())
        };
        ways.iter().filter(|(from, to)| has(from) && has(to)).cloned().collect()
    }

    fn pinned(&self, measurement: Measurement) -> Measurement {
        Measurement { cpus: self.pin, ..measurement }
    }

    async fn latencies(
        &self,
        meter: &mut Meter,
        workers: &[ProcessState],
        ways: &[Way],
        memory: MemoryKind,
        progress: &Measuring,
    ) -> Result<BTreeMap<Way, Figure>, Failure> {
        let mut latencies = BTreeMap::new();
        for (from, to) in ways {
            progress.show(&[(from.clone(), to.clone())]);
            let cpus =
                |name: &String| workers.iter().find(|worker| worker.name == *name)?.cpus.as_ref();
            let apart = || links::cpus_apart(cpus(from)?, cpus(to)?);
            let ping = links::ping(from, to, memory);
            let ping = meter.ping(Measurement { cpus: self.pin.or_else(apart), ..ping });
            let ping = trials::fitted(meter, vec![ping], self.budget.0).await?;
            let within = trials::patience(&ping, self.budget.0);
            for Measured { result, .. } in meter.measure(&ping, within).await? {
                let latency = result.ok().as_ref().and_then(links::latency);
                latencies.extend(latency.map(|latency| ((from.clone(), to.clone()), latency)));
            }
            progress.done(1);
        }
        Ok(latencies)
    }
}

/// Splits the connections into groups that are measured at the same time.
fn groups(ways: &[Way], together: Together) -> Vec<Vec<Way>> {
    match together {
        Together::All => vec![ways.to_vec()],
        Together::None => ways.iter().map(|way| vec![way.clone()]).collect(),
        Together::BothWays => {
            let back = |(from, to): &Way| (to.clone(), from.clone());
            let first = |way: &&Way| way.0 < way.1 || !ways.contains(&back(way));
            let both = |way: &Way| {
                let pair = [way.clone(), back(way)];
                pair.into_iter().filter(|way| ways.contains(way)).collect()
            };
            ways.iter().filter(first).map(both).collect()
        }
    }
}

/// The results of streams that were measured together, in the order of the streams.
fn rows(background: Background<'_>, streams: &[Measurement], results: &[Measured]) -> Vec<Pair> {
    let result_of = |stream: &Measurement| {
        results.iter().find(|result| result.from == stream.from && result.to == stream.to)
    };
    let row = |stream| Some(links::row(background, stream, result_of(stream)?));
    streams.iter().filter_map(row).collect()
}
