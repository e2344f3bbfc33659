//! What each foreign form says, read from files of our own in that form (`tests/topo/readers/`); a person
//! has reviewed what was read.

use cuda_cluster::ids::GpuIndex;
use cuda_cluster::topology::{Device, LinkKind, NicKind, ParseError, Topology, builtin, parse};

const HWLOC: &str = include_str!("readers/hwloc-2.xml");
const NCCL: &str = include_str!("readers/nccl.xml");

/// As `nvidia-smi topo -m` prints it. A switch with two GPUs and a NIC, two that share a host bridge,
/// one far away.
const MATRIX: &str = "\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity
GPU0\t X \tPXB\tNV2\tSYS\tPIX\tPHB\t0-7\t0
GPU1\tPXB\t X \tSYS\tNV2\tPXB\tPHB\t0-7\t0
GPU2\tNV2\tSYS\t X \tNODE\tSYS\tSYS\t8-15\t1-2
GPU3\tSYS\tNV2\tNODE\t X \tSYS\tSYS\t8-15\t1-2
NIC0\tPIX\tPXB\tSYS\tSYS\t X \tPHB\t0-7\t0
NIC1\tPHB\tPHB\tSYS\tSYS\tPHB\t X \t8-15\t1-2

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
";

fn read(text: &str) -> Topology {
    parse(text).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

fn refused(text: &str) -> ParseError {
    match parse(text) {
        Ok(_) => panic!("accepted:\n{text}"),
        Err(error) => error,
    }
}

#[test]
fn hwlocs_objects_are_read_as_reviewed() {
    insta::assert_snapshot!("hwloc-2", read(HWLOC).to_yaml());
}

#[test]
fn hwloc_3_has_bits_for_the_kinds_of_devices() {
    let mut newer = HWLOC.replace("<topology version=\"2.0\">", "<topology version=\"3.0\">");
    for (number, bit) in [("0", "1"), ("1", "2"), ("5", "32"), ("3", "thirty-two"), ("2", "16")] {
        let kind = |value: &str| format!("osdev_type=\"{value}\"");
        newer = newer.replace(&kind(number), &kind(bit));
    }
    let newer = newer.replace("thirty-two", "32");
    assert_eq!(read(&newer), read(HWLOC));
    // The numbers of one version are other kinds in the other.
    let mixed = HWLOC.replace("<topology version=\"2.0\">", "<topology version=\"3.0\">");
    assert_eq!(read(&mixed).nics.len(), 1, "only the one without any OS device");
}

#[test]
fn hwloc_does_not_tell_whose_a_dma_function_is() {
    let os = |name: &str| format!("<object type=\"OSDev\" name=\"{name}\" osdev_type=\"3\"/>");
    let device = |busid: &str, kind: &str, inside: &str| {
        format!(
            "<object type=\"Bridge\" bridge_type=\"0-1\" bridge_pci=\"{}:[00-0f]\">\
             <object type=\"PCIDev\" pci_busid=\"{busid}\" pci_type=\"{kind}\">{inside}</object></object>",
            &busid[..4]
        )
    };
    let machine = |dma: &str| {
        let nic = device("0000:03:00.0", "0207 [15b3:1023]", &os("mlx5_0"));
        let other = device("0006:01:00.0", "0200 [15b3:a2dc]", &os("mlx5_1"));
        read(&format!(
            "<topology version=\"2.0\"><object type=\"Machine\" cpuset=\"0xff\">{nic}{other}{dma}\
             </object></topology>"
        ))
    };
    let untold = machine(&device("0009:03:00.0", "0880 [15b3:2100]", ""));
    assert_eq!(
        untold.nics.iter().map(|nic| nic.dma_is_untold()).collect::<Vec<_>>(),
        [true, false]
    );
    let note = untold.notes.iter().find(|note| note.about == "nics").expect("a note");
    assert_eq!(note.text, "no object tells whose the DMA functions are: 0009:03:00.0");
    assert!(machine("").nics.iter().all(|nic| nic.dma.is_none()));
}

#[test]
fn hwloc_1_lists_sockets_and_no_only_node() {
    let text = "<topology><object type=\"Machine\" cpuset=\"0xff\" local_memory=\"4096\">\
                <object type=\"Socket\" os_index=\"3\" cpuset=\"0xff\">\
                <object type=\"Core\" cpuset=\"0x0f\"/><object type=\"Core\" cpuset=\"0xf0\"/>\
                <object type=\"Bridge\" bridge_type=\"0-1\" bridge_pci=\"0000:[00-0f]\">\
                <object type=\"PCIDev\" pci_busid=\"0000:01:00.0\" pci_type=\"0302 [10de:1db8]\"/>\
                </object></object></object></topology>";
    insta::assert_snapshot!("hwloc-1", read(text).to_yaml());
}

#[test]
fn nccls_elements_are_read_as_reviewed() {
    insta::assert_snapshot!("nccl", read(NCCL).to_yaml());
}

#[test]
fn the_matrix_is_read_and_drawn_as_reviewed() {
    let topology = read(MATRIX);
    insta::assert_snapshot!("matrix", format!("{}\n{}", topology.to_yaml(), topology.to_tree()));
}

#[test]
fn what_is_cut_off_of_a_matrix_has_a_hint() {
    let rows: Vec<&str> = MATRIX.lines().collect();
    let without_header = rows[1..7].join("\n");
    let without_row = [&rows[..4], &rows[5..]].concat().join("\n");
    let short = MATRIX.replace("GPU3\tSYS\tNV2\tNODE\t X \tSYS\tSYS\t8-15\t1-2", "GPU3\tSYS\tNV2");
    for text in [without_row, short] {
        let error = refused(&text);
        let hint = error.hint().unwrap_or_default();
        assert!(hint.contains("part of the output is missing"), "{error}: {hint}");
    }
    // Without a header it is no matrix at all.
    assert!(refused(&without_header).hint().is_some());
}

#[test]
fn what_only_looks_like_ours_is_refused_by_our_own_reader() {
    for (text, ours) in [
        ("gpus: []\n", true),
        ("compute_capability: 9\n", true),
        ("Gpus: []\n", false),
        ("gpu0: a\n", false),
        (": a\n", false),
        ("once upon a time\n", false),
    ] {
        let error = refused(text);
        assert_eq!(matches!(error, ParseError::Document(_)), ours, "{text}: {error}");
    }
}

#[test]
fn the_largest_index_of_a_gpu_is_9999() {
    let text = builtin("rtx-4090-2").expect("built in");
    let with = |index: u32| text.replacen("index: 1,", &format!("index: {index},"), 1);
    assert_eq!(read(&with(9_999)).gpus[1].index.0, 9_999);
    assert!(refused(&with(10_000)).to_string().contains("10000"));
}

#[test]
fn elements_may_be_nested_128_deep() {
    // Two more are the system and its CPU.
    let nested = |depth: usize| {
        let (open, close) = ("<pci busid=\"x\" class=\"0x0604\">", "</pci>");
        let inner = depth - 2;
        format!(
            "<system version=\"1\"><cpu numaid=\"0\" affinity=\"1\">{}{}</cpu></system>",
            open.repeat(inner),
            close.repeat(inner)
        )
    };
    read(&nested(128));
    assert!(refused(&nested(129)).to_string().contains("nested too deeply"));
}

#[test]
fn devices_of_a_matrix_are_where_one_node_is_named() {
    let topology = read(MATRIX);
    assert_eq!(topology.nics[0].numa.map(|numa| numa.0), Some(0));
    assert_eq!(topology.nics[1].numa, None, "nodes 1 and 2 are no one place");
    assert!(topology.links.between(Device::Nic(0), Device::Nic(1)).is_some());
}

#[test]
fn the_only_port_of_a_device_is_its_first_whatever_nccl_counted() {
    let topology = read(&NCCL.replace("port=\"1\" latency", "port=\"3\" latency"));
    let ports: Vec<u32> = topology.nics[0].ports.iter().map(|port| port.port).collect();
    assert_eq!(ports, [1]);
}

/// A machine as NCCL dumps it: a GPU behind two switches, and beside the inner one the DMA function
/// of a NIC that lies elsewhere.
fn with_dma_functions(own: &str) -> String {
    let net = |name: &str| {
        format!("<nic><net name=\"{name}\" dev=\"0\" speed=\"800000\" port=\"1\" gdr=\"1\"/></nic>")
    };
    let (dma, alone) = (net("mlx5_0_dma"), net("mlx5_0"));
    let own = own.replace("NET", &alone);
    format!(
        "<system version=\"1\"><cpu numaid=\"0\" affinity=\"ff\">\
         <pci busid=\"0009:01:00.0\" class=\"0x060400\">\
         <pci busid=\"0009:03:00.0\" class=\"0x080000\">{dma}</pci>\
         <pci busid=\"0009:04:00.0\" class=\"0x060400\">\
         <pci busid=\"0009:06:00.0\" class=\"0x030200\"><gpu dev=\"0\" sm=\"103\"/></pci>\
         </pci></pci>{own}\
         </cpu></system>"
    )
}

#[test]
fn nccls_device_of_a_dma_function_is_its_nic() {
    let alone = read(&with_dma_functions(""));
    assert_eq!(alone.nics.len(), 1);
    let nic = &alone.nics[0];
    assert_eq!((nic.name.as_str(), nic.pci, nic.numa), ("mlx5_0", None, None), "{nic:?}");
    let dma = nic.dma.as_ref().expect("a DMA function");
    assert_eq!(dma.pci.map(|pci| pci.to_string()).as_deref(), Some("0009:03:00.0"));
    assert_eq!(nic.ports[0].rate_gbps, Some(800.0));
    // NCCL_IB_DATA_DIRECT=2 lists both.
    let both =
        read(&with_dma_functions("<pci busid=\"0000:03:00.0\" class=\"0x020700\">NET</pci>"));
    assert_eq!(both.nics.len(), 1);
    let place = both.nics[0].pci.map(|pci| pci.to_string());
    assert_eq!(place.as_deref(), Some("0000:03:00.0"));
    for topology in [&alone, &both] {
        let link = topology.links.between(Device::Gpu(GpuIndex(0)), Device::Nic(0));
        assert_eq!(link, Some(LinkKind::Pxb));
        let again = read(&topology.to_nccl().expect("written"));
        assert_eq!((&again.nics, &again.links), (&topology.nics, &topology.links));
    }
}

#[test]
fn a_matrix_of_blanks_says_what_one_of_tabs_says() {
    assert_eq!(read(&MATRIX.replace('\t', "    ")), read(MATRIX));
}

#[test]
fn the_states_of_ports_are_those_of_verbs() {
    use cuda_cluster::topology::PortState::{Active, ActiveDefer, Armed, Down, Init, Nop};
    let states =
        [Some(Nop), Some(Down), Some(Init), Some(Armed), Some(Active), Some(ActiveDefer), None];
    for (number, state) in states.into_iter().enumerate() {
        let text = HWLOC.replacen(
            "Port1State\" value=\"4\"",
            &format!("Port1State\" value=\"{number}\""),
            1,
        );
        assert_eq!(read(&text).nics[0].ports[0].state, state, "{number}");
    }
}

#[test]
fn pictures_name_the_generation_of_a_link() {
    let text = builtin("rtx-4090-2").expect("built in");
    for (generation, rate) in [(1, "2.5"), (2, "5"), (3, "8"), (4, "16"), (5, "32"), (6, "64")] {
        let svg = read(&text.replace("{gt_per_s: 16,", &format!("{{gt_per_s: {rate},"))).to_svg();
        assert!(svg.contains(&format!("gen{generation} ×8")), "{rate}");
    }
}

/// A GPU with an adapter of a network and one of the baseboard below one switch, as NCCL and hwloc
/// describe them; the two are told apart by their subsystems alone.
#[test]
fn an_adapter_of_the_baseboard_is_no_adapter_of_a_network() {
    let nccl = |bus: &str, card: &str, name: &str| {
        format!(
            "<pci busid='0000:{bus}:00.0' class='0x020700' vendor='0x15b3' device='0x1021' \
             subsystem_vendor='0x15b3' subsystem_device='{card}'><nic><net name='{name}' dev='0' \
             speed='400000' port='1' guid='0x1' gdr='1'/></nic></pci>"
        )
    };
    let nccl = format!(
        "<system version='1'><cpu numaid='0' affinity='ff'><pci busid='0000:01:00.0' \
         class='0x060400'>{}{}<pci busid='0000:04:00.0' class='0x030200'><gpu dev='0' sm='100'/></pci>\
         </pci></cpu></system>",
        nccl("02", "0x0087", "ibp2s0"),
        nccl("03", "0x0023", "mlx5_0"),
    );
    let hwloc = |bus: &str, card: &str, name: &str| {
        format!(
            "<object type='PCIDev' gp_index='1{bus}' pci_busid='0000:{bus}:00.0' \
             pci_type='0207 [15b3:1021] [15b3:{card}] 00'><object type='OSDev' gp_index='2{bus}' \
             name='{name}' osdev_type='3'/></object>"
        )
    };
    let hwloc = format!(
        "<topology version='2.0'><object type='Machine' os_index='0' cpuset='0xff' nodeset='0x1' \
         gp_index='1'><object type='NUMANode' os_index='0' cpuset='0xff' nodeset='0x1' \
         gp_index='2'/><object type='Bridge' gp_index='3' bridge_type='0-1' depth='0' \
         bridge_pci='0000:[00-05]'>{}{}<object type='PCIDev' gp_index='4' pci_busid='0000:04:00.0' \
         pci_type='0302 [10de:2901] [10de:1999] a1'/></object></object></topology>",
        hwloc("02", "0087", "ibp2s0"),
        hwloc("03", "0023", "mlx5_0"),
    );
    for text in [nccl, hwloc] {
        let seen = read(&text);
        let kinds: Vec<_> = seen.nics.iter().map(|nic| (nic.name.as_str(), nic.kind)).collect();
        let expected = [("ibp2s0", NicKind::SwitchManager), ("mlx5_0", NicKind::Physical)];
        assert_eq!(kinds, expected, "{text}");
    }
}
