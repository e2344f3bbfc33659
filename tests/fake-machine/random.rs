//! Machines that nobody built: any tree, any numbers, so that no rule hides in the catalogue's.

use cuda_cluster::cpuset::CpuSet;
use cuda_cluster::ids::{GpuIndex, NumaId, PciAddress};
use cuda_cluster::topology::{
    Bridge, BridgeKind, DmaFunction, Gpu, LinkLayer, Nic, NumaNode, NvLink, NvLinkPeer, PcieLink,
    Port, PortState, Topology,
};

/// Draws small numbers from given bytes, so that a test case can be shrunk.
pub struct Dice<'a>(std::iter::Cycle<std::slice::Iter<'a, u8>>);

impl<'a> Dice<'a> {
    /// # Panics
    /// If there are no bytes.
    pub fn new(bytes: &'a [u8]) -> Self {
        assert!(!bytes.is_empty(), "dice need bytes");
        Self(bytes.iter().cycle())
    }

    /// A number below `end`.
    fn below(&mut self, end: u32) -> u32 {
        self.0.next().map_or(0, |byte| u32::from(*byte) % end)
    }

    fn chance(&mut self, one_in: u32) -> bool {
        self.below(one_in) == 0
    }
}

/// A machine with one to three PCI domains of one to three root ports each.
pub fn machine(dice: &mut Dice<'_>) -> Topology {
    let mut builder = Builder { machine: Topology::default(), domain: 0, bus: 0 };
    builder.machine.version = 1;
    builder.machine.name = Some("random".to_owned());
    builder.processors(dice);
    for _ in 0..=dice.below(3) {
        builder.host_bridge(dice);
    }
    builder.nvlinks(dice);
    builder.dma_functions(dice);
    builder.machine.links = builder.machine.derive_links();
    builder.machine
}

struct Builder {
    machine: Topology,
    domain: u32,
    bus: u8,
}

impl Builder {
    /// One or two packages with one or two NUMA nodes each, numbered with gaps; SMT siblings next to
    /// each other or far apart.
    fn processors(&mut self, dice: &mut Dice<'_>) {
        let (packages, per_package, cores) =
            (1 + dice.below(2), 1 + dice.below(2), 1 + dice.below(4));
        let (smt, gap) = (1 + dice.below(2), 1 + dice.below(8));
        let all = packages * per_package * cores;
        let far_apart = dice.chance(2);
        for node in 0..packages * per_package {
            let mut cpus = CpuSet::new();
            for core in node * cores..(node + 1) * cores {
                let cpu =
                    |thread| if far_apart { core + thread * all } else { core * smt + thread };
                let siblings: CpuSet = (0..smt).map(cpu).collect();
                cpus = cpus.union(&siblings);
                self.machine.cores.push(siblings);
            }
            self.machine.numa.push(NumaNode {
                id: NumaId(node * gap),
                package: Some(node / per_package),
                cpus: Some(cpus),
                memory_bytes: Some(u64::from(1 + dice.below(100)) << 20),
                gpu_memory: false,
            });
        }
    }

    fn address(&mut self) -> PciAddress {
        self.bus += 1;
        PciAddress { domain: self.domain, bus: self.bus, device: 0, function: 0 }
    }

    fn bridge(&mut self, parent: &str, kind: BridgeKind, dice: &mut Dice<'_>) -> String {
        let id = self.address().to_string();
        let (parent, numa, package) = (Some(parent.to_owned()), None, None);
        let pcie = pcie(dice);
        self.machine.bridges.push(Bridge { id: id.clone(), parent, kind, numa, package, pcie });
        id
    }

    fn host_bridge(&mut self, dice: &mut Dice<'_>) {
        self.domain += 1 + dice.below(2) * 0xffff;
        self.bus = 0;
        let node = usize::try_from(dice.below(255)).map_or(0, |at| at % self.machine.numa.len());
        let node = self.machine.numa[node].clone();
        let id = format!("pci{:04x}:00", self.domain);
        let (numa, package) = (Some(node.id), node.package);
        let kind = BridgeKind::Host;
        self.machine.bridges.push(Bridge {
            id: id.clone(),
            parent: None,
            kind,
            numa,
            package,
            pcie: None,
        });
        for _ in 0..=dice.below(3) {
            let port = self.bridge(&id, BridgeKind::RootPort, dice);
            self.below_port(&port, &node, 2, dice);
        }
    }

