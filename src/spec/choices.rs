//! The values that a spec chooses among, with their text forms.
//!
//! Does not judge whether a choice fits the machine.
//!
//! *Invariant:* every choice prints as it is read.

use std::fmt;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, SeqAccess, Visitor, value::MapAccessDeserializer};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::template::Template;
use crate::ids::{GpuIndex, GpuUuid, PciAddress, text_form};
use crate::units::{Size, UnitError};

/// Declares an enum of plain words that prints as serde writes it.
macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $word:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
        pub enum $name {
            $($(#[$variant_doc])* #[serde(rename = $word)] $variant,)*
        }

        impl $name {
            /// Every word, in the order of the documentation.
            pub const WORDS: &[&str] = &[$($word),*];
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(match self { $($name::$variant => $word,)* })
            }
        }

        impl FromStr for $name {
            type Err = UnitError;

            fn from_str(text: &str) -> Result<Self, UnitError> {
                match text {
                    $($word => Ok($name::$variant),)*
                    _ => Err(UnitError {
                        text: text.chars().take(40).collect(),
                        expected: concat!("one of:" $(, " ", $word)*),
                    }),
                }
            }
        }
    };
}

words! {
    /// What runs in a cluster's processes.
    EngineKind {
        /// Our own scheduler and workers.
        #[default]
        Native = "native",
        /// Dask's scheduler and workers.
        Dask = "dask",
        /// Any program, one rank per GPU.
        Command = "command",
    }
}

words! {
    /// How a process's memory is placed (`set_mempolicy(2)`).
    MemoryPolicy {
        /// On the given nodes while they have room (`MPOL_PREFERRED_MANY`).
        #[default]
        Preferred = "preferred",
        /// Only on the given nodes (`MPOL_BIND`).
        Bind = "bind",
        /// Untouched.
        None = "none",
    }
}

words! {
    /// When a dead worker is started again.
    RestartWhen {
        /// Never.
        Never = "never",
        /// When it was ended by a signal or a non-zero status.
        #[default]
        OnFailure = "on-failure",
        /// Whenever it ends, unless it was stopped or retired.
        Always = "always",
    }
}

words! {
    /// What a dead scheduler means for the cluster.
    SchedulerDeath {
        /// The whole cluster is started again.
        #[default]
        RestartCluster = "restart-cluster",
        /// The cluster ends.
        EndCluster = "end-cluster",
    }
}

words! {
    /// Which CPUs a worker gets.
    CpuBinding {
        /// All CPUs near its GPU that are allowed; workers of one NUMA node share them.
        #[default]
        Local = "local",
        /// Whole cores of these, disjoint among the workers.
        Split = "split",
        /// Whatever the supervisor has.
        None = "none",
    }
}

words! {
    /// What to do with GPUs that are perhaps not meant for a cluster.
    Treatment {
        /// Leave them out, and say so.
        Skip = "skip",
        /// Use them, and say so.
        #[default]
        Warn = "warn",
        /// Use them.
        Use = "use",
    }
}

words! {
    /// Whose UCX variables are set.
    UcxCompat {
        /// Our own.
        #[default]
        None = "none",
        /// Exactly dask-cuda's.
        Dask = "dask",
    }
}

words! {
    /// Settings by GPU architecture and UCX version.
    UcxPreset {
        /// Those that fit the machine.
        #[default]
        Auto = "auto",
        /// None.
        None = "none",
    }
}

words! {
    /// What `CUDA_VISIBLE_DEVICES` shows a process.
    VisibleDevices {
        /// Every chosen GPU in order; the process selects its own by number.
        #[default]
        All = "all",
        /// Every chosen GPU, the process's own first.
        Rotated = "rotated",
        /// The process's own GPU alone; CUDA IPC cannot reach peers then.
        Own = "own",
    }
}

/// How `{count: N}` chooses.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum ChooseBy {
    /// The set whose slowest pair is fastest, then whose sum is largest.
    #[default]
    BestConnected,
    /// The first in order.
    First,
}

/// Some of the GPUs, by number.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ChooseGpus {
    /// How many.
    pub count: u32,
    /// By what.
    #[serde(default)]
    pub choose: ChooseBy,
}

/// Which GPUs get workers.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum GpuSelection {
    /// Every visible one.
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
    /// By UUID, or a beginning of it that only one has.
    Uuid(GpuUuid),
    /// By place.
    Pci(PciAddress),
    /// A MIG instance by its GPU's index and its position there: `0:1`.
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

/// More GPUs than any machine has; keeps `0-4000000000` from becoming a list.
const GPU_LIMIT: u32 = 1024;

fn unit_error(text: &str, expected: &'static str) -> UnitError {
    UnitError { text: text.chars().take(60).collect(), expected }
}

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
        let mig = text.split_once(':').and_then(|(g, i)| Some((small_number(g)?, small_number(i)?)));
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
                index.map(|n| GpuName::Index(GpuIndex(n))).ok_or_else(|| {
                    E::custom(format!("a GPU index is below {GPU_LIMIT}"))
                })
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

