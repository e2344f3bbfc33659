//! Asks an engine's scheduler and workers what their tasks wait for.
//!
//! Changes nothing, and judges nothing.
//!
//! *Invariant:* the answer is there within [`PATIENCE`], whatever hangs; who has not answered by
//! then, or could not be asked, is named.

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use cuda_cluster_model::ids::SCHEDULER;
use cuda_cluster_model::plan::EngineKind;
use cuda_cluster_supervise::ClusterState;
use cuda_cluster_why::evidence::{Evidence, State, Tasks, Unseen};

mod dask;
#[cfg(feature = "native")]
mod native;

/// How long they may take to answer, together.
const PATIENCE: Duration = Duration::from_secs(2);

/// Whom to ask.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Engine {
    kind: EngineKind,
    run_directory: PathBuf,
    /// Of Dask's workers.
    names: dask::Names,
}

/// An answer: what is added to what is known, or what is not seen, and why.
type Answer = Box<dyn FnOnce(&mut Tasks) + Send>;

/// Who has answered, and what.
type Told = (String, Result<Answer, String>);

impl Engine {
    /// The engine of a cluster, if it has tasks and its scheduler is here.
    pub(crate) fn of(state: &ClusterState) -> Option<Self> {
        let here = state.engine != EngineKind::Command && state.scheduler.is_some();
        here.then(|| Self {
            kind: state.engine,
            run_directory: state.run_directory.clone(),
            names: dask::Names::of(state),
        })
    }

    /// Adds to what was seen of its processes what they say of their tasks.
    pub(crate) fn ask(self, evidence: &mut Evidence) {
        let until = Instant::now() + PATIENCE;
        let (sender, told) = channel();
        let able = |name: &String| answers(evidence, name);
        let names = evidence.ranks.iter().map(|rank| rank.name.clone());
        let (mut asked, silent): (Vec<String>, Vec<String>) = names.partition(able);
        // Who is asked only after others have answered, until then.
        let not_yet: Box<dyn Fn(&str) -> bool> = match self.kind {
            EngineKind::Dask => {
                dask::ask(self.run_directory, asked.clone(), self.names, sender);
                Box::new(|_| false)
            }
            #[cfg(feature = "native")]
            EngineKind::Native => Box::new(native::ask(self.run_directory, asked.clone(), sender)),
            _ => return,
        };
        let mut tasks = None;
        let mut additions = Vec::new();
        let mut failed = Vec::new();
        while let Some((name, answer)) = next(&told, until, &mut asked) {
            match answer {
                Ok(add) if name == SCHEDULER => add(tasks.get_or_insert_default()),
                Ok(add) => additions.push(add),
                Err(error) => failed.push((name, error)),
            }
        }
        let no_answer = format!("no answer within {} s", PATIENCE.as_secs());
        let scheduler = match tasks {
            Some(_) => "others were asked first, and took all the time".to_owned(),
            None if silent.iter().any(|name| name == SCHEDULER) => through("does not run now"),
            None if asked.iter().any(|name| name == SCHEDULER) => {
                through(&format!("has given {no_answer}"))
            }
            None => through("has given no answer"),
        };
        let silent = silent.into_iter().map(|name| (name, "it does not run now".to_owned()));
        let silent = silent.map(|(name, why)| (name, format!("{why}, so it was not asked")));
        let asked = asked.into_iter().map(|name| match not_yet(&name) {
            true => (name, scheduler.clone()),
            false => (name, no_answer.clone()),
        });
        evidence.unseen.extend(silent.chain(failed).chain(asked).map(|(name, why)| {
            let what = match self.kind {
                EngineKind::Dask if name != SCHEDULER => format!("what {name} fetches"),
                _ => format!("tasks of {name}"),
            };
            Unseen { what, why }
        }));
        if let Some(tasks) = &mut tasks {
            additions.into_iter().for_each(|add| add(tasks));
        }
        evidence.tasks = tasks;
    }
}

/// Why a worker could not be asked.
fn through(why: &str) -> String {
    format!("it could not be asked: workers are asked through the scheduler, which {why}")
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
