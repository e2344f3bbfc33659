//! Plans of published machines and of unusual ones. Each was reviewed, and its sentence says why it
//! is right.

use crate::compact::{caller_with, compact, compact_of, machine, planned, planned_by, spec};
use cuda_cluster::ids::{GpuIndex, NumaId};
use cuda_cluster::topology::{
    Allowed, Device, Gpu, LinkKind, LinkLayer, MigInstance, Nic, NicKind, NumaNode, Port,
    PortState, Topology,
};

const NEAREST: &str = "ucx: {nvlink: true, infiniband: true, net_devices: auto}\n";
const FABRIC: &str = "ucx: {infiniband: true, net_devices: auto}\n";

/// Snapshots a plan under its sentence.
macro_rules! right {
    ($name:literal, $why:literal, $plan:expr) => {
        insta::assert_snapshot!($name, format!("{}\n---\n{}", $why, $plan))
    };
}

/// A machine under construction: GPUs on NUMA nodes, NICs, and links by what they share.
#[derive(Default)]
struct Odd(Topology);

impl Odd {
    /// Nodes with these CPUs and 64 GiB each, ids from 0 in order.
    fn nodes(cpus: &[&str]) -> Self {
        let mut odd = Self::default();
        odd.0.version = 1;
        for (id, cpus) in (0u32..).zip(cpus) {
            odd = odd.node(id, cpus);
        }
        odd
    }

    fn node(mut self, id: u32, cpus: &str) -> Self {
        self.0.numa.push(NumaNode {
            id: NumaId(id),
            package: None,
            cpus: Some(cpus.parse().expect("CPUs")),
            memory_bytes: Some(64 << 30),
            gpu_memory: false,
        });
        self
    }

    fn gpu(mut self, numa: u32) -> Self {
        let at = u32::try_from(self.0.gpus.len()).expect("few GPUs");
        let near = self.0.numa.iter().find(|node| node.id.0 == numa).and_then(|n| n.cpus.clone());
        self.0.gpus.push(Gpu {
            index: GpuIndex(at),
            pci: Some(format!("0000:{:02x}:00.0", 16 + at).parse().expect("a place")),
            uuid: Some(
                format!("GPU-{at:08x}-0000-0000-0000-000000000000").parse().expect("a UUID"),
            ),
            numa: Some(NumaId(numa)),
            cpus: near,
            memory_bytes: Some(40 << 30),
            ..Gpu::default()
        });
        self
    }

    fn nic(self, name: &str, numa: u32) -> Self {
        let port = Port {
            port: 1,
            state: Some(PortState::Active),
            link_layer: Some(LinkLayer::InfiniBand),
            rate_gbps: Some(200.0),
            netdev: None,
        };
        self.nic_with(name, numa, NicKind::Physical, vec![port])
    }

    fn nic_with(mut self, name: &str, numa: u32, kind: NicKind, ports: Vec<Port>) -> Self {
        let nic =
            Nic { name: name.to_owned(), numa: Some(NumaId(numa)), kind, ports, ..Nic::default() };
        self.0.nics.push(nic);
        self
    }

    fn link(mut self, gpu: u32, nic: u32, kind: LinkKind) -> Self {
        self.0.links.set(Device::Gpu(GpuIndex(gpu)), Device::Nic(nic), kind);
        self
    }

    fn nvlinked(mut self, links: u8) -> Self {
        let gpus: Vec<GpuIndex> = self.0.gpus.iter().map(|gpu| gpu.index).collect();
        for (at, a) in gpus.iter().enumerate() {
            for b in &gpus[at + 1..] {
                self.0.links.set(Device::Gpu(*a), Device::Gpu(*b), LinkKind::Nv(links));
            }
        }
        self
    }

    fn allow(mut self, cpus: &str, mems: &str) -> Self {
        let allowed =
            Allowed { cpus: cpus.parse().expect("CPUs"), mems: mems.parse().expect("nodes") };
        self.0.allowed = Some(allowed);
        self
    }
}

fn port(number: u32, state: PortState, layer: LinkLayer, rate_gbps: f64) -> Port {
    Port {
        port: number,
        state: Some(state),
        link_layer: Some(layer),
        rate_gbps: Some(rate_gbps),
        netdev: None,
    }
}

