//! The networks of NCCL's form: RDMA devices with their ports, and network interfaces.
//!
//! Does not place a NIC in the PCI tree.
//!
//! *Invariant:* a port has the number by which the verbs library, and so UCX, opens it.

use std::collections::BTreeMap;

use roxmltree::Node;

use super::integer;
use crate::ids::is_elastic;
use crate::topology::read::xml::{XmlError, parsed, required};
use crate::topology::{Nic, NicKind, Port};

pub(super) struct Net<'a> {
    /// The devices: several if NCCL uses them as one.
    pub(super) names: Vec<&'a str>,
    /// Whether NCCL reaches it through sockets, so that it is a network interface.
    pub(super) socket: bool,
    /// NCCL's number for the port.
    port: Option<u32>,
    rate_gbps: Option<f64>,
}

pub(super) fn net<'a>(node: Node<'a, '_>) -> Result<Net<'a>, XmlError> {
    let name = required(node, "name")?;
    let port = parsed(node, "port", |text| integer(text, "is not a port number"))?;
    let speed = parsed(node, "speed", |text| match text.parse::<f64>() {
        // Some NICs have a speed of -1, which means none.
        Ok(speed) if speed.is_finite() => Ok(speed),
        _ => Err("is not a speed in Mbit/s".to_owned()),
    })?;
    // NCCL joins the names of NICs that it uses as one; the speed is their sum.
    let names: Vec<&str> = name.split('+').filter(|name| !name.is_empty()).collect();
    let alone = names.len() == 1;
    // NCCL's own plugin for sockets has no GUID and port 0. Elastic Fabric Adapters may have no
    // GUID either, and only what does RDMA can reach a GPU's memory (`gdr`).
    let rdma = node.attribute("gdr") == Some("1") || names.iter().any(|name| is_elastic(name));
    let blank = port == Some(0) || node.attribute("guid").is_some_and(is_zero);
    Ok(Net {
        socket: names.iter().any(|name| is_interface(name)) || (blank && !rdma),
        names,
        port: port.filter(|port| (1..=255).contains(port)),
        rate_gbps: speed.filter(|speed| *speed > 0.0 && alone).map(|mbit| mbit / 1e3),
    })
}

/// Whether a GUID is zero, which NCCL writes if there is none (`net_socket.cc`).
fn is_zero(guid: &str) -> bool {
    let digits = guid.trim().trim_start_matches("0x");
    !digits.is_empty() && digits.bytes().all(|digit| digit == b'0')
}

/// Whether a name belongs to a network interface. RDMA devices are named after their driver
/// (`mlx5_0`) or by rdma-core's rule (`rocep25s0`, `ibp12s0`).
fn is_interface(name: &str) -> bool {
    // The prefixes that the kernel and systemd use, followed by a number or place.
    let numbered = ["eth", "ib", "bond", "br", "team", "tun", "tap", "wlan", "virbr", "docker"];
    let prefixed = ["eno", "ens", "enp", "enP", "enx", "em", "br-", "veth", "wl", "cni", "vlan"];
    let is_numbered = |kind: &str| {
        let rest = name.strip_prefix(kind);
        rest.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    name == "lo"
        || numbered.into_iter().any(is_numbered)
        || prefixed.into_iter().any(|kind| name.starts_with(kind))
}

/// The ports as the file lists them.
#[derive(Default)]
pub(super) struct Ports(Vec<Listed>);

/// One port.
struct Listed {
    /// Position of its NIC.
    nic: usize,
    /// Which card the NIC is on.
    card: usize,
    port: u32,
    rate_gbps: Option<f64>,
}

impl Ports {
    /// Adds the port of a `<net>`. A dump lists a NIC again for collectives; duplicates are
    /// ignored.
    pub(super) fn add(&mut self, nic: usize, card: usize, net: &Net<'_>) {
        let Some(port) = net.port else { return };
        if self.0.iter().all(|known| (known.nic, known.port) != (nic, port)) {
            self.0.push(Listed { nic, card, port, rate_gbps: net.rate_gbps });
        }
    }

    /// Gives each NIC its ports.
    ///
    /// NCCL adds to a port's number how many devices of the card came before it (`realPort` in
    /// `net_ib.cc`), which makes it a port of the card. The device's own number is 1, unless the
    /// device occurs with several. For those, the earlier ones are subtracted again if the results
    /// differ.
    pub(super) fn give_to(self, nics: &mut [Nic]) {
        let mut earlier: BTreeMap<usize, u32> = BTreeMap::new();
        let mut of: BTreeMap<usize, Vec<(&Listed, Option<u32>)>> = BTreeMap::new();
        for listed in &self.0 {
            let before = earlier.entry(listed.card).or_default();
            let less = listed.port.checked_sub(*before).filter(|port| *port > 0);
            of.entry(listed.nic).or_default().push((listed, less));
            *before += 1;
        }
        for (at, ports) in of {
            let Some(nic) = nics.get_mut(at).filter(|nic| nic.kind != NicKind::Socket) else {
                continue;
            };
            let distinct = |less: &Option<u32>| {
                less.is_some() && ports.iter().filter(|(_, other)| other == less).count() == 1
            };
            let reduced = ports.iter().all(|(_, less)| distinct(less));
            let several = ports.len() > 1;
            nic.ports = ports
                .iter()
                .map(|(listed, less)| Port {
                    port: match less {
                        _ if !several => 1,
                        Some(less) if reduced => *less,
                        _ => listed.port,
                    },
                    state: None,
                    link_layer: None,
                    rate_gbps: listed.rate_gbps,
                    netdev: None,
                })
                .collect();
            nic.ports.sort_by_key(|port| port.port);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_socket(attributes: &str) -> bool {
        let text = format!("<net speed=\"100000\" {attributes}/>");
        let document = roxmltree::Document::parse(&text).expect("XML");
        net(document.root_element()).expect("a network").socket
    }

    #[test]
    fn what_reaches_gpus_and_elastic_fabric_adapters_are_rdma_without_a_guid_too() {
        for rdma in [
            r#"name="rdmap16s27" port="1" guid="0x0" gdr="0""#,
            r#"name="efa_0" port="0" guid="0x0""#,
            r#"name="rdmap79s0" guid="0x0" gdr="1""#,
            r#"name="mlx5_0" port="1" guid="0x0" gdr="1""#,
            r#"name="mlx5_0" port="1" guid="0x80" gdr="0""#,
        ] {
            assert!(!is_socket(rdma), "{rdma}");
        }
        for socket in [
            r#"name="eth0" port="0" guid="0x0" gdr="0""#,
            // GPUDirect-TCPX reaches GPUs through interfaces.
            r#"name="eth1" port="1" guid="0x1" gdr="1""#,
            r#"name="mlx5_0" port="0" guid="0x80" gdr="0""#,
        ] {
            assert!(is_socket(socket), "{socket}");
        }
    }

    #[test]
    fn interfaces_are_told_from_rdma_devices_by_their_names() {
        for interface in ["eth0", "ib0", "ens1f0np0", "br-3c1f", "br0", "veth1a2b", "docker0", "lo"]
        {
            assert!(is_interface(interface), "{interface}");
        }
        let devices = ["mlx5_0", "mlx5_bond_0", "rocep25s0f0", "ibp177s0f1", "bnxt_re0", "irdma0"];
        for device in devices.into_iter().chain(["rdmap16s27", "efa_0", "erdma_0", "hns_0"]) {
            assert!(!is_interface(device), "{device}");
        }
    }
}
