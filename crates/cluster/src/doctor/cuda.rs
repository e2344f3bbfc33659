//! Tries CUDA on each GPU, as a worker would use it, in a process of its own: a driver that is not
//! well may hang, or end its process.
//!
//! *Invariant:* a GPU counts as tried only if the other process has said so.

use std::ffi::OsString;
use std::path::Path;
use std::process::{ExitCode, ExitStatus};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::child::{self, Child, Heard, order, say};
use super::{Finding, Severity};
use cuda_cluster_data::cuda::{self, Device};
use cuda_cluster_data::ucx::LIBRARY_VARIABLE;
use cuda_cluster_model::ids::{GpuIndex, GpuUuid, PciAddress};
use cuda_cluster_model::text::in_full;
use cuda_cluster_model::topology::{Gpu, Topology};

/// The hidden subcommand of the other process.
pub(crate) const SUBCOMMAND: &str = "__try-cuda";

/// What these are called in the report.
const CHECK: &str = "cuda";
const COMPILER: &str = "nvrtc";

/// Time to open CUDA, and beyond it for each GPU. A first context takes a second or two, and more
/// where the driver does not stay loaded (persistence mode).
const OPENING: Duration = Duration::from_secs(20);
const EACH: Duration = Duration::from_secs(10);

/// What is written and read on each GPU.
const BYTES: usize = 1 << 20;

/// A GPU to try.
#[derive(Serialize, Deserialize)]
struct Wanted {
    index: GpuIndex,
    pci: PciAddress,
    uuid: Option<GpuUuid>,
}

/// What the other process says, a line each.
#[derive(Serialize, Deserialize)]
enum Told {
    /// How many GPUs CUDA has.
    Count(usize),
    /// A GPU works.
    Works(GpuIndex),
    Compiles(Compiles),
    /// A GPU, or CUDA itself, does not.
    Fails {
        index: Option<GpuIndex>,
        text: String,
        hint: Option<String>,
    },
    /// Nothing more will come.
    Done,
}

/// What compiles for a GPU and what it makes; or why nothing does, and whether there is a compiler
/// at all.
type Compiles = Result<String, (String, bool)>;

/// What was found, and whether the driver answers at all.
pub(super) struct Found {
    pub(super) findings: Vec<Finding>,
    pub(super) answers: bool,
}

/// Tries the GPUs of a machine; nothing where there are none. MIG instances are left out: CUDA
/// shows a process one of them at most, and then no GPU, so the others are named.
/// Compilers are looked for beside the libucp, as workers do.
pub(super) fn cuda(topology: &Topology, libucp: Option<&Path>) -> Option<Found> {
    let whole = |gpu: &&Gpu| child::is_whole(gpu);
    let wanted =
        |gpu: &Gpu| Some(Wanted { index: gpu.index, pci: gpu.pci?, uuid: gpu.uuid.clone() });
    let gpus: Vec<Wanted> = topology.gpus.iter().filter(whole).filter_map(wanted).collect();
    let is_mig = topology.gpus.iter().any(|gpu| !gpu.mig.is_empty());
    topology.driver.as_ref().filter(|_| !gpus.is_empty())?;
    let limit = OPENING + EACH * u32::try_from(gpus.len()).unwrap_or(u32::MAX);
    let libucp = libucp.map(|path| (LIBRARY_VARIABLE, path.as_os_str().to_owned()));
    let variables = child::mask(topology).into_iter().chain(libucp);
    let tried = match ask(&gpus, variables, limit) {
        Ok(tried) => tried,
        Err(error) => {
            let finding =
                Finding::tried(CHECK, Severity::CannotTell, format!("could not be tried: {error}"));
            return Some(Found { findings: vec![finding], answers: true });
        }
    };
    let mut findings = vec![judge(&gpus, &tried, is_mig, limit)];
    findings.extend(compilers(&tried.told));
    Some(Found { findings, answers: tried.end.is_some() })
}

