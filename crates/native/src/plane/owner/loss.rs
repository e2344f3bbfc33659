//! What follows when a peer or the connection to it is lost, and when it is tried again.
//!
//! Does not decide that; [`Core`](super::Core) does.
//!
//! *Invariant:* whatever was asked of a lost peer is answered.

use std::time::{Duration, Instant};

use super::{Event, Owner};
use crate::plane::commands::Report;
use crate::plane::transfer::TransferError;
use cuda_cluster_data::ucx::EndpointFailure;
use cuda_cluster_wire::peer::Member;

/// Time before a broken connection to a living peer is tried again.
pub(super) const RETRY_AFTER: Duration = Duration::from_millis(500);

impl Owner {
    pub(super) fn lost(&mut self, EndpointFailure { endpoint, status }: EndpointFailure) {
        let key = self.peers_of_endpoints.get(&endpoint);
        let Some(link) = key.and_then(|key| self.links.get(key)) else { return };
        let member = link.member.clone();
        let cause = status.to_string();
        self.drop_work_with(&member, &cause);
        let _ = self.reports.send(Report::PeerFailed { member: member.clone(), cause });
        self.handle(Event::Broken(member));
    }

    /// Answers every request to a peer that is gone.
    pub(super) fn drop_work_with(&mut self, peer: &Member, cause: &str) {
        self.drop_early(peer, cause);
        self.drop_early_measurements(peer, cause);
        self.drop_exchanges_with(peer, cause);
    }

    /// Answers every request that was sent to a peer whose answer may be lost.
    pub(super) fn drop_exchanges_with(&mut self, peer: &Member, cause: &str) {
        self.transfers.lost(peer, cause);
        for ended in self.measurements.lost(peer, cause) {
            self.report(ended);
        }
        self.unpin_when_idle();
        for (_, (_, reply)) in self.echoes.extract_if(|_, (other, _)| *other == peer.key()) {
            let error =
                TransferError::PeerLost { peer: peer.name.clone(), cause: cause.to_owned() };
            let _ = reply.send(Err(error));
        }
    }

    pub(super) fn time_to_retry(&self) -> Option<Duration> {
        let next = self.retries.iter().map(|(at, _)| *at).min()?;
        Some(next.saturating_duration_since(Instant::now()))
    }

    pub(super) fn retry(&mut self) {
        if self.retries.is_empty() {
            return;
        }
        let now = Instant::now();
        for (_, member) in self.retries.extract_if(.., |(at, _)| *at <= now).collect::<Vec<_>>() {
            self.handle(Event::Retry(member));
        }
    }
}
