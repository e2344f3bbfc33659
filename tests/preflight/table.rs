//! Every check that judges what was seen, on the good machine and on the bad one.
//!
//! A machine is made up, recorded by the program, spoiled in one place of the record, and judged by
//! the program. That what gathers the evidence sees the bad thing is `bad`'s matter.
//!
//! *Invariant:* no check is left out, and each says `ok` of the good machine in words.

use std::collections::{BTreeMap, BTreeSet};

use cuda_cluster::preflight::{
    DeviceFile, Function, FunctionRole, Holder, Interface, Look, Record, Remapped, Room, Setting,
    Severity, Used, Xid, checks,
};
use cuda_cluster::topology::{Allowed, ComputeMode, Fabric, FabricState, LinkLayer, PortState};

use crate::machine::{Recorded, on};

const GIB: u64 = 1 << 30;

/// A machine that is well in the eyes of a check, and what spoils it.
struct Case {
    id: &'static str,
    machine: &'static str,
    arguments: &'static [&'static str],
    well: fn(&mut Record),
    bad: fn(&mut Record),
    severity: Severity,
}

impl Case {
    fn on(self, machine: &'static str, arguments: &'static [&'static str]) -> Self {
        Self { machine, arguments, ..self }
    }

    fn well(self, well: fn(&mut Record)) -> Self {
        Self { well, ..self }
    }
}

fn case(id: &'static str, severity: Severity, bad: fn(&mut Record)) -> Case {
    let arguments = &["--enable-nvlink", "--enable-infiniband"];
    Case { id, machine: "dgx-h100", arguments, well: |_| {}, bad, severity }
}

fn error(id: &'static str, bad: fn(&mut Record)) -> Case {
    case(id, Severity::Error, bad)
}

fn warning(id: &'static str, bad: fn(&mut Record)) -> Case {
    case(id, Severity::Warning, bad)
}

fn note(id: &'static str, bad: fn(&mut Record)) -> Case {
    case(id, Severity::Note, bad)
}

/// The state of a GPU.
fn gpu(it: &mut Record, index: u32) -> &mut cuda_cluster::preflight::GpuState {
    it.evidence.gpus.get_mut(&index).expect("it is there")
}

/// The PCI function of a GPU.
fn function(it: &mut Record, index: usize) -> &mut Function {
    let address = it.topology.gpus[index].pci.expect("an address");
    it.evidence.functions.get_mut(&address).expect("it is there")
}

/// A GPU on the bus that NVML does not list.
fn unlisted(it: &mut Record, driver: &str) {
    let function = Function {
        id: "10de:2330".to_owned(),
        role: FunctionRole::Gpu,
        driver: Some(driver.to_owned()),
        listed: driver == "nvidia",
        ..Function::default()
    };
    it.evidence.functions.insert("0000:f0:00.0".parse().expect("an address"), function);
}

fn set(it: &mut Record, name: &str, value: &str) {
    it.evidence.settings.retain(|setting| setting.name != name);
    let (name, value) = (name.to_owned(), value.to_owned());
    let place = "environment".to_owned();
    it.evidence.settings.push(Setting { place, name, value, gpus: None });
}

fn limit(it: &mut Record, name: &str, value: u64) {
    it.evidence.process.limits.insert(name.to_owned(), Some(value));
    it.evidence.process.may_lock = false;
}

fn fabrics(it: &mut Record, state: FabricState, cluster: Option<&str>) {
    for gpu in &mut it.topology.gpus {
        let cluster = cluster.map(str::to_owned);
        gpu.fabric = Some(Fabric { state, error: None, clique: 0, cluster, faults: Vec::new() });
    }
}

fn each_port(it: &mut Record, change: impl Fn(&mut cuda_cluster::topology::Port)) {
    it.topology.nics.iter_mut().flat_map(|nic| &mut nic.ports).for_each(change);
}

fn driver_and_health() -> Vec<Case> {
    const TWO: &[&str] = &["--gpus", "0,1", "--workers-per-gpu", "2"];
    vec![
        error("driver-versions", |it| {
            it.evidence.driver.kernel_version = Look::Seen("570.86.15".to_owned());
        }),
        warning("gpus-missing", |it| unlisted(it, "nvidia")),
        warning("gpu-driver", |it| unlisted(it, "nouveau")),
        error("device-files", |it| {
            it.evidence.driver.files.insert("/dev/nvidia-uvm".to_owned(), DeviceFile::Missing);
        }),
        error("device-rules", |it| {
            let refused = DeviceFile::Refused("Operation not permitted".to_owned());
            it.evidence.driver.files.insert("/dev/nvidia3".to_owned(), refused);
        }),
        warning("confidential", |it| it.evidence.confidential = Look::Seen(true)),
        note("peer-access", |it| {
            it.topology.gpus.iter_mut().for_each(|gpu| gpu.peers = Some(Vec::new()));
        })
        .on("l40s-8", &[]),
        error("mps", |it| it.evidence.services = Look::Seen(Vec::new())).well(|it| {
            it.evidence.driver.mps_pipe = Look::Seen("/tmp/nvidia-mps".to_owned());
            it.evidence.services = Look::Seen(vec!["nvidia-cuda-mps".to_owned()]);
        }),
        error("ucx-cuda-version", |it| {
            it.evidence.driver.ucx = Some("libucx-cu13 of /venv".to_owned());
        })
        .well(|it| {
            it.topology.cuda = Some("12.8".to_owned());
            it.evidence.driver.ucx = Some("libucx-cu12 of /venv".to_owned());
        }),
        error("row-remap", |it| {
            let rows = Remapped { uncorrectable: 1, pending: false, failure: true };
            gpu(it, 3).remapped = Look::Seen(rows);
        }),
        warning("retired-pages", |it| gpu(it, 1).retired_pending = Look::Seen(true))
            .on("dgx-1-v100", &[]),
        warning("ecc-errors", |it| gpu(it, 1).ecc_uncorrected = Look::Seen(2)),
        note("ecc-mode", |it| gpu(it, 1).ecc = Look::Seen(false)),
        error("recovery-action", |it| gpu(it, 1).recovery_action = Look::Seen(1)),
        warning("slowdown", |it| gpu(it, 1).clock_reasons = Look::Seen(0x80)),
        warning("power-limit", |it| gpu(it, 1).power_limit_mw = Look::Seen(350_000)),
        note("persistence", |it| {
            gpu(it, 1).persistence = Look::Seen(false);
            it.evidence.services = Look::Seen(Vec::new());
        }),
        warning("mig-pending", |it| gpu(it, 1).mig_after_reset = Look::Seen(true))
            .well(|it| gpu(it, 1).mig_after_reset = Look::Seen(false)),
        error("compute-mode", |it| {
            it.topology.gpus[0].compute_mode = Some(ComputeMode::ExclusiveProcess);
        })
        .on("dgx-h100", TWO)
        .well(|it| it.topology.gpus[0].compute_mode = Some(ComputeMode::Default)),
        warning("memory-held", |it| {
            gpu(it, 2).holders = Look::Seen(vec![Holder { pid: 4242, ..Holder::default() }]);
        }),
        warning("xid", |it| {
            let pci = it.topology.gpus[1].pci.expect("an address");
            let error = Xid { pci, xid: 79, ago_s: Some(60), count: 1 };
            it.evidence.xids = Look::Seen(vec![error]);
        }),
    ]
}

fn fabric_and_paths() -> Vec<Case> {
    vec![
        error("fabric-state", |it| fabrics(it, FabricState::InProgress, None)),
        error("subnet-manager", |it| {
            fabrics(it, FabricState::NotStarted, None);
            it.evidence.services = Look::Seen(Vec::new());
        })
        .on("dgx-b200", &[]),
        error("fabric-clique", |it| {
            fabrics(it, FabricState::Completed, None);
            it.topology.gpus[3].fabric.as_mut().expect("one").clique = 2;
        }),
        error("nvlink-peers", |it| it.topology.gpus[0].peers = Some(Vec::new())),
        warning("nvlinks-down", |it| it.topology.gpus[5].nvlinks[3].active = false),
        warning("nvlink-speed", |it| it.topology.gpus[5].nvlinks[3].gb_per_s = Some(13.0)),
        note("imex", |it| it.evidence.driver.imex_channel = Look::Seen(false))
            .on("gb200-nvl72-tray", &[])
            .well(|it| {
                let cluster = "01234567-89ab-cdef-0000-000000000007";
                fabrics(it, FabricState::Completed, Some(cluster));
                it.evidence.driver.imex_channel = Look::Seen(true);
            }),
        error("iommu", |it| function(it, 0).iommu = Look::Seen("DMA-FQ".to_owned()))
            .on("l40s-8", &[]),
        warning("acs", |it| {
            let port = it.topology.gpus[0].parent.clone().expect("a bridge");
            let port = it.evidence.functions.get_mut(&port.parse().expect("an address"));
            port.expect("it is there").acs = Look::Seen(0x1d);
        })
        .on("l40s-8", &[]),
        warning("pcie-width", |it| {
            it.topology.gpus[2].pcie.as_mut().expect("a link").width = Some(4)
        }),
        note("pcie-slot", |it| {
            let above = it.topology.gpus[2].parent.clone();
            let bridge = it.topology.bridges.iter_mut().find(|one| Some(&one.id) == above.as_ref());
            bridge.expect("it is there").pcie.get_or_insert_default().max_gt_per_s = Some(8.0);
        })
        .well(|it| {
            it.topology.bridges.iter_mut().for_each(|bridge| {
                bridge.pcie.get_or_insert_default().max_gt_per_s = Some(32.0);
            });
        }),
        warning("pcie-payload", |it| function(it, 2).payload_bytes = Look::Seen(128)),
        warning("pcie-read-request", |it| {
            let nic = it.topology.nics[0].pci.expect("an address");
            let nic = it.evidence.functions.get_mut(&nic).expect("it is there");
            nic.read_request_bytes = Look::Seen(512);
        }),
        warning("numa-node", |it| {
            let gpu = &mut it.topology.gpus[1];
            (gpu.numa, gpu.numa_set, gpu.cpus) = (None, None, None);
        }),
        warning("data-direct", |it| {
            let beside = it.evidence.functions.values_mut();
            let beside = beside.filter(|one| one.role == FunctionRole::DataDirect);
            beside.for_each(|one| one.iommu_group = Some(99));
        })
        .well(|it| {
            let group = Some(7);
            function(it, 0).iommu_group = group;
            let id = "15b3:2100".to_owned();
            let role = FunctionRole::DataDirect;
            let beside = Function { id, role, iommu_group: group, ..Function::default() };
            it.evidence.functions.insert("0000:f1:00.0".parse().expect("an address"), beside);
        }),
    ]
}

fn rdma() -> Vec<Case> {
    vec![
        warning("rdma-ports", |it| each_port(it, |port| port.state = Some(PortState::Down)))
            .on("dgx-h100", &[]),
        warning("rdma-nearest", |it| {
            it.topology.nics[0].ports[0].state = Some(PortState::Down);
        }),
        warning("rdma-rate", |it| it.topology.nics[0].ports[0].rate_gbps = Some(200.0)),
        error("rdma-gid", |it| {
            let port = it.evidence.ports.get_mut("mlx5_0:1").expect("it is there");
            port.gids = Look::Seen(Vec::new());
        })
        .well(|it| each_port(it, |port| port.link_layer = Some(LinkLayer::Ethernet))),
        error("rdma-files", |it| {
            let port = it.evidence.ports.get_mut("mlx5_0:1").expect("it is there");
            port.file = Look::Seen(DeviceFile::Refused("Permission denied".to_owned()));
        }),
        warning("gpudirect-rdma", |it| {
            it.evidence.driver.memory_peers = Look::NotThere;
            it.evidence.driver.open = Look::Seen(false);
        }),
        warning("bar1", |it| it.topology.gpus[0].bar1_bytes = Some(256 << 20)).well(|it| {
            it.topology.gpus.iter_mut().for_each(|gpu| gpu.bar1_bytes = Some(128 * GIB));
        }),
        note("rdma-flaps", |it| {
            let port = it.evidence.ports.get_mut("mlx5_0:1").expect("it is there");
            port.link_downed = Look::Seen(4);
        }),
    ]
}

fn process_and_network() -> Vec<Case> {
    const BEYOND: &[&str] = &["--engine", "dask", "--host", "0.0.0.0"];
    const JOINS: &[&str] = &["--engine", "dask", "--join", "tcp://10.0.0.9:8786"];
    vec![
        error("shared-memory", |it| {
            let room = Room { free_bytes: 0, total_bytes: GIB, read_only: true };
            it.evidence.system.shared_memory = Look::Seen(room);
        }),
        warning("locked-memory", |it| limit(it, "Max locked memory", 8 << 20)),
        error("open-files", |it| limit(it, "Max open files", 40)),
        warning("processes", |it| limit(it, "Max processes", 60)),
        error("address-space", |it| limit(it, "Max address space", 32 * GIB)),
        warning("overcommit", |it| it.evidence.system.overcommit = Look::Seen(2)),
        warning("memory-read", |it| {
            let why = Err("Operation not permitted".to_owned());
            it.evidence.process.reads_memory = Look::Seen(why);
        }),
        warning("namespaces", |it| it.evidence.process.own_pids = Look::Seen(false))
            .on("dgx-h100", JOINS),
        warning("group-memory", |it| {
            let group = Used { limit: 8 * GIB, used: GIB };
            it.evidence.process.group_memory = Look::Seen(group);
        })
        .well(|it| {
            let group = Used { limit: 1 << 50, used: GIB };
            it.evidence.process.group_memory = Look::Seen(group);
        }),
        warning("group-cpus", |it| it.evidence.process.group_cpus = Look::Seen(4.0))
            .well(|it| it.evidence.process.group_cpus = Look::Seen(224.0)),
        warning("allowed-cpus", |it| {
            let (cpus, mems) = ("0-7".parse(), "0-1".parse());
            let allowed = Allowed { cpus: cpus.expect("CPUs"), mems: mems.expect("nodes") };
            it.topology.allowed = Some(allowed);
        }),
        warning("numa-memory", |it| {
            it.evidence.system.numa_free_bytes.insert(1, GIB);
        }),
        warning("interface", |it| {
            it.evidence.network.interfaces.swap(0, 1);
            let main = it.evidence.network.interfaces.iter_mut();
            main.for_each(|one| one.main = !one.hardware);
        })
        .on("dgx-h100", BEYOND)
        .well(|it| {
            let interface = |name: &str, address: &str, hardware| Interface {
                name: name.to_owned(),
                addresses: vec![address.parse().expect("an address")],
                main: hardware,
                hardware,
            };
            it.evidence.network.interfaces = vec![
                interface("ens1", "10.1.2.3", true),
                interface("docker0", "172.17.0.1", false),
            ];
        }),
        warning("hostname", |it| {
            let loopback = "127.0.1.1".parse().expect("an address");
            it.evidence.network.hostname_addresses = Look::Seen(vec![loopback]);
        })
        .on("dgx-h100", BEYOND)
        .well(|it| {
            let address = "10.1.2.3".parse().expect("an address");
            it.evidence.network.hostname = Some("dgx-h100".to_owned());
            it.evidence.network.hostname_addresses = Look::Seen(vec![address]);
        }),
        warning("route", |it| it.evidence.network.default_route = Look::Seen(false))
            .on("dgx-h100", BEYOND)
            .well(|it| it.evidence.network.default_route = Look::Seen(true)),
    ]
}

fn settings_and_host() -> Vec<Case> {
    const DASK: &[&str] = &["--engine", "dask"];
    vec![
        warning("nccl-switches", |it| set(it, "NCCL_P2P_DISABLE", "1")).on("dgx-h100", DASK),
        warning("nccl-topology", |it| {
            let foreign = "0000:aa:00.0".parse().expect("an address");
            it.evidence.settings[0].gpus = Some(Ok(vec![foreign]));
        })
        .on("dgx-h100", DASK)
        .well(|it| {
            let own = it.topology.gpus.iter().filter_map(|gpu| gpu.pci).collect();
            it.evidence.settings.clear();
            set(it, "NCCL_TOPO_FILE", "/etc/topo.xml");
            it.evidence.settings[0].gpus = Some(Ok(own));
        }),
        warning("ucx-switches", |it| set(it, "UCX_TLS", "tcp,sm")),
        warning("allocator", |it| {
            set(it, "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True");
        })
        .on("dgx-h100", DASK),
        warning("launch-blocking", |it| set(it, "CUDA_LAUNCH_BLOCKING", "1")),
        error("cuda-stubs", |it| set(it, "LD_LIBRARY_PATH", "/usr/local/cuda/lib64/stubs")),
        note("gpu-mask", |it| set(it, "CUDA_VISIBLE_DEVICES", "0,1"))
            .well(|it| set(it, "CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")),
        note("gpu-order", |it| set(it, "CUDA_DEVICE_ORDER", "FASTEST_FIRST")).well(|it| {
            it.topology.gpus[7].name = Some("NVIDIA L4".to_owned());
            set(it, "CUDA_DEVICE_ORDER", "PCI_BUS_ID");
        }),
        note("proxies", |it| it.evidence.settings.retain(|one| one.name != "no_proxy")).well(
            |it| {
                set(it, "https_proxy", "(set)");
                set(it, "no_proxy", "(set)");
            },
        ),
        note("huge-pages", |it| it.evidence.system.huge_pages = Look::Seen("never".to_owned())),
        note("numa-balancing", |it| it.evidence.system.numa_balancing = Look::Seen(1))
            .well(|it| it.evidence.system.numa_balancing = Look::Seen(0)),
        note("swap", |it| it.evidence.system.swap_used_bytes = Some(GIB))
            .well(|it| it.evidence.system.swap_used_bytes = Some(0)),
        note("smt", |it| it.evidence.system.smt = Look::Seen(true))
            .well(|it| it.evidence.system.smt = Look::Seen(false)),
        note("governor", |it| it.evidence.system.governor = Look::Seen("powersave".to_owned()))
            .well(|it| it.evidence.system.governor = Look::Seen("performance".to_owned())),
        note("c-states", |it| it.evidence.system.waking_us = Look::Seen(290))
            .well(|it| it.evidence.system.waking_us = Look::Seen(2)),
        note("clock", |it| it.evidence.system.clock = Look::Seen("hpet".to_owned()))
            .well(|it| it.evidence.system.clock = Look::Seen("tsc".to_owned())),
    ]
}

fn cases() -> Vec<Case> {
    let families = [
        driver_and_health(),
        fabric_and_paths(),
        rdma(),
        process_and_network(),
        settings_and_host(),
    ];
    families.into_iter().flatten().collect()
}

#[test]
fn each_check_tells_the_good_machine_from_the_bad_one() {
    let cases = cases();
    let mut machines: BTreeMap<&str, Recorded> = BTreeMap::new();
    let mut wrong = Vec::new();
    for case in &cases {
        let Case { id, machine, arguments, well, bad, severity } = case;
        let machine = machines.entry(machine).or_insert_with(|| on(machine).recorded());
        let said = machine.judged(arguments, *well);
        let good: Vec<Severity> = said.of(id).iter().map(|one| one.severity).collect();
        if good.is_empty() || good.iter().any(|one| *one != Severity::Ok) {
            wrong.push(format!("{id}: the good machine is {:#?}", said.of(id)));
        }
        let said = machine.judged(arguments, |it| {
            well(it);
            bad(it);
        });
        if said.of(id).iter().map(|one| one.severity).max() != Some(*severity) {
            wrong.push(format!("{id}: the bad machine is {:#?}", said.of(id)));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn no_check_is_left_out() {
    let judged: BTreeSet<&str> =
        checks().filter(|check| check.is_judged()).map(|check| check.id).collect();
    let tested: Vec<&str> = cases().iter().map(|case| case.id).collect();
    let once: BTreeSet<&str> = tested.iter().copied().collect();
    assert_eq!(once, judged);
    assert_eq!(once.len(), tested.len(), "each once");
}

#[test]
fn a_small_place_for_shared_memory_and_a_full_one_are_two_things() {
    let recorded = on("dgx-h100").recorded();
    let of = |free_bytes, total_bytes| {
        let said = recorded.judged(&[], |it| {
            let room = Room { free_bytes, total_bytes, read_only: false };
            it.evidence.system.shared_memory = Look::Seen(room);
        });
        let [one] = said.of("shared-memory")[..] else { panic!("{said:#?}") };
        (one.severity, one.text.clone())
    };
    let small = (Severity::Warning, "/dev/shm has only 64.0 MiB".to_owned());
    assert_eq!(of(60 << 20, 64 << 20), small);
    let full = "/dev/shm is nearly full: 1.0 MiB of 1.0 GiB are free";
    assert_eq!(of(1 << 20, GIB), (Severity::Warning, full.to_owned()));
    assert_eq!(of(GIB / 2, GIB).0, Severity::Ok);
}
