//! A running cluster, whoever launched it: observe, change and stop it, and wait for its end.
//!
//! *Invariant:* a handle owns nothing: dropping it changes nothing.

use std::time::{Duration, SystemTime};

use super::control::in_url;
use super::{Control, ControlError, Ended, Lines};
use cuda_cluster_machine::os::owners::{Identity, Owners};
use cuda_cluster_machine::os::run_directory::Paths;
use cuda_cluster_model::ids::ClusterName;
use cuda_cluster_model::plan::Plan;
use cuda_cluster_supervise::record::What;
use cuda_cluster_supervise::{Cause, ClusterPhase, ClusterState, Outcome, Record};

/// How often to check a cluster whose supervisor can't be asked.
const LOOK: Duration = Duration::from_millis(10);

const EVENTS: &str = "/v1/events";

/// A running cluster: one's own ([`Cluster::handle`](super::Cluster::handle)) or another one
/// ([`find`](super::find), [`clusters`](super::clusters)). It stays that of this cluster when
/// another one gets the name.
#[derive(Clone, Debug)]
pub struct Handle {
    /// Unique among the running clusters of a user, and the name of its run directory.
    pub name: ClusterName,
    /// Its files: logs, events, sockets.
    pub paths: Paths,
    /// What tells it from later clusters of its name; `None` if that was not known yet.
    supervisor: Option<Identity>,
}

impl Handle {
    /// The cluster that has this name now.
    pub(super) fn new(name: ClusterName) -> Self {
        let paths = Paths::of(&name);
        Self { supervisor: supervisor(&paths), paths, name }
    }

    /// Whether a process is the supervisor of this cluster.
    pub(super) fn is_supervised_by(&self, pid: u32) -> bool {
        self.supervisor.is_some_and(|supervisor| supervisor.pid == pid)
    }

    /// Refuses to speak to a later cluster of this name.
    ///
    /// # Errors
    /// If this one has ended, and there is a later one.
    pub(super) fn current(&self) -> Result<Control, ControlError> {
        match (self.supervisor, supervisor(&self.paths)) {
            (Some(own), Some(now)) if own != now => {
                Err(ControlError::Replaced { name: self.name.clone() })
            }
            _ => Ok(self.control()),
        }
    }

    /// A client of the control API of whichever cluster has this name.
    pub fn control(&self) -> Control {
        Control::new(self.paths.control())
    }

    /// The plan with its reasons.
    ///
    /// # Errors
    /// If the supervisor can't be reached.
    pub async fn plan(&self) -> Result<Plan, ControlError> {
        self.current()?.read("/v1/plan").await
    }

    /// The phase of the cluster and of each process, with process ids, bindings, restarts and
    /// lanes, as `ps -o json` prints them.
    ///
    /// # Errors
    /// If the supervisor can't be reached.
    pub async fn state(&self) -> Result<ClusterState, ControlError> {
        self.current()?.read("/v1/state").await
    }

    /// Phases, deaths and notes from now on, one [`Record`] each; the last one is the end.
    ///
    /// # Errors
    /// If the supervisor can't be reached.
    pub async fn events(&self) -> Result<Events, ControlError> {
        let lines = Some(self.stream().await?);
        Ok(Events { handle: self.clone(), lines, over: false })
    }

    async fn stream(&self) -> Result<Lines, ControlError> {
        self.current()?.stream(EVENTS).await
    }

    /// Restarts a worker or, given the scheduler's name, the whole cluster.
    ///
    /// # Errors
    /// If no process has that name, or the supervisor can't be reached.
    pub async fn restart(&self, process: &str) -> Result<(), ControlError> {
        self.current()?.order(&format!("/v1/restart/{}", in_url(process))).await
    }

    /// Changes the number of running workers: the first ones of the plan.
    ///
    /// # Errors
    /// If the plan has fewer, or the supervisor can't be reached.
    pub async fn scale(&self, workers: usize) -> Result<(), ControlError> {
        self.current()?.order(&format!("/v1/scale?workers={workers}")).await
    }

    /// Whether a process of the cluster is left. The lock of the run directory is free when only
    /// the supervisor is, which tells its starter of the end.
    pub(super) fn has_processes(&self) -> bool {
        let another = |own: &Identity| own.pid != std::process::id();
        self.is_running() || self.supervisor.filter(another).is_some_and(|own| own.lives())
    }

    /// Waits until nothing of the cluster is left but the files that explain its end, and tells how
    /// it ended. May be dropped at any time.
    pub async fn wait(&self) -> Outcome {
        let mut events = Events { handle: self.clone(), lines: None, over: false };
        let outcome = loop {
            // An event that this version can't read is not the end.
            if let Ok(Some(record)) = events.next().await
                && let Some(outcome) = record.outcome()
            {
                break outcome;
            }
        };
        while self.has_processes() {
            tokio::time::sleep(LOOK).await;
        }
        outcome
    }

    /// Whether this cluster still holds its run directory, rather than a later one of its name.
    pub(super) fn is_running(&self) -> bool {
        self.paths.is_alive() && self.current().is_ok()
    }

    /// The last event of an ended cluster, from the files that it has left; one that ended as it
    /// was asked to leaves none, and a later one of its name removes them.
    fn last_record(&self) -> Record {
        let ended = self.current().ok().and_then(|_| Ended::read(&self.name));
        let state = ended.and_then(|ended| ended.state);
        let (at, state, cause) = match state {
            Some(state) => (state.ended_at, state.state, state.cause),
            None => (None, ClusterPhase::Stopped, None::<Cause>),
        };
        let now = || humantime::format_rfc3339_millis(SystemTime::now()).to_string();
        Record { at: at.unwrap_or_else(now), process: None, what: What::Cluster { state, cause } }
    }
}

/// The supervisor of the cluster that has these paths now.
fn supervisor(paths: &Paths) -> Option<Identity> {
    Owners::read(&paths.owners())?.supervisor
}

/// The stream of a running cluster's events.
#[derive(Debug)]
pub struct Events {
    handle: Handle,
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
                if let Ok(lines) = self.handle.stream().await {
                    self.lines = Some(lines);
                } else if self.handle.is_running() {
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
