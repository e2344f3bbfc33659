//! Compares what links between workers should carry with what was measured, as rows of a report.
//!
//! Pure. Does not measure; each engine's client does.
//!
//! *Invariant:* every verdict except `ok` says what was expected and what was found.

pub mod between;
mod expected;
mod limits;
pub mod trials;

use std::collections::BTreeMap;
use std::fmt;

use serde::{Serialize, Serializer};

use self::expected::broken_fabric;
pub use self::expected::{Expected, missing, proven};
pub use self::limits::{Limit, between, limit, to_host};
use crate::native::{Mapped, Measurement, Quantity, Samples};
use crate::peer::MemoryKind;
use crate::status::MissingPort;
use cuda_cluster_model::cpuset::CpuSet;
use cuda_cluster_model::plan::{EnginePlan, Plan};
use cuda_cluster_model::topology::Topology;

/// Bytes that a round moves, unless a single message is longer.
const ROUND_BYTES: u64 = 64 << 20;

/// Most messages of a round.
const ROUND_MESSAGES: u64 = 10_000;

/// Messages of a latency measurement.
const PINGS: u32 = 2_000;

/// Bytes of a latency measurement's messages.
pub const PING_BYTES: u64 = 8;

/// More bandwidth than one process can copy from another's host memory, in GB/s: a measurement
/// above it is wrong.
const IMPLAUSIBLE_IN_HOST_MEMORY: f64 = 500.0;

/// How far a figure may exceed a link's limit, because clocks and vendors round.
const TOLERANCE: f64 = 1.05;

/// Smallest message that shows a link's bandwidth, in bytes.
const TELLING_BYTES: u64 = 1 << 20;

/// As [`TELLING_BYTES`], for Dask: its Python takes longer than smaller messages do.
const DASK_TELLING_BYTES: u64 = 16 << 20;

/// A device's link is slow below this share of the usual bandwidth.
const SLOW_DEVICE: f64 = 0.5;

/// Host memory is slow below this share. Machines differ far more in this than in their links, and
/// a busy machine is not a broken one.
const SLOW_HOST: f64 = 0.1;

/// The outcome of one measurement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Measured {
    /// The sender.
    pub from: String,
    /// The receiver.
    pub to: String,
    /// What was measured, or why the measurement failed.
    pub result: Result<Samples, String>,
    /// Why a better lane was not used, if the receiver knows.
    pub cause: Option<String>,
}

/// The result of comparing a pair with what was expected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It uses the expected lanes, and is about as fast as they can be.
    Ok,
    /// The expected lane was used, but is far slower than it should be.
    Slow(String),
    /// Another lane than the expected one was used, and why.
    Downgraded(String),
    /// The figure is impossible.
    Implausible(String),
    /// Nothing was measured, for this reason.
    Failed(String),
}

impl Verdict {
    /// Whether it is as expected; a slow link is, unless `strict`.
    pub fn is_good(&self, strict: bool) -> bool {
        match self {
            Verdict::Ok => true,
            Verdict::Slow(_) => !strict,
            Verdict::Downgraded(_) | Verdict::Implausible(_) | Verdict::Failed(_) => false,
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Verdict::Ok => f.write_str("ok"),
            Verdict::Slow(why) => write!(f, "slow: {why}"),
            Verdict::Downgraded(why) => write!(f, "downgraded: {why}"),
            Verdict::Implausible(why) => write!(f, "implausible: {why}"),
            Verdict::Failed(why) => write!(f, "failed: {why}"),
        }
    }
}

impl Serialize for Verdict {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// One ordered pair of workers at one message size.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Pair {
    pub from: String,
    pub to: String,
    /// The memory that the messages are in.
    pub memory: MemoryKind,
    /// The lanes of the connection, by UCX's names; those of Dask's other protocols by theirs.
    pub lanes: Vec<String>,
    /// What should carry the data.
    #[serde(serialize_with = "as_text")]
    pub expected: Expected,
    /// Bytes of each message.
    pub size_bytes: u64,
    /// Bandwidth of the median round, in 10⁹ bytes per second; `None` if only the lanes were seen.
    pub gb_per_s: Option<f64>,
    /// Bandwidth over all rounds.
    pub mean_gb_per_s: Option<f64>,
    /// Median one-way latency of a small message, in microseconds.
    pub latency_us: Option<f64>,
    /// Mean one-way latency.
    pub mean_latency_us: Option<f64>,
    /// What carries the bytes, by the topology: `NV18`, `host memory`.
    pub link: Option<String>,
    /// Most that the link can carry in one direction, if known.
    pub limit_gb_per_s: Option<f64>,
    /// What good software measures on it.
    pub usual_gb_per_s: Option<f64>,
    /// Whether the figures are as expected.
    pub verdict: Verdict,
}

