//! What the caller's surroundings say, as a value.
//!
//! Does not read the environment; the command line and the embedded API do.
//!
//! *Invariant:* whatever a plan depends on besides topology and spec is in here.

use core::net::IpAddr;
use std::collections::BTreeMap;

use crate::spec::UcxVersion;

/// What surrounds the caller: variables, interfaces, limits.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CallerEnvironment {
    /// Environment variables; only `UCX_*`, `UCXPY_*`, `NCCL_*`, `CUDA_VISIBLE_DEVICES` and the
    /// thread numbers of libraries matter.
    pub variables: BTreeMap<String, String>,
    /// Network interfaces that are up.
    pub interfaces: Vec<Interface>,
    /// The UCX that will be used, where it is known.
    pub ucx_version: Option<UcxVersion>,
    /// Every libucp that is installed, the preferred first.
    pub ucx_libraries: Vec<InstalledUcx>,
    /// The memory policy that the caller was started with (`numactl`), like `bind 1`; `None` for
    /// the usual one.
    pub memory_policy: Option<String>,
    /// Most memory that the caller's cgroup may use, in bytes; `None` for no limit.
    pub memory_limit_bytes: Option<u64>,
}

/// A libucp of the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstalledUcx {
    /// Its path.
    pub path: String,
    /// What it belongs to, for people.
    pub whose: String,
    /// Whether it comes with CUDA transports.
    pub cuda: bool,
    /// Whether it comes with transports for InfiniBand and RoCE (verbs).
    pub verbs: bool,
}

/// A network interface of the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// Its name, like `eth0`.
    pub name: String,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
    /// Whether the machine's main address, the one that others are told, is on it.
    pub main: bool,
}
