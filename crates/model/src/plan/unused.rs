//! Notes what a spec asks for and nothing will come of, so that `strict` sees it.
//!
//! Does not note what a machine lacks; whoever decides about that resource does.
//!
//! *Invariant:* a key that does not change a plan has a note, or is refused
//! (`tests/plan/every_key.rs`).

use serde_json::Value;

use super::context::Context;
use super::variables::{PRIORITY, Variables, is_used, protocol};
use crate::spec::{ClusterSpec, EngineKind, TlsSpec, WorkerNames};
use crate::topology::Note;

/// Everything in a spec that has no effect.
pub(super) fn notes(context: &Context<'_>, variables: &Variables) -> Vec<Note> {
    let (spec, engine) = (context.spec, context.engine);
    let mut notes = Vec::new();
    for key in of_other_engines(spec, engine) {
        notes.push(Note::new(key, format!("ignored: the engine is {engine}")));
    }
    let mut ignored = |keys: &[(&str, bool)], reason: &str| {
        let asked = keys.iter().filter(|(_, asked)| *asked);
        notes.extend(asked.map(|(key, _)| Note::new(*key, format!("ignored: {reason}"))));
    };
    match engine {
        EngineKind::Dask => {}
        EngineKind::Native => {
            ignored(
                &network(spec),
                "the native engine's processes meet at sockets in the run directory",
            );
            ignored(&pools(spec), "the native engine's pool of device memory has only sizes");
        }
        EngineKind::Command => {
            let worker = &spec.worker;
            let own = [
                ("worker.local_directory", worker.local_directory.is_some()),
                ("worker.resources", worker.resources.is_some()),
                ("ucx.control_device", spec.ucx.control_device.is_some()),
                ("ucx.rdmacm", spec.ucx.rdmacm.is_some() && !variables.env.contains_key(PRIORITY)),
            ];
            let reason = "the command engine runs the program and nothing else";
            ignored(&network(spec), reason);
            ignored(&own, reason);
            let reason = "the command engine's programs allocate by themselves";
            ignored(&pools(spec), reason);
            let own = [
                ("rmm.pool_size", spec.rmm.pool_size.is_some()),
                ("rmm.maximum_pool_size", spec.rmm.maximum_pool_size.is_some()),
                ("device.memory_limit", spec.device.memory_limit.is_some()),
            ];
            ignored(&own, reason);
            let threads = [("threads", spec.threads.is_some())];
            ignored(&threads, "the command engine's programs start the threads that they need");
            let work_limit = spec.supervision.limit_at_work.is_some();
            let reason =
                "whether a program works is unknown, so 'supervision.limit' counts every death";
            ignored(&[("supervision.limit_at_work", work_limit)], reason);
        }
    }
    let no_scheduler = match (engine, spec.dask.join.is_some()) {
        (EngineKind::Command, _) => Some("the command engine has no scheduler"),
        (EngineKind::Dask, true) => Some("the scheduler is another cluster's ('dask.join')"),
        _ => None,
    };
    if let Some(reason) = no_scheduler {
        let death = spec.supervision.scheduler_death.is_some();
        let own = [
            ("scheduler.env", spec.scheduler.env.is_some()),
            ("supervision.scheduler_death", death),
        ];
        ignored(&own, reason);
    }
    if let (EngineKind::Dask, Some(reason)) = (engine, no_scheduler) {
        let scheduler = &spec.scheduler;
        let own = [
            ("scheduler.port", scheduler.port.is_some()),
            ("scheduler.file", scheduler.file.is_some()),
            ("scheduler.dashboard_address", scheduler.dashboard_address.is_some()),
        ];
        ignored(&own, reason);
    }
    if spec.hosts().is_empty() && engine == EngineKind::Dask {
        let own = [
            ("dask.hosts_program", spec.dask.hosts_program.is_some()),
            ("dask.ssh", spec.dask.ssh.is_some()),
        ];
        ignored(&own, "there are no other hosts ('dask.hosts')");
    }
    if let Some(reason) = unnamed(spec).filter(|_| engine == EngineKind::Dask) {
        ignored(&[("dask.worker_names", true)], reason);
    }
    if !is_used(spec, engine) {
        let reason = format!("the protocol is {}, without UCX", protocol(spec));
        ignored(&ucx(spec), &reason);
    }
    notes.extend(of_overrides(context));
    notes.extend(of_another_scheduler(spec, engine));
    notes.extend(of_kinds(context));
    notes
}

/// A kind of worker that tasks are placed on, and that is not there.
fn of_kinds(context: &Context<'_>) -> Option<Note> {
    let spec = context.spec;
    let own = context.engine == EngineKind::Dask && spec.dask.join.is_none();
    let any_gpu = context.slots.iter().any(|slot| slot.chosen.is_some());
    (own && spec.dask.place_by_kind == Some(true) && spec.hosts().is_empty() && !any_gpu).then(
        || {
            let text = "no worker here has a GPU: tasks of GPU packages wait until one joins";
            Note::new("dask.place_by_kind", text)
        },
    )
}

