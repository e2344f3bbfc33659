//! A cluster inside a program: plan, launch, observe, change, and stop it.

use std::path::{Path, PathBuf};

use super::{
    Control, ControlError, Detached, Lifetime, Lines, PrepareError, Prepared, Report, Start,
    UpError,
};
use crate::ids::ClusterName;
use crate::os::process;
use crate::os::run_directory::Paths;
use crate::plan::{EngineKind, Plan};
use crate::spec::{ClusterSpec, Request, SpecError};
use crate::supervise::{Cause, ClusterState, Outcome, Record};
use crate::topology::Topology;

/// Why a cluster could not be launched; nothing of it is left.
#[derive(Debug, thiserror::Error)]
pub enum LaunchFailure {
    /// The spec is invalid.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// There is no plan that this machine can run.
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    /// The spec asks for a native cluster that is verified, which only `cuda-cluster up` can do.
    #[error("verify: a program that embeds a native cluster cannot have it verified before READY")]
    Unverified,
    /// It could not start.
    #[error(transparent)]
    Up(#[from] UpError),
    /// It did not become READY, and was torn down.
    #[error("the cluster did not become READY{}: {cause}", if *late { " in time" } else { "" })]
    NotReady {
        /// Whether the time limit was exceeded.
        late: bool,
        /// The cause.
        cause: Cause,
    },
}

impl LaunchFailure {
    /// A hint for the user.
    pub fn hint(&self) -> Option<String> {
        match self {
            LaunchFailure::Spec(error) => error.hint(),
            LaunchFailure::Prepare(error) => error.hint(),
            LaunchFailure::Up(error) => error.hint(),
            LaunchFailure::Unverified => Some(
                "leave 'verify' out, and run 'cuda-cluster verify NAME' when it is READY"
                    .to_owned(),
            ),
            LaunchFailure::NotReady { .. } => None,
        }
    }
}

/// A cluster to be launched.
///
/// ```no_run
/// # async fn example() -> Result<(), cuda_cluster::cluster::LaunchFailure> {
/// use cuda_cluster::cluster::Cluster;
///
/// let cluster = Cluster::builder().enable_nvlink().launch().await?;
/// for worker in &cluster.plan().workers {
///     println!("{} on CPUs {:?}", worker.name, worker.binding.cpus);
/// }
/// cluster.stop().await;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct Builder {
    spec: ClusterSpec,
    machine: Option<Topology>,
    program: Option<PathBuf>,
}

impl Builder {
    /// Applies a spec; later calls override it.
    pub fn spec(mut self, spec: ClusterSpec) -> Self {
        self.spec = spec;
        self
    }

    /// The cluster's name. Default: `embedded-`, this process's id and a count.
    pub fn name(mut self, name: ClusterName) -> Self {
        self.spec.name = Some(name);
        self
    }

    /// Plans for another machine than this one, with simulated GPUs.
    pub fn simulate(mut self, machine: Topology) -> Self {
        self.spec.simulate = Some(true);
        self.machine = Some(machine);
        self
    }

    /// The number of workers; the best-connected GPUs are used.
    pub fn workers(mut self, workers: u32) -> Self {
        self.spec.workers = Some(workers);
        self
    }

    /// Requires NVLink, and uses it.
    pub fn enable_nvlink(mut self) -> Self {
        self.spec.ucx.nvlink = Some(true);
        self
    }

    /// Requires InfiniBand or RoCE, and uses it.
    pub fn enable_infiniband(mut self) -> Self {
        self.spec.ucx.infiniband = Some(true);
        self
    }

    /// The program that supervisor, scheduler and workers run: a `cuda-cluster` binary, or one
    /// whose `main` begins with [`dispatch`](super::dispatch). Default: this program.
    pub fn program(mut self, program: impl Into<PathBuf>) -> Self {
        self.program = Some(program.into());
        self
    }

    /// The plan that [`Builder::launch`] would run now, from probing this machine.
    ///
    /// # Errors
    /// If the spec is invalid, or this machine can't be probed or lacks something required.
    pub fn plan(&self) -> Result<Plan, LaunchFailure> {
        Ok(self.prepared()?.plan)
    }

    fn prepared(&self) -> Result<Prepared, LaunchFailure> {
        let mut spec = self.spec.clone();
        spec.name.get_or_insert_with(own_name);
        spec.resolve_paths(&std::env::current_dir().unwrap_or_default());
        Ok(super::prepare(&Request::of(spec)?, self.machine.as_ref())?)
    }

