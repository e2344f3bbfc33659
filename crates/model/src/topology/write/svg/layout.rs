//! The layout of the picture: columns for devices, levels for what is above them.
//!
//! Draws nothing.
//!
//! *Invariant:* no two cards overlap, and every wire runs down from a bar to something below it.

use std::collections::BTreeMap;

use crate::ids::NumaId;
use crate::topology::write::hierarchy::{Part, What};
use crate::topology::{Device, Gpu, Nic, NumaNode};

/// Width of a column, the same as a GPU's card.
pub(super) const COLUMN: f64 = 122.0;
/// Height of a GPU's card.
pub(super) const GPU_HEIGHT: f64 = 74.0;
/// Width of a NIC's card that leaves room for a wire beside it.
pub(super) const NIC_WIDTH: f64 = 98.0;
/// Height of a NIC's card.
pub(super) const NIC_HEIGHT: f64 = 50.0;
/// Height of a NUMA node's bar.
pub(super) const NUMA_BAR: f64 = 38.0;
/// Height of a host bridge's bar.
pub(super) const HOST_BAR: f64 = 8.0;
/// Height of a switch's bar.
pub(super) const SWITCH_BAR: f64 = 16.0;

const GAP: f64 = 14.0;
const NUMA_WIDTH: f64 = 168.0;
const NUMA_PADDING: f64 = 12.0;
const PACKAGE_PADDING: f64 = 12.0;
const PACKAGE_HEAD: f64 = 30.0;
const NUMA_HEAD: f64 = 28.0;
const WIRE: f64 = 22.0;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Rect {
    pub(super) x: f64,
    pub(super) y: f64,
    pub(super) w: f64,
    pub(super) h: f64,
}

impl Rect {
    pub(super) fn middle(&self) -> f64 {
        self.x + self.w / 2.0
    }

    pub(super) fn bottom(&self) -> f64 {
        self.y + self.h
    }

    pub(super) fn right(&self) -> f64 {
        self.x + self.w
    }
}

/// The kind of link that a wire stands for, as in the matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Below one switch.
    Pix,
    /// From switch to switch.
    Pxb,
    /// Below a host bridge.
    Phb,
    /// Below a NUMA node.
    Node,
}

/// A vertical line.
#[derive(Clone, Debug)]
pub(super) struct Wire<'a> {
    pub(super) x: f64,
    pub(super) from: f64,
    pub(super) to: f64,
    pub(super) step: Step,
    /// Switches along the wire that have no bar of their own, by their bridges.
    pub(super) passed: Vec<Option<&'a str>>,
    /// The switch whose bar it ends at.
    pub(super) switch: Option<Option<&'a str>>,
    /// The device that it ends at, rather than a bar.
    pub(super) device: Option<Device>,
}

