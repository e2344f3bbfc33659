//! A GPU's registration with the NVLink fabric, which NVSwitches and the fabric manager make.
//!
//! Calls NVML's raw functions: the wrapper has none for it.
//!
//! *Invariant:* only what NVML has written is read.

#![allow(unsafe_code)]

use nvml_wrapper::Device;
use nvml_wrapper::error::{NvmlError, nvml_try};
use nvml_wrapper_sys::bindings::{
    NVML_GPU_FABRIC_STATE_COMPLETED, NVML_GPU_FABRIC_STATE_IN_PROGRESS,
    NVML_GPU_FABRIC_STATE_NOT_STARTED, nvmlGpuFabricInfo_t, nvmlGpuFabricInfo_v2_t,
    nvmlGpuFabricInfoV_t,
};

use super::questions::Questions;
use cuda_cluster_model::ids::uuid_text;
use cuda_cluster_model::topology::{Fabric, FabricFault, FabricState};

/// `nvmlGpuFabricInfo_v2`: drivers have it since 545.
#[allow(clippy::cast_possible_truncation, reason = "it has 36 bytes")]
const VERSION_2: u32 = size_of::<nvmlGpuFabricInfo_v2_t>() as u32 | 2 << 24;

/// Reads it; `None` for a GPU that is in no fabric. Notes what is wrong with it.
///
/// # Errors
/// If the GPU is lost.
pub(super) fn read(
    device: &Device<'_>,
    asked: &mut Questions<'_>,
) -> Result<Option<Fabric>, NvmlError> {
    let answer = match newer(device) {
        Err(NvmlError::FailedToLoadSymbol(_) | NvmlError::FunctionNotFound) => older(device),
        answer => answer,
    };
    let Some(answer) = asked.may("NVLink fabric", answer)? else { return Ok(None) };
    let fabric = told(&answer);
    if let Some(problem) = fabric.as_ref().and_then(Fabric::problem) {
        asked.note(problem);
    }
    Ok(fabric)
}

fn newer(device: &Device<'_>) -> Result<nvmlGpuFabricInfoV_t, NvmlError> {
    let function = device.nvml().lib().nvmlDeviceGetGpuFabricInfoV.as_ref();
    let function = function.map_err(|error| NvmlError::FailedToLoadSymbol(error.to_string()))?;
    // SAFETY: all zero is a valid value of this C structure.
    let mut info: nvmlGpuFabricInfoV_t = unsafe { std::mem::zeroed() };
    info.version = VERSION_2;
    // SAFETY: a handle of this library, and a structure that is larger than that of the version.
    nvml_try(unsafe { function(device.handle(), &raw mut info) })?;
    Ok(info)
}

/// As drivers had it before 545, without the health.
fn older(device: &Device<'_>) -> Result<nvmlGpuFabricInfoV_t, NvmlError> {
    let function = device.nvml().lib().nvmlDeviceGetGpuFabricInfo.as_ref();
    let function = function.map_err(|error| NvmlError::FailedToLoadSymbol(error.to_string()))?;
    // SAFETY: all zero is a valid value of this C structure.
    let mut info: nvmlGpuFabricInfo_t = unsafe { std::mem::zeroed() };
    // SAFETY: a handle of this library, and the structure that this function fills.
    nvml_try(unsafe { function(device.handle(), &raw mut info) })?;
    // SAFETY: as above.
    let newer: nvmlGpuFabricInfoV_t = unsafe { std::mem::zeroed() };
    Ok(nvmlGpuFabricInfoV_t {
        clusterUuid: info.clusterUuid,
        status: info.status,
        cliqueId: info.cliqueId,
        state: info.state,
        ..newer
    })
}

fn told(answer: &nvmlGpuFabricInfoV_t) -> Option<Fabric> {
    let state = match u32::from(answer.state) {
        NVML_GPU_FABRIC_STATE_NOT_STARTED => FabricState::NotStarted,
        NVML_GPU_FABRIC_STATE_IN_PROGRESS => FabricState::InProgress,
        NVML_GPU_FABRIC_STATE_COMPLETED => FabricState::Completed,
        _ => return None,
    };
    // The status says something once the registration has ended (nvml.h).
    let error = match nvml_try(answer.status) {
        Err(error) if state == FabricState::Completed => Some(error.to_string()),
        _ => None,
    };
    let cluster = (answer.clusterUuid != [0; 16]).then(|| uuid_text(answer.clusterUuid));
    Some(Fabric {
        state,
        error,
        clique: answer.cliqueId,
        cluster,
        faults: faults(answer.healthMask),
    })
}

/// The parts of `healthMask`, which are 1 where there is something
/// (`NVML_GPU_FABRIC_HEALTH_MASK_*`).
fn faults(mask: u32) -> Vec<FabricFault> {
    let part = |shift: u32| mask >> shift & 0x3 == 1;
    let configuration = match mask >> 8 & 0xf {
        2 => Some(FabricFault::IncorrectSystemGuid),
        3 => Some(FabricFault::IncorrectChassis),
        4 => Some(FabricFault::NoPartition),
        5 => Some(FabricFault::InsufficientNvlinks),
        _ => None,
    };
    let parts = [
        (0, FabricFault::DegradedBandwidth),
        (2, FabricFault::RouteRecovery),
        (4, FabricFault::RouteUnhealthy),
        (6, FabricFault::AccessTimeoutRecovery),
    ];
    let found = parts.into_iter().filter(|(shift, _)| part(*shift)).map(|(_, fault)| fault);
    found.chain(configuration).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(non_snake_case, reason = "the fields' names are NVML's")]
    fn an_answer_is_read_as_nvml_h_defines_it() {
        let clusterUuid = *b"\x01\x23\x45\x67\x89\xab\xcd\xef\0\0\0\0\0\0\0\x07";
        let answer = |state, status, healthMask| {
            // SAFETY: all zero is a valid value of this C structure.
            let rest: nvmlGpuFabricInfoV_t = unsafe { std::mem::zeroed() };
            let (cliqueId, state) = (3, state);
            told(&nvmlGpuFabricInfoV_t { clusterUuid, status, cliqueId, state, healthMask, ..rest })
        };
        assert_eq!(answer(0, 0, 0), None, "no fabric");
        let well = answer(3, 0, 0x12aa).expect("a fabric");
        assert_eq!((well.state, well.clique, &well.error), (FabricState::Completed, 3, &None));
        assert_eq!(well.cluster.as_deref(), Some("01234567-89ab-cdef-0000-000000000007"));
        assert_eq!(well.faults, [FabricFault::IncorrectSystemGuid]);
        let bad = answer(3, 999, 0x55).expect("a fabric");
        assert!(bad.error.is_some());
        assert_eq!(bad.faults.len(), 4);
        assert_eq!(answer(2, 999, 0).expect("a fabric").error, None, "it has not ended");
    }
}
