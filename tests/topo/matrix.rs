//! The matrix of `nvidia-smi topo -m` in the shapes in which people paste it, and damaged ones.

use cuda_cluster::ids::{GpuIndex, NumaId};
use cuda_cluster::topology::{Device, LinkKind, ParseError, SmiError, Topology, parse};

/// As `nvidia-smi` prints it: tabs, an underlined header, an extra tab before the last column.
const PRINTED: &str =
    "\t\u{1b}[4mGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\u{1b}[0m
GPU0\t X \tNV4\tPIX\tSYS\t0-31,64-95\t0\t\tN/A
GPU1\tNV4\t X \tSYS\tPXB\t32-63,96-127\t1\t\tN/A
NIC0\tPIX\tSYS\t X \tSYS\t\t\t\t
NIC1\tSYS\tPXB\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = the interconnect between NUMA nodes
  PIX  = at most a single PCIe bridge
  NV#  = a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_2
  NIC1: mlx5_0
";

fn read(text: &str) -> Topology {
    parse(text).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

fn refusal(text: &str) -> SmiError {
    match parse(text) {
        Err(ParseError::Smi(error)) => error,
        other => panic!("{other:?}\n{text}"),
    }
}

#[test]
fn the_printed_form_says_links_affinities_and_names() {
    let topology = read(PRINTED);
    let link = |a: Device, b: Device| topology.links.between(a, b);
    let gpu = |at| Device::Gpu(GpuIndex(at));
    assert_eq!(link(gpu(0), gpu(1)), Some(LinkKind::Nv(4)));
    assert_eq!(link(gpu(1), Device::Nic(1)), Some(LinkKind::Pxb));
    assert_eq!(topology.gpus[1].cpus, "32-63,96-127".parse().ok());
    assert_eq!(topology.gpus[1].numa, Some(NumaId(1)));
    assert_eq!(topology.gpus[1].memory_numa, None);
    assert_eq!(topology.nics[0].name, "mlx5_2");
    assert_eq!(topology.notes, []);
}

#[test]
fn copying_does_not_change_what_it_says() {
    let expected = read(PRINTED);
    let bare = PRINTED.replace("\u{1b}[4m", "").replace("\u{1b}[0m", "");
    let commented =
        |mark: &str| -> String { bare.lines().map(|line| format!("{mark}{line}\n")).collect() };
    let shapes = [
        PRINTED.replace('\u{1b}', "^["),
        PRINTED.replace('\u{1b}', ""),
        bare.replace('\n', "\r\n"),
        bare.replace('\t', "        "),
        bare.replace("\t\t\t\t\n", "\n"),
        bare.trim_start().to_owned(),
        bare.lines().map(|line| format!("   {line}   \n")).collect(),
        commented("# "),
        commented(" * "),
        commented("// "),
        format!("$ nvidia-smi topo -m\n{bare}\nafter it\n"),
        bare.replace("NIC0: mlx5_2\n  NIC1: mlx5_0", "NIC0: mlx5_2    NIC1: mlx5_0"),
        bare.replace("0-31,64-95", "0-31, 64-95"),
        bare.replace("NUMA Affinity", "NUMA"),
        format!("\u{feff}{bare}"),
    ];
    for shape in shapes {
        assert_eq!(read(&shape), expected, "{shape}");
    }
}

#[test]
fn a_table_of_markdown_is_a_matrix() {
    let expected = read(
        "\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n\
         GPU0\t X \tNV6\tPHB\t0-71\t0\t\t4\nGPU1\tNV6\t X \tSYS\t72-143\t1\t\t12\n\
         NIC0\tPHB\tSYS\t X \n",
    );
    assert_eq!(expected.gpus[1].memory_numa, Some(NumaId(12)));
    for corner in ["     ", " GPU "] {
        for border in ["|-----|------|", "|:----|-----:|", "| --- | :---: |"] {
            let table = format!(
                "The links:\n\n\
                 |{corner}| GPU0 | GPU1 | NIC0 | CPU Affinity | NUMA Affinity | GPU NUMA ID |\n\
                 {border}\n\
                 | GPU0 | X   | NV6 | PHB | 0-71   | 0 | 4  |\n\
                 | GPU1 | NV6 | X   | SYS | 72-143 | 1 | 12 |\n\
                 | NIC0 | PHB | SYS | X   |        |   |    |\n\n\
                 The end.\n"
            );
            assert_eq!(read(&table), expected, "{table}");
        }
    }
}

#[test]
fn empty_cells_stay_empty() {
    let cases = [
        // (text after the links, CPUs, NUMA nodes, GPU NUMA ID)
        ("\t\t1\t\tN/A", None, Some("1"), None),
        ("\t0-15\t\t\tN/A", Some("0-15"), None, None),
        ("\t\t\t\tN/A", None, None, None),
        ("\t0-15\t0-7\t\t4", Some("0-15"), Some("0-7"), Some(4)),
        ("\t0-71\t0,3-9,11-17\t\t2", Some("0-71"), Some("0,3-9,11-17"), Some(2)),
        ("\tN/A\tN/A\t\tN/A", None, None, None),
        ("", None, None, None),
        ("   0-15          1              N/A", Some("0-15"), Some("1"), None),
        ("                 1              N/A", None, Some("1"), None),
        ("   0-15                         N/A", Some("0-15"), None, None),
    ];
    for (values, cpus, nodes, memory) in cases {
        let header = "        GPU0   CPU Affinity  NUMA Affinity  GPU NUMA ID";
        let topology = read(&format!("{header}\nGPU0     X  {values}\n"));
        let gpu = &topology.gpus[0];
        assert_eq!(gpu.cpus.as_ref().map(|set| set.to_string()).as_deref(), cpus, "{values:?}");
        let numa = gpu.numa_set.as_ref().map(|set| set.to_string());
        assert_eq!(numa.or(gpu.numa.map(|id| id.to_string())).as_deref(), nodes, "{values:?}");
        assert_eq!(gpu.memory_numa.map(|id| id.0), memory, "{values:?}");
    }
}

#[test]
fn old_words_and_old_names_are_understood() {
    let topology = read(
        "\tGPU0\tGPU1\tmlx5_1\tib0\tCPU Affinity\nGPU0\t X \tSOC\tPHB\tSOC\t0-7\n\
                         GPU1\tSOC\t X \tSOC\tPIX\t8-15\n",
    );
    assert_eq!(topology.nics.iter().map(|nic| &nic.name).collect::<Vec<_>>(), ["mlx5_1", "ib0"]);
    let gpu = Device::Gpu(GpuIndex(0));
    assert_eq!(topology.links.between(gpu, Device::Nic(1)), Some(LinkKind::Sys));
    // The rows of the NICs are missing, so the link between them is unknown.
    assert_eq!(topology.links.between(Device::Nic(0), Device::Nic(1)), None);
    assert_eq!(topology.notes.len(), 1);
}

#[test]
fn what_nvidia_smi_cut_off_or_hid_is_noted() {
    let cut = PRINTED.replace("0-31,64-95", "0,2,4,6,8,10");
    assert_eq!(read(&cut).notes[0].about, "GPU0");
    let without_nvlink = PRINTED.replace("NV#", "").replace("NV4", "SYS");
    assert_eq!(read(&without_nvlink).notes[0].about, "links");
    let without_legend = PRINTED.split("NIC Legend").next().expect("text");
    assert_eq!(read(without_legend).notes[0].about, "nics");
}

#[test]
fn blank_lines_between_rows_say_nothing() {
    let (rows, legend) = PRINTED.split_once("\n\nLegend").expect("a legend");
    for blank in ["\n\n", "\n \t \n\n", "\r\n\r\n"] {
        let spread = format!("{}\n\nLegend{legend}", rows.replace('\n', blank));
        assert_eq!(read(&spread), read(PRINTED), "{spread}");
    }
}

#[test]
fn cells_that_ran_together_are_parted_where_that_is_certain() {
    let whole = read(PRINTED);
    for (glued, words) in [
        (PRINTED.replace("PIX\tSYS\t0-31", "PIXSYS\t0-31"), "1 word was parted"),
        (PRINTED.replace("NIC0\tNIC1\tCPU", "NIC0NIC1\tCPU"), "1 word was parted"),
        (PRINTED.replace("GPU1\tNV4\t X \tSYS", "GPU1NV4XSYS"), "1 word was parted"),
        (PRINTED.replace("SYS\tPXB\t32", "SYSPXB32"), "1 word was parted"),
        (
            PRINTED.replace("GPU0\tGPU1\tN", "GPU0GPU1N").replace("PIX\tSYS", "PIXSYS"),
            "3 words were parted",
        ),
    ] {
        let mut seen = read(&glued);
        let note = seen.notes.pop().expect("a note");
        assert!(note.text.starts_with(words), "{glued}{note}");
        assert_eq!(seen, whole, "{glued}");
    }
}

#[test]
fn a_column_that_later_drivers_add_is_left_out() {
    let later = |heading: &str, value: &str| {
        let text = PRINTED.replace("GPU NUMA ID", &format!("GPU NUMA ID\t{heading}"));
        read(&text.replace("\tN/A\n", &format!("\tN/A\t{value}\n")))
    };
    for (heading, value) in [("GPU Fabric ID", "7"), ("Socket", "none"), ("Mem Affinity", "0-1")] {
        let mut seen = later(heading, value);
        let note = seen.notes.pop().expect("a note").to_string();
        assert_eq!(note, format!("columns: {heading:?} is not known here; it is left out"));
        assert_eq!(seen, read(PRINTED));
    }
    // With blanks for tabs a row is full, so that its values are in order.
    let text = PRINTED.replace("GPU NUMA ID", "GPU NUMA ID\tMem Affinity");
    let text = text.replace("\tN/A\n", "\tN/A\t3\n").replace('\t', "   ");
    assert_eq!(read(&text).gpus, read(PRINTED).gpus);
}

#[test]
fn damage_is_refused_at_its_place() {
    let cases = [
        (
            PRINTED.replace("PIX\tSYS\t0-31", "PIXSYZ\t0-31"),
            "line 2, column 14: GPU0 to NIC0: \"PIXSYZ\"",
        ),
        (
            PRINTED.replace("PIX\tSYS\t0-31", "PIXSYSSYS\t0-31"),
            "line 2, column 20: \"SYS\" has no column",
        ),
        (
            PRINTED.replace("\tPIX\tSYS\t0-31", "\tPIX\t0-31"),
            "line 2, column 18: GPU0 to NIC1: \"0-31,64-95\"",
        ),
        (
            // Whose digit is the 0?
            PRINTED.replace("SYS\tPXB\t32-63", "SYS\tNV20-63"),
            "line 3, column 18: GPU1 to NIC1: \"NV20-63,96-127\"",
        ),
        (
            PRINTED.replace("GPU1\tNV4", "GPU2\tNV4"),
            "line 3, column 1: GPU2 has a row but no column",
        ),
        (
            PRINTED.replace("GPU1\tNV4\t X ", "GPU1\t X \tNV4"),
            "line 3, column 7: GPU1 to GPU0 cannot be X",
        ),
        (
            PRINTED.replace("GPU1\tNV4", "GPU1\tNV2"),
            "line 3, column 6: GPU1 to GPU0 is NV2 here and NV4",
        ),
        (
            PRINTED.replace("64-95", "95-64"),
            "line 2, column 22: CPU affinity: range \"95-64\" runs backwards",
        ),
        (PRINTED.replace("\t0\t\tN/A", "\tnone\t\tN/A"), "NUMA affinity: \"none\" is neither"),
        (PRINTED.replace("NIC0\tNIC1\tCPU", "NIC0\tNIC0\tCPU"), "NIC0 stands here a second time"),
        (PRINTED.replace("CPU Affinity", "Node Affinity"), "\"Affinity\" is not a column"),
        (PRINTED.replace("NV4", "OK"), "line 2, column 10: GPU0 to GPU1: \"OK\" is not a link"),
        (
            PRINTED.lines().take(2).collect::<Vec<_>>().join("\n"),
            "line 2, column 1: the matrix ends here, and GPU1",
        ),
        (
            PRINTED.lines().skip(1).collect::<Vec<_>>().join("\n"),
            "line 1, column 1: a row of the matrix without",
        ),
        (
            PRINTED.replace("GPU1\tNV4\t X \tSYS\tPXB\t32-63,96-127\t1\t\tN/A", "GPU1\tNV4\t X "),
            "line 3, column 12: the row of GPU1 ends after 2 of 4",
        ),
        (
            PRINTED.replace("\t32-63,96-127\t1\t\tN/A", "  32-63,96-1271  N/A"),
            "line 3, column 23: GPU1 has no NUMA affinity beside its CPUs \"32-63,96-1271\"",
        ),
    ];
    for (text, words) in cases {
        let said = refusal(&text).to_string();
        assert!(said.contains(words), "{text}\nsays {said}\nnot  {words}");
    }
    let p2p = refusal(&PRINTED.replace("NV4", "CNS"));
    assert!(p2p.hint().is_some_and(|hint| hint.contains("topo -p2p")));
}

#[test]
fn a_name_full_of_brackets_survives_every_form() {
    let name = format!("mlx5_{}", "{".repeat(80));
    let matrix =
        format!("\tGPU0\tNIC0\nGPU0\t X \tPIX\nNIC0\tPIX\t X \n\nNIC Legend:\n\n  NIC0: {name}\n");
    let machine = parse(&matrix).expect("a matrix");
    assert_eq!(machine.nics[0].name, name);
    assert_eq!(parse(&machine.to_yaml()).as_ref(), Ok(&machine));
    let json = serde_json::to_string(&machine).expect("JSON");
    assert_eq!(parse(&json), Ok(machine));
}

#[test]
fn brackets_that_nest_without_end_are_refused_before_they_are_parsed() {
    for opener in ["[", "{", "[{", "- [", "&a[", "!t[", "? [", "a: [\n ", "[a{a"] {
        let text = format!("version: 1\ngpus: {}", opener.repeat(1_000_000));
        let refusal = parse(&text).expect_err(opener).to_string();
        assert!(refusal.contains(": not well-formed YAML: "), "{opener}: {refusal}");
    }
}