#[test]
fn published_machines() {
    right!(
        "dgx-1-p100",
        "Two GPUs hang off each PCIe switch with one NIC: each pair shares that NIC (PIX).",
        compact(&machine("dgx-1-p100"), &spec(NEAREST))
    );
    right!(
        "dgx-2",
        "Sixteen GPUs, eight compute NICs: a NIC for the two GPUs of its switch.",
        compact(&machine("dgx-2"), &spec(NEAREST))
    );
    right!(
        "dgx-a100",
        "NUMA nodes 3, 1, 7, 5 as the firmware numbers them; a NIC for each GPU; storage NICs free.",
        compact(&machine("dgx-a100"), &spec(NEAREST))
    );
    right!(
        "dgx-h100",
        "The compute NICs behind each GPU's own switch, not the storage NICs between them.",
        compact(&machine("dgx-h100"), &spec(NEAREST))
    );
    right!(
        "dgx-b200",
        "As a DGX H100; compute capability 10 keeps the pipelined transfers on.",
        compact(&machine("dgx-b200"), &spec(NEAREST))
    );
    right!(
        "gb200",
        "Two GPUs on each Grace CPU; their own memory nodes are not used for host memory.",
        compact(&machine("gb200-nvl72-tray"), &spec(NEAREST))
    );
    right!(
        "gb300",
        "Each GPU the ConnectX-8 whose DMA function is beside it, crosswise, not by order of names.",
        compact(&machine("gb300-nvl72-tray"), &spec(NEAREST))
    );
    right!(
        "p5",
        "Four EFAs beside each GPU: the first of its own; 'srd' for them, which have no 'rc'.",
        compact(&machine("aws-p5"), &spec(NEAREST))
    );
    right!(
        "p5-stripe",
        "All four EFAs of each GPU, and as many rails.",
        compact(
            &machine("aws-p5"),
            &spec("ucx: {nvlink: true, infiniband: true, net_devices: stripe}\n")
        )
    );
    right!(
        "p6-b200",
        "One EFA of 400 Gbit/s for each GPU; those of the baseboard are no choice.",
        compact(&machine("aws-p6-b200"), &spec(NEAREST))
    );
    right!(
        "hgx-b200",
        "The adapter below the GPU's own switch (PIX).",
        compact(&machine("hgx-b200"), &spec(NEAREST))
    );
    right!(
        "hgx-b300",
        "The ConnectX-8 whose own switch the GPU is below (PXB); no DMA functions here.",
        compact(&machine("hgx-b300"), &spec(NEAREST))
    );
    right!(
        "a3-ultra",
        "Two GPUs and two adapters below each switch: one each, in their order.",
        compact(&machine("gcp-a3-ultra"), &spec(NEAREST))
    );
    right!("a4", "As A3 Ultra.", compact(&machine("gcp-a4"), &spec(NEAREST)));
    right!(
        "a3-mega",
        "Its interfaces are no RDMA devices: nothing is pinned, and no 'rc', which is said.",
        compact(&machine("gcp-a3-mega"), &spec(NEAREST))
    );
    right!(
        "rtx-pro-6000-8",
        "Two GPUs share the adapter of their switch; they have no NVLink, which is said.",
        compact(&machine("rtx-pro-6000-8"), &spec(NEAREST))
    );
    right!(
        "rtx-4090-8",
        "Nothing but PCIe through the CPUs; both things asked for are missing, which is said.",
        compact(&machine("rtx-4090-8"), &spec(NEAREST))
    );
    right!(
        "dgx-spark",
        "Both PCIe devices are equally near; one active port; no device limit, the memory is the host's.",
        compact(&machine("dgx-spark"), &spec(FABRIC))
    );
    right!("laptop", "One GPU, all CPUs, no NIC.", compact(&machine("laptop"), &spec("")));
    right!(
        "p4d",
        "Four EFAs for eight GPUs; that they have no 'rc' is said, for it was asked for.",
        compact(&machine("aws-p4d"), &spec(NEAREST))
    );
    right!(
        "ndv5",
        "Eight NICs for eight GPUs; the Ethernet NIC of the host is not among them.",
        compact(&machine("azure-ndv5"), &spec(NEAREST))
    );
    right!(
        "ac922",
        "Two RDMA functions and two GPUs a socket: one for each GPU; memory on nodes 0 and 8.",
        compact(&machine("ibm-ac922"), &spec(NEAREST))
    );
}

