//! The machine as a graph for Graphviz.
//!
//! Leaves the layout to `dot`; for a picture to look at there is the SVG.
//!
//! *Invariant:* the text is a valid graph whatever the names in the topology are.

use super::hierarchy::{Part, What, packages};
use crate::topology::{Device, LinkKind, Topology};

const HEAD: &str = r##"graph topology {
  graph [rankdir=TB, fontname="sans-serif", nodesep=0.2, ranksep=0.6];
  node [shape=box, style="rounded,filled", fillcolor="#ffffff", fontname="sans-serif", fontsize=10];
  edge [color="#8a94a6"];
"##;

impl Topology {
    /// The machine as a Graphviz graph: PCI tree, NVLinks, NUMA nodes as clusters.
    pub fn to_dot(&self) -> String {
        let mut text = HEAD.to_owned();
        let mut drawing = Drawing { text: &mut text, parts: 0 };
        let roots: Vec<String> =
            packages(self).iter().flat_map(|package| drawing.package(package)).collect();
        for pair in roots.windows(2) {
            text.push_str(&format!(
                "  {} -- {} [label=\"SYS\", style=dashed];\n",
                pair[0], pair[1]
            ));
        }
        for (a, b, kind) in self.links.iter() {
            if let (Device::Gpu(_), Device::Gpu(_), LinkKind::Nv(links)) = (a, b, kind) {
                let width = 1.0 + f64::from(links.min(18)) / 4.0;
                text.push_str(&format!(
                    "  {a} -- {b} [label=\"{kind}\", color=\"#5a9a1e\", penwidth={width}, \
                     constraint=false];\n"
                ));
            }
        }
        text.push_str("}\n");
        text
    }
}

/// A graph being written.
struct Drawing<'a> {
    text: &'a mut String,
    /// Number of parts without a name, which get a number instead.
    parts: usize,
}

impl Drawing<'_> {
    /// Writes a package's NUMA nodes and returns their names.
    fn package(&mut self, package: &Part<'_>) -> Vec<String> {
        package.children.iter().map(|numa| self.numa(numa)).collect()
    }

    fn numa(&mut self, part: &Part<'_>) -> String {
        let (label, cpus) = match part.what {
            What::Numa(Some(id), node) => {
                let cpus = node.and_then(|node| node.cpus.as_ref()).map(|cpus| cpus.to_string());
                (format!("NUMA node {id}"), cpus)
            }
            _ => ("NUMA node unknown".to_owned(), None),
        };
        let name = self.name();
        self.text.push_str(&format!("  subgraph cluster_{name} {{\n    style=\"rounded\"; "));
        self.text.push_str(&format!("color=\"#c3cad6\"; label={};\n", quoted(&label)));
        let cpus = cpus.map_or(label, |cpus| format!("CPUs {cpus}"));
        self.node(&name, &cpus, "#ffe9c7");
        for host in &part.children {
            for child in &host.children {
                let below = self.device_or_switch(child);
                self.text.push_str(&format!("    {name} -- {below};\n"));
            }
        }
        self.text.push_str("  }\n");
        name
    }

    fn device_or_switch(&mut self, part: &Part<'_>) -> String {
        match part.what {
            What::Gpu(gpu) => {
                let name = format!("GPU{}", gpu.index);
                let lines = [Some(name.clone()), gpu.name.clone(), gpu.pci.map(|p| p.to_string())];
                self.node(
                    &name,
                    &lines.into_iter().flatten().collect::<Vec<_>>().join("\n"),
                    "#dff0c8",
                );
                name
            }
            What::Nic(at, nic) => {
                let name = format!("NIC{at}");
                let lines = [Some(nic.name.clone()), nic.pci.map(|pci| pci.to_string())];
                self.node(
                    &name,
                    &lines.into_iter().flatten().collect::<Vec<_>>().join("\n"),
                    "#d5e6fb",
                );
                name
            }
            What::Dma(at, nic) => {
                let name = self.name();
                let place = nic.dma.as_ref().and_then(|dma| dma.pci).map(|pci| pci.to_string());
                let label = format!("DMA of {}\n{}", nic.name, place.unwrap_or_default());
                self.node(&name, label.trim_end(), "#d5e6fb");
                let edge = "[style=dotted, constraint=false]";
                self.text.push_str(&format!("    {name} -- NIC{at} {edge};\n"));
                name
            }
            _ => {
                let name = self.name();
                self.node(&name, "PCIe switch", "#e7e1f7");
                for child in &part.children {
                    let below = self.device_or_switch(child);
                    self.text.push_str(&format!("    {name} -- {below};\n"));
                }
                name
            }
        }
    }

    fn name(&mut self) -> String {
        self.parts += 1;
        format!("part{}", self.parts)
    }

    fn node(&mut self, name: &str, label: &str, colour: &str) {
        let label = quoted(label);
        self.text.push_str(&format!("    {name} [label={label}, fillcolor=\"{colour}\"];\n"));
    }
}

/// A quoted string of the DOT language.
fn quoted(text: &str) -> String {
    let text = text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    format!("\"{}\"", text.replace('\0', ""))
}
