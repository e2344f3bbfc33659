//! Probes this machine: NVML for GPUs, hwloc for CPUs and NUMA nodes, sysfs for PCI and NICs.
//!
//! Makes no decisions. What can't be read becomes a note on the topology.
//!
//! *Invariant:* a topology contains what was read, and a note for what was not.

mod assemble;
mod caller;
mod evidence;
mod fabric;
mod gauges;
mod hwloc;
mod libucp;
mod locality;
mod nvlink;
mod nvml;
mod nvml_library;
mod occupancy;
mod own;
mod port;
mod questions;
mod sysfs;
mod traffic;
mod xid;

use std::path::PathBuf;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde::Serialize;

use cuda_cluster_model::preflight::Evidence;
use cuda_cluster_model::topology::{Allowed, Topology};
use cuda_cluster_model::units::{Span, UnitError};

pub use caller::{caller, here};
pub use evidence::seen;
pub use gauges::{GpuGauges, GpuMeter};
pub use libucp::{NoLibucp, check_libucp, own_environment};
pub use nvml_library::{DriverFault, Libraries};
pub use occupancy::{Holder, OccupancyError, holders, holders_of_each};
pub use port::{PortError, check_port};
pub use traffic::{Traffic, nics, traffic};
pub use xid::{XidEvent, XidWatch};

/// The path of another `libnvidia-ml.so.1`, or `none` to look for no GPUs.
pub const NVML_VARIABLE: &str = "CUDA_CLUSTER_NVML";
/// Replaces `/sys`.
pub const SYSFS_VARIABLE: &str = "CUDA_CLUSTER_SYSFS";
/// Replaces `/proc`.
pub const PROCFS_VARIABLE: &str = "CUDA_CLUSTER_PROCFS";
/// Replaces `/dev`, for what is looked at there but not opened as a device.
pub const DEV_VARIABLE: &str = "CUDA_CLUSTER_DEV";
/// Replaces `/etc`.
pub const ETC_VARIABLE: &str = "CUDA_CLUSTER_ETC";
/// Time after which NVML counts as hung, such as `30s`.
pub const LIMIT_VARIABLE: &str = "CUDA_CLUSTER_NVML_LIMIT";

/// Default time limit for the NVIDIA driver. Without its persistence daemon it initialises every
/// GPU anew, which takes seconds each.
const NVML_LIMIT: Duration = Duration::from_secs(120);

/// Where to look. [`Options::default`] is this machine; tests use other places.
///
/// hwloc has its own switch, the environment variable `HWLOC_XMLFILE`.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where to look for NVML.
    pub nvml: Libraries,
    /// Time after which NVML counts as hung.
    pub nvml_limit: Duration,
    /// Mount point of sysfs.
    pub sysfs: PathBuf,
    /// Mount point of procfs.
    pub procfs: PathBuf,
    /// Where device files are.
    pub dev: PathBuf,
    /// Where the system's settings are.
    pub etc: PathBuf,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            nvml: Libraries::Usual,
            nvml_limit: NVML_LIMIT,
            sysfs: "/sys".into(),
            procfs: "/proc".into(),
            dev: "/dev".into(),
            etc: "/etc".into(),
        }
    }
}

impl Options {
    /// This machine, or the places in [`NVML_VARIABLE`], [`SYSFS_VARIABLE`], [`PROCFS_VARIABLE`],
    /// [`DEV_VARIABLE`] and [`ETC_VARIABLE`], with the limit in [`LIMIT_VARIABLE`].
    ///
    /// # Errors
    /// If [`LIMIT_VARIABLE`] is not a time span.
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
            dev: named(DEV_VARIABLE).map_or(usual.dev, PathBuf::from),
            etc: named(ETC_VARIABLE).map_or(usual.etc, PathBuf::from),
        })
    }
}

/// A probed machine, and what else was seen of it.
#[derive(Clone, Debug)]
pub struct Examined {
    /// The machine.
    pub topology: Topology,
    /// What preflight judges.
    pub evidence: Evidence,
}

/// A probed machine, and how long probing took.
#[derive(Clone, Debug)]
pub struct Probed {
    /// The machine. Its `driver` is `None` if there is no NVIDIA driver, which is also noted.
    pub topology: Topology,
    /// How long each source took.
    pub timings: Timings,
}

