//! Asks a cluster's workers to measure, as its engine does: through the native scheduler, or each
//! of Dask's workers by itself.
//!
//! *Invariant:* a measurement that fails has a result that says why.

use std::path::Path;
use std::time::Duration;

use super::MeasureError;
use crate::{Control, dask};
use cuda_cluster_machine::os::run_directory::Paths;
use cuda_cluster_model::plan::{EngineKind, EnginePlan, Plan};
use cuda_cluster_supervise::{ClusterState, ProcessPhase};
use cuda_cluster_wire::links::Measured;
use cuda_cluster_wire::links::trials::{self, Measures};
use cuda_cluster_wire::native::Measurement;

/// Latencies of Dask are those of its Python: fewer show them.
const DASK_PINGS: u32 = 200;

/// A connection to a cluster's workers.
pub(super) enum Meter {
    #[cfg(feature = "native")]
    Native(cuda_cluster_native::client::Client),
    Dask(dask::Client, Control),
}

impl Meter {
    /// Whether this program can ask this engine's workers.
    pub(super) fn is_there_for(engine: EngineKind) -> bool {
        match engine {
            EngineKind::Native => cfg!(feature = "native"),
            EngineKind::Dask => true,
            EngineKind::Command => false,
        }
    }

    /// Connects to the workers of the cluster with this run directory and plan.
    pub(super) async fn connect(root: &Path, plan: &Plan) -> Result<Self, MeasureError> {
        match plan.engine {
            EnginePlan::Dask(_) => {
                let control = Control::new(Paths::at(root).control());
                Ok(Self::Dask(dask::Client::new(root), control))
            }
            #[cfg(feature = "native")]
            EnginePlan::Native(_) => {
                Ok(Self::Native(cuda_cluster_native::client::Client::connect(root).await?))
            }
            _ => Err(MeasureError::Engine { name: plan.name.clone(), engine: plan.engine.kind() }),
        }
    }

    /// A ping-pong as this engine measures it.
    pub(super) fn ping(&self, ping: Measurement) -> Measurement {
        match self {
            #[cfg(feature = "native")]
            Self::Native(_) => ping,
            Self::Dask(..) => {
                Measurement { rounds: DASK_PINGS, warmup: DASK_PINGS / 10, cpus: None, ..ping }
            }
        }
    }

    /// Why a worker can't measure the memory of the GPU that it has; `None` if it can.
    pub(super) async fn without_device_memory(&self, worker: &str) -> Option<String> {
        match self {
            #[cfg(feature = "native")]
            Self::Native(_) => None,
            Self::Dask(client, _) => client.without_device_memory(worker).await,
        }
    }
}

impl Measures for Meter {
    type Error = MeasureError;

    async fn measure(
        &mut self,
        all: &[Measurement],
        within: Duration,
    ) -> Result<Vec<Measured>, MeasureError> {
        match self {
            #[cfg(feature = "native")]
            Self::Native(client) => Ok(client.measure(all, within).await?),
            Self::Dask(client, control) => {
                let state = control.read::<ClusterState>("/v1/state").await?;
                let (mut asked, mut results) = (Vec::new(), Vec::new());
                for measurement in all {
                    let Measurement { from, to, .. } = measurement;
                    // Workers that were started again have other addresses.
                    match address(&state, to).and_then(|_| address(&state, from)) {
                        Ok(address) => asked.push((measurement.clone(), address)),
                        Err(why) => results.push(Measured {
                            from: from.clone(),
                            to: to.clone(),
                            result: Err(why),
                            cause: None,
                        }),
                    }
                }
                let measured = tokio::time::timeout(within, client.measure(asked)).await;
                let silent = |_| MeasureError::Silent { ways: trials::named(all), within };
                results.extend(measured.map_err(silent)?);
                Ok(results)
            }
        }
    }
}

/// The address of a worker that was READY and runs, or why there is none.
fn address(state: &ClusterState, name: &str) -> Result<String, String> {
    let worker = state.workers.iter().find(|worker| worker.name == name);
    let worker = worker.ok_or_else(|| format!("{name} is not there"))?;
    // One that does not answer may go on: until then, whoever measures looks at that.
    let runs = matches!(worker.state, ProcessPhase::Ready | ProcessPhase::Unresponsive);
    let ready = worker.address.clone().filter(|_| runs);
    ready.ok_or_else(|| format!("{name} is {}", worker.standing()))
}
