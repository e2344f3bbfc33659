//! The flags that `plan`, `up`, `run` and `exec` share, as overrides of a spec.
//!
//! Sets no defaults: the spec, then the plan, decide whatever no flag sets.
//!
//! *Invariant:* every flag sets exactly one key of the spec, and has dask-cuda's name where
//! dask-cuda has one.

pub(super) mod keys;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::{Args, Command, Id};

use super::failure::{Exit, Failure};
use super::input;
use crate::ids::ClusterName;
use crate::spec::{
    self, ClusterSpec, CpuBinding, EngineKind, GpuSelection, Limit, MemoryPolicy, NetDevices,
    PortRange, Request, RestartWhen, SpecError, Treatment, UcxCompat, UcxPreset, UcxVersion,
    Unresponsive, WorkerNames,
};
use crate::units::{Size, Span};

/// A request: the machine, a spec file, and flags that override it.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct Asked {
    /// Spec file ('-' for standard input); of several, later ones win
    #[arg(short = 'f', long = "file", value_name = "SPEC")]
    pub(crate) file: Vec<PathBuf>,
    /// Machine to plan for: a file, or a built-in name like dgx-h100 [default: this machine]
    #[arg(long, value_name = "SRC")]
    pub(crate) topology: Option<String>,
    /// Run the plan of another machine here, with simulated devices
    #[arg(long)]
    pub(crate) simulate: bool,
    /// Refuse what notes call missing, assumed, doubtful or asked for in vain
    #[arg(long)]
    pub(crate) strict: bool,
    #[command(flatten)]
    pub(crate) flags: Flags,
}

/// Overrides of a spec.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct Flags {
    /// Name of the cluster
    #[arg(long, value_name = "NAME", help_heading = "Cluster")]
    name: Option<ClusterName>,
    /// Become READY only after every pair of workers has exchanged data over the expected transport
    #[arg(long, conflicts_with = "no_verify", help_heading = "Cluster")]
    verify: bool,
    #[arg(long, hide = true)]
    no_verify: bool,

    #[command(flatten, next_help_heading = "Cluster")]
    workers: WorkerFlags,
    #[command(flatten, next_help_heading = "RMM")]
    rmm: RmmFlags,
    #[command(flatten, next_help_heading = "UCX")]
    ucx: UcxFlags,
    #[command(flatten, next_help_heading = "Processes")]
    processes: ProcessFlags,
    #[command(flatten, next_help_heading = "Dask engine")]
    dask: DaskFlags,
}

/// The flags that determine the plan: all except the name and those that matter only at run time.
pub(super) fn deciding() -> Vec<Id> {
    let command = WorkerFlags::augment_args(Command::new("flags"));
    let command = UcxFlags::augment_args(RmmFlags::augment_args(command));
    let command = DaskFlags::augment_args(ProcessFlags::augment_args(command));
    command.get_arguments().map(|flag| flag.get_id().clone()).collect()
}

#[derive(Args, Clone, Debug, Default)]
struct WorkerFlags {
    /// Engine that runs the workers: native, dask, command
    #[arg(long, value_name = "ENGINE")]
    engine: Option<EngineKind>,
    /// GPUs to use: all, none, 0-3,6, UUIDs, PCI addresses, MIG instances (0:1)
    #[arg(long, value_name = "GPUS")]
    gpus: Option<GpuSelection>,
    /// Number of workers with a GPU; if fewer than the GPUs, the best-connected GPUs are chosen
    #[arg(long, value_name = "N", value_parser = whole::<u32>)]
    n_workers: Option<u32>,
    /// Number of workers per GPU
    #[arg(long, value_name = "N", value_parser = whole::<u32>)]
    workers_per_gpu: Option<u32>,
    /// Number of additional workers without a GPU
    #[arg(long, value_name = "N", value_parser = whole::<u32>)]
    cpu_workers: Option<u32>,
    /// Number of threads per worker that run tasks
    #[arg(long, value_name = "N", visible_alias = "nthreads", value_parser = whole::<u32>)]
    threads_per_worker: Option<u32>,
    /// What to do with GPUs that other processes are using: skip, warn, use
    #[arg(long, value_name = "HOW")]
    busy_gpus: Option<Treatment>,
    /// What to do with GPUs that drive a display: skip, warn, use
    #[arg(long, value_name = "HOW")]
    display_gpus: Option<Treatment>,

