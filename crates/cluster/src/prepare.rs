//! Turns a request into a plan that this machine can run.

use std::collections::BTreeMap;
use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::paths::{self, PathError};
use cuda_cluster_machine::os::run_directory::Paths;
use cuda_cluster_machine::probe::{self, Examined, NoLibucp, ProbeError, check_libucp};
use cuda_cluster_model::ids::GpuUuid;
use cuda_cluster_model::plan::{
    Advice, CallerEnvironment, EngineKind, EnginePlan, Here, Plan, PlanError, Unsound, VISIBLE,
    adapt_to_here, libucp_paths, plan,
};
use cuda_cluster_model::preflight::{self, Audience, Finding};
use cuda_cluster_model::spec::Request;
use cuda_cluster_model::topology::{self, Note, Topology, builtin};

/// NCCL's variable for a file with the machine.
pub(crate) const NCCL_TOPOLOGY: &str = "NCCL_TOPO_FILE";

/// Where NCCL looks without it.
const CLOUDS_TOPOLOGY: &str = "/var/run/nvidia-topologyd/virtualTopology.xml";

/// A plan, in a form that this machine can run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prepared {
    /// The plan for the requested machine; shown to users.
    pub plan: Plan,
    /// The plan for the processes: the same, unless the machine is simulated.
    pub launched: Plan,
    /// The machine that was planned for; `None` if only its plan is known.
    pub machine: Option<Topology>,
    /// The differences between the two.
    pub notes: Vec<Note>,
    /// Whether the command engine's ranks are expected to end.
    pub to_completion: bool,
    /// Whether READY waits until the starter has verified the cluster.
    pub to_be_verified: bool,
    /// What preflight has found, for a plan of this machine.
    #[serde(default)]
    pub preflight: Vec<Finding>,
    /// What NCCL is told of the machine, as it reads it.
    #[serde(default)]
    pub nccl: Option<String>,
    /// The secret of the cluster that this one's workers join, if they are to know it.
    #[serde(default)]
    pub secret: Option<String>,
    /// Texts of another machine's files that the processes read, by their names in
    /// [`Paths::carried`].
    #[serde(default)]
    pub carried: BTreeMap<String, String>,
}

impl Prepared {
    /// A plan for this machine.
    pub fn here(plan: Plan) -> Self {
        Self {
            launched: plan.clone(),
            plan,
            machine: None,
            notes: Vec::new(),
            to_completion: false,
            to_be_verified: false,
            preflight: Vec::new(),
            nccl: None,
            secret: None,
            carried: BTreeMap::new(),
        }
    }

    /// A plan for another machine, adapted to this one.
    pub fn simulated(plan: Plan, here: &Here) -> Self {
        let (launched, notes) = adapt_to_here(&plan, here);
        Self { launched, notes, ..Self::here(plan) }
    }
}

