//! Network interfaces, the machine's own name, and routes.
//!
//! *Invariant:* no name is asked of the network.

use std::net::IpAddr;

use super::super::Options;
use super::super::caller::interfaces;
use super::super::sysfs::first_line;
use super::text;
use cuda_cluster_model::preflight::{Interface, Look, Network};

/// Reads them.
pub(super) fn look(options: &Options) -> Network {
    let hostname = first_line(&options.procfs.join("sys/kernel/hostname"));
    let hosts = text(&options.etc.join("hosts"));
    let hostname_addresses = match (&hosts, &hostname) {
        (Look::Seen(hosts), Some(name)) => Look::of(addresses(hosts, name)),
        (Look::Unseen(why), _) => Look::Unseen(why.clone()),
        _ => Look::NotThere,
    };
    let class = options.sysfs.join("class/net");
    let mut all: Vec<(u32, Interface)> = interfaces()
        .into_iter()
        .map(|one| {
            let folder = class.join(&one.name);
            let index = first_line(&folder.join("ifindex")).and_then(|text| text.parse().ok());
            // What has no device below it is a bridge, a tunnel, a container's end of a pair.
            let hardware = folder.join("device").exists();
            let (name, addresses, main) = (one.name, one.addresses, one.main);
            (index.unwrap_or(u32::MAX), Interface { name, addresses, main, hardware })
        })
        .collect();
    all.sort_by_key(|(index, _)| *index);
    Network {
        interfaces: all.into_iter().map(|(_, interface)| interface).collect(),
        hostname,
        hostname_addresses,
        default_route: route(options),
    }
}

/// The addresses of a name in a hosts file; `None` if it is not in there.
fn addresses(hosts: &str, name: &str) -> Option<Vec<IpAddr>> {
    let mut found = Vec::new();
    for line in hosts.lines() {
        let line = line.split('#').next().unwrap_or_default();
        let mut words = line.split_whitespace();
        let Some(address) = words.next().and_then(|word| word.parse().ok()) else { continue };
        if words.any(|word| word.eq_ignore_ascii_case(name)) {
            found.push(address);
        }
    }
    (!found.is_empty()).then_some(found)
}

/// Whether one of the tables has a route to everywhere.
fn route(options: &Options) -> Look<bool> {
    let zero = |word: Option<&str>| word.is_some_and(|word| word.bytes().all(|byte| byte == b'0'));
    let v4 = text(&options.procfs.join("net/route"));
    let v6 = text(&options.procfs.join("net/ipv6_route"));
    if let (None, None) = (v4.seen(), v6.seen()) {
        return Look::NotThere;
    }
    // Interface, destination, …, mask: all in hexadecimal.
    let everywhere = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        zero(words.get(1).copied()) && zero(words.get(7).copied())
    };
    // Destination, its length, …, interface.
    let everywhere6 = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        zero(words.first().copied())
            && zero(words.get(1).copied())
            && words.last().is_some_and(|interface| *interface != "lo")
    };
    let found = v4.seen().is_some_and(|table| table.lines().skip(1).any(everywhere))
        || v6.seen().is_some_and(|table| table.lines().any(everywhere6));
    Look::Seen(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hosts_file_is_read_as_resolvers_do() {
        let hosts = "127.0.0.1 localhost\n127.0.1.1\tNode7.example Node7 # Debian's\n\
                     #10.0.0.7 node7\nfe80::1%eth0 node7\n10.0.0.8 node8\n";
        assert_eq!(addresses(hosts, "node7"), Some(vec!["127.0.1.1".parse().expect("one")]));
        assert_eq!(addresses(hosts, "node9"), None);
    }
}