    /// CPU binding of workers: local, split, none
    #[arg(long, value_name = "HOW", help_heading = "CPUs and memory")]
    cpus: Option<CpuBinding>,
    /// Number of whole cores reserved for the scheduler with --cpus split
    #[arg(long, value_name = "N", help_heading = "CPUs and memory", value_parser = whole::<u32>)]
    scheduler_cores: Option<u32>,
    /// NUMA memory policy: preferred, bind, none
    #[arg(long, value_name = "HOW", help_heading = "CPUs and memory")]
    memory_policy: Option<MemoryPolicy>,
    /// Host memory per worker: auto, none, 64GB, 0.1; native workers spill to disk above 3/4 of it
    #[arg(long, value_name = "SIZE", help_heading = "CPUs and memory")]
    memory_limit: Option<Limit>,
    /// Device memory above which a worker spills to host memory: auto, none, 30GB, 0.8 of its GPU
    #[arg(long, value_name = "SIZE", help_heading = "CPUs and memory")]
    device_memory_limit: Option<Limit>,
}

#[derive(Args, Clone, Debug, Default)]
struct RmmFlags {
    /// Initial size of the pool of device memory: RMM's, or a native worker's own
    #[arg(long, value_name = "SIZE")]
    rmm_pool_size: Option<Size>,
    /// Maximum size of that pool
    #[arg(long, value_name = "SIZE")]
    rmm_maximum_pool_size: Option<Size>,
    /// Use managed (unified) memory
    #[arg(long, conflicts_with = "no_rmm_managed_memory")]
    rmm_managed_memory: bool,
    #[arg(long, hide = true)]
    no_rmm_managed_memory: bool,
    /// Use CUDA's stream-ordered allocator
    #[arg(long, conflicts_with = "no_rmm_async")]
    rmm_async: bool,
    #[arg(long, hide = true)]
    no_rmm_async: bool,
    /// Size above which the asynchronous pool returns memory to the driver
    #[arg(long, value_name = "SIZE")]
    rmm_release_threshold: Option<Size>,
    /// Directory for logs of every allocation
    #[arg(long, value_name = "DIR")]
    rmm_log_directory: Option<String>,
    /// Track allocations
    #[arg(long, conflicts_with = "no_rmm_track_allocations")]
    rmm_track_allocations: bool,
    #[arg(long, hide = true)]
    no_rmm_track_allocations: bool,
    /// Libraries that allocate through RMM: cupy,torch
    #[arg(long, value_name = "LIBS", value_delimiter = ',')]
    set_rmm_allocator_for_libs: Option<Vec<String>>,
}

