//! What this process may use, and with it every process that it starts: shared memory, limits,
//! namespaces, control groups, CPUs and memory.
//!
//! *Invariant:* a limit is blamed only for what the plan needs, or what everybody needs.

use super::evidence::{Look, Used};
use super::scene::{Found, Report, Scene};
use super::{Check, Cost};
use crate::units::HumanBytes;

pub(super) const CHECKS: &[Check] = &[
    Check {
        id: "shared-memory",
        title: "room in /dev/shm",
        looks_at: "the file system at /dev/shm",
        consequence: "NCCL, UCX and PyTorch's loaders put what they share there: they fail with \
                      SIGBUS or 'unable to open shared memory object'",
        source: "NVIDIA/nccl#290, pytorch/torchtitan#853, sgl-project/sglang#1986",
        remedy: "mount -o remount,size=50% /dev/shm; in a container --shm-size=8g or --ipc=host, in \
                 a pod an emptyDir of medium Memory at /dev/shm",
        cost: Cost::Container,
        minor: false,
        judge: Some(shared_memory),
    },
    Check {
        id: "locked-memory",
        title: "memory that may be locked",
        looks_at: "Max locked memory in /proc/self/limits, CAP_IPC_LOCK",
        consequence: "RDMA locks more memory than that: registrations fail, and UCX goes over TCP \
                      without a word",
        source: "openucx/ucx#5725, NVIDIA/nccl-tests#206",
        remedy: "limits.conf for logins, LimitMEMLOCK=infinity for services, --ulimit memlock=-1 \
                 for containers; then start the cluster anew",
        cost: Cost::Root,
        minor: false,
        judge: Some(locked),
    },
    Check {
        id: "open-files",
        title: "open files of a process",
        looks_at: "Max open files in /proc/self/limits",
        consequence: "workers run out of descriptors while they connect",
        source: "getrlimit(2)",
        remedy: "ulimit -n 65536, or LimitNOFILE of the unit",
        cost: Cost::Nothing,
        minor: false,
        judge: Some(open_files),
    },
    Check {
        id: "processes",
        title: "processes and threads",
        looks_at: "Max processes in /proc/self/limits, pids.max of the control group",
        consequence: "threads cannot be started: 'Resource temporarily unavailable'",
        source: "getrlimit(2); Linux, Documentation/admin-guide/cgroup-v2.rst",
        remedy: "ulimit -u, TasksMax= of the unit, --pids-limit of the container",
        cost: Cost::Nothing,
        minor: false,
        judge: Some(processes),
    },
    Check {
        id: "address-space",
        title: "addresses of a process",
        looks_at: "Max address space in /proc/self/limits",
        consequence: "CUDA reserves addresses for the memory of all GPUs and of the machine: cuInit \
                      fails with 2",
        source: "CUDA C++ Programming Guide, unified addressing; Slurm's VSizeFactor sets this",
        remedy: "ulimit -v unlimited",
        cost: Cost::Nothing,
        minor: false,
        judge: Some(addresses),
    },
    Check {
        id: "overcommit",
        title: "memory that is promised",
        looks_at: "vm.overcommit_memory",
        consequence: "with 2 what CUDA reserves counts as used: contexts and forks fail with plenty \
                      of memory free",
        source: "Linux, Documentation/mm/overcommit-accounting.rst",
        remedy: "sysctl vm.overcommit_memory=0",
        cost: Cost::Root,
        minor: false,
        judge: Some(overcommit),
    },
    Check {
        id: "memory-read",
        title: "reading another process's memory",
        looks_at: "process_vm_readv, tried on this process; kernel.yama.ptrace_scope",
        consequence: "host memory between workers is copied twice (no cross memory attach)",
        source: "process_vm_readv(2); openucx/ucx#11512",
        remedy: "in a container --cap-add=SYS_PTRACE or a newer Docker's seccomp profile; sysctl \
                 kernel.yama.ptrace_scope=1",
        cost: Cost::Root,
        minor: false,
        judge: Some(memory_read),
    },
    Check {
        id: "namespaces",
        title: "PID and IPC namespaces",
        looks_at: "/proc/self/ns/pid and ipc",
        consequence: "workers of two containers on one machine have neither CUDA IPC nor shared \
                      memory with each other: everything goes over TCP",
        source: "vllm-project/vllm#55906, openucx/ucx#11978",
        remedy: "--pid=host --ipc=host for both containers, or one container for both",
        cost: Cost::Restart,
        minor: false,
        judge: Some(namespaces),
    },
    Check {
        id: "group-memory",
        title: "memory of the control group",
        looks_at: "memory.max and memory.current of this process's group and those above",
        consequence: "the kernel ends a worker when the group is full (exit by signal 9)",
        source: "Linux, Documentation/admin-guide/cgroup-v2.rst",
        remedy: "more memory for the container or job, or a lower 'memory.limit'",
        cost: Cost::Nothing,
        minor: false,
        judge: Some(group_memory),
    },
    Check {
        id: "group-cpus",
        title: "CPU time of the control group",
        looks_at: "cpu.max of this process's group and those above",
        consequence: "workers are stopped for parts of every 100 ms: latencies of tens of \
                      milliseconds, and heartbeats that come late",
        source: "Linux, Documentation/admin-guide/cgroup-v2.rst, cpu.max",
        remedy: "a cpuset for the container instead of docker run --cpus (limits.cpu of the pod)",
        cost: Cost::Nothing,
        minor: false,
        judge: Some(group_cpus),
    },
    Check {
        id: "allowed-cpus",
        title: "CPUs near the GPUs",
        looks_at: "Cpus_allowed_list of this process, against each GPU's CPUs",
        consequence: "a worker runs far from its GPU, through the link between sockets",
        source: "sched_setaffinity(2); Slurm's and containers' cpusets",
        remedy: "ask the batch system for the CPUs near the GPUs (--gpus-per-task with \
                 --cpu-bind), or a cpuset with them",
        cost: Cost::Nothing,
        minor: false,
        judge: Some(allowed_cpus),
    },
    Check {
        id: "numa-memory",
        title: "free memory near the workers",
        looks_at: "MemFree and page cache of each NUMA node, against its workers' limits",
        consequence: "workers get memory of a far node, or none",
        source: "numactl(8)",
        remedy: "end what fills the node (numastat), or a lower 'memory.limit'",
        cost: Cost::Nothing,
        minor: false,
        judge: Some(numa_memory),
    },
];

