//! The sections of a spec.
//!
//! Holds values as they were written; `plan` decides the defaults.
//!
//! *Invariant:* every field is optional, so that a file contains only what matters to its author.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::choices::{
    Bootstrap, CpuBinding, Limit, MemoryPolicy, Placement, PortRange, RestartWhen, SchedulerDeath,
    UcxCompat, UcxPreset, UcxVersion, Ulimit, Unresponsive, VisibleDevices, WorkerNames,
};
use super::gpu_selection::GpuName;
use super::net_devices::NetDevices;
use crate::units::{Bytes, Size, Span};

/// Declares a section: every field optional, unknown keys refused.
macro_rules! section {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
        #[serde(deny_unknown_fields)]
        #[non_exhaustive]
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
        /// Host memory limit of one worker: `auto` (its share of its NUMA nodes and of the
        /// cgroup's limit), `none`, bytes, or a fraction of the machine's memory, of which each
        /// worker may use so much. Default: `auto`; `none` for the command engine.
        limit: Limit,
    }
}

section! {
    /// Device memory of a worker.
    DeviceSpec {
        /// Device memory at which a worker spills: `auto` (0.8), `none`, bytes, or a fraction of
        /// the worker's own GPU. With several workers per GPU, bytes are for each of them, and a
        /// fraction is shared: of 0.8, two workers have 0.4 each. Default: `auto`.
        memory_limit: Limit,
    }
}

section! {
    /// Pools of device memory: the RAPIDS memory manager's in Dask's workers; native workers have a
    /// pool of their own, which uses the first two keys. Sizes are bytes, for each worker, or a
    /// fraction of the worker's own GPU, which the workers of that GPU share.
    RmmSpec {
        /// Initial size of the pool, allocated when the worker starts and kept: bytes for each
        /// worker, or a fraction of the GPU that its workers share. Default: none; a native
        /// worker's pool grows as needed.
        pool_size: Size,
        /// Largest size of the pool: bytes for each worker, or a fraction of the GPU that its
        /// workers share. A native worker spills at this size.
        maximum_pool_size: Size,
        /// Managed (unified) memory. Not with NVLink, not with `async`. Default: false.
        managed: bool,
        /// CUDA's stream-ordered allocator instead of RMM's pool. Default: false.
        #[serde(rename = "async")]
        asynchronous: bool,
        /// The asynchronous pool returns memory beyond this size to the device. Needs `async`.
        release_threshold: Size,
        /// Directory for logs of every allocation.
        log_directory: String,
        /// Count allocations, for the dashboard. Default: false.
        track_allocations: bool,
        /// Libraries whose allocations go through RMM: `cupy`, `torch`.
        set_allocator_for: Vec<String>,
    }
}

section! {
    /// UCX: transports and network devices.
    UcxSpec {
        /// Require NVLink (`cuda_ipc`); `false` excludes it. If unset, `cuda_ipc` is used but not
        /// required; with `infiniband: true` or `tcp: true` it is left out.
        nvlink: bool,
        /// Require InfiniBand or RoCE (`rc`); `false` excludes it.
        infiniband: bool,
        /// Use TCP for data; `false` excludes it if other transports can carry every connection.
        tcp: bool,
        /// Set connections up over RDMA instead of TCP.
        rdmacm: bool,
        /// The network devices of each worker: `auto` (the NIC nearest to its GPU, if InfiniBand is
        /// asked for and a NIC can be used), `pin` (the nearest NIC, or an error if there is none),
        /// `stripe` (all of the nearest NICs, shared out so that none is idle), `none` (UCX chooses
        /// among all devices), a list for all workers, or a template for each (`mlx5_{gpu//2}:1`).
        /// Default: `auto`.
        net_devices: NetDevices,
        /// NICs to exclude, by device (`mlx5_4`) or port (`mlx5_4:1`).
        exclude_nics: Vec<String>,
        /// Network device for connection setup. Default: the interface of the announced address,
        /// which is `lo` unless another is requested.
        control_device: String,
        /// `dask`: exactly the variables that dask-cuda sets. Default: `none`.
        compat: UcxCompat,
        /// Settings by GPU architecture and UCX version. Default: `auto`.
        preset: UcxPreset,
        /// UCX version to plan for, like `1.18`. Default: the installed one.
        version: UcxVersion,
        /// The libucp that processes load: a path, `auto` (the first that knows CUDA: the active
        /// Python environment's `libucx`, HPC-X, conda, the system), or `system` (the dynamic
        /// loader's). Default: `auto` for native workers on GPUs of this machine, else `system`.
        library: String,
        /// Further variables; they override computed ones.
        #[serde(deserialize_with = "super::read::variables")]
        #[schemars(with = "Option<BTreeMap<String, super::read::Scalar>>")]
        env: BTreeMap<String, String>,
    }
}

