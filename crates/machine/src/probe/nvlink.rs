//! The NVLinks and chip-to-chip links of one GPU.
//!
//! Calls NVML's raw functions for the far end's kind and for speeds: the wrapper drops the former
//! and can't select a link for the latter.
//!
//! *Invariant:* a far end that NVML does not identify is [`NvLinkPeer::Unknown`].

#![allow(unsafe_code)]

use nvml_wrapper::Device;
use nvml_wrapper::error::{NvmlError, nvml_try};
use nvml_wrapper_sys::bindings::{field_id, nvmlFieldValue_t};

use super::questions::Questions;
use cuda_cluster_model::ids::PciAddress;
use cuda_cluster_model::topology::{ChipLinks, NvLink, NvLinkPeer};

/// `NVML_NVLINK_MAX_LINKS`: no GPU has more.
const LINKS: u32 = 18;

/// The links of one GPU.
#[derive(Debug, Default)]
pub(super) struct Wires {
    /// NVLinks by number, including inactive ones.
    pub(super) links: Vec<NvLink>,
    /// Their far ends, as far as NVML gives an address.
    pub(super) remotes: Vec<Remote>,
    /// Links to the CPU of a superchip.
    pub(super) c2c: Option<ChipLinks>,
}

/// The far end of an NVLink.
#[derive(Clone, Copy, Debug)]
pub(super) struct Remote {
    /// Link number on this GPU.
    pub(super) link: u32,
    /// PCI address of the far end.
    pub(super) pci: PciAddress,
}

/// Reads every link of a GPU.
///
/// # Errors
/// If the GPU is lost.
pub(super) fn read(device: &Device<'_>, asked: &mut Questions<'_>) -> Result<Wires, NvmlError> {
    let mut wires = Wires::default();
    for number in 0..LINKS {
        let link = device.link_wrapper_for(number);
        let Some(active) = asked.may("NVLink state", link.is_active())? else { continue };
        let version = asked.may("NVLink version", link.version())?;
        let kind = asked.may("NVLink's far end", remote_kind(device, number))?;
        let place = asked.may("NVLink's far end", link.remote_pci_info())?;
        let place = place.and_then(|pci| pci.bus_id.parse().ok()).filter(is_real);
        wires.remotes.extend(place.map(|pci| Remote { link: number, pci }));
        let peer = match (kind, place) {
            (Some(RemoteKind::Gpu), Some(pci)) => NvLinkPeer::Gpu(pci),
            (Some(RemoteKind::Switch), _) => NvLinkPeer::Switch,
            (Some(RemoteKind::Cpu), _) => NvLinkPeer::Cpu,
            _ => NvLinkPeer::Unknown,
        };
        wires.links.push(NvLink { link: number, active, version, peer, gb_per_s: None });
    }
    speeds(device, &mut wires.links);
    wires.c2c = chip_links(device);
    Ok(wires)
}

/// Machines that hide their switches report an address of all ones.
fn is_real(pci: &PciAddress) -> bool {
    pci.domain < 0x0fff_ffff && *pci != PciAddress { domain: 0, bus: 0, device: 0, function: 0 }
}

enum RemoteKind {
    Gpu,
    Cpu,
    Switch,
    Unknown,
}

/// `nvmlDeviceGetNvLinkRemoteDeviceType`. The wrapper's own method answers `Unknown` always.
fn remote_kind(device: &Device<'_>, link: u32) -> Result<RemoteKind, NvmlError> {
    let function = device.nvml().lib().nvmlDeviceGetNvLinkRemoteDeviceType.as_ref();
    let function = function.map_err(|error| NvmlError::FailedToLoadSymbol(error.to_string()))?;
    let mut kind = u32::MAX;
    // SAFETY: the handle is this live device's, and the function writes one `unsigned int`.
    nvml_try(unsafe { function(device.handle(), link, &raw mut kind) })?;
    Ok(match kind {
        0 => RemoteKind::Gpu,
        1 => RemoteKind::Cpu,
        2 => RemoteKind::Switch,
        _ => RemoteKind::Unknown,
    })
}

