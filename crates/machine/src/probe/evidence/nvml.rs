//! The state of GPUs, as NVML tells it.
//!
//! Calls NVML's raw functions where the wrapper has none.
//!
//! *Invariant:* only what NVML has written is read.

#![allow(unsafe_code)]

use std::collections::BTreeMap;

use nvml_wrapper::enum_wrappers::device::{EccCounter, MemoryError};
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::{NvmlError, nvml_try};
use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings::{field_id, nvmlConfComputeSystemState_t};

use super::super::nvlink::field_values;
use cuda_cluster_model::preflight::{GpuState, Holder, Look, Remapped};

/// What NVML tells beside the topology.
#[derive(Debug, Default)]
pub(in crate::probe) struct States {
    pub(in crate::probe) gpus: BTreeMap<u32, GpuState>,
    pub(in crate::probe) confidential: Look<bool>,
}

/// An answer; what a GPU or a driver does not have is not there.
fn look<T>(told: Result<T, NvmlError>) -> Look<T> {
    match told {
        Ok(value) => Look::Seen(value),
        Err(
            NvmlError::NotSupported
            | NvmlError::InvalidArg
            | NvmlError::FunctionNotFound
            | NvmlError::FailedToLoadSymbol(_),
        ) => Look::NotThere,
        Err(error) => Look::Unseen(format!("NVML: {error}")),
    }
}

/// The state of a GPU.
pub(in crate::probe) fn state(device: &Device<'_>) -> GpuState {
    let mig = device.mig_mode().map(|mode| mode.pending == 1);
    GpuState {
        remapped: look(remapped(device)),
        retired_pending: look(device.are_pages_pending_retired()),
        ecc: look(device.is_ecc_enabled().map(|state| state.currently_enabled)),
        ecc_uncorrected: look(
            device.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile),
        ),
        recovery_action: recovery_action(device),
        clock_reasons: look(device.current_throttle_reasons().map(|reasons| reasons.bits())),
        power_limit_mw: look(device.enforced_power_limit()),
        default_power_limit_mw: look(device.power_management_limit_default()),
        persistence: look(device.is_in_persistent_mode()),
        mig_after_reset: look(mig),
        used_bytes: look(device.memory_info().map(|memory| memory.used)),
        holders: look(holders(device)),
    }
}

fn remapped(device: &Device<'_>) -> Result<Remapped, NvmlError> {
    let function = device.nvml().lib().nvmlDeviceGetRemappedRows.as_ref();
    let function = function.map_err(|error| NvmlError::FailedToLoadSymbol(error.to_string()))?;
    let (mut corrected, mut uncorrectable, mut pending, mut failure) = (0, 0, 0, 0);
    // SAFETY: a handle of this library, and four places for unsigned ints.
    nvml_try(unsafe {
        function(
            device.handle(),
            &raw mut corrected,
            &raw mut uncorrectable,
            &raw mut pending,
            &raw mut failure,
        )
    })?;
    Ok(Remapped { uncorrectable, pending: pending != 0, failure: failure != 0 })
}

fn recovery_action(device: &Device<'_>) -> Look<u32> {
    const FIELD: u32 = field_id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION;
    let told = field_values(device, &[(FIELD, 0)]);
    Look::of(told.first().and_then(|told| u32::try_from(told.value).ok()))
}

fn holders(device: &Device<'_>) -> Result<Vec<Holder>, NvmlError> {
    let processes = device.running_compute_processes()?;
    let holder = |process: nvml_wrapper::struct_wrappers::device::ProcessInfo| Holder {
        pid: process.pid,
        bytes: match process.used_gpu_memory {
            UsedGpuMemory::Used(bytes) => Some(bytes),
            UsedGpuMemory::Unavailable => None,
        },
        ..Holder::default()
    };
    Ok(processes.into_iter().map(holder).collect())
}

/// Whether GPUs run in confidential mode.
pub(in crate::probe) fn confidential(nvml: &Nvml) -> Look<bool> {
    let told = || {
        let function = nvml.lib().nvmlSystemGetConfComputeState.as_ref();
        let function =
            function.map_err(|error| NvmlError::FailedToLoadSymbol(error.to_string()))?;
        let mut state =
            nvmlConfComputeSystemState_t { environment: 0, ccFeature: 0, devToolsMode: 0 };
        // SAFETY: the library is open, and this is the structure that the function fills.
        nvml_try(unsafe { function(&raw mut state) })?;
        Ok(state.ccFeature != 0)
    };
    look(told())
}
