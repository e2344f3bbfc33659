//! The sysfs of a made-up machine: the PCI tree, RDMA devices and NUMA nodes, links included.
//!
//! Written as the kernel shows it: devices are nested directories below `devices`, everything else
//! is symbolic links to them (Linux, `Documentation/admin-guide/sysfs-rules.rst`).

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use cuda_cluster::cpuset::CpuSet;
use cuda_cluster::ids::{NumaId, PciAddress};
use cuda_cluster::topology::{
    Bridge, BridgeKind, LinkLayer, Nic, NicKind, NvLinkPeer, PcieLink, Port, PortState, Topology,
};

/// Writes the tree.
pub fn write(machine: &Topology, root: &Path) -> io::Result<()> {
    let tree = Tree { machine, root };
    fs::create_dir_all(root.join("bus/pci/devices"))?;
    tree.numa_nodes()?;
    for bridge in machine.bridges.iter().filter(|bridge| bridge.kind != BridgeKind::Host) {
        tree.bridge(bridge)?;
    }
    for gpu in &machine.gpus {
        let Some(pci) = gpu.pci else { continue };
        // Where a display is attached the class is VGA controller, elsewhere 3D controller.
        let class = if gpu.display == Some(true) { 0x03_0000 } else { 0x03_0200 };
        let what = Function { class, vendor: 0x10de, device: 0x2330, driver: "nvidia" };
        let path = tree.function(pci, tree.below(gpu.parent.as_deref()), &what)?;
        tree.locality(&path, gpu.numa, gpu.cpus.as_ref())?;
        link_files(&path, gpu.pcie)?;
    }
    tree.nvswitches()?;
    for nic in &machine.nics {
        tree.nic(nic)?;
    }
    tree.physical_functions()
}

struct Tree<'a> {
    machine: &'a Topology,
    root: &'a Path,
}

/// What a PCI function says that it is.
struct Function {
    class: u32,
    vendor: u16,
    device: u16,
    driver: &'static str,
}

