//! Looks at this machine: NVML for GPUs, hwloc for CPUs and NUMA nodes, sysfs for PCI and NICs.
//!
//! Decides nothing. What could not be read becomes a note on the topology.
//!
//! *Invariant:* the answer states what was read, and notes what was not.

mod assemble;
mod caller;
mod hwloc;
mod libucp;
mod locality;
mod nvlink;
mod nvml;
mod nvml_library;
mod occupancy;
mod own;
mod sysfs;
mod xid;

use std::path::PathBuf;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::topology::{Allowed, Topology};
use crate::units::{Span, UnitError};

pub use caller::{caller, here};
pub use libucp::{NoLibucp, check_libucp};
pub use nvml_library::{DriverFault, Libraries};
pub use occupancy::{Holder, OccupancyError, holders};
pub use xid::{XidEvent, XidWatch};

/// Names another `libnvidia-ml.so.1`, or `none` to look for no GPUs.
pub const NVML_VARIABLE: &str = "CUDA_CLUSTER_NVML";
/// Names another place than `/sys`.
pub const SYSFS_VARIABLE: &str = "CUDA_CLUSTER_SYSFS";
/// Names another place than `/proc`.
pub const PROCFS_VARIABLE: &str = "CUDA_CLUSTER_PROCFS";
/// How long NVML may take before it counts as hung, like `30s`.
pub const LIMIT_VARIABLE: &str = "CUDA_CLUSTER_NVML_LIMIT";

/// How long the NVIDIA driver may take. Without its persistence daemon it initialises every GPU
/// anew, which takes seconds each.
const NVML_LIMIT: Duration = Duration::from_secs(120);

/// Where to look. [`Options::default`] is this machine; tests name another.
///
/// hwloc has its own switch, the environment variable `HWLOC_XMLFILE`.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where NVML may be.
    pub nvml: Libraries,
    /// How long NVML may take before it counts as hung.
    pub nvml_limit: Duration,
    /// Mount point of sysfs.
    pub sysfs: PathBuf,
    /// Mount point of procfs.
    pub procfs: PathBuf,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            nvml: Libraries::Usual,
            nvml_limit: NVML_LIMIT,
            sysfs: "/sys".into(),
            procfs: "/proc".into(),
        }
    }
}

impl Options {
    /// This machine, or what [`NVML_VARIABLE`], [`SYSFS_VARIABLE`] and [`PROCFS_VARIABLE`] name
    /// instead; [`LIMIT_VARIABLE`] holds too.
    ///
    /// # Errors
    /// If [`LIMIT_VARIABLE`] is no span of time.
    pub fn from_environment() -> Result<Self, ProbeError> {
        let named = |variable| std::env::var_os(variable).filter(|value| !value.is_empty());
        let usual = Self::default();
        let nvml = match named(NVML_VARIABLE) {
            None => Libraries::Usual,
            Some(none) if none == "none" => Libraries::None,
            Some(path) => Libraries::Named(path.into()),
        };
        let nvml_limit = match named(LIMIT_VARIABLE) {
            None => usual.nvml_limit,
            Some(text) => {
                let span: Result<Span, UnitError> = text.to_string_lossy().parse();
                span.map_err(ProbeError::Limit)?.0
            }
        };
        Ok(Self {
            nvml,
            nvml_limit,
            sysfs: named(SYSFS_VARIABLE).map_or(usual.sysfs, PathBuf::from),
            procfs: named(PROCFS_VARIABLE).map_or(usual.procfs, PathBuf::from),
        })
    }
}

/// A machine that was looked at, and how long looking took.
#[derive(Clone, Debug)]
pub struct Probed {
    /// The machine. Its `driver` is `None` when there is no NVIDIA driver, and a note says so.
    pub topology: Topology,
    /// Where the time went.
    pub timings: Timings,
}

