//! What each engine is told beyond the shared parts of a plan.
//!
//! Every value is decided here: an engine has no defaults of its own that a plan does not show.
//! What depends on what an engine finds when it starts (which Python, which packages) is left out.
//!
//! *Invariant:* keys that no engine knows are refused when a plan is read.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::spec::{EngineKind, Placement, PortRange, WorkerNames};
use crate::units::Span;

/// What runs in the processes, and what it is told. In JSON an object with one key, the engine's
/// name.
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
    /// Which engine it is.
    pub fn kind(&self) -> EngineKind {
        match self {
            EnginePlan::Native(_) => EngineKind::Native,
            EnginePlan::Dask(_) => EngineKind::Dask,
            EnginePlan::Command(_) => EngineKind::Command,
        }
    }
}

/// What the native engine's processes are told.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NativePlan {
    /// Program of the workers, which begins with `cluster::dispatch`; `None` for the supervisor's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<PathBuf>,
    /// Directory for what memory has no room for; `None` for the one for temporary files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local_directory: Option<PathBuf>,
    /// Most bytes of a worker's objects in host memory; `None` for what its memory limit leaves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_limit_bytes: Option<u64>,
    /// Most bytes of a worker's objects on disk; `None` for no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_limit_bytes: Option<u64>,
    /// What each worker promises to tasks, besides one `GPU` where it has one.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub resources: BTreeMap<String, u64>,
    /// How a task's worker is chosen.
    #[serde(default)]
    pub placement: Placement,
    /// File for everything that the task scheduler hears; relative to the run directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub record_events: Option<PathBuf>,
    /// 10⁹ bytes per second that the way from a worker to another should carry, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub gb_per_s: BTreeMap<String, BTreeMap<String, f64>>,
    /// Bytes per second at which a worker fetches from another, by name: for measuring placement
    /// on links that are slower than this machine's. Empty: as fast as they are.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub simulated_links: BTreeMap<String, BTreeMap<String, f64>>,
}

/// What the Dask engine's processes are told.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DaskPlan {
    /// `tcp`, `tls`, `ucx` or `ucxx`.
    pub protocol: String,
    /// The Python to run; `None` for that of the active environment.
    pub python: Option<String>,
    /// Whether one Python imports what the others need, and they are forked from it.
    pub fork: bool,
    /// Address or file of a scheduler to join; `None` where the cluster has its own.
    pub join: Option<String>,
    /// Address that scheduler and workers listen on and are reached at. With neither this nor
    /// `interface` it is the one that faces the joined scheduler.
    pub host: Option<String>,
    /// Or the network interface whose address that is.
    pub interface: Option<String>,
    /// Ports for the scheduler to try, in order.
    pub scheduler_ports: PortRange,
    /// Whether it must be one of them; otherwise any free one will do.
    pub scheduler_ports_required: bool,
    /// Where the scheduler's address is written besides the run directory.
    pub scheduler_file: Option<PathBuf>,
    /// Whether there are dashboards.
    pub dashboard: bool,
    /// Where the scheduler's dashboard listens, if that port is free.
    pub dashboard_address: String,
    /// Prefix of the dashboards' URLs.
    pub dashboard_prefix: String,
    /// Files for TLS.
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
    /// Modules imported before the fork.
    pub pre_import: Vec<String>,
    /// Modules or files loaded by each worker at its start.
    pub preload: Vec<String>,
    /// A worker without a scheduler for this long ends.
    pub death_timeout: Option<Span>,
    /// A worker of this age is replaced.
    pub lifetime: Option<Span>,
    /// Fewest workers; `None` for all of them, always.
    pub adapt_minimum: Option<u32>,
    /// A worker's class.
    pub worker_class: String,
    /// What Dask calls the workers.
    #[serde(default, skip_serializing_if = "is_usual")]
    pub worker_names: WorkerNames,
    /// Level of the statistics of cuDF's own spilling; `None` without that.
    pub cudf_spill: Option<u32>,
    /// Dask configuration, key to value.
    pub config: BTreeMap<String, String>,
}

fn is_usual(names: &WorkerNames) -> bool {
    *names == WorkerNames::default()
}

/// Files for TLS, all PEM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsFiles {
    /// Certificates of the authorities to trust.
    pub ca_file: String,
    /// Own certificate.
    pub cert: String,
    /// Own key.
    pub key: String,
}

/// What the command engine runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CommandPlan {
    /// Program and arguments of every rank; empty where nobody has named a program yet.
    pub argv: Vec<String>,
}
