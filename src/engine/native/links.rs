//! What the ways between workers should carry, and what was found: rows for people and programs.
//!
//! Pure. Does not measure; [`super::client`] has it done.
//!
//! *Invariant:* a verdict other than `ok` says what was expected and what was found.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Serialize, Serializer};

use super::client::Measured;
use crate::plan::Plan;
use crate::wire::native::{Measurement, Quantity, Samples};
use crate::wire::peer::MemoryKind;

/// Bytes that a round moves, where the messages are not longer.
const ROUND_BYTES: u64 = 64 << 20;

/// Most messages of a round.
const ROUND_MESSAGES: u64 = 10_000;

/// Messages of a latency measurement.
const PINGS: u32 = 2_000;

/// Bytes of a latency measurement's messages.
pub const PING_BYTES: u64 = 8;

/// Bandwidth beyond any link of one machine, in GB/s: what measures more has measured wrongly.
const IMPLAUSIBLE_GB_PER_S: f64 = 2000.0;

/// Transports that carry host memory between processes of one machine without a network.
const SHARED_MEMORY: [&str; 5] = ["posix", "sysv", "cma", "xpmem", "knem"];

/// What a pair of workers should use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    /// Shared memory of the host.
    SharedMemory,
    /// Copies between GPUs, over NVLink or PCIe.
    CudaIpc,
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Expected::SharedMemory => "shared memory",
            Expected::CudaIpc => "cuda_ipc",
        })
    }
}

impl Expected {
    /// What two workers of a plan should use: they are on one machine, so never a network.
    pub fn of(plan: &Plan, memory: MemoryKind) -> Self {
        match memory {
            MemoryKind::Device if !plan.machine.simulated => Expected::CudaIpc,
            MemoryKind::Host | MemoryKind::Device => Expected::SharedMemory,
        }
    }

    fn is_among(self, lanes: &[String]) -> bool {
        lanes.iter().any(|lane| {
            let transport = lane.split('/').next().unwrap_or_default();
            match self {
                Expected::SharedMemory => SHARED_MEMORY.contains(&transport),
                Expected::CudaIpc => transport == "cuda_ipc",
            }
        })
    }
}

/// What is to be said about a pair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// As expected.
    Ok,
    /// Another lane than expected, and why.
    Downgraded(String),
    /// A figure that cannot be.
    Implausible(String),
    /// Nothing was measured, because of this.
    Failed(String),
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Verdict::Ok => f.write_str("ok"),
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

/// One ordered pair of workers at one size of messages.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Pair {
    /// The sender.
    pub from: String,
    /// The receiver.
    pub to: String,
    /// Where the bytes lie.
    pub memory: MemoryKind,
    /// The lanes of the connection, in UCX's words.
    pub lanes: Vec<String>,
    /// What should be among them.
    #[serde(serialize_with = "as_text")]
    pub expected: Expected,
    /// Bytes of each message.
    pub size_bytes: u64,
    /// Median bandwidth; 10⁹ bytes per second.
    pub gb_per_s: Option<f64>,
    /// Median one-way latency of a small message, in microseconds.
    pub latency_us: Option<f64>,
    /// What is to be said about it.
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

/// A game of ping-pong with small messages.
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

/// Bandwidth of a stream's median round, in 10⁹ bytes per second.
pub fn bandwidth(samples: &Samples, measurement: &Measurement) -> Option<f64> {
    let nanoseconds = median(&samples.rounds_ns)?;
    let bytes = measurement.size as f64 * f64::from(measurement.messages);
    Some(bytes / nanoseconds)
}

/// One-way latency of the median ping, in microseconds.
pub fn latency(samples: &Samples) -> Option<f64> {
    Some(median(&samples.rounds_ns)? / 2.0 / 1000.0)
}

/// The middle of the values; `None` without values, or where the clock saw nothing.
fn median(values: &[u64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    let middle = *sorted.get(sorted.len() / 2)?;
    (middle > 0).then_some(middle as f64)
}

/// The row of a stream, with the pair's latency where it is known.
pub fn row(
    plan: &Plan,
    measurement: &Measurement,
    measured: &Measured,
    latencies: &BTreeMap<(String, String), f64>,
) -> Pair {
    let Measurement { from, to, memory, size, .. } = measurement;
    let expected = Expected::of(plan, *memory);
    let (lanes, gb_per_s, verdict) = match &measured.result {
        Ok(samples) => {
            let gb_per_s = bandwidth(samples, measurement);
            let verdict = judge(plan, from, expected, &samples.lanes, gb_per_s);
            (samples.lanes.clone(), gb_per_s, verdict)
        }
        Err(why) => (Vec::new(), None, Verdict::Failed(why.clone())),
    };
    let latency_us = latencies.get(&(from.clone(), to.clone())).copied();
    Pair {
        from: from.clone(),
        to: to.clone(),
        memory: *memory,
        lanes,
        expected,
        size_bytes: *size,
        gb_per_s,
        latency_us,
        verdict,
    }
}

fn judge(
    plan: &Plan,
    from: &str,
    expected: Expected,
    lanes: &[String],
    gb_per_s: Option<f64>,
) -> Verdict {
    if !expected.is_among(lanes) {
        let used = if lanes.is_empty() { "no lane".to_owned() } else { lanes.join(" ") };
        let because = cause(plan, from);
        return Verdict::Downgraded(format!("{expected} expected, {used} used{because}"));
    }
    match gb_per_s {
        Some(gb_per_s) if gb_per_s > IMPLAUSIBLE_GB_PER_S => Verdict::Implausible(format!(
            "{gb_per_s:.0} GB/s is more than any link of one machine carries"
        )),
        _ => Verdict::Ok,
    }
}

/// What in a worker's plan restricts its transports.
fn cause(plan: &Plan, worker: &str) -> String {
    let worker = plan.workers.iter().find(|candidate| candidate.name == worker);
    match worker.and_then(|worker| worker.env.get("UCX_TLS")) {
        Some(list) => format!(" because UCX_TLS={list}"),
        None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lanes(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn shared_memory_is_any_transport_within_the_machine() {
        let expected = Expected::SharedMemory;
        assert!(expected.is_among(&lanes("posix/memory cma/memory")));
        assert!(expected.is_among(&lanes("tcp/lo sysv/memory")));
        assert!(!expected.is_among(&lanes("tcp/lo")));
        assert!(!expected.is_among(&[]));
        assert!(Expected::CudaIpc.is_among(&lanes("cuda_ipc/cuda")));
    }

    #[test]
    fn a_bandwidth_is_that_of_the_median_round() {
        let measurement =
            Measurement { messages: 10, ..stream("a", "b", MemoryKind::Host, 100, 3) };
        let samples = Samples { rounds_ns: vec![5000, 500, 1000], lanes: vec![] };
        assert_eq!(bandwidth(&samples, &measurement), Some(1.0));
        assert_eq!(latency(&samples), Some(0.5));
        assert_eq!(latency(&Samples { rounds_ns: vec![], lanes: vec![] }), None);
    }

    #[test]
    fn a_round_moves_much_but_not_endlessly() {
        let messages = |size| stream("a", "b", MemoryKind::Host, size, 1).messages;
        assert_eq!(messages(0), 10_000);
        assert_eq!(messages(1 << 20), 64);
        assert_eq!(messages(1 << 30), 1);
    }
}