/// Docker's default is as much, and too little.
const LEAST_SHARED: u64 = 64 << 20;

fn shared_memory(scene: &Scene<'_>, report: &mut Report) {
    let look = &scene.evidence.system.shared_memory;
    if *look == Look::NotThere {
        return report.push(Found::error("there is no /dev/shm").saw("/dev/shm", "missing"));
    }
    report.one(look, "/dev/shm", |room| {
        let of = format!("{} of {}", HumanBytes(room.free_bytes), HumanBytes(room.total_bytes));
        if room.read_only {
            Err(Found::error("nothing can be written there").saw("/dev/shm", "read-only"))
        } else if room.free_bytes <= LEAST_SHARED {
            let text = match room.total_bytes <= LEAST_SHARED {
                true => format!("/dev/shm has only {}", HumanBytes(room.total_bytes)),
                false => format!("/dev/shm is nearly full: {of} are free"),
            };
            Err(Found::warning(text).saw("statvfs /dev/shm", format!("{of} free")))
        } else {
            Ok(format!("{} free", HumanBytes(room.free_bytes)))
        }
    });
}

/// A limit of this process: `None` if it is not known, `Some(None)` if there is none.
fn limit(scene: &Scene<'_>, name: &str) -> Option<Option<u64>> {
    // A plan may set another.
    let planned = |key: &str| {
        let limits = &scene.plan?.supervision.ulimits;
        limits.get(key).map(|limit| limit.soft())
    };
    let key = match name {
        "Max locked memory" => "memlock",
        "Max open files" => "nofile",
        "Max processes" => "nproc",
        _ => "as",
    };
    planned(key).or_else(|| scene.evidence.process.limits.get(name).copied())
}