#[derive(Args, Clone, Debug, Default)]
struct UcxFlags {
    /// Use NVLink; if there is none, the plan notes it (with --strict: an error)
    #[arg(long, conflicts_with = "disable_nvlink")]
    enable_nvlink: bool,
    /// Don't use NVLink (cuda_ipc)
    #[arg(long)]
    disable_nvlink: bool,
    /// Use InfiniBand or RoCE; if no port is usable, the plan notes it (with --strict: an error)
    #[arg(long, conflicts_with = "disable_infiniband")]
    enable_infiniband: bool,
    /// Don't use InfiniBand or RoCE (rc)
    #[arg(long)]
    disable_infiniband: bool,
    /// Use TCP for data
    #[arg(long, conflicts_with = "disable_tcp_over_ucx")]
    enable_tcp_over_ucx: bool,
    /// Don't use TCP where another transport can carry every connection
    #[arg(long)]
    disable_tcp_over_ucx: bool,
    /// Establish connections over RDMA
    #[arg(long, conflicts_with = "disable_rdmacm")]
    enable_rdmacm: bool,
    /// Establish connections over TCP
    #[arg(long)]
    disable_rdmacm: bool,
    /// NICs to use: auto, none, pin, stripe, mlx5_0:1,mlx5_1:1, mlx5_{gpu//2}:1
    #[arg(long, value_name = "NICS")]
    net_devices: Option<NetDevices>,
    /// NICs never to use
    #[arg(long, value_name = "NICS", value_delimiter = ',')]
    exclude_nics: Option<Vec<String>>,
    /// Network device for establishing connections
    #[arg(long, value_name = "DEVICE")]
    control_device: Option<String>,
    /// UCX variables to set: none (our own), dask (exactly those of dask-cuda)
    #[arg(long, value_name = "WHOSE")]
    ucx_compat: Option<UcxCompat>,
    /// Settings for the GPU architecture and UCX version: auto, none
    #[arg(long, value_name = "PRESET")]
    ucx_preset: Option<UcxPreset>,
    /// libucp to load: a path, auto (the first with CUDA support), system (as the loader finds it)
    #[arg(long = "ucx", value_name = "PATH|auto")]
    ucx_library: Option<String>,
    /// UCX version to plan for, such as 1.18
    #[arg(long, value_name = "VERSION")]
    ucx_version: Option<UcxVersion>,
}

#[derive(Args, Clone, Debug, Default)]
struct ProcessFlags {
    /// Address on which the scheduler listens
    #[arg(long, value_name = "ADDRESS")]
    host: Option<String>,
    /// Network interface on which the scheduler listens
    #[arg(long, value_name = "NAME")]
    interface: Option<String>,
    /// Scheduler port, or a range of ports to try (8786:8800); 0 for any free port
    #[arg(long, value_name = "PORTS")]
    scheduler_port: Option<PortRange>,
    /// Range of worker ports (a:b)
    #[arg(long, value_name = "PORTS")]
    worker_port: Option<PortRange>,
    /// Address on which a single worker listens
    #[arg(long, value_name = "ADDRESS")]
    listen_address: Option<String>,
    /// Address at which others reach a single worker
    #[arg(long, value_name = "ADDRESS")]
    contact_address: Option<String>,
    /// Directory for spilled data
    #[arg(long, value_name = "DIR")]
    local_directory: Option<String>,
    /// File to write the scheduler's address to
    #[arg(long, value_name = "FILE")]
    scheduler_file: Option<String>,
    /// File to write the supervisor's process id to
    #[arg(long, value_name = "FILE")]
    pid_file: Option<String>,
    /// Abstract resources of each worker, such as "GPU=1 MEM=10e9"
    #[arg(long, value_name = "RESOURCES", value_parser = resources)]
    resources: Option<Resources>,
    /// When to restart a process that has ended: never, on-failure, always
    #[arg(long, value_name = "WHEN")]
    restart: Option<RestartWhen>,
    /// Time limit for the whole cluster to become READY, such as 60s
    #[arg(long, value_name = "SPAN")]
    ready_within: Option<Span>,
    /// Grace period between SIGTERM and SIGKILL, such as 5s
    #[arg(long, value_name = "SPAN")]
    grace: Option<Span>,
    /// Time without an answer after which a process counts as unresponsive, such as 30s
    #[arg(long, value_name = "SPAN")]
    answer_within: Option<Span>,
    /// What to do with an unresponsive process: wait, restart
    #[arg(long, value_name = "WHAT")]
    unresponsive: Option<Unresponsive>,
}