section! {
    /// The scheduler's process.
    SchedulerSpec {
        /// Address to listen on, for scheduler and workers; with `dask.join`, for workers alone.
        /// Default: loopback; with `dask.join`, the address from which that scheduler is reached.
        host: String,
        /// Network interface to listen on, instead of `host`.
        interface: String,
        /// Port, or ports to try in order (`8786:8800`). 0: any free one. No use with `dask.join`.
        port: PortRange,
        /// Whether scheduler and workers have dashboards. Default: true if the engine has them.
        dashboard: bool,
        /// Address of the scheduler's dashboard, like `:8787`. No use with `dask.join`.
        dashboard_address: String,
        /// File to which the scheduler's address is written for clients. No use with `dask.join`.
        file: String,
        /// Further environment variables for the scheduler alone. Dask's workers are forked from
        /// its process under `start_method: fork`, so what libraries read when they are loaded is
        /// the same for both.
        #[serde(deserialize_with = "super::read::variables")]
        #[schemars(with = "Option<BTreeMap<String, super::read::Scalar>>")]
        env: BTreeMap<String, String>,
    }
}

section! {
    /// The workers' processes.
    WorkerSpec {
        /// Ports for the workers to listen on, at least one per worker.
        ports: PortRange,
        /// Address on which a single worker listens.
        listen_address: String,
        /// Address that a single worker announces.
        contact_address: String,
        /// Directory for spilled data.
        local_directory: String,
        /// File that holds the supervisor's process id while the cluster runs.
        pid_file: String,
        /// Abstract resources, like `{GPU: 1}`.
        resources: BTreeMap<String, f64>,
        /// Further environment variables for every worker. Dask's workers are forked, so what libc
        /// reads when a program starts (`MALLOC_…`) belongs into `scheduler.env`, too.
        #[serde(deserialize_with = "super::read::variables")]
        #[schemars(with = "Option<BTreeMap<String, super::read::Scalar>>")]
        env: BTreeMap<String, String>,
    }
}

section! {
    /// Restarts and time-outs.
    SupervisionSpec {
        /// When a dead worker is started again: `never`, `on-failure`, `always`.
        /// Default: `on-failure`.
        restart: RestartWhen,
        /// Failed restarts allowed per worker within `window`: those that do not end in READY. With
        /// one more it is not restarted any more, and the others go on. systemd's
        /// `StartLimitBurst`. Default: 5.
        limit: u32,
        /// Deaths at work allowed per worker within `window`: those while it is READY. After the
        /// next one it is not restarted any more. Docker's `on-failure:N`, Kubernetes'
        /// `backoffLimit`. Default: no limit.
        limit_at_work: u32,
        /// The time in which deaths count for `limit` and `limit_at_work`: systemd's
        /// `StartLimitIntervalSec`. Default: `1m`.
        window: Span,
        /// First delay before a restart; it doubles with each further restart. A worker that was
        /// READY is restarted at once the first time, and always if it had begun a task. Default:
        /// `100ms`.
        backoff: Span,
        /// Longest delay; after a death while READY it is at most 5 s. Default: `30s`.
        backoff_max: Span,
        /// After being READY this long a worker's delay and its count for `limit` start over.
        /// Default: `30s`.
        healthy_after: Span,
        /// Time from start to READY of the whole cluster. Under systemd a unit's `TimeoutStartSec`
        /// that is shorter is extended (systemd 236). Default: `1m`.
        ready_within: Span,
        /// Time between SIGTERM and SIGKILL. Default: `5s`.
        grace: Span,
        /// What happens when the scheduler dies: `restart-cluster` or `end-cluster`. Default:
        /// `restart-cluster`.
        scheduler_death: SchedulerDeath,
        /// A process that does not answer for this long is not READY until it answers. Default:
        /// `30s`.
        answer_within: Span,
        /// What happens to a process that has not answered for `answer_within`: `wait`, or
        /// `restart` (it is ended and restarted as if it had died). Default: `wait`.
        unresponsive: Unresponsive,
        /// Longest wait for a dead worker's GPU memory to be free. Default: `10s`.
        gpu_free_within: Span,
        /// Processes that can't go on by themselves for this long are said to be stalled, with the
        /// cause. They are looked at from outside, a few times within it. Default: never.
        stalled_after: Span,
        /// A cluster that is stalled is ended. Default: false.
        end_when_stalled: bool,
        /// The bytes between the processes are counted, and compared with the wires of the plan;
        /// ranks' NCCL is asked which wires it uses. Default: false; true for a program that is
        /// verified.
        audit: bool,
    }
}

