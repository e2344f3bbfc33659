//! The PCI tree: the position of a function, what is near it, and the speed of its link.
//!
//! Does not determine links between devices; `topology::pci` does.
//!
//! *Invariant:* ancestry is the resolved device path, so PCI domains, nested switches and unusual
//! bus numbers need no special rules.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use super::{Root, first_line, names, numa_node, value};
use cuda_cluster_model::cpuset::CpuSet;
use cuda_cluster_model::ids::{NumaId, PciAddress};
use cuda_cluster_model::topology::{Bridge, BridgeKind, Note, PcieLink};

/// NVIDIA's PCI vendor number.
const NVIDIA: u16 = 0x10de;
/// IBM's: the NVLink ends of POWER9.
const IBM: u16 = 0x1014;

/// All PCI functions of a machine.
#[derive(Debug)]
pub(in crate::probe) struct PciTree {
    functions: BTreeMap<PciAddress, Function>,
}

/// A PCI function.
#[derive(Debug)]
struct Function {
    /// Its directory below `/sys/devices`.
    path: PathBuf,
    /// Class, subclass and interface: `0x030200`.
    class: u32,
    vendor: u16,
    device: u16,
    /// The kernel driver that is bound to it.
    driver: Option<String>,
}

/// The kinds of PCI functions that can be the far end of an NVLink.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::probe) enum Role {
    /// An NVIDIA GPU.
    Gpu,
    NvSwitch,
    /// The NVLink end of a CPU.
    Cpu,
    /// Anything else.
    Other,
}

/// The position of a function.
#[derive(Clone, Debug, Default, PartialEq)]
pub(in crate::probe) struct Place {
    /// Bridges above it, the host bridge first.
    pub(in crate::probe) above: Vec<Bridge>,
    /// NUMA node, if the firmware reports it.
    pub(in crate::probe) numa: Option<NumaId>,
    /// CPUs near it. The kernel lists all CPUs if it does not know the NUMA node.
    pub(in crate::probe) cpus: Option<CpuSet>,
    /// The device's end of its PCIe link.
    pub(in crate::probe) link: Option<PcieLink>,
    /// The maximum speed of the port above it.
    pub(in crate::probe) slot: Option<PcieLink>,
}

impl PciTree {
    /// Reads the list of functions.
    pub(super) fn read(root: Root, notes: &mut Vec<Note>) -> Self {
        let all = root.join("bus/pci/devices");
        if !all.is_dir() {
            let text = format!("{} is not there: no PCI device can be placed", all.display());
            notes.push(Note::new("pci", text));
        }
        let function = |name: &str| {
            let address: PciAddress = name.parse().ok()?;
            let path = root.follow(&all.join(name))?;
            let uevent = std::fs::read_to_string(path.join("uevent")).ok()?;
            Some((address, Function::parse(path, &uevent)?))
        };
        Self { functions: names(&all).iter().filter_map(|name| function(name)).collect() }
    }

    /// NVIDIA GPUs on the bus, except virtual functions, with their kernel drivers.
    pub(in crate::probe) fn gpus(&self) -> impl Iterator<Item = (PciAddress, Option<&str>)> {
        let gpus = self.functions.iter().filter(|(_, function)| function.role() == Role::Gpu);
        let gpus = gpus.filter(|(address, _)| self.physical(**address).is_none());
        gpus.map(|(address, function)| (*address, function.driver.as_deref()))
    }

    /// Number of NVSwitches on the bus.
    pub(in crate::probe) fn nvswitches(&self) -> usize {
        self.functions.values().filter(|function| function.role() == Role::NvSwitch).count()
    }

    /// Vendor and device of a function; `None` if there is none at this address.
    pub(super) fn id(&self, address: PciAddress) -> Option<(u16, u16)> {
        self.functions.get(&address).map(|function| (function.vendor, function.device))
    }

    /// The functions of a vendor and device.
    pub(super) fn with_id(&self, id: (u16, u16)) -> impl Iterator<Item = PciAddress> {
        let all = self.functions.iter();
        all.filter(move |(_, one)| (one.vendor, one.device) == id).map(|(address, _)| *address)
    }

    /// The kind of a function; `None` if there is none at this address.
    pub(in crate::probe) fn role(&self, address: PciAddress) -> Option<Role> {
        self.functions.get(&address).map(Function::role)
    }

    /// The physical function of a virtual one.
    pub(super) fn physical(&self, address: PciAddress) -> Option<PciAddress> {
        let link = self.functions.get(&address)?.path.join("physfn");
        std::fs::read_link(link).ok()?.file_name()?.to_str()?.parse().ok()
    }

    /// The directory of a function.
    pub(super) fn path(&self, address: PciAddress) -> Option<&Path> {
        self.functions.get(&address).map(|function| function.path.as_path())
    }

