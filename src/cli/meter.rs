//! Asks a cluster's workers to measure, as its engine does: through the native scheduler, or each
//! of Dask's workers by itself.
//!
//! *Invariant:* a measurement that fails has a result that says why.

use std::time::Duration;

use super::failure::{Exit, Failure};
use crate::cluster::Control;
use crate::cluster::dask;
use crate::native;
use crate::os::run_directory::Paths;
use crate::plan::{EnginePlan, Plan};
use crate::supervise::{ClusterState, ProcessPhase};
use crate::wire::links::Measured;
use crate::wire::links::trials::{self, Measures};
use crate::wire::native::Measurement;

/// Latencies of Dask are those of its Python: fewer show them.
const DASK_PINGS: u32 = 200;

/// A connection to a cluster's workers.
pub(super) enum Meter {
    Native(native::client::Client),
    Dask(dask::Client, Control),
}

impl Meter {
    /// Connects to the workers of the cluster with this run directory and plan.
    pub(super) async fn connect(root: &std::path::Path, plan: &Plan) -> Result<Self, Failure> {
        match plan.engine {
            EnginePlan::Dask(_) => {
                let control = Control::new(Paths::at(root).control());
                Ok(Self::Dask(dask::Client::new(root), control))
            }
            _ => Ok(Self::Native(native::client::Client::connect(root).await.map_err(unmeasured)?)),
        }
    }

    /// A ping-pong as this engine measures it.
    pub(super) fn ping(&self, ping: Measurement) -> Measurement {
        match self {
            Self::Native(_) => ping,
            Self::Dask(..) => {
                Measurement { rounds: DASK_PINGS, warmup: DASK_PINGS / 10, cpus: None, ..ping }
            }
        }
    }

    /// Why a worker can't measure the memory of the GPU that it has; `None` if it can.
    pub(super) async fn without_device_memory(&self, worker: &str) -> Option<String> {
        match self {
            Self::Native(_) => None,
            Self::Dask(client, _) => client.without_device_memory(worker).await,
        }
    }
}

impl Measures for Meter {
    type Error = Failure;

    async fn measure(
        &mut self,
        all: &[Measurement],
        within: Duration,
    ) -> Result<Vec<Measured>, Failure> {
        match self {
            Self::Native(client) => client.measure(all, within).await.map_err(unmeasured),
            Self::Dask(client, control) => {
                let state = control.read::<ClusterState>("/v1/state").await;
                let state = state.map_err(|error| Failure::new(Exit::Failed, error))?;
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
                results.extend(measured.map_err(|_| silent(all, within))?);
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

fn silent(all: &[Measurement], within: Duration) -> Failure {
    let ways = trials::named(all);
    let error = anyhow::anyhow!("no result for {ways} within {within:.0?}");
    Failure::new(Exit::Failed, error).hint(trials::SILENT_HINT)
}

fn unmeasured(error: native::Error) -> Failure {
    let hint = error.hint();
    Failure::new(Exit::Failed, error).maybe_hint(hint)
}
