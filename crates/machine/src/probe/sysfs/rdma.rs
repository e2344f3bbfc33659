//! RDMA devices: every port with its state, rate, link layer and network device.
//!
//! Does not judge them: `plan` decides whether to use virtual functions or ports that are down.
//!
//! *Invariant:* every entry of `/sys/class/infiniband` is in the answer.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::pci::PciTree;
use super::vpd;
use super::{Root, first_line, names, value};
use cuda_cluster_model::ids::PciAddress;
use cuda_cluster_model::topology::{LinkLayer, Nic, NicKind, Note, Port, PortState};

/// All RDMA devices in natural order of their names (`mlx5_2` before `mlx5_10`).
pub(super) fn nics(root: &Root, tree: &PciTree, notes: &mut Vec<Note>) -> Vec<Nic> {
    let class = root.join("class/infiniband");
    let mut found = names(&class);
    found.sort_by(|a, b| natural(a).cmp(&natural(b)).then_with(|| a.cmp(b)));
    let mut nics: Vec<Nic> =
        found.into_iter().map(|name| nic(root, &class, name, tree, notes)).collect();

    let places: BTreeSet<PciAddress> = nics.iter().filter_map(|nic| nic.pci).collect();
    let bonds: Vec<Option<String>> = nics.iter().map(|nic| bond_above(root, nic)).collect();
    for (nic, bond) in nics.iter_mut().zip(&bonds).filter(|(nic, _)| nic.kind.is_physical()) {
        let physical = nic.pci.and_then(|place| tree.physical(place));
        let members = bonds.iter().filter(|other| *other == bond).count();
        nic.kind = if nic.pci.and_then(|place| tree.path(place)).is_some_and(manages_switches) {
            NicKind::SwitchManager
        } else if physical.is_some_and(|place| places.contains(&place)) {
            // A container may own a virtual function whose physical function is not visible.
            NicKind::VirtualFunction
        } else if bond.is_some() && members > 1 {
            NicKind::BondSlave
        } else if bond.is_some() || is_bond(root, nic) {
            // One RDMA device over all members, even if its GID table names a member.
            NicKind::Bond
        } else {
            NicKind::Physical
        };
    }
    nics
}

fn nic(root: &Root, class: &Path, name: String, tree: &PciTree, notes: &mut Vec<Note>) -> Nic {
    let device = root.follow(&class.join(&name)).unwrap_or_else(|| class.join(&name));
    let pci = (!is_software(root, &device)).then(|| function_above(&device)).flatten();
    let netdevs = pci.and_then(|place| tree.path(place)).map(|path| names(&path.join("net")));
    let netdevs = netdevs.unwrap_or_default();
    let mut ports: Vec<Port> = names(&device.join("ports"))
        .iter()
        .filter_map(|number| number.parse().ok())
        .map(|number| port(root, &device, &name, number, &netdevs, notes))
        .collect();
    ports.sort_by_key(|port| port.port);
    let kind = if is_software(root, &device) { NicKind::Software } else { NicKind::Physical };
    Nic { name, pci, ports, kind, ..Nic::default() }
}

/// Whether a function is the baseboard's way to its NVSwitches: by its subsystem, which everybody
/// may read, or by its vital product data. These take long, and the adapter has two lanes of PCIe.
fn manages_switches(function: &Path) -> bool {
    let files = ["vendor", "device", "subsystem_vendor", "subsystem_device"];
    let told = files.map(|file| first_line(&function.join(file)).unwrap_or_default());
    let wanted = NicKind::SWITCH_MANAGER_IDS.map(|id| format!("0x{id:04x}"));
    let lanes = value::<u32>(&function.join("current_link_width"));
    told == wanted
        || (told[..2] == wanted[..2]
            && lanes.is_some_and(|lanes| lanes <= 2)
            && vpd::manages_switches(function))
}

/// The PCI function to which a device belongs, directly or (mlx5 subfunctions) further up.
fn function_above(device: &Path) -> Option<PciAddress> {
    device.ancestors().skip(1).find_map(|above| above.file_name()?.to_str()?.parse().ok())
}

/// Whether a device has no RDMA hardware: SoftRoCE (rxe) or SoftiWARP (siw).
///
/// They have no parent, except in older kernels, where their parent is the Ethernet card that they
/// use. rxe names that card in `parent` (`rxe_verbs.c`), siw itself in `node_desc` (`siw.h`).
fn is_software(root: &Root, device: &Path) -> bool {
    device.starts_with(root.join("devices/virtual"))
        || device.join("parent").exists()
        || first_line(&device.join("node_desc")).is_some_and(|text| text.starts_with("Software"))
}

fn port(
    root: &Root,
    device: &Path,
    name: &str,
    number: u32,
    netdevs: &[String],
    notes: &mut Vec<Note>,
) -> Port {
    let path = device.join(format!("ports/{number}"));
    let mut strange = |what: &str, text: &str| {
        notes.push(Note::new(format!("{name}:{number}"), format!("its {what} reads {text:?}")));
    };
    let state = first_line(&path.join("state"));
    let rate = first_line(&path.join("rate"));
    let layer = first_line(&path.join("link_layer"));
    Port {
        port: number,
        state: state
            .and_then(|text| port_state(&text).or_else(|| (strange("state", &text), None).1)),
        link_layer: layer.and_then(|text| match text.as_str() {
            "InfiniBand" => Some(LinkLayer::InfiniBand),
            "Ethernet" => Some(LinkLayer::Ethernet),
            // Other adapters (EFA).
            _ => None,
        }),
        rate_gbps: rate
            .and_then(|text| gigabits(&text).or_else(|| (strange("rate", &text), None).1)),
        netdev: netdev(root, &path, number, netdevs),
    }
}

