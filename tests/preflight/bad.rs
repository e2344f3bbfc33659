//! A machine for each check, spoiled in one place.

use cuda_cluster::preflight::Cost;
use cuda_cluster::preflight::Severity::{CannotTell, Error, Note, Warning};
use cuda_cluster::topology::{ComputeMode, Fabric, FabricState, LinkLayer, PortState};
use serde_json::json;

use crate::machine::{Place, on, written};

const H100: &str = "dgx-h100";
const INFINIBAND: [&str; 2] = ["--enable-nvlink", "--enable-infiniband"];

/// One with GPUs under switches and without NVLinks.
fn switched() -> Place {
    on("l40s-8")
}

/// One that is asked for InfiniBand.
fn with_nics() -> Place {
    on(H100).asked(&INFINIBAND)
}

/// A configuration space of 4096 bytes as the kernel shows it to root.
fn space(acs: u16, sizes: u16) -> String {
    let mut bytes = vec![0_u8; 4096];
    bytes[0x34] = 0x60;
    bytes[0x60] = 0x10;
    bytes[0x62] = 0x62;
    bytes[0x68..0x6a].copy_from_slice(&sizes.to_le_bytes());
    bytes[0x100..0x104].copy_from_slice(&0x0001_000d_u32.to_le_bytes());
    bytes[0x106..0x108].copy_from_slice(&acs.to_le_bytes());
    // Every byte is below 128, so that it is text, too.
    String::from_utf8(bytes).expect("bytes below 128")
}

#[test]
fn an_iommu_that_translates_concerns_pairs_over_pcie_alone() {
    let translating = |place: Place, gpu: usize| {
        let address = place.gpu(gpu);
        place.function(&address, "iommu_group/type", "DMA-FQ\n")
    };
    let found = translating(switched(), 0).finds("iommu", Error, "GPU0 and GPU1");
    assert!(found.concerns.contains(&"gpu0".to_owned()), "{found:#?}");
    translating(switched().asked(&["--gpus", "2,3"]), 0).is_well("iommu");
    // All pairs have NVLinks.
    translating(on(H100), 0).is_well("iommu");
    translating(with_nics(), 0).finds("iommu", Warning, "RDMA");
    let guest = "processor\t: 0\nflags\t\t: fpu hypervisor\n";
    translating(switched(), 0).file("proc/cpuinfo", guest).is_well("iommu");
    let place = switched();
    let path = format!("sys/bus/pci/devices/{}/iommu_group/type", place.gpu(0));
    place.without(&path).finds("iommu", CannotTell, "GPU0");
}

#[test]
fn access_control_matters_on_the_path_of_a_pair() {
    let redirecting = |place: Place| {
        let port = place.above(0);
        place.function(&port, "config", &space(0x1d, 0))
    };
    let found = redirecting(switched()).finds("acs", Warning, "GPU0 and GPU1");
    assert!(found.text.contains(&switched().above(0)), "{found:#?}");
    let remedy = found.remedy.as_deref().expect("one");
    assert!(remedy.contains(&format!("for port in {};", switched().above(0))), "{remedy}");
    redirecting(switched().asked(&["--gpus", "1,2"])).is_well("acs");
    // Source validation alone redirects nothing.
    let place = switched();
    let port = place.above(0);
    place.function(&port, "config", &space(0x01, 0)).is_well("acs");
    let place = switched();
    let port = place.above(0);
    place.function(&port, "config", "64 bytes").finds("acs", CannotTell, "root");
}

#[test]
fn links_with_fewer_lanes_or_slower_slots_are_told_and_idle_ones_not() {
    let lanes = |place: Place, lanes: u32| {
        place.described(|it| it.gpus[2].pcie.as_mut().expect("a link").width = Some(lanes))
    };
    lanes(on(H100), 8).finds("pcie-width", Warning, "GPU2 its PCIe link has 8 of 16 lanes");
    lanes(on(H100), 16).is_well("pcie-width");
    let place = on(H100);
    let (slot, path) = (place.above(0), "max_link_speed");
    place.function(&slot, path, "16.0 GT/s PCIe\n").finds("pcie-slot", Note, "GPU0");
}

