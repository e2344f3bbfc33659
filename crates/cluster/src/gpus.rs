//! The supervisor's access to GPUs: NVML, as `probe` opens it.

use std::fmt;
use std::time::{Instant, SystemTime};

use cuda_cluster_machine::probe::{self, OccupancyError, Options, XidEvent, XidWatch};
use cuda_cluster_model::ids::GpuUuid;
use cuda_cluster_supervise::ProcessGpu;
use cuda_cluster_supervise::gpu::{GpuHolder, GpuWatch};
use cuda_cluster_supervise::record::GpuError;

/// Queries NVML, which it opens for each query; what a thread hears anyway it remembers.
pub(super) struct NvmlWatch {
    options: Options,
    /// `None` if no thread could be started to receive errors.
    errors: Option<XidWatch>,
}

impl NvmlWatch {
    /// Uses the driver that the environment selects, or the default one; receives errors of these
    /// GPUs from now on.
    pub(super) fn new(gpus: Vec<GpuUuid>) -> Self {
        // An invalid limit was rejected when the machine was probed.
        let options = Options::from_environment().unwrap_or_default();
        let errors = XidWatch::start(&options, gpus).ok();
        Self { options, errors }
    }

    fn ask(&self, gpu: &ProcessGpu) -> Result<Vec<probe::Holder>, OccupancyError> {
        match &gpu.uuid {
            Some(uuid) => probe::holders(&self.options, uuid),
            None => Err(OccupancyError::NoDriver),
        }
    }
}

impl fmt::Debug for NvmlWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NvmlWatch").finish_non_exhaustive()
    }
}

impl GpuWatch for NvmlWatch {
    fn holders(&self, gpu: &ProcessGpu) -> Result<Vec<GpuHolder>, String> {
        let holders = self.ask(gpu).map_err(|error| error.to_string())?;
        let named = |holder: probe::Holder| GpuHolder {
            pid: holder.pid,
            name: std::fs::read_to_string(format!("/proc/{}/comm", holder.pid))
                .ok()
                .map(|name| name.trim().to_owned()),
            bytes: holder.bytes,
        };
        Ok(holders.into_iter().map(named).collect())
    }

    fn lost(&self, gpu: &ProcessGpu) -> Option<String> {
        match self.ask(gpu) {
            Err(error @ OccupancyError::Lost { .. }) => Some(error.to_string()),
            _ => None,
        }
    }

    fn busy_since(&self, gpu: &ProcessGpu, since: Instant) -> Option<(f64, f64)> {
        let (watch, uuid) = self.errors.as_ref().zip(gpu.uuid.as_ref())?;
        let percents = watch.busy_since(uuid, since);
        let highest = *percents.iter().max()?;
        let mean = f64::from(percents.iter().sum::<u32>()) / percents.len() as f64;
        Some((mean, highest.into()))
    }

    fn errors_since(&self, gpu: &ProcessGpu, since: SystemTime) -> Vec<GpuError> {
        let Some((watch, uuid)) = self.errors.as_ref().zip(gpu.uuid.as_ref()) else {
            return Vec::new();
        };
        let error = |event: XidEvent| GpuError { xid: event.xid, text: event.meaning().to_owned() };
        watch.since(uuid, since).into_iter().map(error).collect()
    }
}
