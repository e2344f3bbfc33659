//! Which GPUs a spec asks for, and how it names them.
//!
//! Does not look them up; `plan` does.
//!
//! *Invariant:* the form of a name tells whether it is an index, a UUID or a PCI address.

use std::fmt;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, SeqAccess, Visitor, value::MapAccessDeserializer};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::choices::unit_error;
use crate::ids::{GpuIndex, GpuUuid, PciAddress};
use crate::units::UnitError;

/// How `{count: N}` chooses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ChooseBy {
    /// The set with the fastest slowest pair; among equals, the one with the largest sum.
    #[default]
    BestConnected,
    /// The first in order.
    First,
}

/// A number of GPUs, and how to choose them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ChooseGpus {
    /// How many.
    pub count: u32,
    /// How to choose them.
    #[serde(default)]
    pub choose: ChooseBy,
}

/// Which GPUs get workers.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum GpuSelection {
    /// All visible GPUs.
    #[default]
    All,
    /// None: a cluster of CPU workers.
    None,
    /// These, in this order.
    List(Vec<GpuName>),
    /// This many of the visible ones.
    Choose(ChooseGpus),
}

/// A GPU or MIG instance as people name it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum GpuName {
    /// By NVML index.
    Index(GpuIndex),
    /// By UUID, or a unique prefix of it.
    Uuid(GpuUuid),
    /// By PCI address.
    Pci(PciAddress),
    /// A MIG instance, by its GPU's index and its position on that GPU: `0:1`.
    Mig(GpuIndex, u32),
}

impl fmt::Display for GpuName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GpuName::Index(index) => index.fmt(f),
            GpuName::Uuid(uuid) => uuid.fmt(f),
            GpuName::Pci(pci) => pci.fmt(f),
            GpuName::Mig(gpu, instance) => write!(f, "{gpu}:{instance}"),
        }
    }
}

const GPU_NAME: &str = "a GPU: an index, a UUID like GPU-8a1c9d00, a PCI address like \
                        0000:07:00.0, or a MIG instance like 0:1 or MIG-…";
const GPUS: &str = "'all', 'none', GPUs like '0-3,6', a list of indices, UUIDs, PCI addresses or \
                    MIG instances, or {count: 4, choose: best-connected}";

/// More GPUs than any machine has; prevents a list for `0-4000000000`.
const GPU_LIMIT: u32 = 1024;

fn small_number(text: &str) -> Option<u32> {
    let plain = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    plain.then(|| text.parse().ok()).flatten().filter(|n| *n < GPU_LIMIT)
}

impl FromStr for GpuName {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let text = text.trim();
        if let Some(index) = small_number(text) {
            return Ok(GpuName::Index(GpuIndex(index)));
        }
        if let Ok(uuid) = text.parse() {
            return Ok(GpuName::Uuid(uuid));
        }
        if let Ok(pci) = text.parse() {
            return Ok(GpuName::Pci(pci));
        }
        let mig =
            text.split_once(':').and_then(|(g, i)| Some((small_number(g)?, small_number(i)?)));
        mig.map(|(gpu, instance)| GpuName::Mig(GpuIndex(gpu), instance))
            .ok_or_else(|| unit_error(text, GPU_NAME))
    }
}

/// Reads one part of a list: a name, or a range of indices.
fn gpu_names(part: &str) -> Result<Vec<GpuName>, UnitError> {
    let part = part.trim();
    if let Some((low, high)) = part.split_once('-')
        && let (Some(low), Some(high)) = (small_number(low), small_number(high))
    {
        if low > high {
            return Err(unit_error(part, "a range that runs upwards, like 0-3"));
        }
        return Ok((low..=high).map(|index| GpuName::Index(GpuIndex(index))).collect());
    }
    Ok(vec![part.parse()?])
}

impl FromStr for GpuSelection {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        match text.trim() {
            "all" => Ok(GpuSelection::All),
            "none" => Ok(GpuSelection::None),
            "" => Err(unit_error(text, GPUS)),
            list => {
                let parts: Result<Vec<_>, _> = list.split(',').map(gpu_names).collect();
                Ok(GpuSelection::List(parts?.into_iter().flatten().collect()))
            }
        }
    }
}

impl Serialize for GpuName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            GpuName::Index(index) => index.serialize(serializer),
            other => serializer.collect_str(other),
        }
    }
}

impl<'de> Deserialize<'de> for GpuName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Name;
        impl Visitor<'_> for Name {
            type Value = GpuName;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(GPU_NAME)
            }

            fn visit_u64<E: de::Error>(self, index: u64) -> Result<GpuName, E> {
                let index = u32::try_from(index).ok().filter(|n| *n < GPU_LIMIT);
                index
                    .map(|n| GpuName::Index(GpuIndex(n)))
                    .ok_or_else(|| E::custom(format!("a GPU index is below {GPU_LIMIT}")))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<GpuName, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Name)
    }
}

impl JsonSchema for GpuName {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "GpuName".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": ["integer", "string"], "description": GPU_NAME })
    }
}

impl Serialize for GpuSelection {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            GpuSelection::All => serializer.serialize_str("all"),
            GpuSelection::None => serializer.serialize_str("none"),
            GpuSelection::List(names) => serializer.collect_seq(names),
            GpuSelection::Choose(choose) => choose.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for GpuSelection {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Selection;
        impl<'de> Visitor<'de> for Selection {
            type Value = GpuSelection;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(GPUS)
            }

            fn visit_u64<E: de::Error>(self, index: u64) -> Result<GpuSelection, E> {
                index.to_string().parse().map_err(E::custom)
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<GpuSelection, E> {
                text.parse().map_err(E::custom)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<GpuSelection, A::Error> {
                let mut names = Vec::new();
                while let Some(Names(more)) = seq.next_element()? {
                    names.extend(more);
                }
                Ok(GpuSelection::List(names))
            }

            fn visit_map<A: de::MapAccess<'de>>(self, map: A) -> Result<GpuSelection, A::Error> {
                ChooseGpus::deserialize(MapAccessDeserializer::new(map)).map(GpuSelection::Choose)
            }
        }
        deserializer.deserialize_any(Selection)
    }
}

/// An element of a list of GPUs: one, or a range of indices.
struct Names(Vec<GpuName>);

impl<'de> Deserialize<'de> for Names {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Element;
        impl Visitor<'_> for Element {
            type Value = Names;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(GPU_NAME)
            }

            fn visit_u64<E: de::Error>(self, index: u64) -> Result<Names, E> {
                self.visit_str(&index.to_string())
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Names, E> {
                gpu_names(text).map(Names).map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Element)
    }
}

impl JsonSchema for GpuSelection {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "GpuSelection".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let name = generator.subschema_for::<GpuName>();
        let choose = generator.subschema_for::<ChooseGpus>();
        json_schema!({
            "description": GPUS,
            "anyOf": [{ "type": ["string", "integer"] }, { "type": "array", "items": name }, choose],
        })
    }
}