#[test]
fn sizes_that_differ_from_siblings_are_told() {
    let place = on(H100);
    let gpu = place.gpu(3);
    // MaxPayload 128, MaxReadRequest 4096.
    let found = place.function(&gpu, "config", &space(0, 0x5000));
    found.finds("pcie-payload", Warning, &gpu);
    let place = on(H100);
    let nic = place.nic(0);
    // MaxPayload 256, MaxReadRequest 512.
    let found = place.function(&nic, "config", &space(0, 0x2020));
    found.finds("pcie-read-request", Warning, "512 bytes, and 4096 elsewhere");
    let place = on(H100);
    let nic = place.nic(0);
    place.function(&nic, "config", "").finds("pcie-read-request", CannotTell, "root");
}

#[test]
fn a_device_without_a_numa_node_is_told_where_there_are_several() {
    let lost = |place: Place| {
        let bridges: Vec<String> = {
            let topology = cuda_cluster::topology::parse(
                cuda_cluster::topology::builtin(H100).expect("built in"),
            )
            .expect("a machine");
            let above = topology.ancestry();
            let gpu = &topology.gpus[1];
            above.above(gpu.parent.as_deref()).iter().map(|bridge| bridge.id.clone()).collect()
        };
        let place = place.described(|it| {
            it.gpus[1].numa = None;
            it.gpus[1].cpus = None;
        });
        let ports = bridges.iter().filter(|id| !id.starts_with("pci"));
        ports.fold(place, |place, id| place.function(id, "numa_node", "-1\n"))
    };
    lost(on(H100)).faults("affinity=empty").finds("numa-node", Warning, "GPU1");
    on(H100).is_well("numa-node");
}

#[test]
fn the_function_beside_a_gpu_has_to_be_in_its_group() {
    let beside = |group: &str| {
        let place = on(H100);
        let bridge = place.above(0);
        let path = format!("sys/bus/pci/devices/{bridge}/0000:1c:00.7");
        let uevent = "DRIVER=mlx5_core\nPCI_CLASS=80000\nPCI_ID=15B3:2100\n";
        let bus = "sys/bus/pci/devices/0000:1c:00.7";
        (
            place.file(&format!("{path}/uevent"), uevent).file(&format!("{bus}/uevent"), uevent),
            group.to_owned(),
        )
    };
    let (place, _) = beside("other");
    // The entry on the bus has no group at all.
    place.finds("data-direct", Warning, "0000:1c:00.7");
}

fn fabric(state: FabricState, clique: u32) -> Option<Fabric> {
    Some(Fabric { state, error: None, clique, cluster: None, faults: Vec::new() })
}

#[test]
fn a_fabric_that_is_not_whole_is_an_error_whatever_service_runs() {
    let broken =
        |place: Place| place.described(|it| it.gpus[4].fabric = fabric(FabricState::InProgress, 0));
    broken(on(H100)).finds("fabric-state", Error, "GPU4");
    broken(on(H100)).file("proc/77/comm", "nv-fabricmanage\n").finds("fabric-state", Error, "GPU4");
    broken(on(H100).asked(&["--gpus", "0-3"])).is_well("fabric-state");
    let b200 = |place: Place| {
        place.described(|it| {
            it.gpus.iter_mut().for_each(|gpu| gpu.fabric = fabric(FabricState::NotStarted, 0));
        })
    };
    b200(on("dgx-b200")).finds("subnet-manager", Error, "nvlsm does not run");
    b200(on("dgx-b200")).file("proc/78/comm", "nvlsm\n").is_well("subnet-manager");
    let elsewhere = b200(on("dgx-b200")).without("proc/self/ns/pid");
    elsewhere.finds("subnet-manager", Error, "nvlsm");
}

#[test]
fn gpus_of_two_cliques_have_no_nvlink_between_them() {
    let split =
        |place: Place| place.described(|it| it.gpus[7].fabric = fabric(FabricState::Completed, 2));
    split(on(H100)).finds("fabric-clique", Error, "2 cliques");
    split(on(H100).asked(&["--gpus", "0-6"])).is_well("fabric-clique");
}

