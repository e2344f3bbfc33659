//! How long planning takes on the largest supported machine: 16 GPUs, 16 NICs, 512 CPUs.
//!
//! `cargo bench --bench plan` prints the median and the slowest of many plans for each spec.

#![allow(clippy::print_stdout)]

use std::hint::black_box;
use std::time::{Duration, Instant};

use cuda_cluster::cpuset::CpuSet;
use cuda_cluster::ids::{GpuIndex, NumaId, PciAddress};
use cuda_cluster::plan::{CallerEnvironment, plan};
use cuda_cluster::spec::{self, Request};
use cuda_cluster::topology::{
    Device, Gpu, LinkKind, LinkLayer, Nic, NumaNode, Port, PortState, Topology,
};

const GPUS: u32 = 16;
const NICS: u32 = 16;
const NODES: u32 = 8;
const CORES: u32 = 256;
const ROUNDS: usize = 200;

fn largest() -> Topology {
    let of_node = |node: u32| -> CpuSet {
        let first = node * CORES / NODES;
        (first..first + CORES / NODES).flat_map(|core| [core, core + CORES]).collect()
    };
    let pci = |bus: u32| PciAddress {
        domain: 0,
        bus: u8::try_from(bus).expect("few devices"),
        device: 0,
        function: 0,
    };
    let gpu = |index: u32| Gpu {
        index: GpuIndex(index),
        pci: Some(pci(16 + index)),
        numa: Some(NumaId(index * NODES / GPUS)),
        cpus: Some(of_node(index * NODES / GPUS)),
        memory_bytes: Some(80 << 30),
        ..Gpu::default()
    };
    let nic = |at: u32| Nic {
        name: format!("mlx5_{at}"),
        pci: Some(pci(64 + at)),
        numa: Some(NumaId(at * NODES / NICS)),
        ports: vec![Port {
            port: 1,
            state: Some(PortState::Active),
            link_layer: Some(LinkLayer::InfiniBand),
            rate_gbps: Some(400.0),
            netdev: None,
        }],
        ..Nic::default()
    };
    let mut topology = Topology {
        version: 1,
        gpus: (0..GPUS).map(gpu).collect(),
        nics: (0..NICS).map(nic).collect(),
        numa: (0..NODES)
            .map(|node| NumaNode {
                id: NumaId(node),
                package: Some(node / 4),
                cpus: Some(of_node(node)),
                memory_bytes: Some(256 << 30),
                gpu_memory: false,
            })
            .collect(),
        cores: (0..CORES).map(|core| [core, core + CORES].into_iter().collect()).collect(),
        ..Topology::default()
    };
    // The NVLink counts around a GPU vary, so that no branch of the search ends early.
    for a in 0..GPUS {
        for b in a + 1..GPUS {
            let links = u8::try_from((a * 7 + b * 5) % 6 + 1).expect("at most six");
            let pair = (Device::Gpu(GpuIndex(a)), Device::Gpu(GpuIndex(b)));
            topology.links.set(pair.0, pair.1, LinkKind::Nv(links));
        }
        for nic in 0..NICS {
            let near = a * NODES / GPUS == nic * NODES / NICS;
            let kind = if near { LinkKind::Pxb } else { LinkKind::Sys };
            topology.links.set(Device::Gpu(GpuIndex(a)), Device::Nic(nic), kind);
        }
    }
    topology
}

fn main() {
    let topology = largest();
    let caller = CallerEnvironment::default();
    for (name, text) in [
        ("pin, local", "ucx: {nvlink: true, infiniband: true}"),
        ("stripe, split", "cpus: split\nucx: {infiniband: true, net_devices: stripe}"),
        ("best-connected 8 of 16", "gpus: {count: 8, choose: best-connected}"),
        ("4 workers a GPU, split", "workers_per_gpu: 4\ncpus: split\nucx: {infiniband: true}"),
    ] {
        let spec = spec::parse(&format!("version: 1\n{text}\n"), name).expect("a right spec");
        let request = Request::of(spec).expect("a right spec");
        let mut times: Vec<Duration> = (0..ROUNDS)
            .map(|_| {
                let begin = Instant::now();
                black_box(plan(black_box(&topology), &request, &caller)).expect("a plan");
                begin.elapsed()
            })
            .collect();
        times.sort_unstable();
        println!(
            "{name:24}  median {:>9.1?}  slowest {:>9.1?}",
            times[ROUNDS / 2],
            times[ROUNDS - 1]
        );
    }
}
