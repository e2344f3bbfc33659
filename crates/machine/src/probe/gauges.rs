//! What the GPUs do now: memory, utilisation, temperature, power, errors, and bytes on
//! their links.
//!
//! *Invariant:* a figure that the driver does not report is `None`, never zero.

use std::collections::BTreeMap;
use std::time::Instant;

use nvml_wrapper::enum_wrappers::device::{EccCounter, MemoryError, TemperatureSensor};
use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings::field_id;
use serde::{Deserialize, Serialize};

use super::Options;
use super::nvlink::field_values;
use super::nvml_library::{self, Opened};

/// The scope of a field that sums over all links, `nvml.h`.
const ALL_LINKS: u32 = u32::MAX;

/// The counters, each with the bytes of its unit.
const COUNTERS: [(u32, u32, u64); 4] = [
    (field_id::NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, ALL_LINKS, 1024),
    (field_id::NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, ALL_LINKS, 1024),
    (field_id::NVML_FI_DEV_PCIE_COUNT_TX_BYTES, 0, 1),
    (field_id::NVML_FI_DEV_PCIE_COUNT_RX_BYTES, 0, 1),
];

/// What one GPU does.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GpuGauges {
    /// Device memory in use, in bytes.
    pub used_bytes: Option<u64>,
    /// All of its memory.
    pub total_bytes: Option<u64>,
    /// Share of the time in which a kernel ran, in percent.
    pub busy_percent: Option<u32>,
    /// Temperature in degrees Celsius.
    pub celsius: Option<u32>,
    /// Power in watts.
    pub watts: Option<f64>,
    /// Errors of memory that could not be corrected, since the driver was loaded.
    #[serde(default)]
    pub ecc_uncorrected: Option<u64>,
    /// Bytes over all NVLinks since the driver began to count, sent and received.
    pub nvlink_bytes: [Option<u64>; 2],
    /// Bytes over PCIe likewise.
    pub pcie_bytes: [Option<u64>; 2],
    /// Bytes per second over all NVLinks, sent and received.
    pub nvlink_bytes_per_s: [Option<f64>; 2],
    /// Bytes per second over PCIe, sent and received.
    pub pcie_bytes_per_s: [Option<f64>; 2],
}

/// Reads the GPUs' figures; rates are those since the last reading.
pub struct GpuMeter {
    nvml: Nvml,
    before: BTreeMap<u32, (Instant, [Option<u64>; 4])>,
}

impl std::fmt::Debug for GpuMeter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GpuMeter").finish_non_exhaustive()
    }
}

impl GpuMeter {
    /// Opens the driver; `None` if there is none that works.
    pub fn open(options: &Options) -> Option<Self> {
        match nvml_library::open(&options.nvml) {
            Ok(Opened::Working(nvml)) => Some(Self { nvml: *nvml, before: BTreeMap::new() }),
            Ok(Opened::Absent(_)) | Err(_) => None,
        }
    }

    /// The figures of every GPU that answers, by its index. Blocks for some milliseconds.
    pub fn read(&mut self) -> BTreeMap<u32, GpuGauges> {
        let Self { nvml, before } = self;
        let count = nvml.device_count().unwrap_or(0);
        let gauges = |index| {
            let device = nvml.device_by_index(index).ok()?;
            let (now, counters) = (Instant::now(), counters(&device));
            let last = before.insert(index, (now, counters));
            let rates = last.map_or([None; 4], |(then, last)| {
                rates(last, counters, now.duration_since(then).as_secs_f64())
            });
            Some((index, figures(&device, counters, rates)))
        };
        (0..count).filter_map(gauges).collect()
    }
}

fn figures(device: &Device<'_>, counters: [Option<u64>; 4], rates: [Option<f64>; 4]) -> GpuGauges {
    let memory = device.memory_info().ok();
    let [sent, received, pcie_sent, pcie_received] = rates;
    GpuGauges {
        used_bytes: memory.as_ref().map(|memory| memory.used),
        total_bytes: memory.map(|memory| memory.total),
        busy_percent: device.utilization_rates().ok().map(|rates| rates.gpu),
        celsius: device.temperature(TemperatureSensor::Gpu).ok(),
        watts: device.power_usage().ok().map(|milliwatts| f64::from(milliwatts) / 1e3),
        ecc_uncorrected: device
            .total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile)
            .ok(),
        nvlink_bytes: [counters[0], counters[1]],
        pcie_bytes: [counters[2], counters[3]],
        nvlink_bytes_per_s: [sent, received],
        pcie_bytes_per_s: [pcie_sent, pcie_received],
    }
}

fn counters(device: &Device<'_>) -> [Option<u64>; 4] {
    let wanted = COUNTERS.map(|(field, scope, _)| (field, scope));
    let told = field_values(device, &wanted);
    COUNTERS.map(|(field, _, unit)| {
        let counter = told.iter().find(|told| told.field == field)?;
        Some(counter.value.saturating_mul(unit))
    })
}

/// Rates between two readings; a counter that has wrapped has none.
fn rates(before: [Option<u64>; 4], now: [Option<u64>; 4], seconds: f64) -> [Option<f64>; 4] {
    std::array::from_fn(|at| {
        let grown = now[at]?.checked_sub(before[at]?)?;
        (seconds > 0.0).then(|| grown as f64 / seconds)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_needs_two_readings_of_a_counter_that_grew() {
        let before = [Some(100), Some(100), None, Some(5)];
        let now = [Some(300), Some(50), Some(7), Some(5)];
        assert_eq!(rates(before, now, 2.0), [Some(100.0), None, None, Some(0.0)]);
        assert_eq!(rates(before, now, 0.0), [None; 4]);
    }
}
