//! What NVML tells of the NVLink fabric that a GPU is registered with.

use std::ffi::{c_uchar, c_uint};

use crate::abi::Return;
use crate::{Handle, device};

// SAFETY of all functions here: NVML's contract says what the pointers point to; the callers keep it.

/// `NVML_GPU_FABRIC_STATE_NOT_SUPPORTED` and `…_COMPLETED`.
const NOT_SUPPORTED: c_uchar = 0;
const COMPLETED: c_uchar = 3;

/// `nvmlGpuFabricInfo_t`.
#[repr(C)]
pub struct FabricInfo {
    clusterUuid: [c_uchar; 16],
    status: Return,
    cliqueId: c_uint,
    state: c_uchar,
}

/// The beginning that all versions of `nvmlGpuFabricInfoV_t` share.
#[repr(C)]
pub struct FabricInfoV {
    version: c_uint,
    clusterUuid: [c_uchar; 16],
    status: Return,
    cliqueId: c_uint,
    state: c_uchar,
    healthMask: c_uint,
}

/// A machine of its own with NVSwitches has a fabric without a cluster's name.
fn state(switches: Option<u32>) -> c_uchar {
    if switches.is_some_and(|switches| switches > 0) { COMPLETED } else { NOT_SUPPORTED }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetGpuFabricInfo(at: Handle, info: *mut FabricInfo) -> Return {
    device("nvmlDeviceGetGpuFabricInfo", at, |fake, _| {
        let state = state(fake.machine.nvswitch);
        // SAFETY: see above.
        unsafe {
            info.write(FabricInfo {
                clusterUuid: [0; 16],
                status: Return::Success,
                cliqueId: 0,
                state,
            });
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetGpuFabricInfoV(at: Handle, info: *mut FabricInfoV) -> Return {
    device("nvmlDeviceGetGpuFabricInfoV", at, |fake, _| {
        // SAFETY: see above; what later versions have beyond this is left alone.
        let info = unsafe { &mut *info };
        info.clusterUuid = [0; 16];
        info.status = Return::Success;
        info.cliqueId = 0;
        info.state = state(fake.machine.nvswitch);
        info.healthMask = 0;
        Ok(())
    })
}