#[test]
fn nvlinks_without_peer_access_are_an_error() {
    let refused_of = |state: FabricState| {
        on(H100).described(|it| {
            it.gpus[0].peers = Some(Vec::new());
            it.gpus[0].fabric = fabric(state, 1);
            it.gpus.iter_mut().skip(1).for_each(|gpu| {
                gpu.peers.get_or_insert_default().retain(|peer| peer.0 != 0);
            });
        })
    };
    let own = refused_of(FabricState::Completed).finds("nvlink-peers", Error, "GPU0 and GPU1");
    assert!(!own.remedy.expect("one").contains("fabric-state"));
    let unregistered = refused_of(FabricState::InProgress).judged();
    let follows = unregistered.of("nvlink-peers")[0].remedy.clone().expect("one");
    assert_eq!(follows, "follows from fabric-state: mend that first");
    let untold = on(H100).described(|it| it.gpus.iter_mut().for_each(|gpu| gpu.peers = None));
    untold.finds("nvlink-peers", CannotTell, "28 pairs");
}

#[test]
fn nvlinks_are_compared_with_siblings() {
    let down = on(H100).described(|it| it.gpus[5].nvlinks[3].active = false);
    let found = down.finds("nvlinks-down", Warning, "GPU5 17 of its NVLinks are up");
    assert_eq!(found.evidence[0].value, "down: 3");
    let slow = on(H100).described(|it| it.gpus[5].nvlinks[3].gb_per_s = Some(13.0));
    slow.finds("nvlink-speed", Warning, "GPU5");
    let tray = || {
        on("gb200-nvl72-tray").described(|it| {
            for gpu in &mut it.gpus {
                let cluster = Some("01234567-89ab-cdef-0000-000000000007".to_owned());
                gpu.fabric = fabric(FabricState::Completed, 1).map(|it| Fabric { cluster, ..it });
            }
        })
    };
    assert!(tray().finds("imex", Note, "no channel").minor);
    let there = tray().file("dev/nvidia-caps-imex-channels/channel0", "");
    assert_eq!(there.judged().of("imex")[0].severity, cuda_cluster::preflight::Severity::Ok);
}

#[test]
fn memory_that_is_worn_is_told() {
    let rows = |pending, failure| {
        let rows =
            json!({"correctable": 0, "uncorrectable": 1, "pending": pending, "failure": failure});
        on(H100).health(6, json!({ "remapped_rows": rows }))
    };
    rows(true, false).finds("row-remap", Warning, "GPU6 bad rows wait");
    rows(true, true).finds("row-remap", Error, "GPU6");
    rows(false, false).is_well("row-remap");
    rows(false, true).asked(&["--gpus", "0"]).is_well("row-remap");
    let pages = on("dgx-1-v100").health(1, json!({"retired_pending": true}));
    pages.finds("retired-pages", Warning, "GPU1");
    on(H100).health(2, json!({"ecc_uncorrected": 3})).finds("ecc-errors", Warning, "GPU2 3 errors");
    on(H100).health(2, json!({"ecc": false})).finds("ecc-mode", Note, "GPU2");
    let wanted = |action: u32| on(H100).health(3, json!({"recovery_action": action}));
    wanted(1).finds("recovery-action", Error, "GPU3 the driver wants a reset");
    wanted(2).finds("recovery-action", Error, "a restart of the machine");
}

#[test]
fn clocks_and_power_that_hardware_limits_are_told() {
    let reasons = |bits: u64| on(H100).health(1, json!({"clocks_event_reasons": bits}));
    reasons(0x80).finds("slowdown", Warning, "power brake");
    reasons(0x48).finds("slowdown", Warning, "too hot");
    reasons(0x08).finds("slowdown", Warning, "holds its clocks down");
    reasons(0x20).finds("slowdown", Note, "warm");
    let limit = on(H100).health(4, json!({"power_limit_mw": 400_000}));
    limit.finds("power-limit", Warning, "GPU4 its limit is 400 W, and 700 W elsewhere");
    let forgets = |place: Place| place.health(0, json!({"persistence": false}));
    forgets(on(H100)).finds("persistence", Note, "GPU0");
    let daemon = forgets(on(H100)).file("proc/99/comm", "nvidia-persiste\n");
    assert!(daemon.judged().of("persistence").iter().all(|one| one.severity != Note));
}

