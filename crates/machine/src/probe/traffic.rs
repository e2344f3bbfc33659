//! Bytes that NICs have sent and received, from the kernel's counters.
//!
//! *Invariant:* only files are read; a counter that is missing makes the answer `None`.

use std::path::Path;

use serde::Serialize;

use cuda_cluster_model::topology::{Nic, NicKind, Port};

/// `port_xmit_data` and `port_rcv_data` count words of four bytes (InfiniBand, 16.1.3.5).
const WORD: u64 = 4;

/// Bytes since the kernel began to count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Traffic {
    /// Bytes sent so far.
    pub sent_bytes: u64,
    /// Bytes received so far.
    pub received_bytes: u64,
}

/// The traffic of a NIC over all its ports; `None` if the kernel does not count it.
///
/// For an RDMA device its own counters; otherwise those of the network interface.
pub fn traffic(sysfs: &Path, nic: &Nic) -> Option<Traffic> {
    if nic.kind == NicKind::Socket {
        return interface(sysfs, &nic.name);
    }
    let port = |port: &Port| {
        let folder = sysfs.join("class/infiniband").join(&nic.name);
        let folder = folder.join("ports").join(port.port.to_string()).join("counters");
        let words = |name| number(&folder.join(name)).map(|words| words.saturating_mul(WORD));
        let rdma = words("port_xmit_data").zip(words("port_rcv_data"));
        let rdma =
            rdma.map(|(sent, received)| Traffic { sent_bytes: sent, received_bytes: received });
        rdma.or_else(|| interface(sysfs, port.netdev.as_deref()?))
    };
    nic.ports.iter().filter_map(port).reduce(|a, b| Traffic {
        sent_bytes: a.sent_bytes + b.sent_bytes,
        received_bytes: a.received_bytes + b.received_bytes,
    })
}

/// The RDMA devices with their ports' numbers, as far as [`traffic`] needs them.
pub fn nics(sysfs: &Path) -> Vec<Nic> {
    let names = |folder: &Path| -> Vec<String> {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
    };
    let class = sysfs.join("class/infiniband");
    let port = |number: &String| {
        let port = number.parse().ok()?;
        Some(Port { port, state: None, link_layer: None, rate_gbps: None, netdev: None })
    };
    let nic = |name: String| {
        let ports = names(&class.join(&name).join("ports"));
        Nic { ports: ports.iter().filter_map(port).collect(), name, ..Nic::default() }
    };
    names(&class).into_iter().map(nic).collect()
}

fn interface(sysfs: &Path, name: &str) -> Option<Traffic> {
    let folder = sysfs.join("class/net").join(name).join("statistics");
    let sent_bytes = number(&folder.join("tx_bytes"))?;
    Some(Traffic { sent_bytes, received_bytes: number(&folder.join("rx_bytes"))? })
}

fn number(path: &Path) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rdma_counters_count_words_and_come_before_those_of_the_interface() {
        let sysfs = tempfile::tempdir().expect("a directory");
        let write = |path: &str, text: &str| {
            let path = sysfs.path().join(path);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("made");
            std::fs::write(path, text).expect("written");
        };
        let port = Port {
            port: 1,
            state: None,
            link_layer: None,
            rate_gbps: None,
            netdev: Some("ib0".to_owned()),
        };
        let nic = Nic { name: "mlx5_0".to_owned(), ports: vec![port], ..Nic::default() };
        assert_eq!(traffic(sysfs.path(), &nic), None);
        write("class/net/ib0/statistics/tx_bytes", "10\n");
        write("class/net/ib0/statistics/rx_bytes", "20\n");
        let of = |sent_bytes, received_bytes| Some(Traffic { sent_bytes, received_bytes });
        assert_eq!(traffic(sysfs.path(), &nic), of(10, 20));
        write("class/infiniband/mlx5_0/ports/1/counters/port_xmit_data", "100\n");
        write("class/infiniband/mlx5_0/ports/1/counters/port_rcv_data", "200\n");
        assert_eq!(traffic(sysfs.path(), &nic), of(400, 800));
        let found = nics(sysfs.path());
        assert_eq!(found.iter().map(|nic| traffic(sysfs.path(), nic)).next(), Some(of(400, 800)));
        let socket = Nic { name: "ib0".to_owned(), kind: NicKind::Socket, ..Nic::default() };
        assert_eq!(traffic(sysfs.path(), &socket), of(10, 20));
    }
}