/// Everything that is drawn above the NVLinks.
#[derive(Debug, Default)]
pub(super) struct Layout<'a> {
    pub(super) packages: Vec<(Rect, Option<u32>)>,
    pub(super) nodes: Vec<(Rect, Rect, Option<NumaId>, Option<&'a NumaNode>)>,
    pub(super) hosts: Vec<(Rect, Option<&'a str>)>,
    pub(super) switches: Vec<(Rect, Option<&'a str>)>,
    pub(super) gpus: BTreeMap<u32, (Rect, &'a Gpu)>,
    pub(super) nics: Vec<(Rect, u32, &'a Nic)>,
    pub(super) wires: Vec<Wire<'a>>,
    pub(super) right: f64,
    pub(super) bottom: f64,
}

/// Space that a picture reserves beyond the machine itself.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Room {
    /// Height of the strip at the bottom of each GPU's card, for its workers.
    pub(super) strip: f64,
}

/// A part without the switches that have only one child: the wire passes through those.
struct Branch<'a> {
    what: What<'a>,
    passed: Vec<Option<&'a str>>,
    below: Vec<Branch<'a>>,
}

impl<'a> Branch<'a> {
    fn of(part: &Part<'a>) -> Self {
        // A DMA function has no card; that of its NIC names it.
        let empty = |branch: &Branch<'_>| {
            branch.below.is_empty() && matches!(branch.what, What::Host(_) | What::Switch(_))
        };
        let parts = part.children.iter().filter(|part| !matches!(part.what, What::Dma(..)));
        let below = parts.map(Branch::of).filter(|branch| !empty(branch));
        let mut below: Vec<Branch<'a>> = below.collect();
        match (part.what, below.len()) {
            (What::Switch(name), 1) => {
                let mut only = below.remove(0);
                only.passed.insert(0, name);
                only
            }
            (what, _) => Branch { what, passed: Vec::new(), below },
        }
    }

    fn is_device(&self) -> bool {
        matches!(self.what, What::Gpu(_) | What::Nic(..))
    }

    /// Levels of switch bars below this part, including its own.
    fn levels(&self) -> usize {
        let below = self.below.iter().map(Branch::levels).max().unwrap_or(0);
        below + usize::from(matches!(self.what, What::Switch(_)))
    }

    /// Columns that its own devices need: two cards per column, GPUs only in the lower row.
    fn columns(&self) -> usize {
        let gpus = self.below.iter().filter(|part| matches!(part.what, What::Gpu(_))).count();
        let devices = self.below.iter().filter(|part| part.is_device()).count();
        gpus.max(devices.div_ceil(2))
    }

    fn width(&self) -> f64 {
        let own = self.columns();
        let bars = self.below.iter().filter(|part| !part.is_device()).map(Branch::width);
        let columns = own as f64 * (COLUMN + GAP);
        columns + bars.map(|width| width + GAP).sum::<f64>() - GAP
    }
}

/// The heights that all parts share.
struct Levels {
    package: f64,
    numa: f64,
    numa_bar: f64,
    host: f64,
    switch: f64,
    nic: f64,
    gpu: f64,
    gpu_height: f64,
    numa_end: f64,
    package_end: f64,
}

impl Levels {
    fn new(top: f64, switches: usize, nics: bool, room: Room) -> Self {
        let package = top;
        let numa = package + PACKAGE_HEAD;
        let numa_bar = numa + NUMA_HEAD;
        let host = numa_bar + NUMA_BAR + WIRE;
        let switch = host + HOST_BAR + WIRE;
        let nic = switch + switches as f64 * (SWITCH_BAR + WIRE);
        let gpu = if nics { nic + NIC_HEIGHT + GAP } else { nic };
        let gpu_height = GPU_HEIGHT + room.strip;
        let numa_end = gpu + gpu_height + NUMA_PADDING;
        Self {
            package,
            numa,
            numa_bar,
            host,
            switch,
            nic,
            gpu,
            gpu_height,
            numa_end,
            package_end: numa_end + PACKAGE_PADDING,
        }
    }
}

impl<'a> Layout<'a> {
    /// Lays the packages out from left to right, below `top`.
    pub(super) fn new(packages: &[Part<'a>], left: f64, top: f64, room: Room) -> Self {
        let packages: Vec<(Option<u32>, Vec<Branch<'a>>)> = packages
            .iter()
            .map(|part| {
                let id = if let What::Package(id) = part.what { id } else { None };
                (id, part.children.iter().map(Branch::of).collect())
            })
            .collect();
        let nodes = || packages.iter().flat_map(|(_, nodes)| nodes);
        let switches = nodes().map(Branch::levels).max().unwrap_or(0);
        let nics = nodes().any(has_nic);
        let levels = Levels::new(top, switches, nics, room);
        let mut layout = Layout { bottom: levels.package_end, ..Layout::default() };
        let mut x = left;
        for (id, nodes) in &packages {
            let start = x;
            x += PACKAGE_PADDING;
            for node in nodes {
                x = layout.node(node, x, &levels) + GAP;
            }
            x += PACKAGE_PADDING - GAP;
            let rect = Rect {
                x: start,
                y: levels.package,
                w: x - start,
                h: levels.package_end - levels.package,
            };
            layout.packages.push((rect, *id));
            x += GAP;
        }
        layout.right = x - GAP;
        layout
    }

    /// Places a NUMA node and returns its right edge.
    fn node(&mut self, node: &Branch<'a>, x: f64, levels: &Levels) -> f64 {
        let inner: f64 = node.below.iter().map(|host| host.width() + GAP).sum::<f64>() - GAP;
        let width = (inner.max(0.0) + 2.0 * NUMA_PADDING).max(NUMA_WIDTH);
        let rect = Rect { x, y: levels.numa, w: width, h: levels.numa_end - levels.numa };
        let bar = Rect {
            x: x + NUMA_PADDING,
            y: levels.numa_bar,
            w: width - 2.0 * NUMA_PADDING,
            h: NUMA_BAR,
        };
        if let What::Numa(id, facts) = node.what {
            self.nodes.push((rect, bar, id, facts));
        }
        let mut at = x + (width - inner.max(0.0)) / 2.0;
        for host in &node.below {
            let w = host.width();
            let host_bar = Rect { x: at, y: levels.host, w, h: HOST_BAR };
            if let What::Host(name) = host.what {
                self.hosts.push((host_bar, name));
            }
            self.wire(host_bar.middle(), bar.bottom(), host_bar.y, Step::Node, host);
            self.below(host, &host_bar, levels.switch, levels);
            at += w + GAP;
        }
        x + width
    }

    fn wire(&mut self, x: f64, from: f64, to: f64, step: Step, end: &Branch<'a>) {
        let (device, switch) = match end.what {
            What::Gpu(gpu) => (Some(Device::Gpu(gpu.index)), None),
            What::Nic(number, _) => (Some(Device::Nic(number)), None),
            What::Switch(name) => (None, Some(name)),
            _ => (None, None),
        };
        self.wires.push(Wire { x, from, to, step, passed: end.passed.clone(), switch, device });
    }

    /// Places what is below a bar: its own devices on the left, switches beside them.
    fn below(&mut self, part: &Branch<'a>, bar: &Rect, next: f64, levels: &Levels) {
        let host = matches!(part.what, What::Host(_));
        let mut x = bar.x + part.columns() as f64 * (COLUMN + GAP);
        self.devices(part, bar, levels);
        for switch in part.below.iter().filter(|part| !part.is_device()) {
            let rect = Rect { x, y: next, w: switch.width(), h: SWITCH_BAR };
            let step = if host { Step::Phb } else { Step::Pxb };
            self.wire(rect.middle(), bar.bottom(), rect.y, step, switch);
            if let What::Switch(name) = switch.what {
                self.switches.push((rect, name));
            }
            self.below(switch, &rect, next + SWITCH_BAR + WIRE, levels);
            x += rect.w + GAP;
        }
    }

    /// Places a bar's own devices: GPUs in the lower row, NICs above them and in free positions.
    fn devices(&mut self, part: &Branch<'a>, bar: &Rect, levels: &Levels) {
        let host = matches!(part.what, What::Host(_));
        let step = |device: &Branch<'_>| match (host, device.passed.is_empty()) {
            (true, _) => Step::Phb,
            (false, true) => Step::Pix,
            (false, false) => Step::Pxb,
        };
        let left = |column: usize| bar.x + column as f64 * (COLUMN + GAP);
        let columns = part.columns();
        let nics = part.below.iter().filter(|part| matches!(part.what, What::Nic(..))).count();
        let (mut gpus_seen, mut nics_seen) = (0, 0);
        for device in &part.below {
            match device.what {
                What::Gpu(gpu) => {
                    let x = left(gpus_seen);
                    let rect = Rect { x, y: levels.gpu, w: COLUMN, h: levels.gpu_height };
                    // Beside the NIC above it, if there is one.
                    let beside = gpus_seen < nics.min(columns);
                    let at = if beside { x + COLUMN - 10.0 } else { rect.middle() };
                    self.wire(at, bar.bottom(), rect.y, step(device), device);
                    self.gpus.insert(gpu.index.0, (rect, gpu));
                    gpus_seen += 1;
                }
                What::Nic(number, nic) => {
                    let lower = nics_seen >= columns;
                    // The free positions of the lower row come after those of the GPUs.
                    let gpus = part.below.iter().filter(|d| matches!(d.what, What::Gpu(_))).count();
                    let column = if lower { gpus + nics_seen - columns } else { nics_seen };
                    let x = left(column);
                    let rect = if lower {
                        Rect { x, y: levels.gpu, w: COLUMN, h: NIC_HEIGHT }
                    } else {
                        Rect { x, y: levels.nic, w: NIC_WIDTH, h: NIC_HEIGHT }
                    };
                    let at = if lower { x + COLUMN - 10.0 } else { rect.middle() };
                    self.wire(at, bar.bottom(), rect.y, step(device), device);
                    self.nics.push((rect, number, nic));
                    nics_seen += 1;
                }
                _ => {}
            }
        }
    }
}

fn has_nic(part: &Branch<'_>) -> bool {
    matches!(part.what, What::Nic(..)) || part.below.iter().any(has_nic)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::write::hierarchy::packages;
    use crate::topology::{builtin, builtin_names, parse};

    #[test]
    fn no_two_cards_overlap_and_wires_run_down() {
        for name in builtin_names() {
            let topology = parse(builtin(name).expect(name)).expect(name);
            let layout = Layout::new(&packages(&topology), 0.0, 0.0, Room { strip: 40.0 });
            let gpus = layout.gpus.values().map(|(rect, _)| *rect);
            let cards: Vec<Rect> = gpus.chain(layout.nics.iter().map(|(rect, ..)| *rect)).collect();
            assert_eq!(cards.len(), topology.devices().count(), "{name}");
            for (at, a) in cards.iter().enumerate() {
                assert!(a.right() <= layout.right && a.bottom() <= layout.bottom, "{name}");
                for b in &cards[at + 1..] {
                    let apart = a.right() <= b.x
                        || b.right() <= a.x
                        || a.bottom() <= b.y
                        || b.bottom() <= a.y;
                    assert!(apart, "{name}: {a:?} {b:?}");
                }
            }
            assert!(layout.wires.iter().all(|wire| wire.to > wire.from), "{name}");
        }
    }
}
