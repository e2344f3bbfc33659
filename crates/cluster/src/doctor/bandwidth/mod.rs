//! Measures how fast data moves between the host and each GPU and between GPUs, by the CUDA driver
//! alone, and compares the bytes: what is slow or wrong here is so without UCX.
//!
//! *Invariant:* each way has a row, also if it was not measured, and only a way whose bytes were
//! compared is `ok`.

mod judge;
mod measuring;
mod order;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub(crate) use self::measuring::main;
use self::order::{Did, End, Fault, Figures, Order, Told, Wanted, ways};
use super::child::{self, Child, Heard};
use cuda_cluster_model::ids::GpuIndex;
use cuda_cluster_model::topology::{ComputeMode, Gpu, Topology};

/// The hidden subcommand of the other process.
pub(crate) const SUBCOMMAND: &str = "__measure-gpus";

/// Time to open CUDA and make a context, and more for each GPU: without persistence mode the driver
/// initialises all of them anew.
const OPENING: Duration = Duration::from_secs(20);
const EACH_GPU: Duration = Duration::from_secs(10);

/// Time for a way, which otherwise takes a tenth of a second.
const WAY: Duration = Duration::from_secs(10);

/// How a copy goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// From GPU to GPU directly.
    Peer,
    /// From GPU to GPU by way of host memory: the driver gives neither access to the other.
    Staged,
    /// Between pinned host memory and a GPU.
    Host,
}

/// What was found of a way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PathVerdict {
    /// The right bytes arrive (16 MiB are compared), about as fast as is usual on such a path.
    Ok,
    /// The right bytes arrive, at less than half of what is usual.
    Slow,
    /// The right bytes arrive, and nobody knows how fast they should.
    CannotTell,
    /// It was not measured.
    LeftOut,
    /// Wrong bytes arrive, or none.
    Failed,
}

/// A way from the host to a GPU, from a GPU to the host, or from a GPU to another.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// `host` or `GPU3`.
    pub from: String,
    /// The same.
    pub to: String,
    /// Bytes of each copy.
    pub bytes: u64,
    /// Bandwidth, in 10⁹ bytes per second.
    pub gb_per_s: Option<f64>,
    /// Time of a copy of 8 bytes, from its call to its end, in microseconds.
    pub latency_us: Option<f64>,
    /// How the copies go, if that is known.
    pub way: Option<Way>,
    /// What carries them, by the topology: `PCIe 5.0 x16`, `NV18`.
    pub path: Option<String>,
    /// The most that it carries in one direction.
    pub allowed_gb_per_s: Option<f64>,
    /// What copies usually reach there; they are slow below half of it.
    pub usual_gb_per_s: Option<f64>,
    /// The judgement.
    pub verdict: PathVerdict,
    /// The reason, and what else there is to say.
    pub text: String,
}

/// Measures each way between the host and the GPUs of this machine, and between its GPUs, which
/// takes some ten seconds. Empty where there are no GPUs.
pub fn bandwidth(topology: &Topology) -> Vec<Measured> {
    let usable = topology.gpus.iter().filter(|gpu| reason_to_leave_out(gpu).is_none());
    let wanted = usable.filter_map(|gpu| {
        let (index, cpus) = (gpu.index, gpu.cpus.clone());
        Some(Wanted { index, pci: gpu.pci?, cpus })
    });
    let gpus: Vec<Wanted> = wanted.collect();
    let ways = ways(&gpus.iter().map(|gpu| gpu.index).collect::<Vec<_>>());
    let mut found = match gpus.is_empty() {
        true => Found::default(),
        false => measured(&Order { gpus, ways: ways.clone() }, child::mask(topology)),
    };
    let rows = ways.iter().enumerate().map(|(at, (from, to))| {
        let outcome = found.ways.remove(&at).unwrap_or_else(|| left_out(&found.unmeasured));
        ((*from, *to), judge::row(topology, (*from, *to), outcome))
    });
    let mut rows: Vec<((End, End), Measured)> = rows.collect();
    rows.extend(topology.gpus.iter().filter_map(|gpu| {
        let ends = (End::Host, End::Gpu(gpu.index));
        let outcome = left_out(&reason_to_leave_out(gpu)?);
        Some((ends, judge::row(topology, ends, outcome)))
    }));
    // The host's ways first, in the order of the GPUs.
    rows.sort_by_key(|((from, to), _)| match (from, to) {
        (End::Host, gpu) => (false, *gpu, *from),
        (gpu, End::Host) => (false, *gpu, *to),
        _ => (true, *from, *to),
    });
    rows.into_iter().map(|(_, row)| row).collect()
}

