//! Passes measurements from clients to workers, and results back.
//!
//! Pure. Does not know what is measured.
//!
//! *Invariant:* a client gets one result for each of its measurements, even if the worker goes
//! away.

use std::collections::BTreeMap;

use crate::connection::ConnectionId;
use cuda_cluster_wire::native::{Samples, ToClient};

struct Pending {
    client: ConnectionId,
    worker: ConnectionId,
    from: String,
    to: String,
}

/// The measurements that have no result yet.
#[derive(Default)]
pub(super) struct Relay {
    next: u64,
    pending: BTreeMap<u64, Pending>,
}

impl Relay {
    /// Records a measurement; returns its number for the worker.
    pub(super) fn begin(
        &mut self,
        client: ConnectionId,
        worker: ConnectionId,
        from: String,
        to: String,
    ) -> u64 {
        self.next += 1;
        self.pending.insert(self.next, Pending { client, worker, from, to });
        self.next
    }

    /// Handles a worker's result; returns the message and its receiver.
    pub(super) fn measured(
        &mut self,
        worker: ConnectionId,
        id: u64,
        result: Result<Samples, String>,
    ) -> Option<(ConnectionId, ToClient)> {
        if self.pending.get(&id)?.worker != worker {
            return None;
        }
        let Pending { client, from, to, .. } = self.pending.remove(&id)?;
        Some((client, ToClient::Measured { from, to, result }))
    }

    /// Forgets a connection; returns the messages to send if it was a worker's.
    pub(super) fn gone(&mut self, connection: ConnectionId) -> Vec<(ConnectionId, ToClient)> {
        self.pending.retain(|_, pending| pending.client != connection);
        let (lost, kept) = std::mem::take(&mut self.pending)
            .into_iter()
            .partition(|(_, pending)| pending.worker == connection);
        self.pending = kept;
        let end = |Pending { client, from, to, .. }| {
            let result = Err(format!("{from} was lost"));
            (client, ToClient::Measured { from, to, result })
        };
        BTreeMap::into_values(lost).map(end).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_hears_of_a_measurement_once() {
        let mut relay = Relay::default();
        let id = relay.begin(1, 2, "gpu0".to_owned(), "gpu1".to_owned());
        let samples = Samples {
            rounds_ns: vec![5],
            lanes: vec![],
            protocol: None,
            mapped: cuda_cluster_wire::native::Mapped::NotTried,
        };
        assert_eq!(relay.measured(3, id, Ok(samples.clone())), None, "another worker's word");
        let result = relay.measured(2, id, Ok(samples.clone()));
        assert!(matches!(result, Some((1, ToClient::Measured { result: Ok(_), .. }))));
        assert_eq!(relay.measured(2, id, Ok(samples)), None);
        assert_eq!(relay.gone(2), []);
    }

    #[test]
    fn a_lost_worker_ends_its_measurements() {
        let mut relay = Relay::default();
        relay.begin(1, 2, "gpu0".to_owned(), "gpu1".to_owned());
        relay.begin(9, 2, "gpu0".to_owned(), "gpu2".to_owned());
        assert_eq!(relay.gone(9), []);
        let result = relay.gone(2);
        assert!(
            matches!(&result[..], [(1, ToClient::Measured { result: Err(_), .. })]),
            "{result:?}"
        );
    }
}
