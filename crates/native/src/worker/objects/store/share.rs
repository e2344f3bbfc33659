//! Objects that peers of this machine read where they are.
//!
//! Does not know the peers.
//!
//! *Invariant:* what a peer may read stays reserved until the peer has given it back.

use std::sync::Arc;

use tokio::sync::watch;

use super::{Content, Store};
use crate::worker::objects::ledger::reserved;
use cuda_cluster_data::memory::HostMemory;
use cuda_cluster_data::ucx::Buffer;
use cuda_cluster_wire::tasks::ObjectId;

impl Store {
    /// An object that is where a peer can read it. It may move meanwhile, such as to the disk; who
    /// has the buffer is then asked to give it back, by [`Self::recalls`].
    pub(in crate::worker) fn share(&self, object: ObjectId) -> Option<Arc<Buffer>> {
        let mut inner = self.lock();
        let Some(Content::Memory(buffer)) = inner.contents.get(&object) else { return None };
        let buffer = Arc::clone(buffer);
        on_host(&buffer).and_then(HostMemory::shared)?;
        // It was used just now.
        inner.tiers.pin(object);
        inner.tiers.unpin(object);
        Some(buffer)
    }

    /// Changes when there is too little room: then peers are to give back what they read of objects
    /// that are gone from here ([`is_released`]).
    pub(in crate::worker) fn recalls(&self) -> watch::Receiver<()> {
        self.recalls.subscribe()
    }

    pub(super) fn recall(&self) {
        self.recalls.send_replace(());
    }
}

/// The buffer's host memory.
pub(in crate::worker) fn on_host(buffer: &Buffer) -> Option<&HostMemory> {
    match buffer {
        Buffer::Host(memory) => Some(memory),
        Buffer::Device(_) => None,
    }
}

/// Whether no object is in a buffer any more, so that its memory is free as soon as nobody reads
/// it.
pub(in crate::worker) fn is_released(buffer: &Buffer) -> bool {
    reserved(buffer).is_some_and(|reserved| reserved.is_released())
}
