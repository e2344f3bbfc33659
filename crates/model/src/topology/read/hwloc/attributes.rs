//! The attributes of hwloc's objects as values.
//!
//! Does not know how objects are related.

use roxmltree::Node;

use crate::cpuset::IdSet;
use crate::ids::PciAddress;
use crate::topology::read::xml::{XmlError, parsed, required, wrong};
use crate::topology::{Port, PortState};

/// The texts of all children with a name.
pub(super) fn texts<'a>(node: Node<'a, '_>, name: &'static str) -> impl Iterator<Item = &'a str> {
    let named = node.children().filter(move |child| child.has_tag_name(name));
    named.filter_map(|child| child.text()).flat_map(str::split_whitespace)
}

pub(super) fn os_devices<'a, 'input>(
    node: Node<'a, 'input>,
) -> impl Iterator<Item = Node<'a, 'input>> {
    node.children().filter(|child| child.attribute("type") == Some("OSDev"))
}

pub(super) fn info<'a>(node: Node<'a, '_>, name: &str) -> Option<&'a str> {
    let named =
        |child: &Node<'_, '_>| child.has_tag_name("info") && child.attribute("name") == Some(name);
    node.children().find(named).and_then(|child| child.attribute("value"))
}

/// An RDMA device's ports, from `Port1State` and so on; hwloc has no rate and no link layer.
pub(super) fn ports(device: Node<'_, '_>) -> Vec<Port> {
    let state = |port: u32| info(device, &format!("Port{port}State")).map(str::trim);
    (1..=255)
        .map_while(|port| state(port).map(|state| (port, state)))
        .map(|(port, state)| {
            // The numbers of `enum ibv_port_state`.
            let state = match state {
                "0" => Some(PortState::Nop),
                "1" => Some(PortState::Down),
                "2" => Some(PortState::Init),
                "3" => Some(PortState::Armed),
                "4" => Some(PortState::Active),
                "5" => Some(PortState::ActiveDefer),
                _ => None,
            };
            Port { port, state, link_layer: None, rate_gbps: None, netdev: None }
        })
        .collect()
}

pub(super) fn address(node: Node<'_, '_>) -> Result<PciAddress, XmlError> {
    let busid = required(node, "pci_busid")?;
    busid.parse().map_err(|error: crate::ids::IdError| wrong(node, error.to_string()))
}

pub(super) fn number(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| "is not a number".to_owned())
}

pub(super) fn bytes(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| "is not a number of bytes".to_owned())
}

/// A bitmap of hwloc: `0x0000ffff,,0x1`, 32-bit words, highest first, empty for zero.
pub(super) fn set<Kind>(
    node: Node<'_, '_>,
    attribute: &'static str,
) -> Result<Option<IdSet<Kind>>, XmlError> {
    let value = parsed(node, attribute, |text| {
        if text.contains("...") {
            // `0xf...f`: everything that could ever exist, which tells nothing.
            return Ok(None);
        }
        let words = text.split(',').map(|word| match word.trim().trim_start_matches("0x") {
            "" => "0",
            digits => digits,
        });
        let words: Vec<&str> = words.collect();
        IdSet::parse_mask(&words.join(",")).map(Some).map_err(|error| error.to_string())
    })?;
    Ok(value.flatten())
}
