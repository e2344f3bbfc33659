//! Collects what a plan depends on besides the topology: variables, network interfaces, the
//! cgroup's memory limit; for a plan of another machine, the limits of this one.
//!
//! Makes no decisions; `plan` does.
//!
//! *Invariant:* only variables that a plan may depend on are read, so that no secret of the
//! caller's environment ends up in a plan.

use std::collections::BTreeMap;
use std::fs;
use std::net::{IpAddr, UdpSocket};
use std::path::{Path, PathBuf};

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;

use super::libucp::{has_direct, installed, own_environment};
use cuda_cluster_model::plan::{
    CallerEnvironment, Here, Interface, LIBRARY_VARIABLE, TERMINATE_VARIABLE, machine_bytes,
};
use cuda_cluster_model::topology::{PortState, Topology};

/// Prefixes of the names of variables that a plan may depend on.
const PREFIXES: [&str; 3] = ["UCX_", "UCXPY_", "NCCL_"];

/// Further names of such variables.
const NAMES: [&str; 10] = [
    LIBRARY_VARIABLE,
    TERMINATE_VARIABLE,
    "LD_LIBRARY_PATH",
    "CUDA_VISIBLE_DEVICES",
    "MALLOC_TRIM_THRESHOLD_",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
];

/// Collects the context of this process.
pub fn caller() -> CallerEnvironment {
    let matters = |name: &str| {
        NAMES.contains(&name) || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
    };
    let variables = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .filter(|(name, _)| matters(name));
    let own = own_environment();
    let mut caller = CallerEnvironment::default();
    caller.variables = variables.collect();
    caller.interfaces = interfaces();
    caller.host_name = host_name();
    caller.ucx_libraries = Some(installed(own.as_deref(), |name| std::env::var_os(name)));
    caller.memory_policy = super::own::memory_policy();
    caller.memory_limit_bytes = memory_limit();
    caller.dask_has_direct = has_direct(own.as_deref(), |name| std::env::var_os(name));
    caller
}

/// This machine's name.
fn host_name() -> Option<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
    Some(name.trim().to_owned()).filter(|name| !name.is_empty())
}

/// The facts about this machine and its network on which a plan for another machine depends.
pub fn here(live: &Topology) -> Here {
    let allowed = live.allowed.clone();
    let cpus = allowed.as_ref().map(|allowed| allowed.cpus.clone()).or_else(|| live.cpus());
    let interfaces = interfaces().into_iter().map(|interface| interface.name);
    let ports = live.nics.iter().flat_map(|nic| {
        let active = nic.ports.iter().filter(|port| port.state == Some(PortState::Active));
        active.map(|port| format!("{}:{}", nic.name, port.port))
    });
    Here {
        cpus: cpus.unwrap_or_default(),
        mems: allowed.map(|allowed| allowed.mems).unwrap_or_default(),
        net_devices: interfaces.chain(ports).collect(),
        gpu: !live.gpus.is_empty(),
        memory_bytes: memory_limit().into_iter().chain(machine_bytes(live)).min(),
    }
}

/// Interfaces that are up, by name.
pub(super) fn interfaces() -> Vec<Interface> {
    let main = main_address();
    let mut found: BTreeMap<String, Vec<IpAddr>> = BTreeMap::new();
    for one in getifaddrs().into_iter().flatten() {
        if !one.flags.contains(InterfaceFlags::IFF_UP) {
            continue;
        }
        let addresses = found.entry(one.interface_name).or_default();
        let address = one.address.as_ref();
        addresses.extend(address.and_then(|a| a.as_sockaddr_in()).map(|a| IpAddr::V4(a.ip())));
        addresses.extend(address.and_then(|a| a.as_sockaddr_in6()).map(|a| IpAddr::V6(a.ip())));
    }
    found
        .into_iter()
        .map(|(name, addresses)| {
            let is_main = main.is_some_and(|main| addresses.contains(&main));
            let mut found = Interface::new(name, addresses);
            found.main = is_main;
            found
        })
        .collect()
}

