//! Dask's scheduler and workers: what is placed where, what is fetched.
//!
//! *Invariant:* a task is said to run only if a heartbeat of its worker has said so.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::mpsc::Sender;

use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;

use super::{Answer, PATIENCE, Told, spawn};
use crate::dask::{Client, Fetching, OfWorker, Queued};
use cuda_cluster_machine::os::event_loop;
use cuda_cluster_model::ids::SCHEDULER;
use cuda_cluster_supervise::ClusterState;
use cuda_cluster_why::evidence::{Fetch, Paused, Placed, Tasks};

/// The names of a scheduler's workers, by what it and its workers call them.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Names {
    /// Of this cluster's, by their processes.
    processes: BTreeMap<u32, String>,
    /// Also of other machines', by their addresses.
    addresses: BTreeMap<String, String>,
}

impl Names {
    pub(super) fn of(state: &ClusterState) -> Self {
        let processes = state.workers.iter().filter_map(|one| Some((one.pid?, one.name.clone())));
        let here = state.workers.iter();
        let here = here.filter_map(|one| Some((one.address.clone()?, one.name.clone())));
        let joined = state.joined.iter().map(|one| &one.worker);
        let joined = joined.map(|one| (one.address.clone(), one.name.clone()));
        Self { processes: processes.collect(), addresses: joined.chain(here).collect() }
    }

    fn of_process(&self, pid: Option<u32>) -> Option<String> {
        self.processes.get(&pid?).cloned()
    }
}

/// Asks these processes side by side; the answers go to `told`.
pub(super) fn ask(directory: PathBuf, asked: Vec<String>, names: Names, told: Sender<Told>) {
    spawn(move || {
        let client = Client::new(&directory);
        let runtime = event_loop::start(&mut tokio::runtime::Builder::new_current_thread());
        let runtime = match runtime {
            Ok(runtime) => runtime,
            Err(error) => {
                for name in asked {
                    let _ = told.send((name, Err(format!("there is no event loop: {error}"))));
                }
                return;
            }
        };
        let all = async {
            let mut asking = JoinSet::new();
            for name in asked {
                let (client, names, told) = (client.clone(), names.clone(), told.clone());
                asking.spawn(async move {
                    let answer = match name == SCHEDULER {
                        true => client.queued().await.map(|it| placing(it, names)),
                        false => {
                            let fetching = client.fetching(&name).await;
                            fetching.map(|it| fetches(name.clone(), it, names))
                        }
                    };
                    let _ = told.send((name, answer));
                });
            }
            while asking.join_next().await.is_some() {}
        };
        // Who has not answered by then is not listened to.
        let _ = runtime.block_on(async { tokio::time::timeout(PATIENCE, all).await });
    });
}

/// What the scheduler says.
fn placing(told: Queued, names: Names) -> Answer {
    let Queued { waiting, ready, unplaced, held, placed, paused } = told;
    Box::new(move |tasks| {
        let named = |pid, rank| names.of_process(pid).unwrap_or(rank);
        let placed = placed
            .into_iter()
            .map(|OfWorker { pid, said }| Placed { rank: named(pid, said.rank), ..said });
        let paused = paused
            .into_iter()
            .map(|OfWorker { pid, said }| Paused { rank: named(pid, said.rank), ..said });
        let (placed, paused) = (placed.collect(), paused.collect());
        *tasks = Tasks { waiting, ready, unplaced, held, placed, paused, ..Tasks::default() };
    })
}

/// What a worker says.
fn fetches(worker: String, fetching: Vec<Fetching>, names: Names) -> Answer {
    Box::new(move |tasks| {
        tasks.fetches.extend(fetching.into_iter().map(|one| {
            let Fetching { name, others, source, bytes, millis, tasks } = one;
            let name = match others {
                0 => name,
                1 => format!("{name} and 1 other result"),
                others => format!("{name} and {others} other results"),
            };
            Fetch {
                name,
                rank: worker.clone(),
                from: names.addresses.get(&source).cloned().unwrap_or(source),
                for_ms: millis,
                tasks,
                bytes: Some(bytes),
            }
        }));
    })
}
