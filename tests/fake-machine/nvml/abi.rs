//! NVML's types, as `nvml.h` lays them out.
//!
//! *Invariant:* every `repr(C)` type here has the size and order of its namesake in `nvml.h`.

use std::ffi::{c_char, c_uint, c_ulonglong};

/// `nvmlReturn_t`.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Return {
    Success = 0,
    Uninitialized = 1,
    InvalidArgument = 2,
    NotSupported = 3,
    NoPermission = 4,
    NotFound = 6,
    InsufficientSize = 7,
    DriverNotLoaded = 9,
    Timeout = 10,
    GpuIsLost = 15,
    LibRmVersionMismatch = 18,
    Unknown = 999,
}

/// What a function does: write its answer, or fail.
pub type Answer<T = ()> = Result<T, Return>;

impl Return {
    pub fn of(answer: Answer) -> Self {
        answer.err().unwrap_or(Return::Success)
    }
}

/// `nvmlPciInfo_t`.
#[repr(C)]
pub struct PciInfo {
    pub busIdLegacy: [c_char; 16],
    pub domain: c_uint,
    pub bus: c_uint,
    pub device: c_uint,
    pub pciDeviceId: c_uint,
    pub pciSubSystemId: c_uint,
    pub busId: [c_char; 32],
}

/// `nvmlUtilization_t`, in percent.
#[repr(C)]
pub struct Utilization {
    pub gpu: c_uint,
    pub memory: c_uint,
}

/// `nvmlMemory_t`.
#[repr(C)]
pub struct Memory {
    pub total: c_ulonglong,
    pub free: c_ulonglong,
    pub used: c_ulonglong,
}

/// `nvmlMemory_v2_t`.
#[repr(C)]
pub struct MemoryV2 {
    pub version: c_uint,
    pub total: c_ulonglong,
    pub reserved: c_ulonglong,
    pub free: c_ulonglong,
    pub used: c_ulonglong,
}

/// `nvmlDeviceAttributes_t`.
#[repr(C)]
pub struct Attributes {
    pub multiprocessorCount: c_uint,
    pub sharedCopyEngineCount: c_uint,
    pub sharedDecoderCount: c_uint,
    pub sharedEncoderCount: c_uint,
    pub sharedJpegCount: c_uint,
    pub sharedOfaCount: c_uint,
    pub gpuInstanceSliceCount: c_uint,
    pub computeInstanceSliceCount: c_uint,
    pub memorySizeMB: c_ulonglong,
}

/// `nvmlProcessInfo_t`.
#[repr(C)]
pub struct ProcessInfo {
    pub pid: c_uint,
    pub usedGpuMemory: c_ulonglong,
    pub gpuInstanceId: c_uint,
    pub computeInstanceId: c_uint,
}

/// `nvmlFieldValue_t`, whose value is a union of eight bytes.
#[repr(C)]
pub struct FieldValue {
    pub fieldId: c_uint,
    pub scopeId: c_uint,
    pub timestamp: i64,
    pub latencyUsec: i64,
    pub valueType: c_uint,
    pub nvmlReturn: Return,
    pub value: c_ulonglong,
}

/// A PCI address, read from `0000:07:00.0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub domain: u32,
    pub bus: u32,
    pub device: u32,
}

impl Place {
    pub fn read(text: &str) -> Option<Self> {
        let hex = |text| u32::from_str_radix(text, 16).ok();
        let mut parts = text.split([':', '.']);
        let (domain, bus, device) = (parts.next()?, parts.next()?, parts.next()?);
        Some(Self { domain: hex(domain)?, bus: hex(bus)?, device: hex(device)? })
    }

    pub fn info(self) -> PciInfo {
        let Self { domain, bus, device } = self;
        let mut info = PciInfo {
            busIdLegacy: [0; 16],
            domain,
            bus,
            device,
            pciDeviceId: 0x10de,
            pciSubSystemId: 0,
            busId: [0; 32],
        };
        fill(&mut info.busIdLegacy, &format!("{:04X}:{bus:02X}:{device:02X}.0", domain & 0xffff));
        fill(&mut info.busId, &format!("{domain:08X}:{bus:02X}:{device:02X}.0"));
        info
    }
}

fn fill(room: &mut [c_char], text: &str) {
    for (to, from) in room.iter_mut().zip(text.bytes()) {
        *to = c_char::from_ne_bytes([from]); // unsigned on Arm
    }
}

/// Writes a C string.
///
/// # Safety
/// `room` must have room for `size` bytes.
pub unsafe fn text(text: &str, room: *mut c_char, size: c_uint) -> Answer {
    let size = usize::try_from(size).map_err(|_| Return::InvalidArgument)?;
    if text.len() >= size {
        return Err(Return::InsufficientSize);
    }
    // SAFETY: `text` and its final zero fit, as was just checked.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), room, text.len());
        room.add(text.len()).write(0);
    }
    Ok(())
}
