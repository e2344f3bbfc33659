//! The settings of each engine.
//!
//! All defaults are filled in, so that a plan shows every setting. Only what an engine finds out
//! when it starts (which Python, which packages) is left out.
//!
//! *Invariant:* a plan with a key that its engine does not know is refused.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::spec::{Bootstrap, ClusterSpec, EngineKind, Placement, PortRange, WorkerNames};
use crate::units::Span;

/// The engine and its settings. In JSON an object with one key, the engine's name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EnginePlan {
    /// Our own scheduler and workers.
    Native(NativePlan),
    /// Dask's scheduler and workers.
    Dask(Box<DaskPlan>),
    /// Any program, one rank per GPU.
    Command(CommandPlan),
}

impl EnginePlan {
    /// The engine alone, without its settings.
    pub fn kind(&self) -> EngineKind {
        match self {
            EnginePlan::Native(_) => EngineKind::Native,
            EnginePlan::Dask(_) => EngineKind::Dask,
            EnginePlan::Command(_) => EngineKind::Command,
        }
    }

    /// Where each rank's output also goes; only the command engine has ranks.
    pub fn output_dir(&self) -> Option<&Path> {
        match self {
            EnginePlan::Native(_) | EnginePlan::Dask(_) => None,
            EnginePlan::Command(command) => command.output_dir.as_deref(),
        }
    }
}

/// Settings of the native engine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NativePlan {
    /// Program of the workers, which begins with `cluster::dispatch`; `None` for the supervisor's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<PathBuf>,
    /// Directory for objects that are spilled to disk; `None` for the directory of temporary files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local_directory: Option<PathBuf>,
    /// Limit of a worker's objects in host memory, in bytes; `None` derives it from its memory
    /// limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_limit_bytes: Option<u64>,
    /// Limit of a worker's objects on disk, in bytes; `None` for no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_limit_bytes: Option<u64>,
    /// Resources that each worker offers to tasks, besides `GPU: 1` for a worker with a GPU.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub resources: BTreeMap<String, u64>,
    /// How a task's worker is chosen.
    #[serde(default)]
    pub placement: Placement,
    /// File that records every message to the task scheduler; relative to the run directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub record_events: Option<PathBuf>,
    /// Expected bandwidth from one worker to another in 10⁹ bytes per second, by their names.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub gb_per_s: BTreeMap<String, BTreeMap<String, f64>>,
    /// Bytes per second to which fetches from one worker by another are slowed down, by their
    /// names: for measuring placement on links slower than this machine's. Empty for no slowing.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub simulated_links: BTreeMap<String, BTreeMap<String, f64>>,
}

/// Settings of the Dask engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DaskPlan {
    /// `tcp`, `tls`, `direct`, `ucx` or `ucxx`.
    pub protocol: String,
    /// The Python to run; `None` for that of the active environment.
    pub python: Option<String>,
    /// Whether the processes are forked from one Python that has imported everything.
    pub fork: bool,
    /// Address or file of a scheduler to join; `None` if the cluster has its own.
    pub join: Option<String>,
    /// Other machines whose workers join the scheduler.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<HostPlan>,
    /// What each of them is asked for, besides the scheduler's address; `None` without any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub there: Option<ClusterSpec>,
    /// Whether each of them is to run all checks first.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub preflight: bool,
    /// Address that scheduler and workers listen on and announce. Without this and `interface`, the
    /// address from which the joined scheduler is reached.
    pub host: Option<String>,
    /// Network interface whose address is used instead of `host`.
    pub interface: Option<String>,
    /// Ports for the scheduler to try, in order.
    pub scheduler_ports: PortRange,
    /// Whether other ports are refused; otherwise any free port is used if these are taken.
    pub scheduler_ports_required: bool,
    /// Where the scheduler's address is written besides the run directory.
    pub scheduler_file: Option<PathBuf>,
    /// Whether there are dashboards.
    pub dashboard: bool,
    /// Where the scheduler's dashboard listens, if that port is free.
    pub dashboard_address: String,
    /// Prefix of the dashboards' URLs; `/` for none.
    pub dashboard_prefix: String,
    /// Files for TLS; `None` without TLS.
    pub tls: Option<TlsFiles>,
    /// Ports for the workers, one each in rank order; `None` for any free ones.
    pub worker_ports: Option<PortRange>,
    /// Address that the only worker listens on.
    pub listen_address: Option<String>,
    /// Address that the only worker is reached at.
    pub contact_address: Option<String>,
    /// Directory for spilled data; `None` leaves it to Dask.
    pub local_directory: Option<PathBuf>,
    /// Abstract resources of each worker.
    pub resources: Option<BTreeMap<String, f64>>,
    /// What each worker has besides for its kind, `GPU` or `CPU`, by the names of their processes:
    /// as many as it has threads, so that nothing waits that a thread is free for.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub resources_by_kind: BTreeMap<String, BTreeMap<String, u32>>,
    /// Modules imported before the fork.
    pub pre_import: Vec<String>,
    /// Modules or files loaded by each worker at its start.
    pub preload: Vec<String>,
    /// A worker that has had no scheduler for this long ends.
    pub death_timeout: Option<Span>,
    /// A worker of this age is replaced.
    pub lifetime: Option<Span>,
    /// Least number of workers when adapting; `None` runs all of them.
    pub adapt_minimum: Option<u32>,
    /// How many workers to start, the first ones; `None` for all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_workers: Option<u32>,
    /// The Python class of the workers, such as `distributed.Worker`.
    pub worker_class: String,
    /// How Dask's names of the workers are chosen.
    #[serde(default, skip_serializing_if = "is_usual")]
    pub worker_names: WorkerNames,
    /// What a joined scheduler calls the only worker; several are numbered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker_name: Option<String>,
    /// Dask's names of the workers by those of their processes, where these are others.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub names: BTreeMap<String, DaskName>,
    /// Level of statistics of cuDF's own spilling; `None` if cuDF does not spill.
    pub cudf_spill: Option<u32>,
    /// Dask configuration, key to value.
    pub config: BTreeMap<String, String>,
    /// Whether the cluster's own scheduler places tasks by the wires between workers.
    #[serde(default)]
    pub place_by_wires: bool,
    /// Whether the cluster's own scheduler gives tasks of GPU packages to GPU workers alone.
    #[serde(default)]
    pub place_by_kind: bool,
    /// Expected bandwidth from one worker to another in 10⁹ bytes per second, by the names of their
    /// processes: what that scheduler begins with.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub gb_per_s: BTreeMap<String, BTreeMap<String, f64>>,
}

