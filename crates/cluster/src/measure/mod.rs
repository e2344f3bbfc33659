//! Measures the connections of a running cluster, of the native engine or of Dask.
//!
//! Does not judge the figures; `wire::links` does. Its callers show them.
//!
//! *Invariant:* measurements overlap only if that was asked for, or if they have nothing in common
//! (see `order`), so that none slows another one down.

mod between;
mod error;
mod meter;
mod order;
mod sample;
mod subject;
mod verification;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::Handle;
pub use between::Between;
use cuda_cluster_model::cpuset::CpuSet;
use cuda_cluster_model::plan::Plan;
use cuda_cluster_supervise::{ProcessPhase, ProcessState};
use cuda_cluster_wire::links::trials::{self, Measures as _};
use cuda_cluster_wire::links::{self, Background, Expected, Figure, Figures, Measured, Pair};
use cuda_cluster_wire::native::Measurement;
use cuda_cluster_wire::peer::MemoryKind;
use cuda_cluster_wire::status::MissingPort;
pub use error::MeasureError;
use meter::Meter;
use order::Need;
pub use subject::Subject;
use verification::Sorted;
pub use verification::Verification;

/// Message sizes, in bytes, that are large enough to show a link's bandwidth: host memory, device
/// memory.
const SIZES_BYTES: (u64, u64) = (1 << 20, 64 << 20);

/// As [`SIZES_BYTES`], for Dask, whose Python would be most of a smaller message.
const DASK_SIZES_BYTES: (u64, u64) = (16 << 20, 64 << 20);

/// Rounds of which the median is the figure, unless others are asked for.
pub const ROUNDS: u32 = 7;

/// Time for each connection and size, unless another one is asked for.
pub const BUDGET: Duration = Duration::from_secs(1);

/// Connections whose lanes are looked at together.
const GLIMPSES: usize = 16;

/// What the lanes of a connection take to look at, at most: half of it in host memory on two cores.
const GLIMPSE: Duration = Duration::from_millis(1);

/// Time for all figures, unless another one is asked for. The lanes of the other connections take
/// a few milliseconds each.
pub const WITHIN: Duration = Duration::from_secs(20);

/// An ordered pair of workers: sender and receiver.
pub type Way = (String, String);

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
    /// One connection at a time, and others that cannot disturb it.
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
    /// Time for all of it; `None`: as long as it takes.
    pub within: Option<Duration>,
    /// Whether connections for whose figures this time does not suffice are asked for their lanes.
    pub lanes_of_all: bool,
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
    /// The time is over: of the other connections only the lanes are looked at.
    Hurries,
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
        let wanted = Wanted { within: None, ..Wanted::verification(&subject) };
        wanted.measure(&subject, &mut |_| (), &mut verification).await?;
        verification.between = wanted.between(&subject, true, &mut |_, _| ()).await?;
        Ok(verification)
    }
}

