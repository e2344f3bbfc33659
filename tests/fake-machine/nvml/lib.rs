//! A `libnvidia-ml.so.1` without a GPU: NVML's own interface over a described machine.
//!
//! Does not use the project's code, so that the two cannot be wrong together. Follows `nvml.h` of
//! the CUDA toolkit. The description is the JSON that `topo -o json` prints, in the file that
//! `CUDA_CLUSTER_FAKE_NVML` names; `health.json` beside it says how the GPUs are (see `health`), and
//! `CUDA_CLUSTER_FAKE_FAULTS` how to misbehave (see `faults`).
//!
//! *Invariant:* what description and health don't tell is answered with `NVML_ERROR_NOT_SUPPORTED`.

#![allow(unsafe_code)]
// The names are NVML's, and `nvml.h` documents them.
#![allow(non_snake_case, missing_docs, unreachable_pub, clippy::missing_safety_doc)]

mod abi;
mod devices;
mod events;
mod fabric;
mod faults;
mod health;
#[allow(dead_code, reason = "only the driver takes memory")]
mod ledger;
mod links;
mod machine;

use std::ffi::{c_char, c_int, c_uint};
use std::path::Path;
use std::sync::OnceLock;

use abi::{Answer, Return, text};
use faults::Faults;
use health::Health;
use machine::{Gpu, Machine, Mig};

/// The machine, its health and the faults, read by the first initialisation.
struct Fake {
    machine: Machine,
    health: Health,
    faults: Faults,
}

static FAKE: OnceLock<Result<Fake, Return>> = OnceLock::new();

fn read() -> Result<Fake, Return> {
    let path = std::env::var_os("CUDA_CLUSTER_FAKE_NVML").ok_or(Return::DriverNotLoaded)?;
    let text = std::fs::read_to_string(&path).map_err(|_| Return::DriverNotLoaded)?;
    let machine = serde_json::from_str(&text).map_err(|_| Return::Unknown)?;
    let health = Health::beside(Path::new(&path))?;
    let faults = std::env::var("CUDA_CLUSTER_FAKE_FAULTS").unwrap_or_default();
    Ok(Fake { machine, health, faults: faults.parse().map_err(|()| Return::Unknown)? })
}

fn fake() -> Answer<&'static Fake> {
    FAKE.get().ok_or(Return::Uninitialized)?.as_ref().map_err(|error| *error)
}

