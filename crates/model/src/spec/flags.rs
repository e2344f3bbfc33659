//! The flags that set keys of a spec: one table, from which the command line, its help, messages
//! about flags and Python's keywords are made.
//!
//! Knows no command line; sets one key of a spec from texts. What a key means says `sections`.
//!
//! *Invariant:* every flag sets exactly one key, and has dask-cuda's name where dask-cuda has one.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::str::FromStr;

use serde::Serialize;

use super::{
    Bootstrap, ClusterSpec, CpuBinding, EngineKind, GpuSelection, Limit, MemoryPolicy, NetDevices,
    PortRange, ProgramSpec, RestartWhen, Treatment, UcxCompat, UcxPreset, UcxVersion, Unresponsive,
    WorkerNames,
};
use crate::ids::ClusterName;
use crate::units::{Size, Span};

/// A flag, or a pair of flags that switch something on and off.
#[derive(Clone, Copy, Debug, Serialize)]
#[non_exhaustive]
pub struct Flag {
    /// The key that it sets, like `ucx.nvlink`.
    pub key: &'static str,
    /// Its name, without the two dashes; with `_` for `-` Python's keyword.
    pub flag: &'static str,
    /// The flag that sets a switch to false; empty if there is none.
    #[serde(skip_serializing_if = "str::is_empty")]
    pub off: &'static str,
    /// What it takes.
    pub takes: Takes,
    /// Under which heading help has it; empty for none of its own.
    #[serde(skip)]
    pub heading: &'static str,
    /// What its value is called; empty for a switch.
    #[serde(skip)]
    pub value: &'static str,
    /// What it does, in a line.
    #[serde(skip)]
    pub help: &'static str,
    /// The same for the flag that switches it off, which help leaves out if this is empty.
    #[serde(skip)]
    pub off_help: &'static str,
    /// Another name of it; empty for none.
    #[serde(skip)]
    pub alias: &'static str,
    /// Whether it sets a list: given again, it adds to it.
    #[serde(skip)]
    pub list: bool,
    #[serde(skip)]
    set: fn(&mut ClusterSpec, &[&str]) -> Result<(), String>,
}

/// What a flag takes, for whoever writes it from values of another language.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Takes {
    /// Nothing: it is on.
    Switch,
    /// A whole number from 0.
    Whole,
    /// A text of its own form, or one of some words.
    Text,
    /// A text that may look like a number.
    Name,
    /// A path.
    Path,
    /// Bytes, or a fraction.
    Size,
    /// The same, or `none`.
    Limit,
    /// A span of time.
    Span,
    /// A port, several, or an address with one.
    Ports,
    /// GPUs.
    Devices,
    /// Names, separated by commas.
    Names,
    /// A file or module; given again for further ones.
    Files,
    /// Names with amounts.
    Resources,
}

impl Flag {
    /// Sets the key from the texts that were given: one, several for a list, `true` or `false` for
    /// a switch.
    ///
    /// # Errors
    /// If a text is not what the key takes.
    pub fn set(&self, spec: &mut ClusterSpec, texts: &[&str]) -> Result<(), String> {
        if self.list && self.takes == Takes::Names {
            let texts: Vec<&str> = texts.iter().flat_map(|text| text.split(',')).collect();
            return (self.set)(spec, &texts);
        }
        (self.set)(spec, texts)
    }
}

/// All flags, in the order of help.
pub fn flags() -> impl Iterator<Item = Flag> {
    FLAGS.iter().map(|flag| Flag { help: flag.help.trim_start(), ..*flag })
}

/// A value that a flag sets.
trait Given: Sized {
    fn read(texts: &[&str]) -> Result<Self, String>;
}

fn set<T: Given>(slot: &mut Option<T>, texts: &[&str]) -> Result<(), String> {
    *slot = Some(T::read(texts)?);
    Ok(())
}

