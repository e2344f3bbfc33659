//! Tells systemd, where it started this process, how the cluster stands.
//!
//! *Invariant:* without `NOTIFY_SOCKET` nothing happens.

use tokio::sync::watch;
use tokio::time::Interval;

use crate::os::notify::Notifier;
use crate::supervise::{ClusterPhase, ClusterState, ProcessPhase};

/// Says READY, and from then on what changes and that this process is alive, in a task of its own.
pub(super) fn stand_by(state: watch::Receiver<ClusterState>) {
    if let Some(manager) = Notifier::from_environment() {
        manager.ready(&summary(&state.borrow()));
        tokio::spawn(tell(manager, state));
    }
}

async fn tell(manager: Notifier, mut state: watch::Receiver<ClusterState>) {
    let mut beats = manager.watchdog().map(tokio::time::interval);
    loop {
        tokio::select! {
            changed = state.changed() => {
                if changed.is_err() {
                    return;
                }
                let now = state.borrow_and_update().clone();
                manager.status(&summary(&now));
                if now.state == ClusterPhase::Stopping {
                    manager.stopping();
                }
            }
            () = next(&mut beats) => manager.alive(),
        }
    }
}

async fn next(beats: &mut Option<Interval>) {
    match beats {
        Some(beats) => {
            beats.tick().await;
        }
        None => std::future::pending().await,
    }
}

fn summary(state: &ClusterState) -> String {
    let ready = state.workers.iter().filter(|worker| worker.state == ProcessPhase::Ready).count();
    format!("{}: {ready} of {} workers READY", state.name, state.workers.len())
}
