//! A plan in a few lines, for snapshots that a person reviews.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use cuda_cluster::plan::{
    CallerEnvironment, EnginePlan, Interface, Plan, PlanError, WorkerPlan, plan,
};
use cuda_cluster::spec::{self, ClusterSpec, Request};
use cuda_cluster::topology::Topology;
use cuda_cluster::units::HumanBytes;

/// A machine of `topologies/`.
pub(crate) fn machine(name: &str) -> Topology {
    let text = cuda_cluster::topology::builtin(name).unwrap_or_else(|| panic!("no machine {name}"));
    cuda_cluster::topology::parse(text).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// A file of `configs/`.
pub(crate) fn config(name: &str) -> ClusterSpec {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs").join(name);
    let text = std::fs::read_to_string(&path).expect("the file is there");
    spec::parse(&text, name).unwrap_or_else(|error| panic!("{error}"))
}

/// A spec written in a test.
pub(crate) fn spec(text: &str) -> ClusterSpec {
    spec::parse(&format!("version: 1\n{text}"), "test").unwrap_or_else(|error| panic!("{error}"))
}

/// A caller with nothing in its environment and one interface to the outside.
pub(crate) fn caller() -> CallerEnvironment {
    let mut outside = Interface::new("eth0", vec![[10, 0, 0, 5].into()]);
    outside.main = true;
    let mut caller = CallerEnvironment::default();
    caller.ucx_libraries = Some(Vec::new());
    caller.interfaces = vec![Interface::new("lo", vec![[127, 0, 0, 1].into()]), outside];
    caller
}

/// A caller with one more variable.
pub(crate) fn caller_with(name: &str, value: &str) -> CallerEnvironment {
    let mut caller = caller();
    caller.variables = BTreeMap::from([(name.to_owned(), value.to_owned())]);
    caller
}

/// Plans a valid spec.
pub(crate) fn planned(topology: &Topology, spec: &ClusterSpec) -> Result<Plan, PlanError> {
    planned_by(topology, spec, &caller())
}

/// Plans a valid spec for another caller.
pub(crate) fn planned_by(
    topology: &Topology,
    spec: &ClusterSpec,
    caller: &CallerEnvironment,
) -> Result<Plan, PlanError> {
    let request = Request::of(spec.clone()).unwrap_or_else(|error| panic!("{error}"));
    plan(topology, &request, caller)
}

/// A spec's plan for a machine in a few lines, or the error.
pub(crate) fn compact(topology: &Topology, spec: &ClusterSpec) -> String {
    compact_of(planned(topology, spec))
}

/// A plan in a few lines, or the error with its hint.
pub(crate) fn compact_of(planned: Result<Plan, PlanError>) -> String {
    match planned {
        Ok(plan) => lines(&plan),
        Err(error) => {
            let hint = error.hint().map_or_else(String::new, |hint| format!("hint: {hint}\n"));
            format!("error: {error}\n{hint}")
        }
    }
}

fn lines(plan: &Plan) -> String {
    let mut text = String::new();
    let shared = shared(&plan.workers);
    for worker in &plan.workers {
        let _ = writeln!(text, "{}", line(worker, &shared));
    }
    if let Some(scheduler) = plan.scheduler.as_ref().and_then(|s| s.binding.cpus.as_ref()) {
        let _ = writeln!(text, "scheduler  cpus {scheduler}");
    }
    if let EnginePlan::Dask(dask) = &plan.engine {
        for host in &dask.hosts {
            let _ = writeln!(text, "{}  {}", host.process, host.argv.join(" "));
        }
    }
    let shared: Vec<String> =
        shared.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let _ = writeln!(text, "all  {}", shared.join(" "));
    for note in &plan.notes {
        let _ = writeln!(text, "note  {note}");
    }
    text
}

fn shared(workers: &[WorkerPlan]) -> BTreeMap<String, String> {
    let mut shared = workers.first().map(|worker| worker.env.clone()).unwrap_or_default();
    shared.retain(|name, value| workers.iter().all(|worker| worker.env.get(name) == Some(value)));
    shared
}

fn line(worker: &WorkerPlan, shared: &BTreeMap<String, String>) -> String {
    let mut parts = vec![worker.name.clone()];
    parts.extend(worker.program.clone());
    if let Some(gpu) = &worker.gpu {
        let mig = gpu.mig.as_ref().map_or_else(String::new, |profile| format!(" MIG {profile}"));
        parts.push(format!("GPU {}{mig}", gpu.index));
    }
    parts.push(format!("cpus {}", shown(worker.binding.cpus.as_ref())));
    parts.push(format!("mems {}", shown(worker.binding.mems.as_ref())));
    let nics: Vec<String> = worker.nics.iter().map(ToString::to_string).collect();
    parts.push(if nics.is_empty() { "no NIC".to_owned() } else { nics.join("+") });
    if worker.threads != 1 {
        parts.push(format!("{} threads", worker.threads));
    }
    let limits = [
        ("device", worker.device_memory_limit_bytes),
        ("host", worker.memory_limit_bytes),
        ("pool", worker.rmm.as_ref().and_then(|rmm| rmm.pool_bytes)),
    ];
    for (name, limit) in limits {
        parts.extend(limit.map(|bytes| format!("{name} {}", HumanBytes(bytes))));
    }
    let own = worker.env.iter().filter(|(name, _)| !shared.contains_key(*name));
    parts.extend(own.map(|(name, value)| format!("{name}={value}")));
    parts.join("  ")
}

fn shown<T: ToString>(set: Option<&T>) -> String {
    set.map_or_else(|| "any".to_owned(), T::to_string)
}