/// A limit: automatic, none, or a size.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Limit {
    /// Worked out from the machine.
    #[default]
    Auto,
    /// No limit.
    None,
    /// This much.
    Size(Size),
}

const LIMIT: &str =
    "a limit: 'auto', 'none', bytes, '5GB', '5000MiB', or a fraction of the whole like 0.8";

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Limit::Auto => f.write_str("auto"),
            Limit::None => f.write_str("none"),
            Limit::Size(size) => size.fmt(f),
        }
    }
}

impl FromStr for Limit {
    type Err = UnitError;

    /// `0` means no limit, and `default` is automatic, as in dask-cuda.
    fn from_str(text: &str) -> Result<Self, UnitError> {
        match text.trim() {
            "auto" | "default" => Ok(Limit::Auto),
            "none" | "0" => Ok(Limit::None),
            size => size.parse().map(Limit::Size).map_err(|_| unit_error(text, LIMIT)),
        }
    }
}

/// Ports, inclusive on both sides; 0 alone means any free one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortRange {
    /// The first.
    pub low: u16,
    /// The last.
    pub high: u16,
}

const PORTS: &str = "a port like 8786 or a range like 8786:8800";

impl PortRange {
    /// How many ports there are; `None` when any free one will do.
    pub fn count(self) -> Option<u32> {
        (self.low != 0).then(|| u32::from(self.high) - u32::from(self.low) + 1)
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.low == self.high {
            write!(f, "{}", self.low)
        } else {
            write!(f, "{}:{}", self.low, self.high)
        }
    }
}

impl FromStr for PortRange {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let error = || unit_error(text, PORTS);
        let port = |digits: &str| {
            let plain = digits.bytes().all(|b| b.is_ascii_digit());
            plain.then(|| digits.parse::<u16>().ok()).flatten().ok_or_else(error)
        };
        let text = text.trim();
        let (low, high) = text.split_once(':').unwrap_or((text, text));
        let (low, high) = (port(low)?, port(high)?);
        if low > high || (low == 0 && high != 0) { Err(error()) } else { Ok(Self { low, high }) }
    }
}

/// A UCX version, `major.minor`; a patch level is read and dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct UcxVersion {
    /// Major version.
    pub major: u32,
    /// Minor version.
    pub minor: u32,
}

impl fmt::Display for UcxVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl FromStr for UcxVersion {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let mut parts = text.trim().splitn(3, '.').map(|part| part.parse::<u32>().ok());
        match (parts.next().flatten(), parts.next().flatten()) {
            (Some(major), Some(minor)) => Ok(Self { major, minor }),
            _ => Err(unit_error(text, "a UCX version, like 1.18")),
        }
    }
}

text_form!(UcxVersion);

/// Which NICs a worker's traffic uses.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum NetDevices {
    /// The nearest, when InfiniBand is enabled and there is an active one.
    #[default]
    Auto,
    /// UCX chooses.
    None,
    /// The nearest, whether InfiniBand was asked for or not.
    Pin,
    /// All NICs of the nearest level, shared out so that none idles.
    Stripe,
    /// These, for every worker.
    List(Vec<String>),
    /// One worked out from the GPU's number.
    Template(Template),
}

const NET_DEVICES: &str = "'auto', 'none', 'pin', 'stripe', NIC ports like 'mlx5_0:1,mlx5_1:1', or \
                           a template like 'mlx5_{gpu//2}:1'";

/// Words of [`NetDevices`] that a slip of the pen may mean.
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
            return text.parse().map(NetDevices::Template).map_err(
                |error: super::template::TemplateError| error.to_string(),
            );
        }
        let slip = NET_WORDS.iter().find(|word| strsim::levenshtein(word, text) == 1);
        if let Some(word) = slip {
            return Err(format!("{text:?} is not {NET_DEVICES}; did you mean '{word}'?"));
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

/// Serialises a type that reads from a text or a plain number.
macro_rules! text_or_number {
    ($type:ty, $expected:expr) => {
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Text;
                impl Visitor<'_> for Text {
                    type Value = $type;

                    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                        f.write_str($expected)
                    }

                    fn visit_u64<E: de::Error>(self, number: u64) -> Result<$type, E> {
                        number.to_string().parse().map_err(E::custom)
                    }

                    fn visit_f64<E: de::Error>(self, number: f64) -> Result<$type, E> {
                        format!("{number:?}").parse().map_err(E::custom)
                    }

                    fn visit_str<E: de::Error>(self, text: &str) -> Result<$type, E> {
                        text.parse().map_err(E::custom)
                    }
                }
                deserializer.deserialize_any(Text)
            }
        }

        impl JsonSchema for $type {
            fn schema_name() -> std::borrow::Cow<'static, str> {
                stringify!($type).into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!({ "type": ["number", "string"], "description": $expected })
            }
        }
    };
}

text_or_number!(Limit, LIMIT);
text_or_number!(PortRange, PORTS);