/// The connections of one kind of memory.
struct Round<'a> {
    memory: MemoryKind,
    passes: Vec<Vec<Way>>,
    sizes: &'a [u64],
    /// Connections without figures.
    left_out: Vec<Way>,
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
            within: Some(WITHIN),
            lanes_of_all: true,
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
        let sorted = Sorted { verification, ways: &ways };
        tokio::select! {
            measured = self.measure_these(&ways, subject, tell, sorted.verification) => measured,
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
        let meter = Meter::connect(&subject.root, &subject.plan).await?;
        let missing_ports: BTreeMap<String, Vec<MissingPort>> = workers
            .iter()
            .map(|worker| (worker.name.clone(), worker.missing_ports.clone()))
            .collect();
        let mut work = Work { wanted: self, subject, workers: &workers, meter, missing_ports };
        let mut rounds = self.rounds(subject, &ways, &mut work.meter, verification).await;
        tell(self.beginning(&rounds));
        // Heeds the control group of this program, which is usually the cluster's.
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let begun = Instant::now();
        let is_over = |verification: &Verification| {
            let is_over = self.within.is_some_and(|within| begun.elapsed() >= within);
            is_over && !verification.pairs.is_empty()
        };
        // Each pass in each kind of memory, so that none is left out before the others.
        let longest = rounds.iter().map(|round| round.passes.len()).max().unwrap_or_default();
        for at in 0..longest {
            for round in &mut rounds {
                let Some(pass) = round.passes.get(at) else { continue };
                let need = |way: &Way| work.need(way, round.memory, round.sizes);
                for group in order::groups(pass, self.together, cores, need) {
                    if is_over(verification) {
                        round.left_out.extend(group);
                    } else {
                        work.measure(round, &group, tell, verification).await?;
                    }
                }
            }
        }
        verification.left_out = rounds.iter().map(|round| round.left_out.len()).sum();
        if verification.left_out > 0 && self.lanes_of_all {
            tell(Step::Hurries);
            for round in &rounds {
                work.glimpse(round, verification).await?;
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
        let names: Vec<&str> =
            subject.plan.workers.iter().map(|worker| worker.name.as_str()).collect();
        let round = |memory, sizes| {
            let ways = self.with_memory(&subject.plan, ways, memory);
            let passes = match self.together {
                Together::None => order::passes(&ways, &names),
                _ => vec![ways],
            };
            Round { memory, passes, sizes, left_out: Vec::new() }
        };
        let host = || round(MemoryKind::Host, &self.host_sizes[..]);
        let device = round(MemoryKind::Device, &self.device_sizes[..]);
        match self.memory.unwrap_or(subject.memories()) {
            Memory::Host => return vec![host()],
            Memory::Device => return vec![device],
            Memory::Both => {}
        }
        if self.memory.is_none()
            && let Some((_, receiver)) = device.passes.iter().flatten().next()
            && let Some(why) = meter.without_device_memory(receiver).await
        {
            let note = format!("device memory was not measured: {receiver}: {why}");
            verification.notes.push(note);
            return vec![host()];
        }
        vec![host(), device]
    }

    fn beginning(&self, rounds: &[Round<'_>]) -> Step<'static> {
        let of_each = |round: &Round<'_>| usize::from(self.latencies) + round.sizes.len();
        let ways = |round: &Round<'_>| round.passes.iter().map(Vec::len).sum::<usize>();
        let measurements = rounds.iter().map(|round| of_each(round) * ways(round)).sum();
        let times = |each: Duration, many: usize| {
            each.saturating_mul(u32::try_from(many).unwrap_or(u32::MAX))
        };
        let all = times(self.budget, measurements);
        let longest = match self.within.filter(|within| *within < all) {
            Some(within) if self.lanes_of_all => {
                let lanes = times(GLIMPSE, rounds.iter().map(ways).sum());
                // It is an estimate: whole seconds.
                let seconds = within.saturating_add(lanes).as_secs_f64().ceil();
                Duration::from_secs_f64(seconds).min(all)
            }
            Some(within) => within,
            None => all,
        };
        Step::Begins { measurements, longest }
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
}

/// What is measured, with whom, and how it is judged.
struct Work<'a> {
    wanted: &'a Wanted,
    subject: &'a Subject,
    workers: &'a [ProcessState],
    meter: Meter,
    missing_ports: BTreeMap<String, Vec<MissingPort>>,
}

impl Work<'_> {
    /// What a connection has to itself while it is measured.
    fn need(&self, (from, to): &Way, memory: MemoryKind, sizes: &[u64]) -> Need {
        let Subject { plan, machine, .. } = self.subject;
        if self.wanted.pin.is_some() {
            // All would be on the same two CPUs.
            return Need::Everything;
        }
        if memory == MemoryKind::Host {
            let ends = (self.cpus_of(from), self.cpus_of(to));
            return match ends {
                (Some(from), Some(to)) => Need::Cores([from.clone(), to.clone()]),
                _ => Need::Everything,
            };
        }
        let gpu = |name: &str| {
            let worker = plan.workers.iter().find(|worker| worker.name == name)?;
            worker.gpu.as_ref().map(|gpu| gpu.index.0)
        };
        let ping = self.wanted.latencies.then_some(links::PING_BYTES);
        let is_mapped = ping.iter().chain(sizes).all(|&size| {
            let expected = Expected::of(plan, machine.as_ref(), [from, to], memory, size);
            expected == Expected::CudaIpc
        });
        let link = links::limit(machine.as_ref(), plan, from, to, memory).map(|limit| limit.link);
        match (gpu(from), gpu(to), link) {
            // Each GPU's NVLinks are its own, to a peer and to a switch.
            (Some(from), Some(to), Some(link))
                if from != to && is_mapped && link.starts_with("NV") =>
            {
                Need::Gpus([from, to])
            }
            _ => Need::Everything,
        }
    }

    fn cpus_of(&self, name: &str) -> Option<&CpuSet> {
        self.workers.iter().find(|worker| worker.name == name)?.cpus.as_ref()
    }

    /// The figures of the connections of a group, at each size.
    async fn measure(
        &mut self,
        round: &Round<'_>,
        group: &[Way],
        tell: &mut (dyn FnMut(Step<'_>) + Send),
        verification: &mut Verification,
    ) -> Result<(), MeasureError> {
        let budget = self.wanted.budget;
        let latencies = self.latencies(group, round.memory, tell).await?;
        for &size in round.sizes {
            tell(Step::Measures(group));
            let streams = self.wanted.streams(group, round.memory, size);
            let streams = trials::fitted(&mut self.meter, streams, budget).await?;
            let results = self.meter.measure(&streams, trials::patience(&streams, budget)).await?;
            let figures = match self.wanted.together {
                Together::None => Figures::Alone,
                _ => Figures::Beside,
            };
            verification.pairs.extend(self.rows(figures, &latencies, &streams, &results));
            tell(Step::Done(group.len()));
        }
        Ok(())
    }

    /// The lanes of the connections without figures.
    async fn glimpse(
        &mut self,
        round: &Round<'_>,
        verification: &mut Verification,
    ) -> Result<(), MeasureError> {
        let Some(&size) = round.sizes.first() else { return Ok(()) };
        for group in round.left_out.chunks(GLIMPSES) {
            let glimpse = |(from, to): &Way| links::glimpse(from, to, round.memory, size);
            let streams: Vec<Measurement> = group.iter().map(glimpse).collect();
            let within = trials::patience(&streams, self.wanted.budget);
            let results = self.meter.measure(&streams, within).await?;
            let none = BTreeMap::new();
            verification.pairs.extend(self.rows(Figures::Ignored, &none, &streams, &results));
        }
        Ok(())
    }

    fn rows(
        &self,
        figures: Figures,
        latencies: &BTreeMap<Way, Figure>,
        streams: &[Measurement],
        results: &[Measured],
    ) -> Vec<Pair> {
        let Subject { plan, machine, .. } = self.subject;
        let (machine, missing_ports) = (machine.as_ref(), &self.missing_ports);
        rows(Background { plan, machine, latencies, missing_ports, figures }, streams, results)
    }

    /// Latencies, one after another, because each needs two cores for itself.
    async fn latencies(
        &mut self,
        group: &[Way],
        memory: MemoryKind,
        tell: &mut (dyn FnMut(Step<'_>) + Send),
    ) -> Result<BTreeMap<Way, Figure>, MeasureError> {
        let mut latencies = BTreeMap::new();
        let budget = self.wanted.budget;
        for way in group.iter().filter(|_| self.wanted.latencies) {
            tell(Step::Measures(std::slice::from_ref(way)));
            let (from, to) = way;
            let apart = || links::cpus_apart(self.cpus_of(from)?, self.cpus_of(to)?);
            let cpus = self.wanted.pin.or_else(apart);
            let ping = self.meter.ping(Measurement { cpus, ..links::ping(from, to, memory) });
            let ping = trials::fitted(&mut self.meter, vec![ping], budget).await?;
            let within = trials::patience(&ping, budget);
            for Measured { result, .. } in self.meter.measure(&ping, within).await? {
                let latency = result.ok().as_ref().and_then(links::latency);
                latencies.extend(latency.map(|latency| (way.clone(), latency)));
            }
            tell(Step::Done(1));
        }
        Ok(latencies)
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
