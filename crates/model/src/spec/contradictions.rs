//! Values that are valid one by one but contradict each other.
//!
//! Does not look at a machine; `plan` finds what a machine contradicts.
//!
//! *Invariant:* each check names the key that the user should look at first.

use std::collections::BTreeMap;

use super::error::{Found, one_of, refuse};
use super::{
    Bootstrap, ClusterSpec, CpuBinding, EngineKind, GpuSelection, MatchSpec, PythonCommand,
    SupervisionSpec,
};
use super::{hosts, implausible, network, programs, texts};
use crate::units::{Size, Span};

/// Checks a spec against itself.
pub(super) fn check(spec: &ClusterSpec) -> Result<(), Found> {
    texts::check(spec)?;
    numbers(spec)?;
    gpus(spec)?;
    rmm(spec)?;
    network::check(spec)?;
    hosts::check(spec)?;
    processes(spec)?;
    ranks(spec)?;
    programs::check(spec)?;
    implausible::addresses(spec)?;
    implausible::memory(spec)?;
    bootstrap(spec)?;
    environment("ucx.env", spec.ucx.env.as_ref(), true)?;
    environment("worker.env", spec.worker.env.as_ref(), false)?;
    environment("scheduler.env", spec.scheduler.env.as_ref(), false)?;
    overrides(spec)
}

fn bootstrap(spec: &ClusterSpec) -> Result<(), Found> {
    let named = |language| spec.command.bootstrap.iter().flatten().any(|one| *one == language);
    match named(Bootstrap::Mpi) && named(Bootstrap::Pmix) {
        true => refuse(
            "command.bootstrap",
            "MPICH refuses to start where it is told of its ranks by both 'mpi' and 'pmix'",
            "name 'pmix' for programs of Open MPI, 'mpi' for those of MPICH",
        ),
        false => Ok(()),
    }
}

/// Words of `rmm.set_allocator_for`.
pub(super) const ALLOCATORS: &[&str] = &["cupy", "torch"];

/// Words of `dask.start_method`.
pub(super) const START_METHODS: &[&str] = &["fork", "spawn"];

fn too_many_threads(key: &str, threads: Option<u32>) -> Result<(), Found> {
    match threads.filter(|threads| *threads > MOST_THREADS) {
        Some(threads) => refuse(
            key,
            format!("{threads} threads are more than the {MOST_THREADS} that Linux can have"),
            "give about as many as there are CPUs",
        ),
        None => Ok(()),
    }
}

fn numbers(spec: &ClusterSpec) -> Result<(), Found> {
    let counts = [
        ("workers", spec.workers),
        ("workers_per_gpu", spec.workers_per_gpu),
        ("threads", spec.threads),
    ];
    for (key, count) in counts {
        if count == Some(0) {
            return refuse(key, "0 is too few; the least is 1", "leave it out for the default");
        }
    }
    too_many_threads("threads", spec.threads)?;
    // More would exhaust the process ids, and help nobody.
    let limits = [
        ("workers_per_gpu", spec.workers_per_gpu, 64, "use fewer workers"),
        ("cpu_workers", spec.cpu_workers, 1024, "use fewer workers"),
        // Each time that a log is full, all of them get other names.
        ("logs.keep", spec.logs.keep, MOST_LOGS, "keep fewer, and make 'logs.rotate_at' larger"),
    ];
    for (key, count, most, hint) in limits {
        if count.is_some_and(|count| count > most) {
            return refuse(key, format!("more than {most} are not meant"), hint);
        }
    }
    if spec.scheduler_cores.is_some() && spec.cpus != Some(CpuBinding::Split) {
        return refuse(
            "scheduler_cores",
            "cores are kept for the scheduler only when they are split among processes",
            "set 'cpus: split' too",
        );
    }
    Ok(())
}