fn as_text<S: Serializer>(value: &impl fmt::Display, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

/// A stream of messages of this size.
pub fn stream(from: &str, to: &str, memory: MemoryKind, size: u64, rounds: u32) -> Measurement {
    let messages = (ROUND_BYTES / size.max(1)).clamp(1, ROUND_MESSAGES);
    Measurement {
        from: from.to_owned(),
        to: to.to_owned(),
        memory,
        what: Quantity::Bandwidth,
        size,
        messages: u32::try_from(messages).unwrap_or(1),
        rounds,
        warmup: 2,
        cpus: None,
    }
}

/// A message that shows the lanes of a connection, and no figure.
pub fn glimpse(from: &str, to: &str, memory: MemoryKind, size: u64) -> Measurement {
    Measurement { messages: 1, warmup: 0, ..stream(from, to, memory, size, 1) }
}

/// A ping-pong of small messages.
pub fn ping(from: &str, to: &str, memory: MemoryKind) -> Measurement {
    Measurement {
        what: Quantity::Latency,
        size: PING_BYTES,
        messages: 1,
        rounds: PINGS,
        warmup: PINGS / 10,
        ..stream(from, to, memory, PING_BYTES, 1)
    }
}

/// A CPU for the sender and another for the receiver of pings; `None` if they have only one between
/// them. Two workers on one CPU take turns: then the kernel's switch from one to the other is
/// measured, which takes ten times as long as the connection.
pub fn cpus_apart(from: &CpuSet, to: &CpuSet) -> Option<(u32, u32)> {
    let ends = |cpus: &CpuSet| Some((cpus.first()?, cpus.iter().last()?));
    let ((first, last), (other_first, other_last)) = (ends(from)?, ends(to)?);
    // The first and the last are rarely hyperthreads of one core.
    [(first, other_last), (last, other_first)].into_iter().find(|(from, to)| from != to)
}

/// The median and the mean of a figure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Figure {
    /// Of the median round.
    pub median: f64,
    /// Over all rounds.
    pub mean: f64,
}

/// Bandwidth of a stream, in 10⁹ bytes per second.
pub fn bandwidth(samples: &Samples, measurement: &Measurement) -> Option<Figure> {
    let bytes = measurement.size as f64 * f64::from(measurement.messages);
    let (median, mean) = (median(&samples.rounds_ns)?, mean(&samples.rounds_ns)?);
    Some(Figure { median: bytes / median, mean: bytes / mean })
}

/// One-way latency of pings, in microseconds.
pub fn latency(samples: &Samples) -> Option<Figure> {
    let one_way = |nanoseconds: f64| nanoseconds / 2.0 / 1000.0;
    let (median, mean) = (median(&samples.rounds_ns)?, mean(&samples.rounds_ns)?);
    Some(Figure { median: one_way(median), mean: one_way(mean) })
}

fn mean(values: &[u64]) -> Option<f64> {
    let sum: u64 = values.iter().sum();
    (sum > 0).then(|| sum as f64 / values.len() as f64)
}

/// The median of the values; `None` without values, or if the clock measured nothing.
fn median(values: &[u64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    let middle = *sorted.get(sorted.len() / 2)?;
    (middle > 0).then_some(middle as f64)
}

/// What rows are computed from.
#[derive(Clone, Copy, Debug)]
pub struct Background<'a> {
    /// The cluster's plan.
    pub plan: &'a Plan,
    /// The machine that has the GPUs; `None` if they are simulated.
    pub machine: Option<&'a Topology>,
    /// Planned NIC ports that are not in use, by worker.
    pub missing_ports: &'a BTreeMap<String, Vec<MissingPort>>,
    /// Latencies by pair, where known.
    pub latencies: &'a BTreeMap<(String, String), Figure>,
    /// What a figure says of its link.
    pub figures: Figures,
}

/// What a figure says of its link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Figures {
    /// Nothing that shares the link was measured at the same time: a slow figure is a slow link.
    Alone,
    /// Others were measured at the same time, too.
    Beside,
    /// Nothing: only the lanes were asked for, with too few messages.
    Ignored,
}

