//! How much of a process's memory limit its data may fill.
//!
//! The supervisor ends a process for its resident memory as a whole: code, heap, UCX's queues, what
//! functions allocate, simulated device memory. Everything except data is measured, as resident
//! memory minus the reserved bytes, and data gets the rest of a share of the limit. Peaks are
//! remembered for a while, because the next task will need as much again.
//!
//! Pure: the caller measures the process, and passes the time.
//!
//! *Invariant:* data, everything else, and the reserve never add up to more than the limit.

use std::time::Duration;

use super::core::ProcessMemory;
use cuda_cluster_model::plan::HOST_FILL_PERCENT;

/// After this long, a peak counts half.
const HALF_LIFE: Duration = Duration::from_secs(2);

/// The memory that a process may use.
#[derive(Clone, Debug)]
pub(super) struct Budget {
    memory_limit: u64,
    /// What the process used before it had data.
    base: u64,
    other: u64,
    at: Duration,
}

impl Budget {
    pub(super) fn new(memory_limit: u64, resident: u64) -> Self {
        Self { memory_limit, base: resident, other: resident, at: Duration::ZERO }
    }

    /// Most memory that the process should have resident.
    pub(super) fn ceiling(&self) -> u64 {
        self.memory_limit / 100 * HOST_FILL_PERCENT
    }

    /// Records a measurement of the process, of which `charged` bytes are data.
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a part of a number of bytes, from 0"
    )]
    pub(super) fn observe(&mut self, resident: u64, charged: u64, now: Duration) {
        let raw = self.raw(resident, charged);
        let halves = now.saturating_sub(self.at).as_secs_f64() / HALF_LIFE.as_secs_f64();
        let peak = self.base + ((self.other - self.base) as f64 * (-halves).exp2()) as u64;
        self.other = raw.max(peak);
        self.at = now;
    }

    /// Forgets peaks, so that only the present counts.
    pub(super) fn settle(&mut self, resident: u64, charged: u64, now: Duration) {
        self.other = self.raw(resident, charged);
        self.at = now;
    }

    /// Memory that is not data. Reserved memory that was not touched yet is not resident, so the
    /// difference can be too small, but never below what the process took from the start.
    fn raw(&self, resident: u64, charged: u64) -> u64 {
        resident.saturating_sub(charged).max(self.base)
    }

    /// Whether much of the memory that is not data may be freed heap.
    pub(super) fn is_bloated(&self) -> bool {
        self.other > self.base + self.memory_limit / 16
    }

    /// The share of the limit that is for data.
    pub(super) fn process_memory(&self) -> ProcessMemory {
        ProcessMemory {
            limit: self.ceiling().saturating_sub(self.other),
            memory_limit: self.memory_limit,
            other: self.other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuda_cluster_model::plan::KILL_PERCENT;
    use proptest::prelude::*;

    #[test]
    fn what_the_process_takes_is_not_for_data_and_a_peak_is_remembered_for_a_while() {
        let mut budget = Budget::new(1000, 100);
        let all = budget.process_memory().limit;
        assert_eq!(all, budget.ceiling() - 100);
        budget.observe(500, 200, Duration::from_secs(1));
        assert_eq!(budget.process_memory().other, 300);
        budget.observe(300, 200, Duration::from_secs(3));
        assert_eq!(budget.process_memory().other, 200, "half of the peak");
        budget.settle(300, 200, Duration::from_secs(3));
        assert_eq!(budget.process_memory().limit, all);
    }

    proptest! {
        #[test]
        fn data_and_the_rest_stay_below_what_ends_the_process(
            limit in 1u64..1 << 40,
            looks in proptest::collection::vec((0u64..1 << 40, 0u64..1 << 40, 0u64..5000), 1..20),
        ) {
            let mut budget = Budget::new(limit, looks[0].0);
            let mut now = Duration::ZERO;
            for (resident, charged, millis) in looks {
                now += Duration::from_millis(millis);
                budget.observe(resident, charged, now);
                let ProcessMemory { limit: data, other, .. } = budget.process_memory();
                prop_assert!(other >= resident.saturating_sub(charged));
                prop_assert!(data == 0 || data + other <= limit / 100 * KILL_PERCENT);
            }
        }
    }
}
