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
use std::path::Path;

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;

use super::libucp::{has_direct, installed, own_environment};
use cuda_cluster_model::plan::{
    CallerEnvironment, Here, Interface, LIBRARY_VARIABLE, TERMINATE_VARIABLE,
};
use cuda_cluster_model::topology::{PortState, Topology};

/// Prefixes of the names of variables that a plan may depend on.
const PREFIXES: [&str; 3] = ["UCX_", "UCXPY_", "NCCL_"];

/// Further names of such variables.
const NAMES: [&str; 8] = [
    LIBRARY_VARIABLE,
    TERMINATE_VARIABLE,
    "LD_LIBRARY_PATH",
    "CUDA_VISIBLE_DEVICES",
    "MALLOC_TRIM_THRESHOLD_",
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
    caller.ucx_libraries = Some(installed(own.as_deref(), |name| std::env::var_os(name)));
    caller.memory_policy = super::own::memory_policy();
    caller.memory_limit_bytes = memory_limit();
    caller.dask_has_direct = has_direct(own.as_deref(), |name| std::env::var_os(name));
    caller
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
    }
}

/// Interfaces that are up, by name.
fn interfaces() -> Vec<Interface> {
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

/// The smallest `memory.max` of this process's cgroup and its ancestors.
fn memory_limit() -> Option<u64> {
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = own.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let root = Path::new("/sys/fs/cgroup");
    let limit = |group: &Path| {
        let text = fs::read_to_string(group.join("memory.max")).ok()?;
        text.trim().parse::<u64>().ok()
    };
    root.join(path).ancestors().take_while(|group| group.starts_with(root)).filter_map(limit).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_interface_is_there_and_is_not_the_main_one() {
        let interfaces = interfaces();
        let loopback = interfaces.iter().find(|interface| interface.name == "lo");
        assert!(loopback.is_some_and(|lo| !lo.main), "{interfaces:?}");
    }
}
