//! The values that a spec chooses among, with their text forms.
//!
//! Does not check whether a choice fits the machine.
//!
//! *Invariant:* every choice is printed in the form in which it is read.

use std::fmt;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::value::MapAccessDeserializer;
use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::ids::text_form;
use crate::units::{Size, UnitError};

/// Declares an enum of words that is printed as serde writes it.
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
    /// How the native scheduler chooses a task's worker.
    Placement {
        /// The worker with the earliest estimated finish, from the known links and run times.
        #[default]
        EstimatedFinish = "estimated-finish",
        /// All workers in turn, for comparison.
        RoundRobin = "round-robin",
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
        /// No policy; the supervisor's applies.
        None = "none",
    }
}

words! {
    /// How Dask's names of the workers are chosen.
    WorkerNames {
        /// The name of the process: `gpu3`.
        #[default]
        Process = "process",
        /// dask-cuda's name: the GPU's index (3), or its UUID if GPUs were requested by UUID.
        Gpu = "gpu",
    }
}

words! {
    /// When a dead worker is started again.
    RestartWhen {
        /// Never; the others go on.
        Never = "never",
        /// If it ended by a signal or with a non-zero status.
        #[default]
        OnFailure = "on-failure",
        /// Always, unless it was stopped or retired on purpose.
        Always = "always",
    }
}

words! {
    /// What happens to a process that has not answered in time.
    Unresponsive {
        /// Nothing: it may have been stopped on purpose, or a task may block it.
        #[default]
        Wait = "wait",
        /// It is ended and treated like any other process that died.
        Restart = "restart",
    }
}

words! {
    /// What happens to the cluster when its scheduler dies.
    SchedulerDeath {
        /// It is started again, and so are the workers, which end with it.
        #[default]
        RestartCluster = "restart-cluster",
        /// The cluster has failed; the scheduler's death is the cause.
        EndCluster = "end-cluster",
    }
}

words! {
    /// Which CPUs a worker gets.
    CpuBinding {
        /// All allowed CPUs near its GPU; workers of one NUMA node share them.
        #[default]
        Local = "local",
        /// Whole cores near its GPU, different ones for each worker.
        Split = "split",
        /// The CPUs of the supervisor.
        None = "none",
    }
}

words! {
    /// What to do with GPUs that may not be meant for a cluster.
    Treatment {
        /// Leave them out, with a note.
        Skip = "skip",
        /// Use them, with a note.
        #[default]
        Warn = "warn",
        /// Use them, without a note.
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
        /// The settings that fit the machine.
        #[default]
        Auto = "auto",
        /// None: UCX's defaults.
        None = "none",
    }
}

words! {
    /// What `CUDA_VISIBLE_DEVICES` shows a process.
    VisibleDevices {
        /// Every chosen GPU in order; the program selects its own by number.
        #[default]
        All = "all",
        /// Every chosen GPU, the process's own first.
        Rotated = "rotated",
        /// Only the process's own GPU, which rules out CUDA IPC with peers.
        Own = "own",
    }
}

words! {
    /// In whose language ranks are told of each other, beside `RANK` and its like.
    Bootstrap {
        /// torchrun's whole set.
        #[default]
        Torch = "torch",
        /// `OMP_NUM_THREADS`: a rank's share of the CPUs that it is bound to.
        Threads = "threads",
        /// `NCCL_RAS_ADDR`, of the job's own.
        Nccl = "nccl",
        /// What `jax.distributed.initialize()` looks for.
        Jax = "jax",
        /// PMI-1 and PMI-2.
        Mpi = "mpi",
        /// RapidsMPF's.
        Rrun = "rrun",
        /// PMIx, in place of PMI.
        Pmix = "pmix",
    }
}

impl Bootstrap {
    /// Every language, in the order of the documentation.
    pub const ALL: [Self; 7] =
        [Self::Torch, Self::Threads, Self::Nccl, Self::Jax, Self::Mpi, Self::Rrun, Self::Pmix];

    /// Those that nobody has to ask for: the ones that don't hurt each other. MPICH refuses to
    /// start where it finds PMI and PMIx, and PMIx needs a library.
    pub const USUAL: [Self; 6] =
        [Self::Torch, Self::Threads, Self::Nccl, Self::Jax, Self::Mpi, Self::Rrun];
}

pub(super) fn unit_error(text: &str, expected: &'static str) -> UnitError {
    UnitError { text: text.chars().take(60).collect(), expected }
}

