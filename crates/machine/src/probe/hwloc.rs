//! Packages, cores and NUMA membership of every CPU, through hwloc.
//!
//! Does not report memory sizes and memory-only NUMA nodes, which this binding of hwloc does not
//! expose.
//!
//! *Invariant:* a CPU belongs to the package and core whose sets contain it, and to every NUMA node
//! in its own node set.

use hwloc2::{Bitmap, ObjectType, Topology, TopologyFlag, TopologyObject};

use cuda_cluster_model::cpuset::{CpuSet, IdSet, LIMIT, NodeSet};

/// The processors of a machine, including those that this process may not use.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Processors {
    /// Packages by number, with their CPUs.
    pub(super) packages: Vec<(u32, CpuSet)>,
    /// Physical cores by their first CPU.
    pub(super) cores: Vec<CpuSet>,
    /// CPUs by number, each with its NUMA nodes.
    pub(super) cpus: Vec<(u32, NodeSet)>,
}

/// Queries hwloc. `None` if it can't load the machine.
pub(super) fn look() -> Option<Processors> {
    let machine = Topology::with_flags(vec![TopologyFlag::IncludeDisallowed])?;
    let packages = objects(&machine, ObjectType::Package);
    let mut packages: Vec<(u32, CpuSet)> =
        packages.into_iter().map(|package| (package.os_index(), cpus_of(package))).collect();
    packages.sort_by_key(|(id, _)| *id);
    let mut cores: Vec<CpuSet> =
        objects(&machine, ObjectType::Core).into_iter().map(cpus_of).collect();
    cores.sort_by_key(CpuSet::first);
    let mut cpus: Vec<(u32, NodeSet)> = objects(&machine, ObjectType::PU)
        .into_iter()
        .filter(|cpu| cpu.os_index() < LIMIT)
        .map(|cpu| (cpu.os_index(), cpu.nodeset().map(members).unwrap_or_default()))
        .collect();
    cpus.sort_by_key(|(id, _)| *id);
    Some(Processors { packages, cores, cpus })
}

/// Objects of a type that has its own depth. NUMA nodes have none, and asking for them panics.
fn objects(machine: &Topology, kind: ObjectType) -> Vec<&TopologyObject> {
    machine.objects_with_type(&kind).unwrap_or_default()
}

fn cpus_of(object: &TopologyObject) -> CpuSet {
    object.cpuset().map(members).unwrap_or_default()
}

/// hwloc's bitmaps may be infinite (all memory of a machine without NUMA nodes).
fn members<Kind>(bitmap: Bitmap) -> IdSet<Kind> {
    bitmap.into_iter().take_while(|id| *id < LIMIT).collect()
}