section! {
    /// Resource limits of every process, as `ulimit` sets them: one, or a soft and a hard one. A
    /// limit that cannot be set is noted, or refused under `strict`.
    UlimitSpec {
        /// Largest core file, in bytes.
        core: Ulimit,
        /// Locked memory, in bytes; InfiniBand locks the memory that it uses.
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
        /// Size at which a log file is rotated. Default: `64MiB`.
        rotate_at: Bytes,
        /// Rotated files kept for each process, at most 1000. Default: 3.
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
        /// `tcp`, `tls`, `direct` (one copy between processes of a machine, UCX for device memory),
        /// `ucx` or `ucxx`. Default: `ucxx` when a UCX option is set, else `native` if this program
        /// and Dask are in one Python environment, else `tcp`.
        protocol: String,
        /// The Python to run. Default: that of the active environment.
        python: String,
        /// `fork` (one Python imports once and forks) or `spawn`. Default: `fork`.
        start_method: String,
        /// Address of a scheduler to join, instead of starting one, or its file; `auto`: among the
        /// tasks of Slurm, PBS, MPI or Flux, one a machine, the first has the scheduler and the
        /// others join it by `scheduler.file` (by default a file of the job in the working
        /// directory), which all machines have to share.
        join: String,
        /// Machines that get workers, over ssh, as ssh's words name them: `gpu1`, `user@gpu1`,
        /// `gpu1:2222`, a name of ssh's configuration. The scheduler is on this machine, which gets
        /// workers if it is among them (`localhost`, or its name). Default: this machine.
        hosts: Vec<String>,
        /// The program `cuda-cluster` on these machines, as their shells find it. Default:
        /// `cuda-cluster`, by their `PATH` for commands over ssh.
        hosts_program: String,
        /// The program that reaches them, and its options, such as `[ssh, -F, my-config]`. Default:
        /// `ssh`, by this machine's `PATH`.
        ssh: Vec<String>,
        /// Modules imported before the fork.
        pre_import: Vec<String>,
        /// Modules or files loaded by each worker at its start.
        preload: Vec<String>,
        /// A worker that has had no scheduler for this long ends.
        death_timeout: Span,
        /// A worker of this age is replaced.
        lifetime: Span,
        /// Least number of workers: between this and all of them, as many run as the work needs.
        /// Default: all.
        adapt_minimum: u32,
        /// How many of the workers to start, the best-connected ones; the others are started by
        /// `scale`. Default: all.
        start_workers: u32,
        /// Prefix of the dashboard's URLs. Default: `/`.
        dashboard_prefix: String,
        /// A worker's class. Default: `distributed.Worker`.
        worker_class: String,
        /// Names of the workers in Dask: `process` (`gpu3`), or `gpu` (3). `gpu` needs one worker
        /// per GPU, a fixed number of workers, and a scheduler of the cluster's own. Default:
        /// `process`.
        worker_names: WorkerNames,
        /// What a joined scheduler calls the only worker; several are called `NAME-0`, `NAME-1`, ….
        /// Without it, `HOST-CLUSTER-gpu3`.
        worker_name: String,
        /// cuDF's own spilling. Default: false.
        enable_cudf_spill: bool,
        /// Statistics of cuDF's spilling, a level from 0.
        cudf_spill_stats: u32,
        /// Whether the cluster's scheduler places tasks by the bandwidth between each two workers,
        /// where these differ: by the plan, and by what workers measure and report. Dask assumes
        /// one bandwidth for all. Default: false.
        place_by_wires: bool,
        /// Whether the cluster's scheduler gives tasks of GPU packages (cuDF, CuPy, …), and those
        /// that take their results, to workers with a GPU alone. Workers get the resources `GPU`
        /// and `CPU` for it, as in a cluster that has both kinds. Default: false.
        place_by_kind: bool,
        /// Dask configuration keys, like `{distributed.worker.memory.target: 0.6}`.
        #[serde(deserialize_with = "super::read::variables")]
        #[schemars(with = "Option<BTreeMap<String, super::read::Scalar>>")]
        config: BTreeMap<String, String>,
    }
}