/// The row for a stream.
pub fn row(background: Background<'_>, measurement: &Measurement, measured: &Measured) -> Pair {
    let Background { plan, machine, latencies, figures, missing_ports } = background;
    let Measurement { from, to, memory, size, .. } = measurement;
    let expected = Expected::of(plan, machine, [from, to], *memory, *size);
    let limit = match expected {
        Expected::Staging => Some(Limit::host()),
        // Nobody expects a network protocol to be as fast as anything.
        Expected::Socket(_) | Expected::AnyLane => None,
        _ => limit(machine, plan, from, to, *memory),
    };
    let (lanes, figure, verdict) = match &measured.result {
        Ok(samples) => {
            let figure = bandwidth(samples, measurement).filter(|_| figures != Figures::Ignored);
            let telling_bytes = match &plan.engine {
                EnginePlan::Dask(_) => DASK_TELLING_BYTES,
                _ => TELLING_BYTES,
            };
            let telling = figures == Figures::Alone && *size >= telling_bytes;
            let verdict = if !expected.is_among(&samples.lanes) {
                let cause = measured.cause.as_deref();
                Verdict::Downgraded(expected.downgrade(plan, from, &samples.lanes, cause))
            } else if let Some(why) = unused(expected, measurement, samples) {
                Verdict::Downgraded(why)
            } else if let Some(why) = without_port(missing_ports, [from, to]) {
                Verdict::Downgraded(why)
            } else {
                judge(expected, limit.as_ref(), figure, telling)
            };
            let verdict = match (verdict, broken_fabric(plan, machine, [from, to])) {
                (Verdict::Downgraded(_), Some(why)) if expected == Expected::CudaIpc => {
                    Verdict::Downgraded(why.to_owned())
                }
                (verdict, _) => verdict,
            };
            (samples.lanes.clone(), figure, verdict)
        }
        Err(why) => (Vec::new(), None, Verdict::Failed(why.clone())),
    };
    // An impossible figure is not reported.
    let figure = figure.filter(|_| !matches!(verdict, Verdict::Implausible(_)));
    let latency = latencies.get(&(from.clone(), to.clone()));
    Pair {
        from: from.clone(),
        to: to.clone(),
        memory: *memory,
        lanes,
        expected,
        size_bytes: *size,
        gb_per_s: figure.map(|figure| figure.median),
        mean_gb_per_s: figure.map(|figure| figure.mean),
        latency_us: latency.map(|latency| latency.median),
        mean_latency_us: latency.map(|latency| latency.mean),
        limit_gb_per_s: limit.as_ref().and_then(|limit| limit.most),
        usual_gb_per_s: limit.as_ref().map(|limit| limit.usual),
        link: limit.map(|limit| limit.link),
        verdict,
    }
}

/// Judges a figure that was measured over the expected lanes.
fn judge(
    expected: Expected,
    limit: Option<&Limit>,
    figure: Option<Figure>,
    telling: bool,
) -> Verdict {
    let (Some(Figure { median, .. }), Some(limit)) = (figure, limit) else { return Verdict::Ok };
    let (link, usual) = (&limit.link, limit.usual);
    let most = limit.most.map_or(IMPLAUSIBLE_IN_HOST_MEMORY, |most| most * TOLERANCE);
    let slow = usual
        * match expected {
            Expected::CudaIpc => SLOW_DEVICE,
            _ => SLOW_HOST,
        };
    if median > most {
        Verdict::Implausible(format!("{median:.0} GB/s, and {link} carries at most {most:.0}"))
    } else if telling && median < slow {
        Verdict::Slow(format!("{median:.2} GB/s, and {link} usually carries {usual:.0}"))
    } else {
        Verdict::Ok
    }
}

/// Why copies between GPUs were not used although there is a lane for them. A connection has that
/// lane as soon as both ends support CUDA; whether it can carry bytes shows only when memory is
/// mapped. Small messages don't need it.
fn unused(expected: Expected, measurement: &Measurement, samples: &Samples) -> Option<String> {
    if expected != Expected::CudaIpc {
        return None;
    }
    let Measurement { from, to, size, .. } = measurement;
    if let Mapped::Refused(why) = &samples.mapped {
        return Some(format!(
            "cuda_ipc expected, but {to} cannot map the device memory of {from} ({why}), so every \
             byte is staged in host memory: in containers give all workers one IPC and one PID \
             namespace, and let each see all GPUs"
        ));
    }
    let protocol = samples.protocol.as_ref().filter(|_| *size >= TELLING_BYTES)?;
    (!protocol.lanes.contains("cuda_ipc")).then(|| {
        let (name, lanes) = (&protocol.name, &protocol.lanes);
        format!(
            "cuda_ipc expected, but UCX chose \"{name}\" over {lanes} for this size: look for \
             UCX_RNDV_SCHEME, UCX_RNDV_THRESH and UCX_PROTO_ENABLE in the environment"
        )
    })
}