/// The last text, which counts.
fn last<'a>(texts: &[&'a str]) -> &'a str {
    texts.last().copied().unwrap_or_default()
}

fn parsed<T: FromStr<Err: Display>>(texts: &[&str]) -> Result<T, String> {
    last(texts).parse().map_err(|error: T::Err| error.to_string())
}

macro_rules! parsed {
    ($($type:ty)*) => {
        $(impl Given for $type {
            fn read(texts: &[&str]) -> Result<Self, String> {
                parsed(texts)
            }
        })*
    };
}

parsed! {
    bool String ClusterName CpuBinding EngineKind GpuSelection Limit MemoryPolicy NetDevices
    PortRange RestartWhen Size Span Treatment UcxCompat UcxPreset UcxVersion Unresponsive
    WorkerNames
}

impl Given for u32 {
    fn read(texts: &[&str]) -> Result<Self, String> {
        whole(last(texts))
    }
}

impl Given for Vec<String> {
    fn read(texts: &[&str]) -> Result<Self, String> {
        Ok(texts.iter().map(|&text| text.to_owned()).collect())
    }
}

impl Given for Vec<Bootstrap> {
    /// Reads names, or `none`.
    fn read(texts: &[&str]) -> Result<Self, String> {
        if texts == ["none"] {
            return Ok(Vec::new());
        }
        texts.iter().map(|text| parsed(&[text])).collect()
    }
}

impl Given for Vec<ProgramSpec> {
    /// Reads `trainer=4`, each a program and its number of ranks.
    fn read(texts: &[&str]) -> Result<Self, String> {
        let program = |text: &&str| {
            let (name, number) = text
                .split_once('=')
                .ok_or_else(|| format!("{text:?} is no program with its ranks, like trainer=4"))?;
            let workers = whole(number).map_err(|reason| format!("{text:?}: {reason}"))?;
            Ok(ProgramSpec { name: name.to_owned(), workers, argv: None })
        };
        texts.iter().map(program).collect()
    }
}

