//! Objects by name: carries out what [`Transfers`](super::Transfers) decides.
//!
//! Does not hold requests or receives.
//!
//! *Invariant:* every request of a proven peer is answered, with the object or that it is missing.

use std::sync::Arc;

use tokio::sync::oneshot;

use super::Owner;
use crate::plane::commands::Command;
use crate::plane::transfer::{self, Arrival, Request, TransferError};
use cuda_cluster_data::ucx::{Buffer, Payload};
use cuda_cluster_wire::peer::{Kind, Member, NAME_LIMIT, PeerKey, checksum_argument};

/// The checksum of an object longer than this is computed on a thread of its own.
const INLINE_CHECKSUM: usize = 256 << 10;

impl Owner {
    pub(super) fn get(&mut self, request: Request) {
        let Some(peer) = self.connected(&request.peer) else {
            let peer = request.peer.clone();
            return request.refuse(TransferError::NoPeer { peer });
        };
        let bytes = request.name.len();
        if bytes > NAME_LIMIT {
            return request.refuse(TransferError::Name { bytes });
        }
        if !self.core.is_proven(&peer) {
            return self.early.push(request);
        }
        let peer = peer.key();
        let name = Payload::from(request.name.clone().into_bytes());
        self.send(peer, Kind::Get, request.id, u64::from(request.checked), name);
        self.transfers.requested(request, peer);
    }

    /// Sends the requests that waited until the connection to a peer was verified.
    pub(super) fn ask_early(&mut self, peer: &Member) {
        for request in std::mem::take(&mut self.early) {
            if request.peer == peer.name { self.get(request) } else { self.early.push(request) }
        }
    }

    /// Answers the requests that wait for a peer that is gone.
    pub(super) fn drop_early(&mut self, peer: &Member, cause: &str) {
        for request in self.early.extract_if(.., |request| request.peer == peer.name) {
            let (peer, cause) = (request.peer.clone(), cause.to_owned());
            request.refuse(TransferError::PeerLost { peer, cause });
        }
    }

    #[inline(never)]
    pub(super) fn serve(&mut self, to: PeerKey, id: u64, checked: bool, request: &Arrival) {
        let name = request.bytes().filter(|bytes| bytes.len() <= NAME_LIMIT);
        let name = name.and_then(|bytes| std::str::from_utf8(bytes).ok());
        let Some((name, offered)) =
            name.and_then(|name| Some((name, self.transfers.offered.get_mut(name)?)))
        else {
            self.send(to, Kind::Missing, id, 0, Payload::Empty);
            return;
        };
        let (buffer, checksum) = (Arc::clone(&offered.buffer), offered.checksum);
        if !checked || checksum.is_some() {
            return self.send_object(to, id, buffer, checksum);
        }
        if buffer.len() <= INLINE_CHECKSUM {
            let checksum = transfer::checksum_of(&buffer, buffer.len());
            offered.checksum = checksum;
            return self.send_object(to, id, buffer, checksum);
        }
        offered.waiting.push((to, id));
        if offered.waiting.len() == 1 {
            let name = name.to_owned();
            self.aside(move || {
                let checksum = transfer::checksum_of(&buffer, buffer.len());
                Command::Summed { name, buffer, checksum }
            });
        }
    }

    pub(super) fn summed(&mut self, name: &str, buffer: &Arc<Buffer>, checksum: Option<u32>) {
        let Some(offered) = self.transfers.offered.get_mut(name) else { return };
        if !Arc::ptr_eq(&offered.buffer, buffer) {
            return;
        }
        offered.checksum = checksum;
        for (to, id) in std::mem::take(&mut offered.waiting) {
            self.send_object(to, id, Arc::clone(buffer), checksum);
        }
    }

    pub(super) fn send_object(
        &self,
        to: PeerKey,
        id: u64,
        buffer: Arc<Buffer>,
        checksum: Option<u32>,
    ) {
        let payload = if buffer.is_empty() { Payload::Empty } else { Payload::Shared(buffer) };
        self.send(to, Kind::Object, id, checksum_argument(checksum), payload);
    }

    pub(super) fn echo(&mut self, peer: String, reply: oneshot::Sender<Result<(), TransferError>>) {
        let Some(member) = self.connected(&peer) else {
            let _ = reply.send(Err(TransferError::NoPeer { peer }));
            return;
        };
        let member = member.key();
        self.next_echo += 1;
        self.send(member, Kind::Ping, self.next_echo, 0, Payload::Empty);
        self.echoes.insert(self.next_echo, (member, reply));
    }
}
