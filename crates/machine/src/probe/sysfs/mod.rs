//! Reads sysfs and procfs: PCI functions, RDMA devices, NUMA nodes, limits.
//!
//! Only reads files. Does not use NVML or hwloc.
//!
//! *Invariant:* every path read is below the given roots, including the targets of symbolic links.

mod dma;
mod numa;
mod pci;
mod rdma;
mod vpd;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

pub(super) use numa::Node;
pub(super) use pci::{PciTree, Place, Role};

use super::own;
use cuda_cluster_model::ids::{NumaId, PciAddress};
use cuda_cluster_model::topology::{Allowed, Nic, Note};

/// The kernel's answers.
#[derive(Debug)]
pub(super) struct Host {
    /// Host name.
    pub(super) name: Option<String>,
    /// The CPUs and memory nodes that this process may use.
    pub(super) allowed: Option<Allowed>,
    /// NUMA nodes by number.
    pub(super) nodes: Vec<Node>,
    /// PCI functions.
    pub(super) pci: PciTree,
    /// RDMA devices in natural order of their names, without NUMA node and ancestry, also of their
    /// DMA functions.
    pub(super) nics: Vec<Nic>,
    /// NUMA nodes that are GPU memory, where the driver's procfs reports them (POWER9).
    pub(super) gpu_memory: BTreeMap<PciAddress, NumaId>,
    /// GPUs that the NVIDIA kernel module lists.
    pub(super) driver_gpus: BTreeSet<PciAddress>,
    /// What could not be read.
    pub(super) notes: Vec<Note>,
}

/// Reads everything that does not depend on the list of GPUs.
pub(super) fn look(sysfs: &Path, procfs: &Path) -> Host {
    let root = Root(sysfs.to_owned());
    let mut notes = Vec::new();
    let pci = PciTree::read(root.clone(), &mut notes);
    let mut nics = rdma::nics(&root, &pci, &mut notes);
    dma::give_to(&mut nics, &pci, &mut notes);
    Host {
        name: first_line(&procfs.join("sys/kernel/hostname")),
        allowed: own::allowed(procfs),
        nodes: numa::nodes(&root),
        pci,
        nics,
        gpu_memory: numa::gpu_memory(procfs),
        driver_gpus: names(&procfs.join("driver/nvidia/gpus"))
            .iter()
            .filter_map(|name| name.parse().ok())
            .collect(),
        notes,
    }
}

/// Where sysfs is mounted.
#[derive(Clone, Debug)]
struct Root(PathBuf);

impl Root {
    fn join(&self, path: &str) -> PathBuf {
        self.0.join(path)
    }

    /// The target of a symbolic link to `../../…/devices/…`, as in sysfs.
    ///
    /// One system call, which can't leave the root.
    fn follow(&self, link: &Path) -> Option<PathBuf> {
        let target = std::fs::read_link(link).ok()?;
        let below = target.components().skip_while(|part| *part == std::path::Component::ParentDir);
        let below: PathBuf = below.collect();
        below.starts_with("devices").then(|| self.0.join(below))
    }
}

/// The content of a one-line file, trimmed; `None` if missing, unreadable or empty.
pub(super) fn first_line(path: &Path) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().next().unwrap_or_default().trim();
    (!line.is_empty()).then(|| line.to_owned())
}

/// The content of a file with a single value.
fn value<T: std::str::FromStr>(path: &Path) -> Option<T> {
    first_line(path)?.parse().ok()
}

/// A device's `numa_node`; the kernel reports -1 if the firmware gave none.
fn numa_node(device: &Path) -> Option<NumaId> {
    value::<i64>(&device.join("numa_node")).and_then(|node| node.try_into().ok()).map(NumaId)
}

/// Names in a directory; none if it is missing.
pub(super) fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.file_name())
        .filter_map(|name| OsString::into_string(name).ok())
        .collect()
}