/// Why nothing of a GPU is measured.
fn reason_to_leave_out(gpu: &Gpu) -> Option<String> {
    let index = gpu.index;
    if !child::is_whole(gpu) {
        return Some(format!(
            "GPU {index} is in MIG mode: its instances have no peers, and share its way to the \
             host; none of its ways is measured"
        ));
    }
    if gpu.compute_mode == Some(ComputeMode::Prohibited) {
        return Some(format!(
            "the compute mode of GPU {index} is PROHIBITED; none of its ways is measured"
        ));
    }
    gpu.pci.is_none().then(|| {
        format!("where GPU {index} is on the PCI bus is not known; none of its ways is measured")
    })
}

/// What became of a way.
struct Outcome {
    verdict: Result<(), Trouble>,
    figures: Option<Figures>,
    way: Option<Way>,
    remark: Option<String>,
}

/// Why a way has no good figures.
enum Trouble {
    WrongBytes(String),
    Failed(String),
    LeftOut(String),
}

fn left_out(reason: &str) -> Outcome {
    Outcome::without_figures(Trouble::LeftOut(reason.to_owned()))
}

impl Outcome {
    fn without_figures(trouble: Trouble) -> Self {
        Self { verdict: Err(trouble), figures: None, way: None, remark: None }
    }
}

/// What the other process has found, by the number of the way.
#[derive(Default)]
struct Found {
    ways: BTreeMap<usize, Outcome>,
    /// Why the others were not measured.
    unmeasured: String,
}

impl Found {
    fn fails(&mut self, at: usize, text: String) {
        self.ways.insert(at, Outcome::without_figures(Trouble::Failed(text)));
    }
}

/// What the other process was at when it was last heard.
#[derive(Clone, Copy)]
enum At {
    Nothing,
    Opening(GpuIndex),
    Way(usize),
}