fn locked(scene: &Scene<'_>, report: &mut Report) {
    let name = "Max locked memory";
    match limit(scene, name) {
        None => report.cannot_tell("/proc/self/limits does not tell it"),
        Some(None) => report.ok("no limit"),
        Some(_) if scene.evidence.process.may_lock => report.ok("no limit: CAP_IPC_LOCK"),
        Some(Some(bytes)) if !scene.moves_by_rdma() => {
            report.ok(format!("{}, and no RDMA", HumanBytes(bytes)));
        }
        Some(Some(bytes)) => {
            let text = format!("at most {} may be locked", HumanBytes(bytes));
            let found = Found::warning(text).saw(name, HumanBytes(bytes));
            report.push(found.concerns(scene.workers(|worker| !worker.nics.is_empty())));
        }
    }
}

/// What the plan's processes are, and the scheduler.
fn process_count(scene: &Scene<'_>) -> u64 {
    scene.plan.map_or(1, |plan| plan.workers.len() as u64 + 1)
}

/// Descriptors of a process that is connected to all others: its own, and two for each.
const OWN_FILES: u64 = 32;

fn open_files(scene: &Scene<'_>, report: &mut Report) {
    let name = "Max open files";
    let needed = OWN_FILES + 2 * process_count(scene);
    match limit(scene, name) {
        None => report.cannot_tell("/proc/self/limits does not tell it"),
        Some(Some(limit)) if limit < needed => {
            let text = format!("{limit} may be open, and the plan needs {needed}");
            report.push(Found::error(text).saw(name, limit));
        }
        Some(Some(limit)) => report.ok(format!("{limit}")),
        Some(None) => report.ok("no limit"),
    }
}

/// Threads of a process while it starts.
const THREADS: u64 = 16;

fn processes(scene: &Scene<'_>, report: &mut Report) {
    let needed = THREADS * process_count(scene);
    if let Look::Seen(Used { limit, used }) = scene.evidence.process.group_tasks
        && limit.saturating_sub(used) < needed
    {
        let text = format!(
            "the control group has room for {} more, and the plan needs about {needed}",
            limit.saturating_sub(used)
        );
        return report
            .push(Found::warning(text).saw("pids.max, pids.current", format!("{limit}, {used}")));
    }
    match limit(scene, "Max processes") {
        None => report.cannot_tell("/proc/self/limits does not tell it"),
        Some(Some(limit)) if limit < needed => {
            let text = format!("{limit} are allowed, and the plan needs about {needed}");
            report.push(Found::warning(text).saw("Max processes", limit));
        }
        Some(_) => report.ok("room for the plan"),
    }
}

fn addresses(scene: &Scene<'_>, report: &mut Report) {
    let name = "Max address space";
    match limit(scene, name) {
        None => report.cannot_tell("/proc/self/limits does not tell it"),
        Some(None) => report.ok("no limit"),
        Some(Some(bytes)) if scene.gpus().is_empty() => {
            report.ok(format!("{}, and no GPU", HumanBytes(bytes)));
        }
        Some(Some(bytes)) => {
            let text = format!("a process may have {} of addresses", HumanBytes(bytes));
            report.push(Found::error(text).saw(name, HumanBytes(bytes)));
        }
    }
}

fn overcommit(scene: &Scene<'_>, report: &mut Report) {
    let name = "vm.overcommit_memory";
    report.one(&scene.evidence.system.overcommit, name, |mode| match mode {
        2 if !scene.gpus().is_empty() => {
            Err(Found::warning("the kernel promises no more than it has").saw(name, mode))
        }
        mode => Ok(format!("{mode}")),
    });
}

fn memory_read(scene: &Scene<'_>, report: &mut Report) {
    let scope = &scene.evidence.system.ptrace_scope;
    let look = &scene.evidence.process.reads_memory;
    report.one(look, "process_vm_readv", |read| match (read, scope.seen()) {
        (Err(why), _) => {
            let text = format!("the kernel refuses it: {why}");
            Err(Found::warning(text).saw("process_vm_readv", why))
        }
        (Ok(()), Some(scope)) if *scope >= 2 => {
            let text = format!("kernel.yama.ptrace_scope is {scope}, which forbids it to users");
            Err(Found::warning(text).saw("kernel.yama.ptrace_scope", scope))
        }
        (Ok(()), _) => Ok("the kernel allows it".to_owned()),
    });
}

