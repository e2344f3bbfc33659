//! Interfaces and names, for what listens beyond this machine.
//!
//! *Invariant:* a cluster of one machine, which listens on its loopback address, needs none of it.

use super::evidence::{Interface, Look};
use super::scene::{Found, Report, Scene, listed};
use super::{Check, Cost};

pub(super) const CHECKS: &[Check] = &[
    Check {
        id: "interface",
        title: "the interface that is taken first",
        looks_at: "interfaces that are up, in the kernel's order, and the one with the route outside",
        consequence: "Gloo and Dask take the first address that they find, NCCL does unless its \
                      name begins with docker: other machines cannot reach a bridge of this one, \
                      and wait until they give up",
        source: "NVIDIA/nccl#286, #367; horovod/horovod#310; openucx/ucx#9383",
        remedy: "'scheduler.interface' INTERFACE for Dask; NCCL_SOCKET_IFNAME=INTERFACE and \
                 GLOO_SOCKET_IFNAME=INTERFACE for programs",
        cost: Cost::Nothing,
        minor: false,
        judge: Some(interface),
    },
    Check {
        id: "hostname",
        title: "the address of the machine's own name",
        looks_at: "the machine's name in /etc/hosts",
        consequence: "programs that announce the address of their host's name announce a loopback \
                      address",
        source: "Debian's 127.0.1.1; Gloo and MPI look the name up",
        remedy: "the machine's real address for its name in /etc/hosts, or 'scheduler.host'",
        cost: Cost::Root,
        minor: false,
        judge: Some(hostname),
    },
    Check {
        id: "route",
        title: "a route outside",
        looks_at: "/proc/net/route and ipv6_route",
        consequence: "the address to announce cannot be found by the route, and becomes the \
                      loopback one",
        source: "distributed, get_ip",
        remedy: "'scheduler.host' or 'scheduler.interface'",
        cost: Cost::Nothing,
        minor: false,
        judge: Some(route),
    },
];

/// Interfaces with an address that is not this machine's alone.
fn usable<'a>(scene: &Scene<'a>) -> Vec<&'a Interface> {
    let all = scene.evidence.network.interfaces.iter();
    let outside = |interface: &&Interface| {
        interface.addresses.iter().any(|address| match address {
            core::net::IpAddr::V4(v4) => !v4.is_loopback() && !v4.is_link_local(),
            core::net::IpAddr::V6(v6) => !v6.is_loopback() && !v6.is_unicast_link_local(),
        })
    };
    all.filter(outside).collect()
}

fn interface(scene: &Scene<'_>, report: &mut Report) {
    let usable = usable(scene);
    let Some(hardware) = usable.iter().find(|one| one.hardware) else {
        // In a container all are virtual.
        if let Some(first) = usable.first() {
            report.ok(format!("{}, as nothing here is hardware", first.name));
        }
        return;
    };
    let first = usable.iter().find(|one| one.main).or(usable.first()).filter(|one| !one.hardware);
    let Some(first) = first else {
        return report.ok(format!("{} comes first", hardware.name));
    };
    let name = &hardware.name;
    let addresses: Vec<String> = first.addresses.iter().map(ToString::to_string).collect();
    let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
    let text = format!("its address {} comes before {name}, which is hardware", listed(&addresses));
    let found = match scene.goes_beyond() {
        true => Found::warning(text),
        false => Found::note(format!("{text}; this plan stays on the machine")),
    };
    let found = found.with("INTERFACE", name);
    report.push(found.about(first.name.clone()).saw("getifaddrs", listed(&addresses)));
}

fn hostname(scene: &Scene<'_>, report: &mut Report) {
    let network = &scene.evidence.network;
    let Some(name) = &network.hostname else { return };
    report.one(&network.hostname_addresses, "/etc/hosts", |addresses| {
        let loopback = addresses.iter().find(|address| address.is_loopback());
        match loopback {
            Some(address) if scene.goes_beyond() => {
                let found = Found::warning(format!("{name} is {address}"));
                Err(found.saw("/etc/hosts", format!("{address} {name}")))
            }
            Some(address) => Ok(format!("{name} is {address}, and the plan stays on the machine")),
            None => Ok(format!("{name} is not a loopback address")),
        }
    });
}

fn route(scene: &Scene<'_>, report: &mut Report) {
    match scene.evidence.network.default_route {
        Look::Seen(true) => report.ok("there is one"),
        Look::Seen(false) if scene.goes_beyond() => {
            report.push(Found::warning("there is none").saw("/proc/net/route", "no default"));
        }
        Look::Seen(false) => report.ok("there is none, and the plan stays on the machine"),
        Look::Unseen(ref why) => report.cannot_tell(why.clone()),
        Look::NotThere => {}
    }
}
