//! Starts a plan in this process.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::Prepared;
use super::gpus::NvmlWatch;
use super::launch::{LaunchError, Surroundings, launch};
use super::takedown::TakeDownError;
use crate::audit::Auditor;
use crate::ranks::Ranks;
use crate::secret;
use crate::stalls::Watch;
use cuda_cluster_machine::os::limits::{self, TooFew};
use cuda_cluster_machine::os::run_directory::{RunDirectory, RunDirectoryError};
use cuda_cluster_machine::os::shared_memory;
use cuda_cluster_model::ids::ClusterName;
use cuda_cluster_model::plan::{EnginePlan, Plan};
use cuda_cluster_supervise::gpu::GpuWatch;
use cuda_cluster_supervise::{Input, Launch, Meet, Options, OutputPipe, StartError, Supervisor};
use cuda_cluster_why::audit::Audit;

/// Minimum number of threads of a scheduler or worker, including the one that writes its log.
const THREADS_EACH: u64 = 5;

/// Why a cluster could not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum UpError {
    /// This user's limits are too low for it.
    #[error(transparent)]
    Limits(#[from] TooFew),
    /// The run directory can't be used.
    #[error(transparent)]
    RunDirectory(#[from] RunDirectoryError),
    /// The plan's engine can't be launched.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The supervisor could not start.
    #[error(transparent)]
    Supervisor(#[from] StartError),
    /// The system has no random numbers for the secret.
    #[error("cannot make a secret: {reason}")]
    Secret {
        /// The system's error.
        reason: String,
    },
    /// The plan can't be serialized.
    #[error("cannot write the plan as JSON: {reason}")]
    Plan {
        /// What cannot be written.
        reason: String,
    },
    /// No event loop could be started.
    #[error("cannot start an event loop")]
    Runtime(#[source] std::io::Error),
    /// The supervisor process could not be started.
    #[error("cannot start a supervisor process from {}", program.display())]
    Spawn {
        program: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// The supervisor process ended without reporting an outcome.
    #[error("the supervisor process ended without saying how the cluster ended ({status})")]
    Silent {
        /// How it ended.
        status: String,
    },
    /// The supervisor process was asked to end the cluster, and did not answer.
    #[error("the supervisor of {name} (process {pid}) {did}, so the cluster was killed")]
    Killed {
        name: ClusterName,
        pid: u32,
        /// What it did instead of an answer.
        did: &'static str,
    },
    /// As [`UpError::Killed`], and something is left.
    #[error(transparent)]
    TakeDown(TakeDownError),
    /// A Ctrl-C ended the supervisor process before it was in a group of its own: it has started
    /// nothing.
    #[error("interrupted before anything was started")]
    Interrupted,
    /// The program did not become a supervisor, usually because its `main` does not begin with
    /// [`dispatch`](super::dispatch).
    #[error("{} did not become a supervisor: it {did}", program.display())]
    NotASupervisor {
        program: PathBuf,
        /// What it did instead.
        did: String,
    },
    /// The supervisor process reported a failure.
    #[error("{message}")]
    Refused {
        message: String,
        /// A hint for the user.
        hint: Option<String>,
        /// Whether a resource has run out, or a process was killed, so that the request is not to
        /// blame.
        exhausted: bool,
    },
}

impl UpError {
    fn secret(error: std::io::Error) -> Self {
        UpError::Secret { reason: error.to_string() }
    }

    pub(super) fn plan(error: serde_json::Error) -> Self {
        UpError::Plan { reason: error.to_string() }
    }

    /// What the user can do; `None` if that depends on the cause.
    pub fn hint(&self) -> Option<String> {
        match self {
            UpError::Limits(error) => Some(error.hint()),
            UpError::RunDirectory(error) => error.hint(),
            UpError::Supervisor(error) => error.hint(),
            UpError::Launch(error) => error.hint(),
            UpError::Refused { hint, .. } => hint.clone(),
            UpError::TakeDown(error) => error.hint(),
            UpError::NotASupervisor { .. } => Some(
                "begin its main with cuda_cluster::cluster::dispatch(), or name another program: \
                 Builder::program(\"cuda-cluster\")"
                    .to_owned(),
            ),
            _ => None,
        }
    }
}

/// A cluster that is starting.
pub(super) struct Started {
    pub(super) supervisor: Supervisor,
    /// Counts the bytes between its processes until it has ended.
    pub(super) audit: Option<JoinHandle<Result<Audit, String>>>,
}

/// Starts a plan in this process, which becomes the supervisor and must outlive the cluster.
///
/// Writes `plan.json` and `secret` to the run directory before the first process starts. The output
/// of a run's ranks also goes to `output`, and one of them may have `input`. Must be called inside
/// a tokio runtime, in a process without children of other origin, because the supervisor reaps all
/// children.
///
/// # Errors
/// If the name is taken, or the supervisor can't start.
pub(super) async fn start(
    prepared: &Prepared,
    program: &Path,
    output: Option<OutputPipe>,
    input: Option<Input>,
) -> Result<Started, UpError> {
    let plan = &prepared.plan;
    let threads_each = match plan.engine {
        EnginePlan::Native(_) | EnginePlan::Dask(_) => THREADS_EACH,
        // The process's own, and the one that writes its log.
        EnginePlan::Command(_) => 2,
    };
    limits::check(plan.workers.len() + usize::from(plan.scheduler.is_some()), threads_each)?;
    if let EnginePlan::Native(_) = plan.engine {
        limits::check_memory(plan.workers.len())?;
    }
    let locked = locked_memory(&prepared.launched)?;
    let name = plan.name.clone();
    // Blocks while an earlier cluster of the same name is ending.
    let acquired = tokio::task::spawn_blocking(move || RunDirectory::acquire(&name)).await;
    let directory = acquired.map_err(|error| UpError::Runtime(error.into()))??;
    let (launch, ranks) = match begin(prepared, program, &directory).await {
        Ok((mut launch, ranks)) => {
            launch.notes.extend(locked);
            (launch, ranks)
        }
        Err(error) => {
            // Report the first error.
            let _ = directory.remove();
            return Err(error);
        }
    };
    // Dropped when the last audit is there: the logs are read for it after the end.
    let (reads, reader) = watch::channel(());
    let options = Options {
        helper: program.to_owned(),
        output,
        input,
        // Kept as long as the cluster: it serves the ranks.
        meeting: ranks.clone().map(|ranks| ranks as Arc<dyn Meet>),
        // Simulated GPUs are unknown to the driver.
        gpus: (!plan.machine.simulated).then(|| Arc::new(gpu_watch(plan)) as Arc<dyn GpuWatch>),
        reader: plan.supervision.audit.then_some(reader),
        ..Options::default()
    };
    let paths = directory.paths().clone();
    let supervisor = Supervisor::start(launch, directory, options).await?;
    if let Some(after) = plan.supervision.stalled_after {
        let (state, stopper) = (supervisor.state(), supervisor.stopper());
        let (program, paths) = (program.to_owned(), paths.clone());
        tokio::spawn(Watch { after: after.0, program, paths, state, stopper }.run());
    }
    let audit = plan.supervision.audit.then(|| {
        let auditor = Auditor::of(prepared, program, &paths, supervisor.state());
        tokio::spawn(async move {
            let _reads = reads;
            auditor.run().await
        })
    });
    if let Some(ranks) = ranks {
        ranks.can_end(supervisor.stopper());
    }
    Ok(Started { supervisor, audit })
}

/// Checks the limit on locked memory, if workers are to use RDMA here.
fn locked_memory(launched: &Plan) -> Result<Option<String>, TooFew> {
    if launched.workers.iter().all(|worker| worker.nics.is_empty()) {
        return Ok(None);
    }
    limits::check_locked_memory(
        launched.supervision.ulimits.get("memlock").map(|limit| limit.soft()),
    )
}

/// Writes the files that processes need to the run directory, and turns the plan into a launch.
async fn begin(
    prepared: &Prepared,
    program: &Path,
    directory: &RunDirectory,
) -> Result<(Launch, Option<Arc<Ranks>>), UpError> {
    let Prepared { plan, launched, machine, preflight, to_completion, to_be_verified, .. } =
        prepared;
    let paths = directory.paths();
    let place = paths.shared_memory();
    let made = shared_memory::make(&place);
    let shared_memory = made.is_ok().then_some(&*place);
    let ranks = match &launched.engine {
        EnginePlan::Command(told) => {
            let place = shared_memory.map(Path::to_owned);
            Some(Arc::new(Ranks::new(launched, told, paths, place)))
        }
        EnginePlan::Native(_) | EnginePlan::Dask(_) => None,
    };
    let around = Surroundings {
        program,
        paths,
        shared_memory,
        ranks: ranks.as_deref(),
        to_completion: *to_completion,
        to_be_verified: *to_be_verified,
    };
    let mut launch = launch(launched, around).await?;
    if let Err(error) = made {
        let place = place.display();
        launch.notes.push(format!("{place} cannot be made ({error}): UCX's files lie in /dev/shm"));
    }
    let text = serde_json::to_vec_pretty(plan).map_err(UpError::plan)?;
    directory.write_private(&paths.plan(), &text)?;
    if let EnginePlan::Native(_) = plan.engine {
        let text = serde_json::to_vec(&plan.for_native_workers()).map_err(UpError::plan)?;
        directory.write_private(&paths.workers_plan(), &text)?;
    }
    if !preflight.is_empty() {
        let text = serde_json::to_vec(preflight).map_err(UpError::plan)?;
        directory.write_private(&paths.preflight(), &text)?;
    }
    if plan.supervision.audit {
        directory.make_private(&paths.audit_logs())?;
    }
    if let Some(text) = &prepared.nccl {
        directory.write_private(&paths.nccl(), text.as_bytes())?;
    }
    if let Some(machine) = machine {
        let text = serde_json::to_vec(machine).map_err(UpError::plan)?;
        directory.write_private(&paths.topology(), &text)?;
    }
    let secret = match &prepared.secret {
        Some(theirs) => theirs.clone(),
        None => secret::fresh().map_err(UpError::secret)?.to_hex(),
    };
    directory.write_private(&paths.secret(), secret.as_bytes())?;
    if !prepared.carried.is_empty() {
        directory.make_private(&paths.carried())?;
    }
    for (name, text) in &prepared.carried {
        directory.write_private(&paths.carried().join(name), text.as_bytes())?;
    }
    Ok((launch, ranks))
}

fn gpu_watch(plan: &Plan) -> NvmlWatch {
    let gpus = plan.workers.iter().filter_map(|worker| worker.gpu.as_ref()?.uuid.clone());
    let gpus: BTreeSet<_> = gpus.collect();
    NvmlWatch::new(gpus.into_iter().collect())
}
