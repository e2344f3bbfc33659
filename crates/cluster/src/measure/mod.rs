//! Measures the connections of a running cluster, of the native engine or of Dask.
//!
//! Does not judge the figures; `wire::links` does. Its callers show them.
//!
//! *Invariant:* only measurements that were asked to run together overlap; all others run one
//! after another, so that none slows another one down.

mod error;
mod meter;
mod subject;

use std::collections::BTreeMap;
use std::time::Duration;

use super::Handle;
use cuda_cluster_model::plan::Plan;
use cuda_cluster_supervise::{ProcessPhase, ProcessState};
use cuda_cluster_wire::links::trials::{self, Measures as _};
use cuda_cluster_wire::links::{self, Background, Figure, Measured, Pair};
use cuda_cluster_wire::native::Measurement;
use cuda_cluster_wire::peer::MemoryKind;
use cuda_cluster_wire::status::MissingPort;
pub use error::MeasureError;
use meter::Meter;
pub use subject::Subject;

/// Message sizes, in bytes, that are large enough to show a link's bandwidth: host memory, device
/// memory.
const SIZES_BYTES: (u64, u64) = (1 << 20, 64 << 20);

/// As [`SIZES_BYTES`], for Dask, whose Python would be most of a smaller message.
const DASK_SIZES_BYTES: (u64, u64) = (16 << 20, 64 << 20);

/// Rounds of which the median is the figure, unless others are asked for.
pub const ROUNDS: u32 = 7;

/// Time for each connection and size, unless another one is asked for.
pub const BUDGET: Duration = Duration::from_secs(1);

/// An ordered pair of workers: sender and receiver.
pub type Way = (String, String);

/// Figures of a cluster's connections, for each ordered pair of workers, kind of memory and size.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Verification {
    /// The pairs.
    pub pairs: Vec<Pair>,
    /// What was not measured, and why.
    pub notes: Vec<String>,
}

impl Verification {
    /// The pairs that don't use the lanes that they should, or could not be measured.
    pub fn objections(&self) -> impl Iterator<Item = &Pair> {
        self.pairs.iter().filter(|pair| !pair.verdict.is_good(false))
    }
}

/// Kinds of memory to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// Host memory.
    Host,
    /// Device memory, or that of simulated devices.
    Device,
    /// Both, one after the other.
    Both,
}

/// Which measurements run at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Together {
    /// One connection at a time.
    None,
    /// Both directions of a pair.
    BothWays,
    /// All connections.
    All,
}

/// What to measure.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Only connections from this worker.
    pub from: Option<String>,
    /// Only connections to this worker.
    pub to: Option<String>,
    /// `None`: what the workers can move.
    pub memory: Option<Memory>,
    /// Bytes of messages in host memory, one measurement for each.
    pub host_sizes: Vec<u64>,
    /// Likewise in device memory.
    pub device_sizes: Vec<u64>,
    /// Whether latencies are measured, too.
    pub latencies: bool,
    /// Rounds; the median is reported.
    pub rounds: u32,
    /// Time for each connection and size; slow lanes get fewer measurements.
    pub budget: Duration,
    /// CPUs for the native engine's UCX threads of sender and receiver. `None`: for latencies two
    /// different ones of theirs, otherwise all of theirs.
    pub pin: Option<(u32, u32)>,
    /// What runs at the same time.
    pub together: Together,
}

/// How far a measurement is.
#[derive(Clone, Copy, Debug)]
pub enum Step<'a> {
    /// It begins.
    Begins {
        /// How many connections are to be measured, each size and latency counted.
        measurements: usize,
        /// How long that takes; longer over slow lanes.
        longest: Duration,
    },
    /// These connections are being measured.
    Measures(&'a [Way]),
    /// So many measurements are done.
    Done(usize),
}

