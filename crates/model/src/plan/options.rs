//! The engine's settings: the spec's values, with defaults for the rest.
//!
//! *Invariant:* the plan shows defaults too.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::context::Context;
use super::engine::{
    CommandPlan, DaskName, DaskPlan, EnginePlan, NativePlan, ProgramPlan, TlsFiles,
};
use super::form::WorkerPlan;
use super::{bootstrap, rates, variables};
use crate::spec::{ClusterSpec, EngineKind, PortRange, ProgramSpec, TlsSpec, WorkerNames};
use crate::units::Bytes;

/// Where Dask's scheduler and workers listen by default. Loopback, because a scheduler runs the
/// code of anyone who can reach it.
const LOOPBACK: &str = "127.0.0.1";

/// Dask's default port.
const USUAL_PORT: PortRange = PortRange { low: 8786, high: 8786 };

/// The default port of Dask's dashboard.
const USUAL_DASHBOARD_PORT: u16 = 8787;

/// The class that `distributed` uses by default.
const USUAL_CLASS: &str = "distributed.Worker";

/// The settings of the context's engine.
pub(super) fn of(context: &Context<'_>, workers: &[WorkerPlan]) -> EnginePlan {
    match context.engine {
        EngineKind::Native => EnginePlan::Native(native(context)),
        EngineKind::Dask => {
            let dask = dask(context.spec);
            let names = names(&dask, workers, context.selected.by_uuid);
            let gb_per_s = if moves_by_wires(context.spec, &dask) {
                known_rates(context)
            } else {
                BTreeMap::new()
            };
            let resources_by_kind = resources_by_kind(context, workers);
            EnginePlan::Dask(Box::new(DaskPlan { names, gb_per_s, resources_by_kind, ..dask }))
        }
        EngineKind::Command => EnginePlan::Command(command(context)),
    }
}

fn command(context: &Context<'_>) -> CommandPlan {
    let asked = &context.spec.command;
    let each = context.spec.workers_per_gpu.unwrap_or(1);
    CommandPlan {
        argv: asked.argv.clone().unwrap_or_default(),
        programs: context.spec.programs().iter().map(program).collect(),
        bootstrap: bootstrap::offered(context),
        restarts: asked.restarts.unwrap_or(0),
        spares: asked.spares.unwrap_or(0) * each,
        warm: asked.warm.clone().unwrap_or_default(),
        output_dir: asked.output_dir.as_ref().map(PathBuf::from),
    }
}

fn program(asked: &ProgramSpec) -> ProgramPlan {
    let ProgramSpec { name, workers, argv } = asked.clone();
    ProgramPlan { name, workers, argv: argv.unwrap_or_default() }
}

fn native(context: &Context<'_>) -> NativePlan {
    let (asked, worker) = (&context.spec.native, &context.spec.worker);
    NativePlan {
        program: asked.program.as_ref().map(PathBuf::from),
        local_directory: worker.local_directory.as_ref().map(PathBuf::from),
        disk_limit_bytes: asked.disk_limit.map(|Bytes(bytes)| bytes),
        resources: worker.resources.as_ref().map(whole).unwrap_or_default(),
        placement: asked.placement.unwrap_or_default(),
        record_events: asked.record_events.as_ref().map(PathBuf::from),
        gb_per_s: known_rates(context),
        ..NativePlan::default()
    }
}

fn known_rates(context: &Context<'_>) -> BTreeMap<String, BTreeMap<String, f64>> {
    let mut gb_per_s = rates::between(context);
    gb_per_s.retain(|_, to| !to.is_empty());
    gb_per_s
}

/// Whether the machine's links say anything of what Dask's workers move: over TCP, and where GPUs
/// are simulated, all of it goes through this machine's memory.
fn moves_by_wires(spec: &ClusterSpec, dask: &DaskPlan) -> bool {
    let over_tcp = matches!(dask.protocol.as_str(), "tcp" | "tls");
    dask.place_by_wires && dask.join.is_none() && !over_tcp && spec.simulate != Some(true)
}

/// What Dask's workers have for their kind, where tasks may ask for one.
fn resources_by_kind(
    context: &Context<'_>,
    workers: &[WorkerPlan],
) -> BTreeMap<String, BTreeMap<String, u32>> {
    let resource = |worker: &WorkerPlan| {
        let kind = context.kind(worker.gpu.is_some())?.to_owned();
        Some((worker.name.clone(), BTreeMap::from([(kind, worker.threads)])))
    };
    workers.iter().filter_map(resource).collect()
}

/// Resource amounts; the spec's own check has made sure that they are whole and not negative.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked by `spec`")]
fn whole(resources: &BTreeMap<String, f64>) -> BTreeMap<String, u64> {
    resources.iter().map(|(name, amount)| (name.clone(), *amount as u64)).collect()
}

