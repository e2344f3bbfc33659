//! NVLinks from hwloc's matrix of their bandwidths.
//!
//! hwloc gives no number of links; it follows from the bandwidth and the GPU's model.
//!
//! *Invariant:* a link ends at an object of the matrix.

use roxmltree::Node;

use super::Reader;
use super::attributes::texts;
use crate::topology::read::xml::{XmlError, wrong};
use crate::topology::read::{DEVICE_LIMIT, NVLINK_LIMIT};
use crate::topology::{Note, NvLink, NvLinkPeer};

impl Reader {
    /// Reads the matrix of NVLink bandwidths, if there is one.
    pub(super) fn nvlinks(&mut self, root: Node<'_, '_>) -> Result<(), XmlError> {
        let named = |node: &Node<'_, '_>| node.attribute("name") == Some("NVLinkBandwidth");
        let Some(matrix) = root.children().find(named) else {
            if self.gpus.len() > 1 {
                self.topology.nvlinks_untold = true;
                let text = "the file has no NVLink bandwidths; GPU pairs show their PCIe path";
                self.topology.notes.push(Note::new("links", text));
            }
            return Ok(());
        };
        // Objects are `OSDev:802`, or plain numbers if only one type is named.
        let prefix = matrix.attribute("type").map(|kind| format!("{kind}:")).unwrap_or_default();
        let names: Vec<String> =
            texts(matrix, "indexes").map(|name| prefix.clone() + name).collect();
        let numbers = texts(matrix, "u64values").map(str::parse::<u64>);
        let values: Vec<u64> = numbers
            .collect::<Result<_, _>>()
            .map_err(|_| wrong(matrix, "a bandwidth is not a number"))?;
        if names.is_empty() || names.len() > DEVICE_LIMIT || values.len() != names.len().pow(2) {
            return Err(wrong(matrix, "has not one bandwidth for each pair of its objects"));
        }
        let ends: Vec<Option<NvLinkPeer>> = names.iter().map(|name| self.end(name)).collect();
        let mut switches = 0;
        for (name, end) in names.iter().zip(&ends) {
            switches += u32::from(*end == Some(NvLinkPeer::Switch));
            if end.is_none() {
                self.topology
                    .notes
                    .push(Note::new(name, "has NVLinks, but is not a GPU, switch or CPU"));
            }
        }
        self.topology.nvswitch = Some(switches);
        for found in &mut self.gpus {
            let Some(row) = names.iter().position(|name| found.handles.contains(name)) else {
                continue;
            };
            let each = per_link(found.gpu.name.as_deref(), &values);
            for (column, mb_per_s) in
                values[row * names.len()..].iter().take(names.len()).enumerate()
            {
                if column == row {
                    continue;
                }
                let peer = ends[column].unwrap_or(NvLinkPeer::Unknown);
                for _ in 0..mb_per_s / each {
                    if found.gpu.nvlinks.len() >= NVLINK_LIMIT {
                        let text = format!("more than {NVLINK_LIMIT} NVLinks follow from the file");
                        let about = found.gpu.pci.map_or_else(String::new, |pci| pci.to_string());
                        self.topology.notes.push(Note::new(about, text));
                        break;
                    }
                    let link = u32::try_from(found.gpu.nvlinks.len()).unwrap_or(u32::MAX);
                    let gb_per_s = Some(each as f64 / 1e3);
                    let link = NvLink { link, active: true, version: None, peer, gb_per_s };
                    found.gpu.nvlinks.push(link);
                }
            }
        }
        Ok(())
    }

    /// The kind of an object of the bandwidth matrix.
    fn end(&self, name: &str) -> Option<NvLinkPeer> {
        let gpu = self.gpus.iter().find(|found| found.handles.iter().any(|handle| handle == name));
        if let Some(place) = gpu.and_then(|found| found.gpu.pci) {
            return Some(NvLinkPeer::Gpu(place));
        }
        if self.switches.iter().any(|handle| handle == name) {
            return Some(NvLinkPeer::Switch);
        }
        name.starts_with("Package:").then_some(NvLinkPeer::Cpu)
    }
}

/// One NVLink's bandwidth in one direction, MB/s.
///
/// hwloc gives the sum over a pair's links, and multiples of 20 and of 25 GB/s can coincide, so the
/// model decides; for unknown models the values do.
fn per_link(model: Option<&str>, values: &[u64]) -> u64 {
    let named = |part: &str| model.is_some_and(|model| model.contains(part));
    if named("P100") {
        20_000
    } else if ["B100", "B200", "B300"].into_iter().any(named) {
        50_000
    } else if model.is_none()
        && values.iter().any(|value| value % 25_000 != 0)
        && values.iter().all(|value| value % 20_000 == 0)
    {
        20_000
    } else {
        25_000
    }
}