#[test]
fn gpu_order_numa_order_and_nic_order_all_differ() {
    let odd = Odd::nodes(&["0-7", "8-15", "16-23", "24-31", "32-39", "40-47", "48-55", "56-63"])
        .gpu(3)
        .gpu(1)
        .gpu(7)
        .gpu(5)
        .nic("mlx5_2", 1)
        .nic("mlx5_0", 5)
        .nic("mlx5_1", 3)
        .nic("mlx5_3", 7);
    right!(
        "all-orders-differ",
        "By place and not by number: GPU 0 on node 3 with mlx5_1, GPU 1 on node 1 with mlx5_2, …",
        compact(&odd.0, &spec(FABRIC))
    );
}

#[test]
fn a_single_nic_is_used_by_all_also_from_afar() {
    let odd = Odd::nodes(&["0-3", "4-7"]).gpu(0).gpu(0).gpu(1).gpu(1).nic("mlx5_0", 0);
    right!(
        "single-nic",
        "InfiniBand is asked for and there is one NIC: the far GPUs use it too.",
        compact(&odd.0, &spec(FABRIC))
    );
    let plan = planned(&odd.0, &spec(FABRIC)).expect("a plan");
    let reason = |at: usize| {
        let why = plan.workers[at].why.iter().find(|why| why.choice == "nic").expect("a reason");
        why.reason.clone()
    };
    assert_eq!(reason(0), "NODE, the only usable NIC; also serves GPU 1, GPU 2, GPU 3");
    assert!(reason(3).contains("far from this GPU"), "{}", reason(3));
}

#[test]
fn nics_that_cannot_be_used_are_left_with_the_reason() {
    let ib = LinkLayer::InfiniBand;
    let odd = Odd::nodes(&["0-3", "4-7"])
        .gpu(0)
        .gpu(1)
        .nic_with("mlx5_0", 0, NicKind::Physical, vec![port(1, PortState::Down, ib, 200.0)])
        .nic_with(
            "mlx5_1",
            0,
            NicKind::VirtualFunction,
            vec![port(1, PortState::Active, ib, 200.0)],
        )
        .nic_with("mlx5_2", 0, NicKind::BondSlave, vec![port(1, PortState::Active, ib, 200.0)])
        .nic_with("rxe0", 0, NicKind::Software, vec![port(1, PortState::Active, ib, 1.0)])
        .nic_with(
            "mlx5_3",
            1,
            NicKind::Physical,
            vec![port(1, PortState::Init, ib, 200.0), port(2, PortState::Active, ib, 100.0)],
        )
        .nic_with("mlx5_bond_0", 0, NicKind::Bond, vec![port(1, PortState::Active, ib, 200.0)])
        .link(0, 0, LinkKind::Pix)
        .link(0, 1, LinkKind::Pix);
    right!(
        "unusable-nics",
        "The bond for GPU 0 and port 2 for GPU 1: what is nearer is down, virtual, bonded or software.",
        compact(&odd.0, &spec(FABRIC))
    );
    let plan = planned(&odd.0, &spec(FABRIC)).expect("a plan");
    let why = plan.workers[0].why.iter().find(|why| why.choice == "nic").expect("a reason");
    let rejected: Vec<String> =
        why.rejected.iter().map(|r| format!("{}: {}", r.what, r.why)).collect();
    insta::assert_snapshot!("unusable-nics-reasons", rejected.join("\n"));
}

