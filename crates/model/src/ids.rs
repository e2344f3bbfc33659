//! Words for devices and clusters: what a thing is, where it sits, and which number people give it.
//!
//! Does not look anything up; it only parses and prints.
//!
//! *Invariant:* identity ([`GpuUuid`]), place ([`PciAddress`]) and index ([`GpuIndex`]) are three
//! types, so that none can be used to look up another.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The scheduler's name among the processes of a cluster.
pub const SCHEDULER: &str = "scheduler";

/// The control API's socket in a run directory, without its extension.
pub const CONTROL: &str = "control";

/// The fork server's socket in a run directory, without its extension.
pub const FORK_SERVER: &str = "fork";

/// The socket at which ranks of MPI find each other.
pub const RANKS: &str = "ranks";

/// The server of PMIx, its log and its files.
pub const PMIX: &str = "pmix";

/// What no worker may be called: the other processes of a cluster, and their sockets.
pub const RESERVED: [&str; 7] =
    [SCHEDULER, CONTROL, FORK_SERVER, RANKS, PMIX, "supervisor", "guardian"];

/// A GPU's number in NVML order, for people. CUDA's order is the same only under
/// `CUDA_DEVICE_ORDER=PCI_BUS_ID`.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    schemars::JsonSchema,
)]
#[serde(transparent)]
pub struct GpuIndex(pub u32);

impl fmt::Display for GpuIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A NUMA node's number as the operating system counts it. Sparse on some machines (POWER9: 0, 8).
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    schemars::JsonSchema,
)]
#[serde(transparent)]
pub struct NumaId(pub u32);

impl fmt::Display for NumaId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The error for a text that is not an identifier of the expected kind.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not {expected}")]
pub struct IdError {
    /// The text as it was given, cut after 80 characters.
    pub text: String,
    /// What it should have been, with an example.
    pub expected: &'static str,
}

impl IdError {
    fn new(text: &str, expected: &'static str) -> Self {
        Self { text: text.chars().take(80).collect(), expected }
    }
}

/// Serialises a type through its text form.
macro_rules! text_form {
    ($type:ty) => {
        impl Serialize for $type {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = String::deserialize(deserializer)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }

        impl schemars::JsonSchema for $type {
            fn schema_name() -> std::borrow::Cow<'static, str> {
                stringify!($type).into()
            }

            fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
                schemars::json_schema!({ "type": "string" })
            }
        }
    };
}
pub(crate) use text_form;

/// A GPU's or MIG instance's identity, as NVML and CUDA spell it: `GPU-…` or `MIG-…`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpuUuid(String);

/// The bytes of a UUID as text: `8a1c9d00-…`.
pub fn uuid_text(bytes: [u8; 16]) -> String {
    let digits = format!("{:032x}", u128::from_be_bytes(bytes));
    let parts = [&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]];
    parts.join("-")
}

impl GpuUuid {
    /// The text, with its `GPU-` or `MIG-` prefix.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// A whole GPU's, from the bytes that CUDA has (`CUuuid`); `None` if all are zero.
    pub fn of_bytes(bytes: [u8; 16]) -> Option<Self> {
        (bytes != [0; 16]).then(|| Self(format!("GPU-{}", uuid_text(bytes))))
    }

    /// Whether every digit is zero, as some anonymisers leave it: then several GPUs may share it.
    pub(crate) fn is_zeroed(&self) -> bool {
        self.0.chars().skip("GPU-".len()).all(|c| matches!(c, '0' | '-'))
    }

    /// A made-up identity that contains only a number.
    pub(crate) fn numbered(mig: bool, number: usize) -> Self {
        let kind = if mig { "MIG" } else { "GPU" };
        Self(format!("{kind}-00000000-0000-0000-0000-{number:012}"))
    }

    /// Whether this names a MIG instance rather than a whole GPU.
    pub fn is_mig(&self) -> bool {
        self.0.starts_with("MIG-")
    }
}

impl fmt::Display for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for GpuUuid {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        let known = text.strip_prefix("GPU-").or_else(|| text.strip_prefix("MIG-"));
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '/');
        match known {
            Some(rest) if !rest.is_empty() && rest.len() <= 92 && rest.chars().all(plain) => {
                Ok(Self(text.to_owned()))
            }
            _ => Err(IdError::new(text, "a GPU UUID, like GPU-8a1c9d00-… or MIG-…")),
        }
    }
}

text_form!(GpuUuid);

/// A PCI function's place: `domain:bus:device.function`, all hexadecimal.
///
/// Ordered as `CUDA_DEVICE_ORDER=PCI_BUS_ID` orders devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    /// PCI segment group; wider than 16 bits on some virtual machines.
    pub domain: u32,
    /// Bus number; it depends on the other devices in the machine, so it says nothing about
    /// distance.
    pub bus: u8,
    /// Device number, below 32.
    pub device: u8,
    /// Function number, below 8.
    pub function: u8,
}

impl fmt::Display for PciAddress {
    /// As the kernel prints it in sysfs: at least four digits of domain, lower case.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { domain, bus, device, function } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
    }
}

impl FromStr for PciAddress {
    type Err = IdError;

    /// Reads `0000:07:00.0`, NVML's `00000000:07:00.0`, and `07:00.0` (domain 0), in any case.
    fn from_str(text: &str) -> Result<Self, IdError> {
        parse_pci(text).ok_or_else(|| IdError::new(text, "a PCI address, like 0000:07:00.0"))
    }
}

