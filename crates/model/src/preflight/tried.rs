//! Checks whose result comes from trying: the driver, CUDA, UCX, Python, containment.
//!
//! Their results are made by `cluster::doctor`; here is what they mean.
//!
//! *Invariant:* none has a decision here.

use super::{Check, Cost};

/// A check that is tried.
const fn tried(
    id: &'static str,
    title: &'static str,
    looks_at: &'static str,
    consequence: &'static str,
    remedy: &'static str,
    cost: Cost,
) -> Check {
    Check { id, title, looks_at, consequence, source: "", remedy, cost, minor: false, judge: None }
}

pub(super) const CHECKS: &[Check] = &[
    tried(
        "driver",
        "the NVIDIA driver",
        "NVML, opened and asked for every GPU",
        "no GPU can be used",
        "nvidia-smi says the same; install the driver, or load its module",
        Cost::Restart,
    ),
    tried(
        "plan",
        "a plan for this machine",
        "the flags and the spec, with this machine's topology",
        "up refuses to start",
        "cuda-cluster plan says the same",
        Cost::Nothing,
    ),
    tried(
        "cuda",
        "CUDA on each GPU",
        "in a process of its own: identity, a context, 1 MiB there and back, an IPC handle",
        "no worker can use the GPU",
        "nvidia-smi -q, and dmesg | grep -i xid",
        Cost::Jobs,
    ),
    tried(
        "nvrtc",
        "a compiler for tasks that are CUDA C++",
        "libnvrtc as workers find it: its version and architectures, against the driver's version \
         and the GPUs' capability",
        "tasks that are CUDA C++ fail; others need no compiler",
        "pip install nvidia-cuda-nvrtc of the driver's CUDA version (nvidia-cuda-nvrtc-cu12 for 12)",
        Cost::Nothing,
    ),
    tried(
        "ucx",
        "UCX",
        "libucp, opened, with its transports",
        "no cluster of the native engine can start, and no protocol ucxx or direct",
        "pip install libucx-cu13 (or -cu12), or HPC-X",
        Cost::Nothing,
    ),
    tried(
        "ucx-installed",
        "other UCX libraries",
        "libucp in Python's packages, HPC-X and the system",
        "",
        "",
        Cost::Nothing,
    ),
    tried(
        "ucx-cuda",
        "a UCX that knows CUDA",
        "files of the installed libraries",
        "device memory is staged in host memory by hand",
        "pip install libucx-cu13 (or -cu12), or HPC-X; then 'ucx.library: auto' finds it",
        Cost::Nothing,
    ),
    tried(
        "ucx-rdma",
        "a UCX that knows CUDA and InfiniBand",
        "files of the installed libraries",
        "device memory does not go over InfiniBand",
        "HPC-X, or conda-forge's ucx; PyPI's libucx is built without InfiniBand",
        Cost::Nothing,
    ),
    tried(
        "ucx-registration-cache",
        "UCX's registration cache",
        "UCX_RCACHE_ENABLE and UCX_MEM_EVENTS",
        "a worker may crash when a peer is lost in the middle of a large message \
         (openucx/ucx#11467)",
        "unset it, or use a UCX that has the fix for openucx/ucx#11485",
        Cost::Nothing,
    ),
    tried(
        "other-users",
        "what other users can do to UCX's processes",
        "a socket's filter, set as workers set it",
        "an empty datagram of any user of this machine ends a process that uses UCX",
        "/proc, and leave to filter sockets (SO_ATTACH_FILTER): a sandbox may forbid it",
        Cost::Nothing,
    ),
    tried(
        "containment",
        "how processes are kept together",
        "a control group, made and removed",
        "process groups and a subreaper instead",
        "",
        Cost::Nothing,
    ),
    tried(
        "run-directories",
        "where clusters are kept",
        "the run directory, its owner and mode, and room for logs",
        "no cluster can start",
        "",
        Cost::Nothing,
    ),
    tried(
        "python",
        "a Python for the Dask engine",
        "the first Python of the environment, and its distributed",
        "the Dask engine cannot start",
        "pip install dask distributed",
        Cost::Nothing,
    ),
];
