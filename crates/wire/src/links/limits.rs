//! What a link between two workers, two GPUs, or a GPU and the host can carry.
//!
//! Pure. The numbers are vendors' per direction, and what good software measures with large
//! messages: NVLink 20 GB/s a link on P100, 25 from V100 to H200, 50 on B200; PCIe after encoding.
//!
//! *Invariant:* a limit is never below what the link can carry, so a figure above it is wrong.

use crate::peer::MemoryKind;
use cuda_cluster_model::ids::GpuIndex;
use cuda_cluster_model::plan::{Plan, WorkerPlan};
use cuda_cluster_model::topology::{Device, Gpu, LinkKind, NvLink, NvLinkPeer, PcieLink, Topology};

/// What a link carries in one direction, in 10⁹ bytes per second.
#[derive(Clone, Debug, PartialEq)]
pub struct Limit {
    /// The link: `NV18`, `PCIe 5.0 x16`, `host memory`.
    pub link: String,
    /// Most that it can carry, if known.
    pub most: Option<f64>,
    /// What good software measures on it.
    pub usual: f64,
}

impl Limit {
    /// The limit of links through host memory.
    pub(super) fn host() -> Self {
        Self { link: "host memory".to_owned(), most: None, usual: HOST_USUAL }
    }
}

/// Host memory within a machine, copied once by one core; no fixed limit.
const HOST_USUAL: f64 = 10.0;

/// The share of NVLink-C2C that copies reach.
const C2C_SHARE: f64 = 0.80;

/// One link's rate, and the share of it that good software reaches, by major compute capability.
fn nvlink(major: u32) -> (f64, f64) {
    match major {
        ..=6 => (20.0, 0.90),
        7 => (25.0, 0.80),
        8 => (25.0, 0.92),
        9 => (25.0, 0.84),
        _ => (50.0, 0.86),
    }
}

/// What 16 lanes carry and what software reaches, by the transfer rate in GT/s: encoding takes
/// 2 of 130 bits. A rate between two generations counts as the newer one.
fn pcie(gt_per_s: f64) -> (&'static str, f64, f64) {
    match gt_per_s {
        rate if rate <= 8.0 => ("3.0", 15.75, 0.80),
        rate if rate <= 16.0 => ("4.0", 31.5, 0.83),
        rate if rate <= 32.0 => ("5.0", 63.0, 0.87),
        _ => ("6.0", 126.0, 0.85),
    }
}

/// The limit of the link between two workers; `None` if unknown.
///
/// `machine` is the machine whose GPUs carry device memory; simulated devices have none.
pub fn limit(
    machine: Option<&Topology>,
    plan: &Plan,
    from: &str,
    to: &str,
    memory: MemoryKind,
) -> Option<Limit> {
    if memory == MemoryKind::Host || plan.machine.simulated {
        return Some(Limit::host());
    }
    let machine = machine?;
    let gpu = |name| index(plan.workers.iter().find(|worker| worker.name == name)?);
    let (a, b) = (gpu(from)?, gpu(to)?);
    let find = |index| machine.gpus.iter().find(|gpu| gpu.index == index);
    between(machine, find(a)?, find(b)?)
}

fn index(worker: &WorkerPlan) -> Option<GpuIndex> {
    worker.gpu.as_ref().map(|gpu| gpu.index)
}

/// The limit of the link between a GPU and the host memory near it; `None` if unknown.
pub fn to_host(machine: &Topology, gpu: &Gpu) -> Option<Limit> {
    if let Some(most) = gpu.c2c.and_then(|links| links.gb_per_s) {
        let link = "NVLink-C2C".to_owned();
        return Some(Limit { link, most: Some(most), usual: most * C2C_SHARE });
    }
    let is_to_cpu = |link: &&NvLink| link.active && link.peer == NvLinkPeer::Cpu;
    let links = gpu.nvlinks.iter().filter(is_to_cpu).count();
    if let Some(links) = u8::try_from(links).ok().filter(|links| *links > 0) {
        return Some(of_nvlinks(links, &[gpu]));
    }
    let ports = machine.ancestry().above(gpu.parent.as_deref());
    let ports = ports.into_iter().filter_map(|bridge| bus(bridge.pcie.as_ref()));
    let end = bus(gpu.pcie.as_ref())?;
    let path = ports.chain([end.clone()]).reduce(narrowest)?;
    // As between GPUs: a virtual machine's ports decide nothing.
    Some(Limit { most: end.most, ..path })
}

