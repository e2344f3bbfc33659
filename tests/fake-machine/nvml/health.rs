//! What NVML tells of a GPU's health: memory that is worn, errors, clocks, power, confidential
//! computing. From the file `health.json` beside the description, read by the first initialisation.
//!
//! *Invariant:* a fact that the file lacks is answered with `NVML_ERROR_NOT_SUPPORTED`, and a key
//! that is unknown fails the initialisation.

use std::collections::BTreeMap;
use std::ffi::{c_uint, c_ulonglong};
use std::path::Path;

use serde::Deserialize;

use crate::abi::{Answer, Return};
use crate::{Fake, Handle, Target, device, system};

// SAFETY of all functions here: NVML's contract says what pointers point to; callers keep it.

/// `nvmlMemoryErrorType_t` and `nvmlEccCounterType_t` each have two values.
const UNCORRECTED: c_uint = 1;
const AGGREGATE: c_uint = 1;
/// `NVML_CC_SYSTEM_ENVIRONMENT_UNAVAILABLE` and `…_PROD`.
const NO_ENVIRONMENT: c_uint = 0;
const PRODUCTION: c_uint = 2;

/// `health.json`.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Health {
    /// Whether confidential computing is on.
    confidential: Option<bool>,
    /// By NVML's number.
    #[serde(default)]
    gpus: BTreeMap<u32, GpuHealth>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuHealth {
    remapped_rows: Option<RemappedRows>,
    retired_pending: Option<bool>,
    ecc: Option<bool>,
    /// The same since the driver was loaded and in the GPU's life.
    ecc_uncorrected: Option<u64>,
    /// `nvmlDeviceGpuRecoveryAction_t`, told as a field value.
    pub recovery_action: Option<u32>,
    clocks_event_reasons: Option<u64>,
    power_limit_mw: Option<u32>,
    default_power_limit_mw: Option<u32>,
    persistence: Option<bool>,
    /// What MIG's mode will be after a reset; without it the current one.
    pub mig_pending: Option<bool>,
    /// What each process has of the memory.
    pub process_bytes: Option<u64>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
struct RemappedRows {
    correctable: u32,
    uncorrectable: u32,
    pending: bool,
    failure: bool,
}

impl Health {
    /// Reads the file beside the description; without one nothing is known.
    pub fn beside(description: &Path) -> Answer<Self> {
        match std::fs::read_to_string(description.with_file_name("health.json")) {
            Ok(text) => serde_json::from_str(&text).map_err(|_| Return::Unknown),
            Err(_) => Ok(Self::default()),
        }
    }

    /// What is known of this GPU.
    pub fn gpu(&self, index: u32) -> Option<&GpuHealth> {
        self.gpus.get(&index)
    }
}

/// What is known of a GPU. MIG instances have none of their own.
fn known(fake: &'static Fake, target: Target) -> Answer<&'static GpuHealth> {
    let Target::Gpu(gpu) = target else { return Err(Return::NotSupported) };
    fake.health.gpu(gpu.index).ok_or(Return::NotSupported)
}

/// Writes one fact where NVML's caller wants it.
fn write<T>(
    function: &str,
    at: Handle,
    out: *mut T,
    fact: impl FnOnce(&'static GpuHealth) -> Option<T>,
) -> Return {
    device(function, at, |fake, target| {
        let fact = fact(known(fake, target)?).ok_or(Return::NotSupported)?;
        // SAFETY: see above.
        unsafe { out.write(fact) };
        Ok(())
    })
}

/// Not of GPUs with MIG instances.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetRemappedRows(
    at: Handle,
    correctable: *mut c_uint,
    uncorrectable: *mut c_uint,
    pending: *mut c_uint,
    failure: *mut c_uint,
) -> Return {
    device("nvmlDeviceGetRemappedRows", at, |fake, target| {
        let rows = known(fake, target)?.remapped_rows.filter(|_| target.gpu().mig.is_empty());
        let rows = rows.ok_or(Return::NotSupported)?;
        // SAFETY: see above.
        unsafe {
            correctable.write(rows.correctable);
            uncorrectable.write(rows.uncorrectable);
            pending.write(rows.pending.into());
            failure.write(rows.failure.into());
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetRetiredPagesPendingStatus(
    at: Handle,
    pending: *mut c_uint,
) -> Return {
    write("nvmlDeviceGetRetiredPagesPendingStatus", at, pending, |known| {
        known.retired_pending.map(c_uint::from)
    })
}

/// Needs ECC to be on. No error is corrected here.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetTotalEccErrors(
    at: Handle,
    kind: c_uint,
    counter: c_uint,
    errors: *mut c_ulonglong,
) -> Return {
    if kind > UNCORRECTED || counter > AGGREGATE {
        return Return::InvalidArgument;
    }
    write("nvmlDeviceGetTotalEccErrors", at, errors, |known| {
        let uncorrected = known.ecc_uncorrected.filter(|_| known.ecc != Some(false))?;
        Some(if kind == UNCORRECTED { uncorrected } else { 0 })
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetEccMode(
    at: Handle,
    current: *mut c_uint,
    pending: *mut c_uint,
) -> Return {
    device("nvmlDeviceGetEccMode", at, |fake, target| {
        let mode = c_uint::from(known(fake, target)?.ecc.ok_or(Return::NotSupported)?);
        // SAFETY: see above.
        unsafe {
            current.write(mode);
            pending.write(mode);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCurrentClocksEventReasons(
    at: Handle,
    reasons: *mut c_ulonglong,
) -> Return {
    write("nvmlDeviceGetCurrentClocksEventReasons", at, reasons, |known| known.clocks_event_reasons)
}

/// What the same was called before the driver 535.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCurrentClocksThrottleReasons(
    at: Handle,
    reasons: *mut c_ulonglong,
) -> Return {
    write("nvmlDeviceGetCurrentClocksThrottleReasons", at, reasons, |known| {
        known.clocks_event_reasons
    })
}

/// In milliwatts, like the other limits. The least of all limits: there is one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetEnforcedPowerLimit(at: Handle, limit: *mut c_uint) -> Return {
    write("nvmlDeviceGetEnforcedPowerLimit", at, limit, |known| known.power_limit_mw)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetPowerManagementLimit(
    at: Handle,
    limit: *mut c_uint,
) -> Return {
    write("nvmlDeviceGetPowerManagementLimit", at, limit, |known| known.power_limit_mw)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetPowerManagementDefaultLimit(
    at: Handle,
    limit: *mut c_uint,
) -> Return {
    write("nvmlDeviceGetPowerManagementDefaultLimit", at, limit, |known| {
        known.default_power_limit_mw
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetPersistenceMode(at: Handle, mode: *mut c_uint) -> Return {
    write("nvmlDeviceGetPersistenceMode", at, mode, |known| known.persistence.map(c_uint::from))
}

/// `nvmlConfComputeSystemState_t`.
#[repr(C)]
pub struct ConfComputeState {
    environment: c_uint,
    ccFeature: c_uint,
    devToolsMode: c_uint,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetConfComputeState(state: *mut ConfComputeState) -> Return {
    system("nvmlSystemGetConfComputeState", |fake| {
        let on = fake.health.confidential.ok_or(Return::NotSupported)?;
        let environment = if on { PRODUCTION } else { NO_ENVIRONMENT };
        let answer = ConfComputeState { environment, ccFeature: on.into(), devToolsMode: 0 };
        // SAFETY: see above.
        unsafe { state.write(answer) };
        Ok(())
    })
}