#[test]
fn one_fabric_for_all_where_there_are_two() {
    let up = |layer| vec![port(1, PortState::Active, layer, 200.0)];
    let (ib, roce) = (LinkLayer::InfiniBand, LinkLayer::Ethernet);
    let both = Odd::nodes(&["0-3", "4-7"])
        .gpu(0)
        .gpu(1)
        .nic_with("mlx5_0", 0, NicKind::Physical, up(roce))
        .nic_with("mlx5_1", 0, NicKind::Physical, up(ib))
        .nic_with("mlx5_2", 1, NicKind::Physical, up(ib))
        .nic_with("mlx5_3", 1, NicKind::Physical, up(roce));
    right!(
        "roce-beside-infiniband",
        "Both fabrics are equally near, so InfiniBand for all: its ports cannot reach RoCE ones.",
        compact(&both.0, &spec(FABRIC))
    );
    let near_roce = Odd::nodes(&["0-3", "4-7"])
        .gpu(0)
        .gpu(1)
        .nic_with("mlx5_0", 0, NicKind::Physical, up(roce))
        .nic_with("mlx5_1", 1, NicKind::Physical, up(roce))
        .nic_with("mlx5_2", 0, NicKind::Physical, up(ib));
    right!(
        "roce-nearer-than-infiniband",
        "The RoCE NICs are nearer in sum than the one InfiniBand NIC, so RoCE for all.",
        compact(&near_roce.0, &spec(FABRIC))
    );
}

#[test]
fn faster_nics_first_and_ports_in_turn() {
    let ib = LinkLayer::InfiniBand;
    let odd = Odd::nodes(&["0-7"])
        .gpu(0)
        .gpu(0)
        .nic_with("mlx5_0", 0, NicKind::Physical, vec![port(1, PortState::Active, ib, 100.0)])
        .nic_with("mlx5_1", 0, NicKind::Physical, vec![port(1, PortState::Active, ib, 400.0)])
        .nic_with("mlx5_2", 0, NicKind::Physical, vec![port(1, PortState::Active, ib, 400.0)]);
    right!(
        "faster-nics-first",
        "Three equally near NICs for two GPUs: the slow one stays free.",
        compact(&odd.0, &spec(FABRIC))
    );
    let dual = vec![port(1, PortState::Active, ib, 100.0), port(2, PortState::Active, ib, 100.0)];
    let odd =
        Odd::nodes(&["0-7"]).gpu(0).gpu(0).nic_with("mlx5_0", 0, NicKind::Physical, dual.clone());
    right!(
        "dual-port",
        "One NIC with two ports for two GPUs: a port each.",
        compact(&odd.0, &spec(FABRIC))
    );
    let stripe = Odd::nodes(&["0-7", "8-15"])
        .gpu(0)
        .gpu(1)
        .nic("mlx5_0", 0)
        .nic("mlx5_1", 0)
        .nic("mlx5_2", 1)
        .nic("mlx5_3", 1)
        .nic("mlx5_4", 1);
    right!(
        "stripe",
        "All NICs of a GPU's own node, none of the other's; UCX spreads over as many as there are.",
        compact(&stripe.0, &spec("ucx: {infiniband: true, net_devices: stripe}\n"))
    );
}

#[test]
fn machines_without_nics_or_with_one_gpu_or_with_sixteen() {
    right!(
        "no-nic",
        "The requirement is unmet and noted; nothing is pinned; the list of transports stays.",
        compact(&Odd::nodes(&["0-3"]).gpu(0).gpu(0).0, &spec(FABRIC))
    );
    right!(
        "no-nic-pin",
        "'pin' insists on a NIC, so without one there is no plan.",
        compact(&Odd::nodes(&["0-3"]).gpu(0).0, &spec("ucx: {net_devices: pin}\n"))
    );
    right!(
        "one-gpu",
        "One GPU, one worker, nothing to rotate.",
        compact(&Odd::nodes(&["0-3"]).gpu(0).nic("mlx5_0", 0).0, &spec(FABRIC))
    );
    let mut sixteen = Odd::nodes(&["0-31", "32-63"]);
    for at in 0..16 {
        sixteen = sixteen.gpu(at / 8);
    }
    for at in 0..4 {
        sixteen = sixteen.nic(&format!("mlx5_{at}"), at / 2);
    }
    right!(
        "sixteen-gpus",
        "Eight GPUs and two NICs a node: four GPUs for each NIC, neighbours together.",
        compact(
            &sixteen.nvlinked(6).0,
            &spec("cpus: split\nucx: {nvlink: true, infiniband: true}\n")
        )
    );
}