#[derive(Args, Clone, Debug, Default)]
struct DaskFlags {
    /// Protocol: tcp, tls, native, ucx, ucxx
    #[arg(long, value_name = "PROTOCOL")]
    protocol: Option<String>,
    /// Serve the dashboard
    #[arg(long, conflicts_with = "no_dashboard")]
    dashboard: bool,
    /// Don't serve the dashboard
    #[arg(long)]
    no_dashboard: bool,
    /// Address on which the dashboard listens, such as :8787
    #[arg(long, value_name = "ADDRESS")]
    dashboard_address: Option<String>,
    /// Prefix of the dashboard's URLs
    #[arg(long, value_name = "PREFIX")]
    dashboard_prefix: Option<String>,
    /// Module or file that each worker loads when it starts (repeatable)
    #[arg(long, value_name = "MODULE")]
    preload: Option<Vec<String>>,
    /// Modules to import before the workers start
    #[arg(long, value_name = "MODULES", value_delimiter = ',')]
    pre_import: Option<Vec<String>>,
    /// Time without a scheduler after which a worker ends
    #[arg(long, value_name = "SPAN")]
    death_timeout: Option<Span>,
    /// Age at which a worker is replaced
    #[arg(long, value_name = "SPAN")]
    lifetime: Option<Span>,
    /// Minimum number of workers; more are started, up to all, as the workload requires
    #[arg(long, value_name = "N", value_parser = whole::<u32>)]
    adapt_minimum: Option<u32>,
    /// How many of the workers to start; `scale` starts the others
    #[arg(long, value_name = "N", value_parser = whole::<u32>)]
    start_workers: Option<u32>,
    /// Python class of the workers
    #[arg(long, value_name = "CLASS")]
    worker_class: Option<String>,
    /// How to name workers: process (gpu3), gpu (3)
    #[arg(long, value_name = "HOW")]
    worker_names: Option<WorkerNames>,
    /// Name of the worker at the scheduler that it joins; several are numbered
    #[arg(long, value_name = "NAME")]
    worker_name: Option<String>,
    /// Enable cuDF's own spilling
    #[arg(long, conflicts_with = "disable_cudf_spill")]
    enable_cudf_spill: bool,
    #[arg(long, hide = true)]
    disable_cudf_spill: bool,
    /// Level of cuDF's spill statistics, from 0
    #[arg(long, value_name = "LEVEL", value_parser = whole::<u32>)]
    cudf_spill_stats: Option<u32>,
    /// PEM file with trusted certificate authorities
    #[arg(long, value_name = "FILE")]
    tls_ca_file: Option<String>,
    /// PEM file with this side's certificate
    #[arg(long, value_name = "FILE")]
    tls_cert: Option<String>,
    /// PEM file with this side's private key
    #[arg(long, value_name = "FILE")]
    tls_key: Option<String>,
    /// Python interpreter to run
    #[arg(long, value_name = "PATH")]
    python: Option<String>,
    /// How worker processes are started: fork, spawn
    #[arg(long, value_name = "HOW")]
    start_method: Option<String>,
    /// Scheduler to join instead of starting one: an address or a scheduler file
    #[arg(long, value_name = "ADDRESS", allow_hyphen_values = true)]
    join: Option<String>,
}

/// Reads a whole number; the error tells a malformed number from one that is too large.
pub(super) fn whole<T: TryFrom<u64>>(text: &str) -> Result<T, String> {
    let digits = text.strip_prefix('+').unwrap_or(text);
    if digits.is_empty() || !digits.bytes().all(|digit| digit.is_ascii_digit()) {
        return Err("it is not a whole number from 0".to_owned());
    }
    let most = (u64::MAX >> (64 - 8 * size_of::<T>())).to_string();
    let fits = digits.parse::<u64>().ok().and_then(|number| T::try_from(number).ok());
    fits.ok_or_else(|| format!("it is too large; the most is {most}"))
}

type Resources = BTreeMap<String, f64>;

