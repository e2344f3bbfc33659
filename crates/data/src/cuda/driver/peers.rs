//! What peers have mapped of a device's pool, and the pebbles that make them let go.
//!
//! Does not send anything.
//!
//! *Invariant:* a pebble's bytes mean nothing: anyone may write or read them at any time.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::pool::{PEBBLE, Pebble, Release};
use super::{DriverDevice, DriverMemory, Error};

/// Length of what is lent of a pebble, in bytes: too much for UCX to copy it through host memory.
const LENT: usize = 1 << 20;

impl DriverDevice {
    pub(in super::super) fn mappings_have_no_limit(&self) {
        self.locked().mappings().set_limit(None);
    }

    pub(in super::super) fn peer_found(&self, peer: u64, name: &str) {
        self.locked().mappings().found(peer, name);
    }

    pub(in super::super) fn peer_lost(&self, peer: u64) {
        self.locked().mappings().lost(peer);
    }

    pub(in super::super) fn take_beyond(&self) -> Vec<u64> {
        // Most of the time nobody is, and then nothing is locked.
        if self.is_beyond.load(Ordering::Relaxed) && self.is_beyond.swap(false, Ordering::Relaxed) {
            self.locked().mappings().take_beyond()
        } else {
            Vec::new()
        }
    }

    /// Memory in a pebble, which is made when it is first needed; none without a limit or room.
    pub(in super::super) fn pebble(
        device: &Arc<Self>,
        which: Pebble,
    ) -> Result<Option<DriverMemory>, Error> {
        device.make_current()?;
        let mut pool = device.locked();
        if !pool.mappings().has_limit() {
            return Ok(None);
        }
        let mut address = pool.lend_pebble(which, LENT as u64);
        if address.is_none() && pool.room() >= PEBBLE {
            let mut made = device.slab(PEBBLE)?;
            if made.is_none() {
                device.free_slabs(pool.release(PEBBLE, Release::Unmapped));
                made = device.slab(PEBBLE)?;
            }
            if let Some(base) = made {
                pool.add_pebble(which, base);
                address = pool.lend_pebble(which, LENT as u64);
            }
        }
        drop(pool);
        let memory = |address| DriverMemory { device: Arc::clone(device), address, bytes: LENT };
        Ok(address.map(memory))
    }
}