/// Keys of other engines.
fn of_other_engines(spec: &ClusterSpec, engine: EngineKind) -> Vec<String> {
    let mut keys = Vec::new();
    let mut section = |of: EngineKind, values: serde_json::Result<Value>| {
        if let (true, Ok(Value::Object(values))) = (of != engine, values) {
            let values = values.into_iter().filter(|(_, value)| !value.is_null());
            keys.extend(values.map(|(key, _)| format!("{of}.{key}")));
        }
    };
    section(EngineKind::Dask, serde_json::to_value(&spec.dask));
    section(EngineKind::Command, serde_json::to_value(&spec.command));
    section(EngineKind::Native, serde_json::to_value(&spec.native));
    if engine == EngineKind::Command && spec.verify == Some(true) {
        keys.push("verify".to_owned());
    }
    keys
}

/// What only Dask's processes listen on.
fn network(spec: &ClusterSpec) -> [(&'static str, bool); 10] {
    let (scheduler, worker) = (&spec.scheduler, &spec.worker);
    [
        ("scheduler.host", scheduler.host.is_some()),
        ("scheduler.interface", scheduler.interface.is_some()),
        ("scheduler.port", scheduler.port.is_some()),
        ("scheduler.file", scheduler.file.is_some()),
        ("scheduler.dashboard", scheduler.dashboard == Some(true)),
        ("scheduler.dashboard_address", scheduler.dashboard_address.is_some()),
        ("worker.ports", worker.ports.is_some()),
        ("worker.listen_address", worker.listen_address.is_some()),
        ("worker.contact_address", worker.contact_address.is_some()),
        ("tls", spec.tls != TlsSpec::default()),
    ]
}

/// Why Dask's workers cannot be called by their GPUs, although that was asked for.
fn unnamed(spec: &ClusterSpec) -> Option<&'static str> {
    if spec.dask.worker_names != Some(WorkerNames::Gpu) {
        return None;
    }
    if spec.dask.adapt_minimum.is_some() {
        Some("names by GPU need a fixed number of workers, and 'dask.adapt_minimum' has them vary")
    } else if spec.dask.join.is_some() || !spec.hosts().is_empty() {
        Some("names by GPU are not unique at a scheduler that others join, too")
    } else if spec.workers_per_gpu.is_some_and(|each| each > 1) {
        Some("names by GPU are not unique where several workers have the same one")
    } else {
        None
    }
}

/// What only RMM has.
fn pools(spec: &ClusterSpec) -> [(&'static str, bool); 6] {
    let rmm = &spec.rmm;
    [
        ("rmm.managed", rmm.managed == Some(true)),
        ("rmm.async", rmm.asynchronous == Some(true)),
        ("rmm.release_threshold", rmm.release_threshold.is_some()),
        ("rmm.log_directory", rmm.log_directory.is_some()),
        ("rmm.track_allocations", rmm.track_allocations == Some(true)),
        ("rmm.set_allocator_for", rmm.set_allocator_for.is_some()),
    ]
}

/// What only UCX reads, and does not ask for UCX.
fn ucx(spec: &ClusterSpec) -> [(&'static str, bool); 5] {
    let ucx = &spec.ucx;
    [
        ("ucx.exclude_nics", ucx.exclude_nics.is_some()),
        ("ucx.control_device", ucx.control_device.is_some()),
        ("ucx.preset", ucx.preset.is_some()),
        ("ucx.version", ucx.version.is_some()),
        ("ucx.env", ucx.env.is_some()),
    ]
}

fn of_overrides(context: &Context<'_>) -> Vec<Note> {
    let mut notes = Vec::new();
    for (at, one) in context.spec.overrides.iter().enumerate() {
        let about = format!("overrides[{at}]");
        if !context.slots.iter().any(|slot| slot.is_matched_by(one)) {
            let names: Vec<&str> = context.slots.iter().map(|slot| slot.name.as_str()).collect();
            let text = format!("no worker is meant; the workers are {}", names.join(", "));
            notes.push(Note::new(about, text));
            continue;
        }
        if one.net_devices.is_some() && !is_used(context.spec, context.engine) {
            let text = format!("ignored: the protocol is {}", protocol(context.spec));
            notes.push(Note::new(format!("{about}.net_devices"), text));
        }
        let of_others = [
            ("threads", one.threads.is_some()),
            ("device_memory_limit", one.device_memory_limit.is_some()),
            ("rmm_pool_size", one.rmm_pool_size.is_some()),
        ];
        let of_others = of_others.iter().filter(|_| context.engine == EngineKind::Command);
        for (key, _) in of_others.filter(|(_, asked)| *asked) {
            let text = "ignored: the command engine's programs decide it by themselves";
            notes.push(Note::new(format!("{about}.{key}"), text));
        }
    }
    notes
}

/// A protocol that the scheduler to join does not speak.
fn of_another_scheduler(spec: &ClusterSpec, engine: EngineKind) -> Option<Note> {
    let (theirs, _) = spec.dask.join.as_deref()?.split_once("://")?;
    let own = protocol(spec);
    (engine == EngineKind::Dask && own != theirs).then(|| {
        let text = format!(
            "the workers' is {own}, and the scheduler to join speaks {theirs}: each must be able to \
             reach the other"
        );
        Note::new("dask.protocol", text)
    })
}
