//! Who holds a GPU's memory, and whether the GPU still answers: asked while a cluster runs.
//!
//! Decides nothing; the supervisor waits and judges.
//!
//! *Invariant:* NVML is open only while it is asked, so that a supervisor at rest holds no driver.

use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};

use super::nvml_library::{self, Opened};
use super::{DriverFault, Options};
use crate::ids::GpuUuid;

/// A process that holds memory of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its process id, as this process's PID namespace has it.
    pub pid: u32,
    /// How much; `None` where the driver does not tell (WDDM, some virtual machines).
    pub bytes: Option<u64>,
}

/// Why a GPU cannot be asked.
#[derive(Debug, thiserror::Error)]
pub enum OccupancyError {
    /// There is no driver.
    #[error("there is no NVIDIA driver")]
    NoDriver,
    /// The driver is broken.
    #[error(transparent)]
    Driver(#[from] DriverFault),
    /// The GPU does not answer any more.
    #[error("{uuid} does not answer any more: {source}")]
    Lost { uuid: GpuUuid, source: NvmlError },
    /// NVML does not tell.
    #[error("NVML does not tell who uses {uuid}")]
    Silent { uuid: GpuUuid, source: NvmlError },
}

/// The processes that compute on a GPU or MIG instance.
///
/// # Errors
/// If there is no driver, the GPU is lost, or NVML does not tell.
pub fn holders(options: &Options, uuid: &GpuUuid) -> Result<Vec<Holder>, OccupancyError> {
    let Opened::Working(nvml) = nvml_library::open(&options.nvml)? else {
        return Err(OccupancyError::NoDriver);
    };
    let told = |nvml: &Nvml| device(nvml, uuid)?.running_compute_processes();
    let processes = told(&nvml).map_err(|source| match source {
        NvmlError::GpuLost | NvmlError::ResetRequired | NvmlError::NotFound => {
            OccupancyError::Lost { uuid: uuid.clone(), source }
        }
        source => OccupancyError::Silent { uuid: uuid.clone(), source },
    })?;
    let holder = |process: nvml_wrapper::struct_wrappers::device::ProcessInfo| Holder {
        pid: process.pid,
        bytes: match process.used_gpu_memory {
            UsedGpuMemory::Used(bytes) => Some(bytes),
            UsedGpuMemory::Unavailable => None,
        },
    };
    Ok(processes.into_iter().map(holder).collect())
}

fn device<'nvml>(nvml: &'nvml Nvml, uuid: &GpuUuid) -> Result<Device<'nvml>, NvmlError> {
    nvml.device_by_uuid(uuid.as_str())
}
