//! The sections of a spec.
//!
//! Holds what was written; what an absent value means is decided by `plan`.
//!
//! *Invariant:* every field is optional, so that a file says only what matters to its author.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::choices::{
    CpuBinding, Limit, MemoryPolicy, Placement, PortRange, RestartWhen, SchedulerDeath, UcxCompat,
    UcxPreset, UcxVersion, Ulimit, Unresponsive, VisibleDevices, WorkerNames,
};
use super::gpu_selection::GpuName;
use super::net_devices::NetDevices;
use crate::units::{Size, Span};

/// Declares a section: every field optional, unknown keys refused.
macro_rules! section {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
        #[serde(deny_unknown_fields)]
        pub struct $name {
            $(
                $(#[$field_doc])*
                #[serde(default, skip_serializing_if = "Option::is_none")]
                pub $field: Option<$type>,
            )*
        }
    };
}

section! {
    /// Host memory of a worker.
    MemorySpec {
        /// How memory is placed on the NUMA nodes near the GPU. Default: `preferred`.
        policy: MemoryPolicy,
        /// Most host memory of one worker: `auto` (its share of its NUMA nodes and of the
        /// cgroup's limit), `none`, bytes, or a fraction of the machine's memory. Default: `auto`;
        /// `none` for the command engine.
        limit: Limit,
    }
}

section! {
    /// Device memory of a worker.
    DeviceSpec {
        /// Device memory at which a worker spills: `auto` (0.8), `none`, bytes, or a fraction of
        /// the worker's own GPU.
        memory_limit: Limit,
    }
}

section! {
    /// RAPIDS memory manager. Sizes are bytes or fractions of the worker's own GPU.
    RmmSpec {
        /// First size of the pool.
        pool_size: Size,
        /// Most that the pool may grow to.
        maximum_pool_size: Size,
        /// Managed (unified) memory. Not with NVLink, not with `async`.
        managed: bool,
        /// CUDA's stream-ordered allocator instead of RMM's pool.
        #[serde(rename = "async")]
        asynchronous: bool,
        /// The asynchronous pool gives memory beyond this back. Needs `async`.
        release_threshold: Size,
        /// Every allocation is logged into this directory.
        log_directory: String,
        /// Count allocations, for the dashboard.
        track_allocations: bool,
        /// Libraries whose allocations go through RMM: `cupy`, `torch`.
        set_allocator_for: Vec<String>,
    }
}

section! {
    /// UCX: transports and network devices.
    UcxSpec {
        /// NVLink (`cuda_ipc`) must be there and used; `false` leaves it out.
        nvlink: bool,
        /// InfiniBand or RoCE (`rc`) must be there and used; `false` leaves it out.
        infiniband: bool,
        /// TCP for data; `false` leaves it out where something else can carry every connection.
        tcp: bool,
        /// Connections are set up over RDMA instead of TCP.
        rdmacm: bool,
        /// NICs: `auto`, `none`, `pin`, `stripe`, a list, or a template. Default: `auto`.
        net_devices: NetDevices,
        /// NICs that are not to be used, by device (`mlx5_4`) or port (`mlx5_4:1`).
        exclude_nics: Vec<String>,
        /// The network device for setting connections up. Default: the interface of the
        /// announced address, which is `lo` unless another is asked for.
        control_device: String,
        /// `dask`: exactly the variables that dask-cuda sets. Default: `none`.
        compat: UcxCompat,
        /// Settings by GPU architecture and UCX version. Default: `auto`.
        preset: UcxPreset,
        /// The UCX version to plan for, like `1.18`. Default: the one that is found.
        version: UcxVersion,
        /// The libucp that processes load: a path, `auto` (the first that knows CUDA: the active
        /// Python environment's `libucx`, HPC-X, conda, the system), or `system` (the dynamic
        /// loader's). Default: `auto` for native workers on GPUs of this machine, else `system`.
        library: String,
        /// More variables; they beat those that are computed.
        #[serde(deserialize_with = "super::read::variables")]
        #[schemars(with = "Option<BTreeMap<String, super::read::Scalar>>")]
        env: BTreeMap<String, String>,
    }
}

section! {
    /// The scheduler's process.
    SchedulerSpec {
        /// Address to listen on. Default: loopback; for workers that join a scheduler, the address
        /// that faces it.
        host: String,
        /// Network interface to listen on, instead of `host`.
        interface: String,
        /// Port, or ports to try in order (`8786:8800`). 0: any free one.
        port: PortRange,
        /// Whether there is a dashboard. Default: true where the engine has one.
        dashboard: bool,
        /// Where the dashboard listens, like `:8787`.
        dashboard_address: String,
        /// Where the scheduler's address is written for clients.
        file: String,
    }
}

section! {
    /// The workers' processes.
    WorkerSpec {
        /// Ports for the workers to listen on, at least one each.
        ports: PortRange,
        /// Address a single worker listens on.
        listen_address: String,
        /// Address a single worker is reached at.
        contact_address: String,
        /// Directory for spilled data.
        local_directory: String,
        /// Where the supervisor's process id stands while the cluster runs: who to tell to end.
        pid_file: String,
        /// Abstract resources, like `{GPU: 1}`.
        resources: BTreeMap<String, f64>,
        /// More environment variables for every worker.
        #[serde(deserialize_with = "super::read::variables")]
        #[schemars(with = "Option<BTreeMap<String, super::read::Scalar>>")]
        env: BTreeMap<String, String>,
    }
}