/// What was said of compilers, each thing once. Without one most workers do their work.
fn compilers(told: &[Told]) -> Vec<Finding> {
    let mut findings: Vec<Finding> = Vec::new();
    for told in told {
        let Told::Compiles(compiles) = told else { continue };
        let (severity, text) = match compiles {
            Ok(made) => (Severity::Ok, made),
            Err((why, true)) => (Severity::Warning, why),
            Err((why, false)) => (Severity::Note, why),
        };
        if findings.iter().all(|finding| finding.text != *text) {
            findings.push(Finding::tried(COMPILER, severity, text));
        }
    }
    findings
}

/// What was heard until the other process ended, or its time.
struct Tried {
    told: Vec<Told>,
    /// How it ended; `None` if it had to be ended.
    end: Option<ExitStatus>,
    /// The last line that it wrote to standard error.
    last_error: Option<String>,
}

fn ask(
    gpus: &[Wanted],
    variables: impl Iterator<Item = (&'static str, OsString)>,
    limit: Duration,
) -> std::io::Result<Tried> {
    let other = Child::start(SUBCOMMAND, variables, &gpus)?;
    let until = Instant::now() + limit;
    let mut told = Vec::new();
    let end = loop {
        match other.hear(until.saturating_duration_since(Instant::now())) {
            Heard::Told(one) => told.push(one),
            Heard::Silence => break other.kill()?,
            Heard::End => break other.end()?,
        }
    };
    Ok(Tried { told, end: end.status, last_error: end.last_error })
}

fn judge(gpus: &[Wanted], tried: &Tried, is_mig: bool, limit: Duration) -> Finding {
    let failed = |text: String| Finding::tried(CHECK, Severity::Error, text);
    let mut troubles: Vec<(Option<GpuIndex>, &str, Option<&str>)> = Vec::new();
    let (mut count, mut works, mut done) = (None, Vec::new(), false);
    for told in &tried.told {
        match told {
            Told::Count(number) => count = Some(*number),
            Told::Works(index) => works.push(*index),
            Told::Fails { index, text, hint } => troubles.push((*index, text, hint.as_deref())),
            Told::Compiles(_) => {}
            Told::Done => done = true,
        }
    }
    if let Some((index, text, hint)) = troubles.first() {
        let alike = troubles.iter().filter(|(_, other, _)| other == text).count();
        let text = match (index, troubles.len()) {
            (None, _) => (*text).to_owned(),
            (Some(_), all) if alike == all && all == gpus.len() && all > 1 => {
                format!("on each of {all} GPUs: {text}")
            }
            (Some(index), 1) => format!("GPU {index}: {text}"),
            (Some(index), all) => format!("GPU {index}: {text}; and {} more fail", all - 1),
        };
        let finding = failed(text);
        return hint.map(str::to_owned).into_iter().fold(finding, Finding::remedy);
    }
    if !done {
        let asked = gpus.iter().find(|gpu| !works.contains(&gpu.index)).map(|gpu| gpu.index);
        let at = asked.map(|index| format!(" at GPU {index}")).unwrap_or_default();
        let last = tried.last_error.as_ref().map(|line| format!(": {line}"));
        return match tried.end {
            None => failed(format!("no answer within {limit:.0?}{at}"))
                .remedy("nvidia-smi may hang, too; dmesg | grep -i xid says what the driver met"),
            Some(end) => failed(format!(
                "the process that tried it ended{at} ({end}){}",
                last.unwrap_or_default()
            )),
        };
    }
    if count.is_some_and(|count| count != gpus.len()) && !is_mig {
        let count = count.unwrap_or_default();
        return failed(format!("CUDA has {count} GPUs, NVML {}", gpus.len()))
            .remedy("a GPU that was lost, or MPS: see nvidia-smi and dmesg");
    }
    let number = works.len();
    let gpus = if number == 1 { "1 GPU".to_owned() } else { format!("{number} GPUs") };
    Finding::tried(
        CHECK,
        Severity::Ok,
        format!("{gpus}: identity, a context, 1 MiB there and back, an IPC handle"),
    )
}

/// The other process: reads the GPUs from standard input, and says what works.
pub(crate) fn main() -> ExitCode {
    let Some(gpus) = order::<Vec<Wanted>>() else { return ExitCode::from(2) };
    match attempt(&gpus) {
        Ok(()) => ExitCode::SUCCESS,
        // Nobody listens any more.
        Err(_) => ExitCode::FAILURE,
    }
}

fn attempt(gpus: &[Wanted]) -> std::io::Result<()> {
    let fails = |index, error: cuda::Error| Told::Fails {
        index,
        text: error.to_string(),
        hint: error.hint(),
    };
    match cuda::count() {
        Ok(count) => say(&Told::Count(count))?,
        Err(error) => {
            say(&fails(None, error))?;
            return say(&Told::Done);
        }
    }
    for gpu in gpus {
        match works(gpu) {
            Ok(Ok(compiles)) => {
                say(&Told::Works(gpu.index))?;
                say(&Told::Compiles(compiles))?;
            }
            Ok(Err(text)) => say(&Told::Fails { index: Some(gpu.index), text, hint: None })?,
            Err(error) => say(&fails(Some(gpu.index), error))?,
        }
    }
    say(&Told::Done)
}

/// What compiles for a GPU, or what is wrong with it that no call of the driver has said.
fn works(gpu: &Wanted) -> Result<Result<Compiles, String>, cuda::Error> {
    let device = Device::open(gpu.pci)?;
    let uuid = device.uuid()?;
    if let (Some(wanted), Some(found)) = (&gpu.uuid, uuid)
        && *wanted != found
    {
        return Ok(Err(format!("CUDA has {found} at {}, NVML {wanted}", gpu.pci)));
    }
    let bytes: Vec<u8> = (0..=250).cycle().take(BYTES).collect();
    let mut buffer = device.allocate(BYTES)?;
    buffer.write(0, &bytes)?;
    let mut back = vec![0; BYTES];
    buffer.read(0, &mut back)?;
    if back != bytes {
        return Ok(Err("1 MiB came back with other bytes".to_owned()));
    }
    buffer.ipc_handle()?;
    let made = device.compiler().map(Option::unwrap_or_default);
    Ok(Ok(made.map_err(|error| (in_full(&error), !matches!(error, cuda::Error::Driver { .. })))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpus(count: u32) -> Vec<Wanted> {
        let pci = "0000:1b:00.0".parse().expect("an address");
        (0..count).map(|index| Wanted { index: GpuIndex(index), pci, uuid: None }).collect()
    }

    fn tried(told: Vec<Told>) -> Tried {
        Tried { told, end: Some(ExitStatus::default()), last_error: Some("b".to_owned()) }
    }

    fn judged(told: Vec<Told>) -> Finding {
        judge(&gpus(2), &tried(told), false, OPENING)
    }

    #[test]
    fn only_what_was_said_to_work_works() {
        let works = |index| Told::Works(GpuIndex(index));
        let well = judged(vec![Told::Count(2), works(0), works(1), Told::Done]);
        assert_eq!(well.severity, Severity::Ok, "{well:?}");
        let cut = judged(vec![Told::Count(2), works(0)]);
        assert_eq!(cut.severity, Severity::Error);
        assert!(cut.text.contains("at GPU 1") && cut.text.ends_with(": b"), "{cut:?}");
        let fewer = judged(vec![Told::Count(1), works(0), works(1), Told::Done]);
        assert!(fewer.text.contains("CUDA has 1 GPUs, NVML 2"), "{fewer:?}");
        let fails = |index: u32| Told::Fails {
            index: Some(GpuIndex(index)),
            text: "cuX failed".to_owned(),
            hint: Some("do".to_owned()),
        };
        let all = judged(vec![Told::Count(2), fails(0), fails(1), Told::Done]);
        assert_eq!(all.text, "on each of 2 GPUs: cuX failed");
        let one = judged(vec![Told::Count(2), works(0), fails(1), Told::Done]);
        assert_eq!((one.text.as_str(), one.remedy.as_deref()), ("GPU 1: cuX failed", Some("do")));
        let late = Tried { end: None, ..tried(vec![Told::Count(2)]) };
        let late = judge(&gpus(2), &late, false, OPENING);
        assert!(late.text.starts_with("no answer within 20s at GPU 0"), "{late:?}");
    }
}
