//! Tells systemd, where it started this process, how the cluster stands.
//!
//! *Invariant:* without `NOTIFY_SOCKET` nothing happens; the watchdog hears of this process only
//! while the supervisor answers.

use std::time::Duration;

use tokio::time::Interval;

use crate::cluster::Control;
use crate::os::notify::Notifier;
use crate::os::run_directory::Paths;
use crate::supervise::{ClusterPhase, ClusterState, ProcessPhase};

/// Longest wait for the supervisor's answer, when its interval leaves as much.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// The service manager, from READY on.
#[derive(Default)]
pub(super) struct ServiceManager(Option<Service>);

struct Service {
    manager: Notifier,
    beats: Option<Interval>,
    control: Control,
}

impl ServiceManager {
    /// Says READY.
    pub(super) fn stand_by(state: &ClusterState) -> Self {
        let Some(manager) = Notifier::from_environment() else { return Self(None) };
        manager.ready(&summary(state));
        let beats = manager.watchdog().map(tokio::time::interval);
        let control = Control::new(Paths::of(&state.name).control());
        Self(Some(Service { manager, beats, control }))
    }

    /// Says what has changed.
    pub(super) fn tell(&self, state: &ClusterState) {
        let Some(Service { manager, .. }) = &self.0 else { return };
        manager.status(&summary(state));
        if state.state == ClusterPhase::Stopping {
            manager.stopping();
        }
    }

    /// Waits for the time to say that the cluster is looked after, and says so if it is. Dropping
    /// the future skips one time at most.
    pub(super) async fn beat(&mut self) {
        let Some(Service { manager, beats: Some(beats), control }) = &mut self.0 else {
            return std::future::pending().await;
        };
        beats.tick().await;
        let within = ANSWER_WITHIN.min(beats.period());
        let asked = tokio::time::timeout(within, control.read::<ClusterState>("/v1/state"));
        if matches!(asked.await, Ok(Ok(_))) {
            manager.alive();
        }
    }
}

fn summary(state: &ClusterState) -> String {
    let ready = state.workers.iter().filter(|worker| worker.state == ProcessPhase::Ready).count();
    format!("{}: {ready} of {} workers READY", state.name, state.workers.len())
}