/// A limit: automatic, none, or a size.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Limit {
    /// Derived from the machine.
    #[default]
    Auto,
    /// No limit.
    None,
    /// This many bytes, or this fraction of the whole.
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
            size => size.parse().map(Limit::Size).map_err(|error: UnitError| {
                // For a number that is out of range, the size's own error says more.
                let digits = size.bytes().all(|byte| byte.is_ascii_digit());
                if digits && !size.is_empty() { error } else { unit_error(text, LIMIT) }
            }),
        }
    }
}

/// A resource limit of a process, as `ulimit` sets them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ulimit {
    /// The limit in force.
    pub soft: Most,
    /// How far a process may raise it; as it is, or higher if it must be, if not given.
    pub hard: Option<Most>,
}

/// What a resource limit permits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Most {
    /// A number of bytes, or a count.
    At(u64),
    /// No limit.
    Unlimited,
}

const MOST: &str = "'unlimited', a number, or bytes like '64MiB'";

const ULIMIT: &str = "a limit: 'unlimited', a number, bytes like '64MiB', 'SOFT:HARD', or \
                      {soft: 1024, hard: 4096}, where the soft one is not the larger";

impl fmt::Display for Most {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Most::Unlimited => f.write_str("unlimited"),
            Most::At(most) => most.fmt(f),
        }
    }
}

impl FromStr for Most {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        match (text.trim(), text.parse()) {
            ("unlimited", _) => Ok(Most::Unlimited),
            (_, Ok(Size::Bytes(most))) => Ok(Most::At(most)),
            _ => Err(unit_error(text, MOST)),
        }
    }
}

impl fmt::Display for Ulimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.soft.fmt(f)?;
        self.hard.map_or(Ok(()), |hard| write!(f, ":{hard}"))
    }
}

impl FromStr for Ulimit {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let wrong = |_| unit_error(text, ULIMIT);
        let (soft, hard) = match text.split_once(':') {
            None => (text, None),
            Some((soft, hard)) => (soft, Some(hard.parse().map_err(wrong)?)),
        };
        let soft = soft.parse().map_err(wrong)?;
        let possible = hard.is_none_or(|hard| soft <= hard);
        if possible { Ok(Self { soft, hard }) } else { Err(unit_error(text, ULIMIT)) }
    }
}

/// A soft and a hard limit as keys.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Both {
    soft: Most,
    hard: Most,
}

impl Both {
    fn text(&self) -> String {
        format!("{}:{}", self.soft, self.hard)
    }
}

/// A range of ports, both ends included; 0 means any free port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortRange {
    /// The first port of the range.
    pub low: u16,
    /// The last port, inclusive.
    pub high: u16,
}

const PORTS: &str = "a port like 8786 or a range like 8786:8800";

impl PortRange {
    /// The number of ports; `None` if any free port will do.
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

/// A UCX version, `major.minor`; a patch level is accepted and ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct UcxVersion {
    /// 1 in `1.18`.
    pub major: u32,
    /// 18 in `1.18`.
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
        // UCX itself keeps each of them in eight bits (`UCP_VERSION` in `ucp.h`).
        let mut parts = text.trim().splitn(3, '.').map(|part| part.parse::<u8>().ok());
        match (parts.next().flatten(), parts.next().flatten()) {
            (Some(major), Some(minor)) => Ok(Self { major: major.into(), minor: minor.into() }),
            _ => Err(unit_error(text, "a UCX version, like 1.18")),
        }
    }
}

text_form!(UcxVersion);

/// Serialises a type that reads from a text or a plain number.
macro_rules! text_or_number {
    ($type:ty, $expected:expr $(, $keys:ty)?) => {
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Text;
                impl<'de> Visitor<'de> for Text {
                    type Value = $type;

                    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                        f.write_str($expected)
                    }

                    fn visit_u64<E: de::Error>(self, number: u64) -> Result<$type, E> {
                        number.to_string().parse().map_err(E::custom)
                    }

                    fn visit_u128<E: de::Error>(self, number: u128) -> Result<$type, E> {
                        number.to_string().parse().map_err(E::custom)
                    }

                    fn visit_f64<E: de::Error>(self, number: f64) -> Result<$type, E> {
                        Size::Fraction(number).to_string().parse().map_err(E::custom)
                    }

                    fn visit_str<E: de::Error>(self, text: &str) -> Result<$type, E> {
                        text.parse().map_err(E::custom)
                    }
                    $(
                        fn visit_map<A: de::MapAccess<'de>>(self, map: A) -> Result<$type, A::Error> {
                            let keys = <$keys>::deserialize(MapAccessDeserializer::new(map))?;
                            keys.text().parse().map_err(de::Error::custom)
                        }
                    )?
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
text_or_number!(Most, MOST);
text_or_number!(Ulimit, ULIMIT, Both);
text_or_number!(PortRange, PORTS);
