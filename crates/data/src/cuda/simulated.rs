//! A simulated device: host memory with a GPU's capacity, so that everything above runs anywhere.
//!
//! Does not simulate speed, and does not hide that it is simulated.
//!
//! *Invariant:* the bytes of its live buffers never add up to more than its capacity.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Error, MemoryInfo};
use crate::memory::HostMemory;

/// A simulated device.
#[derive(Debug)]
pub struct SimulatedDevice {
    name: String,
    capacity_bytes: u64,
    used_bytes: AtomicU64,
}

impl SimulatedDevice {
    pub(super) fn new(name: String, capacity_bytes: u64) -> Self {
        Self { name, capacity_bytes, used_bytes: AtomicU64::new(0) }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn memory(&self) -> MemoryInfo {
        let used = self.used_bytes.load(Ordering::Relaxed);
        MemoryInfo { total_bytes: self.capacity_bytes, free_bytes: self.capacity_bytes - used }
    }

    pub(super) fn allocate(device: &Arc<Self>, bytes: usize) -> Result<SimulatedMemory, Error> {
        let asked = bytes as u64;
        let error = |used: u64| Error::OutOfMemory {
            device: device.name.clone(),
            asked_bytes: bytes,
            free_bytes: device.capacity_bytes.saturating_sub(used),
            freed_bytes: 0,
            mapped_by: Vec::new(),
        };
        let take = |used: u64| used.checked_add(asked).filter(|sum| *sum <= device.capacity_bytes);
        let used = &device.used_bytes;
        used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).map_err(error)?;
        let Some(bytes) = HostMemory::undefined(bytes) else {
            return Err(error(used.fetch_sub(asked, Ordering::Relaxed) - asked));
        };
        Ok(SimulatedMemory { bytes, device: Arc::clone(device) })
    }
}

/// Memory of a simulated device.
pub(super) struct SimulatedMemory {
    bytes: HostMemory,
    device: Arc<SimulatedDevice>,
}

impl SimulatedMemory {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

impl Drop for SimulatedMemory {
    fn drop(&mut self) {
        self.device.used_bytes.fetch_sub(self.bytes.len() as u64, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::super::Device;
    use super::*;

    #[test]
    fn a_simulated_device_keeps_its_capacity_limit() {
        let device = Device::simulated("simulated GPU 0", 100);
        let first = device.allocate(60).expect("fits");
        let refused = device.allocate(41).expect_err("does not fit");
        assert!(matches!(refused, Error::OutOfMemory { free_bytes: 40, .. }), "{refused}");
        assert_eq!(device.memory().expect("known").free_bytes, 40);
        drop(first);
        assert!(device.allocate(100).is_ok());
    }

    #[test]
    fn a_copy_beyond_the_end_is_refused() {
        let device = Device::simulated("simulated GPU 0", 100);
        let mut buffer = device.allocate(10).expect("fits");
        assert!(buffer.write(8, &[1, 2, 3]).is_err());
        assert!(buffer.write(usize::MAX, &[1]).is_err());
        buffer.write(7, &[1, 2, 3]).expect("fits");
        let mut read = [0; 3];
        buffer.read(7, &mut read).expect("fits");
        assert_eq!(read, [1, 2, 3]);
    }
}
