//! Determines the CPUs and NUMA nodes near a device where sources differ or give no answer.
//!
//! Only compares answers; reads nothing.
//!
//! *Invariant:* using any source but the first adds a note, unless only one answer is possible (a
//! machine with a single NUMA node).

use std::collections::BTreeMap;

use super::sysfs::Place;
use cuda_cluster_model::cpuset::{CpuSet, NodeSet};
use cuda_cluster_model::ids::NumaId;
use cuda_cluster_model::topology::{Note, NumaNode};

/// What is near a device.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Locality {
    /// The NUMA node, if there is exactly one.
    pub(super) numa: Option<NumaId>,
    /// The NUMA nodes, if there are several.
    pub(super) numa_set: Option<NodeSet>,
    pub(super) cpus: Option<CpuSet>,
}

/// NVML's answers about a GPU's locality.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct NvmlAffinity<'a> {
    pub(super) cpus: Option<&'a CpuSet>,
    pub(super) nodes: Option<&'a NodeSet>,
}

/// The host's NUMA nodes.
pub(super) struct HostNodes<'a> {
    /// Nodes with CPUs.
    nodes: Vec<(NumaId, &'a CpuSet)>,
    /// Nodes with host memory but no CPUs, and their packages.
    bare: Vec<(NumaId, Option<u32>)>,
    /// The CPUs of each package.
    packages: BTreeMap<u32, CpuSet>,
    all: CpuSet,
}