/// A machine whose workers join the scheduler of this one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostPlan {
    /// The process here that brings them up.
    pub process: String,
    /// The machine, as it was named.
    pub host: String,
    /// What the process runs: ssh, and what that is to run there.
    pub argv: Vec<String>,
}

fn is_usual(names: &WorkerNames) -> bool {
    *names == WorkerNames::default()
}

/// A worker's name in Dask: the user's code may compare it with a GPU's index.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum DaskName {
    /// A number.
    Index(u32),
    /// A text that is none.
    Text(String),
}

impl From<String> for DaskName {
    /// Deployments that number their workers compare the names with numbers.
    fn from(name: String) -> Self {
        name.parse().map_or(DaskName::Text(name), DaskName::Index)
    }
}

/// Files for TLS, all PEM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct TlsFiles {
    /// Certificates of the authorities to trust.
    pub ca_file: String,
    /// Own certificate, which peers check.
    pub cert: String,
    /// Own key, which fits the certificate.
    pub key: String,
}

/// Settings of the command engine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct CommandPlan {
    /// Program and arguments of every rank; empty if no program has been named yet, or there are
    /// several.
    pub argv: Vec<String>,
    /// Several programs, in the order of their ranks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub programs: Vec<ProgramPlan>,
    /// In whose languages ranks are told of each other.
    #[serde(default)]
    pub bootstrap: Vec<Bootstrap>,
    /// How often the ranks are started again when one fails, all together.
    #[serde(default)]
    pub restarts: u32,
    /// How many ranks, the last ones, only take the places of those whose GPU is lost.
    #[serde(default)]
    pub spares: u32,
    /// Python modules that are imported once, before the ranks are forked.
    #[serde(default)]
    pub warm: Vec<String>,
    /// Directory that also gets what each rank writes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_dir: Option<PathBuf>,
}

impl CommandPlan {
    /// Program and arguments of a rank that runs this one of several programs, or the only one.
    pub fn argv_of(&self, program: Option<&str>) -> &[String] {
        let named = |name| self.programs.iter().find(|one| one.name == name);
        program.and_then(named).map_or(&self.argv, |one| &one.argv)
    }

    /// Whether it is known what every rank runs.
    pub fn is_complete(&self) -> bool {
        match self.programs.as_slice() {
            [] => !self.argv.is_empty(),
            several => several.iter().all(|program| !program.argv.is_empty()),
        }
    }
}

/// One of several programs of a job.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct ProgramPlan {
    /// Its name.
    pub name: String,
    /// How many ranks run it.
    pub workers: u32,
    /// Program and arguments; empty if it has not been named yet.
    pub argv: Vec<String>,
}