/// A host as addresses have it: an IPv6 address stands in brackets.
fn bracketed(host: &str) -> String {
    match host.parse::<core::net::Ipv6Addr>() {
        Ok(_) => format!("[{host}]"),
        Err(_) => host.to_owned(),
    }
}

pub(super) fn dask(spec: &ClusterSpec) -> DaskPlan {
    let (asked, scheduler, worker) = (&spec.dask, &spec.scheduler, &spec.worker);
    let usual_host = || {
        let elsewhere = asked.join.is_some() || scheduler.interface.is_some();
        (!elsewhere).then(|| LOOPBACK.to_owned())
    };
    let host = scheduler.host.as_deref().map(bracketed).or_else(usual_host);
    // Dashboards listen on the same address as everything else.
    let dashboard = || format!("{}:{USUAL_DASHBOARD_PORT}", host.as_deref().unwrap_or_default());
    DaskPlan {
        protocol: variables::protocol(spec),
        python: asked.python.clone(),
        fork: asked.start_method.as_deref() != Some("spawn"),
        join: asked.join.clone(),
        hosts: Vec::new(),
        there: None,
        preflight: false,
        interface: scheduler.interface.clone(),
        scheduler_ports: scheduler.port.unwrap_or(USUAL_PORT),
        scheduler_ports_required: scheduler.port.is_some(),
        scheduler_file: scheduler.file.as_ref().map(PathBuf::from),
        dashboard: scheduler.dashboard.unwrap_or(true),
        dashboard_address: scheduler.dashboard_address.clone().unwrap_or_else(dashboard),
        dashboard_prefix: asked.dashboard_prefix.clone().unwrap_or_else(|| "/".to_owned()),
        tls: tls(&spec.tls),
        worker_ports: worker.ports.filter(|ports| ports.low != 0),
        listen_address: worker.listen_address.clone(),
        contact_address: worker.contact_address.clone(),
        local_directory: worker.local_directory.as_ref().map(PathBuf::from),
        resources: worker.resources.clone(),
        resources_by_kind: BTreeMap::new(),
        pre_import: asked.pre_import.clone().unwrap_or_default(),
        preload: asked.preload.clone().unwrap_or_default(),
        death_timeout: asked.death_timeout,
        lifetime: asked.lifetime,
        adapt_minimum: asked.adapt_minimum,
        start_workers: asked.start_workers,
        worker_class: asked.worker_class.clone().unwrap_or_else(|| USUAL_CLASS.to_owned()),
        worker_names: asked.worker_names.unwrap_or_default(),
        worker_name: asked.worker_name.clone(),
        names: BTreeMap::new(),
        cudf_spill: (asked.enable_cudf_spill == Some(true))
            .then(|| asked.cudf_spill_stats.unwrap_or(0)),
        config: asked.config.clone().unwrap_or_default(),
        place_by_wires: asked.place_by_wires.unwrap_or(false),
        place_by_kind: asked.place_by_kind.unwrap_or(false),
        gb_per_s: BTreeMap::new(),
        host,
    }
}

/// Dask's names of the workers that have one of their own: the GPU that a worker sees first, as the
/// user numbers or names GPUs, if no other worker does, or a joined scheduler's name for it.
pub(super) fn names(
    dask: &DaskPlan,
    workers: &[WorkerPlan],
    by_uuid: bool,
) -> BTreeMap<String, DaskName> {
    let asked = dask.worker_names == WorkerNames::Gpu
        && dask.join.is_none()
        && dask.adapt_minimum.is_none();
    let gpu = |worker: &WorkerPlan| {
        let gpu = worker.gpu.as_ref().filter(|_| asked)?;
        match &gpu.uuid {
            Some(uuid) if by_uuid || gpu.mig.is_some() => Some(uuid.to_string()),
            _ => Some(gpu.index.to_string()),
        }
    };
    let shared =
        |own: &String| workers.iter().filter(|one| gpu(one).as_ref() == Some(own)).count() > 1;
    let numbered = |worker: &WorkerPlan| match (&dask.worker_name, workers.len()) {
        (Some(name), 1) => Some(name.clone()),
        (Some(name), _) => Some(format!("{name}-{}", worker.rank)),
        (None, _) => None,
    };
    let name = |worker: &WorkerPlan| {
        let own = gpu(worker).filter(|gpu| !shared(gpu)).or_else(|| numbered(worker))?;
        Some((worker.name.clone(), DaskName::from(own)))
    };
    workers.iter().filter_map(name).collect()
}

/// The three TLS files; a spec has all of them or none.
fn tls(asked: &TlsSpec) -> Option<TlsFiles> {
    let TlsSpec { ca_file, cert, key } = asked.clone();
    Some(TlsFiles { ca_file: ca_file?, cert: cert?, key: key? })
}
