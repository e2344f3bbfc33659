//! What the parts of a plan decide from: the caller's surroundings, the chosen GPUs, the workers to
//! be.
//!
//! Reads no environment; the command line and the embedded API do.
//!
//! *Invariant:* whatever a plan depends on besides topology and spec is in [`CallerEnvironment`].

use core::net::IpAddr;
use std::collections::BTreeMap;

use super::form::Rejected;
use crate::spec::{ClusterSpec, EngineKind, GpuName, MatchSpec, OverrideSpec, UcxVersion};
use crate::topology::{Gpu, MigInstance, Topology};

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

/// A GPU, or a MIG instance of one, that gets workers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chosen<'a> {
    pub(super) gpu: &'a Gpu,
    pub(super) mig: Option<(usize, &'a MigInstance)>,
}

impl Chosen<'_> {
    /// The worker's name, before several workers share it: `gpu3`, `gpu3.mig1`.
    pub(super) fn name(&self) -> String {
        match self.mig {
            Some((at, _)) => format!("gpu{}.mig{at}", self.gpu.index),
            None => format!("gpu{}", self.gpu.index),
        }
    }

    /// Memory of the GPU, or of the instance.
    pub(super) fn memory_bytes(&self) -> Option<u64> {
        self.mig.map_or(self.gpu.memory_bytes, |(_, instance)| instance.memory_bytes)
    }

    pub(super) fn is_same(&self, other: &Chosen<'_>) -> bool {
        self.gpu.index == other.gpu.index
            && self.mig.map(|(at, _)| at) == other.mig.map(|(at, _)| at)
    }
}

/// The choice.
#[derive(Clone, Debug, Default)]
pub(super) struct Selected<'a> {
    /// In rank order.
    pub(super) chosen: Vec<Chosen<'a>>,
    /// Whether the user named them by UUID.
    pub(super) by_uuid: bool,
    /// Whether the caller's `CUDA_VISIBLE_DEVICES` decided.
    pub(super) from_caller: bool,
    /// Why these.
    pub(super) reason: String,
    /// What was left out.
    pub(super) rejected: Vec<Rejected>,
}

/// One worker to be, before its resources are decided.
#[derive(Clone, Debug)]
pub(super) struct Slot<'a> {
    pub(super) name: String,
    pub(super) chosen: Option<Chosen<'a>>,
    /// The spec's overrides that match it, in order.
    overrides: Vec<&'a OverrideSpec>,
}

impl<'a> Slot<'a> {
    /// What the spec's overrides say of it; the later beats the earlier.
    pub(super) fn overridden<T>(&self, pick: impl Fn(&'a OverrideSpec) -> Option<T>) -> Option<T> {
        self.overrides.iter().copied().rev().find_map(pick)
    }

    /// The variables that overrides give it, in order.
    pub(super) fn overriding_env(&self) -> impl Iterator<Item = (&'a String, &'a String)> {
        self.overrides.iter().copied().flat_map(|one| &one.env)
    }
}

/// The workers in rank order: GPU by GPU, then those without.
pub(super) fn slots<'a>(spec: &'a ClusterSpec, selected: &Selected<'a>) -> Vec<Slot<'a>> {
    let each = spec.workers_per_gpu.unwrap_or(1);
    let mut slots = Vec::new();
    for chosen in &selected.chosen {
        for copy in 0..each {
            let base = chosen.name();
            let name = if each > 1 { format!("{base}.{copy}") } else { base };
            slots.push((name, Some(*chosen)));
        }
    }
    slots.extend((0..spec.cpu_workers.unwrap_or(0)).map(|at| (format!("cpu{at}"), None)));
    let matching = |name: &str, chosen: Option<Chosen<'_>>| {
        spec.overrides.iter().filter(|d| matches(&d.matching, name, chosen)).collect()
    };
    slots
        .into_iter()
        .map(|(name, chosen)| Slot { overrides: matching(&name, chosen), name, chosen })
        .collect()
}

fn matches(wanted: &MatchSpec, name: &str, chosen: Option<Chosen<'_>>) -> bool {
    let gpu_fits = |gpu: &GpuName| {
        chosen.is_some_and(|chosen| match gpu {
            GpuName::Index(index) => chosen.gpu.index == *index,
            GpuName::Pci(pci) => chosen.gpu.pci == Some(*pci),
            GpuName::Mig(index, at) => {
                chosen.gpu.index == *index && chosen.mig.is_some_and(|(m, _)| m == *at as usize)
            }
            GpuName::Uuid(uuid) => {
                let own = chosen.mig.map(|(_, instance)| &instance.uuid);
                let both = [own, chosen.gpu.uuid.as_ref()];
                both.into_iter().flatten().any(|full| full.as_str().starts_with(uuid.as_str()))
            }
        })
    };
    let numa = chosen.and_then(|chosen| chosen.gpu.numa).map(|numa| numa.0);
    wanted.worker.as_ref().is_none_or(|pattern| fits(pattern, name))
        && wanted.gpu.as_ref().is_none_or(gpu_fits)
        && wanted.numa.is_none_or(|node| numa == Some(node))
}

/// Whether a name fits a pattern whose `*` stand for anything.
fn fits(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((before, after)) => name.strip_prefix(before).is_some_and(|rest| {
            rest.char_indices()
                .map(|(at, _)| at)
                .chain([rest.len()])
                .any(|at| fits(after, &rest[at..]))
        }),
    }
}

/// Everything that the parts decide from.
pub(super) struct Context<'a> {
    pub(super) topology: &'a Topology,
    pub(super) spec: &'a ClusterSpec,
    pub(super) caller: &'a CallerEnvironment,
    pub(super) engine: EngineKind,
    pub(super) selected: &'a Selected<'a>,
    pub(super) slots: &'a [Slot<'a>],
}

impl<'a> Context<'a> {
    /// The physical GPUs with workers, each once, in rank order.
    pub(super) fn gpus(&self) -> Vec<&'a Gpu> {
        let mut gpus: Vec<&'a Gpu> = Vec::new();
        for chosen in &self.selected.chosen {
            if !gpus.iter().any(|gpu| gpu.index == chosen.gpu.index) {
                gpus.push(chosen.gpu);
            }
        }
        gpus
    }
}