/// Why there is nothing to launch.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message says what each field is")]
#[non_exhaustive]
pub enum PrepareError {
    /// This machine can't be probed.
    #[error(transparent)]
    Probe(#[from] ProbeError),
    /// The plan lacks what every plan has.
    #[error("the plan can't be run: {0}")]
    Unsound(#[from] Unsound),
    /// The request does not fit the machine.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The libucp that the processes are to load does not exist.
    #[error(transparent)]
    Libucp(#[from] NoLibucp),
    /// A path that the plan's processes need can't be used.
    #[error(transparent)]
    Path(#[from] PathError),
    /// A requested network interface does not exist here.
    #[error(
        "'scheduler.interface': there is no network interface {name} here; there {}",
        list(present)
    )]
    NoInterface { name: String, present: Vec<String> },
    /// Dask's scheduler or dashboard can't listen where it is told to.
    #[error("'{key}': nothing can listen at {host} here")]
    NoPlace {
        /// The key of the spec that names it.
        key: &'static str,
        host: String,
        #[source]
        source: io::Error,
    },
    /// The plan is for GPUs of another machine.
    #[error("the GPUs of {machine} are not in this machine")]
    Elsewhere {
        /// The plan's machine.
        machine: String,
    },
}

impl PrepareError {
    /// What the user can do; `None` if that depends on the cause.
    pub fn hint(&self) -> Option<String> {
        match self {
            PrepareError::Probe(error) => error.hint(),
            PrepareError::Unsound(_) => Some("mend it, or plan again".to_owned()),
            PrepareError::Plan(error) => error.hint(),
            PrepareError::Libucp(error) => error.hint(),
            PrepareError::Path(error) => Some(error.hint()),
            PrepareError::NoInterface { .. } => {
                Some("leave it out for the usual one, or name one that is up".to_owned())
            }
            PrepareError::NoPlace { .. } => Some(
                "name an address of this machine, or leave it out for the usual one".to_owned(),
            ),
            PrepareError::Elsewhere { .. } => {
                Some("set 'simulate: true' to run its plan with simulated GPUs".to_owned())
            }
        }
    }
}

/// Plans a request for `machine`, or for this machine, and checks that this machine can run it.
///
/// # Errors
/// If this machine can't be probed, there is no plan, its GPUs are elsewhere and not to be
/// simulated, or something that it names does not exist here.
pub fn prepare(request: &Request, machine: Option<&Topology>) -> Result<Prepared, PrepareError> {
    prepare_for(request, machine, &probe::caller())
}

/// As [`prepare`], for all GPUs of the machine, whichever of them this process may see.
///
/// # Errors
/// As there.
pub fn prepare_whole(
    request: &Request,
    machine: Option<&Topology>,
) -> Result<Prepared, PrepareError> {
    let mut caller = probe::caller();
    caller.variables.remove(VISIBLE);
    prepare_for(request, machine, &caller)
}

fn prepare_for(
    request: &Request,
    machine: Option<&Topology>,
    caller: &CallerEnvironment,
) -> Result<Prepared, PrepareError> {
    let examined = examine(caller)?;
    let live = &examined.topology;
    check_interface(request, caller)?;
    let (decided, nccl) = match machine {
        Some(machine) => decide_by(machine, &examined, request, caller)?,
        None => (decide(&examined, request, caller)?, None),
    };
    let prepared = fit(decided, &examined, machine.is_none())?;
    Ok(Prepared { machine: Some(machine.unwrap_or(live).clone()), nccl, ..prepared })
}

/// Checks that a requested network interface exists on this machine, where the processes will run.
///
/// # Errors
/// If it does not exist, or is down.
pub fn check_interface(request: &Request, caller: &CallerEnvironment) -> Result<(), PrepareError> {
    let Some(name) = &request.spec.scheduler.interface else { return Ok(()) };
    let present: Vec<String> = caller.interfaces.iter().map(|one| one.name.clone()).collect();
    // An empty list means that the kernel did not report them.
    if present.is_empty() || present.contains(name) {
        return Ok(());
    }
    Err(PrepareError::NoInterface { name: name.clone(), present })
}

fn list(names: &[String]) -> String {
    match names {
        [one] => format!("is {one}"),
        several => format!("are {}", several.join(", ")),
    }
}

/// Checks that this machine can run an existing plan.
///
/// # Errors
/// If the plan lacks what every plan has, this machine can't be probed, the plan's GPUs are
/// elsewhere and not to be simulated, or the named libucp does not exist.
pub fn prepare_plan(decided: Plan) -> Result<Prepared, PrepareError> {
    decided.check()?;
    let mut decided = decided;
    // The file is not part of a plan.
    let of_run = Paths::of(&decided.name).nccl().display().to_string();
    for worker in &mut decided.workers {
        if worker.env.get(NCCL_TOPOLOGY) == Some(&of_run) {
            worker.env.remove(NCCL_TOPOLOGY);
        }
    }
    let examined = examine(&probe::caller())?;
    let prepared = fit(decided, &examined, false)?;
    let live = examined.topology;
    // A plan for another machine has its name, which may be that of a built-in one.
    let machine = match prepared.plan.machine.simulated {
        true => prepared.plan.machine.name.as_deref().and_then(builtin),
        false => None,
    };
    let machine = machine.and_then(|text| topology::parse(text).ok());
    let machine = machine.or_else(|| (!prepared.plan.machine.simulated).then_some(live));
    Ok(Prepared { machine, ..prepared })
}

/// Looks at this machine, in the time that probing takes.
///
/// # Errors
/// If there is an NVIDIA driver that does not work.
pub fn examine(caller: &CallerEnvironment) -> Result<Examined, ProbeError> {
    let mut examined = probe::Options::from_environment().and_then(|it| probe::examine(&it))?;
    let with_cuda = caller.ucx_libraries.iter().flatten().find(|library| library.cuda);
    examined.evidence.driver.ucx = with_cuda.map(|library| library.whose.clone());
    Ok(examined)
}

/// Plans a request for this machine, with the settings that preflight advises.
///
/// # Errors
/// If there is no plan.
pub fn decide(
    examined: &Examined,
    request: &Request,
    caller: &CallerEnvironment,
) -> Result<Plan, PlanError> {
    let caller = with_files(caller, examined);
    let topology = &examined.topology;
    let first = plan(topology, request, &caller)?;
    if first.engine.kind() != EngineKind::Command {
        return Ok(first);
    }
    let advice = advice(examined, &first);
    if advice.is_empty() { Ok(first) } else { plan(topology, request, &advised(caller, advice)) }
}

/// As [`decide`], by a description of a machine; with what NCCL is told if it is this one and
/// shows less of itself.
fn decide_by(
    machine: &Topology,
    examined: &Examined,
    request: &Request,
    caller: &CallerEnvironment,
) -> Result<(Plan, Option<String>), PlanError> {
    let live = &examined.topology;
    let caller = with_files(caller, examined);
    let first = plan(machine, request, &caller)?;
    let ours = first.engine.kind() == EngineKind::Command && !first.machine.simulated;
    if !ours || check_gpus(&first, live).is_err() {
        return Ok((first, None));
    }
    let mut advice = advice(examined, &first);
    // What a cloud's driver has told NCCL stands where NCCL looks.
    let told = || !Path::new(CLOUDS_TOPOLOGY).exists();
    let nccl = machine.hidden_from(live).filter(|_| told()).and_then(|it| it.to_nccl().ok());
    if nccl.is_some() {
        advice.push(Advice {
            name: NCCL_TOPOLOGY.to_owned(),
            value: Paths::of(&first.name).nccl().display().to_string(),
            id: String::new(),
            reason: "NCCL sees no PCIe switches here, and the given topology has them".to_owned(),
        });
    }
    if advice.is_empty() {
        return Ok((first, nccl));
    }
    Ok((plan(machine, request, &advised(caller, advice))?, nccl))
}

/// What preflight advises for a plan: what is not well is known only for a plan, and what is
/// advised changes it.
fn advice(examined: &Examined, first: &Plan) -> Vec<Advice> {
    let findings = preflight::judge(&examined.evidence, &examined.topology, Some(first));
    let for_both = [Audience::Nccl, Audience::Ucx];
    for_both.iter().flat_map(|audience| preflight::advice(&findings, *audience)).collect()
}

fn advised(caller: CallerEnvironment, advice: Vec<Advice>) -> CallerEnvironment {
    let mut caller = caller;
    caller.advice = advice;
    caller
}

/// The caller with what NCCL's files set: NCCL prefers a variable, so one that a file sets is set
/// (`src/misc/param.cc`).
fn with_files(caller: &CallerEnvironment, examined: &Examined) -> CallerEnvironment {
    let mut caller = caller.clone();
    for setting in &examined.evidence.settings {
        if setting.place.ends_with("nccl.conf") {
            let value = || setting.value.clone();
            caller.variables.entry(setting.name.clone()).or_insert_with(value);
        }
    }
    caller
}

fn fit(decided: Plan, examined: &Examined, own: bool) -> Result<Prepared, PrepareError> {
    let live = &examined.topology;
    let prepared = if decided.machine.simulated {
        Prepared::simulated(decided, &probe::here(live))
    } else {
        if !own {
            check_gpus(&decided, live)?;
        }
        let preflight = preflight::judge(&examined.evidence, live, Some(&decided));
        Prepared { preflight, ..Prepared::here(decided) }
    };
    check_here(&prepared.launched)?;
    Ok(prepared)
}

/// Checks that this machine has the libucp that a plan for it names, the paths that its processes
/// need, and the addresses that Dask's are to listen at.
///
/// # Errors
/// If something is missing or cannot be used.
pub fn check_here(plan: &Plan) -> Result<(), PrepareError> {
    libucp_paths(plan).into_iter().try_for_each(|path| check_libucp(path.as_ref()))?;
    paths::check(plan)?;
    let EnginePlan::Dask(dask) = &plan.engine else { return Ok(()) };
    if dask.join.is_some() {
        return Ok(());
    }
    let dashboard = dask.dashboard.then(|| dask.dashboard_address.rsplit_once(':')).flatten();
    let places = [
        ("scheduler.host", dask.host.as_deref()),
        ("scheduler.dashboard_address", dashboard.map(|(host, _)| host)),
    ];
    for (key, host) in places {
        let Some(host) = host else { continue };
        can_listen(host).map_err(|source| PrepareError::NoPlace {
            key,
            host: host.to_owned(),
            source,
        })?;
    }
    Ok(())
}

/// Whether this machine has an address: `gpu1`, `[::1]`, `tcp://10.0.0.1`.
fn can_listen(host: &str) -> io::Result<()> {
    let host = host.rsplit_once("://").map_or(host, |(_, host)| host).trim_matches(['[', ']']);
    if host.is_empty() {
        // Every one.
        return Ok(());
    }
    let places: Vec<SocketAddr> = (host, 0).to_socket_addrs()?.collect();
    TcpListener::bind(&*places).map(drop)
}

/// Checks that all GPUs of a plan are in a machine, identified by UUID.
///
/// # Errors
/// If one is not.
pub fn check_gpus(plan: &Plan, live: &Topology) -> Result<(), PrepareError> {
    let has = |uuid: &GpuUuid| {
        live.gpus.iter().any(|gpu| {
            gpu.uuid.as_ref() == Some(uuid) || gpu.mig.iter().any(|part| part.uuid == *uuid)
        })
    };
    let mut gpus = plan.workers.iter().filter_map(|worker| worker.gpu.as_ref());
    if gpus.all(|gpu| gpu.uuid.as_ref().is_some_and(has)) {
        return Ok(());
    }
    let machine = plan.machine.name.clone().unwrap_or_else(|| "that machine".to_owned());
    Err(PrepareError::Elsewhere { machine })
}