/// Sets the links' speeds, with one call for all of them.
///
/// Drivers before 515 know only the older fields, one for each of the first twelve links.
fn speeds(device: &Device<'_>, links: &mut [NvLink]) {
    let scoped = links.iter().map(|link| (field_id::NVML_FI_DEV_NVLINK_GET_SPEED, link.link));
    let older = links.iter().filter_map(|link| Some((older_speed_field(link.link)?, 0)));
    let told = field_values(device, &scoped.chain(older).collect::<Vec<_>>());
    for link in links {
        let of = |field, scope| told.iter().find(|t| (t.field, t.scope) == (field, scope));
        let megabytes = of(field_id::NVML_FI_DEV_NVLINK_GET_SPEED, link.link)
            .or_else(|| of(older_speed_field(link.link)?, 0));
        link.gb_per_s = megabytes.filter(|t| t.value > 0).map(|t| t.value as f64 / 1e3);
    }
}

fn older_speed_field(link: u32) -> Option<u32> {
    match link {
        0..=5 => Some(field_id::NVML_FI_DEV_NVLINK_SPEED_MBPS_L0 + link),
        6..=11 => Some(field_id::NVML_FI_DEV_NVLINK_SPEED_MBPS_L6 + link - 6),
        _ => None,
    }
}

/// The chip-to-chip links of a superchip, if any.
fn chip_links(device: &Device<'_>) -> Option<ChipLinks> {
    let count = field_values(device, &[(field_id::NVML_FI_DEV_C2C_LINK_COUNT, 0)]).first()?.value;
    let count = u32::try_from(count).ok().filter(|count| (1..=LINKS).contains(count))?;
    let wanted: Vec<(u32, u32)> = (0..count)
        .flat_map(|link| {
            [
                (field_id::NVML_FI_DEV_C2C_LINK_GET_STATUS, link),
                (field_id::NVML_FI_DEV_C2C_LINK_GET_MAX_BW, link),
            ]
        })
        .collect();
    let told = field_values(device, &wanted);
    let active: Vec<u32> = told
        .iter()
        .filter(|t| t.field == field_id::NVML_FI_DEV_C2C_LINK_GET_STATUS && t.value == 1)
        .map(|t| t.scope)
        .collect();
    let speeds = told.iter().filter(|t| {
        t.field == field_id::NVML_FI_DEV_C2C_LINK_GET_MAX_BW && active.contains(&t.scope)
    });
    let megabytes: u64 = speeds.map(|t| t.value).sum();
    let gb_per_s = (megabytes > 0).then_some(megabytes as f64 / 1e3);
    u32::try_from(active.len())
        .ok()
        .filter(|links| *links > 0)
        .map(|links| ChipLinks { links, gb_per_s })
}

/// One answer of `nvmlDeviceGetFieldValues`.
pub(super) struct Told {
    pub(super) field: u32,
    scope: u32,
    pub(super) value: u64,
}

/// Field values, each for a scope (a link). Values that the driver does not report are missing.
pub(super) fn field_values(device: &Device<'_>, wanted: &[(u32, u32)]) -> Vec<Told> {
    let Ok(function) = device.nvml().lib().nvmlDeviceGetFieldValues.as_ref() else {
        return Vec::new();
    };
    let mut values: Vec<nvmlFieldValue_t> = wanted
        .iter()
        .map(|(field, scope)| {
            // SAFETY: the C struct consists of integers and a union of numbers; zeros are valid.
            let mut value: nvmlFieldValue_t = unsafe { std::mem::zeroed() };
            (value.fieldId, value.scopeId) = (*field, *scope);
            value
        })
        .collect();
    let Ok(count) = i32::try_from(values.len()) else { return Vec::new() };
    // SAFETY: the handle is this live device's, and the function writes to `count` elements.
    let done = nvml_try(unsafe { function(device.handle(), count, values.as_mut_ptr()) });
    if count == 0 || done.is_err() {
        return Vec::new();
    }
    values.iter().filter_map(told).collect()
}

/// `nvmlValueType_t`: 0 double, 1 unsigned int, 2 unsigned long, 3 unsigned long long, 4 signed.
fn told(value: &nvmlFieldValue_t) -> Option<Told> {
    nvml_try(value.nvmlReturn).ok()?;
    // SAFETY: `valueType` says which member of the union NVML wrote, and it wrote one, since
    // `nvmlReturn` is success.
    let number = unsafe {
        match value.valueType {
            1 => u64::from(value.value.uiVal),
            2 => value.value.ulVal,
            3 => value.value.ullVal,
            _ => return None,
        }
    };
    Some(Told { field: value.fieldId, scope: value.scopeId, value: number })
}