section! {
    /// The command engine's own options.
    CommandSpec {
        /// Program and arguments, for `run -f SPEC`; a command after `--` is run instead. `up` is
        /// for programs that stay: one that ends with status 0 while the cluster starts has failed.
        /// A program's relative path is below the spec file's directory, a name is looked up in
        /// `PATH`; arguments stay as they are. Ranks run in the directory of the call.
        argv: Vec<String>,
        /// Several programs in one job, instead of `argv`: each has as many ranks as its `workers`
        /// says, on GPUs that reach each other best, and all together are one world. Ranks are
        /// numbered program by program. Default: none.
        programs: Vec<ProgramSpec>,
        /// What `CUDA_VISIBLE_DEVICES` shows a rank. Default: `all`, which fits programs that
        /// select the device with the number in `LOCAL_RANK`, as PyTorch's do.
        visible_devices: VisibleDevices,
        /// In whose languages ranks are told of each other, beside `RANK`, `WORLD_SIZE` and
        /// `MASTER_ADDR`. `[]` for none of them. `pmix` (Open MPI) excludes `mpi`. Default: all
        /// others.
        bootstrap: Vec<Bootstrap>,
        /// How often the ranks are started again when one fails: all of them together, with new
        /// places to meet (`TORCHELASTIC_RESTART_COUNT` counts). A rank that fails by itself within
        /// `supervision.healthy_after` of the first start is not started again. Default: never.
        restarts: u32,
        /// GPUs that are kept for those that fail: a spare takes the place of one that is lost when
        /// the ranks are started again. Without a spare the job goes on with fewer. Default: 0.
        spares: u32,
        /// Python modules that are imported once, in a process of which the ranks are forked, so
        /// that they start at once. For programs of Python; what is imported must neither start
        /// threads nor open a GPU. Default: none.
        warm: Vec<String>,
        /// Directory for what ranks write, beside where it is shown: `rank0.out` and `rank0.err`,
        /// byte for byte; of the first restart `restart1/rank0.out`, and so on. Files of an earlier
        /// job are replaced. Default: none.
        output_dir: String,
    }
}

/// One of several programs of a job.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct ProgramSpec {
    /// Its name: letters, digits, `-` and `_`, a letter first, at most 32. Ranks find it in
    /// `ROLE_NAME`.
    pub name: String,
    /// How many ranks run it.
    pub workers: u32,
    /// Program and arguments, as in `command.argv`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub argv: Option<Vec<String>>,
}

section! {
    /// The native engine's own options.
    NativeSpec {
        /// Program of the workers, for tasks that run functions of your own: it calls
        /// `cluster::dispatch_with` first of all. A name is looked up in `PATH`, a relative path is
        /// below the spec file's directory. Default: the supervisor's own.
        program: String,
        /// How a task's worker is chosen: `estimated-finish` or `round-robin`. Default:
        /// `estimated-finish`.
        placement: Placement,
        /// File that records every message to the task scheduler and a digest of its decisions, so
        /// that a run can be replayed; it grows with every event. A relative path is below the run
        /// directory. Default: none.
        record_events: String,
        /// Limit of a worker's objects on disk. Default: no limit.
        disk_limit: Bytes,
    }
}

/// Overrides for the workers that match.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct OverrideSpec {
    /// Which workers: those that meet all given conditions.
    #[serde(rename = "match")]
    pub matching: MatchSpec,
    /// Threads that run tasks, instead of `threads`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads: Option<u32>,
    /// Which CPUs, instead of `cpus`: `local` or `none`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<CpuBinding>,
    /// NICs, instead of `ucx.net_devices`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub net_devices: Option<NetDevices>,
    /// Host memory limit, instead of `memory.limit`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_limit: Option<Limit>,
    /// Device memory limit, instead of `device.memory_limit`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_memory_limit: Option<Limit>,
    /// Initial size of the pool, instead of `rmm.pool_size`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rmm_pool_size: Option<Size>,
    /// Further environment variables; they override those of `worker.env`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
}

section! {
    /// Which workers an override is for.
    MatchSpec {
        /// Name of the worker; `*` matches any text.
        worker: String,
        /// GPU, by index, UUID or PCI address.
        gpu: GpuName,
        /// NUMA node of the GPU.
        numa: u32,
    }
}