impl Tree<'_> {
    /// The directory of a bridge or of what hangs off it, below `devices`.
    fn below(&self, parent: Option<&str>) -> PathBuf {
        let above = self.machine.ancestry().above(parent);
        let names = above.iter().rev().map(|bridge| bridge.id.as_str());
        names.fold(PathBuf::from("devices"), |path, name| path.join(name))
    }

    /// Makes a PCI function in a folder of its bridge, and its entry on the bus.
    fn function(
        &self,
        address: PciAddress,
        folder: PathBuf,
        what: &Function,
    ) -> io::Result<PathBuf> {
        let place = folder.join(address.to_string());
        let path = self.root.join(&place);
        fs::create_dir_all(&path)?;
        let Function { class, vendor, device, driver } = what;
        let uevent = format!(
            "DRIVER={driver}\nPCI_CLASS={class:X}\nPCI_ID={vendor:04X}:{device:04X}\n\
             PCI_SUBSYS_ID={vendor:04X}:0000\nPCI_SLOT_NAME={address}\n"
        );
        fs::write(path.join("uevent"), uevent)?;
        fs::write(path.join("vendor"), format!("0x{vendor:04x}\n"))?;
        fs::write(path.join("device"), format!("0x{device:04x}\n"))?;
        fs::write(path.join("class"), format!("0x{class:06x}\n"))?;
        let entry = self.root.join(format!("bus/pci/devices/{address}"));
        symlink(Path::new("../../..").join(place), entry)?;
        Ok(path)
    }

    fn locality(&self, path: &Path, numa: Option<NumaId>, cpus: Option<&CpuSet>) -> io::Result<()> {
        let number = numa.map_or("-1".to_owned(), |node| node.to_string());
        fs::write(path.join("numa_node"), number + "\n")?;
        let all = self.machine.cpus().unwrap_or_default();
        fs::write(path.join("local_cpulist"), format!("{}\n", cpus.unwrap_or(&all)))
    }

    fn bridge(&self, bridge: &Bridge) -> io::Result<()> {
        let Ok(address) = bridge.id.parse() else { return Ok(()) };
        let what =
            Function { class: 0x06_0400, vendor: 0x1000, device: 0xc030, driver: "pcieport" };
        let path = self.function(address, self.below(bridge.parent.as_deref()), &what)?;
        let numa = self.machine.ancestry().numa(Some(&bridge.id));
        let cpus = numa.and_then(|id| self.machine.numa_node(id)?.cpus.as_ref());
        self.locality(&path, numa, cpus)?;
        fs::write(path.join("config"), config(bridge.kind))?;
        link_files(&path, bridge.pcie)
    }

    /// The switches, where the fake NVML says that they are. They hang off a host bridge of their
    /// own: no topology tells where they are.
    fn nvswitches(&self) -> io::Result<()> {
        let ends = self.machine.gpus.iter().flat_map(|gpu| &gpu.nvlinks);
        let count = self.machine.nvswitch.unwrap_or(0);
        if ends.filter(|link| link.peer == NvLinkPeer::Switch).count() == 0 {
            return Ok(());
        }
        for number in 0..u8::try_from(count).unwrap_or(u8::MAX) {
            let (bus, device) = (number / 32, number % 32);
            let address = PciAddress { domain: 0xfffe, bus, device, function: 0 };
            let what =
                Function { class: 0x06_8000, vendor: 0x10de, device: 0x22a3, driver: "nvidia" };
            self.function(address, "devices/pcifffe:00".into(), &what)?;
        }
        Ok(())
    }

    fn nic(&self, nic: &Nic) -> io::Result<()> {
        let folder = match nic.pci {
            Some(address) => {
                let device = if nic.dma.is_some() { CONNECTX_8 } else { 0x1021 };
                let (class, vendor) = (0x02_0700, 0x15b3);
                let what = Function { class, vendor, device, driver: "mlx5_core" };
                let path = self.function(address, self.below(nic.parent.as_deref()), &what)?;
                let cpus = nic.numa.and_then(|id| self.machine.numa_node(id)?.cpus.as_ref());
                self.locality(&path, nic.numa, cpus)?;
                link_files(&path, nic.pcie)?;
                if nic.kind == NicKind::SwitchManager {
                    let [_, _, vendor, card] = NicKind::SWITCH_MANAGER_IDS;
                    fs::write(path.join("subsystem_vendor"), format!("0x{vendor:04x}\n"))?;
                    fs::write(path.join("subsystem_device"), format!("0x{card:04x}\n"))?;
                }
                path
            }
            None => self.root.join("devices/virtual"),
        };
        self.dma_function(nic, &folder)?;
        let device = folder.join("infiniband").join(&nic.name);
        fs::create_dir_all(&device)?;
        if let Some(address) = nic.pci {
            symlink(Path::new("../../..").join(address.to_string()), device.join("device"))?;
        }
        self.entry("infiniband", &nic.name, &device)?;
        for port in &nic.ports {
            self.port(nic, port, &folder, &device)?;
        }
        Ok(())
    }

    /// A NIC's DMA function, and the vital product data by which the two are known to be one card's.
    fn dma_function(&self, nic: &Nic, own: &Path) -> io::Result<()> {
        let Some((dma, address)) = nic.dma.as_ref().and_then(|dma| Some((dma, dma.pci?))) else {
            return Ok(());
        };
        // Two NICs of one card share it.
        if !self.root.join(format!("bus/pci/devices/{address}")).exists() {
            let (class, vendor, device) = (0x08_0000, 0x15b3, 0x2100);
            let what = Function { class, vendor, device, driver: "mlx5_core" };
            let path = self.function(address, self.below(dma.parent.as_deref()), &what)?;
            self.locality(&path, self.machine.ancestry().numa(dma.parent.as_deref()), None)?;
            fs::write(path.join("vpd"), vpd(address))?;
        }
        fs::write(own.join("vpd"), vpd(address))
    }

    /// An entry in `class`.
    fn entry(&self, class: &str, name: &str, device: &Path) -> io::Result<()> {
        let folder = self.root.join("class").join(class);
        fs::create_dir_all(&folder)?;
        let place = device.strip_prefix(self.root).expect("devices are below the root");
        symlink(Path::new("../..").join(place), folder.join(name))
    }

    fn port(&self, nic: &Nic, port: &Port, folder: &Path, device: &Path) -> io::Result<()> {
        let path = device.join(format!("ports/{}", port.port));
        fs::create_dir_all(path.join("gid_attrs/ndevs"))?;
        if let Some(state) = port.state {
            fs::write(path.join("state"), format!("{}: {state}\n", state_number(state)))?;
        }
        if let Some(rate) = port.rate_gbps {
            fs::write(path.join("rate"), format!("{rate} Gb/sec (4X NDR)\n"))?;
        }
        // What adapters that are neither say (EFA).
        let layer = port.link_layer.map_or("Unspecified".to_owned(), |layer| layer.to_string());
        fs::write(path.join("link_layer"), layer + "\n")?;
        let Some(netdev) = &port.netdev else { return Ok(()) };
        let net = folder.join("net").join(netdev);
        fs::create_dir_all(&net)?;
        fs::write(net.join("dev_port"), format!("{}\n", port.port - 1))?;
        self.entry("net", netdev, &net)?;
        match nic.kind {
            NicKind::Bond => fs::create_dir_all(net.join("bonding"))?,
            NicKind::BondSlave => {
                let bond = self.root.join("devices/virtual/net/bond9");
                fs::create_dir_all(bond.join("bonding"))?;
                symlink(bond, net.join("master"))?;
            }
            _ => {}
        }
        // InfiniBand ports have no network device in their GID table.
        if port.link_layer == Some(LinkLayer::Ethernet) {
            fs::write(path.join("gid_attrs/ndevs/0"), format!("{netdev}\n"))?;
        }
        Ok(())
    }

    /// Points virtual functions to the first physical one below the same bridge.
    fn physical_functions(&self) -> io::Result<()> {
        let nics = &self.machine.nics;
        for virtual_nic in nics.iter().filter(|nic| nic.kind == NicKind::VirtualFunction) {
            let owner = nics
                .iter()
                .find(|nic| nic.kind == NicKind::Physical && nic.parent == virtual_nic.parent);
            let place = |nic: &Nic| nic.pci.map(|pci| pci.to_string());
            let (Some(own), Some(owner)) = (place(virtual_nic), owner.and_then(place)) else {
                continue;
            };
            let path = self.root.join(self.below(virtual_nic.parent.as_deref())).join(own);
            symlink(Path::new("..").join(owner), path.join("physfn"))?;
        }
        Ok(())
    }

    fn numa_nodes(&self) -> io::Result<()> {
        for node in &self.machine.numa {
            let path = self.root.join(format!("devices/system/node/node{}", node.id));
            fs::create_dir_all(&path)?;
            let cpus = node.cpus.clone().unwrap_or_default();
            fs::write(path.join("cpulist"), format!("{cpus}\n"))?;
            if let Some(bytes) = node.memory_bytes {
                let text = format!("Node {} MemTotal:       {} kB\n", node.id, bytes / 1024);
                fs::write(path.join("meminfo"), text)?;
            }
        }
        Ok(())
    }
}

