//! Reports which processes use a GPU's memory, and whether the GPU still answers, while a cluster
//! runs.
//!
//! Makes no decisions; the supervisor does.
//!
//! *Invariant:* NVML is open only during a query, so that an idle supervisor does not hold the
//! driver.

use std::collections::BTreeMap;

use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};

use super::nvml_library::{self, Opened};
use super::{DriverFault, Options};
use cuda_cluster_model::ids::GpuUuid;

/// A process that uses memory of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its process id in this process's PID namespace.
    pub pid: u32,
    /// The amount; `None` if the driver does not report it (WDDM, some virtual machines).
    pub bytes: Option<u64>,
}

/// Why a GPU can't be queried.
#[derive(Debug, thiserror::Error)]
pub enum OccupancyError {
    /// There is no driver.
    #[error("there is no NVIDIA driver")]
    NoDriver,
    /// The driver is broken.
    #[error(transparent)]
    Driver(#[from] DriverFault),
    /// The GPU no longer answers.
    #[error("{uuid} does not answer any more: {source}")]
    Lost { uuid: GpuUuid, source: NvmlError },
    /// NVML does not report it.
    #[error("NVML does not tell who uses {uuid}")]
    Silent { uuid: GpuUuid, source: NvmlError },
}

/// The processes that compute on a GPU or MIG instance.
///
/// # Errors
/// If there is no driver, the GPU is lost, or NVML does not report them.
pub fn holders(options: &Options, uuid: &GpuUuid) -> Result<Vec<Holder>, OccupancyError> {
    held_by(&opened(options)?, uuid)
}

/// The same of several, for which NVML is opened once.
///
/// # Errors
/// If there is no driver.
pub fn holders_of_each<'a>(
    options: &Options,
    uuids: impl Iterator<Item = &'a GpuUuid>,
) -> Result<BTreeMap<&'a GpuUuid, Result<Vec<Holder>, OccupancyError>>, OccupancyError> {
    let nvml = opened(options)?;
    Ok(uuids.map(|uuid| (uuid, held_by(&nvml, uuid))).collect())
}

fn opened(options: &Options) -> Result<Nvml, OccupancyError> {
    match nvml_library::open(&options.nvml)? {
        Opened::Working(nvml) => Ok(*nvml),
        _ => Err(OccupancyError::NoDriver),
    }
}

fn held_by(nvml: &Nvml, uuid: &GpuUuid) -> Result<Vec<Holder>, OccupancyError> {
    let told = |nvml: &Nvml| device(nvml, uuid)?.running_compute_processes();
    let processes = told(nvml).map_err(|source| match source {
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
