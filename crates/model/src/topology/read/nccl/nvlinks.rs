//! The NVLinks of NCCL's form.
//!
//! Does not compare the two ends of a link.
//!
//! *Invariant:* a link whose far end the file does not make plain ends somewhere unknown.

use roxmltree::Node;

use super::{Reader, integer, place};
use crate::topology::read::NVLINK_LIMIT;
use crate::topology::read::xml::{XmlError, parsed, required};
use crate::topology::{NvLink, NvLinkPeer};

/// Most NVLinks of one GPU (GB200 and earlier have up to 18).
const NVLINKS_OF_A_GPU: usize = 18;

impl Reader {
    /// The NVLinks of a GPU. The file gives their number for each peer but not their numbers on the
    /// GPU, so they are numbered in order.
    pub(super) fn nvlinks(
        &mut self,
        pci: Node<'_, '_>,
        gpu: Node<'_, '_>,
    ) -> Result<Vec<NvLink>, XmlError> {
        let mut links = Vec::new();
        let mut listed = 0u64;
        for node in gpu.children().filter(|child| child.has_tag_name("nvlink")) {
            let count =
                parsed(node, "count", |text| integer(text, "is not a number"))?.unwrap_or(1);
            listed += u64::from(count);
            let target = place(required(node, "target")?);
            let class = node.attribute("tclass").unwrap_or_default();
            let peer = match (class.trim_start_matches("0x"), target) {
                ("068000", _) => NvLinkPeer::Switch,
                ("068001", _) => NvLinkPeer::Cpu,
                (class, Some(place)) if class.is_empty() || class.starts_with("03") => {
                    NvLinkPeer::Gpu(place)
                }
                _ => NvLinkPeer::Unknown,
            };
            if peer == NvLinkPeer::Switch {
                self.switches = self.switches.take().zip(target).map(|(mut known, place)| {
                    known.insert(place);
                    known
                });
            }
            for _ in 0..count {
                if links.len() == NVLINK_LIMIT {
                    break;
                }
                let link = u32::try_from(links.len()).unwrap_or(u32::MAX);
                links.push(NvLink { link, active: true, version: None, peer, gb_per_s: None });
            }
        }
        let busid = pci.attribute("busid").unwrap_or_default();
        if listed > NVLINK_LIMIT as u64 {
            let text = format!("{listed} NVLinks are listed; {NVLINK_LIMIT} of them are read");
            self.note(busid, text);
        } else if listed > NVLINKS_OF_A_GPU as u64 {
            let text = format!(
                "{listed} NVLinks are listed, more than a GPU has: each seems to count once for \
                 every peer that it reaches"
            );
            self.note(busid, text);
        }
        Ok(links)
    }
}
