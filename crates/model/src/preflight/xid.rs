//! The driver's error numbers: what each means, and whether hardware is to blame.
//!
//! *Invariant:* a number that NVIDIA does not call a fault of hardware is not one here.

/// The meaning of a number, from NVIDIA's *Xid Errors* guide.
pub fn meaning(xid: u64) -> &'static str {
    match xid {
        8 => "GPU stopped processing",
        13 => "graphics engine exception",
        31 => "GPU memory page fault",
        32 => "invalid or corrupted push buffer stream",
        38 => "driver firmware error",
        43 => "GPU stopped processing",
        45 => "preemptive cleanup, due to previous errors",
        48 => "double bit ECC error",
        61 | 62 => "internal micro-controller halt",
        63 => "ECC page retirement or row remapping recording event",
        64 => "ECC page retirement or row remapper recording failure",
        68 => "video processor exception",
        69 => "graphics engine class error",
        74 => "NVLink error",
        79 => "GPU has fallen off the bus",
        92 => "high single-bit ECC error rate",
        94 => "contained ECC error",
        95 => "uncontained ECC error",
        109 => "context switch timeout",
        119 => "GSP RPC timeout",
        120 => "GSP error",
        121 => "error of the link between the GPU and its CPU (C2C)",
        137 => "NVLink privilege error, of an access to a peer's memory",
        140 => "unrecovered ECC error",
        144..=150 => "NVLink error (5th generation)",
        154 => "the GPU needs a recovery action: see nvidia-smi -q",
        _ => "see NVIDIA's list of Xid errors",
    }
}

/// What to do about a fault of hardware, from the actions in NVIDIA's *Xid Errors* guide.
pub(super) fn remedy(xid: u32) -> &'static str {
    match xid {
        79 => {
            "power the machine off and on; if it comes again, its seat, power and cooling, \
             then the vendor"
        }
        74 | 144..=150 => {
            "nvidia-smi nvlink -e -i GPU, then reset the GPU (nvidia-smi --gpu-reset); if it \
             comes again, the bridge or the board, by the vendor"
        }
        64 => "reset the GPU (nvidia-smi --gpu-reset); rows can no longer be remapped: replace it",
        94 => "start the program that was ended anew, and reset the GPU when it is idle",
        48 | 92 | 95 | 140 => {
            "end its programs and reset the GPU (nvidia-smi --gpu-reset), then dcgmi diag -r 3"
        }
        154 => "nvidia-smi -q -d RECOVERY_ACTION says which",
        _ => "reset the GPU (nvidia-smi --gpu-reset); if it comes again, nvidia-bug-report.sh",
    }
}

/// Whether a number speaks of the GPU or its links, not of a program that used it.
pub(super) fn is_hardware(xid: u32) -> bool {
    matches!(xid, 38 | 48 | 61 | 62 | 64 | 74 | 79 | 92 | 94 | 95 | 119..=121 | 140 | 144..=150 | 154)
}