/// The limit of so many NVLinks of these GPUs.
fn of_nvlinks(links: u8, ends: &[&Gpu]) -> Limit {
    let majors = ends.iter().filter_map(|gpu| gpu.compute_capability.map(|known| known.major));
    // Without a generation the slowest in use.
    let (whole, share) = nvlink(majors.min().unwrap_or(7));
    // Graphics cards have slower links than their generation (RTX A6000, A40: 14.06). What the
    // source tells includes the protocol's overhead.
    let told = ends.iter().filter_map(|gpu| gpu.slowest_nvlink_gb_per_s());
    let most = told.fold(whole, f64::min) * f64::from(links);
    Limit { link: LinkKind::Nv(links).to_string(), most: Some(most), usual: most * share }
}

fn narrowest(one: Limit, other: Limit) -> Limit {
    if other.most < one.most { other } else { one }
}

/// The limit of the link between two GPUs; `None` if unknown.
pub fn between(machine: &Topology, a: &Gpu, b: &Gpu) -> Option<Limit> {
    match machine.links.between(Device::Gpu(a.index), Device::Gpu(b.index))? {
        // Within one GPU: the bandwidth of its memory, which no source reports.
        LinkKind::X => None,
        LinkKind::Nv(links) => {
            a.compute_capability.and(b.compute_capability)?;
            Some(of_nvlinks(links, &[a, b]))
        }
        kind => {
            let ports = machine.ancestry().between(a.parent.as_deref(), b.parent.as_deref());
            let ports = ports.into_iter().filter_map(|bridge| bus(bridge.pcie.as_ref()));
            let ends = [bus(a.pcie.as_ref())?, bus(b.pcie.as_ref())?];
            let [first, second] = ends.clone();
            // A virtual machine's ports tell nothing of what they carry, so that only the ends
            // decide what cannot be.
            let most = narrowest(first, second).most;
            let path = ports.chain(ends).reduce(narrowest)?;
            // What the interconnect of CPUs leaves is less than most links; how much less, no
            // source tells.
            let between_nodes = matches!(kind, LinkKind::Node | LinkKind::Sys);
            let usual = if between_nodes { path.usual.min(HOST_USUAL) } else { path.usual };
            Some(Limit { usual, most, ..path })
        }
    }
}

