//! Laws of a plan, on random machines.

use std::collections::{BTreeMap, BTreeSet};

use crate::compact::{planned, spec};
use cuda_cluster::cpuset::CpuSet;
use cuda_cluster::ids::{GpuIndex, NumaId, PciAddress};
use cuda_cluster::plan::{Plan, PlanError};
use cuda_cluster::topology::{
    Allowed, Device, Gpu, LinkKind, Links, Nic, NumaNode, Port, PortState, Topology,
};
use proptest::collection::vec;
use proptest::prelude::*;

/// What a machine is built from; every number selects one of a few choices.
#[derive(Clone, Debug)]
struct Recipe {
    /// NUMA node of each GPU.
    gpus: Vec<u32>,
    /// NUMA node, rate, and whether its port is active, of each NIC.
    nics: Vec<(u32, u32, bool)>,
    /// Links in the order of the pairs.
    kinds: Vec<usize>,
    /// Cores of each NUMA node.
    cores: u32,
    /// Which CPUs are allowed, by number modulo the length.
    allowed: Vec<bool>,
}

const KINDS: [LinkKind; 7] = [
    LinkKind::Pix,
    LinkKind::Pxb,
    LinkKind::Phb,
    LinkKind::Node,
    LinkKind::Sys,
    LinkKind::Nv(2),
    LinkKind::Nv(1),
];
const NODES: u32 = 3;

fn recipes(gpus: usize, nics: usize) -> impl Strategy<Value = Recipe> {
    let gpus = vec(0..NODES, 1..=gpus);
    let nics = vec((0..NODES, 0u32..3, prop::bool::weighted(0.8)), 0..=nics);
    let kinds = vec(0usize..KINDS.len(), 256);
    (gpus, nics, kinds, 1u32..9, vec(prop::bool::weighted(0.8), 1..12)).prop_map(
        |(gpus, nics, kinds, cores, allowed)| Recipe { gpus, nics, kinds, cores, allowed },
    )
}

fn build(recipe: &Recipe) -> Topology {
    let cores = recipe.cores;
    let all = NODES * cores;
    let node_cpus = |node: u32| -> CpuSet {
        let first = node * cores;
        (first..first + cores).flat_map(|core| [core, core + all]).collect()
    };
    let mut allowed: CpuSet =
        (0..2 * all).filter(|cpu| recipe.allowed[*cpu as usize % recipe.allowed.len()]).collect();
    if allowed.is_empty() {
        allowed.insert(0);
    }
    let mut topology = Topology {
        version: 1,
        gpus: recipe.gpus.iter().zip(0u32..).map(|(node, index)| gpu(index, *node)).collect(),
        nics: recipe.nics.iter().enumerate().map(|(at, nic)| self::nic(at, *nic)).collect(),
        numa: (0..NODES)
            .map(|node| NumaNode {
                id: NumaId(node),
                package: Some(node / 2),
                cpus: Some(node_cpus(node)),
                memory_bytes: Some(64 << 30),
                gpu_memory: false,
            })
            .collect(),
        cores: (0..all).map(|core| [core, core + all].into_iter().collect()).collect(),
        allowed: Some(Allowed { cpus: allowed, mems: (0..NODES).collect() }),
        ..Topology::default()
    };
    for gpu in &mut topology.gpus {
        gpu.cpus = gpu.numa.map(|node| node_cpus(node.0));
    }
    let mut kinds = recipe.kinds.iter().cycle().map(|kind| KINDS[*kind]);
    let devices: Vec<Device> = topology.devices().collect();
    let mut links = Links::default();
    for (at, a) in devices.iter().enumerate() {
        for b in &devices[at + 1..] {
            let kind = kinds.next().expect("the kinds repeat for ever");
            let both_gpus = matches!((a, b), (Device::Gpu(_), Device::Gpu(_)));
            let possible = both_gpus || !matches!(kind, LinkKind::Nv(_));
            links.set(*a, *b, if possible { kind } else { LinkKind::Node });
        }
    }
    topology.links = links;
    topology
}

fn gpu(index: u32, node: u32) -> Gpu {
    Gpu {
        index: GpuIndex(index),
        pci: Some(PciAddress {
            domain: 0,
            bus: 16 + u8::try_from(index).expect("few GPUs"),
            device: 0,
            function: 0,
        }),
        numa: Some(NumaId(node)),
        memory_bytes: Some(16 << 30),
        ..Gpu::default()
    }
}

fn nic(at: usize, (node, rate, active): (u32, u32, bool)) -> Nic {
    Nic {
        name: format!("mlx5_{at}"),
        numa: Some(NumaId(node)),
        ports: vec![Port {
            port: 1,
            state: Some(if active { PortState::Active } else { PortState::Down }),
            link_layer: None,
            rate_gbps: Some(f64::from(100 * (1 + rate))),
            netdev: None,
        }],
        ..Nic::default()
    }
}