/// The PCI device number of a ConnectX-8.
const CONNECTX_8: u16 = 0x1023;

/// Vital product data of a card that is named after its DMA function: its name, its part number and
/// its UUID.
fn vpd(card: PciAddress) -> Vec<u8> {
    let word = |name: &str, value: &str| {
        let length = u8::try_from(value.len()).expect("a short value");
        [name.as_bytes(), &[length], value.as_bytes()].concat()
    };
    let PciAddress { domain, bus, device, function } = card;
    let uuid = format!("{domain:08x}{bus:08x}{device:08x}{function:08x}");
    let resource = |tag: u8, content: &[u8]| {
        let length = u16::try_from(content.len()).expect("a short resource").to_le_bytes();
        [&[tag], &length[..], content].concat()
    };
    let words = [word("PN", "900-9X81E-00EX-ST0"), word("V3", &uuid)].concat();
    [resource(0x82, b"ConnectX-8 SuperNIC"), resource(0x90, &words), vec![0x78]].concat()
}

/// The number before the word in a port's `state`.
fn state_number(state: PortState) -> u32 {
    match state {
        PortState::Nop => 0,
        PortState::Down => 1,
        PortState::Init => 2,
        PortState::Armed => 3,
        PortState::Active => 4,
        PortState::ActiveDefer => 5,
    }
}

/// `current_link_speed` and its companions.
fn link_files(path: &Path, link: Option<PcieLink>) -> io::Result<()> {
    let Some(link) = link else { return Ok(()) };
    for (file, speed) in
        [("current_link_speed", link.gt_per_s), ("max_link_speed", link.max_gt_per_s)]
    {
        let text = speed.map_or("Unknown".to_owned(), |speed| format!("{speed:.1} GT/s PCIe"));
        fs::write(path.join(file), text + "\n")?;
    }
    for (file, lanes) in [("current_link_width", link.width), ("max_link_width", link.max_width)] {
        fs::write(path.join(file), format!("{}\n", lanes.unwrap_or(0)))?;
    }
    Ok(())
}

/// A configuration space with a power management and a PCI Express capability, and with access
/// control that redirects nothing.
fn config(kind: BridgeKind) -> Vec<u8> {
    let port_type: u8 = match kind {
        BridgeKind::RootPort => 4,
        BridgeKind::SwitchUp => 5,
        BridgeKind::SwitchDown => 6,
        BridgeKind::Host | BridgeKind::Bridge => 7,
    };
    let mut config = vec![0; 4096];
    config[0x34] = 0x40;
    config[0x40..0x42].copy_from_slice(&[0x01, 0x60]);
    config[0x60..0x63].copy_from_slice(&[0x10, 0x00, 0x02 | (port_type << 4)]);
    config[0x100..0x104].copy_from_slice(&0x0001_000d_u32.to_le_bytes());
    config
}
