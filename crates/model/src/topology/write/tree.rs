//! The machine as a tree: package, NUMA node, PCIe switch, device.
//!
//! Leaves out what the shape of the tree already shows (host bridges, ports, parents).
//!
//! *Invariant:* each part has one line; unknown facts take no space.

use std::collections::BTreeMap;

use super::hierarchy::{Part, What, packages};
use crate::topology::{Device, Gpu, LinkKind, Nic, Occupant, Port, Topology};
use crate::units::HumanBytes;

impl Topology {
    /// The machine as a tree drawn with lines.
    pub fn to_tree(&self) -> String {
        self.to_tree_with(&[])
    }

    /// The machine as a tree, with workers below their GPUs.
    pub fn to_tree_with(&self, workers: &[Occupant]) -> String {
        let mut text = format!("{}\n", self.name.as_deref().unwrap_or("machine"));
        let packages = packages(self);
        let lines: Vec<Line> = packages.iter().flat_map(|part| self.lines(part, workers)).collect();
        draw(&lines, "", &mut text);
        text
    }

    /// A part's line and those below it; a part without a text is replaced by its children.
    fn lines(&self, part: &Part<'_>, workers: &[Occupant]) -> Vec<Line> {
        let mut below: Vec<Line> =
            part.children.iter().flat_map(|part| self.lines(part, workers)).collect();
        let words = match part.what {
            What::Package(Some(id)) => format!("Package {id}"),
            What::Numa(Some(id), node) => {
                let cpus =
                    node.and_then(|node| node.cpus.as_ref()).map(|cpus| format!("CPUs {cpus}"));
                let memory = node.and_then(|node| node.memory_bytes).map(human);
                joined([Some(format!("NUMA node {id}")), cpus, memory])
            }
            What::Switch(name) => joined([Some("PCIe switch".to_owned()), name.map(str::to_owned)]),
            What::Gpu(gpu) => {
                below = instances(gpu);
                let here = workers.iter().filter(|worker| worker.gpu == Some(gpu.index));
                below.extend(here.map(occupant));
                self.gpu_words(gpu)
            }
            What::Nic(at, nic) => nic_words(at, nic),
            What::Dma(at, nic) => {
                let place = nic.dma.as_ref().and_then(|dma| dma.pci);
                let of = format!("DMA function of NIC{at}");
                joined([Some(of), Some(nic.name.clone()), place.map(|pci| pci.to_string())])
            }
            What::Package(None) | What::Numa(None, _) | What::Host(_) => return below,
        };
        vec![Line { words, below }]
    }

    fn gpu_words(&self, gpu: &Gpu) -> String {
        let memory_numa = gpu.memory_numa.map(|id| format!("is NUMA node {id}"));
        let display = gpu.display.filter(|display| *display).map(|_| "display".to_owned());
        joined([
            Some(format!("GPU{}", gpu.index)),
            gpu.name.clone(),
            gpu.pci.map(|pci| pci.to_string()),
            gpu.memory_bytes.map(human),
            memory_numa,
            self.nvlink_words(gpu),
            display,
        ])
    }

    /// The other GPUs connected by NVLink, grouped by number of links.
    fn nvlink_words(&self, gpu: &Gpu) -> Option<String> {
        let mut peers: BTreeMap<LinkKind, Vec<String>> = BTreeMap::new();
        for other in &self.gpus {
            let (a, b) = (Device::Gpu(gpu.index), Device::Gpu(other.index));
            if let Some(kind @ LinkKind::Nv(_)) = self.links.between(a, b) {
                peers.entry(kind).or_default().push(format!("GPU{}", other.index));
            }
        }
        let others = self.gpus.len() - 1;
        let words = peers.iter().map(|(kind, peers)| {
            if peers.len() == others && others > 1 {
                format!("{kind} to all GPUs")
            } else {
                format!("{kind} to {}", peers.join(","))
            }
        });
        let words = words.collect::<Vec<_>>().join(", ");
        (!words.is_empty()).then_some(words)
    }
}

/// One line of the tree, and the lines below it.
struct Line {
    words: String,
    below: Vec<Line>,
}

fn draw(lines: &[Line], indent: &str, text: &mut String) {
    for (at, line) in lines.iter().enumerate() {
        let last = at + 1 == lines.len();
        let (branch, space) = if last { ("└─ ", "   ") } else { ("├─ ", "│  ") };
        text.push_str(&format!("{indent}{branch}{}\n", line.words));
        draw(&line.below, &format!("{indent}{space}"), text);
    }
}

fn instances(gpu: &Gpu) -> Vec<Line> {
    let line = |mig: &crate::topology::MigInstance| Line {
        words: joined([
            Some(format!("MIG {}", mig.profile)),
            mig.memory_bytes.map(human),
            Some(mig.uuid.to_string()),
        ]),
        below: Vec::new(),
    };
    gpu.mig.iter().map(line).collect()
}

fn occupant(worker: &Occupant) -> Line {
    let cpus = worker.cpus.as_ref().map(|cpus| format!("CPUs {cpus}"));
    let nics = (!worker.nics.is_empty()).then(|| worker.nics.join(", "));
    let words = joined([Some(format!("worker {}", worker.name)), cpus, nics]);
    Line { words, below: Vec::new() }
}

fn nic_words(at: u32, nic: &Nic) -> String {
    let ports = nic.ports.iter().map(|port| port_words(nic, port)).collect::<Vec<_>>().join("; ");
    joined([
        Some(format!("NIC{at}")),
        Some(nic.name.clone()).filter(|name| *name != format!("NIC{at}")),
        nic.pci.map(|pci| pci.to_string()),
        Some(ports).filter(|ports| !ports.is_empty()),
        nic.dma_is_untold().then(|| "DMA function unknown".to_owned()),
    ])
}

fn port_words(nic: &Nic, port: &Port) -> String {
    let number = (nic.ports.len() > 1 || port.port != 1).then(|| format!("port {}", port.port));
    let words = [
        number,
        port.state.map(|state| state.to_string()),
        port.link_layer.map(|layer| layer.to_string()),
        port.rate_gbps.map(|rate| format!("{rate} Gbit/s")),
        port.netdev.clone(),
    ];
    words.into_iter().flatten().collect::<Vec<_>>().join(" ")
}

fn human(bytes: u64) -> String {
    HumanBytes(bytes).to_string()
}

/// The known words of a line, two spaces apart.
fn joined<const N: usize>(words: [Option<String>; N]) -> String {
    words.into_iter().flatten().collect::<Vec<_>>().join("  ")
}