#[test]
fn modes_that_are_in_the_way_are_told() {
    let whole = on(H100).described(|it| it.gpus[0].mig_mode = Some(false));
    whole.health(0, json!({"mig_pending": true})).finds("mig-pending", Warning, "GPU0");
    let mode = |mode| on(H100).described(move |it| it.gpus[0].compute_mode = Some(mode));
    let two = ["--gpus", "0,1", "--workers-per-gpu", "2"];
    mode(ComputeMode::ExclusiveProcess).asked(&two).finds("compute-mode", Error, "2 workers");
    mode(ComputeMode::ExclusiveProcess).is_well("compute-mode");
    let folder = tempfile::tempdir().expect("a directory");
    written(folder.path(), "control", "");
    let pipe = folder.path().to_str().expect("UTF-8");
    let served =
        mode(ComputeMode::ExclusiveProcess).asked(&two).variable("CUDA_MPS_PIPE_DIRECTORY", pipe);
    let served = served.file("proc/55/comm", "nvidia-cuda-mps\n");
    served.is_well("compute-mode");
    assert_eq!(served.judged().of("mps")[0].severity, cuda_cluster::preflight::Severity::Ok);
    let stale = on(H100).variable("CUDA_MPS_PIPE_DIRECTORY", pipe);
    stale.finds("mps", Error, "nobody serves it");
}

#[test]
fn who_holds_memory_is_told_by_name_and_age() {
    let held = on(H100)
        .described(|it| it.gpus[2].processes = vec![4242])
        .health(2, json!({"process_bytes": 20_u64 << 30}))
        .file("proc/4242/comm", "python\n")
        .file("proc/4242/status", "Name:\tpython\nUid:\t1001\t1001\t1001\t1001\n")
        .file("proc/4242/stat", &format!("4242 (python) S {} 7920000 0\n", "0 ".repeat(18)));
    let found = held.finds("memory-held", Warning, "GPU2");
    for part in ["4242 python", "user 1001", "3 h", "20.0 GiB"] {
        assert!(found.text.contains(part), "{part:?}: {found:#?}");
    }
    let elsewhere = on(H100).described(|it| it.gpus[2].processes = vec![0]);
    elsewhere.finds("memory-held", Warning, "another PID namespace");
}

#[test]
fn errors_in_the_kernels_log_are_hardwares_or_a_programs() {
    let logged = |number: u32| {
        let place = on(H100);
        let gpu = place.gpu(1);
        let pci = gpu.strip_suffix(".0").expect("a function");
        let line = format!("4,2,89000000000,-;NVRM: Xid (PCI:{pci}): {number}, pid=1\n");
        place.file("dev/kmsg", &line)
    };
    let off = logged(79).finds("xid", Warning, "GPU1 Xid 79, GPU has fallen off the bus, once");
    assert!(off.remedy.is_some_and(|remedy| remedy.contains("power")));
    let uncorrected = logged(95).finds("xid", Warning, "GPU1 Xid 95");
    assert!(uncorrected.remedy.is_some_and(|remedy| remedy.contains("--gpu-reset")));
    logged(31).finds("xid", Note, "GPU1 Xid 31");
    logged(79).asked(&["--gpus", "0"]).is_well("xid");
    let refused = on(H100).without("dev/kmsg").file("dev/kmsg/x", "");
    refused.finds("xid", CannotTell, "kernel's log");
}

#[test]
fn parts_of_the_driver_that_do_not_fit_are_told() {
    let other = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan\n";
    on(H100).file("proc/driver/nvidia/version", other).finds("driver-versions", Error, "570.86.15");
    let lost = on(H100).described(|it| it.gpus[7].uuid = None).faults("forbidden=7");
    let found = lost.finds("gpus-missing", Warning, "7 of 8 GPUs answer");
    assert!(found.text.contains(&on(H100).gpu(7)));
    let place = on(H100);
    let gpu = place.gpu(7);
    let uevent = |driver: &str| format!("DRIVER={driver}\nPCI_CLASS=30200\nPCI_ID=10DE:2330\n");
    let taken =
        |driver: &str| on(H100).faults("forbidden=7").function(&gpu, "uevent", &uevent(driver));
    taken("nouveau").finds("gpu-driver", Warning, "nouveau");
    taken("vfio-pci").finds("gpu-driver", Note, "vfio-pci");
    on(H100).without("dev/nvidia-uvm").finds("device-files", Error, "/dev/nvidia-uvm");
    on(H100).health_of_all(json!({"confidential": true})).finds(
        "confidential",
        Warning,
        "it is on",
    );
    let alone = on("gh200").health_of_all(json!({"confidential": true}));
    alone.is_well("confidential");
    let none = on("rtx-4090-2").described(|it| {
        it.gpus.iter_mut().for_each(|gpu| gpu.peers = Some(Vec::new()));
    });
    none.finds("peer-access", Note, "1 of 1 pairs have none");
}

