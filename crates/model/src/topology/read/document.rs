//! The project's own form, as YAML or JSON.
//!
//! Fills in what a hand-written file may leave out because the rest implies it: the NUMA node of a
//! device (from the bridges above it), a GPU's CPUs (from its NUMA node), and the links (from
//! bridges and NVLinks). An explicit `null` or `[]` is kept: it means "unknown".
//!
//! *Invariant:* every topology that is returned has passed [`consistency::check`].

use std::collections::BTreeMap;

use serde::Deserialize;
use serde::de::IgnoredAny;

use super::{Fault, SIZE_LIMIT, consistency};
use crate::cpuset::CpuSet;
use crate::ids::NumaId;
use crate::text::{self, Form, Position, ReadError};
use crate::topology::{Topology, VERSION};

/// Why a YAML or JSON text is not a topology.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs, reason = "the message says what each field is")]
#[non_exhaustive]
pub enum DocumentError {
    /// It is not well-formed, or a key or a value is wrong.
    #[error(transparent)]
    Text(#[from] ReadError),
    /// It has another version of this form, or none.
    #[error("{position}: version: {found} is not supported; this program reads version {VERSION}")]
    Version {
        position: Position,
        /// The version in the document.
        found: String,
    },
    /// Its parts contradict each other.
    #[error("{position}: {path}: {fault}")]
    Inconsistent {
        position: Position,
        /// Key path, like `gpus[3].parent`.
        path: String,
        fault: Fault,
    },
}

impl DocumentError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            DocumentError::Text(error) => error.problem.hint(),
            DocumentError::Inconsistent { .. } => None,
            DocumentError::Version { .. } => {
                Some(format!("write `version: {VERSION}` if the file is of that form"))
            }
        }
    }
}

/// The keys that a document has, whatever their values.
#[derive(Deserialize)]
struct Outline {
    version: Option<serde_json::Value>,
    #[serde(default)]
    gpus: Vec<BTreeMap<String, IgnoredAny>>,
    #[serde(default)]
    nics: Vec<BTreeMap<String, IgnoredAny>>,
    links: Option<IgnoredAny>,
}

pub(super) fn read(text: &str, form: Form) -> Result<Topology, DocumentError> {
    let position_of =
        |path: &str| text::find(text, path, 1).map_or(Position::START, |place| place.value);
    let outline: Outline = text::read(text, form, SIZE_LIMIT)?;
    let found = match &outline.version {
        None => "a missing version".to_owned(),
        Some(version) => version.to_string(),
    };
    if found != VERSION.to_string() {
        return Err(DocumentError::Version { position: position_of("version"), found });
    }
    let mut topology: Topology = text::read(text, form, SIZE_LIMIT)?;
    super::without_zeroed_uuids(&mut topology);
    consistency::check(&topology).map_err(|(path, fault)| DocumentError::Inconsistent {
        position: position_of(&path),
        path,
        fault,
    })?;
    fill(&mut topology, &outline);
    Ok(topology)
}

/// Fills in what the document leaves to its bridges and NUMA nodes.
fn fill(topology: &mut Topology, outline: &Outline) {
    let numa_above: Vec<Option<NumaId>> = {
        let ancestry = topology.ancestry();
        let gpus = topology.gpus.iter().map(|gpu| ancestry.numa(gpu.parent.as_deref()));
        gpus.chain(topology.nics.iter().map(|nic| ancestry.numa(nic.parent.as_deref()))).collect()
    };
    let (above_gpus, above_nics) = numa_above.split_at(topology.gpus.len());
    let cpus_of: BTreeMap<NumaId, Option<CpuSet>> =
        topology.numa.iter().map(|node| (node.id, node.cpus.clone())).collect();
    for ((gpu, keys), above) in topology.gpus.iter_mut().zip(&outline.gpus).zip(above_gpus) {
        if !keys.contains_key("numa") {
            gpu.numa = *above;
        }
        if !keys.contains_key("cpus") {
            gpu.cpus = gpu.numa.and_then(|id| cpus_of.get(&id).cloned().flatten());
        }
    }
    for ((nic, keys), above) in topology.nics.iter_mut().zip(&outline.nics).zip(above_nics) {
        if !keys.contains_key("numa") {
            nic.numa = *above;
        }
    }
    if outline.links.is_none() {
        topology.links = topology.derive_links();
    }
}
