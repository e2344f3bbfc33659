//! TCP ports: which of a range is free, and who holds the others.
//!
//! *Invariant:* a port is called free only after it was bound, with `SO_REUSEADDR` as listeners do,
//! so that connections that are still closing do not make it busy.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::net::{IpAddr, TcpListener};
use std::ops::RangeInclusive;

/// Who listens on a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortHolder {
    /// Its process id.
    pub pid: u32,
    /// Its name.
    pub name: String,
}

impl fmt::Display for PortHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} ({})", self.pid, self.name)
    }
}

/// Why there is no free port.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no port of {address} from {} to {} is free{}", range.start(), range.end(), said(holders))]
pub struct PortsBusy {
    /// Where it was tried.
    pub address: IpAddr,
    /// What was tried.
    pub range: RangeInclusive<u16>,
    /// Who listens on them, as far as this user may know.
    pub holders: BTreeMap<u16, PortHolder>,
}

fn said(holders: &BTreeMap<u16, PortHolder>) -> String {
    let one = |(port, holder): (&u16, &PortHolder)| format!("{port} is held by {holder}");
    let named: Vec<String> = holders.iter().take(4).map(one).collect();
    if named.is_empty() { String::new() } else { format!(": {}", named.join(", ")) }
}

/// The first free port of a range, in its order.
///
/// It is free when this returns; whoever listens on it should do so soon.
///
/// # Errors
/// With the holders, if none is free.
pub fn first_free(address: IpAddr, range: RangeInclusive<u16>) -> Result<u16, PortsBusy> {
    // The standard library's listeners set `SO_REUSEADDR` on Unix.
    let free = range.clone().find(|port| TcpListener::bind((address, *port)).is_ok());
    free.ok_or_else(|| PortsBusy { address, holders: holders(range.clone()), range })
}

/// Who listens on the ports of a range, on any address.
pub fn holders(range: RangeInclusive<u16>) -> BTreeMap<u16, PortHolder> {
    let mut sockets: BTreeMap<u64, u16> = BTreeMap::new();
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        let text = fs::read_to_string(table).unwrap_or_default();
        sockets.extend(listeners(&text).filter(|(_, port)| range.contains(port)));
    }
    let mut found = BTreeMap::new();
    if sockets.is_empty() {
        return found;
    }
    let pids = fs::read_dir("/proc").into_iter().flatten().flatten();
    for pid in pids.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok()) {
        for inode in sockets_of(pid).into_iter().filter(|inode| sockets.contains_key(inode)) {
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            let holder = PortHolder { pid, name: name.trim_end().to_owned() };
            found.entry(sockets[&inode]).or_insert(holder);
        }
    }
    found
}

/// Inode and port of the listening sockets in the text of a `/proc/net/tcp`: the second field is
/// the local address, the fourth the state (`0A`: listening), the tenth the inode, proc(5).
fn listeners(table: &str) -> impl Iterator<Item = (u64, u16)> {
    table.lines().skip(1).filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (_, port) = fields.get(1)?.rsplit_once(':')?;
        let listens = *fields.get(3)? == "0A";
        let inode = fields.get(9)?.parse().ok()?;
        listens.then_some((inode, u16::from_str_radix(port, 16).ok()?))
    })
}

fn sockets_of(pid: u32) -> BTreeSet<u64> {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let links = descriptors.filter_map(|entry| fs::read_link(entry.path()).ok());
    let inode = |link: std::path::PathBuf| {
        link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
    };
    links.filter_map(inode).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    #[test]
    fn a_busy_port_is_passed_over_and_its_holder_named() {
        let local = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let listener = TcpListener::bind((local, 0)).expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let busy = first_free(local, port..=port).expect_err("busy");
        let holder = &busy.holders[&port];
        assert_eq!(holder.pid, std::process::id());
        let text = busy.to_string();
        assert!(text.contains(&format!("{port} is held by process {}", holder.pid)), "{text}");
        drop(listener);
        assert_eq!(first_free(local, port..=port), Ok(port));
    }
}