/// `4: ACTIVE`
fn port_state(text: &str) -> Option<PortState> {
    Some(match text.split_once(':')?.1.trim() {
        "NOP" => PortState::Nop,
        "DOWN" => PortState::Down,
        "INIT" => PortState::Init,
        "ARMED" => PortState::Armed,
        "ACTIVE" => PortState::Active,
        "ACTIVE_DEFER" => PortState::ActiveDefer,
        _ => return None,
    })
}

/// `400 Gb/sec (4X NDR)`, `2.5 Gb/sec (1X SDR)`
fn gigabits(text: &str) -> Option<f64> {
    let (number, unit) = text.split_once(' ')?;
    let rate: f64 = number.parse().ok()?;
    (unit.starts_with("Gb/sec") && rate.is_finite()).then_some(rate)
}

/// The network device on a port: the one in the GID table, else the PCI function's own.
///
/// `gid_attrs/ndevs/0` names a bond rather than its members, and a function's main interface rather
/// than those that a switch driver creates for virtual functions. InfiniBand ports have no network
/// device there; theirs (IPoIB) count `dev_port` from 0.
fn netdev(root: &Root, port: &Path, number: u32, netdevs: &[String]) -> Option<String> {
    first_line(&port.join("gid_attrs/ndevs/0")).or_else(|| {
        let on_port = netdevs.iter().filter(|name| {
            let at = value::<u32>(&root.join(&format!("class/net/{name}/dev_port")));
            at.is_none_or(|at| at + 1 == number)
        });
        // `ib0` before its child `ib0.8001`.
        on_port.min_by_key(|name| (name.len(), name.as_str())).cloned()
    })
}

/// A NIC's network devices in `class/net`.
fn interfaces(root: &Root, nic: &Nic) -> impl Iterator<Item = PathBuf> {
    let names = nic.ports.iter().filter_map(|port| port.netdev.as_ref());
    names.map(|netdev| root.join(&format!("class/net/{netdev}")))
}

/// Whether a NIC's network device is a bond.
fn is_bond(root: &Root, nic: &Nic) -> bool {
    interfaces(root, nic).any(|interface| interface.join("bonding").is_dir())
}

/// The bond that a NIC's network device belongs to.
fn bond_above(root: &Root, nic: &Nic) -> Option<String> {
    let master = |interface: PathBuf| {
        let master = interface.join("master");
        let bond = std::fs::read_link(&master).ok().filter(|_| master.join("bonding").is_dir())?;
        Some(bond.file_name()?.to_str()?.to_owned())
    };
    interfaces(root, nic).find_map(master)
}

/// A name split into text and numbers, so that 10 comes after 9.
fn natural(name: &str) -> Vec<(String, u64)> {
    let mut parts: Vec<(String, u64)> = vec![(String::new(), 0)];
    let mut in_number = false;
    for c in name.chars() {
        let Some((text, number)) = parts.last_mut() else { break };
        if let Some(digit) = c.to_digit(10) {
            *number = number.saturating_mul(10).saturating_add(u64::from(digit));
            in_number = true;
        } else if in_number {
            parts.push((c.to_string(), 0));
            in_number = false;
        } else {
            text.push(c);
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_sort_as_people_count() {
        let mut names = ["mlx5_10", "rocep25s0f1", "mlx5_2", "mlx5_bond_0", "mlx5_1"];
        names.sort_by_key(|name| natural(name));
        assert_eq!(names, ["mlx5_1", "mlx5_2", "mlx5_10", "mlx5_bond_0", "rocep25s0f1"]);
    }

    #[test]
    fn software_devices_are_known_wherever_they_hang() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root(dir.path().to_owned());
        let card = dir.path().join("devices/pci0000:00/0000:00:02.0");
        for (place, file, text) in [
            ("infiniband/mlx5_0", "node_desc", "host mlx5_0"),
            ("mlx5_core.sf.4/infiniband/mlx5_4", "node_desc", "host mlx5_4"),
            ("infiniband/rxe0", "parent", "eth0"),
            ("infiniband/siw0", "node_desc", "Software iWARP stack"),
        ] {
            std::fs::create_dir_all(card.join(place)).unwrap();
            std::fs::write(card.join(place).join(file), text).unwrap();
        }
        let software = |place: &str| is_software(&root, &card.join(place));
        assert!(!software("infiniband/mlx5_0") && !software("mlx5_core.sf.4/infiniband/mlx5_4"));
        assert!(software("infiniband/rxe0") && software("infiniband/siw0"));
        assert!(is_software(&root, &dir.path().join("devices/virtual/infiniband/siw0")));
        let function = "0000:00:02.0".parse().ok();
        assert_eq!(function_above(&card.join("mlx5_core.sf.4/infiniband/mlx5_4")), function);
    }

    #[test]
    fn states_and_rates_read_as_the_kernel_writes_them() {
        assert_eq!(port_state("4: ACTIVE"), Some(PortState::Active));
        assert_eq!(port_state("1: DOWN"), Some(PortState::Down));
        assert_eq!(port_state("9: ?"), None);
        assert_eq!(gigabits("400 Gb/sec (4X NDR)"), Some(400.0));
        assert_eq!(gigabits("2.5 Gb/sec (1X SDR)"), Some(2.5));
        assert_eq!(gigabits("fast"), None);
    }
}