/// How long looking took, by source. They are asked side by side: the parts can exceed the whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Timings {
    /// Milliseconds in NVML, loading the library included.
    pub nvml_ms: f64,
    /// Milliseconds in hwloc.
    pub hwloc_ms: f64,
    /// Milliseconds in sysfs and procfs.
    pub sysfs_ms: f64,
    /// Milliseconds from beginning to end.
    pub total_ms: f64,
}

impl std::fmt::Display for Timings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { nvml_ms, hwloc_ms, sysfs_ms, total_ms } = self;
        write!(f, "NVML {nvml_ms:.1} ms, hwloc {hwloc_ms:.1} ms and sysfs {sysfs_ms:.1} ms, ")?;
        write!(f, "side by side; {total_ms:.1} ms in all")
    }
}

/// Why this machine could not be looked at.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// There is no thread to ask the driver in.
    #[error("cannot start a thread to look at the machine")]
    Thread(#[source] std::io::Error),
    /// There is an NVIDIA driver, and it does not work.
    #[error("the NVIDIA driver does not work")]
    Driver(#[source] DriverFault),
    /// The environment asks for a limit that is none.
    #[error("the environment variable {LIMIT_VARIABLE} is wrong")]
    Limit(#[source] UnitError),
    /// NVML did not come back.
    #[error("the NVIDIA driver did not answer within {}", Span(*limit))]
    DriverHangs {
        /// How long it was given.
        limit: Duration,
    },
}

impl ProbeError {
    /// What the user can do.
    pub fn hint(&self) -> Option<String> {
        match self {
            ProbeError::Driver(fault) => fault.hint(),
            ProbeError::Limit(_) | ProbeError::Thread(_) => None,
            ProbeError::DriverHangs { .. } => Some(
                "see whether `nvidia-smi` hangs too, and look for 'NVRM: Xid' in the kernel's log"
                    .to_owned(),
            ),
        }
    }
}

/// Looks at the machine.
///
/// # Errors
/// If there is an NVIDIA driver that does not work. Without any driver the answer has no GPUs and
/// a note.
pub fn probe(options: &Options) -> Result<Probed, ProbeError> {
    let begin = Instant::now();
    let (sender, answer) = mpsc::channel();
    let libraries = options.nvml.clone();
    // A thread of its own, because a broken driver can hang in the kernel for ever; a scoped one
    // would have to be waited for.
    let ask = move || {
        let begin = Instant::now();
        let findings = nvml::look(&libraries);
        // Nobody listens any more when the time limit has passed.
        let _ = sender.send((findings, begin.elapsed()));
    };
    std::thread::Builder::new().spawn(ask).map_err(ProbeError::Thread)?;

    let ((processors, hwloc_time), (host, host_time)) = std::thread::scope(|beside| {
        let processors = std::thread::Builder::new().spawn_scoped(beside, || timed(hwloc::look));
        let host = timed(|| sysfs::look(&options.sysfs, &options.procfs));
        let processors = match processors {
            Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            // One after the other then.
            Err(_) => timed(hwloc::look),
        };
        (processors, host)
    });

    let waited = answer.recv_timeout(options.nvml_limit);
    let (findings, nvml_time) =
        waited.map_err(|_| ProbeError::DriverHangs { limit: options.nvml_limit })?;
    let findings = findings.map_err(ProbeError::Driver)?;
    let (topology, assembly_time) = timed(|| assemble::topology(findings, processors, host));

    let timings = Timings {
        nvml_ms: millis(nvml_time),
        hwloc_ms: millis(hwloc_time),
        sysfs_ms: millis(host_time + assembly_time),
        total_ms: millis(begin.elapsed()),
    };
    Ok(Probed { topology, timings })
}

/// What this process may use, without looking at anything else.
///
/// `None` when the kernel did not tell.
pub fn allowed(options: &Options) -> Option<Allowed> {
    own::allowed(&options.procfs)
}

fn timed<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let begin = Instant::now();
    let answer = work();
    (answer, begin.elapsed())
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
