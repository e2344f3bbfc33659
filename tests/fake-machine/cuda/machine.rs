//! The GPUs that the process sees: those of the description that `CUDA_VISIBLE_DEVICES` leaves.
//!
//! *Invariant:* like the driver, the first entry that names no GPU hides itself and all after it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::codes::{Answer, NO_DEVICE, UNKNOWN};
use crate::faults::Faults;
use crate::ledger::Ledger;
use crate::nvml_machine::{Gpu, Machine};

/// Of a GPU in a machine without NVSwitches (CUDA C++ Programming Guide, "Peer-to-Peer Memory
/// Access").
const MOST_PEERS: usize = 8;

pub struct Device {
    /// NVML's number.
    pub index: u32,
    pub name: String,
    pub uuid: [u8; 16],
    pub domain: u32,
    pub bus: u32,
    pub slot: u32,
    pub capability: (i32, i32),
    pub memory_bytes: usize,
    /// The GPUs that it has peer access to, by NVML's numbers; `None` for all.
    peers: Option<Vec<u32>>,
    is_mig: bool,
    /// How many peers it may have at a time; `None` for all, through NVSwitches.
    pub most_peers: Option<usize>,
    compute_mode: Option<String>,
    /// What all processes have of its memory.
    pub ledger: Arc<Ledger>,
}

impl Device {
    /// Whether this process may have a context there.
    pub fn may_be_used(&self) -> bool {
        match self.compute_mode.as_deref() {
            Some("prohibited") => false,
            Some("exclusive_process") => self.ledger.claim(),
            _ => true,
        }
    }

    /// Whether it can map another's memory, as `cuDeviceCanAccessPeer` says. MIG instances have no
    /// peers (NVIDIA's MIG user guide: no GPU to GPU P2P, either PCIe or NVLink).
    pub fn reaches(&self, other: &Device) -> bool {
        if self.uuid == other.uuid {
            return true;
        }
        let known = self.peers.as_ref().is_none_or(|peers| peers.contains(&other.index));
        known && !self.is_mig && !other.is_mig
    }
}

/// The version of CUDA in the description, as the driver counts it (12.8: 12080).
pub fn driver_version() -> i32 {
    let described = description().ok().and_then(|(_, machine)| machine.cuda);
    let (major, minor) = described.as_deref().unwrap_or("13.0").split_once('.').unzip();
    let number = |part: Option<&str>| part.and_then(|part| part.parse().ok()).unwrap_or(0);
    number(major) * 1000 + number(minor) * 10
}

fn description() -> Answer<(PathBuf, Machine)> {
    let path = std::env::var_os("CUDA_CLUSTER_FAKE_NVML").map(PathBuf::from).ok_or(NO_DEVICE)?;
    let text = std::fs::read_to_string(&path).map_err(|_| NO_DEVICE)?;
    let machine = serde_json::from_str(&text).map_err(|_| NO_DEVICE)?;
    Ok((path, machine))
}

/// Reads the description.
pub fn devices(faults: &Faults) -> Answer<Vec<Device>> {
    let (path, machine) = description()?;
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let mut named: Vec<(&Gpu, Option<usize>)> = match &visible {
        None => enumerated(&machine),
        Some(list) => {
            list.split(',').map(str::trim).map_while(|entry| named(&machine, entry)).collect()
        }
    };
    // A process has one instance, and then no GPU (NVIDIA's MIG user guide, "Device enumeration").
    if let Some(instance) = named.iter().find(|(_, slot)| slot.is_some()).copied() {
        named = vec![instance];
    }
    if named.is_empty() {
        return Err(NO_DEVICE);
    }
    let most_peers = machine.nvswitch.is_none_or(|count| count == 0).then_some(MOST_PEERS);
    let all = named.into_iter().map(|(gpu, slot)| {
        let device = device(&path, gpu, slot, faults)?;
        Ok(Device { most_peers, ..device })
    });
    all.collect()
}

/// What CUDA counts where nothing is named: all GPUs that are not in MIG mode, or if there is an
/// instance, the first one alone.
fn enumerated(machine: &Machine) -> Vec<(&Gpu, Option<usize>)> {
    match machine.gpus.iter().find(|gpu| !gpu.mig.is_empty()) {
        Some(gpu) => vec![(gpu, Some(0))],
        None => {
            let whole = machine.gpus.iter().filter(|gpu| gpu.mig_mode != Some(true));
            whole.map(|gpu| (gpu, None)).collect()
        }
    }
}

/// The GPU or MIG instance that an entry names.
fn named<'a>(machine: &'a Machine, entry: &str) -> Option<(&'a Gpu, Option<usize>)> {
    if let Ok(position) = entry.parse::<usize>() {
        return enumerated(machine).get(position).copied();
    }
    if entry.is_empty() {
        return None;
    }
    for gpu in &machine.gpus {
        if let Some(slot) = gpu.mig.iter().position(|mig| mig.uuid.starts_with(entry)) {
            return Some((gpu, Some(slot)));
        }
        if gpu.uuid.as_deref().is_some_and(|uuid| uuid.starts_with(entry)) {
            return Some((gpu, None));
        }
    }
    None
}

fn device(path: &Path, gpu: &Gpu, slot: Option<usize>, faults: &Faults) -> Answer<Device> {
    let ledger = Ledger::open(path, gpu.index, slot).map_err(|_| UNKNOWN)?;
    let mig = slot.and_then(|slot| gpu.mig.get(slot));
    let memory = mig.map_or(gpu.memory_bytes, |mig| mig.memory_bytes);
    let memory = memory.and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(8 << 30);
    let (domain, bus, slot) = gpu.pci.as_deref().and_then(place).unwrap_or((0, gpu.index, 0));
    let name = mig.map(|mig| mig.uuid.as_str()).or(gpu.uuid.as_deref());
    let memory = faults.small.unwrap_or(memory);
    Ok(Device {
        index: gpu.index,
        name: gpu.name.clone().unwrap_or_else(|| "GPU".to_owned()),
        uuid: uuid(name.unwrap_or_default(), gpu.index),
        domain,
        bus,
        slot,
        capability: gpu.capability().unwrap_or((9, 0)),
        memory_bytes: memory - memory % 4096,
        peers: gpu.peers.clone(),
        is_mig: mig.is_some(),
        most_peers: None,
        compute_mode: gpu.compute_mode.clone(),
        ledger: Arc::new(ledger),
    })
}

/// `0000:07:00.0`: domain, bus, device.
pub fn place(text: &str) -> Option<(u32, u32, u32)> {
    let mut parts = text.split([':', '.']).map(|part| u32::from_str_radix(part, 16).ok());
    Some((parts.next()??, parts.next()??, parts.next()??))
}

/// The bytes of `GPU-` and 32 hexadecimal digits; without them some of its own.
fn uuid(text: &str, index: u32) -> [u8; 16] {
    let digits: String = text.split_once('-').map_or("", |(_, rest)| rest).replace('-', "");
    let number = u128::from_str_radix(&digits, 16).unwrap_or(u128::from(index) + 1);
    number.to_be_bytes()
}
