//! A running cluster, whoever launched it: observe, change and stop it, and wait for its end.
//!
//! *Invariant:* a handle owns nothing: dropping it changes nothing.

use std::fs;
use std::time::{Duration, SystemTime};

use super::{Control, ControlError, Ended, Lines};
use crate::ids::ClusterName;
use crate::os::run_directory::Paths;
use crate::plan::Plan;
use crate::supervise::record::What;
use crate::supervise::{Cause, ClusterPhase, ClusterState, Outcome, Record};

/// How often to check a cluster whose supervisor can't be asked.
const LOOK: Duration = Duration::from_millis(10);

const EVENTS: &str = "/v1/events";

/// A running cluster: one's own ([`Cluster::handle`](super::Cluster::handle)) or another one
/// ([`find`](super::find), [`clusters`](super::clusters)). Clones are equal.
#[derive(Clone, Debug)]
pub struct Handle {
    /// Unique among the running clusters of a user, and the name of its run directory.
    pub name: ClusterName,
    /// Its files: logs, events, sockets.
    pub paths: Paths,
}

impl Handle {
    pub(super) fn new(name: ClusterName) -> Self {
        Self { paths: Paths::of(&name), name }
    }

    /// A client of its control API.
    pub fn control(&self) -> Control {
        Control::new(self.paths.control())
    }

    /// The plan with its reasons.
    ///
    /// # Errors
    /// If the supervisor can't be reached.
    pub async fn plan(&self) -> Result<Plan, ControlError> {
        self.control().read("/v1/plan").await
    }

    /// The phase of the cluster and of each process, with process ids, bindings, restarts and
    /// lanes, as `ps -o json` prints them.
    ///
    /// # Errors
    /// If the supervisor can't be reached.
    pub async fn state(&self) -> Result<ClusterState, ControlError> {
        self.control().read("/v1/state").await
    }

    /// Phases, deaths and notes from now on, one [`Record`] each; the last one is the end.
    ///
    /// # Errors
    /// If the supervisor can't be reached.
    pub async fn events(&self) -> Result<Events, ControlError> {
        let lines = self.control().stream(EVENTS).await?;
        let owners = fs::read(self.paths.owners()).ok();
        Ok(Events { handle: self.clone(), owners, lines: Some(lines), over: false })
    }

    /// Restarts a worker or, given the scheduler's name, the whole cluster.
    ///
    /// # Errors
    /// If no process has that name, or the supervisor can't be reached.
    pub async fn restart(&self, process: &str) -> Result<(), ControlError> {
        self.control().order(&format!("/v1/restart/{process}")).await
    }

    /// Changes the number of running workers: the first ones of the plan.
    ///
    /// # Errors
    /// If the plan has fewer, or the supervisor can't be reached.
    pub async fn scale(&self, workers: usize) -> Result<(), ControlError> {
        self.control().order(&format!("/v1/scale?workers={workers}")).await
    }

    /// Waits until nothing of the cluster is left but the files that explain its end, and tells how
    /// it ended. May be dropped at any time.
    pub async fn wait(&self) -> Outcome {
        let owners = fs::read(self.paths.owners()).ok();
        let mut events =
            Events { handle: self.clone(), owners: owners.clone(), lines: None, over: false };
        let outcome = loop {
            // An event that this version can't read is not the end.
            if let Ok(Some(record)) = events.next().await
                && let Some(outcome) = record.outcome()
            {
                break outcome;
            }
        };
        while self.is_run_by(owners.as_deref()) {
            tokio::time::sleep(LOOK).await;
        }
        outcome
    }

    /// Whether this cluster still holds its run directory, rather than a later one of its name.
    fn is_run_by(&self, owners: Option<&[u8]>) -> bool {
        self.paths.is_alive() && fs::read(self.paths.owners()).ok().as_deref() == owners
    }

    /// The last event of an ended cluster, from the files that it has left; one that ended as it
    /// was asked to leaves none.
    fn last_record(&self) -> Record {
        let state = Ended::read(&self.name).and_then(|ended| ended.state);
        let (at, state, cause) = match state {
            Some(state) => (state.ended_at, state.state, state.cause),
            None => (None, ClusterPhase::Stopped, None::<Cause>),
        };
        let now = || humantime::format_rfc3339_millis(SystemTime::now()).to_string();
        Record { at: at.unwrap_or_else(now), process: None, what: What::Cluster { state, cause } }
    }
}

/// The stream of a running cluster's events.
#[derive(Debug)]
pub struct Events {
    handle: Handle,
    /// The content of `owners.json`, which tells the cluster from later ones of its name.
    owners: Option<Vec<u8>>,
    lines: Option<Lines>,
    over: bool,
}

impl Events {
    /// The next event; `None` after the last one, which is the cluster's end with its cause
    /// ([`Record::outcome`]), even if the supervisor was killed. May be dropped at any time.
    ///
    /// # Errors
    /// If the supervisor is of an incompatible version.
    pub async fn next(&mut self) -> Result<Option<Record>, ControlError> {
        while !self.over {
            let Some(lines) = &mut self.lines else {
                if let Ok(lines) = self.handle.control().stream(EVENTS).await {
                    self.lines = Some(lines);
                } else if self.handle.is_run_by(self.owners.as_deref()) {
                    tokio::time::sleep(LOOK).await;
                } else {
                    self.over = true;
                    return Ok(Some(self.handle.last_record()));
                }
                continue;
            };
            match lines.next_event().await {
                Ok(Some(text)) => {
                    let record: Record = serde_json::from_str(&text)
                        .map_err(|error| ControlError::answer(EVENTS, &error))?;
                    self.over = record.is_last();
                    return Ok(Some(record));
                }
                // The supervisor has ended, or has dropped a reader that was too slow.
                Ok(None) | Err(_) => self.lines = None,
            }
        }
        Ok(None)
    }
}
