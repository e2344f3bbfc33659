//! The hwloc XML (version 2) of a made-up machine: packages, NUMA nodes, cores, processing units.
//!
//! *Invariant:* every object's sets cover those of its children, or hwloc drops them.

use std::fmt::Write;

use cuda_cluster::cpuset::{CpuSet, IdSet, NodeSet};
use cuda_cluster::topology::{NumaNode, Topology};

/// Writes the document.
pub fn xml(machine: &Topology) -> String {
    let mut page = Page { text: String::new(), objects: 0 };
    page.text.push_str("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
    page.text.push_str("<!DOCTYPE topology SYSTEM \"hwloc2.dtd\">\n<topology version=\"2.0\">\n");
    let all: Vec<&NumaNode> = machine.numa.iter().collect();
    let around = Sets::of(&all);
    let allowed = format!(
        " allowed_cpuset=\"{}\" allowed_nodeset=\"{}\"",
        bits(&around.cpus),
        bits(&around.nodes)
    );
    page.open("Machine", 0, &around, &allowed);
    let mut packages: Vec<Option<u32>> = all.iter().map(|node| node.package).collect();
    packages.sort_unstable();
    packages.dedup();
    for package in packages {
        let nodes: Vec<&NumaNode> =
            all.iter().copied().filter(|node| node.package == package).collect();
        page.package(machine, package, &nodes);
    }
    page.close();
    page.text.push_str("</topology>\n");
    page.text
}

/// The CPUs and NUMA nodes of an object.
struct Sets {
    cpus: CpuSet,
    nodes: NodeSet,
}

impl Sets {
    fn of(nodes: &[&NumaNode]) -> Self {
        let cpus = nodes.iter().filter_map(|node| node.cpus.as_ref());
        Self {
            cpus: cpus.fold(CpuSet::new(), |all, cpus| all.union(cpus)),
            nodes: nodes.iter().map(|node| node.id.0).collect(),
        }
    }
}

struct Page {
    text: String,
    objects: u32,
}

impl Page {
    fn open(&mut self, kind: &str, os_index: u32, sets: &Sets, more: &str) {
        self.object(kind, os_index, sets, more);
        self.text.push_str(">\n");
    }

    fn leaf(&mut self, kind: &str, os_index: u32, sets: &Sets, more: &str) {
        self.object(kind, os_index, sets, more);
        self.text.push_str("/>\n");
    }

    fn close(&mut self) {
        self.text.push_str("</object>\n");
    }

    fn object(&mut self, kind: &str, os_index: u32, sets: &Sets, more: &str) {
        self.objects += 1;
        let (cpus, nodes, id) = (bits(&sets.cpus), bits(&sets.nodes), self.objects);
        let written = write!(
            self.text,
            "<object type=\"{kind}\" os_index=\"{os_index}\" cpuset=\"{cpus}\" \
             complete_cpuset=\"{cpus}\" nodeset=\"{nodes}\" complete_nodeset=\"{nodes}\" \
             gp_index=\"{id}\"{more}"
        );
        written.expect("writing to a string does not fail");
    }

    /// A package, or what belongs to none.
    fn package(&mut self, machine: &Topology, package: Option<u32>, nodes: &[&NumaNode]) {
        let around = Sets::of(nodes);
        if let Some(id) = package {
            self.open("Package", id, &around, "");
        }
        let with_cpus = |node: &&&NumaNode| node.cpus.as_ref().is_some_and(|cpus| !cpus.is_empty());
        let (hosts, memory): (Vec<&NumaNode>, Vec<&NumaNode>) =
            nodes.iter().partition(|node| with_cpus(node));
        // Memory-only nodes hang off the package, and are so around all of its CPUs.
        for node in &memory {
            self.node(node, &around.cpus);
        }
        let extra: NodeSet = memory.iter().map(|node| node.id.0).collect();
        for node in &hosts {
            let mut sets = Sets::of(&[*node]);
            if hosts.len() > 1 {
                sets.nodes = sets.nodes.union(&extra);
                self.open("Group", node.id.0, &sets, " kind=\"1001\" subkind=\"0\"");
            }
            sets.nodes = sets.nodes.union(&extra);
            self.node(node, &sets.cpus);
            self.cores(machine, &sets);
            if hosts.len() > 1 {
                self.close();
            }
        }
        if package.is_some() {
            self.close();
        }
    }

    fn node(&mut self, node: &NumaNode, cpus: &CpuSet) {
        let sets = Sets { cpus: cpus.clone(), nodes: [node.id.0].into_iter().collect() };
        let memory = format!(" local_memory=\"{}\"", node.memory_bytes.unwrap_or(0));
        self.leaf("NUMANode", node.id.0, &sets, &memory);
    }

    fn cores(&mut self, machine: &Topology, around: &Sets) {
        let mut bare = around.cpus.clone();
        for (at, core) in (0..).zip(&machine.cores) {
            if core.is_subset(&around.cpus) {
                let sets = Sets { cpus: core.clone(), nodes: around.nodes.clone() };
                self.open("Core", at, &sets, "");
                self.units(core, &around.nodes);
                self.close();
                bare = bare.difference(core);
            }
        }
        self.units(&bare, &around.nodes);
    }

    fn units(&mut self, cpus: &CpuSet, nodes: &NodeSet) {
        for cpu in cpus.iter() {
            let sets = Sets { cpus: [cpu].into_iter().collect(), nodes: nodes.clone() };
            self.leaf("PU", cpu, &sets, "");
        }
    }
}

/// hwloc's spelling of a set: `0x000000ff,0x00000000`.
fn bits<Kind>(set: &IdSet<Kind>) -> String {
    let words: Vec<String> = set.to_mask().split(',').map(|word| format!("0x{word}")).collect();
    words.join(",")
}
