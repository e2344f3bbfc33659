//! What NVML tells of links: NVLinks, chip-to-chip links, peer access.

use std::ffi::{c_int, c_uint};

use crate::abi::{Answer, FieldValue, PciInfo, Place, Return};
use crate::machine::{Gpu, Machine, NvLink};
use crate::{Fake, Handle, Target, device};

// SAFETY of all functions here: NVML's contract says what the pointers point to; the callers keep it.

fn told<T>(fact: Option<T>) -> Answer<T> {
    fact.ok_or(Return::NotSupported)
}

/// A function of one NVLink.
fn link<T>(
    function: &str,
    at: Handle,
    number: c_uint,
    out: *mut T,
    fact: impl FnOnce(&'static Fake, &'static Gpu, &'static NvLink) -> Answer<T>,
) -> Return {
    device(function, at, |fake, target: Target| {
        let gpu = target.gpu();
        if gpu.nvlinks.is_empty() {
            return Err(Return::NotSupported);
        }
        let link = gpu.nvlinks.iter().find(|link| link.link == number);
        let fact = fact(fake, gpu, link.ok_or(Return::InvalidArgument)?)?;
        // SAFETY: see above.
        unsafe { out.write(fact) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetNvLinkState(
    at: Handle,
    number: c_uint,
    active: *mut c_uint,
) -> Return {
    link("nvmlDeviceGetNvLinkState", at, number, active, |_, _, link| Ok(c_uint::from(link.active)))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetNvLinkVersion(
    at: Handle,
    number: c_uint,
    version: *mut c_uint,
) -> Return {
    link("nvmlDeviceGetNvLinkVersion", at, number, version, |_, _, link| told(link.version))
}

/// `nvmlIntNvLinkDeviceType_t`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetNvLinkRemoteDeviceType(
    at: Handle,
    number: c_uint,
    kind: *mut c_uint,
) -> Return {
    link("nvmlDeviceGetNvLinkRemoteDeviceType", at, number, kind, |fake, _, link| {
        if fake.faults.untold_far_ends {
            return Err(Return::NotSupported);
        }
        Ok(match link.peer.as_str() {
            "cpu" => 1,
            "switch" => 2,
            "unknown" => 255,
            _ => 0,
        })
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetNvLinkRemotePciInfo_v2(
    at: Handle,
    number: c_uint,
    pci: *mut PciInfo,
) -> Return {
    link("nvmlDeviceGetNvLinkRemotePciInfo_v2", at, number, pci, |fake, gpu, link| {
        let hidden = Place { domain: 0x0fff_ffff, bus: 0xff, device: 0x1f };
        if fake.faults.hidden_far_ends {
            return Ok(hidden.info());
        }
        let place = match link.peer.as_str() {
            "switch" => switch(&fake.machine, gpu, link).unwrap_or(hidden),
            "cpu" | "unknown" => hidden,
            place => told(Place::read(place))?,
        };
        Ok(place.info())
    })
}

/// The NVSwitch that a link ends in: dealt out in turn, at `fffe:00:00.0`, `fffe:00:01.0`, ….
fn switch(machine: &Machine, gpu: &Gpu, link: &NvLink) -> Option<Place> {
    let switches = machine.nvswitch.filter(|count| *count > 0)?;
    let links = |gpu: &Gpu| gpu.nvlinks.iter().filter(|link| link.peer == "switch").count();
    let before = machine.gpus.iter().take_while(|other| other.index != gpu.index).map(links);
    let here = gpu.nvlinks.iter().filter(|l| l.peer == "switch" && l.link < link.link).count();
    let turn = u32::try_from(before.sum::<usize>() + here).ok()? % switches;
    Some(Place { domain: 0xfffe, bus: turn / 32, device: turn % 32 })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetP2PStatus(
    at: Handle,
    other: Handle,
    _capability: c_uint,
    status: *mut c_uint,
) -> Return {
    device("nvmlDeviceGetP2PStatus", at, |fake, target| {
        let peers = told(target.gpu().peers.as_ref())?;
        let other = fake.target(other)?.gpu().index;
        // `NVML_P2P_STATUS_OK` and `NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED`.
        let answer = if peers.contains(&other) { 0 } else { 1 };
        // SAFETY: see above.
        unsafe { status.write(answer) };
        Ok(())
    })
}

/// `nvmlGpuTopologyLevel_t`. Of pairs that NVLink joins, the description has no PCIe path.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetTopologyCommonAncestor(
    at: Handle,
    other: Handle,
    level: *mut c_uint,
) -> Return {
    device("nvmlDeviceGetTopologyCommonAncestor", at, |fake, target| {
        let names =
            [target.gpu().index, fake.target(other)?.gpu().index].map(|n| format!("GPU{n}"));
        let mut links = fake.machine.links.iter();
        let link = links.find(|link| names.contains(&link.a) && names.contains(&link.b));
        let answer = match told(link)?.kind.as_str() {
            "PIX" => 10,
            "PXB" => 20,
            "PHB" => 30,
            "NODE" => 40,
            "SYS" => 50,
            _ => return Err(Return::NotSupported),
        };
        // SAFETY: see above.
        unsafe { level.write(answer) };
        Ok(())
    })
}

/// `NVML_FI_DEV_*`: number of the links, speeds of the links 0 to 5 and 6 to 11, of a link in the
/// scope, and C2C.
const SPEED_L0: c_uint = 84;
const LINK_COUNT: c_uint = 91;
const SPEED_L6: c_uint = 132;
const SPEED_OF_SCOPE: c_uint = 164;
const C2C_COUNT: c_uint = 170;
const C2C_STATUS: c_uint = 171;
const C2C_SPEED: c_uint = 172;
/// NVLinks' bytes in KiB, sent and received; PCIe's bytes; what a GPU needs to recover.
const NVLINK_SENT: c_uint = 138;
const NVLINK_RECEIVED: c_uint = 139;
const PCIE_SENT: c_uint = 197;
const PCIE_RECEIVED: c_uint = 198;
const RECOVERY_ACTION: c_uint = 230;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetFieldValues(
    at: Handle,
    count: c_int,
    values: *mut FieldValue,
) -> Return {
    device("nvmlDeviceGetFieldValues", at, |fake, target| {
        let count = usize::try_from(count).map_err(|_| Return::InvalidArgument)?;
        if count == 0 {
            return Err(Return::InvalidArgument);
        }
        // SAFETY: see above.
        let values = unsafe { std::slice::from_raw_parts_mut(values, count) };
        for value in values {
            let scoped = fake.faults.call("NVML_FI_DEV_NVLINK_GET_SPEED").is_ok();
            let number = match value.fieldId {
                RECOVERY_ACTION => recovery_action(fake, target),
                _ => field(target.gpu(), value.fieldId, value.scopeId, scoped),
            };
            match number {
                Some(number) => {
                    // `NVML_VALUE_TYPE_UNSIGNED_INT`, `NVML_VALUE_TYPE_UNSIGNED_LONG_LONG`
                    value.valueType = if number > u64::from(u32::MAX) { 3 } else { 1 };
                    value.value = number;
                    value.nvmlReturn = Return::Success;
                }
                None => value.nvmlReturn = Return::NotSupported,
            }
        }
        Ok(())
    })
}

fn field(gpu: &Gpu, field: c_uint, scope: c_uint, scoped_speeds: bool) -> Option<u64> {
    let speed = |number| {
        let link = gpu.nvlinks.iter().find(|link| link.link == number)?;
        megabytes(link.gb_per_s?)
    };
    match field {
        // Of GPUs without NVLinks the driver tells no number.
        LINK_COUNT => u64::try_from(gpu.nvlinks.len()).ok().filter(|links| *links > 0),
        SPEED_L0..=89 => speed(field - SPEED_L0),
        SPEED_L6..=137 => speed(field - SPEED_L6 + 6),
        SPEED_OF_SCOPE if scoped_speeds => speed(scope),
        C2C_COUNT => gpu.c2c.as_ref().map(|c2c| u64::from(c2c.links)),
        C2C_STATUS => gpu.c2c.as_ref().map(|_| 1),
        C2C_SPEED => {
            let c2c = gpu.c2c.as_ref()?;
            megabytes(c2c.gb_per_s? / f64::from(c2c.links))
        }
        NVLINK_SENT | NVLINK_RECEIVED => (!gpu.nvlinks.is_empty()).then(|| moved(4 << 20)),
        PCIE_SENT | PCIE_RECEIVED => Some(moved(1 << 30)),
        _ => None,
    }
}

/// `nvmlDeviceGpuRecoveryAction_t`. MIG instances are not reset on their own.
fn recovery_action(fake: &Fake, target: Target) -> Option<u64> {
    let Target::Gpu(gpu) = target else { return None };
    fake.health.gpu(gpu.index)?.recovery_action.map(u64::from)
}

/// A counter that grows by so much a second.
fn moved(a_second: u64) -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let millis = since.map_or(0, |since| since.as_millis() % 1_000_000_000);
    a_second / 1000 * u64::try_from(millis).unwrap_or(0)
}

fn megabytes(gb_per_s: f64) -> Option<u64> {
    format!("{:.0}", gb_per_s * 1e3).parse().ok()
}
