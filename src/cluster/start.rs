//! Starts a plan in this process.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::Prepared;
use super::gpus::NvmlWatch;
use super::launch::{LaunchError, Surroundings, launch};
use crate::engine::command;
use crate::os::limits::{self, TooFew};
use crate::os::run_directory::{RunDirectory, RunDirectoryError};
use crate::os::shared_memory;
use crate::plan::{EnginePlan, Plan};
use crate::supervise::gpu::GpuWatch;
use crate::supervise::{Launch, Options, OutputPipe, StartError, Supervisor};
use crate::wire::secret::{LENGTH, Secret};

/// Least threads of a worker or scheduler of ours or of Dask's, with the one that writes its log.
const THREADS_EACH: u64 = 5;

/// Why a cluster could not begin to start.
#[derive(Debug, thiserror::Error)]
pub enum UpError {
    /// This user's limits leave no room for it.
    #[error(transparent)]
    Limits(#[from] TooFew),
    /// The run directory cannot be had.
    #[error(transparent)]
    RunDirectory(#[from] RunDirectoryError),
    /// The plan's engine cannot be launched.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The supervisor could not begin.
    #[error(transparent)]
    Supervisor(#[from] StartError),
    /// The system has no randomness for the secret.
    #[error("cannot make a secret: {0}")]
    Secret(getrandom::Error),
    /// There is no port for rank 0 of the command engine.
    #[error("there is no free port for rank 0 to listen on")]
    Rendezvous(#[source] std::io::Error),
    /// The plan has no text form.
    #[error("cannot write the plan as JSON")]
    Plan(#[source] serde_json::Error),
    /// There is no event loop to be had.
    #[error("cannot start an event loop")]
    Runtime(#[source] std::io::Error),
    /// The supervisor process could not be started.
    #[error("cannot start a supervisor process from {}", program.display())]
    Spawn {
        /// The program.
        program: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The supervisor process ended without a word.
    #[error("the supervisor process ended without saying how the cluster ended ({status})")]
    Silent {
        /// How it ended.
        status: String,
    },
    /// The supervisor process refused.
    #[error("{message}")]
    Refused {
        /// Its words.
        message: String,
        /// What to do.
        hint: Option<String>,
        /// Whether something ran out: nothing that was asked for is wrong.
        exhausted: bool,
    },
}

impl UpError {
    /// What the user can do.
    pub fn hint(&self) -> Option<String> {
        match self {
            UpError::Limits(error) => Some(error.hint()),
            UpError::RunDirectory(error) => error.hint(),
            UpError::Supervisor(error) => error.hint(),
            UpError::Launch(error) => error.hint(),
            UpError::Refused { hint, .. } => hint.clone(),
            _ => None,
        }
    }
}

/// Starts a plan in this process, which becomes the supervisor and must outlive the cluster.
///
/// The run directory holds `plan.json` and `secret` before the first process starts. What the ranks
/// of a run write goes into `output` too. Call it inside a tokio runtime, in a process whose
/// children are all its own: the supervisor reaps them.
///
/// # Errors
/// If the name is taken, or the supervisor cannot begin.
pub async fn start(
    prepared: &Prepared,
    program: &Path,
    output: Option<OutputPipe>,
) -> Result<Supervisor, UpError> {
    let plan = &prepared.plan;
    let threads_each = match plan.engine {
        EnginePlan::Native(_) | EnginePlan::Dask(_) => THREADS_EACH,
        // Its own, and the one that writes its log.
        EnginePlan::Command(_) => 2,
    };
    limits::check(plan.workers.len() + usize::from(plan.scheduler.is_some()), threads_each)?;
    let rendezvous = command::rendezvous(None).map_err(UpError::Rendezvous)?;
    let name = plan.name.clone();
    // It may wait for the end of the cluster that had the name.
    let acquired = tokio::task::spawn_blocking(move || RunDirectory::acquire(&name)).await;
    let directory = acquired.map_err(|error| UpError::Runtime(error.into()))??;
    let launch = match begin(prepared, program, &directory, rendezvous).await {
        Ok(launch) => launch,
        Err(error) => {
            // The error that is told is the first one.
            let _ = directory.remove();
            return Err(error);
        }
    };
    let options = Options {
        helper: program.to_owned(),
        output,
        // Simulated GPUs are in no driver's list.
        gpus: (!plan.machine.simulated).then(|| Arc::new(watch(plan)) as Arc<dyn GpuWatch>),
        ..Options::default()
    };
    Ok(Supervisor::start(launch, directory, options).await?)
}

/// Fills the run directory with what the processes find there, and turns the plan into a launch.
async fn begin(
    prepared: &Prepared,
    program: &Path,
    directory: &RunDirectory,
    rendezvous: SocketAddr,
) -> Result<Launch, UpError> {
    let Prepared { plan, launched, to_completion, to_be_verified, .. } = prepared;
    let paths = directory.paths();
    let place = paths.shared_memory();
    let made = shared_memory::make(&place);
    let around = Surroundings {
        program,
        paths,
        shared_memory: made.is_ok().then_some(&place),
        rendezvous,
        to_completion: *to_completion,
        to_be_verified: *to_be_verified,
    };
    let mut launch = launch(launched, around).await?;
    if let Err(error) = made {
        let place = place.display();
        launch.notes.push(format!("{place} cannot be made ({error}): UCX's files lie in /dev/shm"));
    }
    let text = serde_json::to_vec_pretty(plan).map_err(UpError::Plan)?;
    directory.write_private(&paths.plan(), &text)?;
    directory.write_private(&paths.secret(), secret()?.to_hex().as_bytes())?;
    Ok(launch)
}

/// Watches the GPUs of a plan.
fn watch(plan: &Plan) -> NvmlWatch {
    let gpus = plan.workers.iter().filter_map(|worker| worker.gpu.as_ref()?.uuid.clone());
    let gpus: BTreeSet<_> = gpus.collect();
    NvmlWatch::new(gpus.into_iter().collect())
}

fn secret() -> Result<Secret, UpError> {
    let mut bytes = [0; LENGTH];
    getrandom::fill(&mut bytes).map_err(UpError::Secret)?;
    Ok(Secret::new(bytes))
}
