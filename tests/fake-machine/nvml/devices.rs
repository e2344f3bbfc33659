//! What NVML tells of a GPU: identity, memory, MIG instances, affinity.

use std::ffi::{c_char, c_int, c_uint, c_ulong};
use std::path::PathBuf;

use crate::abi::{
    Answer, Attributes, Memory, MemoryV2, PciInfo, Place, ProcessInfo, Return, Utilization, text,
};
use crate::ledger::Ledger;
use crate::machine::members;
use crate::{Handle, Target, device, fake, handle};

// SAFETY of all functions here: NVML's contract says what the pointers point to, and that buffers
// have the given size; the callers keep it.

fn told<T>(fact: Option<T>) -> Answer<T> {
    fact.ok_or(Return::NotSupported)
}

/// Writes one value where NVML's caller wants it.
macro_rules! answer {
    ($(#[$doc:meta])* $name:ident, $out:ty, $fact:expr) => {
        $(#[$doc])*
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(at: Handle, out: *mut $out) -> Return {
            device(stringify!($name), at, |_, target| {
                let fact: fn(Target) -> Answer<$out> = $fact;
                let fact = fact(target)?;
                // SAFETY: see above.
                unsafe { out.write(fact) };
                Ok(())
            })
        }
    };
}

/// Writes one text where NVML's caller wants it.
macro_rules! answer_text {
    ($name:ident, $fact:expr) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(at: Handle, room: *mut c_char, size: c_uint) -> Return {
            device(stringify!($name), at, |_, target| {
                let fact: fn(Target) -> Answer<String> = $fact;
                // SAFETY: see above.
                unsafe { text(&fact(target)?, room, size) }
            })
        }
    };
}

answer_text!(nvmlDeviceGetUUID, |target| match target {
    Target::Gpu(gpu) => told(gpu.uuid.clone()),
    Target::Mig(_, mig) => Ok(mig.uuid.clone()),
});

answer_text!(nvmlDeviceGetName, |target| match target {
    Target::Gpu(gpu) => told(gpu.name.clone()),
    Target::Mig(gpu, mig) => Ok(format!("{} MIG {}", told(gpu.name.as_ref())?, mig.profile)),
});

answer!(nvmlDeviceGetIndex, c_uint, |target| Ok(target.gpu().index));

answer!(nvmlDeviceGetMinorNumber, c_uint, |target| Ok(target.gpu().index));

answer!(nvmlDeviceGetPciInfo_v3, PciInfo, |target| {
    told(target.gpu().pci.as_deref().and_then(Place::read)).map(Place::info)
});

fn memory_bytes(target: Target) -> Answer<u64> {
    told(match target {
        Target::Gpu(gpu) => gpu.memory_bytes,
        Target::Mig(_, mig) => mig.memory_bytes,
    })
}

/// What all processes have of the memory; of a GPU, those in its instances, too.
fn used_bytes(target: Target) -> u64 {
    let Some(path) = std::env::var_os("CUDA_CLUSTER_FAKE_NVML").map(PathBuf::from) else {
        return 0;
    };
    let used = |slot, capacity: Option<u64>| {
        let capacity = usize::try_from(capacity.unwrap_or(0)).unwrap_or(0);
        Ledger::look(&path, target.gpu().index, slot, capacity) as u64
    };
    let instances = target.gpu().mig.iter().enumerate();
    match target {
        Target::Gpu(gpu) => {
            let instances = instances.map(|(slot, mig)| used(Some(slot), mig.memory_bytes));
            used(None, gpu.memory_bytes) + instances.sum::<u64>()
        }
        Target::Mig(_, mig) => {
            let mut own = instances.filter(|(_, other)| other.uuid == mig.uuid);
            own.next().map_or(0, |(slot, _)| used(Some(slot), mig.memory_bytes))
        }
    }
}

answer!(nvmlDeviceGetMemoryInfo, Memory, |target| {
    let (total, used) = (memory_bytes(target)?, used_bytes(target));
    Ok(Memory { total, free: total.saturating_sub(used), used })
});

// `nvmlBAR1Memory_t` has the same three fields.
answer!(nvmlDeviceGetBAR1MemoryInfo, Memory, |target| {
    told(target.gpu().bar1_bytes).map(|total| Memory { total, free: total, used: 0 })
});

// `nvmlComputeMode_t`.
answer!(nvmlDeviceGetComputeMode, c_uint, |target| {
    told(target.gpu().compute_mode.as_deref()).and_then(|mode| match mode {
        "default" => Ok(0),
        "prohibited" => Ok(2),
        "exclusive_process" => Ok(3),
        _ => Err(Return::Unknown),
    })
});

// Nothing computes here by itself; of an instance the driver does not tell it.
answer!(nvmlDeviceGetUtilizationRates, Utilization, |target| match target {
    Target::Gpu(gpu) => {
        Ok(Utilization { gpu: fake()?.faults.busy_percent(gpu.index), memory: 0 })
    }
    Target::Mig(..) => Err(Return::NotSupported),
});

answer!(nvmlDeviceIsMigDeviceHandle, c_uint, |target| {
    Ok(c_uint::from(matches!(target, Target::Mig(..))))
});

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(
    at: Handle,
    found: *mut Handle,
) -> Return {
    device("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", at, |_, target| {
        let Target::Mig(..) = target else { return Err(Return::InvalidArgument) };
        // SAFETY: see above.
        unsafe { found.write(handle((at & 0xffff) - 1, None)) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMemoryInfo_v2(at: Handle, out: *mut MemoryV2) -> Return {
    device("nvmlDeviceGetMemoryInfo_v2", at, |_, target| {
        let total = memory_bytes(target)?;
        // SAFETY: see above.
        let version = unsafe { (*out).version };
        if version != c_uint::try_from(size_of::<MemoryV2>()).unwrap_or(0) | (2 << 24) {
            return Err(Return::InvalidArgument);
        }
        let used = used_bytes(target);
        let answer =
            MemoryV2 { version, total, reserved: 0, free: total.saturating_sub(used), used };
        // SAFETY: see above.
        unsafe { out.write(answer) };
        Ok(())
    })
}

answer!(/** In milliwatts. */ nvmlDeviceGetPowerUsage, c_uint, |target| {
    Ok(300_000 + 1000 * target.gpu().index)
});

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetTemperature(
    at: Handle,
    _sensor: c_uint,
    out: *mut c_uint,
) -> Return {
    device("nvmlDeviceGetTemperature", at, |_, target| {
        // SAFETY: see above.
        unsafe { out.write(40 + target.gpu().index) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCudaComputeCapability(
    at: Handle,
    major: *mut c_int,
    minor: *mut c_int,
) -> Return {
    device("nvmlDeviceGetCudaComputeCapability", at, |_, target| {
        let capability = told(target.gpu().capability())?;
        // SAFETY: see above.
        unsafe {
            major.write(capability.0);
            minor.write(capability.1);
        }
        Ok(())
    })
}

/// The PCIe generation of a transfer rate.
fn generation(gt_per_s: Option<f64>) -> Answer<c_uint> {
    let rates = [2.5, 5.0, 8.0, 16.0, 32.0, 64.0];
    let at = rates.iter().position(|rate| gt_per_s.is_some_and(|own| (own - rate).abs() < 0.1));
    told(at.and_then(|at| c_uint::try_from(at + 1).ok()))
}

answer!(nvmlDeviceGetCurrPcieLinkGeneration, c_uint, |target| {
    generation(target.gpu().pcie.as_ref().and_then(|pcie| pcie.gt_per_s))
});

answer!(nvmlDeviceGetMaxPcieLinkGeneration, c_uint, |target| {
    generation(target.gpu().pcie.as_ref().and_then(|pcie| pcie.max_gt_per_s))
});

answer!(nvmlDeviceGetCurrPcieLinkWidth, c_uint, |target| {
    told(target.gpu().pcie.as_ref().and_then(|pcie| pcie.width))
});

answer!(nvmlDeviceGetMaxPcieLinkWidth, c_uint, |target| {
    told(target.gpu().pcie.as_ref().and_then(|pcie| pcie.max_width))
});

// The kernel's `numa_status` tells it for the V100 of POWER9; NVML from Hopper on.
answer!(nvmlDeviceGetNumaNodeId, c_uint, |target| {
    let gpu = target.gpu();
    told(gpu.memory_numa.filter(|_| gpu.capability().is_some_and(|c| c >= (9, 0))))
});

answer!(nvmlDeviceGetDisplayActive, c_uint, |target| {
    told(target.gpu().display).map(c_uint::from)
});

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMigMode(
    at: Handle,
    current: *mut c_uint,
    pending: *mut c_uint,
) -> Return {
    device("nvmlDeviceGetMigMode", at, |fake, target| {
        let mode = told(target.gpu().mig_mode)?;
        let health = fake.health.gpu(target.gpu().index);
        let next = health.and_then(|health| health.mig_pending).unwrap_or(mode);
        // SAFETY: see above.
        unsafe {
            current.write(mode.into());
            pending.write(next.into());
        }
        Ok(())
    })
}

// One more than there are, so that an empty slot is met.
answer!(nvmlDeviceGetMaxMigDeviceCount, c_uint, |target| {
    Ok(c_uint::try_from(target.gpu().mig.len() + 1).unwrap_or(0))
});

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMigDeviceHandleByIndex(
    at: Handle,
    slot: c_uint,
    found: *mut Handle,
) -> Return {
    device("nvmlDeviceGetMigDeviceHandleByIndex", at, |_, target| {
        let slot = usize::try_from(slot).map_err(|_| Return::InvalidArgument)?;
        target.gpu().mig.get(slot).ok_or(Return::NotFound)?;
        let position = (at & 0xffff) - 1;
        // SAFETY: see above.
        unsafe { found.write(handle(position, Some(slot))) };
        Ok(())
    })
}

answer!(nvmlDeviceGetAttributes_v2, Attributes, |target| {
    let Target::Mig(_, mig) = target else { return Err(Return::NotSupported) };
    // `1c.3g.20gb`, `3g.20gb`
    let count = |unit: char| {
        let part = mig.profile.split('.').find_map(|part| part.strip_suffix(unit));
        part.and_then(|digits| digits.parse::<c_uint>().ok())
    };
    let slices = told(count('g'))?;
    Ok(Attributes {
        multiprocessorCount: slices * 14,
        sharedCopyEngineCount: slices,
        sharedDecoderCount: 0,
        sharedEncoderCount: 0,
        sharedJpegCount: 0,
        sharedOfaCount: 0,
        gpuInstanceSliceCount: slices,
        computeInstanceSliceCount: count('c').unwrap_or(slices),
        memorySizeMB: told(mig.memory_bytes)? >> 20,
    })
});

/// Writes a mask, the lowest word first.
unsafe fn mask(bits: &[usize], size: c_uint, words: *mut c_ulong) -> Answer {
    let size = usize::try_from(size).map_err(|_| Return::InvalidArgument)?;
    // SAFETY: see above.
    let words = unsafe { std::slice::from_raw_parts_mut(words, size) };
    words.fill(0);
    for bit in bits {
        *words.get_mut(bit / 64).ok_or(Return::InsufficientSize)? |= 1 << (bit % 64);
    }
    Ok(())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCpuAffinity(
    at: Handle,
    size: c_uint,
    words: *mut c_ulong,
) -> Return {
    device("nvmlDeviceGetCpuAffinity", at, |fake, target| {
        let cpus = told(target.gpu().cpus.as_deref())?;
        let cpus = if fake.faults.empty_affinity { "" } else { cpus };
        // SAFETY: see above.
        unsafe { mask(&members(cpus), size, words) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMemoryAffinity(
    at: Handle,
    size: c_uint,
    words: *mut c_ulong,
    _scope: c_uint,
) -> Return {
    device("nvmlDeviceGetMemoryAffinity", at, |fake, target| {
        let node = usize::try_from(told(target.gpu().numa)?).map_err(|_| Return::Unknown)?;
        let nodes: &[usize] = if fake.faults.empty_affinity { &[] } else { &[node] };
        // SAFETY: see above.
        unsafe { mask(nodes, size, words) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(
    at: Handle,
    count: *mut c_uint,
    room: *mut ProcessInfo,
) -> Return {
    // SAFETY: as for NVML.
    unsafe { processes("nvmlDeviceGetComputeRunningProcesses_v3", at, count, room) }
}

/// With the same layout as its successor; Python's `pynvml` asks for it by this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses_v2(
    at: Handle,
    count: *mut c_uint,
    room: *mut ProcessInfo,
) -> Return {
    // SAFETY: as for NVML.
    unsafe { processes("nvmlDeviceGetComputeRunningProcesses_v2", at, count, room) }
}

unsafe fn processes(
    function: &str,
    at: Handle,
    count: *mut c_uint,
    room: *mut ProcessInfo,
) -> Return {
    device(function, at, |fake, target| {
        let ids = &target.gpu().processes;
        let health = fake.health.gpu(target.gpu().index);
        let bytes = health.and_then(|health| health.process_bytes).unwrap_or(1 << 30);
        // SAFETY: see above.
        let size = unsafe { count.replace(c_uint::try_from(ids.len()).unwrap_or(c_uint::MAX)) };
        if ids.len() > usize::try_from(size).unwrap_or(0) {
            return Err(Return::InsufficientSize);
        }
        for (at, pid) in ids.iter().enumerate() {
            let info = ProcessInfo {
                pid: *pid,
                usedGpuMemory: bytes,
                gpuInstanceId: c_uint::MAX,
                computeInstanceId: c_uint::MAX,
            };
            // SAFETY: see above; there is room for as many.
            unsafe { room.add(at).write(info) };
        }
        Ok(())
    })
}
