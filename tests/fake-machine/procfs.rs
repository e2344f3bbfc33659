//! The procfs of a made-up machine: its name, what is allowed, what the NVIDIA driver shows.

use std::fs;
use std::io;
use std::path::Path;

use cuda_cluster::cpuset::NodeSet;
use cuda_cluster::topology::{Allowed, Topology};

/// Writes the tree.
pub fn write(machine: &Topology, root: &Path) -> io::Result<()> {
    fs::create_dir_all(root.join("self"))?;
    fs::create_dir_all(root.join("sys/kernel"))?;
    if let Some(name) = &machine.name {
        fs::write(root.join("sys/kernel/hostname"), format!("{name}\n"))?;
    }
    let Allowed { cpus, mems } = machine.allowed.clone().unwrap_or_else(|| everything(machine));
    let status =
        format!("Name:\tcuda-cluster\nCpus_allowed_list:\t{cpus}\nMems_allowed_list:\t{mems}\n");
    fs::write(root.join("self/status"), status)?;
    for gpu in &machine.gpus {
        let Some(pci) = gpu.pci else { continue };
        let folder = root.join(format!("driver/nvidia/gpus/{pci}"));
        fs::create_dir_all(&folder)?;
        // What the drivers of POWER9 had, before NVML told it.
        let old = gpu.compute_capability.is_some_and(|capability| capability.major < 9);
        if let Some(node) = gpu.memory_numa.filter(|_| old) {
            let text = format!("Node:         {node}\nNUMA Status:  online\n");
            fs::write(folder.join("numa_status"), text)?;
        }
    }
    Ok(())
}

/// All CPUs and all NUMA nodes.
pub fn everything(machine: &Topology) -> Allowed {
    let mems: NodeSet = machine.numa.iter().map(|node| node.id.0).collect();
    Allowed { cpus: machine.cpus().unwrap_or_default(), mems }
}