    /// The position of a function; `None` if there is none at this address.
    pub(in crate::probe) fn place(&self, address: PciAddress) -> Option<Place> {
        let path = self.path(address)?;
        let cpus = std::fs::read_to_string(path.join("local_cpulist")).ok();
        let slot = path.parent().filter(|above| is_function(above));
        Some(Place {
            above: ancestors(path),
            numa: numa_node(path),
            cpus: cpus.and_then(|list| list.trim().parse().ok()),
            link: link(path),
            slot: slot.and_then(link),
        })
    }
}

impl Function {
    /// Reads a function's `uevent`, which has everything in one file: `DRIVER=nvidia`,
    /// `PCI_CLASS=30200`, `PCI_ID=10DE:2330`.
    fn parse(path: PathBuf, uevent: &str) -> Option<Self> {
        let field =
            |key: &str| uevent.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        let (vendor, device) = field("PCI_ID")?.split_once(':')?;
        Some(Self {
            path,
            class: u32::from_str_radix(field("PCI_CLASS")?, 16).ok()?,
            vendor: u16::from_str_radix(vendor, 16).ok()?,
            device: u16::from_str_radix(device, 16).ok()?,
            driver: field("DRIVER").map(str::to_owned),
        })
    }

    fn role(&self) -> Role {
        match (self.vendor, self.class >> 8) {
            // VGA controllers and 3D controllers.
            (NVIDIA, 0x0300 | 0x0302) => Role::Gpu,
            // The PCI class "other bridge".
            (NVIDIA, 0x0680) => Role::NvSwitch,
            (IBM, 0x0680) => Role::Cpu,
            _ => Role::Other,
        }
    }
}