fn gpus(spec: &ClusterSpec) -> Result<(), Found> {
    match &spec.gpus {
        Some(GpuSelection::None) if spec.cpu_workers.unwrap_or(0) == 0 => refuse(
            "gpus",
            "without GPUs and without CPU workers there is nothing to run",
            "set 'cpu_workers', or choose GPUs",
        ),
        Some(GpuSelection::None) if spec.workers.is_some() => refuse(
            "workers",
            "'gpus: none' leaves no GPU for these workers",
            "use 'cpu_workers' for workers without a GPU",
        ),
        Some(GpuSelection::Choose(choose)) if choose.count == 0 => {
            refuse("gpus.count", "0 is too few; the least is 1", "use 'gpus: none' for no GPU")
        }
        Some(GpuSelection::Choose(_)) if spec.workers.is_some() => refuse(
            "workers",
            "'gpus' already says how many are chosen",
            "give the number once: 'gpus: {count: …}' or 'workers: …'",
        ),
        Some(GpuSelection::List(names)) => {
            let twice = names.iter().enumerate().find(|(at, name)| names[..*at].contains(name));
            if let Some((_, name)) = twice {
                return refuse(
                    "gpus",
                    format!("GPU {name} is named twice"),
                    "use 'workers_per_gpu' for several workers on one GPU",
                );
            }
            if spec.workers.is_some_and(|workers| workers as usize > names.len()) {
                return refuse(
                    "workers",
                    format!("more workers than the {} GPUs that are named", names.len()),
                    "use 'workers_per_gpu' for several workers on one GPU",
                );
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

fn rmm(spec: &ClusterSpec) -> Result<(), Found> {
    let rmm = &spec.rmm;
    let managed = rmm.managed == Some(true);
    let asynchronous = rmm.asynchronous == Some(true);
    if managed && spec.ucx.nvlink == Some(true) {
        return refuse(
            "rmm.managed",
            "managed memory cannot be shared over NVLink (CUDA IPC refuses it)",
            "drop 'rmm.managed' or 'ucx.nvlink'",
        );
    }
    if managed && asynchronous {
        return refuse(
            "rmm.managed",
            "managed memory and the asynchronous allocator exclude each other",
            "drop 'rmm.managed' or 'rmm.async'",
        );
    }
    if rmm.release_threshold.is_some() && !asynchronous {
        return refuse(
            "rmm.release_threshold",
            "only the asynchronous allocator has a release threshold",
            "set 'rmm.async: true' too",
        );
    }
    if rmm.maximum_pool_size.is_some() && rmm.pool_size.is_none() {
        return refuse(
            "rmm.maximum_pool_size",
            "there is no pool whose size this could limit",
            "set 'rmm.pool_size' too",
        );
    }
    let larger = match (rmm.pool_size, rmm.maximum_pool_size) {
        (Some(Size::Bytes(first)), Some(Size::Bytes(most))) => first > most,
        (Some(Size::Fraction(first)), Some(Size::Fraction(most))) => first > most,
        _ => false,
    };
    if larger {
        return refuse(
            "rmm.maximum_pool_size",
            "the pool begins larger than it may become",
            "make 'rmm.maximum_pool_size' at least 'rmm.pool_size'",
        );
    }
    for library in rmm.set_allocator_for.iter().flatten() {
        one_of("rmm.set_allocator_for", library, ALLOCATORS)?;
    }
    Ok(())
}

/// Ranks that are started again, or forked.
fn ranks(spec: &ClusterSpec) -> Result<(), Found> {
    if let (Some(argv), Some(modules)) = (&spec.command.argv, &spec.command.warm)
        && !modules.is_empty()
        && let Err(error) = PythonCommand::of(argv)
    {
        let hint = "begin the command with python, or leave 'command.warm' out";
        return refuse("command.warm", error.to_string(), hint);
    }
    if spec.command.spares.unwrap_or(0) > 0 {
        if spec.command.restarts.unwrap_or(0) == 0 {
            return refuse(
                "command.spares",
                "a spare takes a place only when the ranks are started again",
                "give 'command.restarts', too",
            );
        }
        if spec.cpu_workers.unwrap_or(0) > 0 {
            return refuse(
                "command.spares",
                "ranks without a GPU have nothing that a spare could replace",
                "drop 'cpu_workers', or 'command.spares'",
            );
        }
    }
    Ok(())
}

fn processes(spec: &ClusterSpec) -> Result<(), Found> {
    if let Some(method) = &spec.dask.start_method {
        one_of("dask.start_method", method, START_METHODS)?;
    }
    if spec.dask.adapt_minimum.is_some() && spec.dask.join.is_some() {
        return refuse(
            "dask.adapt_minimum",
            "whoever started the scheduler decides how many workers it needs",
            "drop 'dask.adapt_minimum', or 'dask.join'",
        );
    }
    if let Some((most, least)) = spec.workers.zip(spec.dask.adapt_minimum)
        && least > most
    {
        return refuse(
            "dask.adapt_minimum",
            format!("{least} are more than all {most} workers"),
            "make it at most 'workers'",
        );
    }
    if spec.dask.start_workers == Some(0) {
        return refuse("dask.start_workers", "no worker would start", "give 1 or more");
    }
    if spec.dask.worker_name.is_some() && spec.dask.join.is_none() {
        return refuse(
            "dask.worker_name",
            "it names workers at a scheduler that they join",
            "give 'dask.join', or leave it out",
        );
    }
    let supervision = &spec.supervision;
    if let (Some(first), Some(most)) = (supervision.backoff, supervision.backoff_max)
        && first > most
    {
        return refuse(
            "supervision.backoff",
            "the first delay is longer than the longest",
            "make 'backoff_max' at least 'backoff'",
        );
    }
    if supervision.answer_within.is_some_and(|span| span < SHORTEST_ANSWER) {
        return refuse(
            "supervision.answer_within",
            format!("no process can promise to answer within less than {SHORTEST_ANSWER}"),
            "make it longer; the default is 30s",
        );
    }
    stalls(supervision)?;
    let resources = spec.worker.resources.iter().flatten();
    let whole = |amount: f64| amount >= 0.0 && amount.fract() == 0.0 && amount < 1e18;
    let native = spec.engine.unwrap_or_default() == EngineKind::Native;
    if let Some((name, amount)) = resources.clone().find(|(_, n)| native && !whole(**n)) {
        return refuse(
            "worker.resources",
            format!("{name}: {amount} is no number of things that the native engine can count"),
            "give whole numbers from 0",
        );
    }
    let kind = resources.map(|(name, _)| name.as_str()).find(|name| ["GPU", "CPU"].contains(name));
    if let Some(kind) = kind.filter(|_| spec.dask.place_by_kind == Some(true)) {
        return refuse(
            "worker.resources",
            format!("'dask.place_by_kind' gives {kind} to workers of one kind, not to all"),
            "drop one of them",
        );
    }
    let program = spec.command.argv.as_deref().map(<[String]>::first);
    if program.is_some_and(|program| program.is_none_or(String::is_empty)) {
        return refuse("command.argv", "there is no program in it", "name the program to run");
    }
    Ok(())
}

fn stalls(supervision: &SupervisionSpec) -> Result<(), Found> {
    match supervision.stalled_after {
        Some(after) if after < SHORTEST_STALL => refuse(
            "supervision.stalled_after",
            format!("a wait of less than {SHORTEST_STALL} is nothing unusual"),
            "make it longer than the longest wait in a good job, such as 5m",
        ),
        None if supervision.end_when_stalled == Some(true) => refuse(
            "supervision.end_when_stalled",
            "nobody looks whether anything is stalled",
            "give 'supervision.stalled_after', too, such as 5m",
        ),
        _ => Ok(()),
    }
}

/// The most former logs of a process.
pub(crate) const MOST_LOGS: u32 = 1000;

/// The most threads of a machine: `PID_MAX_LIMIT` of Linux's `threads.h`.
pub(crate) const MOST_THREADS: u32 = 4 << 20;

/// With less, processes on a busy machine would often count as unresponsive.
const SHORTEST_ANSWER: Span = Span::millis(100);

/// Nobody can tell sooner: the patience of `why`'s verdicts.
const SHORTEST_STALL: Span = Span::secs(5);

/// Variables that the plan sets itself.
const DECIDED: [&str; 2] = ["CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"];

fn variable(at: &str, name: &str) -> Result<(), Found> {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let good = !name.is_empty() && name.chars().all(plain);
    if good && !name.starts_with(|c: char| c.is_ascii_digit()) {
        return Ok(());
    }
    refuse(
        at,
        format!("{name:?} is no name of a variable"),
        "use letters, digits and '_', a letter first",
    )
}

fn environment(key: &str, env: Option<&BTreeMap<String, String>>, ucx: bool) -> Result<(), Found> {
    for name in env.into_iter().flat_map(BTreeMap::keys) {
        let at = format!("{key}.{name}");
        variable(&at, name)?;
        if ucx && !(name.starts_with("UCX_") || name.starts_with("UCXPY_")) {
            return refuse(
                &at,
                "this is no variable of UCX",
                "put variables of other programs into 'worker.env' or 'scheduler.env'",
            );
        }
        if !ucx && name.starts_with("UCX_") {
            return refuse(
                &at,
                "scheduler, workers and clients need the same UCX variables",
                "put it into 'ucx.env', which reaches all of them",
            );
        }
        if DECIDED.contains(&name.as_str()) {
            return refuse(
                &at,
                "the plan decides on this variable: it is how a worker finds its own GPU",
                "choose GPUs with 'gpus'",
            );
        }
    }
    Ok(())
}

fn overrides(spec: &ClusterSpec) -> Result<(), Found> {
    for (at, difference) in spec.overrides.iter().enumerate() {
        let key = format!("overrides[{at}]");
        if difference.matching == MatchSpec::default() {
            return refuse(
                &format!("{key}.match"),
                "no condition is given, so it is unclear which workers are meant",
                "match by 'worker', 'gpu' or 'numa'; 'worker: \"*\"' means all",
            );
        }
        if difference.cpus == Some(CpuBinding::Split) {
            return refuse(
                &format!("{key}.cpus"),
                "cores are split among all workers or none",
                "set 'cpus: split' at the top, and 'cpus: none' for exceptions",
            );
        }
        if difference.threads == Some(0) {
            return refuse(
                &format!("{key}.threads"),
                "0 is too few; the least is 1",
                "leave it out for the default",
            );
        }
        too_many_threads(&format!("{key}.threads"), difference.threads)?;
        for name in difference.env.keys() {
            variable(&format!("{key}.env.{name}"), name)?;
        }
        let decided = difference.env.keys().find(|name| DECIDED.contains(&name.as_str()));
        if let Some(name) = decided {
            return refuse(
                &format!("{key}.env.{name}"),
                "the plan decides on this variable: it is how a worker finds its own GPU",
                "choose GPUs with 'gpus'",
            );
        }
    }
    Ok(())
}
