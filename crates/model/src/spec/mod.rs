//! What the user asked for: the YAML spec, version 1, and the flags that override it.
//!
//! Does not look at a machine, and decides nothing.
//!
//! *Invariant:* a [`ClusterSpec`] that was read has no unknown keys and no contradictions. A value
//! that was not set is `None`, because `plan` decides the defaults.

mod choices;
mod contradictions;
mod error;
mod flags;
mod gpu_selection;
mod hosts;
mod implausible;
mod net_devices;
mod network;
mod programs;
mod python;
mod read;
mod request;
mod schema;
mod sections;
mod substitution;
mod template;
mod texts;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::ids::ClusterName;

pub use choices::{
    Bootstrap, CpuBinding, EngineKind, Limit, MemoryPolicy, Most, Placement, PortRange,
    RestartWhen, SchedulerDeath, Treatment, UcxCompat, UcxPreset, UcxVersion, Ulimit, Unresponsive,
    VisibleDevices, WorkerNames,
};
pub(crate) use contradictions::{MOST_LOGS, MOST_THREADS};
pub use error::{Problem, SpecError};
pub use flags::{Flag, Takes, flags, whole};
pub use gpu_selection::{ChooseBy, ChooseGpus, GpuName, GpuSelection};
pub use hosts::{Host, HostError};
pub use net_devices::NetDevices;
pub use python::{Named, NotPython, PythonCommand};
pub use read::{SIZE_LIMIT, from_keys, parse, parse_with};
pub use schema::schema;

pub use request::{Origin, Request};
pub use sections::{
    CommandSpec, DaskSpec, DeviceSpec, LogSpec, MatchSpec, MemorySpec, NativeSpec, OverrideSpec,
    ProgramSpec, RmmSpec, SchedulerSpec, SupervisionSpec, TlsSpec, UcxSpec, UlimitSpec, WorkerSpec,
};
pub use template::{Template, TemplateError, Variables};
pub use texts::each as each_text;

/// The version of the spec's text form that this program reads.
pub const VERSION: u32 = 1;