/// How far a NIC is: less is nearer.
fn distance(topology: &Topology, gpu: u32, nic: usize) -> u32 {
    let nic = Device::Nic(u32::try_from(nic).expect("few NICs"));
    match topology.links.between(Device::Gpu(GpuIndex(gpu)), nic) {
        Some(LinkKind::Pix) => 1,
        Some(LinkKind::Pxb) => 2,
        Some(LinkKind::Phb) => 3,
        Some(LinkKind::Node) => 4,
        Some(LinkKind::Sys) => 5,
        other => panic!("a GPU and a NIC are {other:?}"),
    }
}

fn active(topology: &Topology) -> Vec<usize> {
    let up = |nic: &Nic| nic.ports.iter().any(|port| port.state == Some(PortState::Active));
    (0..topology.nics.len()).filter(|at| up(&topology.nics[*at])).collect()
}

/// The position of each worker's NIC.
fn chosen(plan: &Plan) -> Vec<usize> {
    let nic = |name: &str| name.trim_start_matches("mlx5_").parse().expect("named above");
    plan.workers.iter().map(|worker| nic(&worker.nics[0].nic)).collect()
}

/// Distance first, then how uneven the sharing is.
fn cost(topology: &Topology, choice: &[usize]) -> (u32, usize) {
    let far = (0u32..).zip(choice).map(|(gpu, nic)| distance(topology, gpu, *nic)).sum();
    let mut load: BTreeMap<usize, usize> = BTreeMap::new();
    choice.iter().for_each(|nic| *load.entry(*nic).or_default() += 1);
    (far, load.values().map(|n| n * n).sum())
}

/// The least cost over every way to give each GPU some active NIC.
fn least_cost(topology: &Topology, gpus: usize) -> (u32, usize) {
    fn go(
        topology: &Topology,
        nics: &[usize],
        gpus: usize,
        choice: &mut Vec<usize>,
        best: &mut (u32, usize),
    ) {
        if choice.len() == gpus {
            *best = (*best).min(cost(topology, choice));
            return;
        }
        for nic in nics {
            choice.push(*nic);
            go(topology, nics, gpus, choice, best);
            choice.pop();
        }
    }
    let mut best = (u32::MAX, usize::MAX);
    go(topology, &active(topology), gpus, &mut Vec::new(), &mut best);
    best
}

/// A pair's bandwidth by the published figures, GB/s: NVLink2 25 a link, PCIe paths below.
fn bandwidth(topology: &Topology, a: usize, b: usize) -> u32 {
    let gpu = |at: usize| Device::Gpu(GpuIndex(u32::try_from(at).expect("few GPUs")));
    match topology.links.between(gpu(a), gpu(b)).expect("every pair has a link") {
        LinkKind::Nv(links) => 25 * u32::from(links),
        LinkKind::Pix => 12,
        LinkKind::Pxb => 11,
        LinkKind::Phb => 10,
        LinkKind::Node => 9,
        LinkKind::Sys => 8,
        LinkKind::X => panic!("a pair is two GPUs"),
    }
}

fn score(topology: &Topology, set: &[usize]) -> (u32, u32) {
    let pairs =
        || set.iter().enumerate().flat_map(|(at, a)| set[at + 1..].iter().map(move |b| (*a, *b)));
    let values = || pairs().map(|(a, b)| bandwidth(topology, a, b));
    (values().min().unwrap_or(u32::MAX), values().sum())
}

fn best_score(topology: &Topology, gpus: usize, count: usize) -> (u32, u32) {
    let sets = (0u32..1 << gpus).filter(|mask| mask.count_ones() as usize == count);
    let members = |mask: u32| (0..gpus).filter(|at| mask & (1 << at) != 0).collect::<Vec<_>>();
    sets.map(|mask| score(topology, &members(mask))).max().expect("there is a set")
}

/// Whether each worker can have a core of its own near its GPU.
fn cores_for_all(topology: &Topology, local: &Plan) -> bool {
    fn place(
        worker: usize,
        near: &[Vec<usize>],
        of: &mut [Option<usize>],
        seen: &mut [bool],
    ) -> bool {
        for core in &near[worker] {
            if std::mem::replace(&mut seen[*core], true) {
                continue;
            }
            if of[*core].is_none_or(|other| place(other, near, of, seen)) {
                of[*core] = Some(worker);
                return true;
            }
        }
        false
    }
    let cpus = |at: usize| local.workers[at].binding.cpus.as_ref().expect("bound");
    let near: Vec<Vec<usize>> = (0..local.workers.len())
        .map(|worker| {
            let is_near =
                |core: &usize| !topology.cores[*core].intersection(cpus(worker)).is_empty();
            (0..topology.cores.len()).filter(is_near).collect()
        })
        .collect();
    let mut of = vec![None; topology.cores.len()];
    (0..near.len())
        .all(|worker| place(worker, &near, &mut of, &mut vec![false; topology.cores.len()]))
}