fn namespaces(scene: &Scene<'_>, report: &mut Report) {
    let process = &scene.evidence.process;
    let joins = matches!(
        scene.plan.map(|plan| &plan.engine),
        Some(crate::plan::EnginePlan::Dask(dask)) if dask.join.is_some()
    );
    let own: Vec<&str> = [("PID", &process.own_pids), ("IPC", &process.own_ipc)]
        .into_iter()
        .filter(|(_, look)| look.seen() == Some(&false))
        .map(|(name, _)| name)
        .collect();
    if own.is_empty() {
        match process.own_pids.unseen().or(process.own_ipc.unseen()) {
            Some(why) => report.cannot_tell(why.to_owned()),
            None if process.own_pids == Look::NotThere => {}
            None => report.ok("the machine's own"),
        }
        return;
    }
    let text = format!("{} namespaces of a container", own.join(" and "));
    // All that a cluster starts by itself is in the same ones.
    match joins {
        false => report.ok(text),
        true => report.push(
            Found::warning(format!("{text}, and the scheduler that is joined may be in others"))
                .saw("/proc/self/ns", own.join(" and ")),
        ),
    }
}

fn group_memory(scene: &Scene<'_>, report: &mut Report) {
    let planned: u64 = scene
        .plan
        .map_or(0, |plan| plan.workers.iter().filter_map(|worker| worker.memory_limit_bytes).sum());
    report.one(&scene.evidence.process.group_memory, "memory.max", |Used { limit, used }| {
        let left = limit.saturating_sub(*used);
        let text = format!(
            "{} of {} are left, and the workers may take {}",
            HumanBytes(left),
            HumanBytes(*limit),
            HumanBytes(planned)
        );
        let saw = format!("{}, {}", HumanBytes(*limit), HumanBytes(*used));
        match planned > left {
            true => Err(Found::warning(text).saw("memory.max, memory.current", saw)),
            false => Ok(format!("{} left", HumanBytes(left))),
        }
    });
}

fn group_cpus(scene: &Scene<'_>, report: &mut Report) {
    let workers = scene.plan.map_or(0, |plan| plan.workers.len());
    report.one(&scene.evidence.process.group_cpus, "cpu.max", |cpus| {
        let text = format!("time of {cpus} CPUs, and {workers} workers");
        match *cpus < workers as f64 {
            true => Err(Found::warning(text).saw("cpu.max", format!("{cpus} CPUs"))),
            false => Ok(format!("time of {cpus} CPUs")),
        }
    });
}

fn allowed_cpus(scene: &Scene<'_>, report: &mut Report) {
    let Some(allowed) = &scene.topology.allowed else {
        return report.cannot_tell("the kernel does not tell what is allowed");
    };
    let mut well = 0;
    for gpu in scene.gpus() {
        let Some(near) = &gpu.cpus else { continue };
        if !near.intersection(&allowed.cpus).is_empty() {
            well += 1;
            continue;
        }
        let text = format!("none of its CPUs ({near}) is allowed to this process");
        let found = Found::warning(text).saw("Cpus_allowed_list", &allowed.cpus);
        report.push(scene.of_gpu(gpu, found));
    }
    report.settle(well, "GPU", "CPUs near them are allowed", Vec::new());
}

fn numa_memory(scene: &Scene<'_>, report: &mut Report) {
    let Some(plan) = scene.plan else { return };
    let mut well = 0;
    for (node, free) in &scene.evidence.system.numa_free_bytes {
        let on_node = |worker: &crate::plan::WorkerPlan| {
            worker.binding.mems.as_ref().is_some_and(|mems| mems.len() == 1 && mems.contains(*node))
        };
        let workers = scene.workers(on_node);
        let wanted: u64 = plan
            .workers
            .iter()
            .filter(|worker| on_node(worker))
            .filter_map(|worker| worker.memory_limit_bytes)
            .sum();
        if workers.is_empty() {
            continue;
        }
        // Limits are seldom reached; a tenth of them is.
        if *free >= wanted / 10 {
            well += 1;
            continue;
        }
        let text = format!(
            "{} are free, and {} workers may take {}",
            HumanBytes(*free),
            workers.len(),
            HumanBytes(wanted)
        );
        let found = Found::warning(text).about(format!("NUMA node {node}")).concerns(workers);
        report.push(found.saw(format!("node{node}/meminfo"), HumanBytes(*free)));
    }
    report.settle(well, "node", "memory near the workers", Vec::new());
}
