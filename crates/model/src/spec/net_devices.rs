//! Which network devices a spec asks for.
//!
//! Does not check that they exist; `plan` does.
//!
//! *Invariant:* a list is not empty, and no name in it has a blank or a comma.

use std::fmt;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::template::{Template, TemplateError};
use crate::text::did_you_mean;

/// Which NICs a worker's traffic uses.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum NetDevices {
    /// The nearest, if InfiniBand is enabled and an active NIC exists.
    #[default]
    Auto,
    /// UCX chooses.
    None,
    /// The nearest, whether or not InfiniBand is enabled.
    Pin,
    /// All NICs of the nearest level, shared out so that none is idle.
    Stripe,
    /// These, for every worker.
    List(Vec<String>),
    /// A name computed from the GPU's number.
    Template(Template),
}

const NET_DEVICES: &str = "'auto', 'none', 'pin', 'stripe', NIC ports like 'mlx5_0:1,mlx5_1:1', or \
                           a template like 'mlx5_{gpu//2}:1'";

/// Words of [`NetDevices`] that a misspelled word may mean.
const NET_WORDS: [&str; 4] = ["auto", "none", "pin", "stripe"];

impl fmt::Display for NetDevices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NetDevices::Auto => f.write_str("auto"),
            NetDevices::None => f.write_str("none"),
            NetDevices::Pin => f.write_str("pin"),
            NetDevices::Stripe => f.write_str("stripe"),
            NetDevices::List(devices) => f.write_str(&devices.join(",")),
            NetDevices::Template(template) => template.fmt(f),
        }
    }
}

impl FromStr for NetDevices {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        match text {
            "auto" => return Ok(NetDevices::Auto),
            "none" => return Ok(NetDevices::None),
            "pin" => return Ok(NetDevices::Pin),
            "stripe" => return Ok(NetDevices::Stripe),
            _ => {}
        }
        if text.contains('{') {
            let template = text.parse().map_err(|error: TemplateError| error.to_string());
            return template.map(NetDevices::Template);
        }
        // Other words may be names of NICs, so only one wrong letter counts as a misspelling.
        let slip = NET_WORDS.iter().find(|word| strsim::levenshtein(word, text) == 1);
        if let Some(word) = slip {
            return Err(format!("{text:?} is not {NET_DEVICES}; {}", did_you_mean(word)));
        }
        text.split(',').map(device_name).collect::<Result<_, _>>().map(NetDevices::List)
    }
}

fn device_name(text: &str) -> Result<String, String> {
    let name = text.trim();
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | ':' | '@');
    if name.is_empty() || name.len() > 64 || !name.chars().all(plain) {
        return Err(format!("{name:?} is not {NET_DEVICES}"));
    }
    Ok(name.to_owned())
}

impl Serialize for NetDevices {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            NetDevices::List(devices) => devices.serialize(serializer),
            word => serializer.collect_str(word),
        }
    }
}

impl<'de> Deserialize<'de> for NetDevices {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Devices;
        impl<'de> Visitor<'de> for Devices {
            type Value = NetDevices;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(NET_DEVICES)
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<NetDevices, E> {
                text.parse().map_err(E::custom)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<NetDevices, A::Error> {
                let mut devices = Vec::new();
                while let Some(DeviceName(name)) = seq.next_element()? {
                    devices.push(name);
                }
                if devices.is_empty() {
                    return Err(de::Error::custom("the list is empty; 'none' lets UCX choose"));
                }
                Ok(NetDevices::List(devices))
            }
        }
        deserializer.deserialize_any(Devices)
    }
}

/// An element of a list of network devices.
struct DeviceName(String);

impl<'de> Deserialize<'de> for DeviceName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        device_name(&text).map(DeviceName).map_err(de::Error::custom)
    }
}

impl JsonSchema for NetDevices {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "NetDevices".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "description": NET_DEVICES,
            "anyOf": [{ "type": "string" }, { "type": "array", "items": { "type": "string" } }],
        })
    }
}