impl Given for BTreeMap<String, f64> {
    /// Reads `GPU=1 MEM=10e9`, separated by spaces or commas.
    fn read(texts: &[&str]) -> Result<Self, String> {
        let mut resources = Self::new();
        for part in last(texts).split([' ', ',']).filter(|part| !part.is_empty()) {
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
}

/// Reads a whole number.
///
/// # Errors
/// Tells a malformed number from one that is too large.
pub fn whole<T: TryFrom<u64>>(text: &str) -> Result<T, String> {
    let digits = text.strip_prefix('+').unwrap_or(text);
    if digits.is_empty() || !digits.bytes().all(|digit| digit.is_ascii_digit()) {
        return Err("it is not a whole number from 0".to_owned());
    }
    let most = (u64::MAX >> (64 - 8 * size_of::<T>())).to_string();
    let fits = digits.parse::<u64>().ok().and_then(|number| T::try_from(number).ok());
    fits.ok_or_else(|| format!("it is too large; the most is {most}"))
}

/// The key of a field, unless it has another name in the file.
macro_rules! key {
    ($($field:ident).+ = $key:literal) => {
        $key
    };
    ($key:ident) => {
        stringify!($key)
    };
    ($section:ident.$key:ident) => {
        concat!(stringify!($section), ".", stringify!($key))
    };
}

/// Declares the flags under their headings. A row is `field: What it takes`, then the flag, its
/// value's name, `/` and the flag that switches it off with its help, `|` and another name, and
/// `list` where it sets one.
macro_rules! flags {
    ($($heading:literal {
        $(
            $(#[doc = $help:literal])+
            $($field:ident).+ $(= $key:literal)?: $takes:ident $flag:literal $($value:literal)?
                $(/ $off:literal $($off_help:literal)?)? $(| $alias:literal)? $($list:ident)?;
        )+
    })+) => {
        /// All flags, in the order of help.
        const FLAGS: &[Flag] = &[$($(
            Flag {
                key: key!($($field).+ $(= $key)?),
                flag: $flag,
                off: concat!("" $(, $off)?),
                takes: Takes::$takes,
                heading: $heading,
                value: concat!("" $(, $value)?),
                help: concat!($($help),+),
                off_help: concat!("" $($(, $off_help)?)?),
                alias: concat!("" $(, $alias)?),
                list: !stringify!($($list)?).is_empty(),
                set: |spec, texts| set(&mut spec.$($field).+, texts),
            },
        )+)+];
    };
}

flags! {
    "" {
        /// Machine to plan for: a file, or a built-in name like dgx-h100 [default: this machine]
        topology: Path "topology" "SRC";
        /// Run the plan of another machine here, with simulated devices
        simulate: Switch "simulate";
        /// Refuse what notes call missing, assumed, doubtful or asked for in vain
        strict: Switch "strict";
    }
    "Cluster" {
        /// Name of the cluster
        name: Text "name" "NAME";
        /// Become READY only after every pair of workers has exchanged data over the expected
        /// transport
        verify: Switch "verify" / "no-verify";
        /// Engine that runs the workers: native, dask, command
        engine: Text "engine" "ENGINE";
        /// GPUs to use: all, none, 0-3,6, UUIDs, PCI addresses, MIG instances (0:1)
        gpus: Devices "gpus" "GPUS";
        /// Number of workers with a GPU; if fewer than the GPUs, the best-connected GPUs are chosen
        workers: Whole "n-workers" "N";
        /// Number of workers per GPU
        workers_per_gpu: Whole "workers-per-gpu" "N";
        /// Number of additional workers without a GPU
        cpu_workers: Whole "cpu-workers" "N";
        /// Number of threads per worker that run tasks
        threads: Whole "threads-per-worker" "N" | "nthreads";
        /// What to do with GPUs that other processes are using: skip, warn, use
        busy_gpus: Text "busy-gpus" "HOW";
        /// What to do with GPUs that drive a display: skip, warn, use
        display_gpus: Text "display-gpus" "HOW";
    }
    "CPUs and memory" {
        /// CPU binding of workers: local, split, none
        cpus: Text "cpus" "HOW";
        /// Number of whole cores reserved for the scheduler with --cpus split
        scheduler_cores: Whole "scheduler-cores" "N";
        /// NUMA memory policy: preferred, bind, none
        memory.policy: Text "memory-policy" "HOW";
        /// Host memory per worker: auto, none, 64GB, 0.1; native workers spill to disk above 3/4 of
        /// it
        memory.limit: Limit "memory-limit" "SIZE";
        /// Device memory above which a worker spills to host memory: auto, none, 30GB, 0.8 of its
        /// GPU
        device.memory_limit: Limit "device-memory-limit" "SIZE";
    }
    "RMM" {
        /// Initial size of the pool of device memory: RMM's, or a native worker's own
        rmm.pool_size: Size "rmm-pool-size" "SIZE";
        /// Maximum size of that pool
        rmm.maximum_pool_size: Size "rmm-maximum-pool-size" "SIZE";
        /// Use managed (unified) memory
        rmm.managed: Switch "rmm-managed-memory" / "no-rmm-managed-memory";
        /// Use CUDA's stream-ordered allocator
        rmm.asynchronous = "rmm.async": Switch "rmm-async" / "no-rmm-async";
        /// Size above which the asynchronous pool returns memory to the driver
        rmm.release_threshold: Size "rmm-release-threshold" "SIZE";
        /// Directory for logs of every allocation
        rmm.log_directory: Path "rmm-log-directory" "DIR";
        /// Track allocations
        rmm.track_allocations: Switch "rmm-track-allocations" / "no-rmm-track-allocations";
        /// Libraries that allocate through RMM: cupy,torch
        rmm.set_allocator_for: Names "set-rmm-allocator-for-libs" "LIBS" list;
    }
    "UCX" {
        /// Use NVLink; if there is none, the plan notes it (with --strict: an error)
        ucx.nvlink: Switch "enable-nvlink" / "disable-nvlink" "Don't use NVLink (cuda_ipc)";
        /// Use InfiniBand or RoCE; if no port is usable, the plan notes it (with --strict: an
        /// error)
        ucx.infiniband: Switch "enable-infiniband"
            / "disable-infiniband" "Don't use InfiniBand or RoCE (rc)";
        /// Use TCP for data
        ucx.tcp: Switch "enable-tcp-over-ucx" / "disable-tcp-over-ucx"
            "Don't use TCP where another transport can carry every connection";
        /// Establish connections over RDMA
        ucx.rdmacm: Switch "enable-rdmacm" / "disable-rdmacm" "Establish connections over TCP";
        /// NICs to use: auto, none, pin, stripe, mlx5_0:1,mlx5_1:1, mlx5_{gpu//2}:1
        ucx.net_devices: Names "net-devices" "NICS";
        /// NICs never to use
        ucx.exclude_nics: Names "exclude-nics" "NICS" list;
        /// Network device for establishing connections
        ucx.control_device: Text "control-device" "DEVICE";
        /// UCX variables to set: none (our own), dask (exactly those of dask-cuda)
        ucx.compat: Text "ucx-compat" "WHOSE";
        /// Settings for the GPU architecture and UCX version: auto, none
        ucx.preset: Text "ucx-preset" "PRESET";
        /// libucp to load: a path, auto (the first with CUDA support), system (as the loader finds
        /// it)
        ucx.library: Path "ucx" "PATH|auto";
        /// UCX version to plan for, such as 1.18
        ucx.version: Text "ucx-version" "VERSION";
    }
    "Processes" {
        /// Address on which the scheduler listens
        scheduler.host: Text "host" "ADDRESS";
        /// Network interface on which the scheduler listens
        scheduler.interface: Text "interface" "NAME";
        /// Scheduler port, or a range of ports to try (8786:8800); 0 for any free port
        scheduler.port: Ports "scheduler-port" "PORTS";
        /// Range of worker ports (a:b)
        worker.ports: Ports "worker-port" "PORTS";
        /// Address on which a single worker listens
        worker.listen_address: Text "listen-address" "ADDRESS";
        /// Address at which others reach a single worker
        worker.contact_address: Text "contact-address" "ADDRESS";
        /// Directory for spilled data
        worker.local_directory: Path "local-directory" "DIR";
        /// File to write the scheduler's address to
        scheduler.file: Path "scheduler-file" "FILE";
        /// File to write the supervisor's process id to
        worker.pid_file: Path "pid-file" "FILE";
        /// Abstract resources of each worker, such as "GPU=1 MEM=10e9"
        worker.resources: Resources "resources" "RESOURCES";
        /// When to restart a process that has ended: never, on-failure, always
        supervision.restart: Text "restart" "WHEN";
        /// Time limit for the whole cluster to become READY, such as 60s
        supervision.ready_within: Span "ready-within" "SPAN";
        /// Grace period between SIGTERM and SIGKILL, such as 5s
        supervision.grace: Span "grace" "SPAN";
        /// Time without an answer after which a process counts as unresponsive, such as 30s
        supervision.answer_within: Span "answer-within" "SPAN";
        /// What to do with an unresponsive process: wait, restart
        supervision.unresponsive: Text "unresponsive" "WHAT";
        /// Say who keeps all from going on when that has lasted so long, such as 5m
        supervision.stalled_after: Span "stalled-after" "SPAN";
        /// End what is stalled, with exit code 5
        supervision.end_when_stalled: Switch "end-when-stalled";
        /// Say at the end which wires the bytes between the processes took
        supervision.audit: Switch "audit" / "no-audit";
    }
    "Programs" {
        /// Several programs in one job, each with its number of ranks (repeatable); their commands
        /// are parted by a lone ':', in this order
        command.programs: Names "program" "NAME=N" list;
        /// In whose languages ranks are told of each other: torch, threads, nccl, jax, mpi, rrun,
        /// pmix (Open MPI, in place of mpi), or none [default: all but pmix]
        command.bootstrap: Names "bootstrap" "NAMES" list;
        /// How often all ranks are started again together when one fails
        command.restarts: Whole "restarts" "N" | "max-restarts";
        /// Number of GPUs that are kept for those that fail
        command.spares: Whole "spares" "N";
        /// Python modules to import once, before the ranks are forked, such as torch
        command.warm: Names "warm" "MODULES" list;
        /// Directory that also gets what each rank writes: rank0.out, rank0.err, …
        command.output_dir: Path "output-dir" "DIR";
    }
    "Dask engine" {
        /// Protocol: tcp, tls, direct, ucx, ucxx
        dask.protocol: Text "protocol" "PROTOCOL";
        /// Serve the dashboard
        scheduler.dashboard: Switch "dashboard" / "no-dashboard" "Don't serve the dashboard";
        /// Address on which the dashboard listens, such as :8787
        scheduler.dashboard_address: Ports "dashboard-address" "ADDRESS";
        /// Prefix of the dashboard's URLs
        dask.dashboard_prefix: Text "dashboard-prefix" "PREFIX";
        /// Module or file that each worker loads when it starts (repeatable)
        dask.preload: Files "preload" "MODULE" list;
        /// Modules to import before the workers start
        dask.pre_import: Names "pre-import" "MODULES" list;
        /// Time without a scheduler after which a worker ends
        dask.death_timeout: Span "death-timeout" "SPAN";
        /// Age at which a worker is replaced
        dask.lifetime: Span "lifetime" "SPAN";
        /// Minimum number of workers; more are started, up to all, as the workload requires
        dask.adapt_minimum: Whole "adapt-minimum" "N";
        /// How many of the workers to start; `scale` starts the others
        dask.start_workers: Whole "start-workers" "N";
        /// Python class of the workers
        dask.worker_class: Text "worker-class" "CLASS";
        /// How to name workers: process (gpu3), gpu (3)
        dask.worker_names: Text "worker-names" "HOW";
        /// Name of the worker at the scheduler that it joins; several are numbered
        dask.worker_name: Name "worker-name" "NAME";
        /// Enable cuDF's own spilling
        dask.enable_cudf_spill: Switch "enable-cudf-spill" / "disable-cudf-spill";
        /// Level of cuDF's spill statistics, from 0
        dask.cudf_spill_stats: Whole "cudf-spill-stats" "LEVEL";
        /// Place tasks by the bandwidth between each two workers
        dask.place_by_wires: Switch "place-by-wires" / "no-place-by-wires";
        /// Give tasks of GPU packages to workers with a GPU alone
        dask.place_by_kind: Switch "place-by-kind" / "no-place-by-kind";
        /// PEM file with trusted certificate authorities
        tls.ca_file: Path "tls-ca-file" "FILE";
        /// PEM file with this side's certificate
        tls.cert: Path "tls-cert" "FILE";
        /// PEM file with this side's private key
        tls.key: Path "tls-key" "FILE";
        /// Python interpreter to run
        dask.python: Path "python" "PATH";
        /// How worker processes are started: fork, spawn
        dask.start_method: Text "start-method" "HOW";
        /// Scheduler to join instead of starting one: an address, a scheduler file, or 'auto':
        /// under srun, mpiexec, flux or pbsdsh the first task has it, and the others join
        dask.join: Text "join" "ADDRESS";
        /// Machines that get workers, over ssh; the scheduler is on this one, which gets workers if
        /// it is among them (localhost)
        dask.hosts: Names "hosts" "HOSTS" list;
        /// The program cuda-cluster on these machines [default: by their PATH]
        dask.hosts_program: Text "hosts-program" "PATH";
    }
}
