//! Lets peers unmap large device memory that is free again.
//!
//! UCX unmaps a peer's memory only when it maps other memory of that peer, and keeps what is longer
//! than its limit until then: without this, seven peers could keep as many dead objects of 8 GiB on
//! a GPU. So they are sent a little memory to map, a pebble, and send one back, since UCX maps
//! either the sender's memory or the receiver's.
//!
//! Up to 1.21, UCX never unmaps what it has mapped first of a peer, to see whether it can
//! (`uct_cuda_ipc_is_peer_accessible`). So the first is a pebble, too, which is then mapped already
//! and of no use for the rest.
//!
//! Does not decide who is to let go; [`Device::take_beyond`] does.
//!
//! *Invariant:* each pebble is answered by at most one.

use super::Owner;
use crate::plane::transfer::{Arrival, Purpose, receive_from};
use cuda_cluster_data::cuda::{Device, Pebble};
use cuda_cluster_data::ucx::{Buffer, Payload, Status};
use cuda_cluster_wire::peer::{Kind, PeerKey};

/// The identifiers of the first pebble, of one that makes the peer let go, and of the answer to it.
pub(super) const FIRST: u64 = 0;
const ASKING: u64 = 1;
const ANSWER: u64 = 2;

impl Owner {
    /// Sends a pebble to each peer that is to let go.
    pub(super) fn ask_to_let_go(&self) {
        let peers = self.device.as_ref().map(Device::take_beyond).unwrap_or_default();
        for peer in peers {
            self.send_pebble(PeerKey(peer), ASKING);
        }
    }

    fn pebble(&self, id: u64) -> Option<Box<Buffer>> {
        let which = if id == FIRST { Pebble::First } else { Pebble::Last };
        // Without room for one the others keep what they have, as they would without all this.
        let pebble = self.device.as_ref()?.pebble(which).inspect_err(|error| {
            tracing::debug!(%error, "peers cannot be made to let go of device memory");
        });
        pebble.ok().flatten().map(|memory| Box::new(Buffer::Device(memory)))
    }

    pub(super) fn send_pebble(&self, to: PeerKey, id: u64) {
        if let Some(pebble) = self.pebble(id) {
            self.send(to, Kind::LetGo, id, 0, Payload::Owned(pebble));
        }
    }

    /// Receives a peer's pebble. Its arrival is dropped if there is no room, which tells the sender
    /// that it is done.
    pub(super) fn receive_pebble(&self, from: PeerKey, id: u64, arrival: Arrival) {
        let Some(pebble) = self.pebble(id) else { return };
        let _ = receive_from(arrival, pebble, from, Purpose::Pebble { from, id });
    }

    pub(super) fn received_pebble(&self, from: PeerKey, id: u64, result: Result<(), Status>) {
        if id == ASKING && result.is_ok() {
            self.send_pebble(from, ANSWER);
        }
    }
}