/// The address at which others reach this machine, determined like distributed does: from the route
/// to the outside. Connecting a datagram socket sends nothing.
fn main_address() -> Option<IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    // An address that no machine has (RFC 5737); it is routed like all other outside addresses.
    socket.connect("192.0.2.1:80").ok()?;
    Some(socket.local_addr().ok()?.ip()).filter(|address| !address.is_unspecified())
}

/// The smallest memory limit of this process's control group and its ancestors.
fn memory_limit() -> Option<u64> {
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    groups(&own).into_iter().filter_map(|(root, path, file)| least(root, path, file)).min()
}

/// The groups of `/proc/PID/cgroup` that may limit memory, of both versions: the root of their
/// hierarchy, their path below it, and the file with the limit.
fn groups(own: &str) -> Vec<(&'static Path, &str, &'static str)> {
    let group = |line: &'_ str| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?.strip_prefix('/')?);
        let at = line.len() - path.len();
        if controllers.is_empty() {
            Some((Path::new("/sys/fs/cgroup"), at, "memory.max"))
        } else if controllers.split(',').any(|one| one == "memory") {
            Some((Path::new("/sys/fs/cgroup/memory"), at, "memory.limit_in_bytes"))
        } else {
            None
        }
    };
    let known = own.lines().filter_map(|line| Some((line, group(line)?)));
    known.map(|(line, (root, at, file))| (root, &line[at..], file)).collect()
}

/// A group's directory and those above, nearest first. Where the group's path is not here, as in a
/// container, the root is the container's own.
pub(super) fn groups_of(root: &Path, path: &str) -> Vec<PathBuf> {
    let whole = root.join(path);
    let above = whole.ancestors().take_while(|group| group.starts_with(root));
    above.map(Path::to_owned).collect()
}

/// The smallest limit of a group and its ancestors.
fn least(root: &Path, path: &str, file: &str) -> Option<u64> {
    let limit = |group: PathBuf| {
        let text = fs::read_to_string(group.join(file)).ok()?;
        // Version 1 has a number for no limit: the largest whole number of pages.
        text.trim().parse::<u64>().ok().filter(|bytes| *bytes < 1 << 62)
    };
    groups_of(root, path).into_iter().filter_map(limit).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_of_both_versions_limit_memory() {
        let own = "12:pids:/a\n9:memory,hugetlb:/slurm/uid_0/job_1\n1:name=systemd:/b\n0::/user.slice/c\n";
        let found: Vec<(String, &str, &str)> = groups(own)
            .into_iter()
            .map(|(root, path, file)| (root.display().to_string(), path, file))
            .collect();
        let (first, second) = ("/sys/fs/cgroup/memory", "/sys/fs/cgroup");
        assert_eq!(
            found,
            [
                (first.to_owned(), "slurm/uid_0/job_1", "memory.limit_in_bytes"),
                (second.to_owned(), "user.slice/c", "memory.max"),
            ]
        );
        let folder = tempfile::tempdir().expect("a directory");
        let group = folder.path().join("a/b");
        fs::create_dir_all(&group).expect("made");
        for (at, limit) in [("", "9223372036854771712"), ("a", "400"), ("a/b", "500")] {
            fs::write(folder.path().join(at).join("limit"), limit).expect("written");
        }
        assert_eq!(least(folder.path(), "a/b", "limit"), Some(400));
        assert_eq!(least(folder.path(), "elsewhere", "limit"), None);
    }

    #[test]
    fn the_loopback_interface_is_there_and_is_not_the_main_one() {
        let interfaces = interfaces();
        let loopback = interfaces.iter().find(|interface| interface.name == "lo");
        assert!(loopback.is_some_and(|lo| !lo.main), "{interfaces:?}");
    }
}
