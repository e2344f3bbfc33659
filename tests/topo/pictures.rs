//! Pictures, graphs and matrices of machines, as files that a person has looked at.
//!
//! A changed picture has a reason, and is looked at again: `tests/topo/snapshots/*.svg.snap` is an SVG
//! after the lines of the header.

use cuda_cluster::predict::link_rates;

use crate::compact::{machine, planned, spec};

/// What every machine of the list shows that the others do not: PCIe switches and NVSwitches, arcs
/// of single NVLinks, MIG instances, chip-to-chip links, NICs without a place, one GPU alone.
const SHOWN: [&str; 6] =
    ["dgx-h100", "dgx-1-v100", "dgx-a100-mig", "gb200-nvl72-tray", "ibm-ac922", "gh200"];

#[test]
fn machines_are_drawn_as_reviewed() {
    for name in SHOWN {
        let topology = machine(name);
        let svg = topology.to_svg_with(&[], &link_rates(&topology));
        insta::assert_snapshot!(format!("{name}.svg"), svg);
    }
}

#[test]
fn workers_are_drawn_where_they_are() {
    for (name, asked) in [
        ("dgx-1-v100", "ucx: {infiniband: true, net_devices: pin}\nworkers_per_gpu: 2\n"),
        ("rtx-4090-2", "cpu_workers: 3\n"),
        ("dgx-a100-mig", ""),
    ] {
        let topology = machine(name);
        let plan = planned(&topology, &spec(asked)).expect("a plan");
        let occupants = plan.occupants();
        let svg = topology.to_svg_with(&occupants, &link_rates(&topology));
        insta::assert_snapshot!(format!("{name}-workers.svg"), svg);
        insta::assert_snapshot!(format!("{name}-workers.tree"), topology.to_tree_with(&occupants));
    }
}

#[test]
fn graphs_and_matrices_are_as_reviewed() {
    for name in ["dgx-1-v100", "gb200-nvl72-tray", "gb300-nvl72-tray", "l40s-8"] {
        insta::assert_snapshot!(format!("{name}.dot"), machine(name).to_dot());
    }
    for name in SHOWN {
        insta::assert_snapshot!(format!("{name}.matrix"), machine(name).to_matrix());
    }
}

/// The widths of what a picture's `title` names so.
fn widths(svg: &str, named: &str) -> Vec<f64> {
    let document = roxmltree::Document::parse(svg).expect("it is well-formed");
    let titles = document.descendants().filter(|node| node.has_tag_name("title"));
    let named = titles.filter(|title| title.text().is_some_and(|text| text.ends_with(named)));
    let width = |title: roxmltree::Node<'_, '_>| {
        title.parent().and_then(|line| line.attribute("stroke-width")?.parse().ok())
    };
    named.filter_map(width).collect()
}

#[test]
fn a_link_is_drawn_as_wide_as_it_is_fast() {
    let drawn = |name: &str| {
        let topology = machine(name);
        topology.to_svg_with(&[], &link_rates(&topology))
    };
    // Single and double NVLinks, and PCIe 3.
    let svg = drawn("dgx-1-v100");
    let (one, two) = (widths(&svg, "NV1, 24 GB/s"), widths(&svg, "NV2, 47 GB/s"));
    assert_eq!((one.len(), two.len()), (8, 8), "{svg}");
    assert!(one.iter().all(|one| two.iter().all(|two| one < two)), "{one:?} {two:?}");
    let pcie = widths(&svg, "13 GB/s");
    assert!(!pcie.is_empty() && pcie.iter().all(|pcie| *pcie < one[0]), "{pcie:?} {one:?}");
    // All NVLinks of a GPU are one line to the NVSwitches.
    let svg = drawn("dgx-h100");
    assert_eq!(widths(&svg, "382 GB/s").len(), 8, "{svg}");
    assert!(svg.contains(">Widths: what one copy should get of the link alone"), "{svg}");
    // Nothing tells of a link between a processor and its host bridge.
    assert!(!widths(&svg, "not predicted").is_empty() && svg.contains("stroke-dasharray"), "{svg}");
    // From a matrix nothing is known but the kinds of links.
    let matrix = cuda_cluster::topology::parse(&machine("l40s-8").to_matrix()).expect("it is read");
    assert!(!matrix.to_svg_with(&[], &link_rates(&matrix)).contains("Widths"));
}
