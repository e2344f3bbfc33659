//! `CUresult`: the codes that are answered here, and what the driver says of each.
//!
//! *Invariant:* numbers and texts are those of `cuda.h`.

use std::ffi::{CStr, c_int};

/// What a function does: give its answer, or fail with a `CUresult`.
pub type Answer<T = ()> = Result<T, c_int>;

macro_rules! codes {
    ($($name:ident = $number:literal, $text:literal;)*) => {
        $(pub const $name: c_int = $number;)*

        /// The driver's text for a code.
        pub fn text(code: c_int) -> Option<&'static CStr> {
            match code {
                $($number => Some($text),)*
                _ => None,
            }
        }

        /// The code's name in `cuda.h`.
        pub fn name(code: c_int) -> Option<&'static CStr> {
            match code {
                $($number => CStr::from_bytes_with_nul(
                    concat!("CUDA_ERROR_", stringify!($name), "\0").as_bytes()
                ).ok(),)*
                _ => None,
            }
        }
    };
}

/// Success has another name in `cuda.h` than errors have.
pub const DONE: c_int = 0;

codes! {
    INVALID_VALUE = 1, c"invalid argument";
    OUT_OF_MEMORY = 2, c"out of memory";
    NOT_INITIALIZED = 3, c"initialization error";
    DEINITIALIZED = 4, c"driver shutting down";
    DEVICE_UNAVAILABLE = 46, c"CUDA-capable device(s) is/are busy or unavailable";
    NO_DEVICE = 100, c"no CUDA-capable device is detected";
    INVALID_DEVICE = 101, c"invalid device ordinal";
    INVALID_CONTEXT = 201, c"invalid device context";
    MAP_FAILED = 205, c"mapping of buffer object failed";
    NO_BINARY_FOR_GPU = 209, c"no kernel image is available for execution on the device";
    ECC_UNCORRECTABLE = 214, c"uncorrectable ECC error encountered";
    PEER_ACCESS_UNSUPPORTED = 217, c"peer access is not supported between these two devices";
    NVLINK_UNCORRECTABLE = 220, c"uncorrectable NVLink error detected during the execution";
    UNSUPPORTED_PTX_VERSION = 222, c"the provided PTX was compiled with an unsupported toolchain.";
    CONTAINED = 226, c"Invalid access of peer GPU memory over nvlink or a hardware error";
    INVALID_HANDLE = 400, c"invalid resource handle";
    NOT_FOUND = 500, c"named symbol not found";
    NOT_READY = 600, c"device not ready";
    ILLEGAL_ADDRESS = 700, c"an illegal memory access was encountered";
    LAUNCH_OUT_OF_RESOURCES = 701, c"too many resources requested for launch";
    LAUNCH_TIMEOUT = 702, c"the launch timed out and was terminated";
    PEER_ACCESS_ALREADY_ENABLED = 704, c"peer access is already enabled";
    PEER_ACCESS_NOT_ENABLED = 705, c"peer access has not been enabled";
    CONTEXT_IS_DESTROYED = 709, c"context is destroyed";
    ASSERT = 710, c"device-side assert triggered";
    TOO_MANY_PEERS = 711, c"peer mapping resources exhausted";
    HOST_MEMORY_ALREADY_REGISTERED = 712, c"part or all of the requested memory range is already mapped";
    HOST_MEMORY_NOT_REGISTERED = 713, c"pointer does not correspond to a registered memory region";
    HARDWARE_STACK_ERROR = 714, c"hardware stack error";
    ILLEGAL_INSTRUCTION = 715, c"an illegal instruction was encountered";
    MISALIGNED_ADDRESS = 716, c"misaligned address";
    INVALID_ADDRESS_SPACE = 717, c"operation not supported on global/shared address space";
    INVALID_PC = 718, c"invalid program counter";
    LAUNCH_FAILED = 719, c"unspecified launch failure";
    TENSOR_MEMORY_LEAK = 721, c"tensor memory not completely deallocated";
    NOT_SUPPORTED = 801, c"operation not supported";
    SYSTEM_NOT_READY = 802, c"system not yet initialized";
    SYSTEM_DRIVER_MISMATCH = 803, c"system has unsupported display driver / cuda driver combination";
    COMPAT_NOT_SUPPORTED_ON_DEVICE = 804, c"forward compatibility was attempted on non supported HW";
    MPS_CLIENT_TERMINATED = 810, c"the MPS client has been terminated";
    EXTERNAL_DEVICE = 911, c"an asynchronous error has occurred in external entity outside of CUDA";
    UNKNOWN = 999, c"unknown error";
}