impl Handle {
    /// Measures every ordered pair of workers, of the native engine or of Dask, and compares the
    /// lanes that they use with those that they should.
    ///
    /// # Errors
    /// If the workers can't be asked to measure. A pair that could not be measured is no error,
    /// but has a verdict that says so.
    pub async fn verify(&self) -> Result<Verification, MeasureError> {
        self.current()?;
        let this = self.clone();
        // Probing may wait for a driver.
        let subject = tokio::task::spawn_blocking(move || Subject::of(&this));
        let subject = subject.await.map_err(|error| MeasureError::Ended(error.into()))??;
        let mut verification = Verification::default();
        let wanted = Wanted::verification(&subject);
        wanted.measure(&subject, &mut |_| (), &mut verification).await?;
        Ok(verification)
    }
}

/// The connections of one kind of memory.
struct Round<'a> {
    memory: MemoryKind,
    ways: Vec<Way>,
    sizes: &'a [u64],
}

impl Wanted {
    /// All connections once, at sizes that show a link's bandwidth, and their latencies.
    pub fn verification(subject: &Subject) -> Self {
        let (host, device) = if subject.is_dask() { DASK_SIZES_BYTES } else { SIZES_BYTES };
        Self {
            from: None,
            to: None,
            memory: None,
            host_sizes: vec![host],
            device_sizes: vec![device],
            latencies: true,
            rounds: ROUNDS,
            budget: BUDGET,
            pin: None,
            together: Together::None,
        }
    }

