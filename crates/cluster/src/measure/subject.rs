//! A cluster to measure: its plan, its machine, and its processes as they are now.
//!
//! *Invariant:* the plan is that of the running cluster.

use std::path::PathBuf;
use std::time::Duration;

use super::{MeasureError, Memory, Meter, Way};
use crate::{Control, Handle};
use cuda_cluster_machine::os::run_directory::Paths;
use cuda_cluster_machine::probe;
use cuda_cluster_model::ids::{ClusterName, SCHEDULER};
use cuda_cluster_model::plan::{EnginePlan, Plan, WorkerPlan};
use cuda_cluster_model::topology::Topology;
use cuda_cluster_supervise::{ClusterPhase, ClusterState, ProcessPhase, ProcessState};

/// Time between two checks whether the measured processes still answer.
const LOOK: Duration = Duration::from_secs(2);

/// How long workers that are being started, or end, are waited for, and the time between two looks.
const SETTLES_WITHIN: Duration = Duration::from_secs(60);
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// A cluster to measure.
#[derive(Debug)]
pub struct Subject {
    name: ClusterName,
    pub(super) root: PathBuf,
    pub(super) plan: Plan,
    /// The machine that contains its GPUs; `None` if they are simulated.
    pub(super) machine: Option<Topology>,
}

impl Subject {
    /// A running cluster on this machine.
    ///
    /// # Errors
    /// If its plan can't be read, or as [`Subject::new`].
    pub fn of(cluster: &Handle) -> Result<Self, MeasureError> {
        let path = cluster.paths.plan();
        let unread = |source| MeasureError::Plan { path: path.clone(), source };
        let text = std::fs::read_to_string(&path).map_err(|error| unread(error.into()))?;
        let plan = Plan::parse(&text).map_err(|error| unread(error.into()))?;
        Self::new(cluster.name.clone(), cluster.paths.root().to_owned(), plan)
    }

    /// The cluster with this plan and run directory, on this machine.
    ///
    /// # Errors
    /// If its workers answer no questions, or this machine can't be probed.
    pub fn new(name: ClusterName, root: PathBuf, plan: Plan) -> Result<Self, MeasureError> {
        let engine = plan.engine.kind();
        if !Meter::is_there_for(engine) {
            return Err(MeasureError::Engine { name, engine });
        }
        let machine = match plan.machine.simulated {
            true => None,
            false => {
                let options = probe::Options::from_environment()?;
                Some(probe::probe(&options)?.topology)
            }
        };
        Ok(Self { name, root, plan, machine })
    }

    /// The cluster that is being started with this plan; `machine` has its GPUs, unless they are
    /// simulated.
    pub(crate) fn starting(plan: &Plan, machine: Option<&Topology>) -> Self {
        Self {
            name: plan.name.clone(),
            root: Paths::of(&plan.name).root().to_owned(),
            plan: plan.clone(),
            machine: machine.cloned(),
        }
    }

    /// The cluster's name.
    pub fn name(&self) -> &ClusterName {
        &self.name
    }

    /// What it runs.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The machine that contains its GPUs; `None` if they are simulated.
    pub fn machine(&self) -> Option<&Topology> {
        self.machine.as_ref()
    }

    /// Whether its GPUs are simulated.
    pub fn is_simulated(&self) -> bool {
        self.plan.machine.simulated
    }

    /// Whether its workers are Dask's.
    pub fn is_dask(&self) -> bool {
        matches!(self.plan.engine, EnginePlan::Dask(_))
    }

    /// All kinds of memory that the workers can move.
    pub(super) fn memories(&self) -> Memory {
        let has_gpu = |worker: &&WorkerPlan| worker.gpu.is_some();
        let gpus = self.plan.workers.iter().filter(has_gpu).count();
        if gpus > 1 && self.machine.is_some() { Memory::Both } else { Memory::Host }
    }

    pub(super) fn control(&self) -> Control {
        Control::new(Paths::at(&self.root).control())
    }

    /// The least limit of a worker's host memory, in bytes: as it holds here, or the plan's where
    /// no supervisor tells.
    pub async fn least_memory_limit(&self) -> Option<u64> {
        match self.control().read::<ClusterState>("/v1/state").await {
            Ok(state) => state.workers.iter().filter_map(|one| one.memory_limit_bytes).min(),
            Err(_) => self.plan.workers.iter().filter_map(|one| one.memory_limit_bytes).min(),
        }
    }

    /// The workers, once those of these pairs that are being started, as after a restart or with a
    /// new scheduler, are READY. None without a supervisor to tell.
    pub(super) async fn settled(&self, ways: &[Way]) -> Result<Vec<ProcessState>, MeasureError> {
        let begun = tokio::time::Instant::now();
        loop {
            let state = self.control().read::<ClusterState>("/v1/state?fresh=true").await;
            let Ok(state) = state else { return Ok(Vec::new()) };
            let needed = |name: &String| ways.iter().any(|(from, to)| name == from || name == to);
            let workers = state.workers.iter().filter(|worker| needed(&worker.name));
            let changes = |process: &&ProcessState| may_become_ready(process.state, state.state);
            let Some(process) = state.scheduler.iter().chain(workers).find(changes) else {
                return Ok(state.workers);
            };
            if begun.elapsed() > SETTLES_WITHIN {
                let (process, state) = (process.name.clone(), process.state.to_string());
                return Err(MeasureError::Unsettled { process, state });
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    /// Returns an error as soon as a process that the measurement needs stops answering.
    pub(super) async fn not_answering(&self, ways: &[Way]) -> MeasureError {
        let control = self.control();
        let needed = |process: &&ProcessState| {
            let name = &process.name;
            name == SCHEDULER || ways.iter().any(|(from, to)| name == from || name == to)
        };
        loop {
            // A missing supervisor is no reason to fail the measurement.
            if let Ok(state) = control.read::<ClusterState>("/v1/state").await
                && let Some(process) = state.unresponsive().find(needed)
            {
                let (cluster, standing) = (self.name.clone(), process.standing().to_string());
                let process = process.name.clone();
                return MeasureError::NotAnswering { cluster, process, standing };
            }
            tokio::time::sleep(LOOK).await;
        }
    }
}

/// Whether a process that is not READY may become so without anybody's wish. One that waits may not
/// be wanted, which shows when the cluster is READY without it.
fn may_become_ready(process: ProcessPhase, cluster: ClusterPhase) -> bool {
    use ProcessPhase::{Restarting, Starting, Stopping, Waiting};
    let is_on_its_way = matches!(cluster, ClusterPhase::Starting | ClusterPhase::Recovering);
    matches!(process, Starting | Restarting | Stopping) || process == Waiting && is_on_its_way
}