fn measured(order: &Order, mask: Option<(&'static str, OsString)>) -> Found {
    let mut found = Found::default();
    let other = match Child::start(SUBCOMMAND, mask, order) {
        Ok(other) => other,
        Err(error) => {
            let text = format!("no process could be started to measure it: {error}");
            break_off(order, &mut found, At::Nothing, &text);
            return found;
        }
    };
    let mut at = At::Nothing;
    let opening = OPENING + EACH_GPU * u32::try_from(order.gpus.len()).unwrap_or(u32::MAX);
    loop {
        let limit = match at {
            At::Way(_) => WAY,
            At::Nothing | At::Opening(_) => opening,
        };
        let broken_off = match other.hear(limit) {
            Heard::Told(Told::Done) => {
                // Every way has an answer; how it ends after that changes nothing.
                let _ = other.end();
                return found;
            }
            Heard::Told(told) => {
                at = heard(order, &mut found, at, told);
                continue;
            }
            Heard::Silence => {
                // Nobody can do anything about a process that can't be killed.
                let _ = other.kill();
                format!("no answer within {limit:.0?}")
            }
            Heard::End => match other.end() {
                Ok(end) => {
                    let status = end.status.map_or("killed".to_owned(), |end| end.to_string());
                    let last = end.last_error.map(|line| format!(": {line}")).unwrap_or_default();
                    format!("the process that measured it ended ({status}){last}")
                }
                Err(error) => format!("the process that measured it was lost: {error}"),
            },
        };
        break_off(order, &mut found, at, &broken_off);
        return found;
    }
}

/// Takes in what was said, and returns what the other process is at.
fn heard(order: &Order, found: &mut Found, at: At, told: Told) -> At {
    match told {
        Told::Opens(gpu) => At::Opening(gpu),
        Told::Unopened { gpu, text, is_full } => {
            let ends = |way: &(End, End)| [way.0, way.1].contains(&End::Gpu(gpu));
            for (number, way) in order.ways.iter().enumerate().filter(|(_, way)| ends(way)) {
                let is_its_own = *way == (End::Host, End::Gpu(gpu));
                let trouble = if is_its_own && !is_full {
                    Trouble::Failed(text.clone())
                } else if is_its_own {
                    Trouble::LeftOut(text.clone())
                } else {
                    Trouble::LeftOut(format!("GPU {gpu} can't be used: see host to GPU{gpu}"))
                };
                found.ways.entry(number).or_insert_with(|| Outcome::without_figures(trouble));
            }
            at
        }
        Told::Begins(number) => At::Way(number),
        Told::Did { at: number, did } => {
            let Did { figures, way, fault, remark } = did;
            let verdict = match fault {
                None => Ok(()),
                Some(Fault::WrongBytes(text)) => Err(Trouble::WrongBytes(text)),
                Some(Fault::SentWrong(text) | Fault::Refused(text)) => Err(Trouble::Failed(text)),
            };
            found.ways.insert(number, Outcome { verdict, figures, way, remark });
            At::Nothing
        }
        Told::LeftOut { at: number, text } => {
            found.ways.insert(number, left_out(&text));
            At::Nothing
        }
        Told::Done => at,
    }
}

/// The other process can say nothing more: what it was at has failed, the rest is left out.
fn break_off(order: &Order, found: &mut Found, at: At, text: &str) {
    let (number, text) = match at {
        At::Way(number) => (Some(number), text.to_owned()),
        At::Opening(gpu) => {
            let way = (End::Host, End::Gpu(gpu));
            let number = order.ways.iter().position(|other| *other == way);
            (number, format!("{text}, while a context was made on GPU {gpu}"))
        }
        At::Nothing => (None, text.to_owned()),
    };
    let number =
        number.or_else(|| (0..order.ways.len()).find(|number| !found.ways.contains_key(number)));
    if let Some(number) = number {
        let (from, to) = order.ways[number];
        found.fails(number, text);
        found.unmeasured = format!("not measured, because {from} to {to} had no end");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(count: u32) -> Order {
        let pci = "0000:1b:00.0".parse().expect("an address");
        let gpus = (0..count).map(|at| Wanted { index: GpuIndex(at), pci, cpus: None });
        let gpus: Vec<Wanted> = gpus.collect();
        let ways = ways(&gpus.iter().map(|gpu| gpu.index).collect::<Vec<_>>());
        Order { gpus, ways }
    }

    fn failed(found: &Found) -> Vec<usize> {
        let failed = |outcome: &Outcome| matches!(outcome.verdict, Err(Trouble::Failed(_)));
        found.ways.iter().filter(|(_, outcome)| failed(outcome)).map(|(at, _)| *at).collect()
    }

    #[test]
    fn the_way_at_which_the_other_process_was_last_heard_has_failed() {
        let order = order(3);
        let mut found = Found::default();
        let at = heard(&order, &mut found, At::Nothing, Told::Opens(GpuIndex(1)));
        break_off(&order, &mut found, at, "no answer");
        assert_eq!(failed(&found), [2], "the host's way to GPU 1");
        let mut found = Found::default();
        let at = heard(&order, &mut found, At::Nothing, Told::Begins(7));
        break_off(&order, &mut found, at, "no answer");
        assert_eq!(failed(&found), [7]);
        assert!(found.unmeasured.contains("GPU1 to GPU2 had no end"), "{}", found.unmeasured);
        let mut found = Found::default();
        break_off(&order, &mut found, At::Nothing, "it ended");
        assert_eq!(failed(&found), [0], "an end before anything was tried is seen, too");
    }

    #[test]
    fn a_gpu_that_does_not_open_fails_once_and_takes_its_ways_with_it() {
        let order = order(3);
        for (is_full, failures) in [(false, vec![2]), (true, vec![])] {
            let mut found = Found::default();
            let told = Told::Unopened { gpu: GpuIndex(1), text: "busy".to_owned(), is_full };
            heard(&order, &mut found, At::Opening(GpuIndex(1)), told);
            assert_eq!(failed(&found), failures);
            assert_eq!(found.ways.len(), 2 + 4, "of 6 + 6");
        }
    }
}
