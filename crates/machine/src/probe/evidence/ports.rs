//! RDMA ports: addresses, counters and device files.
//!
//! *Invariant:* nothing is opened.

use std::collections::BTreeMap;
use std::path::Path;

use super::super::Options;
use super::super::sysfs::{first_line, names};
use super::{device_file, value};
use cuda_cluster_model::preflight::{DeviceFile, Look, RdmaPort};
use cuda_cluster_model::topology::Topology;

/// Reads every port, like `mlx5_0:1`.
pub(super) fn look(options: &Options, topology: &Topology) -> BTreeMap<String, RdmaPort> {
    let class = options.sysfs.join("class/infiniband");
    let mut all = BTreeMap::new();
    for nic in &topology.nics {
        let file = file(options, &nic.name);
        for port in &nic.ports {
            let path = class.join(&nic.name).join("ports").join(port.port.to_string());
            let found = RdmaPort {
                gids: gids(&path.join("gids")),
                link_downed: value(&path.join("counters/link_downed")),
                file: file.clone(),
            };
            all.insert(format!("{}:{}", nic.name, port.port), found);
        }
    }
    all
}

/// A table's entries that are set.
fn gids(folder: &Path) -> Look<Vec<String>> {
    if !folder.is_dir() {
        return Look::NotThere;
    }
    let unset = |gid: &String| gid.chars().all(|c| matches!(c, '0' | ':'));
    let entries = names(folder);
    let all = entries.iter().filter_map(|entry| first_line(&folder.join(entry)));
    Look::Seen(all.filter(|gid| !unset(gid)).collect())
}

/// The file of a device: that of its verbs, by the kernel's numbers.
fn file(options: &Options, nic: &str) -> Look<DeviceFile> {
    let verbs = options.sysfs.join("class/infiniband_verbs");
    let own = names(&verbs)
        .into_iter()
        .find(|name| first_line(&verbs.join(name).join("ibdev")).as_deref() == Some(nic));
    match own {
        Some(name) => Look::Seen(device_file(&options.dev.join("infiniband").join(name))),
        None if verbs.is_dir() => Look::Seen(DeviceFile::Missing),
        None => Look::NotThere,
    }
}