impl<'a> HostNodes<'a> {
    /// Excludes nodes that are GPU memory.
    pub(super) fn new(numa: &'a [NumaNode]) -> Self {
        let with_cpus = |node: &'a NumaNode| {
            let cpus = node.cpus.as_ref().filter(|cpus| !cpus.is_empty())?;
            Some((node.id, cpus))
        };
        let nodes: Vec<(NumaId, &CpuSet)> = numa.iter().filter_map(with_cpus).collect();
        let all = nodes.iter().fold(CpuSet::new(), |all, (_, cpus)| all.union(cpus));
        let bare = numa
            .iter()
            .filter(|node| !node.gpu_memory && node.cpus.as_ref().is_some_and(CpuSet::is_empty));
        let bare = bare.map(|node| (node.id, node.package)).collect();
        let mut packages: BTreeMap<u32, CpuSet> = BTreeMap::new();
        for (package, cpus) in numa.iter().filter_map(|node| node.package.zip(node.cpus.as_ref())) {
            let all = packages.entry(package).or_default();
            *all = all.union(cpus);
        }
        Self { nodes, bare, packages, all }
    }

    /// The CPUs of the package of a node without CPUs.
    fn cpus_beside(&self, id: NumaId) -> Option<&CpuSet> {
        let (_, package) = self.bare.iter().find(|(node, _)| *node == id)?;
        self.packages.get(&(*package)?).filter(|cpus| !cpus.is_empty())
    }

    fn is_bare(&self, id: NumaId) -> bool {
        self.bare.iter().any(|(node, _)| *node == id)
    }

    fn cpus(&self, id: NumaId) -> Option<&'a CpuSet> {
        self.nodes.iter().find(|(node, _)| *node == id).map(|(_, cpus)| *cpus)
    }

    /// The only node, if there is exactly one.
    fn only(&self) -> Option<NumaId> {
        match self.nodes[..] {
            [(id, _)] => Some(id),
            _ => None,
        }
    }

    /// The NUMA node of a PCI device that only the kernel describes.
    pub(super) fn of_device(&self, place: &Place) -> Option<NumaId> {
        let known = |node: &NumaId| self.cpus(*node).is_some() || self.is_bare(*node);
        place.numa.filter(known).or_else(|| self.only())
    }

    /// What is near a GPU: by the kernel, else by NVML, else by the NUMA node.
    pub(super) fn of_gpu(
        &self,
        about: &str,
        place: Option<&Place>,
        nvml: NvmlAffinity<'_>,
        notes: &mut Vec<Note>,
    ) -> Locality {
        let mut note = |text: String| notes.push(Note::new(about, text));
        let numa = self.gpu_node(place, nvml, &mut note);
        let cpus = self.gpu_cpus(numa, place, nvml, &mut note);
        if let (Some(node), Some(cpus)) = (numa, &cpus) {
            let node_cpus = self.cpus(node).unwrap_or(cpus);
            if cpus.intersection(node_cpus).is_empty() {
                note(format!("its CPUs {cpus} are none of its NUMA node {node} ({node_cpus})"));
            }
        }
        let around: NodeSet = cpus
            .iter()
            .flat_map(|cpus| self.nodes.iter().filter(|n| !n.1.intersection(cpus).is_empty()))
            .map(|(id, _)| id.0)
            .collect();
        let numa = numa.or_else(|| around.first().filter(|_| around.len() == 1).map(NumaId));
        let numa_set = (numa.is_none() && around.len() > 1).then_some(around);
        Locality { numa, numa_set, cpus }
    }

    fn gpu_node(
        &self,
        place: Option<&Place>,
        nvml: NvmlAffinity<'_>,
        note: &mut impl FnMut(String),
    ) -> Option<NumaId> {
        if let Some(node) = place.and_then(|place| place.numa) {
            // A node without CPUs still has memory.
            if self.cpus(node).is_some() || self.is_bare(node) {
                return Some(node);
            }
            note(format!("sysfs puts it on NUMA node {node}, which has no CPUs"));
        }
        let told: Vec<NumaId> =
            nvml.nodes.iter().flat_map(|nodes| nodes.iter()).map(NumaId).collect();
        // Without sysfs, hwloc always reports a single node.
        let unseen = place.is_none() && self.nodes.len() <= 1;
        match told[..] {
            [node] if self.only() == Some(node) => Some(node),
            [node] if unseen || (self.only().is_none() && self.cpus(node).is_some()) => {
                note(format!("sysfs does not tell its NUMA node; NVML says {node}"));
                Some(node)
            }
            _ => self.only(),
        }
    }

    fn gpu_cpus(
        &self,
        numa: Option<NumaId>,
        place: Option<&Place>,
        nvml: NvmlAffinity<'_>,
        note: &mut impl FnMut(String),
    ) -> Option<CpuSet> {
        let here = |cpus: &CpuSet| {
            // Without a known node there is nothing to contradict.
            let here =
                if self.all.is_empty() { cpus.clone() } else { cpus.intersection(&self.all) };
            Some(here).filter(|here| !here.is_empty())
        };
        // A list of all CPUs says nothing about locality, unless they are all on one node.
        let tells = |cpus: &CpuSet| self.only().is_some() || *cpus != self.all;
        let kernel = place.and_then(|place| place.cpus.as_ref()).and_then(here);
        if let Some(cpus) = kernel.as_ref().filter(|cpus| tells(cpus)) {
            return Some(cpus.clone());
        }
        let silent = match (&kernel, place) {
            (Some(_), _) => "sysfs names all CPUs as near it",
            (None, Some(_)) => "sysfs names no CPUs near it",
            (None, None) => "sysfs does not have it",
        };
        if let Some(cpus) = nvml.cpus.and_then(here).filter(|cpus| tells(cpus)) {
            note(format!("{silent}; its CPUs {cpus} are those that NVML names"));
            return Some(cpus);
        }
        if let Some((node, cpus)) = numa.and_then(|node| Some((node, self.cpus(node)?))) {
            note(format!("{silent}, and NVML none either; its CPUs are those of NUMA node {node}"));
            return Some(cpus.clone());
        }
        if let Some((node, cpus)) = numa.and_then(|node| Some((node, self.cpus_beside(node)?))) {
            note(format!(
                "NUMA node {node} has no CPUs; its CPUs are those of that node's package"
            ));
            return Some(cpus.clone());
        }
        let all = Some(&self.all).filter(|all| !all.is_empty())?;
        note(format!("{silent}, and NVML tells no more; all CPUs ({all}) count as near"));
        Some(all.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(id: u32, cpus: &str) -> NumaNode {
        NumaNode {
            id: NumaId(id),
            package: None,
            cpus: Some(cpus.parse().unwrap()),
            memory_bytes: None,
            gpu_memory: false,
        }
    }

    fn place(numa: Option<u32>, cpus: &str) -> Place {
        Place { numa: numa.map(NumaId), cpus: Some(cpus.parse().unwrap()), ..Place::default() }
    }

    /// The locality in short, and the notes.
    fn of_gpu(
        numa: &[NumaNode],
        place: Option<Place>,
        nvml: (Option<&str>, Option<&str>),
    ) -> (Option<u32>, String, Vec<String>) {
        let cpus: Option<CpuSet> = nvml.0.map(|text| text.parse().unwrap());
        let nodes: Option<NodeSet> = nvml.1.map(|text| text.parse().unwrap());
        let nvml = NvmlAffinity { cpus: cpus.as_ref(), nodes: nodes.as_ref() };
        let mut notes = Vec::new();
        let near = HostNodes::new(numa).of_gpu("GPU0", place.as_ref(), nvml, &mut notes);
        let cpus = near.cpus.unwrap_or_default().to_string();
        (near.numa.map(|n| n.0), cpus, notes.into_iter().map(|note| note.text).collect())
    }

    fn two_nodes() -> [NumaNode; 3] {
        let of_gpu = NumaNode { gpu_memory: true, ..node(255, "") };
        [node(0, "0-3"), node(8, "4-7"), of_gpu]
    }

    #[test]
    fn the_kernels_word_is_taken_without_a_note() {
        let near = of_gpu(&two_nodes(), Some(place(Some(8), "4-7")), (Some("0-3"), Some("0")));
        assert_eq!(near, (Some(8), "4-7".to_owned(), vec![]));
    }

    #[test]
    fn a_gpu_without_local_cpus_takes_nvmls_and_then_its_numa_nodes() {
        let near = of_gpu(&two_nodes(), Some(place(Some(8), "")), (Some("4-5"), None));
        assert_eq!(near.1, "4-5");
        assert_eq!(near.2, ["sysfs names no CPUs near it; its CPUs 4-5 are those that NVML names"]);
        let near = of_gpu(&two_nodes(), Some(place(Some(8), "")), (Some(""), None));
        assert_eq!(near.1, "4-7");
        assert_eq!(
            near.2,
            [
                "sysfs names no CPUs near it, and NVML none either; its CPUs are those of NUMA node 8"
            ]
        );
    }

    #[test]
    fn all_cpus_are_no_locality_on_a_machine_with_several_nodes() {
        let near = of_gpu(&two_nodes(), Some(place(None, "0-7")), (Some("4-7"), Some("8")));
        assert_eq!((near.0, near.1.as_str()), (Some(8), "4-7"));
        assert_eq!(near.2.len(), 2);
        let near = of_gpu(&two_nodes(), Some(place(None, "0-7")), (None, None));
        assert_eq!((near.0, near.1.as_str()), (None, "0-7"));
        assert_eq!(
            near.2,
            [
                "sysfs names all CPUs as near it, and NVML tells no more; all CPUs (0-7) count as near"
            ]
        );
    }

    #[test]
    fn a_single_node_needs_no_telling() {
        let near = of_gpu(&[node(0, "0-7")], Some(place(None, "0-7")), (None, None));
        assert_eq!(near, (Some(0), "0-7".to_owned(), vec![]));
    }

    #[test]
    fn a_node_with_host_memory_alone_is_a_gpus_own_and_its_package_has_the_cpus() {
        let of = |package, node: NumaNode| NumaNode { package: Some(package), ..node };
        let nodes = [
            of(0, node(0, "0-3")),
            of(1, node(1, "4-5")),
            of(1, node(2, "6-7")),
            of(1, node(3, "")),
        ];
        let near = of_gpu(&nodes, Some(place(Some(3), "")), (None, None));
        assert_eq!((near.0, near.1.as_str()), (Some(3), "4-7"));
        assert_eq!(near.2, ["NUMA node 3 has no CPUs; its CPUs are those of that node's package"]);
        let device = Place { numa: Some(NumaId(3)), ..Place::default() };
        assert_eq!(HostNodes::new(&nodes).of_device(&device), Some(NumaId(3)));
    }

    #[test]
    fn without_sysfs_nvmls_word_counts() {
        let one = [node(0, "0-7")];
        let near = of_gpu(&one, None, (Some("4-7"), Some("1")));
        assert_eq!((near.0, near.1.as_str()), (Some(1), "4-7"));
        let near = of_gpu(&[], None, (Some("4-7"), Some("1")));
        assert_eq!((near.0, near.1.as_str()), (Some(1), "4-7"));
    }

    #[test]
    fn a_gpus_memory_is_no_locality() {
        let near = of_gpu(&two_nodes(), Some(place(Some(255), "4-7")), (None, None));
        assert_eq!((near.0, near.1.as_str()), (Some(8), "4-7"));
        assert_eq!(near.2, ["sysfs puts it on NUMA node 255, which has no CPUs"]);
    }

    #[test]
    fn sources_that_contradict_each_other_are_noted() {
        let near = of_gpu(&two_nodes(), Some(place(Some(0), "4-7")), (None, None));
        assert_eq!(near.2, ["its CPUs 4-7 are none of its NUMA node 0 (0-3)"]);
    }
}
