//! Asks an engine's scheduler, and the native engine's workers, what their tasks wait for.
//!
//! Changes nothing, and judges nothing.
//!
//! *Invariant:* the answer is there within [`PATIENCE`], whatever hangs; who has not answered by
//! then is named.

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::dask::{Client as Dask, OfWorker, Queued};
use cuda_cluster_machine::os::event_loop;
use cuda_cluster_model::ids::SCHEDULER;
use cuda_cluster_model::plan::EngineKind;
use cuda_cluster_supervise::ClusterState;
use cuda_cluster_why::evidence::{Evidence, Paused, Placed, State, Tasks, Unseen};

#[cfg(feature = "native")]
mod native;

/// How long they may take to answer, together.
const PATIENCE: Duration = Duration::from_secs(2);

/// Whom to ask.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Engine {
    kind: EngineKind,
    run_directory: PathBuf,
}

/// An answer: what is added to what is known, or what is not seen, and why.
type Answer = Box<dyn FnOnce(&mut Tasks) + Send>;

/// Who has answered, and what.
type Told = (String, Result<Answer, String>);

impl Engine {
    /// The engine of a cluster, if it has tasks and its scheduler is here.
    pub(crate) fn of(state: &ClusterState) -> Option<Self> {
        let here = state.engine != EngineKind::Command && state.scheduler.is_some();
        here.then(|| Self { kind: state.engine, run_directory: state.run_directory.clone() })
    }

    /// Adds to what was seen of its processes what they say of their tasks.
    pub(crate) fn ask(self, evidence: &mut Evidence) {
        let until = Instant::now() + PATIENCE;
        let (sender, told) = channel();
        let able = |name: &String| answers(evidence, name);
        let names = evidence.ranks.iter().map(|rank| rank.name.clone());
        let (mut asked, silent): (Vec<String>, Vec<String>) = names.partition(able);
        let pids = evidence.ranks.iter().filter_map(|rank| Some((rank.pid?, rank.name.clone())));
        match self.kind {
            EngineKind::Dask => {
                asked.retain(|name| name == SCHEDULER);
                let (pids, directory) = (pids.collect(), self.run_directory);
                if !asked.is_empty() {
                    spawn(move || drop(sender.send((SCHEDULER.to_owned(), dask(directory, pids)))));
                }
            }
            #[cfg(feature = "native")]
            EngineKind::Native => native::ask(self.run_directory, asked.clone(), sender),
            _ => return,
        }
        let mut why = |name: String, why: String| {
            evidence.unseen.push(Unseen { what: format!("tasks of {name}"), why });
        };
        let needed = |name: &String| self.kind != EngineKind::Dask || name == SCHEDULER;
        for name in silent.into_iter().filter(needed) {
            why(name, "it does not run now, so it was not asked".to_owned());
        }
        let mut tasks = None;
        let mut additions = Vec::new();
        while let Some((name, answer)) = next(&told, until, &mut asked) {
            match answer {
                Ok(add) if name == SCHEDULER => add(tasks.get_or_insert_default()),
                Ok(add) => additions.push(add),
                Err(error) => why(name, error),
            }
        }
        for name in asked {
            why(name, format!("no answer within {} s", PATIENCE.as_secs()));
        }
        if let Some(tasks) = &mut tasks {
            additions.into_iter().for_each(|add| add(tasks));
        }
        evidence.tasks = tasks;
    }
}

/// Whether a process may answer: it is there, and nothing holds it.
fn answers(evidence: &Evidence, rank: &str) -> bool {
    let pid = evidence.ranks.iter().find(|one| one.name == rank).and_then(|one| one.pid);
    let process = pid.and_then(|pid| evidence.process(pid));
    process.is_some_and(|process| {
        let frozen = process.group.as_ref().and_then(|group| group.frozen) == Some(true);
        !frozen && !matches!(process.state, State::Stopped | State::Traced | State::Zombie)
    })
}

/// The next answer, while there is time and somebody has not answered.
fn next(told: &Receiver<Told>, until: Instant, asked: &mut Vec<String>) -> Option<Told> {
    if asked.is_empty() {
        return None;
    }
    let told = told.recv_timeout(until.saturating_duration_since(Instant::now())).ok()?;
    asked.retain(|name| *name != told.0);
    Some(told)
}

/// Does something on a thread that is left behind if it hangs.
fn spawn(what: impl FnOnce() + Send + 'static) {
    // Without a thread there is no answer, which is said.
    drop(std::thread::Builder::new().name("asks".to_owned()).spawn(what));
}

/// Asks Dask's scheduler. `pids` has the processes of this cluster with their names.
fn dask(directory: PathBuf, pids: Vec<(u32, String)>) -> Result<Answer, String> {
    let runtime = event_loop::start(&mut tokio::runtime::Builder::new_current_thread());
    let runtime = runtime.map_err(|error| format!("there is no event loop: {error}"))?;
    let asked = async { tokio::time::timeout(PATIENCE, Dask::new(&directory).queued()).await };
    let silent = |_| format!("no answer within {} s", PATIENCE.as_secs());
    let told = runtime.block_on(asked).map_err(silent)??;
    Ok(Box::new(move |tasks| *tasks = of_dask(told, &pids)))
}

fn of_dask(told: Queued, pids: &[(u32, String)]) -> Tasks {
    let known = |pid: Option<u32>| {
        let known = pids.iter().find(|(known, _)| Some(*known) == pid);
        known.map(|(_, name)| name.clone())
    };
    let Queued { waiting, ready, unplaced, held, placed, paused } = told;
    let placed = placed
        .into_iter()
        .map(|OfWorker { pid, said }| Placed { rank: known(pid).unwrap_or(said.rank), ..said });
    let paused = paused
        .into_iter()
        .map(|OfWorker { pid, said }| Paused { rank: known(pid).unwrap_or(said.rank), ..said });
    Tasks {
        waiting,
        ready,
        unplaced,
        held,
        placed: placed.collect(),
        fetches: Vec::new(),
        paused: paused.collect(),
    }
}