#[test]
fn workers_without_gpus() {
    right!(
        "cpu-workers-alone",
        "No GPU is asked for, so none is needed; the cores are shared out among the workers.",
        compact(
            &Odd::nodes(&["0-3", "4-7"]).0,
            &spec("gpus: none\ncpu_workers: 3\ncpus: split\nucx: {tcp: true}\n")
        )
    );
    right!(
        "no-gpus",
        "A machine without GPUs is an error with a way on.",
        compact(&Odd::nodes(&["0-3"]).0, &spec("threads: 1\n"))
    );
}

#[test]
fn mig_instances() {
    let mut odd = Odd::nodes(&["0-15"]).gpu(0).gpu(0).gpu(0).nic("mlx5_0", 0);
    let instance = |at: u32| MigInstance {
        uuid: format!("MIG-{at:08x}-1111-2222-3333-444444444444").parse().expect("a UUID"),
        profile: "3g.20gb".to_owned(),
        memory_bytes: Some(20 << 30),
    };
    odd.0.gpus[0].mig = vec![instance(0), instance(1)];
    odd.0.gpus[0].mig_mode = Some(true);
    odd.0.gpus[2].mig_mode = Some(true);
    right!(
        "mig",
        "Instances see themselves alone; the whole GPU sees no instance; GPU 2 runs nothing as it is.",
        compact(&odd.0, &spec(FABRIC))
    );
    right!(
        "mig-by-name",
        "One instance by its position, one by the beginning of its UUID.",
        compact(&odd.0, &spec("gpus: ['0:1', MIG-00000000]\n"))
    );
    let unsplit = spec("gpus: [2]\n");
    right!(
        "mig-without-instance",
        "A GPU in MIG mode without an instance cannot run a worker, whoever names it.",
        compact(&odd.0, &unsplit)
    );
}

#[test]
fn odd_numa_nodes() {
    let mut odd = Odd::nodes(&["", "0-7"]).gpu(0).gpu(1);
    odd.0.gpus[0].cpus = None;
    odd.0.numa[0].package = Some(0);
    odd.0.numa[1].package = Some(0);
    right!(
        "node-without-cpus",
        "Node 0 has memory but no CPUs: GPU 0 takes those of its package, and node 0's memory.",
        compact(&odd.0, &spec("cpus: local\n"))
    );
    odd.0.numa[0].package = Some(1);
    right!(
        "node-without-cpus-alone",
        "Nothing else of its package has CPUs: every allowed CPU, and a note.",
        compact(&odd.0, &spec("cpus: local\n"))
    );
    let sparse =
        Odd::default().node(0, "0,2,4,6").node(8, "1000-1003").node(252, "7000").gpu(8).gpu(252);
    right!(
        "sparse-ids",
        "Node and CPU numbers are the kernel's, however sparse and large.",
        compact(&sparse.0, &spec("cpus: split\n"))
    );
    let mut snc = Odd::nodes(&["0-13,112-125", "14-27,126-139", "28-41,140-153", "42-55,154-167"])
        .gpu(0)
        .gpu(0)
        .gpu(2)
        .gpu(3);
    snc.0.cores = (0..56).map(|core| [core, core + 112].into_iter().collect()).collect();
    right!(
        "sub-numa-clusters",
        "Four nodes a socket: each GPU has its own cluster's cores, node 1's go to the scheduler.",
        compact(&snc.0, &spec("cpus: split\n"))
    );
}

#[test]
fn cpusets_that_exclude_much() {
    let whole = || Odd::nodes(&["0-7", "8-15"]).gpu(0).gpu(1).nic("mlx5_0", 0).nic("mlx5_1", 1);
    right!(
        "cpuset-excludes-a-socket",
        "GPU 1's own socket is not allowed: it gets what is, and the plan says so.",
        compact(&whole().allow("0-7", "0").0, &spec("cpus: local\n"))
    );
    right!(
        "cpuset-excludes-a-socket-strict",
        "Under 'strict' the same is refused.",
        compact(&whole().allow("0-7", "0").0, &spec("cpus: local\nstrict: true\n"))
    );
    right!(
        "cpuset-of-some-cores",
        "Slurm gave CPUs 2-3 and 12-13: each GPU keeps the part that is near it.",
        compact(&whole().allow("2-3,12-13", "0-1").0, &spec("cpus: local\n"))
    );
    right!(
        "too-few-cores",
        "Two workers cannot have a core each of one.",
        compact(&whole().allow("2", "0-1").0, &spec("cpus: split\n"))
    );
}

