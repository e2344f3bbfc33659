//! Pictures, graphs and matrices of machines, as files that a person has looked at.
//!
//! A changed picture has a reason, and is looked at again: `tests/topo/snapshots/*.svg.snap` is an SVG
//! after the lines of the header.

use crate::compact::{machine, planned, spec};

/// What every machine of the list shows that the others do not: PCIe switches and NVSwitches, arcs
/// of single NVLinks, MIG instances, chip-to-chip links, NICs without a place, one GPU alone.
const SHOWN: [&str; 6] =
    ["dgx-h100", "dgx-1-v100", "dgx-a100-mig", "gb200-nvl72-tray", "ibm-ac922", "gh200"];

#[test]
fn machines_are_drawn_as_reviewed() {
    for name in SHOWN {
        insta::assert_snapshot!(format!("{name}.svg"), machine(name).to_svg());
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
        insta::assert_snapshot!(format!("{name}-workers.svg"), topology.to_svg_with(&occupants));
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