/// A function that needs no GPU.
fn system(function: &str, answer: impl FnOnce(&'static Fake) -> Answer) -> Return {
    Return::of(fake().and_then(|fake| {
        fake.faults.call(function)?;
        answer(fake)
    }))
}

/// A whole GPU, or a MIG instance of one.
#[derive(Clone, Copy)]
enum Target {
    Gpu(&'static Gpu),
    Mig(&'static Gpu, &'static Mig),
}

impl Target {
    fn gpu(self) -> &'static Gpu {
        match self {
            Target::Gpu(gpu) | Target::Mig(gpu, _) => gpu,
        }
    }
}

/// NVML's `nvmlDevice_t`: the GPU's position and, above it, the MIG slot, both from 1.
type Handle = usize;

fn handle(position: usize, slot: Option<usize>) -> Handle {
    (position + 1) | (slot.map_or(0, |slot| slot + 1) << 16)
}

impl Fake {
    fn target(&'static self, handle: Handle) -> Answer<Target> {
        let position = (handle & 0xffff).checked_sub(1).ok_or(Return::InvalidArgument)?;
        let gpu = self.machine.gpus.get(position).ok_or(Return::InvalidArgument)?;
        match (handle >> 16).checked_sub(1) {
            None => Ok(Target::Gpu(gpu)),
            Some(slot) => Ok(Target::Mig(gpu, gpu.mig.get(slot).ok_or(Return::InvalidArgument)?)),
        }
    }
}

/// A function of a GPU or MIG instance.
fn device(
    function: &str,
    handle: Handle,
    answer: impl FnOnce(&'static Fake, Target) -> Answer,
) -> Return {
    system(function, |fake| {
        let target = fake.target(handle)?;
        fake.faults.gpu(target.gpu().index)?;
        answer(fake, target)
    })
}

fn initialise() -> Return {
    let answer = FAKE.get_or_init(read).as_ref().map_err(|error| *error);
    Return::of(answer.and_then(|fake| {
        fake.faults.call("nvmlInit")?;
        fake.faults.initialisation()
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit_v2() -> Return {
    initialise()
}

/// The first version, which PyTorch calls.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit() -> Return {
    initialise()
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInitWithFlags(_flags: c_uint) -> Return {
    initialise()
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlErrorString(code: c_uint) -> *const c_char {
    let text = match code {
        0 => c"The operation was successful",
        1 => c"NVML was not first initialized with nvmlInit()",
        2 => c"A supplied argument is invalid",
        3 => c"The requested operation is not available on target device",
        4 => c"The current user does not have permission for operation",
        6 => c"A query to find an object was unsuccessful",
        7 => c"An input argument is not large enough",
        9 => c"NVIDIA driver is not loaded",
        10 => c"User provided timeout passed",
        15 => c"The GPU has fallen off the bus or has otherwise become inaccessible",
        18 => c"RM has detected an NVML/RM version mismatch",
        _ => c"An internal driver error occurred",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlShutdown() -> Return {
    system("nvmlShutdown", |_| Ok(()))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetDriverVersion(version: *mut c_char, size: c_uint) -> Return {
    system("nvmlSystemGetDriverVersion", |fake| {
        // SAFETY: NVML's contract: `version` has room for `size` bytes.
        unsafe { text(fake.machine.driver.as_deref().unwrap_or("580.95.05"), version, size) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetCudaDriverVersion_v2(version: *mut c_int) -> Return {
    system("nvmlSystemGetCudaDriverVersion_v2", |fake| {
        let (major, minor) = fake.machine.cuda.as_deref().unwrap_or("13.0").split_once('.').unzip();
        let number = |text: Option<&str>| text.and_then(|t| t.parse::<c_int>().ok()).unwrap_or(0);
        // SAFETY: NVML's contract: `version` points to an int.
        unsafe { version.write(number(major) * 1000 + number(minor) * 10) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCount_v2(count: *mut c_uint) -> Return {
    system("nvmlDeviceGetCount_v2", |fake| {
        let last = fake.machine.gpus.iter().map(|gpu| gpu.index).max();
        // SAFETY: NVML's contract: `count` points to an unsigned int.
        unsafe { count.write(last.map_or(0, |last| last + 1)) };
        Ok(())
    })
}

/// Finds a GPU and hands its handle out.
fn find(
    function: &str,
    found: *mut Handle,
    wanted: impl Fn(&Gpu) -> bool,
    missing: Return,
) -> Return {
    system(function, |fake| {
        let position = fake.machine.gpus.iter().position(wanted).ok_or(missing)?;
        fake.faults.handle(fake.machine.gpus[position].index)?;
        // SAFETY: NVML's contract: the last argument of these functions points to a device handle.
        unsafe { found.write(handle(position, None)) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByIndex_v2(at: c_uint, found: *mut Handle) -> Return {
    let wanted = |gpu: &Gpu| gpu.index == at;
    // A number that the description skips: that GPU was lost before it was described.
    find("nvmlDeviceGetHandleByIndex_v2", found, wanted, Return::GpuIsLost)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByUUID(
    uuid: *const c_char,
    found: *mut Handle,
) -> Return {
    // SAFETY: NVML's contract: `uuid` is a C string.
    let uuid = unsafe { std::ffi::CStr::from_ptr(uuid) }.to_str().unwrap_or_default();
    let wanted = |gpu: &Gpu| gpu.uuid.as_deref() == Some(uuid);
    find("nvmlDeviceGetHandleByUUID", found, wanted, Return::NotFound)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByPciBusId_v2(
    place: *const c_char,
    found: *mut Handle,
) -> Return {
    // SAFETY: NVML's contract: `place` is a C string.
    let place = unsafe { std::ffi::CStr::from_ptr(place) }.to_str().unwrap_or_default();
    let place = abi::Place::read(place);
    let wanted =
        |gpu: &Gpu| place.is_some() && gpu.pci.as_deref().and_then(abi::Place::read) == place;
    find("nvmlDeviceGetHandleByPciBusId_v2", found, wanted, Return::NotFound)
}
