//! Notes what a spec asks for and nothing will come of, so that `strict` sees it.
//!
//! Does not note what a machine lacks; whoever decides about that resource does.
//!
//! *Invariant:* a key that does not change a plan has a note, or is refused
//! (`tests/plan_keys.rs`).

use super::context::{Context, Slot};
use super::memory;
use super::variables::{PRIORITY, Variables, is_used, protocol};
use crate::spec::{ClusterSpec, CommandSpec, DaskSpec, EngineKind, Limit, NativeSpec, TlsSpec};
use crate::topology::Note;
use crate::units::{HumanBytes, Size};

/// Everything in a spec that has no effect.
pub(super) fn notes(context: &Context<'_>, variables: &Variables) -> Vec<Note> {
    let (spec, engine) = (context.spec, context.engine);
    let mut notes = Vec::new();
    let mut ignored = |keys: &[(&str, bool)], reason: &str| {
        let asked = keys.iter().filter(|(_, asked)| *asked);
        notes.extend(asked.map(|(key, _)| Note::new(*key, format!("ignored: {reason}"))));
    };
    ignored(&sections(spec, engine), &format!("the engine is {engine}"));
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
            ignored(&[("rmm.pool_size", spec.rmm.pool_size.is_some())], reason);
        }
    }
    if !is_used(spec, engine) {
        let reason = format!("the protocol is {}, without UCX", protocol(spec));
        ignored(&ucx(spec), &reason);
    }
    notes.extend(of_overrides(context));
    notes.extend(of_another_scheduler(spec, engine));
    notes.extend(beyond_the_machine(context));
    notes
}

/// Sections of other engines.
fn sections(spec: &ClusterSpec, engine: EngineKind) -> [(&'static str, bool); 4] {
    [
        ("dask", engine != EngineKind::Dask && spec.dask != DaskSpec::default()),
        ("command", engine != EngineKind::Command && spec.command != CommandSpec::default()),
        ("native", engine != EngineKind::Native && spec.native != NativeSpec::default()),
        ("verify", engine == EngineKind::Command && spec.verify == Some(true)),
    ]
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

/// What only RMM has.
fn pools(spec: &ClusterSpec) -> [(&'static str, bool); 5] {
    let rmm = &spec.rmm;
    [
        ("rmm.managed", rmm.managed == Some(true)),
        ("rmm.async", rmm.asynchronous == Some(true)),
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
        } else if one.net_devices.is_some() && !is_used(context.spec, context.engine) {
            let text = format!("ignored: the protocol is {}", protocol(context.spec));
            notes.push(Note::new(format!("{about}.net_devices"), text));
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

/// Limits that no worker can reach.
fn beyond_the_machine(context: &Context<'_>) -> Vec<Note> {
    let Some(whole) = memory::machine_bytes(context.topology) else { return Vec::new() };
    let asked = |slot: &Slot<'_>| match slot
        .overridden(|one| one.memory_limit)
        .or(context.spec.memory.limit)?
    {
        Limit::Size(Size::Bytes(bytes)) => Some(bytes),
        _ => None,
    };
    let limits: Vec<u64> = context.slots.iter().filter_map(asked).collect();
    let sum = limits.iter().fold(0_u64, |sum, bytes| sum.saturating_add(*bytes));
    if sum <= whole {
        return Vec::new();
    }
    let (sum, whole) = (HumanBytes(sum), HumanBytes(whole));
    let text = format!(
        "the limits of {} workers are {sum} together, and the machine has {whole}: it is full before \
         they are reached",
        limits.len()
    );
    vec![Note::new("memory.limit", text)]
}