    /// Launches the cluster under a supervisor process that ends it when this process ends.
    ///
    /// # Errors
    /// If the spec is invalid or asks for what an embedded cluster does not have, there is no plan,
    /// or not every process became READY; then nothing of it is left.
    pub async fn launch(mut self) -> Result<Cluster, LaunchFailure> {
        let program = self.program.take().unwrap_or_else(process::own_program);
        let prepared = self.prepared()?;
        // READY would promise what nobody has measured.
        if prepared.plan.requirements.verify && prepared.plan.engine.kind() == EngineKind::Native {
            return Err(LaunchFailure::Unverified);
        }
        bring_up(prepared, &program).await
    }
}

/// A name that no other cluster of this user has; a process may own several clusters.
fn own_name() -> ClusterName {
    use std::sync::atomic::{AtomicU32, Ordering};
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    // Digits and dashes only, and far shorter than the limit.
    format!("embedded-{}-{count}", std::process::id()).parse().unwrap_or_default()
}

async fn bring_up(prepared: Prepared, program: &Path) -> Result<Cluster, LaunchFailure> {
    let plan = prepared.plan.clone();
    let start = Start { program, lifetime: Lifetime::Owned, attended: false, output: None };
    let (mut supervisor, _) = Detached::spawn(prepared, start).await?;
    loop {
        match supervisor.next().await? {
            Some(Report::Ready(_)) => break,
            Some(Report::Ended { outcome, .. }) => {
                supervisor.end().await;
                return Err(not_ready(outcome));
            }
            Some(_) => {}
            None => return Err(not_ready(supervisor.unsaid().await?)),
        }
    }
    let control = Control::new(Paths::of(&plan.name).control());
    Ok(Cluster { supervisor, control, plan })
}

/// The failure for a cluster that ended before it was READY.
fn not_ready(outcome: Outcome) -> LaunchFailure {
    let stopped = || Cause {
        process: None,
        text: "it was stopped while it started".to_owned(),
        exit: None,
        log_tail: Vec::new(),
    };
    let late = matches!(outcome, Outcome::NotReady(_));
    let cause = match outcome {
        Outcome::NotReady(cause) | Outcome::Failed(cause) => cause,
        Outcome::Stopped { degraded } => degraded.unwrap_or_else(stopped),
        Outcome::Finished => stopped(),
    };
    LaunchFailure::NotReady { late, cause }
}

/// A running cluster, owned by this program.
///
/// Dropping it stops the cluster, as does any end of this process.
#[derive(Debug)]
pub struct Cluster {
    supervisor: Detached,
    control: Control,
    plan: Plan,
}

impl Cluster {
    /// Starts a cluster with default settings: one native worker per GPU of this machine.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// The cluster's name, which is also that of its run directory.
    pub fn name(&self) -> &ClusterName {
        &self.plan.name
    }

    /// The plan with its reasons.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Paths of its files: logs, events, sockets.
    pub fn paths(&self) -> Paths {
        Paths::of(&self.plan.name)
    }

    /// The phase of the cluster and of each process, with process ids, bindings, restarts and
    /// lanes, as `ps -o json` prints them.
    ///
    /// # Errors
    /// If the supervisor can't be reached.
    pub async fn state(&self) -> Result<ClusterState, ControlError> {
        self.control.read("/v1/state").await
    }

    /// Phases, deaths and notes from now on, one [`Record`] each.
    ///
    /// # Errors
    /// If the supervisor can't be reached.
    pub async fn events(&self) -> Result<Events, ControlError> {
        Ok(Events { lines: self.control.stream("/v1/events").await? })
    }

    /// Restarts a worker or, given the scheduler's name, the whole cluster.
    ///
    /// # Errors
    /// If no process has that name, or the supervisor can't be reached.
    pub async fn restart(&self, process: &str) -> Result<(), ControlError> {
        self.control.order(&format!("/v1/restart/{process}")).await
    }

    /// Changes the number of running workers: the first ones of the plan.
    ///
    /// # Errors
    /// If the plan has fewer, or the supervisor can't be reached.
    pub async fn scale(&self, workers: usize) -> Result<(), ControlError> {
        self.control.order(&format!("/v1/scale?workers={workers}")).await
    }

    /// Stops the cluster, and returns when nothing of it is left.
    pub async fn stop(self) {
        self.supervisor.end().await;
    }
}

/// The stream of a running cluster's events.
#[derive(Debug)]
pub struct Events {
    lines: Lines,
}

impl Events {
    /// The next event; `None` when the cluster has ended.
    ///
    /// # Errors
    /// If the connection breaks, or the supervisor is of an incompatible version.
    pub async fn next(&mut self) -> Result<Option<Record>, ControlError> {
        let Some(record) = self.lines.next_event().await? else { return Ok(None) };
        serde_json::from_str(&record)
            .map(Some)
            .map_err(|source| ControlError::Answer { path: "/v1/events".to_owned(), source })
    }
}