/// Gives GPU `at` the index `to[at]`, and NIC `at` the position `place[at]`.
fn renumbered(topology: &Topology, to: &[u32], place: &[usize]) -> Topology {
    let mut other = topology.clone();
    for (gpu, index) in other.gpus.iter_mut().zip(to) {
        gpu.index = GpuIndex(*index);
    }
    other.gpus.sort_by_key(|gpu| gpu.index);
    for (nic, at) in topology.nics.iter().zip(place) {
        other.nics[*at] = nic.clone();
    }
    let rename = |device: Device| match device {
        Device::Gpu(index) => Device::Gpu(GpuIndex(to[index.0 as usize])),
        Device::Nic(at) => Device::Nic(u32::try_from(place[at as usize]).expect("few NICs")),
    };
    other.links = Links::default();
    for (a, b, kind) in topology.links.iter() {
        other.links.set(rename(a), rename(b), kind);
    }
    other
}

/// What each GPU got, by PCI address.
fn by_place(plan: &Plan) -> BTreeMap<String, (Vec<String>, String, String)> {
    let entry = |worker: &cuda_cluster::plan::WorkerPlan| {
        let place = worker.gpu.as_ref().and_then(|gpu| gpu.pci).expect("a GPU with a place");
        let nics = worker.nics.iter().map(ToString::to_string).collect();
        let cpus = worker.binding.cpus.as_ref().map_or_else(String::new, ToString::to_string);
        let mems = worker.binding.mems.as_ref().map_or_else(String::new, ToString::to_string);
        (place.to_string(), (nics, cpus, mems))
    };
    plan.workers.iter().map(entry).collect()
}