/// Which planned port one of the two workers does not use, and why. Within one machine shared
/// memory may carry all bytes instead, so the lanes of the pair don't show it.
fn without_port(
    missing_ports: &BTreeMap<String, Vec<MissingPort>>,
    ends: [&String; 2],
) -> Option<String> {
    let mut missing = ends.into_iter().filter_map(|end| Some((end, missing_ports.get(end)?)));
    let (worker, ports) = missing.find(|(_, ports)| !ports.is_empty())?;
    let MissingPort { port, why } = ports.first()?;
    Some(format!("{port} is planned for {worker}, but not in use: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::native::Protocol;

    fn samples(rounds_ns: Vec<u64>) -> Samples {
        Samples { rounds_ns, lanes: vec![], protocol: None, mapped: Mapped::NotTried }
    }

    #[test]
    fn pings_are_measured_on_two_cpus_if_there_are_two() {
        let cpus = |text: &str| text.parse::<CpuSet>().expect("CPUs");
        for (from, to, apart) in [
            ("0-1", "0-1", Some((0, 1))),
            ("0-55,112-167", "0-55,112-167", Some((0, 167))),
            ("0", "0-3", Some((0, 3))),
            ("0-3", "0", Some((3, 0))),
            ("4", "4", None),
            ("", "0-3", None),
        ] {
            assert_eq!(cpus_apart(&cpus(from), &cpus(to)), apart, "{from} and {to}");
        }
    }

    #[test]
    fn a_lane_that_is_listed_but_carries_nothing_is_a_downgrade() {
        let way = stream("gpu0", "gpu1", MemoryKind::Device, 64 << 20, 1);
        let refused = Mapped::Refused("mapping of buffer object failed".to_owned());
        let refused = Samples { mapped: refused, ..samples(vec![5]) };
        let why = unused(Expected::CudaIpc, &way, &refused).expect("a downgrade");
        assert!(why.contains("gpu1 cannot map the device memory of gpu0"), "{why}");
        assert!(why.contains("mapping of buffer object failed"), "{why}");
        let over = |lanes: &str| {
            let protocol = Protocol { name: "rendezvous".to_owned(), lanes: lanes.to_owned() };
            Samples { protocol: Some(protocol), mapped: Mapped::Readable, ..samples(vec![5]) }
        };
        let why = unused(Expected::CudaIpc, &way, &over("sysv/memory")).expect("a downgrade");
        assert!(why.contains("over sysv/memory"), "{why}");
        assert_eq!(unused(Expected::CudaIpc, &way, &over("cuda_ipc/cuda")), None);
        assert_eq!(unused(Expected::CudaIpc, &way, &samples(vec![5])), None);
        assert_eq!(unused(Expected::Staging, &way, &over("sysv/memory")), None);
    }

    #[test]
    fn a_planned_port_that_is_not_in_use_is_a_downgrade_of_both_directions() {
        let port = MissingPort { port: "mlx5_1:1".to_owned(), why: "it is DOWN".to_owned() };
        let missing =
            BTreeMap::from([("gpu1".to_owned(), vec![port]), ("gpu2".to_owned(), vec![])]);
        let of = |from: &str, to: &str| without_port(&missing, [&from.to_owned(), &to.to_owned()]);
        let why = of("gpu0", "gpu1").expect("a downgrade");
        assert_eq!(why, "mlx5_1:1 is planned for gpu1, but not in use: it is DOWN");
        assert_eq!(of("gpu1", "gpu0"), Some(why));
        assert_eq!(of("gpu0", "gpu2"), None);
    }

    #[test]
    fn a_bandwidth_is_that_of_the_median_round() {
        let measurement =
            Measurement { messages: 10, ..stream("a", "b", MemoryKind::Host, 100, 3) };
        let measured = samples(vec![5000, 500, 1000]);
        let figure = bandwidth(&measured, &measurement).expect("there are rounds");
        assert_eq!(figure.median.to_bits(), 1.0f64.to_bits());
        assert!((figure.mean - 3000.0 / 6500.0).abs() < 1e-9, "{figure:?}");
        assert_eq!(latency(&measured).map(|figure| figure.median), Some(0.5));
        assert_eq!(latency(&samples(vec![])), None);
    }

    #[test]
    fn a_round_moves_much_but_not_endlessly() {
        let messages = |size| stream("a", "b", MemoryKind::Host, size, 1).messages;
        assert_eq!(messages(0), 10_000);
        assert_eq!(messages(1 << 20), 64);
        assert_eq!(messages(1 << 30), 1);
    }

    #[test]
    fn a_figure_is_judged_by_what_its_link_carries() {
        let limit = Limit { link: "NV18".to_owned(), most: Some(450.0), usual: 378.0 };
        let judged = |gb_per_s: f64, telling| {
            let figure = Some(Figure { median: gb_per_s, mean: gb_per_s });
            judge(Expected::CudaIpc, Some(&limit), figure, telling)
        };
        assert_eq!(judged(376.0, true), Verdict::Ok);
        assert!(matches!(judged(40.0, true), Verdict::Slow(_)));
        assert_eq!(judged(40.0, false), Verdict::Ok);
        assert!(matches!(judged(480.0, false), Verdict::Implausible(_)));
    }
}