section! {
    /// Deaths, restarts, time-outs.
    SupervisionSpec {
        /// When a dead worker is started again: `never`, `on-failure`, `always`.
        restart: RestartWhen,
        /// Restarts allowed per worker within `window` that do not end in READY. A worker that dies
        /// while it is READY always comes back.
        limit: u32,
        /// The window of `limit`.
        window: Span,
        /// First delay before a restart; it doubles with each further one. A worker that was READY
        /// is started again at once the first time.
        backoff: Span,
        /// Longest delay; after a death while READY it is at most 5 s.
        backoff_max: Span,
        /// A worker that ran this long starts afresh with delay and count.
        healthy_after: Span,
        /// Time from start to READY of the whole cluster.
        ready_within: Span,
        /// Time between SIGTERM and SIGKILL.
        grace: Span,
        /// What a dead scheduler means: `restart-cluster` or `end-cluster`.
        scheduler_death: SchedulerDeath,
        /// A process that does not answer for this long is not READY until it does. Default: 30s.
        answer_within: Span,
        /// What follows when a process has not answered for `answer_within`: `wait`, or `restart`:
        /// it is ended and started again as if it had died.
        unresponsive: Unresponsive,
        /// Longest wait for a dead worker's GPU memory to be free.
        gpu_free_within: Span,
    }
}

section! {
    /// Resource limits of every process, as `ulimit` has them. What cannot be set is noted, or
    /// refused under `strict`.
    UlimitSpec {
        /// Largest core file, in bytes.
        core: Ulimit,
        /// Memory that may be locked, in bytes; registering memory for InfiniBand locks it.
        memlock: Ulimit,
        /// Open files.
        nofile: Ulimit,
        /// Processes and threads of this user.
        nproc: Ulimit,
        /// Stack, in bytes.
        stack: Ulimit,
    }
}

section! {
    /// Log files.
    LogSpec {
        /// A log file is rotated at this size.
        rotate_at: Size,
        /// Rotated files kept for each process.
        keep: u32,
    }
}

section! {
    /// Transport security of the Dask engine over TCP.
    TlsSpec {
        /// Certificates of the authorities to trust, PEM. A relative path is below the spec file's
        /// directory, or with a flag below the working directory; so are the others.
        ca_file: String,
        /// Own certificate, PEM.
        cert: String,
        /// Own key, PEM.
        key: String,
    }
}

section! {
    /// The Dask engine's own options.
    DaskSpec {
        /// `tcp`, `tls`, `ucx` or `ucxx`. Default: `ucxx` when a UCX option is set, else `tcp`.
        protocol: String,
        /// The Python to run. Default: that of the active environment.
        python: String,
        /// `fork` (one Python imports once and forks) or `spawn`.
        start_method: String,
        /// Address of a scheduler to join, instead of starting one.
        join: String,
        /// Modules imported before the fork.
        pre_import: Vec<String>,
        /// Modules or files loaded by each worker at its start.
        preload: Vec<String>,
        /// A worker without a scheduler for this long ends.
        death_timeout: Span,
        /// A worker of this age is replaced.
        lifetime: Span,
        /// Fewest workers: between these and all, as many run as the scheduler's work needs.
        /// Default: all, always.
        adapt_minimum: u32,
        /// Prefix of the dashboard's URLs.
        dashboard_prefix: String,
        /// A worker's class.
        worker_class: String,
        /// What workers are called: `process` (`gpu3`), or `gpu` (3), where each has a GPU of its
        /// own, none comes and goes with the work, and no other scheduler is joined.
        worker_names: WorkerNames,
        /// cuDF's own spilling.
        enable_cudf_spill: bool,
        /// Statistics of cuDF's spilling, a level from 0.
        cudf_spill_stats: u32,
        /// Dask configuration keys, like `{distributed.worker.memory.target: "0.6"}`.
        #[serde(deserialize_with = "super::read::variables")]
        #[schemars(with = "Option<BTreeMap<String, super::read::Scalar>>")]
        config: BTreeMap<String, String>,
    }
}

section! {
    /// The command engine's own options.
    CommandSpec {
        /// Program and arguments; `run -- CMD` beats it.
        argv: Vec<String>,
        /// What `CUDA_VISIBLE_DEVICES` shows a rank. Default: `all`, which fits programs that
        /// select the device with the number in `LOCAL_RANK`, as PyTorch's do.
        visible_devices: VisibleDevices,
    }
}

section! {
    /// The native engine's own options.
    NativeSpec {
        /// Program of the workers, for tasks that run functions of your own: it calls
        /// `cluster::dispatch_with` first of all. A name is looked up in `PATH`, a relative path is
        /// below the spec file's directory. Default: `cuda-cluster`.
        program: String,
        /// How a task's worker is chosen: `estimated-finish` or `round-robin`.
        placement: Placement,
        /// File for everything that the task scheduler hears and a digest of what it decides, so
        /// that a run can be replayed; it grows with every event. A relative path is below the run
        /// directory. Default: none.
        record_events: String,
        /// Most bytes of a worker's objects on disk. Default: no limit.
        disk_limit: Size,
    }
}

/// Differences for the workers that match.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OverrideSpec {
    /// Which workers; all of the given conditions must hold.
    #[serde(rename = "match")]
    pub matching: MatchSpec,
    /// Threads that run tasks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads: Option<u32>,
    /// Which CPUs: `local` or `none`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<CpuBinding>,
    /// NICs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub net_devices: Option<NetDevices>,
    /// Host memory limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_limit: Option<Limit>,
    /// Device memory limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_memory_limit: Option<Limit>,
    /// RMM pool size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rmm_pool_size: Option<Size>,
    /// More environment variables.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
}

section! {
    /// Which workers an override is for.
    MatchSpec {
        /// Worker name; `*` stands for anything.
        worker: String,
        /// GPU, by index, UUID or PCI address.
        gpu: GpuName,
        /// NUMA node of the GPU.
        numa: u32,
    }
}
