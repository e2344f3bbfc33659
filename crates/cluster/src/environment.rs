//! The environment that a client of a running cluster needs.
//!
//! *Invariant:* a client with these variables connects to this cluster, or to none.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::{ControlError, Handle};
use crate::dask;
use cuda_cluster_model::ids::ClusterName;
use cuda_cluster_model::plan::{DaskPlan, EnginePlan, Plan};
use cuda_cluster_supervise::{ClusterState, ProcessPhase, RUN_DIRECTORY_VARIABLE};

/// The variable for the key `scheduler-address`, to which `distributed.Client()` connects.
const DASK_SCHEDULER: &str = "DASK_SCHEDULER_ADDRESS";

/// Why the environment is unknown.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum EnvironmentError {
    /// Its supervisor does not answer.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// There is currently no scheduler to connect to.
    #[error("the scheduler of {cluster} is {phase}, so clients cannot reach it now")]
    NotReady {
        cluster: ClusterName,
        /// The scheduler's phase.
        phase: ProcessPhase,
    },
    /// A file with a part of the answer is missing or malformed.
    #[error("cannot read {}", path.display())]
    File {
        path: PathBuf,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl EnvironmentError {
    /// A hint for the user of the cluster with this name.
    pub fn hint(&self, name: &ClusterName) -> Option<String> {
        match self {
            Self::NotReady { .. } => Some(format!("see when it is READY: cuda-cluster ps {name}")),
            Self::File { .. } | Self::Control(_) => None,
        }
    }
}

/// The variables that a client needs: for transport, security, and the scheduler's address.
///
/// # Errors
/// If the cluster cannot be asked, or cannot be reached by clients now.
pub async fn client_environment(
    found: &Handle,
) -> Result<BTreeMap<String, String>, EnvironmentError> {
    let plan: Plan = found.control().read("/v1/plan").await?;
    let mut env = match &plan.engine {
        EnginePlan::Dask(dask) => {
            let path = dask::client_file(&found.paths);
            let mut env: BTreeMap<String, String> = json(path)?;
            env.insert(DASK_SCHEDULER.to_owned(), scheduler(found, dask).await?);
            env
        }
        EnginePlan::Native(_) | EnginePlan::Command(_) => plan.client_env,
    };
    let directory = found.paths.root().display().to_string();
    env.insert(RUN_DIRECTORY_VARIABLE.to_owned(), directory);
    Ok(env)
}

/// The address of the cluster's own scheduler, or of the one that it joined.
async fn scheduler(found: &Handle, dask: &DaskPlan) -> Result<String, EnvironmentError> {
    let state: ClusterState = found.control().read("/v1/state").await?;
    if let Some(scheduler) = state.scheduler {
        let phase = scheduler.state;
        let address = scheduler.address.filter(|_| phase == ProcessPhase::Ready);
        let cluster = || found.name.clone();
        return address.ok_or_else(|| EnvironmentError::NotReady { cluster: cluster(), phase });
    }
    let joined = dask.join.clone().unwrap_or_default();
    if joined.contains("://") {
        return Ok(joined);
    }
    #[derive(serde::Deserialize)]
    struct SchedulerFile {
        address: String,
    }
    json(PathBuf::from(joined)).map(|file: SchedulerFile| file.address)
}

fn json<T: serde::de::DeserializeOwned>(path: PathBuf) -> Result<T, EnvironmentError> {
    let text = std::fs::read(&path).map_err(|source| file_error(path.clone(), source))?;
    serde_json::from_slice(&text).map_err(|source| file_error(path, source))
}

fn file_error(
    path: PathBuf,
    source: impl std::error::Error + Send + Sync + 'static,
) -> EnvironmentError {
    EnvironmentError::File { path, source: Box::new(source) }
}
