//! What a file says about NICs becomes names that UCX can open, or a note that says why not; and
//! choices that an expert would question are notes, so that `--strict` catches them.

use crate::compact::{caller, caller_with, machine, planned, planned_by, spec};
use cuda_cluster::plan::{InstalledUcx, Plan, PlanError};
use cuda_cluster::topology::{NicKind, Port, PortState, Topology, parse};

const FABRIC: &str = "ucx: {infiniband: true, net_devices: auto}\n";
const BOTH: &str = "ucx: {nvlink: true, infiniband: true, net_devices: auto}\n";

fn read(text: &str) -> Topology {
    parse(text).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// An NCCL file: one NUMA node with these elements.
fn nccl(inside: &str) -> Topology {
    read(&format!(
        "<system version=\"1\"><cpu numaid=\"0\" affinity=\"ff\">{inside}</cpu></system>"
    ))
}

const GPU: &str = "<pci busid=\"0000:01:00.0\" class=\"0x030200\" vendor=\"0x10de\"><gpu dev=\"0\" sm=\"90\"/></pci>";

fn card(busid: &str, nets: &str) -> String {
    format!("<pci busid=\"{busid}\" class=\"0x020700\"><nic>{nets}</nic></pci>")
}

fn net(name: &str, port: u32) -> String {
    format!("<net name=\"{name}\" speed=\"200000\" port=\"{port}\" guid=\"0x1234\"/>")
}

fn ports(topology: &Topology) -> Vec<String> {
    let nics = topology.nics.iter();
    nics.flat_map(|nic| nic.ports.iter().map(|port| format!("{}:{}", nic.name, port.port)))
        .collect()
}

fn made(topology: &Topology, text: &str) -> Plan {
    planned(topology, &spec(text)).expect("a plan")
}

fn notes(plan: &Plan) -> Vec<String> {
    plan.notes.iter().map(ToString::to_string).collect()
}

fn noted(plan: &Plan, words: &str) -> bool {
    notes(plan).iter().any(|note| note.contains(words))
}

fn devices(plan: &Plan, worker: usize) -> Option<&str> {
    plan.workers[worker].env.get("UCX_NET_DEVICES").map(String::as_str)
}

#[test]
fn nccls_port_counts_the_devices_of_a_card_and_the_verbs_port_is_one() {
    let two = card("0000:02:00.0", &(net("mlx5_5", 1) + &net("mlx5_6", 2)));
    let topology = nccl(&(GPU.to_owned() + &two));
    assert_eq!(ports(&topology), ["mlx5_5:1", "mlx5_6:1"]);
    let other_function = card("0000:02:00.1", &net("mlx5_6", 2));
    let one = card("0000:02:00.0", &net("mlx5_5", 1));
    assert_eq!(ports(&nccl(&(one + &other_function))), ["mlx5_5:1", "mlx5_6:1"]);
}

#[test]
fn a_device_that_comes_with_several_ports_has_several() {
    // NCCL counts the first port as an earlier device of the card: 2 becomes 3.
    for (first, second) in [(1, 2), (1, 3)] {
        let dual = card("0000:02:00.0", &(net("mlx4_0", first) + &net("mlx4_0", second)));
        assert_eq!(ports(&nccl(&dual)), ["mlx4_0:1", "mlx4_0:2"], "{first} {second}");
    }
    // A dump lists a NIC again for collectives.
    let again = card("0000:02:00.0", &(net("mlx5_0", 1) + &net("mlx5_0", 1)));
    assert_eq!(ports(&nccl(&again)), ["mlx5_0:1"]);
}

#[test]
fn sockets_are_no_rdma_devices() {
    let socket = "<net name=\"enigma\" port=\"1\" guid=\"0x0\"/>";
    let zero = "<net name=\"fast\" port=\"0\" guid=\"0x12\"/>";
    for (name, net) in [
        ("enigma", socket.to_owned()),
        ("fast", zero.to_owned()),
        ("eth0", net("eth0", 1)),
        ("veth12", net("veth12", 1)),
        ("br-lan", net("br-lan", 1)),
    ] {
        let topology = nccl(&(GPU.to_owned() + &card("0000:02:00.0", &net)));
        assert_eq!(topology.nics[0].kind, NicKind::Socket, "{name}");
        let plan = made(&topology, FABRIC);
        assert!(plan.workers[0].nics.is_empty(), "{name}");
        assert!(!devices(&plan, 0).unwrap_or_default().contains(name), "{name}");
        assert!(noted(&plan, "through sockets") && noted(&plan, name), "{:?}", notes(&plan));
        assert_eq!(read(&topology.to_nccl().expect("places")).nics[0].kind, NicKind::Socket);
        // Naming it explicitly means TCP over it.
        let named = made(&topology, &format!("ucx: {{tcp: true, net_devices: [{name}]}}\n"));
        assert!(devices(&named, 0).unwrap_or_default().starts_with(name));
    }
}

#[test]
fn a_nic_that_only_its_column_names_has_no_port_and_no_place_in_the_variable() {
    let matrix =
        "\tGPU0\tNIC0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tPIX\t0-7\t0\nNIC0\tPIX\t X \n";
    let topology = read(matrix);
    let plan = made(&topology, FABRIC);
    assert_eq!(plan.workers[0].nics[0].to_string(), "NIC0");
    assert_eq!(devices(&plan, 0), None);
    assert!(noted(&plan, "matrix column only"), "{:?}", notes(&plan));
    let json = serde_json::to_string(&plan).expect("JSON");
    assert!(!json.contains("NIC0:1"), "{json}");
    assert_eq!(serde_json::from_str::<Plan>(&json).expect("its own JSON"), plan);
}

#[test]
fn gpus_of_another_vendor_are_left_out_with_a_note() {
    let amd = "<pci busid=\"0000:03:00.0\" class=\"0x038000\" vendor=\"0x1002\">\
               <gpu dev=\"1\" sm=\"304\" gcn=\"942\"><xgmi target=\"0000:04:00.0\"/></gpu></pci>";
    let topology = nccl(&(GPU.to_owned() + amd));
    assert_eq!(topology.gpus.len(), 1);
    let said: Vec<String> = topology.notes.iter().map(ToString::to_string).collect();
    assert!(
        said.iter().any(|note| note.contains("another vendor's, and so left out: 0000:03:00.0")),
        "{said:?}"
    );
    let alone = nccl(amd);
    let error = planned(&alone, &spec(FABRIC)).expect_err("no GPU");
    assert!(matches!(error, PlanError::NoGpus { .. }) && error.to_string().contains("vendor"));
}

#[test]
fn what_hangs_off_a_card_with_a_nic_is_kept() {
    let inner = GPU.replace("0000:01:00.0", "0000:05:00.0");
    let both = format!(
        "<pci busid=\"0000:02:00.0\" class=\"0x020700\"><nic>{}</nic>{inner}</pci>",
        net("mlx5_0", 1)
    );
    let topology = nccl(&both);
    assert_eq!((topology.gpus.len(), topology.nics.len()), (1, 1));
    assert_eq!(topology.links.iter().next().expect("a link").2.to_string(), "PIX");
}

#[test]
fn unusual_numbers_do_not_refuse_a_file() {
    let peers: String = (0..7)
        .map(|at| format!("<nvlink target=\"0000:1{at}:00.0\" count=\"18\" tclass=\"0x030200\"/>"))
        .collect();
    let gpu = GPU.replace("sm=\"90\"/>", &format!("sm=\"90\">{peers}</gpu>"));
    let topology = nccl(&gpu);
    assert_eq!(topology.gpus[0].nvlinks.len(), 126);
    let said: Vec<String> = topology.notes.iter().map(ToString::to_string).collect();
    assert!(said.iter().any(|note| note.contains("126 NVLinks")), "{said:?}");
    let endless = gpu.replace("count=\"18\"", "count=\"4000000000\"");
    assert!(nccl(&endless).gpus[0].nvlinks.len() < 10_000);
    let hexadecimal = read("<system version=\"1\"><cpu numaid=\"0x1\" affinity=\"f\"/></system>");
    assert_eq!(hexadecimal.numa[0].id.0, 1);
}

#[test]
fn uuids_of_zeros_are_none_where_several_gpus_have_them() {
    let zero = "GPU-00000000-0000-0000-0000-000000000000";
    let yaml =
        format!("version: 1\ngpus: [{{index: 0, uuid: {zero}}}, {{index: 1, uuid: {zero}}}]\n");
    let topology = read(&yaml);
    assert!(topology.gpus.iter().all(|gpu| gpu.uuid.is_none()));
    assert!(topology.notes[0].text.contains("2 of them have a UUID of zeros"));
    let two = include_str!("../../fuzz/seeds/hwloc/two.xml");
    let zeroed = ["1", "2"].iter().fold(two.to_owned(), |text, n| {
        text.replace(&format!("GPU-00000000-0000-0000-0000-00000000000{n}"), zero)
    });
    assert_eq!(read(&zeroed).gpus.len(), 2);
}

/// An hwloc file with one GPU, a node with CPUs and one without, on a platform.
fn hwloc(platform: &str, nodes: &str) -> Topology {
    read(&format!(
        "<topology version=\"2.0\"><object type=\"Machine\" cpuset=\"0xff\" local_memory=\"4096\">\
         <info name=\"DMIProductName\" value=\"{platform}\"/>\
         <object type=\"Package\" os_index=\"0\" cpuset=\"0xff\">{nodes}\
         <object type=\"Bridge\" bridge_type=\"0-1\" bridge_pci=\"0000:[00-0f]\">\
         <object type=\"PCIDev\" pci_busid=\"0000:01:00.0\" pci_type=\"0302 [10de:2330] [0:0] a1\"/>\
         </object></object></object></topology>"
    ))
}

#[test]
fn memory_without_cpus_is_a_gpus_only_where_the_platform_has_such_nodes() {
    let nodes = "<object type=\"NUMANode\" os_index=\"0\" cpuset=\"0xff\" local_memory=\"4096\"/>\
                 <object type=\"NUMANode\" os_index=\"1\" cpuset=\"0x0\" local_memory=\"8192\"/>";
    assert!(!hwloc("PowerEdge R760", nodes).numa[1].gpu_memory);
    assert!(hwloc("NVIDIA Grace Hopper", nodes).numa[1].gpu_memory);
}

#[test]
fn a_machine_without_numa_nodes_has_node_zero() {
    let topology = hwloc("old", "");
    assert_eq!(topology.numa.len(), 1);
    assert_eq!((topology.numa[0].id.0, topology.numa[0].memory_bytes), (0, Some(4096)));
    assert_eq!(topology.gpus[0].numa.map(|id| id.0), Some(0));
}

#[test]
fn a_silent_source_does_not_deny_nvlink() {
    let second = GPU.replace("0000:01:00.0", "0000:05:00.0");
    let silent = (GPU.to_owned() + &second).replace("<gpu dev=\"0\" sm=\"90\"/>", "");
    let plan = made(&nccl(&silent), BOTH);
    assert!(noted(&plan, "the source does not tell whether"), "{:?}", notes(&plan));
    assert!(!noted(&plan, "joined by NVLink"));
    // Not knowing survives the project's own form.
    let again = read(&nccl(&silent).to_yaml());
    assert!(again.nvlinks_untold);
    let plan = made(&machine("l40s-8"), BOTH);
    assert!(noted(&plan, "no two of the chosen GPUs"), "{:?}", notes(&plan));
}

#[test]
fn sixteen_ports_without_a_state_are_one_note() {
    let cards: String = (0..16)
        .map(|at| card(&format!("0000:2{at:x}:00.0"), &net(&format!("mlx5_{at}"), 1)))
        .collect();
    let plan = made(&nccl(&(GPU.to_owned() + &cards)), FABRIC);
    let states = notes(&plan).into_iter().filter(|note| note.contains("tells no state"));
    assert_eq!(states.count(), 1, "{:?}", notes(&plan));
}

#[test]
fn four_of_eight_gpus_are_not_each_of_them() {
    let plan = made(&machine("dgx-1-v100"), "workers: 4\n");
    let why = plan.workers[0].why.iter().find(|why| why.choice == "gpu").expect("a reason");
    assert!(why.reason.contains("best-connected 4"), "{}", why.reason);
    assert!(!why.reason.contains("each of"), "{}", why.reason);
}

/// Two GPUs behind PCIe of the fifth generation, and NICs with their links, rates, layers, states.
fn with_nics(nics: &[(&str, &str, u32, &str, &str)]) -> Topology {
    let gpu = |at: u32| {
        format!(
            "  - {{index: {at}, numa: 0, cpus: 0-7, pcie: {{max_gt_per_s: 32, max_width: 16}}}}\n"
        )
    };
    let mut text = format!("version: 1\nnvswitch: 0\ngpus:\n{}{}nics:\n", gpu(0), gpu(1));
    let mut links = "links:\n  - {a: GPU0, b: GPU1, kind: NODE}\n".to_owned();
    for (at, (name, kind, rate, layer, state)) in nics.iter().enumerate() {
        text.push_str(&format!(
            "  - {{name: {name}, pci: null, numa: 0, ports: [{{port: 1, state: {state}, \
             link_layer: {layer}, rate_gbps: {rate}, netdev: null}}]}}\n"
        ));
        for gpu in 0..2 {
            links.push_str(&format!("  - {{a: GPU{gpu}, b: NIC{at}, kind: {kind}}}\n"));
        }
    }
    read(&(text + &links))
}

const IB: &str = "InfiniBand";

#[test]
fn a_nearer_nic_that_is_down_is_a_note() {
    let topology =
        with_nics(&[("mlx5_0", "PIX", 400, IB, "DOWN"), ("mlx5_1", "SYS", 400, IB, "ACTIVE")]);
    let plan = made(&topology, FABRIC);
    assert_eq!(plan.workers[0].nics[0].to_string(), "mlx5_1:1");
    let words = "mlx5_0:1: port 1 is DOWN: GPU 0, GPU 1 use a farther NIC";
    assert!(notes(&plan).iter().any(|note| note == words), "{:?}", notes(&plan));
    let strict = planned(&topology, &spec(&format!("strict: true\n{FABRIC}")));
    assert!(matches!(strict, Err(PlanError::Strict { .. })));
    // A port farther than the one in use needs no note.
    let topology =
        with_nics(&[("mlx5_0", "SYS", 400, IB, "DOWN"), ("mlx5_1", "PIX", 400, IB, "ACTIVE")]);
    assert!(!noted(&made(&topology, FABRIC), "farther"));
}

#[test]
fn a_fabric_that_is_left_out_is_a_note_if_either_could_be_meant() {
    let beside = |link| {
        let second = ("mlx5_1", link, 400, "Ethernet", "ACTIVE");
        with_nics(&[("mlx5_0", "PXB", 400, IB, "ACTIVE"), second])
    };
    for link in ["PXB", "PIX"] {
        let plan = made(&beside(link), FABRIC);
        let either = "nics: mlx5_1:1 is left out: Ethernet";
        let either = if link == "PXB" { either } else { "nics: mlx5_0:1 is left out: InfiniBand" };
        assert!(noted(&plan, either), "{:?}", notes(&plan));
    }
    let plan = made(&beside("SYS"), FABRIC);
    assert!(!noted(&plan, "left out"), "farther away, as NICs for storage are: {:?}", notes(&plan));
    let rejected = plan.workers[0].why.iter().flat_map(|why| &why.rejected);
    assert!(rejected.clone().any(|one| one.what == "mlx5_1:1" && one.why.contains("Ethernet")));
}

#[test]
fn strict_infiniband_is_planned_on_machines_with_ethernet_for_storage() {
    for name in ["dgx-a100", "dgx-h100", "dgx-b200"] {
        let asked =
            "strict: true\nverify: true\nucx: {library: system, nvlink: true, infiniband: true}\n";
        let plan = made(&machine(name), asked);
        assert!(plan.workers.iter().all(|worker| worker.nics.len() == 1), "{name}");
    }
}

#[test]
fn infiniband_alone_says_that_nvlink_is_left_out() {
    let plan = made(&machine("dgx-h100"), FABRIC);
    assert!(noted(&plan, "'cuda_ipc' is left out"), "{:?}", notes(&plan));
    for (name, text) in [
        ("dgx-h100", BOTH),
        ("l40s-8", FABRIC),
        ("dgx-h100", "ucx: {nvlink: false, infiniband: true}\n"),
        ("dgx-h100", "threads: 1\n"),
    ] {
        assert!(!noted(&made(&machine(name), text), "'cuda_ipc' is left out"), "{name} {text}");
    }
}

#[test]
fn rates_are_weighed_with_distances_and_the_weighing_is_noted() {
    // 3 GB/s nearby against 10 GB/s between NUMA nodes.
    let slow = ("mlx5_0", "PIX", 25, IB, "ACTIVE");
    let plan = made(&with_nics(&[slow, ("mlx5_1", "SYS", 400, IB, "ACTIVE")]), FABRIC);
    assert_eq!(plan.workers[0].nics[0].to_string(), "mlx5_1:1");
    assert!(noted(&plan, "mlx5_0:1 (PIX, 25 Gbit/s) is nearer"), "{:?}", notes(&plan));
    // 24 GB/s nearby is more than what can be carried between NUMA nodes.
    let near = ("mlx5_0", "PIX", 200, IB, "ACTIVE");
    let plan = made(&with_nics(&[near, ("mlx5_1", "SYS", 800, IB, "ACTIVE")]), FABRIC);
    assert_eq!(plan.workers[0].nics[0].to_string(), "mlx5_0:1");
    assert!(!noted(&plan, "faster"), "{:?}", notes(&plan));
    // 12 GB/s nearby for each against 48 for one: kept if the other must be shared, with a note.
    let near = [("mlx5_0", "PIX", 100, IB, "ACTIVE"), ("mlx5_1", "PIX", 100, IB, "ACTIVE")];
    let plan = made(&with_nics(&[near[0], near[1], ("mlx5_2", "PHB", 200, IB, "ACTIVE")]), FABRIC);
    assert_eq!(plan.workers[0].nics[0].to_string(), "mlx5_0:1");
    assert!(noted(&plan, "though mlx5_2:1 (PHB, 200 Gbit/s) is faster"), "{:?}", notes(&plan));
}

#[test]
fn elastic_fabric_adapters_get_srd_where_the_version_has_it() {
    let tls = |version: &str| {
        let text = format!("ucx: {{infiniband: true, nvlink: true{version}}}\n");
        let plan = made(&machine("aws-p4d"), &text);
        (plan.workers[0].env["UCX_TLS"].clone(), noted(&plan, "Elastic Fabric"))
    };
    let (new, noted_new) = tls(", version: '1.19'");
    assert!(new.starts_with("srd,") && !new.contains("rc") && !noted_new, "{new}");
    let (old, noted_old) = tls(", version: '1.18'");
    assert!(old.starts_with("rc,") && !old.contains("srd") && noted_old, "{old}");
    let (unknown, noted_unknown) = tls("");
    assert!(unknown.starts_with("srd,") && noted_unknown, "{unknown}");
}

#[test]
fn software_rdma_is_used_by_name_alone() {
    let text = "version: 1\ngpus: [{index: 0, numa: 0, cpus: 0-3}]\nnics:\n  - {name: roce0, pci: \
                null, numa: null, kind: software, ports: [{port: 1, state: ACTIVE, link_layer: \
                Ethernet, rate_gbps: 2.5, netdev: eth0}]}\n";
    let topology = read(text);
    assert!(made(&topology, FABRIC).workers[0].nics.is_empty());
    for name in ["roce0:1", "roce0"] {
        let text = format!("ucx: {{infiniband: true, net_devices: ['{name}']}}\n");
        assert_eq!(devices(&made(&topology, &text), 0), Some("roce0:1,lo"));
    }
    let wrong = planned(&topology, &spec("ucx: {net_devices: ['roce0:2']}\n"));
    assert!(matches!(wrong, Err(PlanError::NoSuchNic { .. })), "{wrong:?}");
}

fn installed(path: &str, cuda: bool, verbs: bool) -> InstalledUcx {
    let mut library = InstalledUcx::new(path, "a test");
    (library.cuda, library.verbs) = (cuda, verbs);
    library
}

fn with_libraries(libraries: Vec<InstalledUcx>, text: &str) -> Plan {
    let mut caller = caller();
    caller.ucx_libraries = Some(libraries);
    planned_by(&machine("dgx-h100"), &spec(text), &caller).expect("a plan")
}

#[test]
fn a_libucp_without_infiniband_is_not_chosen_silently() {
    let pip = || installed("/pip/libucp.so.0", true, false);
    let whole = || installed("/hpcx/libucp.so.0", true, true);
    let used = |plan: &Plan| plan.workers[0].env.get("CUDA_CLUSTER_UCX").cloned();
    let plan = with_libraries(vec![pip(), whole()], BOTH);
    assert_eq!(used(&plan).as_deref(), Some("/hpcx/libucp.so.0"));
    assert!(!noted(&plan, "libuct_ib"), "{:?}", notes(&plan));
    let plan = with_libraries(vec![pip(), whole()], "ucx: {nvlink: true}\n");
    assert_eq!(used(&plan).as_deref(), Some("/pip/libucp.so.0"));
    let plan = with_libraries(vec![pip()], BOTH);
    assert!(noted(&plan, "libuct_ib") && noted(&plan, "HPC-X"), "{:?}", notes(&plan));
    let named = "ucx: {nvlink: true, infiniband: true, library: /pip}\n";
    assert!(noted(&with_libraries(vec![pip(), whole()], named), "/hpcx/libucp.so.0 does"));
}

#[test]
fn a_libucp_that_would_wait_at_each_patched_function_is_told_to_wait_less() {
    const GRACE: &str = "UCX_MEM_BISTRO_GRACE_DURATION";
    let told = |told_grace: bool, text: &str| {
        let mut library = installed("/pip/libucp.so.0", true, false);
        library.told_grace = told_grace;
        let plan = with_libraries(vec![library], &format!("{text}ucx: {{nvlink: true}}\n"));
        plan.workers[0].env.get(GRACE).cloned()
    };
    assert_eq!(told(true, "").as_deref(), Some("5ms"));
    // UCX 1.20 and earlier would warn of it; in another engine's processes others open UCX.
    assert_eq!(told(false, ""), None);
    assert_eq!(told(true, "engine: command\n"), None);
    let mut caller = caller_with(GRACE, "1s");
    let mut library = installed("/pip/libucp.so.0", true, false);
    library.told_grace = true;
    caller.ucx_libraries = Some(vec![library]);
    let plan = planned_by(&machine("dgx-h100"), &spec(""), &caller).expect("a plan");
    assert_eq!(plan.workers[0].env.get(GRACE).map(String::as_str), Some("1s"));
}

#[test]
fn a_policy_of_numactl_stands_unless_another_is_asked_for() {
    let planned = |text: &str| {
        let mut caller = caller();
        caller.memory_policy = Some("bind 1".to_owned());
        planned_by(&machine("dgx-h100"), &spec(text), &caller).expect("a plan")
    };
    let plan = planned("threads: 1\n");
    assert!(plan.workers.iter().all(|worker| worker.binding.mems.is_none()));
    let why = plan.workers[0].why.iter().find(|why| why.choice == "mems").expect("a reason");
    assert!(why.reason.contains("bind 1"), "{}", why.reason);
    let plan = planned("memory: {policy: bind}\n");
    assert!(plan.workers[0].binding.mems.is_some());
    assert!(noted(&plan, "it replaces the caller's own policy (bind 1)"), "{:?}", notes(&plan));
}

#[test]
fn where_no_cpu_of_a_gpu_is_allowed_its_package_comes_before_all() {
    let text = "version: 1\ngpus: [{index: 0, numa: 1}]\nnuma:\n  \
                - {id: 0, package: 0, cpus: 0-3, memory_bytes: 1073741824}\n  \
                - {id: 1, package: 1, cpus: 4-7, memory_bytes: 1073741824}\n  \
                - {id: 2, package: 1, cpus: 8-11, memory_bytes: 1073741824}\n\
                allowed: {cpus: '0-3,8-9', mems: 0-2}\n";
    let plan = made(&read(text), "cpus: local\n");
    assert_eq!(
        plan.workers[0].binding.cpus.as_ref().map(ToString::to_string).as_deref(),
        Some("8-9")
    );
    assert!(noted(&plan, "those of its package (8-9)"), "{:?}", notes(&plan));
}

#[test]
fn a_port_is_named_although_its_neighbour_cannot_be_used() {
    let mut topology = machine("dgx-1-v100");
    let port = topology.nics[0].ports[0].clone();
    topology.nics[0].ports.push(Port { port: 2, ..port.clone() });
    let named = |topology: &Topology, name: &str| {
        planned(topology, &spec(&format!("ucx: {{infiniband: true, net_devices: [\"{name}\"]}}\n")))
    };
    assert!(named(&topology, "mlx5_0:2").is_ok());
    topology.nics[0].ports[0].state = Some(PortState::Down);
    assert!(named(&topology, "mlx5_0:2").is_ok(), "port 1 is down");
    let error = named(&topology, "mlx5_0:1").expect_err("it is down").to_string();
    assert!(error.contains("mlx5_0:1") && error.contains("DOWN"), "{error}");
    assert!(named(&topology, "mlx5_1:1").is_ok(), "another NIC");
    topology.nics[0].kind = NicKind::Software;
    let software = named(&topology, "mlx5_0:2").expect("named");
    assert_eq!(software.workers[0].nics[0].to_string(), "mlx5_0:2");
    assert!(named(&topology, "mlx5_0:1").is_err(), "software, and down");
    assert!(named(&topology, "mlx5_0:3").is_err(), "no such port");
}

#[test]
fn the_reason_for_a_libucp_says_what_it_knows_and_what_was_wanted() {
    let chosen = |libraries: Vec<InstalledUcx>, text: &str| {
        let plan = with_libraries(libraries, text);
        let why = plan.workers[0].why.iter().find(|why| why.choice == "ucx.library").cloned();
        why.map(|why| (why.reason, why.rejected.into_iter().map(|r| r.why).collect::<Vec<_>>()))
    };
    let both = || vec![installed("/a", true, true), installed("/b", true, false)];
    let (reason, rejected) = chosen(both(), FABRIC).expect("a choice");
    assert!(reason.starts_with("the first that knows CUDA and InfiniBand"), "{reason}");
    assert_eq!(rejected, ["does not know InfiniBand"]);
    let (reason, rejected) = chosen(both(), "").expect("a choice");
    assert!(reason.starts_with("the first that knows CUDA:"), "{reason}");
    assert_eq!(rejected, ["another comes first"]);
    let neither = vec![installed("/a", true, false), installed("/b", true, false)];
    let (reason, rejected) = chosen(neither, FABRIC).expect("a choice");
    assert!(reason.starts_with("the first that knows CUDA:"), "{reason}");
    assert_eq!(rejected, ["another comes first"]);
}