/// Probing times by source. The sources are queried concurrently, so the sum can exceed the total.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Timings {
    /// Milliseconds in NVML, including loading the library.
    pub nvml_ms: f64,
    /// Milliseconds in hwloc.
    pub hwloc_ms: f64,
    /// Milliseconds in sysfs and procfs.
    pub sysfs_ms: f64,
    /// Milliseconds in total.
    pub total_ms: f64,
}

impl std::fmt::Display for Timings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { nvml_ms, hwloc_ms, sysfs_ms, total_ms } = self;
        write!(f, "NVML {nvml_ms:.1} ms, hwloc {hwloc_ms:.1} ms and sysfs {sysfs_ms:.1} ms, ")?;
        write!(f, "side by side; {total_ms:.1} ms in all")
    }
}

/// Why this machine could not be probed.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// No thread could be started to query the driver.
    #[error("cannot start a thread to look at the machine")]
    Thread(#[source] std::io::Error),
    /// The NVIDIA driver is broken.
    #[error("the NVIDIA driver does not work")]
    Driver(#[source] DriverFault),
    /// The environment's time limit is invalid.
    #[error("the environment variable {LIMIT_VARIABLE} is wrong")]
    Limit(#[source] UnitError),
    /// NVML did not return in time.
    #[error("the NVIDIA driver did not answer within {}", Span(*limit))]
    DriverHangs {
        /// The time limit.
        limit: Duration,
    },
}

impl ProbeError {
    /// A hint for the user.
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

/// Probes the machine.
///
/// # Errors
/// If there is an NVIDIA driver that does not work. Without a driver the topology has no GPUs and a
/// note.
pub fn probe(options: &Options) -> Result<Probed, ProbeError> {
    look(options, false).map(|(probed, _)| probed)
}

/// Probes the machine, and gathers what preflight judges, in the same time.
///
/// # Errors
/// As [`probe`].
pub fn examine(options: &Options) -> Result<Examined, ProbeError> {
    let (Probed { topology, .. }, evidence) = look(options, true)?;
    Ok(Examined { topology, evidence })
}

fn look(options: &Options, examine: bool) -> Result<(Probed, Evidence), ProbeError> {
    let begin = Instant::now();
    let (sender, answer) = mpsc::channel();
    let libraries = options.nvml.clone();
    // A separate thread, because a broken driver can hang in the kernel forever, and a scoped
    // thread would have to be waited for.
    let ask = move || {
        let begin = Instant::now();
        let findings = nvml::look(&libraries, examine);
        // After the time limit the receiver is gone.
        let _ = sender.send((findings, begin.elapsed()));
    };
    std::thread::Builder::new().spawn(ask).map_err(ProbeError::Thread)?;

    let ((processors, hwloc_time), (host, host_time)) = std::thread::scope(|beside| {
        let processors = std::thread::Builder::new().spawn_scoped(beside, || timed(hwloc::look));
        let host = timed(|| sysfs::look(&options.sysfs, &options.procfs));
        let processors = match processors {
            Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            // Without a second thread, query one after the other.
            Err(_) => timed(hwloc::look),
        };
        (processors, host)
    });
    // Beside the driver, which takes longer.
    let early = if examine { evidence::early(options) } else { evidence::Early::default() };

    let waited = answer.recv_timeout(options.nvml_limit);
    let (findings, nvml_time) =
        waited.map_err(|_| ProbeError::DriverHangs { limit: options.nvml_limit })?;
    let mut findings = findings.map_err(ProbeError::Driver)?;
    let states = std::mem::take(&mut findings.states);
    let (topology, assembly_time) = timed(|| assemble::topology(findings, processors, host));
    let evidence = match examine {
        true => evidence::complete(early, states, options, &topology),
        false => Evidence::default(),
    };

    let timings = Timings {
        nvml_ms: millis(nvml_time),
        hwloc_ms: millis(hwloc_time),
        sysfs_ms: millis(host_time + assembly_time),
        total_ms: millis(begin.elapsed()),
    };
    Ok((Probed { topology, timings }, evidence))
}

/// The CPUs and memory that this process may use, without probing anything else.
///
/// `None` if the kernel does not report it.
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