const PINNED: &str = "ucx: {infiniband: true, net_devices: auto}\n";

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn every_worker_has_a_gpu_of_its_own_and_allowed_cpus(recipe in recipes(8, 8)) {
        let topology = build(&recipe);
        let plan = planned(&topology, &spec(PINNED)).expect("a plan");
        let gpus: BTreeSet<_> =
            plan.workers.iter().map(|w| w.gpu.as_ref().expect("a GPU").index.0).collect();
        prop_assert_eq!(gpus.len(), recipe.gpus.len());
        prop_assert_eq!(plan.workers.len(), recipe.gpus.len());
        let allowed = &topology.allowed.as_ref().expect("built so").cpus;
        for worker in &plan.workers {
            let cpus = worker.binding.cpus.as_ref().expect("bound");
            prop_assert!(!cpus.is_empty() && cpus.is_subset(allowed));
            let own = worker.gpu.as_ref().map(|gpu| gpu.index.to_string());
            let first = worker.env["CUDA_VISIBLE_DEVICES"].split(',').next().map(str::to_owned);
            prop_assert_eq!(first, own);
        }
    }

    #[test]
    fn split_is_disjoint_and_complete(recipe in recipes(8, 0)) {
        let topology = build(&recipe);
        let local = planned(&topology, &spec("cpus: local\n")).expect("a plan");
        match planned(&topology, &spec("cpus: split\n")) {
            Err(PlanError::TooFewCores { .. }) => {
                prop_assert!(!cores_for_all(&topology, &local), "there are cores for all");
            }
            Err(error) => prop_assert!(false, "{}", error),
            Ok(split) => {
                let mut seen = CpuSet::new();
                for (worker, whole) in split.workers.iter().zip(&local.workers) {
                    let mine = worker.binding.cpus.as_ref().expect("bound");
                    prop_assert!(!mine.is_empty());
                    prop_assert!(mine.is_subset(whole.binding.cpus.as_ref().expect("bound")));
                    prop_assert!(mine.intersection(&seen).is_empty());
                    seen = seen.union(mine);
                }
                let near = local.workers.iter().filter_map(|worker| worker.binding.cpus.as_ref());
                prop_assert_eq!(near.fold(CpuSet::new(), |all, more| all.union(more)), seen);
            }
        }
    }

    #[test]
    fn no_nic_serves_two_while_an_equally_near_one_idles(recipe in recipes(8, 8)) {
        let topology = build(&recipe);
        let usable = active(&topology);
        prop_assume!(!usable.is_empty());
        for mode in ["auto", "stripe"] {
            let text = format!("ucx: {{infiniband: true, net_devices: {mode}}}\n");
            let plan = planned(&topology, &spec(&text)).expect("a plan");
            prop_assert_eq!(plan.check(), Ok(()));
            let used: Vec<String> =
                plan.workers.iter().flat_map(|w| &w.nics).map(|port| port.nic.clone()).collect();
            for (gpu, worker) in (0u32..).zip(&plan.workers) {
                let nearest = usable.iter().map(|nic| distance(&topology, gpu, *nic)).min();
                for port in &worker.nics {
                    let at: usize = port.nic.trim_start_matches("mlx5_").parse().expect("named");
                    prop_assert_eq!(Some(distance(&topology, gpu, at)), nearest);
                    let shared = used.iter().filter(|nic| **nic == port.nic).count() > 1;
                    let idle = usable.iter().find(|nic| {
                        Some(distance(&topology, gpu, **nic)) == nearest
                            && !used.contains(&format!("mlx5_{nic}"))
                    });
                    prop_assert!(!shared || idle.is_none(), "{} is shared, {:?} idles", port, idle);
                }
            }
            if mode == "stripe" {
                for nic in &usable {
                    let wanted = (0u32..).zip(&plan.workers).any(|(gpu, _)| {
                        let all = usable.iter().map(|other| distance(&topology, gpu, *other));
                        Some(distance(&topology, gpu, *nic)) == all.min()
                    });
                    prop_assert_eq!(used.contains(&format!("mlx5_{nic}")), wanted);
                }
            }
        }
    }

    #[test]
    fn no_other_assignment_costs_less(recipe in recipes(6, 6)) {
        let topology = build(&recipe);
        prop_assume!(!active(&topology).is_empty());
        let plan = planned(&topology, &spec(PINNED)).expect("a plan");
        let choice = chosen(&plan);
        prop_assert_eq!(cost(&topology, &choice), least_cost(&topology, choice.len()));
    }

    #[test]
    fn no_other_set_of_gpus_is_connected_better(recipe in recipes(10, 0), wanted in 1usize..=10) {
        let topology = build(&recipe);
        let count = wanted.min(recipe.gpus.len());
        let text = format!("gpus: {{count: {count}, choose: best-connected}}\n");
        let plan = planned(&topology, &spec(&text)).expect("a plan");
        let set: Vec<usize> = plan
            .workers
            .iter()
            .map(|worker| worker.gpu.as_ref().expect("a GPU").index.0 as usize)
            .collect();
        prop_assert_eq!(set.len(), count);
        prop_assert_eq!(score(&topology, &set), best_score(&topology, recipe.gpus.len(), count));
    }

    #[test]
    fn the_same_input_gives_the_same_plan_byte_for_byte(recipe in recipes(8, 8)) {
        let topology = build(&recipe);
        let text = |spec| serde_json::to_string(&planned(&topology, spec).expect("a plan"));
        let spec = spec(PINNED);
        prop_assert_eq!(text(&spec).expect("JSON"), text(&spec).expect("JSON"));
    }

    #[test]
    fn renumbering_devices_changes_nothing_about_their_plan(
        recipe in recipes(8, 8),
        gpu_keys in vec(any::<u32>(), 8),
        nic_keys in vec(any::<u32>(), 8),
    ) {
        fn shuffled(count: usize, keys: &[u32]) -> Vec<usize> {
            let mut order: Vec<usize> = (0..count).collect();
            order.sort_by_key(|at| keys[*at]);
            order
        }
        let topology = build(&recipe);
        let to: Vec<u32> = shuffled(topology.gpus.len(), &gpu_keys)
            .into_iter()
            .map(|n| u32::try_from(n).expect("few GPUs"))
            .collect();
        let place = shuffled(topology.nics.len(), &nic_keys);
        let other = renumbered(&topology, &to, &place);
        for mode in ["auto", "stripe"] {
            let text = format!("ucx: {{infiniband: true, net_devices: {mode}}}\n");
            prop_assume!(mode == "auto" || !active(&topology).is_empty());
            let (one, two) = (planned(&topology, &spec(&text)), planned(&other, &spec(&text)));
            prop_assert_eq!(by_place(&one.expect("a plan")), by_place(&two.expect("a plan")));
        }
    }

    #[test]
    fn a_plan_survives_its_text_forms(recipe in recipes(8, 8)) {
        let plan = planned(&build(&recipe), &spec(PINNED)).expect("a plan");
        let yaml = serde_yaml::to_string(&plan).expect("YAML");
        prop_assert_eq!(&serde_yaml::from_str::<Plan>(&yaml).expect("its own YAML"), &plan);
        let json = serde_json::to_string(&plan).expect("JSON");
        prop_assert_eq!(&serde_json::from_str::<Plan>(&json).expect("its own JSON"), &plan);
    }
}
