//! Notifies systemd, if it started this process, of the cluster's state.
//!
//! *Invariant:* does nothing without `NOTIFY_SOCKET`; keeps the watchdog alive only while the
//! supervisor answers.

use std::time::Duration;

use tokio::time::Interval;

use crate::cluster::Control;
use crate::os::notify::Notifier;
use crate::os::run_directory::Paths;
use crate::plan::Plan;
use crate::supervise::{ClusterPhase, ClusterState, ProcessPhase};

/// How long to wait for the supervisor's answer, if the watchdog's interval allows it.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// Time to prove a cluster that is to be verified, besides that to start it.
const VERIFIED_WITHIN: Duration = Duration::from_secs(120);

/// Asks the service manager for the time that the plan allows for the start and for the teardown
/// after a failed one.
pub(super) fn starting(plan: &Plan) {
    let Some(manager) = Notifier::from_environment() else { return };
    let policy = &plan.supervision;
    let verified = if plan.requirements.verify { VERIFIED_WITHIN } else { Duration::ZERO };
    let teardown = policy.grace.0 + ANSWER_WITHIN;
    manager.starting(policy.ready_within.0.saturating_add(teardown).saturating_add(verified));
}

/// The service manager, used once the cluster is READY.
#[derive(Default)]
pub(super) struct ServiceManager(Option<Service>);

struct Service {
    manager: Notifier,
    beats: Option<Interval>,
    control: Control,
}

impl ServiceManager {
    /// Reports READY.
    pub(super) fn stand_by(state: &ClusterState) -> Self {
        let Some(manager) = Notifier::from_environment() else { return Self(None) };
        manager.ready(&summary(state));
        let beats = manager.watchdog().map(tokio::time::interval);
        let control = Control::new(Paths::of(&state.name).control());
        Self(Some(Service { manager, beats, control }))
    }

    /// Reports a changed status.
    pub(super) fn tell(&self, state: &ClusterState) {
        let Some(Service { manager, .. }) = &self.0 else { return };
        manager.status(&summary(state));
        if state.state == ClusterPhase::Stopping {
            manager.stopping();
        }
    }

    /// Waits until the watchdog is due, and notifies it if the supervisor answers. Cancellation
    /// skips at most one notification.
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