fn parse_pci(text: &str) -> Option<PciAddress> {
    let hex = |part: &str, digits: usize| {
        let plain =
            !part.is_empty() && part.len() <= digits && part.bytes().all(|b| b.is_ascii_hexdigit());
        plain.then(|| u32::from_str_radix(part, 16).ok()).flatten()
    };
    let (place, function) = text.rsplit_once('.')?;
    let (rest, device) = place.rsplit_once(':')?;
    let (domain, bus) = rest.rsplit_once(':').unwrap_or(("0", rest));
    let device = u8::try_from(hex(device, 2)?).ok().filter(|d| *d < 32)?;
    let function = u8::try_from(hex(function, 1)?).ok().filter(|f| *f < 8)?;
    Some(PciAddress {
        domain: hex(domain, 8)?,
        bus: u8::try_from(hex(bus, 2)?).ok()?,
        device,
        function,
    })
}

text_form!(PciAddress);

/// One port of a NIC as UCX names it: `mlx5_0:1`; or a NIC that only its column names: `NIC3`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NicPort {
    /// RDMA device name, as in `/sys/class/infiniband`, or the column's of `nvidia-smi topo -m`.
    pub nic: String,
    /// Port number, from 1; `None` for a column's name, which UCX cannot open.
    pub port: Option<u32>,
}

/// Whether a NIC is named like a column of `nvidia-smi topo -m` (`NIC3`) rather than by its device.
pub(crate) fn is_nic_column(name: &str) -> bool {
    let digits = name.strip_prefix("NIC");
    digits.is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit()))
}

/// Whether a NIC is an Elastic Fabric Adapter, by rdma-core's name (`rdmap16s27`) or the kernel's.
pub(crate) fn is_elastic(name: &str) -> bool {
    name.starts_with("rdmap") || name.starts_with("efa_")
}

impl fmt::Display for NicPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.port {
            Some(port) => write!(f, "{}:{port}", self.nic),
            None => f.write_str(&self.nic),
        }
    }
}

impl FromStr for NicPort {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        if is_nic_column(text) {
            return Ok(Self { nic: text.to_owned(), port: None });
        }
        let error = || IdError::new(text, "a NIC port, like mlx5_0:1");
        let (nic, port) = text.rsplit_once(':').ok_or_else(error)?;
        let port = port.parse().ok().filter(|p| (1..=255).contains(p)).ok_or_else(error)?;
        if nic.is_empty()
            || nic.contains(|c: char| c.is_whitespace() || matches!(c, ':' | ',' | '/'))
        {
            return Err(error());
        }
        Ok(Self { nic: nic.to_owned(), port: Some(port) })
    }
}

text_form!(NicPort);

/// A cluster's name: also a directory name, so letters, digits, `-`, `_` and `.`, at most 40.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClusterName(String);

impl ClusterName {
    /// The name, as used for directories and in commands.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Default for ClusterName {
    fn default() -> Self {
        Self("default".to_owned())
    }
}

impl fmt::Display for ClusterName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for ClusterName {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        let good = text.len() <= 40
            && text.starts_with(|c: char| c.is_ascii_alphanumeric())
            && text.chars().all(plain);
        if good {
            Ok(Self(text.to_owned()))
        } else {
            Err(IdError::new(
                text,
                "a cluster name: letters, digits, '-', '_', '.'; at most 40, a letter or digit first",
            ))
        }
    }
}

text_form!(ClusterName);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_pci_address_reads_in_every_spelling_of_the_field() {
        let place = PciAddress { domain: 0, bus: 0x1b, device: 0, function: 0 };
        for text in ["0000:1b:00.0", "00000000:1B:00.0", "1b:00.0"] {
            assert_eq!(text.parse(), Ok(place), "{text}");
        }
        assert_eq!("10001:00:02.0".parse::<PciAddress>().map(|p| p.domain), Ok(0x10001));
    }

    #[test]
    fn what_is_no_pci_address_is_refused() {
        for text in [
            "",
            ".",
            "1b:00",
            "1b:20.0",
            "1b:00.8",
            "zz:00.0",
            "0000:1b:00.0 ",
            "+1:00.0",
            "0:1b:0:00.0",
        ] {
            assert!(text.parse::<PciAddress>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_cluster_name_cannot_leave_its_directory() {
        for text in ["", "..", "a/b", "-x", ".hidden", "a b", &"x".repeat(41)] {
            assert!(text.parse::<ClusterName>().is_err(), "{text:?}");
        }
        assert!("demo-1.a_b".parse::<ClusterName>().is_ok());
    }

    proptest! {
        #[test]
        fn a_pci_address_survives_its_text(domain in 0u32.., bus in 0u8.., device in 0u8..32, function in 0u8..8) {
            let place = PciAddress { domain, bus, device, function };
            prop_assert_eq!(place.to_string().parse(), Ok(place));
        }

        #[test]
        fn no_text_makes_the_parsers_panic(text in ".{0,40}") {
            let _ = text.parse::<PciAddress>();
            let _ = text.parse::<NicPort>();
            let _ = text.parse::<GpuUuid>();
            let _ = text.parse::<ClusterName>();
        }
    }
}
