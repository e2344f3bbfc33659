//! PCI functions: GPUs, NICs, ConnectX-8's functions beside GPUs, and the ports above them.
//!
//! *Invariant:* what lies beyond the first 64 bytes of a configuration space is read or said to be
//! unseen: the kernel shows it to root alone.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use super::super::Options;
use super::super::sysfs::{first_line, names};
use super::text;
use cuda_cluster_model::ids::PciAddress;
use cuda_cluster_model::preflight::{Function, FunctionRole, Look};
use cuda_cluster_model::topology::Topology;

/// Reads the functions that matter.
pub(super) fn look(options: &Options, topology: &Topology) -> BTreeMap<PciAddress, Function> {
    let all = options.sysfs.join("bus/pci/devices");
    let listed = names(&options.procfs.join("driver/nvidia/gpus"));
    let bridges = topology.bridges.iter().filter_map(|bridge| bridge.id.parse().ok());
    let mut roles: BTreeMap<PciAddress, FunctionRole> =
        bridges.map(|pci| (pci, FunctionRole::Bridge)).collect();
    roles.extend(topology.nics.iter().filter_map(|nic| Some((nic.pci?, FunctionRole::Nic))));
    for name in names(&all) {
        let Ok(pci) = name.parse() else { continue };
        let path = all.join(&name);
        // The class comes first: one read for each function of a machine with hundreds.
        match class_of(&path) {
            Some((0x10de, _, 0x0300 | 0x0302)) if !path.join("physfn").exists() => {
                roles.insert(pci, FunctionRole::Gpu);
            }
            Some((0x15b3, 0x2100, _)) => drop(roles.insert(pci, FunctionRole::DataDirect)),
            _ => {}
        }
    }
    let function = |(pci, role): (PciAddress, FunctionRole)| {
        let path = all.join(pci.to_string());
        let name = pci.to_string();
        path.exists().then(|| (pci, read(&path, role, listed.contains(&name))))
    };
    roles.into_iter().filter_map(function).collect()
}

/// Vendor, device, and class with subclass.
fn class_of(path: &Path) -> Option<(u32, u32, u32)> {
    let uevent = std::fs::read_to_string(path.join("uevent")).ok()?;
    let field =
        |key: &str| uevent.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    let (vendor, device) = field("PCI_ID")?.split_once(':')?;
    let hex = |text: &str| u32::from_str_radix(text, 16).ok();
    Some((hex(vendor)?, hex(device)?, hex(field("PCI_CLASS")?)? >> 8))
}

fn read(path: &Path, role: FunctionRole, listed: bool) -> Function {
    let id = class_of(path).map(|(vendor, device, _)| format!("{vendor:04x}:{device:04x}"));
    let link = |name: &str| {
        let target = std::fs::read_link(path.join(name)).ok()?;
        Some(target.file_name()?.to_str()?.to_owned())
    };
    let uevent = std::fs::read_to_string(path.join("uevent")).unwrap_or_default();
    let driver = uevent.lines().find_map(|line| line.strip_prefix("DRIVER="));
    let iommu_group = link("iommu_group").and_then(|group| group.parse().ok());
    let space = Space::read(path);
    Function {
        id: id.unwrap_or_default(),
        role,
        driver: driver.filter(|name| !name.is_empty()).map(str::to_owned),
        iommu_group,
        // A group without a type is an old kernel's (before 5.11).
        iommu: match iommu_group {
            None => Look::NotThere,
            Some(_) => match text(&path.join("iommu_group/type")) {
                Look::NotThere => {
                    Look::Unseen("the kernel does not tell a group's type".to_owned())
                }
                look => look,
            },
        },
        acs: match role {
            FunctionRole::Bridge => space.acs(),
            _ => Look::NotThere,
        },
        payload_bytes: space.size(5),
        read_request_bytes: space.size(12),
        has_numa: first_line(&path.join("numa_node")).map(|node| node != "-1"),
        listed,
    }
}

/// A configuration space, as far as the kernel shows it.
struct Space(Look<Vec<u8>>);

/// What the kernel shows to everybody.
const PUBLIC: usize = 64;
/// PCI Express' own space begins here.
const EXTENDED: usize = 256;