    /// Measures each requested connection, and tells each step. What is measured is in
    /// `verification` at once, so that it can be shown if the rest fails or this is dropped.
    ///
    /// # Errors
    /// If a requested worker does not exist, or the workers can't be asked to measure.
    pub async fn measure(
        &self,
        subject: &Subject,
        tell: &mut (dyn FnMut(Step<'_>) + Send),
        verification: &mut Verification,
    ) -> Result<(), MeasureError> {
        let ways = self.ordered_pairs(&subject.plan)?;
        tokio::select! {
            measured = self.measure_these(&ways, subject, tell, verification) => measured,
            error = subject.not_answering(&ways) => Err(error),
        }
    }

    async fn measure_these(
        &self,
        ways: &[Way],
        subject: &Subject,
        tell: &mut (dyn FnMut(Step<'_>) + Send),
        verification: &mut Verification,
    ) -> Result<(), MeasureError> {
        let workers = subject.settled(ways).await?;
        let ways = self.of_started(ways, &workers);
        let mut meter = Meter::connect(&subject.root, &subject.plan).await?;
        let rounds = self.rounds(subject, &ways, &mut meter, verification).await;
        tell(self.beginning(&rounds));
        let missing_ports: BTreeMap<String, Vec<MissingPort>> = workers
            .iter()
            .map(|worker| (worker.name.clone(), worker.missing_ports.clone()))
            .collect();
        for Round { memory, ways, sizes } in rounds {
            let latencies = self.latencies(&mut meter, &workers, &ways, memory, tell).await?;
            let background = Background {
                plan: &subject.plan,
                machine: subject.machine.as_ref(),
                latencies: &latencies,
                missing_ports: &missing_ports,
                alone: self.together == Together::None,
            };
            for &size in sizes {
                for group in groups(&ways, self.together) {
                    tell(Step::Measures(&group));
                    let streams = self.streams(&group, memory, size);
                    let streams = trials::fitted(&mut meter, streams, self.budget).await?;
                    let within = trials::patience(&streams, self.budget);
                    let results = meter.measure(&streams, within).await?;
                    verification.pairs.extend(rows(background, &streams, &results));
                    tell(Step::Done(group.len()));
                }
            }
        }
        Ok(())
    }

    /// What is measured in which memory. If nobody asked for device memory, and it can't be
    /// measured, there is a note instead.
    async fn rounds(
        &self,
        subject: &Subject,
        ways: &[Way],
        meter: &mut Meter,
        verification: &mut Verification,
    ) -> Vec<Round<'_>> {
        let round = |memory, sizes| Round {
            memory,
            ways: self.with_memory(&subject.plan, ways, memory),
            sizes,
        };
        let host = || round(MemoryKind::Host, &self.host_sizes[..]);
        let device = round(MemoryKind::Device, &self.device_sizes[..]);
        match self.memory.unwrap_or(subject.memories()) {
            Memory::Host => return vec![host()],
            Memory::Device => return vec![device],
            Memory::Both => {}
        }
        if self.memory.is_none()
            && let Some((_, receiver)) = device.ways.first()
            && let Some(why) = meter.without_device_memory(receiver).await
        {
            let note = format!("device memory was not measured: {receiver}: {why}");
            verification.notes.push(note);
            return vec![host()];
        }
        vec![host(), device]
    }

    fn beginning(&self, rounds: &[Round<'_>]) -> Step<'static> {
        let pings = |ways: usize| if self.latencies { ways } else { 0 };
        let count = |round: &Round<'_>, streams: usize| {
            pings(round.ways.len()) + streams * round.sizes.len()
        };
        let one_by_one: usize =
            rounds.iter().map(|round| count(round, groups(&round.ways, self.together).len())).sum();
        let one_by_one = u32::try_from(one_by_one).unwrap_or(u32::MAX);
        Step::Begins {
            measurements: rounds.iter().map(|round| count(round, round.ways.len())).sum(),
            longest: self.budget.saturating_mul(one_by_one),
        }
    }

    /// The ordered pairs that were requested.
    fn ordered_pairs(&self, plan: &Plan) -> Result<Vec<Way>, MeasureError> {
        let names: Vec<&String> = plan.workers.iter().map(|worker| &worker.name).collect();
        let mut asked = [&self.from, &self.to].into_iter().flatten();
        if let Some(unknown) = asked.find(|asked| !names.contains(asked)) {
            return Err(MeasureError::NoWorker { name: unknown.clone() });
        }
        if let Some(name) = self.from.as_ref().filter(|_| self.from == self.to) {
            return Err(MeasureError::Itself { name: name.clone() });
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

    /// The pairs whose workers are wanted now: a cluster that was scaled, or adapts to its work,
    /// rests others.
    fn of_started(&self, ways: &[Way], workers: &[ProcessState]) -> Vec<Way> {
        use ProcessPhase::{Stopped, Waiting};
        let rests = |name: &String| {
            let asked = [&self.from, &self.to].into_iter().flatten().any(|asked| asked == name);
            let resting = |worker: &ProcessState| {
                worker.name == *name && matches!(worker.state, Waiting | Stopped)
            };
            !asked && workers.iter().any(resting)
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

    /// The measurements of connections at the same time.
    fn streams(&self, group: &[Way], memory: MemoryKind, size: u64) -> Vec<Measurement> {
        let stream = |(from, to): &Way| Measurement {
            cpus: self.pin,
            ..links::stream(from, to, memory, size, self.rounds)
        };
        let mut streams: Vec<Measurement> = group.iter().map(stream).collect();
        if let (Together::BothWays, [_, back]) = (self.together, &mut streams[..]) {
            // A worker keeps its CPU in both directions.
            back.cpus = back.cpus.map(|(first, second)| (second, first));
        }
        streams
    }

    async fn latencies(
        &self,
        meter: &mut Meter,
        workers: &[ProcessState],
        ways: &[Way],
        memory: MemoryKind,
        tell: &mut (dyn FnMut(Step<'_>) + Send),
    ) -> Result<BTreeMap<Way, Figure>, MeasureError> {
        let mut latencies = BTreeMap::new();
        for way in ways.iter().filter(|_| self.latencies) {
            tell(Step::Measures(std::slice::from_ref(way)));
            let (from, to) = way;
            let cpus =
                |name: &String| workers.iter().find(|worker| worker.name == *name)?.cpus.as_ref();
            let apart = || links::cpus_apart(cpus(from)?, cpus(to)?);
            let ping = links::ping(from, to, memory);
            let ping = meter.ping(Measurement { cpus: self.pin.or_else(apart), ..ping });
            let ping = trials::fitted(meter, vec![ping], self.budget).await?;
            let within = trials::patience(&ping, self.budget);
            for Measured { result, .. } in meter.measure(&ping, within).await? {
                let latency = result.ok().as_ref().and_then(links::latency);
                latencies.extend(latency.map(|latency| (way.clone(), latency)));
            }
            tell(Step::Done(1));
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