#[test]
fn rdma_adapters_that_cannot_carry_what_is_planned_are_told() {
    let all_down = with_nics().described(|it| {
        it.nics.iter_mut().flat_map(|nic| &mut nic.ports).for_each(|port| {
            port.state = Some(PortState::Down);
        });
    });
    all_down.finds("rdma-ports", Warning, "no active port");
    let one_down = with_nics().described(|it| it.nics[0].ports[0].state = Some(PortState::Init));
    let said = one_down.judged();
    assert!(said.of("rdma-nearest").iter().any(|one| one.is_bad()), "{:#?}", said.findings);
    let slow = with_nics().described(|it| it.nics[0].ports[0].rate_gbps = Some(200.0));
    slow.finds("rdma-rate", Warning, "200 Gb/s, and its siblings 400");
    let roce = with_nics().described(|it| {
        it.nics.iter_mut().flat_map(|nic| &mut nic.ports).for_each(|port| {
            port.link_layer = Some(LinkLayer::Ethernet);
        });
    });
    roce.is_well("rdma-gid");
    let zero = "0000:0000:0000:0000:0000:0000:0000:0000\n";
    roce.file("sys/class/infiniband/mlx5_0/ports/1/gids/0", zero)
        .finds("rdma-gid", Error, "mlx5_0:1");
    with_nics().without("dev/infiniband/uverbs0").finds("rdma-files", Error, "mlx5_0:1");
    on(H100).without("dev/infiniband/uverbs0").is_well("rdma-files");
    let flaps = with_nics().file("sys/class/infiniband/mlx5_0/ports/1/counters/link_downed", "4\n");
    assert!(flaps.finds("rdma-flaps", Note, "4 times").minor);
}

#[test]
fn gpudirect_is_there_by_registration_or_by_dma_buf() {
    let proprietary = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Thu Jan\n";
    let without = |place: Place| place.without("sys/kernel/mm/memory_peers");
    let old = |place: Place| place.file("proc/driver/nvidia/version", proprietary);
    old(without(with_nics())).finds(
        "gpudirect-rdma",
        Warning,
        "loaded, but not registered with the RDMA drivers",
    );
    let unloaded = old(without(with_nics())).without("sys/module/nvidia_peermem");
    unloaded.finds("gpudirect-rdma", Warning, "is not loaded");
    without(with_nics()).is_well("gpudirect-rdma");
    old(with_nics()).is_well("gpudirect-rdma");
    let kernel = without(with_nics()).file("proc/sys/kernel/osrelease", "5.4.0-generic\n");
    kernel.finds("gpudirect-rdma", Warning, "no dma-buf");
    old(without(on(H100))).is_well("gpudirect-rdma");
    let small = with_nics().described(|it| it.gpus[0].bar1_bytes = Some(256 << 20));
    small.finds("bar1", Warning, "GPU0 256.0 MiB of");
}

/// The kernel's table, with one limit changed.
fn limits(name: &str, value: &str) -> Place {
    let rows = [
        ("Max processes", "1030000"),
        ("Max open files", "1048576"),
        ("Max locked memory", "unlimited"),
        ("Max address space", "unlimited"),
    ];
    let row = |(row, own): &(&str, &str)| {
        let soft = if *row == name { value } else { own };
        format!("{row:26}{soft:21}{soft:21}units\n")
    };
    let text: String = rows.iter().map(row).collect();
    with_nics().file("proc/self/limits", &format!("Limit  Soft  Hard  Units\n{text}"))
}