impl Space {
    fn read(path: &Path) -> Self {
        let file = path.join("config");
        let mut bytes = Vec::with_capacity(4096);
        let read =
            std::fs::File::open(&file).and_then(|file| file.take(4096).read_to_end(&mut bytes));
        Self(match read {
            Ok(length) if length <= PUBLIC => {
                Look::Unseen("root alone may read a configuration space".to_owned())
            }
            Ok(_) => Look::Seen(bytes),
            Err(error) => super::failed(&file, &error),
        })
    }

    /// A value from the bytes; not there if they don't have it.
    fn find<T>(&self, find: impl FnOnce(&[u8]) -> Option<T>) -> Look<T> {
        match &self.0 {
            Look::Seen(bytes) => Look::of(find(bytes)),
            Look::NotThere => Look::NotThere,
            Look::Unseen(why) => Look::Unseen(why.clone()),
        }
    }

    /// The control register of Access Control Services (extended capability 0x000d, offset 6).
    fn acs(&self) -> Look<u16> {
        // Without the extended space nobody can say that it has none.
        if self.0.seen().is_some_and(|bytes| bytes.len() <= EXTENDED) {
            return Look::Unseen("the kernel does not show the extended space".to_owned());
        }
        self.find(|bytes| half(bytes, extended(bytes, 0x000d)? + 6))
    }

    /// A size in the PCI Express capability's device control register (offset 8): three bits from
    /// `shift`, 128 bytes times a power of two.
    fn size(&self, shift: u32) -> Look<u32> {
        self.find(|bytes| {
            let control = half(bytes, express(bytes)? + 8)?;
            Some(128 << (control >> shift & 0x7))
        })
    }
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes([*bytes.get(at)?, *bytes.get(at + 1)?]))
}

/// Where the PCI Express capability (id 0x10) is.
fn express(bytes: &[u8]) -> Option<usize> {
    let mut at = usize::from(*bytes.get(0x34)?);
    // 48 capabilities of four bytes fill the space; more means a loop.
    for _ in 0..48 {
        let (id, next) = (*bytes.get(at)?, *bytes.get(at + 1)?);
        if at < PUBLIC {
            return None;
        }
        if id == 0x10 {
            return Some(at);
        }
        at = usize::from(next);
    }
    None
}

/// Where an extended capability is: a list of headers with an id of 16 bits and the next place.
fn extended(bytes: &[u8], wanted: u16) -> Option<usize> {
    let mut at = EXTENDED;
    for _ in 0..960 {
        let header = u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?);
        if header & 0xffff == u32::from(wanted) {
            return Some(at);
        }
        at = usize::try_from(header >> 20).ok()?;
        if at < EXTENDED {
            return None;
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space(length: usize, edit: impl FnOnce(&mut Vec<u8>)) -> Space {
        let mut bytes = vec![0; length];
        edit(&mut bytes);
        Space(Look::Seen(bytes))
    }

    #[test]
    fn capabilities_are_found_by_their_lists() {
        let whole = space(4096, |bytes| {
            bytes[0x34] = 0x40;
            bytes[0x40..0x42].copy_from_slice(&[0x01, 0x60]);
            bytes[0x60..0x62].copy_from_slice(&[0x10, 0x00]);
            // MaxPayload 256, MaxReadRequest 4096.
            bytes[0x68..0x6a].copy_from_slice(&(1u16 << 5 | 5 << 12).to_le_bytes());
            bytes[0x100..0x104].copy_from_slice(&(0x0001u32 | 0x148 << 20).to_le_bytes());
            bytes[0x148..0x14c].copy_from_slice(&0x000du32.to_le_bytes());
            bytes[0x14e..0x150].copy_from_slice(&0x001du16.to_le_bytes());
        });
        assert_eq!(whole.size(5), Look::Seen(256));
        assert_eq!(whole.size(12), Look::Seen(4096));
        assert_eq!(whole.acs(), Look::Seen(0x1d));
    }

    #[test]
    fn what_is_not_shown_is_unseen_and_loops_end() {
        assert!(matches!(space(256, |_| {}).acs(), Look::Unseen(_)), "no extended space");
        assert_eq!(space(4096, |_| {}).acs(), Look::NotThere);
        let own = |bytes: &mut Vec<u8>| {
            bytes[0x34] = 0x40;
            bytes[0x40..0x42].copy_from_slice(&[0x01, 0x40]);
            bytes[0x100..0x104].copy_from_slice(&(0x0001u32 | 0x100 << 20).to_le_bytes());
        };
        assert_eq!(space(4096, own).size(5), Look::NotThere);
        assert_eq!(space(4096, own).acs(), Look::NotThere);
    }
}