    /// A device or a switch with more of the same below.
    fn below_port(&mut self, port: &str, node: &NumaNode, depth: u32, dice: &mut Dice<'_>) {
        if depth > 0 && dice.chance(2) {
            let up = self.bridge(port, BridgeKind::SwitchUp, dice);
            for _ in 0..=dice.below(3) {
                let down = self.bridge(&up, BridgeKind::SwitchDown, dice);
                self.below_port(&down, node, depth - 1, dice);
            }
        } else if dice.chance(2) {
            self.gpu(port, node, dice);
        } else {
            self.nics(port, node, dice);
        }
    }

    fn gpu(&mut self, port: &str, node: &NumaNode, dice: &mut Dice<'_>) {
        let index = u32::try_from(self.machine.gpus.len()).expect("a handful");
        let pci = self.address();
        self.machine.gpus.push(Gpu {
            index: GpuIndex(index),
            uuid: format!("GPU-{index:08x}").parse().ok(),
            name: Some("NVIDIA Something".to_owned()),
            pci: Some(pci),
            numa: Some(node.id),
            cpus: node.cpus.clone(),
            memory_bytes: Some(u64::from(1 + dice.below(80)) << 30),
            compute_capability: "9.0".parse().ok(),
            pcie: pcie(dice),
            parent: Some(port.to_owned()),
            ..Gpu::default()
        });
    }

    /// An adapter of one or two functions.
    fn nics(&mut self, port: &str, node: &NumaNode, dice: &mut Dice<'_>) {
        let place = self.address();
        for function in 0..=u8::from(dice.chance(2)) {
            let number = self.machine.nics.len();
            let layers = [None, Some(LinkLayer::InfiniBand), Some(LinkLayer::Ethernet)];
            let link_layer = layers[usize::from(dice.chance(2)) + usize::from(dice.chance(2))];
            let ports = (1..=1 + dice.below(2)).map(|port| Port {
                port,
                state: Some(if dice.chance(3) { PortState::Down } else { PortState::Active }),
                link_layer,
                rate_gbps: Some(2.5 * f64::from(1 + dice.below(160))),
                netdev: link_layer.map(|_| format!("net{number}x{port}")),
            });
            self.machine.nics.push(Nic {
                name: format!("mlx5_{number}"),
                pci: Some(PciAddress { function, ..place }),
                numa: Some(node.id),
                ports: ports.collect(),
                pcie: pcie(dice),
                parent: Some(port.to_owned()),
                ..Nic::default()
            });
        }
    }

    /// For some NICs one beside a GPU, whichever.
    fn dma_functions(&mut self, dice: &mut Dice<'_>) {
        let beside: Vec<Option<String>> =
            self.machine.gpus.iter().map(|gpu| gpu.parent.clone()).collect();
        for at in 0..self.machine.nics.len() {
            if beside.is_empty() || !dice.chance(3) {
                continue;
            }
            let gpu = usize::try_from(dice.below(255)).map_or(0, |gpu| gpu % beside.len());
            let (pci, parent) = (Some(self.address()), beside[gpu].clone());
            self.machine.nics[at].dma = Some(DmaFunction { pci, parent });
        }
    }

    /// None, a ring of pairs, or switches.
    fn nvlinks(&mut self, dice: &mut Dice<'_>) {
        let places: Vec<Option<PciAddress>> = self.machine.gpus.iter().map(|gpu| gpu.pci).collect();
        self.machine.nvswitch = (!places.is_empty()).then_some(0);
        let (way, count) = (dice.below(3), 1 + dice.below(6));
        for (at, gpu) in self.machine.gpus.iter_mut().enumerate() {
            let peer = match (way, places.get(at ^ 1)) {
                (1, Some(Some(place))) => NvLinkPeer::Gpu(*place),
                (2, _) => NvLinkPeer::Switch,
                _ => continue,
            };
            let (active, version, gb_per_s) = (true, Some(4), Some(26.5));
            let link = |link| NvLink { link, active, version, peer, gb_per_s };
            gpu.nvlinks = (0..count).map(link).collect();
        }
        if way == 2 && !places.is_empty() {
            // No more switches than links, or some would be seen by nobody.
            self.machine.nvswitch = Some(1 + dice.below(count));
        }
    }
}

fn pcie(dice: &mut Dice<'_>) -> Option<PcieLink> {
    (!dice.chance(4)).then(|| PcieLink {
        gt_per_s: Some([2.5, 5.0, 16.0][usize::from(dice.chance(2)) + usize::from(dice.chance(2))]),
        width: Some(1 << dice.below(5)),
        max_gt_per_s: Some(32.0),
        max_width: Some(16),
    })
}
