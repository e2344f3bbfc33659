//! What the user can do about what the driver says.

use std::ffi::c_int;

/// Where there is no libcuda.
pub(super) const NO_LIBRARY: &str =
    "the driver has it; in a container, NVIDIA_DRIVER_CAPABILITIES must include compute";

/// By the driver's code (`CUresult`, cuda.h), for those that say that no program can use a GPU.
pub(super) fn of(code: c_int) -> Option<&'static str> {
    Some(match code {
        46 => {
            "another process has the GPU to itself, or nobody may use it: nvidia-smi -q -d COMPUTE \
             shows the mode, nvidia-smi -c DEFAULT changes it"
        }
        100 => {
            "in a container, give it the GPUs (--gpus all, NVIDIA_DRIVER_CAPABILITIES=compute,utility); \
             otherwise see CUDA_VISIBLE_DEVICES"
        }
        802 => {
            "the NVSwitches are not ready: systemctl status nvidia-fabricmanager, whose version must \
             be the driver's"
        }
        803 => {
            "libcuda and the kernel module have different versions: reboot after an upgrade; in a \
             container, a libcuda of the image stands before the driver's"
        }
        804 => {
            "the image's cuda-compat does not fit this GPU or driver: take its directory \
             (/usr/local/cuda/compat) from LD_LIBRARY_PATH"
        }
        999 => {
            "is /dev/nvidia-uvm there, and may this user open it? nvidia-modprobe -u makes it; in a \
             container, NVIDIA_DRIVER_CAPABILITIES must include compute"
        }
        _ => return None,
    })
}