/// Reads `GPU=1 MEM=10e9`, separated by spaces or commas.
fn resources(text: &str) -> Result<Resources, String> {
    let mut resources = Resources::new();
    for part in text.split([' ', ',']).filter(|part| !part.is_empty()) {
        let (name, amount) = part.split_once('=').unwrap_or_default();
        let amount = amount.parse().ok().filter(|n: &f64| n.is_finite() && *n >= 0.0);
        let amount = amount.filter(|_| !name.is_empty());
        let amount = amount.ok_or_else(|| format!("{part:?} is no resource like GPU=1"))?;
        if resources.insert(name.to_owned(), amount).is_some() {
            return Err(format!("{name} is given twice"));
        }
    }
    Ok(resources)
}

/// The value of a pair of on and off flags.
fn switch(on: bool, off: bool) -> Option<bool> {
    (on || off).then_some(on)
}

impl Flags {
    /// The flags as a spec that sets only the keys that were given.
    pub(crate) fn overrides(&self) -> ClusterSpec {
        let mut spec = ClusterSpec::default();
        spec.name = self.name.clone();
        spec.verify = switch(self.verify, self.no_verify);
        self.workers.lay_over(&mut spec);
        self.rmm.lay_over(&mut spec);
        self.ucx.lay_over(&mut spec);
        self.processes.lay_over(&mut spec);
        self.dask.lay_over(&mut spec);
        spec
    }
}

impl WorkerFlags {
    fn lay_over(&self, spec: &mut ClusterSpec) {
        spec.engine = self.engine;
        spec.gpus = self.gpus.clone();
        spec.workers = self.n_workers;
        spec.workers_per_gpu = self.workers_per_gpu;
        spec.cpu_workers = self.cpu_workers;
        spec.threads = self.threads_per_worker;
        spec.busy_gpus = self.busy_gpus;
        spec.display_gpus = self.display_gpus;
        spec.cpus = self.cpus;
        spec.scheduler_cores = self.scheduler_cores;
        spec.memory.policy = self.memory_policy;
        spec.memory.limit = self.memory_limit;
        spec.device.memory_limit = self.device_memory_limit;
    }
}

impl RmmFlags {
    fn lay_over(&self, spec: &mut ClusterSpec) {
        let rmm = &mut spec.rmm;
        rmm.pool_size = self.rmm_pool_size;
        rmm.maximum_pool_size = self.rmm_maximum_pool_size;
        rmm.managed = switch(self.rmm_managed_memory, self.no_rmm_managed_memory);
        rmm.asynchronous = switch(self.rmm_async, self.no_rmm_async);
        rmm.release_threshold = self.rmm_release_threshold;
        rmm.log_directory = self.rmm_log_directory.clone();
        rmm.track_allocations = switch(self.rmm_track_allocations, self.no_rmm_track_allocations);
        rmm.set_allocator_for = self.set_rmm_allocator_for_libs.clone();
    }
}

impl UcxFlags {
    fn lay_over(&self, spec: &mut ClusterSpec) {
        let ucx = &mut spec.ucx;
        ucx.nvlink = switch(self.enable_nvlink, self.disable_nvlink);
        ucx.infiniband = switch(self.enable_infiniband, self.disable_infiniband);
        ucx.tcp = switch(self.enable_tcp_over_ucx, self.disable_tcp_over_ucx);
        ucx.rdmacm = switch(self.enable_rdmacm, self.disable_rdmacm);
        ucx.net_devices = self.net_devices.clone();
        ucx.exclude_nics = self.exclude_nics.clone();
        ucx.control_device = self.control_device.clone();
        ucx.compat = self.ucx_compat;
        ucx.preset = self.ucx_preset;
        ucx.version = self.ucx_version;
        ucx.library = self.ucx_library.clone();
    }
}

impl ProcessFlags {
    fn lay_over(&self, spec: &mut ClusterSpec) {
        spec.scheduler.host = self.host.clone();
        spec.scheduler.interface = self.interface.clone();
        spec.scheduler.port = self.scheduler_port;
        spec.scheduler.file = self.scheduler_file.clone();
        spec.worker.ports = self.worker_port;
        spec.worker.listen_address = self.listen_address.clone();
        spec.worker.contact_address = self.contact_address.clone();
        spec.worker.local_directory = self.local_directory.clone();
        spec.worker.pid_file = self.pid_file.clone();
        spec.worker.resources = self.resources.clone();
        spec.supervision.restart = self.restart;
        spec.supervision.ready_within = self.ready_within;
        spec.supervision.grace = self.grace;
        spec.supervision.answer_within = self.answer_within;
        spec.supervision.unresponsive = self.unresponsive;
    }
}

