//! Readers for the text forms in which people have a machine.
//!
//! Takes text, not paths; does not open files (`cli` does).
//!
//! *Invariant:* every error gives a position in the text; what a form cannot express stays unknown.

mod consistency;
mod document;
mod hwloc;
mod nccl;
mod smi;
mod xml;

use super::{Note, Topology};
use crate::text::{self, Form};

pub use consistency::Fault;
pub use document::DocumentError;
pub use smi::SmiError;
pub use xml::XmlError;

/// Longer texts are refused: the largest real captures are a few hundred kilobytes.
pub const SIZE_LIMIT: usize = 8 << 20;

/// Most GPUs and NICs of one machine; the number of links grows with its square.
pub(super) const DEVICE_LIMIT: usize = 512;

/// Most NUMA nodes: Linux's own limit (`CONFIG_NODES_SHIFT` is at most 10).
const NUMA_LIMIT: usize = 1024;

/// Most NVLinks that are read for one GPU. Files list them for each peer, so 72 GPUs behind
/// switches have 71 times 18.
const NVLINK_LIMIT: usize = 1536;

/// A text form that a topology can be read from.
enum Format {
    /// This project's own.
    Own(Form),
    /// The matrix of `nvidia-smi topo -m`.
    Smi,
    /// NCCL's topology XML, or hwloc's; the root element tells.
    Xml,
}

/// Why a text is not a topology.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs, reason = "the message says what each field is")]
#[non_exhaustive]
pub enum ParseError {
    /// The text is too long.
    #[error("{bytes} bytes are more than a topology has (at most {SIZE_LIMIT})")]
    TooLarge { bytes: usize },
    /// The text does not begin like any of the forms.
    #[error("no topology is recognised in this text")]
    Unrecognised,
    /// YAML or JSON that is not a topology.
    #[error(transparent)]
    Document(#[from] DocumentError),
    /// A damaged matrix.
    #[error(transparent)]
    Smi(#[from] SmiError),
    /// Damaged XML, or XML that describes something else.
    #[error(transparent)]
    Xml(#[from] XmlError),
}

impl ParseError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            ParseError::TooLarge { .. } => None,
            ParseError::Unrecognised => Some(
                "give `cuda-cluster topo -o yaml` or `-o json`, the output of `nvidia-smi topo \
                 -m`, an NCCL topology XML (NCCL_TOPO_DUMP_FILE), or `lstopo --of xml`"
                    .to_owned(),
            ),
            ParseError::Document(error) => error.hint(),
            ParseError::Smi(error) => error.hint(),
            ParseError::Xml(_) => None,
        }
    }
}

/// Reads a topology from any of the text forms, recognised from the content.
///
/// # Errors
/// If the text is in none of the forms, or is damaged; the error gives the position.
pub fn parse(text: &str) -> Result<Topology, ParseError> {
    if text.len() > SIZE_LIMIT {
        return Err(ParseError::TooLarge { bytes: text.len() });
    }
    let text = text::without_mark(text);
    match recognise(text).ok_or(ParseError::Unrecognised)? {
        Format::Own(form) => Ok(document::read(text, form)?),
        Format::Smi => Ok(smi::read(text)?),
        Format::Xml => {
            let document = xml::parse(text)?;
            let root = document.root_element();
            Ok(match root.tag_name().name() {
                "system" => nccl::read(root)?,
                "topology" => hwloc::read(root)?,
                _ => {
                    let expected = "is not a topology; NCCL's begins with <system>, hwloc's with \
                                    <topology>";
                    return Err(xml::wrong(root, expected).into());
                }
            })
        }
    }
}

/// Removes UUIDs that an anonymiser has zeroed, if several GPUs share one: they identify nothing.
fn without_zeroed_uuids(topology: &mut Topology) {
    let zeroed = topology
        .gpus
        .iter_mut()
        .filter(|gpu| gpu.uuid.as_ref().is_some_and(crate::ids::GpuUuid::is_zeroed));
    let zeroed: Vec<_> = zeroed.collect();
    if zeroed.len() > 1 {
        let text = format!("{} of them have a UUID of zeros, which is none", zeroed.len());
        zeroed.into_iter().for_each(|gpu| gpu.uuid = None);
        topology.notes.push(Note::new("gpus", text));
    }
}

/// The form of a text, recognised by how it begins.
fn recognise(text: &str) -> Option<Format> {
    let version = |line: &str| line.trim_start_matches('\u{feff}').starts_with("version:");
    if text.trim_start().starts_with('{') {
        Some(Format::Own(Form::Json))
    } else if text.trim_start().starts_with('<') {
        Some(Format::Xml)
    } else if text.lines().any(version) {
        Some(Format::Own(Form::Yaml))
    } else if smi::recognise(text) {
        Some(Format::Smi)
    } else {
        // Without a version it is refused anyway, but by the reader whose error explains it.
        text.lines().any(is_key).then_some(Format::Own(Form::Yaml))
    }
}

fn is_key(line: &str) -> bool {
    line.split_once(':').is_some_and(|(key, _)| {
        !key.is_empty() && key.bytes().all(|b| b.is_ascii_lowercase() || b == b'_')
    })
}