/// A PCIe link at full speed, as one of its ends knows it: idle devices slow theirs down.
fn bus(link: Option<&PcieLink>) -> Option<Limit> {
    let link = link?;
    let rate = link.max_gt_per_s.or(link.gt_per_s)?;
    let lanes = link.width.or(link.max_width)?;
    let (generation, of_sixteen, share) = pcie(rate);
    let most = of_sixteen * f64::from(lanes) / 16.0;
    let link = format!("PCIe {generation} x{lanes}");
    Some(Limit { link, most: Some(most), usual: most * share })
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuda_cluster_model::topology;

    fn of(machine: &str, a: u32, b: u32) -> Option<Limit> {
        let text = topology::builtin(machine).expect("built in");
        let machine = topology::parse(text).expect("it reads");
        let gpu = |index| machine.gpus.iter().find(|gpu| gpu.index == GpuIndex(index));
        between(&machine, gpu(a)?, gpu(b)?)
    }

    #[test]
    fn nvlinks_add_up_by_generation() {
        let most = |machine, a, b| of(machine, a, b).and_then(|limit| limit.most);
        assert_eq!(most("dgx-h100", 0, 1), Some(450.0));
        assert_eq!(most("dgx-a100", 0, 7), Some(300.0));
        assert_eq!(most("dgx-b200", 0, 1), Some(900.0));
        assert_eq!(most("dgx-1-p100", 0, 1), Some(20.0));
    }

    #[test]
    fn software_reaches_what_was_measured_on_such_machines() {
        let usual = |machine| of(machine, 0, 1).map_or(0.0, |limit| limit.usual);
        assert!((370.0..385.0).contains(&usual("dgx-h100")));
        assert!((270.0..280.0).contains(&usual("dgx-a100")));
        assert!((765.0..780.0).contains(&usual("dgx-b200")));
    }

    #[test]
    fn a_bus_is_as_fast_as_its_slower_end() {
        let text = topology::builtin("dgx-h100").expect("built in");
        let machine = topology::parse(text).expect("it reads");
        let mut gpu = machine.gpus[0].clone();
        gpu.pcie = Some(topology::PcieLink {
            gt_per_s: Some(2.5),
            max_gt_per_s: Some(32.0),
            width: Some(8),
            max_width: Some(16),
        });
        let limit = bus(gpu.pcie.as_ref()).expect("a link");
        assert_eq!((limit.link.as_str(), limit.most), ("PCIe 5.0 x8", Some(31.5)));
    }

    #[test]
    fn a_path_is_as_fast_as_its_narrowest_port_and_slower_between_numa_nodes() {
        let read = |machine| {
            let text = topology::builtin(machine).expect("built in");
            topology::parse(text).expect("it reads")
        };
        let mut machine = read("dgx-a100");
        machine.gpus.iter_mut().for_each(|gpu| gpu.nvlinks.clear());
        machine.links = machine.derive_links();
        let of = |machine: &Topology, a: usize, b: usize| {
            between(machine, &machine.gpus[a], &machine.gpus[b]).expect("a limit")
        };
        assert_eq!(of(&machine, 0, 1).link, "PCIe 4.0 x16");
        assert!(of(&machine, 0, 1).usual > 25.0);
        assert!(of(&machine, 0, 7).usual <= HOST_USUAL, "another socket");
        let above = machine.gpus[1].parent.clone();
        let port = machine.bridges.iter_mut().find(|bridge| Some(&bridge.id) == above.as_ref());
        port.expect("a port").pcie = Some(topology::PcieLink {
            max_gt_per_s: Some(16.0),
            width: Some(4),
            ..topology::PcieLink::default()
        });
        let narrow = of(&machine, 0, 1);
        assert_eq!((narrow.link.as_str(), narrow.most), ("PCIe 4.0 x4", Some(31.5)));
        assert!(narrow.usual < 31.5 / 4.0, "{narrow:?}");
    }

    #[test]
    fn the_way_to_the_host_is_the_bus_or_what_joins_the_chips() {
        let of = |machine: &str| {
            let text = topology::builtin(machine).expect("built in");
            let machine = topology::parse(text).expect("it reads");
            to_host(&machine, &machine.gpus[0]).map(|limit| (limit.link, limit.most))
        };
        let known = |link: &str, most| Some((link.to_owned(), Some(most)));
        assert_eq!(of("dgx-h100"), known("PCIe 5.0 x16", 63.0));
        assert_eq!(of("dgx-a100"), known("PCIe 4.0 x16", 31.5));
        assert_eq!(of("ibm-ac922"), known("NV3", 75.0));
        let text = topology::builtin("dgx-h100").expect("built in");
        let mut machine = topology::parse(text).expect("it reads");
        machine.gpus[0].c2c = Some(topology::ChipLinks { links: 10, gb_per_s: Some(450.0) });
        let limit = to_host(&machine, &machine.gpus[0]).expect("a limit");
        assert_eq!((limit.link.as_str(), limit.most), ("NVLink-C2C", Some(450.0)));
        machine.gpus[1].pcie = None;
        assert_eq!(to_host(&machine, &machine.gpus[1]), None);
    }

    #[test]
    fn the_links_of_graphics_cards_are_slower_than_their_generation() {
        let text = topology::builtin("dgx-a100").expect("built in");
        let mut machine = topology::parse(text).expect("it reads");
        for link in machine.gpus.iter_mut().flat_map(|gpu| &mut gpu.nvlinks) {
            link.gb_per_s = Some(14.06);
        }
        let limit = between(&machine, &machine.gpus[0], &machine.gpus[1]).expect("a limit");
        assert!((limit.most.unwrap_or(0.0) - 12.0 * 14.06).abs() < 0.01, "{limit:?}");
    }
}