#[test]
fn gpus_in_use_and_displays() {
    let mut odd = Odd::nodes(&["0-7"]).gpu(0).gpu(0).gpu(0);
    odd.0.gpus[1].processes = vec![4711, 4712];
    right!(
        "busy-gpu",
        "Used all the same, with a note: a display server is a process too.",
        compact(&odd.0, &spec("busy_gpus: warn\n"))
    );
    right!("busy-gpu-skipped", "Left out.", compact(&odd.0, &spec("busy_gpus: skip\n")));
}

#[test]
fn gpus_by_name_order_and_mask() {
    let odd = Odd::nodes(&["0-7"]).gpu(0).gpu(0).gpu(0).gpu(0);
    right!(
        "gpus-in-the-users-order",
        "Ranks follow the user's order, and so does the rotated mask.",
        compact(&odd.0, &spec("gpus: [3, 1]\n"))
    );
    right!(
        "gpus-by-uuid",
        "Named by UUID, so the mask names them by UUID.",
        compact(&odd.0, &spec("gpus: [GPU-00000002, '0000:10:00.0']\n"))
    );
    let masked = |mask: &str, text: &str| {
        let caller = caller_with("CUDA_VISIBLE_DEVICES", mask);
        compact_of(planned_by(&odd.0, &spec(text), &caller))
    };
    right!("mask", "The caller's mask chooses and orders.", masked("2,0", "threads: 1\n"));
    right!(
        "mask-ends-early",
        "As in CUDA, the list ends at the first entry that names no GPU.",
        masked("1,9,2", "threads: 1\n")
    );
    right!(
        "mask-hides-a-named-gpu",
        "What is named is used, and that the mask hides it is said.",
        masked("1,2", "gpus: [0, 1]\n")
    );
    right!("mask-hides-all", "No GPU is left, so there is no plan.", masked("", "threads: 1\n"));
    right!(
        "no-such-gpu",
        "What there is stands in the error.",
        compact(&odd.0, &spec("gpus: [4]\n"))
    );
    right!("too-few-gpus", "Five of four.", compact(&odd.0, &spec("workers: 5\n")));
    right!(
        "gpu-twice-by-different-names",
        "GPU 0 and 0000:10:00.0 are one.",
        compact(&odd.0, &spec("gpus: [0, '0000:10:00.0']\n"))
    );
}

#[test]
fn nics_by_name_and_template() {
    let odd = Odd::nodes(&["0-7"])
        .gpu(0)
        .gpu(0)
        .gpu(0)
        .gpu(0)
        .nic("mlx5_0", 0)
        .nic_with(
            "mlx5_1",
            0,
            NicKind::Physical,
            vec![port(1, PortState::Down, LinkLayer::InfiniBand, 200.0)],
        )
        .nic("mlx5_2", 0);
    let with =
        |devices: &str| compact(&odd.0, &spec(&format!("ucx: {{net_devices: '{devices}'}}\n")));
    right!(
        "nic-template",
        "Each pair of GPUs has the NIC of the formula.",
        with("mlx5_{gpu//2*2}:1")
    );
    right!("nic-list", "The same for all, with the control device behind.", with("mlx5_0,eth1"));
    right!("nic-down", "A NIC that is down is refused by name, with the reason.", with("mlx5_1:1"));
    right!("nic-unknown", "A slip is refused with the nearest name.", with("mlx5_3:1"));
    right!(
        "nic-template-out-of-range",
        "GPU 2 would get a NIC that is not there.",
        with("mlx5_{gpu*2}:1")
    );
    right!(
        "nic-excluded",
        "What the user excludes is not used.",
        compact(&odd.0, &spec("ucx: {infiniband: true, exclude_nics: [mlx5_0]}\n"))
    );
}
