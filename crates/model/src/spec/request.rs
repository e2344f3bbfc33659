//! Merges the spec file and the command line into one request.
//!
//! Does not read files or flags. Remembers where each value came from.
//!
//! *Invariant:* every value that was set has exactly one origin.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{ClusterSpec, SpecError, contradictions};

/// Who set a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, strum::Display)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Origin {
    /// The command line.
    Flag,
    /// A spec file, or a spec that a program has built.
    Spec,
    /// The caller's environment.
    Environment,
}

/// The merged spec, and where its values came from.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Request {
    /// What was set, merged; defaults are not in it.
    pub spec: ClusterSpec,
    /// Key path (`ucx.nvlink`) to the layer that set it.
    pub origins: BTreeMap<String, Origin>,
}

impl Request {
    /// Merges files and flags: key by key a later file wins, and a flag over all. Lists are
    /// replaced as a whole.
    ///
    /// # Errors
    /// If the merged values contradict each other.
    pub fn merge<'a>(
        files: impl IntoIterator<Item = &'a ClusterSpec>,
        flags: &ClusterSpec,
    ) -> Result<Self, SpecError> {
        let files = files.into_iter().map(|file| (Origin::Spec, file));
        Self::merged(files.chain([(Origin::Flag, flags)]), "command line")
    }

    /// A request that was built by a program.
    ///
    /// # Errors
    /// If the values contradict each other.
    pub fn of(spec: ClusterSpec) -> Result<Self, SpecError> {
        Self::merge_as([&spec], "spec")
    }

    /// Merges what a program has built: key by key a later spec wins. Errors call it `origin`.
    ///
    /// # Errors
    /// If the merged values contradict each other.
    pub fn merge_as<'a>(
        specs: impl IntoIterator<Item = &'a ClusterSpec>,
        origin: &str,
    ) -> Result<Self, SpecError> {
        Self::merged(specs.into_iter().map(|spec| (Origin::Spec, spec)), origin)
    }

    fn merged<'a>(
        layers: impl Iterator<Item = (Origin, &'a ClusterSpec)>,
        name: &str,
    ) -> Result<Self, SpecError> {
        let mut merged = Value::Object(Map::new());
        let mut origins = BTreeMap::new();
        for (origin, layer) in layers {
            let over = serde_json::to_value(layer)
                .unwrap_or_else(|error| panic!("a spec has a JSON form: {error}"));
            lay_over(&mut merged, over, "", origin, &mut origins);
        }
        let spec: ClusterSpec = serde_json::from_value(merged)
            .unwrap_or_else(|error| panic!("what a spec wrote can be read again: {error}"));
        origins.remove("version");
        contradictions::check(&spec).map_err(|found| found.without_place(name))?;
        Ok(Self { spec, origins })
    }
}

/// Keys whose mappings count as one value, which a layer replaces as a whole.
const WHOLE: [&str; 1] = ["gpus"];

fn lay_over(
    below: &mut Value,
    over: Value,
    path: &str,
    origin: Origin,
    origins: &mut BTreeMap<String, Origin>,
) {
    match over {
        Value::Object(entries) if !WHOLE.contains(&path) => {
            if !below.is_object() {
                *below = Value::Object(Map::new());
            }
            for (key, value) in entries {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                let slot = below.as_object_mut().map(|map| map.entry(key).or_insert(Value::Null));
                if let Some(slot) = slot {
                    lay_over(slot, value, &path, origin, origins);
                }
            }
        }
        leaf => {
            *below = leaf;
            origins.insert(path.to_owned(), origin);
        }
    }
}