impl DaskFlags {
    fn lay_over(&self, spec: &mut ClusterSpec) {
        spec.scheduler.dashboard = switch(self.dashboard, self.no_dashboard);
        spec.scheduler.dashboard_address = self.dashboard_address.clone();
        spec.tls.ca_file = self.tls_ca_file.clone();
        spec.tls.cert = self.tls_cert.clone();
        spec.tls.key = self.tls_key.clone();
        let dask = &mut spec.dask;
        dask.protocol = self.protocol.clone();
        dask.dashboard_prefix = self.dashboard_prefix.clone();
        dask.preload = self.preload.clone();
        dask.pre_import = self.pre_import.clone();
        dask.death_timeout = self.death_timeout;
        dask.lifetime = self.lifetime;
        dask.adapt_minimum = self.adapt_minimum;
        dask.start_workers = self.start_workers;
        dask.worker_class = self.worker_class.clone();
        dask.worker_names = self.worker_names;
        dask.worker_name = self.worker_name.clone();
        dask.enable_cudf_spill = switch(self.enable_cudf_spill, self.disable_cudf_spill);
        dask.cudf_spill_stats = self.cudf_spill_stats;
        dask.python = self.python.clone();
        dask.start_method = self.start_method.clone();
        dask.join = self.join.clone();
    }
}

impl Flags {
    /// Whether READY requires that every pair of workers uses the expected transport, if given.
    pub(crate) fn verify(&self) -> Option<bool> {
        switch(self.verify, self.no_verify)
    }

    /// The name given with `--name`.
    pub(crate) fn name(&self) -> Option<&ClusterName> {
        self.name.as_ref()
    }
}

impl Asked {
    /// Reads the spec file and applies the flags to it.
    pub(crate) fn request(&self) -> Result<Request, Failure> {
        self.request_with(|_| ())
    }

    /// Like [`Asked::request`]; `change` sets further keys on behalf of the command.
    pub(crate) fn request_with(
        &self,
        change: impl FnOnce(&mut ClusterSpec),
    ) -> Result<Request, Failure> {
        let mut flags = self.flags.overrides();
        let here = std::env::current_dir().unwrap_or_default();
        flags.resolve_paths(&here);
        let files = self.file.iter().map(|path| read_spec(path)).collect::<Result<Vec<_>, _>>()?;
        flags.topology = self.topology.clone();
        flags.simulate = self.simulate.then_some(true);
        flags.strict = self.strict.then_some(true);
        change(&mut flags);
        Request::merge(&files, &flags).map_err(|error| keys::contradiction(&error, &files))
    }
}

/// Reads a spec from a file, or from standard input for `-`. Its relative paths are beside it.
fn read_spec(path: &Path) -> Result<ClusterSpec, Failure> {
    Ok(read_spec_and_text(path)?.0)
}

/// Reads a spec as [`read_spec`] does, with its text.
pub(super) fn read_spec_and_text(path: &Path) -> Result<(ClusterSpec, String), Failure> {
    let text = input::read(path, spec::SIZE_LIMIT).map_err(|error| error.failure("spec", path))?;
    let variable = |name: &str| std::env::var_os(name);
    let mut spec = spec::parse_with(&text, &input::shown(path), &variable).map_err(wrong_spec)?;
    spec.resolve_paths(&input::folder(path));
    Ok((spec, text))
}

fn wrong_spec(error: SpecError) -> Failure {
    let hint = error.hint();
    Failure::new(Exit::Usage, error).maybe_hint(hint)
}
