//! What NVML tells of the NVLink fabric that a GPU is registered with.

use std::ffi::{c_uchar, c_uint};

use crate::abi::Return;
use crate::machine::Fabric;
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

/// What is filled in: the description's, or for a machine without one that of a GPU in no fabric.
struct Told {
    cluster: [c_uchar; 16],
    status: Return,
    clique: c_uint,
    state: c_uchar,
    health: c_uint,
}

fn told(fabric: Option<&Fabric>) -> Told {
    let Some(fabric) = fabric else {
        let (cluster, status, clique) = ([0; 16], Return::Success, 0);
        return Told { cluster, status, clique, state: NOT_SUPPORTED, health: 0 };
    };
    let digits = fabric.cluster.as_deref().unwrap_or_default().replace('-', "");
    let cluster = u128::from_str_radix(&digits, 16).unwrap_or(0).to_be_bytes();
    let status = if fabric.error.is_some() { Return::Unknown } else { Return::Success };
    let state = match fabric.state.as_str() {
        "not_started" => 1,
        "in_progress" => 2,
        _ => COMPLETED,
    };
    // Each part is 1 where something is wrong and 2 where nothing is; the configuration is 1 then.
    let has = |name: &str| fabric.faults.iter().any(|fault| fault == name);
    let part = |name, shift: u32| (if has(name) { 1 } else { 2 }) << shift;
    let configuration = if has("no_partition") { 4 } else { 1 };
    let health = part("degraded_bandwidth", 0)
        | part("route_recovery", 2)
        | part("route_unhealthy", 4)
        | part("access_timeout_recovery", 6)
        | configuration << 8;
    Told { cluster, status, clique: fabric.clique, state, health }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetGpuFabricInfo(at: Handle, info: *mut FabricInfo) -> Return {
    device("nvmlDeviceGetGpuFabricInfo", at, |_, target| {
        let told = told(target.gpu().fabric.as_ref());
        let (clusterUuid, cliqueId) = (told.cluster, told.clique);
        // SAFETY: see above.
        unsafe {
            info.write(FabricInfo {
                clusterUuid,
                status: told.status,
                cliqueId,
                state: told.state,
            });
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetGpuFabricInfoV(at: Handle, info: *mut FabricInfoV) -> Return {
    device("nvmlDeviceGetGpuFabricInfoV", at, |_, target| {
        // SAFETY: see above; what later versions have beyond this is left alone.
        let info = unsafe { &mut *info };
        let told = told(target.gpu().fabric.as_ref());
        info.clusterUuid = told.cluster;
        info.status = told.status;
        info.cliqueId = told.clique;
        info.state = told.state;
        info.healthMask = told.health;
        Ok(())
    })
}