/// What a cluster should be, as the user wrote it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct ClusterSpec {
    /// Version of this form: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    /// Name of the cluster and of its run directory. Default: `default`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<ClusterName>,
    /// The engine that runs in the processes. Default: `native`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<EngineKind>,
    /// A topology's name or path. Its plan runs here only if all its GPUs are in this machine, by
    /// UUID, or are simulated. Default: this machine, live.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub topology: Option<String>,
    /// Run the plan of another machine here, with simulated devices. Default: false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub simulate: Option<bool>,
    /// Refuse a plan with a note about what is missing, assumed, doubtful or asked for in vain, and
    /// a process that cannot be bound or limited as planned. What follows from the request itself
    /// stays a note: GPUs that `skip` leaves out, MIG instances that are listed one by one, what a
    /// simulation lacks here, and the TCP listeners of UCX. Default: false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strict: Option<bool>,
    /// Whether the cluster is READY only after every pair of workers has moved data over the
    /// expected lanes. Default: false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verify: Option<bool>,
    /// Which GPUs: `all`, `none`, a list like `0-3,6`, UUIDs, PCI addresses, MIG instances, or
    /// `{count: 4, choose: best-connected}`. Default: all that `CUDA_VISIBLE_DEVICES` leaves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpus: Option<GpuSelection>,
    /// Number of these GPUs that get workers: the best-connected ones. Default: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workers: Option<u32>,
    /// Workers for each GPU. Default: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workers_per_gpu: Option<u32>,
    /// Extra workers without a GPU. Default: 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_workers: Option<u32>,
    /// Threads of a worker that run tasks. Default: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads: Option<u32>,
    /// What to do with GPUs that other processes use. Default: `warn`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busy_gpus: Option<Treatment>,
    /// What to do with GPUs that drive a display. Default: skip a smaller one of another model
    /// than the rest, warn about others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub display_gpus: Option<Treatment>,
    /// Which CPUs a worker gets. Default: `local`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<CpuBinding>,
    /// Whole cores reserved for the scheduler under `cpus: split`. Default: cores that no worker
    /// uses, if there are any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scheduler_cores: Option<u32>,
    /// Host memory of each worker: where it lies, and how much.
    #[serde(default, deserialize_with = "read::section", skip_serializing_if = "is_default")]
    pub memory: MemorySpec,
    /// Device memory of each worker: when it spills.
    #[serde(default, deserialize_with = "read::section", skip_serializing_if = "is_default")]
    pub device: DeviceSpec,
    /// RAPIDS memory manager pools.
    #[serde(default, deserialize_with = "read::section", skip_serializing_if = "is_default")]
    pub rmm: RmmSpec,
    /// UCX: transports and network devices.
    #[serde(default, deserialize_with = "read::section", skip_serializing_if = "is_default")]
    pub ucx: UcxSpec,
    /// The scheduler's process: where it listens, its dashboard, its environment.
    #[serde(default, deserialize_with = "read::section", skip_serializing_if = "is_default")]
    pub scheduler: SchedulerSpec,
    /// The workers' processes: ports, directories, environment.
    #[serde(default, deserialize_with = "read::section", skip_serializing_if = "is_default")]
    pub worker: WorkerSpec,
    /// Restarts, time-outs, and what happens to processes that hang.
    #[serde(default, deserialize_with = "read::section", skip_serializing_if = "is_default")]
    pub supervision: SupervisionSpec,
    /// Resource limits of every process, as `ulimit` sets them.
    #[serde(default, deserialize_with = "read::section", skip_serializing_if = "is_default")]
    pub ulimits: UlimitSpec,
    /// Log files: when they are rotated, and how many are kept.
    #[serde(default, deserialize_with = "read::section", skip_serializing_if = "is_default")]
    pub logs: LogSpec,
    /// Transport security of the Dask engine over TCP.
    #[serde(default, deserialize_with = "read::section", skip_serializing_if = "is_default")]
    pub tls: TlsSpec,
    /// The Dask engine's own options.
    #[serde(default, deserialize_with = "read::section", skip_serializing_if = "is_default")]
    pub dask: DaskSpec,
    /// The command engine's own options.
    #[serde(default, deserialize_with = "read::section", skip_serializing_if = "is_default")]
    pub command: CommandSpec,
    /// The native engine's own options.
    #[serde(default, deserialize_with = "read::section", skip_serializing_if = "is_default")]
    pub native: NativeSpec,
    /// Overrides for some workers; later ones win.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub overrides: Vec<OverrideSpec>,
}

impl ClusterSpec {
    /// Makes relative paths absolute, below `base`, so that processes and clients may run in any
    /// directory. A program, library, module or topology that is a mere name is left to be looked
    /// up, and arguments of a program are left as they are.
    pub fn resolve_paths(&mut self, base: &Path) {
        let TlsSpec { ca_file, cert, key } = &mut self.tls;
        let WorkerSpec { local_directory, pid_file, .. } = &mut self.worker;
        let (scheduler, logs) = (&mut self.scheduler.file, &mut self.rmm.log_directory);
        let output = &mut self.command.output_dir;
        let paths = [ca_file, cert, key, local_directory, pid_file, scheduler, logs, output];
        let DaskSpec { python, preload, .. } = &mut self.dask;
        let programs = [&mut self.native.program, python, &mut self.ucx.library];
        let several = self.command.programs.iter_mut().flatten();
        let several = several.flat_map(|program| program.argv.iter_mut().flatten().take(1));
        let command = self.command.argv.iter_mut().flatten().take(1).chain(several);
        let programs = programs.into_iter().flatten().chain(command);
        let programs = programs.filter(|program| program.contains('/'));
        let preload = preload.iter_mut().flatten().filter(|module| is_file(module));
        let topology = self.topology.as_mut().filter(|topology| {
            topology.contains('/') || Path::new(topology.as_str()).extension().is_some()
        });
        let paths = paths.into_iter().flatten().filter(|path| !path.is_empty());
        for path in paths.chain(programs).chain(preload).chain(topology) {
            // The components leave out every '.' between them.
            *path = base.join(&*path).components().collect::<PathBuf>().display().to_string();
        }
    }
}

/// Whether what Dask is to preload is a file, and not a module or an address.
pub fn is_file(preload: &str) -> bool {
    preload.ends_with(".py") && !preload.contains("://")
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}