#[test]
fn limits_of_the_process_are_held_against_the_plan() {
    limits("Max locked memory", "8388608").finds("locked-memory", Warning, "8.0 MiB");
    let root =
        "Name:\tx\nCpus_allowed_list:\t0-223\nMems_allowed_list:\t0-1\nCapEff:\t000001ffffffffff\n";
    limits("Max locked memory", "8388608").file("proc/self/status", root).is_well("locked-memory");
    limits("Max open files", "40").finds(
        "open-files",
        Error,
        "40 may be open, and the plan needs 50",
    );
    limits("Max processes", "60").finds("processes", Warning, "60 are allowed");
    limits("Max address space", "34359738368").finds("address-space", Error, "32.0 GiB");
    on(H100).file("proc/self/limits", "").finds("open-files", CannotTell, "/proc/self/limits");
    on(H100).file("proc/sys/vm/overcommit_memory", "2\n").finds("overcommit", Warning, "promises");
    let yama = on(H100).file("proc/sys/kernel/yama/ptrace_scope", "3\n");
    yama.finds("memory-read", Warning, "ptrace_scope is 3");
}

#[test]
fn control_groups_are_held_against_the_plan() {
    let group = |file: &str, text: &str| {
        let place = on(H100).file("proc/self/cgroup", "0::/job/step\n");
        let place = place.file("sys/fs/cgroup/job/step/here", "");
        place.file(&format!("sys/fs/cgroup/job/{file}"), text)
    };
    let memory = group("memory.max", "8589934592\n")
        .file("sys/fs/cgroup/job/memory.current", "1073741824\n");
    memory.finds("group-memory", Warning, "7.0 GiB of 8.0 GiB are left");
    let tasks = group("pids.max", "100\n").file("sys/fs/cgroup/job/pids.current", "60\n");
    tasks.finds("processes", Warning, "room for 40 more");
    group("cpu.max", "400000 100000\n").finds(
        "group-cpus",
        Warning,
        "time of 4 CPUs, and 8 workers",
    );
    group("cpu.max", "max 100000\n").is_well("group-cpus");
    let bound = on(H100).described(|it| {
        it.allowed = Some(cuda_cluster::topology::Allowed {
            cpus: "0-7".parse().expect("CPUs"),
            mems: "0-1".parse().expect("nodes"),
        });
    });
    bound.finds("allowed-cpus", Warning, "GPU4");
    let full = on(H100).file(
        "sys/devices/system/node/node1/meminfo",
        "Node 1 MemTotal: 1056964608 kB\nNode 1 MemFree:  1048576 kB\n",
    );
    full.finds("numa-memory", Warning, "NUMA node 1");
}

#[test]
fn a_clusters_own_namespaces_are_well_unless_it_joins_another() {
    let contained = |place: Place| place.without("proc/self/ns/pid").without("proc/self/ns/ipc");
    contained(on(H100)).is_well("namespaces");
}