fn name_of(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

/// `pci0000:15`
fn is_host_bridge(path: &Path) -> bool {
    name_of(path).strip_prefix("pci").is_some_and(|place| place.contains(':'))
}

fn is_function(path: &Path) -> bool {
    name_of(path).parse::<PciAddress>().is_ok()
}

/// The bridges above a function, the host bridge first.
///
/// A hierarchy inside another one (Intel VMD has its own domain) begins at its own host bridge.
fn ancestors(path: &Path) -> Vec<Bridge> {
    let mut chain: Vec<&Path> = Vec::new();
    for above in path.ancestors().skip(1) {
        chain.push(above);
        if is_host_bridge(above) {
            break;
        }
    }
    if !chain.last().is_some_and(|top| is_host_bridge(top)) {
        return Vec::new();
    }
    chain.reverse();
    let below = chain.iter().skip(1).copied().chain([path]);
    let mut bridges: Vec<Bridge> = Vec::new();
    for (at, below) in chain.iter().zip(below) {
        let parent = bridges.last();
        let kind = parent.map_or(BridgeKind::Host, |parent| port_kind(at, parent.kind));
        bridges.push(Bridge {
            id: name_of(at).to_owned(),
            parent: parent.map(|parent| parent.id.clone()),
            kind,
            // A host bridge has no such file, but the devices below it have.
            numa: numa_node(at).or_else(|| numa_node(below)),
            package: None,
            pcie: link(at),
        });
    }
    // No device is attached to a switch's upstream port, so the guess from the structure was wrong.
    if let Some(last) = bridges.last_mut().filter(|last| last.kind == BridgeKind::SwitchUp) {
        last.kind = BridgeKind::Bridge;
    }
    bridges
}

/// A port's type: from its PCI Express capability, else its port services, else its position.
///
/// Only root may read a capability, which lies beyond the first 64 bytes of `config`. The kernel's
/// services are readable by all, but not every port has one. By position: ports below the host
/// bridge are root ports; below a root port or a switch's downstream port there can only be an
/// upstream port, and below that only downstream ports (PCI Express Base Specification, 1.3).
fn port_kind(port: &Path, above: BridgeKind) -> BridgeKind {
    capability(port).or_else(|| service(port)).unwrap_or(match above {
        BridgeKind::Host => BridgeKind::RootPort,
        BridgeKind::RootPort | BridgeKind::SwitchDown => BridgeKind::SwitchUp,
        BridgeKind::SwitchUp => BridgeKind::SwitchDown,
        BridgeKind::Bridge => BridgeKind::Bridge,
    })
}

/// The port type in the PCI Express capability (id 0x10) of the configuration space.
fn capability(port: &Path) -> Option<BridgeKind> {
    let mut config = Vec::with_capacity(256);
    std::fs::File::open(port.join("config")).ok()?.take(256).read_to_end(&mut config).ok()?;
    let byte = |at: usize| config.get(at).copied();
    let mut at = usize::from(byte(0x34)?);
    // 48 capabilities of four bytes fill the space; more means a loop.
    for _ in 0..48 {
        let (id, next) = (byte(at)?, byte(at + 1)?);
        if id == 0x10 {
            return Some(port_type(u32::from(byte(at + 2)? >> 4)));
        }
        if next == 0 {
            return None;
        }
        at = usize::from(next);
    }
    None
}

/// The port type in the name of a port service: `0000:02:08.0:pcie204`, in old kernels
/// `0000:02:08.0:pcie24`, is type 2 + 4 (`get_descriptor_id` in the kernel's `portdrv.c`).
fn service(port: &Path) -> Option<BridgeKind> {
    let prefix = format!("{}:pcie", name_of(port));
    let digit = names(port).iter().find_map(|name| {
        name.strip_prefix(&prefix)
            .filter(|rest| matches!(rest.len(), 2 | 3))?
            .chars()
            .next()?
            .to_digit(16)
    })?;
    Some(port_type(digit + 4))
}

/// `PCI_EXP_TYPE_*` in the kernel's `pci_regs.h`.
fn port_type(kind: u32) -> BridgeKind {
    match kind {
        4 => BridgeKind::RootPort,
        5 => BridgeKind::SwitchUp,
        6 => BridgeKind::SwitchDown,
        _ => BridgeKind::Bridge,
    }
}

/// The current and the maximum speed of one end of a link; `None` if unknown.
fn link(device: &Path) -> Option<PcieLink> {
    // `16.0 GT/s PCIe`, `8 GT/s`, `Unknown speed`
    let speed = |file| first_line(&device.join(file))?.split_whitespace().next()?.parse().ok();
    // 0 and 255: no link.
    let width = |file| value(&device.join(file)).filter(|lanes| (1..=32).contains(lanes));
    let link = PcieLink {
        gt_per_s: speed("current_link_speed"),
        width: width("current_link_width"),
        max_gt_per_s: speed("max_link_speed"),
        max_width: width("max_link_width"),
    };
    (link != PcieLink::default()).then_some(link)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A chain of directories, as sysfs shows a device behind bridges.
    fn chain(root: &Path, names: &[&str]) -> PathBuf {
        let path = names.iter().fold(root.join("devices"), |path, name| path.join(name));
        std::fs::create_dir_all(&path).unwrap();
        path
    }

    fn kinds(path: &Path) -> Vec<BridgeKind> {
        ancestors(path).iter().map(|bridge| bridge.kind).collect()
    }

    #[test]
    fn ports_are_told_by_their_place_when_nothing_else_tells() {
        use BridgeKind::{Bridge, Host, RootPort, SwitchDown, SwitchUp};
        let dir = tempfile::tempdir().unwrap();
        let names = ["pci0000:15", "0000:15:01.0", "0000:16:00.0", "0000:17:00.0", "0000:18:00.0"];
        assert_eq!(kinds(&chain(dir.path(), &names)), [Host, RootPort, SwitchUp, SwitchDown]);
        assert_eq!(kinds(&chain(dir.path(), &names[..4])), [Host, RootPort, Bridge]);
        assert_eq!(kinds(&chain(dir.path(), &["pci0001:00", "0001:00:00.0"])), [Host]);
        assert_eq!(kinds(&chain(dir.path(), &["platform", "gpu"])), []);
    }

    #[test]
    fn the_capability_and_the_services_beat_the_place() {
        let dir = tempfile::tempdir().unwrap();
        let port = chain(dir.path(), &["pci0000:00", "0000:00:01.0"]);
        let function = chain(dir.path(), &["pci0000:00", "0000:00:01.0", "0000:01:00.0"]);
        std::fs::create_dir(port.join("0000:00:01.0:pcie204")).unwrap();
        assert_eq!(kinds(&function), [BridgeKind::Host, BridgeKind::SwitchDown]);

        let mut config = vec![0u8; 256];
        config[0x34] = 0x40;
        config[0x40..0x42].copy_from_slice(&[0x01, 0x50]);
        config[0x50..0x54].copy_from_slice(&[0x10, 0x00, 0x52, 0x00]);
        std::fs::write(port.join("config"), &config).unwrap();
        assert_eq!(capability(&port), Some(BridgeKind::SwitchUp));
        // What an ordinary user is given.
        std::fs::write(port.join("config"), &config[..64]).unwrap();
        assert_eq!(capability(&port), None);
        // A list of capabilities that runs in a circle.
        config[0x41] = 0x40;
        std::fs::write(port.join("config"), &config).unwrap();
        assert_eq!(capability(&port), None);
    }

    #[test]
    fn a_function_is_known_by_its_uevent() {
        let role = |uevent| Function::parse(PathBuf::new(), uevent).map(|function| function.role());
        assert_eq!(role("DRIVER=nvidia\nPCI_CLASS=30200\nPCI_ID=10DE:2330\n"), Some(Role::Gpu));
        assert_eq!(role("PCI_CLASS=68000\nPCI_ID=10DE:22A3\n"), Some(Role::NvSwitch));
        assert_eq!(role("PCI_CLASS=68000\nPCI_ID=1014:04EA\n"), Some(Role::Cpu));
        assert_eq!(role("PCI_CLASS=40300\nPCI_ID=10DE:22BA\n"), Some(Role::Other));
        assert_eq!(role("PCI_CLASS=30200\n"), None);
    }
}