#[test]
fn switches_of_an_old_day_are_told_with_their_place() {
    let train = ["--engine", "dask"];
    let set = |name: &str, value: &str| on(H100).asked(&train).variable(name, value);
    set("NCCL_P2P_DISABLE", "1").finds(
        "nccl-switches",
        Warning,
        "NCCL_P2P_DISABLE=1 in environment",
    );
    set("NCCL_P2P_LEVEL", "LOC").finds("nccl-switches", Warning, "peer access");
    set("NCCL_IB_DISABLE", "0").is_well("nccl-switches");
    on(H100).variable("NCCL_P2P_DISABLE", "1").finds("nccl-switches", Note, "NCCL_P2P_DISABLE");
    let file = on(H100).asked(&train).file("etc/nccl.conf", "NCCL_SHM_DISABLE=1\n");
    let found = file.finds("nccl-switches", Warning, "etc/nccl.conf");
    assert_eq!(found.cost, Some(Cost::Root), "{found:#?}");
    let system = on(H100).asked(&train).file("etc/environment", "NCCL_IB_DISABLE=\"1\"\n");
    system.finds("nccl-switches", Warning, "etc/environment");
    let own = on(H100).asked(&train).file(".nccl.conf", "NCCL_NET_GDR_LEVEL=0\n");
    let found = own.finds("nccl-switches", Warning, ".nccl.conf");
    assert_eq!(found.cost, Some(Cost::Nothing), "it is the user's own: {found:#?}");
    assert!(found.remedy.is_some_and(|remedy| remedy.contains("remove the line from /")));
    set("UCX_TLS", "tcp,sm").finds("ucx-switches", Warning, "no transport for GPU memory");
    set("UCX_TLS", "^cuda_ipc").finds("ucx-switches", Warning, "forbids");
    set("UCX_TLS", "rc,cuda_copy,cuda_ipc").is_well("ucx-switches");
    set("UCX_LOG_LEVEL", "debug").finds("launch-blocking", Warning, "UCX_LOG_LEVEL=debug");
    set("CUDA_LAUNCH_BLOCKING", "1").finds("launch-blocking", Warning, "CUDA_LAUNCH_BLOCKING");
    set("NCCL_DEBUG", "INFO").finds("launch-blocking", Note, "NCCL_DEBUG");
    let stubs = "/usr/local/cuda/lib64/stubs:/usr/lib";
    set("LD_LIBRARY_PATH", stubs).finds("cuda-stubs", Error, "lib64/stubs");
    set("LD_LIBRARY_PATH", "/usr/local/cuda/compat").finds("cuda-stubs", Note, "compat");
    set("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True").finds(
        "allocator",
        Warning,
        "PyTorch",
    );
    let pool = on(H100).asked(&["--engine", "dask", "--rmm-async", "--rmm-pool-size", "1GB"]);
    pool.finds("allocator", Warning, "asynchronous");
    assert!(set("CUDA_VISIBLE_DEVICES", "0,1").finds("gpu-mask", Note, "2 of 8").minor);
    assert!(
        set("https_proxy", "http://me:secret@proxy:1").finds("proxies", Note, "https_proxy").minor
    );
    let secret = set("https_proxy", "http://me:secret@proxy:1").judged();
    assert!(!secret.document.to_string().contains("secret"));
}

#[test]
fn a_topology_for_nccl_has_to_be_this_machines() {
    let folder = tempfile::tempdir().expect("a directory");
    let ours = cuda_cluster::topology::builtin("dgx-a100").expect("built in");
    let other = written(folder.path(), "topo.xml", ours);
    let path = other.to_str().expect("UTF-8");
    let train = on(H100).asked(&["--engine", "dask"]);
    train.variable("NCCL_TOPO_FILE", path).finds("nccl-topology", Warning, "are not here");
    let train = on("dgx-a100").asked(&["--engine", "dask"]);
    train.variable("NCCL_TOPO_FILE", path).is_well("nccl-topology");
    let train = on(H100).asked(&["--engine", "dask"]);
    train.variable("NCCL_TOPO_FILE", "/nowhere").finds("nccl-topology", Warning, "cannot be read");
}

#[test]
fn a_host_name_on_the_loopback_concerns_what_listens_beyond() {
    let hosts = "127.0.0.1 localhost\n127.0.1.1 dgx-h100\n";
    let beyond = ["--engine", "dask", "--host", "0.0.0.0"];
    let place = on(H100).file("etc/hosts", hosts).file("proc/sys/kernel/hostname", "dgx-h100\n");
    place.is_well("hostname");
    place.asked(&beyond).finds("hostname", Warning, "127.0.1.1");
    let alone = on(H100).asked(&beyond).file("proc/net/route", "Iface Destination\n");
    alone.finds("route", Warning, "there is none");
}

#[test]
fn settings_of_the_machine_that_nobody_blames_count_for_nothing() {
    for (path, text, id) in [
        ("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n", "huge-pages"),
        ("proc/sys/kernel/numa_balancing", "1\n", "numa-balancing"),
        ("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave\n", "governor"),
        ("sys/devices/system/cpu/cpu0/cpuidle/state2/disable", "0\n", "c-states"),
        ("sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet\n", "clock"),
    ] {
        assert!(on(H100).file(path, text).finds(id, Note, "").minor, "{id}");
    }
    let swapping = "MemAvailable: 1048576000 kB\nSwapTotal: 1048576 kB\nSwapFree: 0 kB\n";
    assert!(on(H100).file("proc/meminfo", swapping).finds("swap", Note, "1.0 GiB").minor);
}
