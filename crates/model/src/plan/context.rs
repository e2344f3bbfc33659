//! The input of every decision: the caller's environment, the chosen GPUs, the workers to plan.
//!
//! Does not read the environment; the command line and the embedded API do.
//!
//! *Invariant:* a plan depends on the topology, the spec and [`CallerEnvironment`] alone.

use core::net::IpAddr;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::form::Rejected;
use crate::spec::{ClusterSpec, EngineKind, GpuName, MatchSpec, OverrideSpec, UcxVersion};
use crate::topology::{Gpu, MigInstance, Note, Topology};

/// The caller's variables, network interfaces and limits.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct CallerEnvironment {
    /// Environment variables; only `UCX_*`, `UCXPY_*`, `NCCL_*`, `CUDA_VISIBLE_DEVICES`, PyTorch's
    /// settings of its allocator and the thread numbers of libraries matter.
    pub variables: BTreeMap<String, String>,
    /// Network interfaces that are up.
    pub interfaces: Vec<Interface>,
    /// The version of the UCX that will be used, if known.
    pub ucx_version: Option<UcxVersion>,
    /// Every installed libucp, most preferred first; `None` if nobody has looked.
    pub ucx_libraries: Option<Vec<InstalledUcx>>,
    /// The memory policy that the caller was started with (`numactl`), like `bind 1`; `None` for
    /// the default policy.
    pub memory_policy: Option<String>,
    /// Memory limit of the caller's cgroup, in bytes; `None` for no limit.
    pub memory_limit_bytes: Option<u64>,
    /// Whether the Python that Dask's processes run in, unless another is asked for, has
    /// `direct://`.
    pub dask_has_direct: bool,
    /// This machine's name.
    pub host_name: Option<String>,
    /// What preflight advises programs to set on this machine.
    pub advice: Vec<Advice>,
}

/// A variable, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Advice {
    /// Its name.
    pub name: String,
    /// Its value.
    pub value: String,
    /// The finding's check; empty if none has found it.
    pub id: String,
    /// Why, a sentence without a full stop.
    pub reason: String,
}

/// A libucp that is installed on the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct InstalledUcx {
    /// The file `libucp.so.0`, absolute.
    pub path: String,
    /// Where it comes from, for messages: `libucx-cu13 of …`.
    pub whose: String,
    /// Whether it comes with CUDA transports.
    pub cuda: bool,
    /// Whether it comes with transports for InfiniBand and RoCE (verbs).
    pub verbs: bool,
    /// Whether it can be told how long to wait at each function whose code it changes (UCX 1.21 and
    /// later: `UCX_MEM_BISTRO_GRACE_DURATION`; others warn of a variable that they do not know).
    pub told_grace: bool,
}

/// A network interface of the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Interface {
    /// Its name, like `eth0`.
    pub name: String,
    /// IPv4 and IPv6, without prefix lengths.
    pub addresses: Vec<IpAddr>,
    /// Whether it has the address that the machine announces to others.
    pub main: bool,
}

impl InstalledUcx {
    /// The libucp in a file, with neither CUDA's nor InfiniBand's transports.
    pub fn new(path: impl Into<String>, whose: impl Into<String>) -> Self {
        let (path, whose) = (path.into(), whose.into());
        Self { path, whose, cuda: false, verbs: false, told_grace: false }
    }
}

impl Interface {
    /// An interface whose addresses the machine does not announce.
    pub fn new(name: impl Into<String>, addresses: Vec<IpAddr>) -> Self {
        Self { name: name.into(), addresses, main: false }
    }
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

/// The chosen GPUs, and how they were chosen.
#[derive(Clone, Debug, Default)]
pub(super) struct Selected<'a> {
    /// In rank order.
    pub(super) chosen: Vec<Chosen<'a>>,
    /// Whether the user named them by UUID.
    pub(super) by_uuid: bool,
    /// Whether the caller's `CUDA_VISIBLE_DEVICES` decided.
    pub(super) from_caller: bool,
    /// Why these were chosen.
    pub(super) reason: String,
    /// Whether the user named each MIG instance by itself.
    pub(super) instances_named: bool,
    /// Of several programs, why each has its GPUs.
    pub(super) groups: Vec<String>,
    /// What was left out.
    pub(super) rejected: Vec<Rejected>,
    /// Notes that follow from what was asked for: no objections under `strict`.
    pub(super) told: Vec<Note>,
}

/// A worker before its resources are decided.
#[derive(Clone, Debug)]
pub(super) struct Slot<'a> {
    pub(super) name: String,
    pub(super) chosen: Option<Chosen<'a>>,
    /// Which of several programs it runs.
    pub(super) program: Option<usize>,
    /// The spec's overrides that match it, in order.
    overrides: Vec<&'a OverrideSpec>,
}

impl<'a> Slot<'a> {
    /// A value from the spec's overrides; the last one wins.
    pub(super) fn overridden<T>(&self, pick: impl Fn(&'a OverrideSpec) -> Option<T>) -> Option<T> {
        self.overrides.iter().copied().rev().find_map(pick)
    }

    /// Whether an override of the spec is for it.
    pub(super) fn is_matched_by(&self, one: &OverrideSpec) -> bool {
        self.overrides.iter().any(|matching| std::ptr::eq(*matching, one))
    }

    /// The variables that overrides give it, in order.
    pub(super) fn overriding_env(&self) -> impl Iterator<Item = (&'a String, &'a String)> {
        self.overrides.iter().copied().flat_map(|one| &one.env)
    }
}

/// The workers in rank order: those with a GPU, GPU by GPU, then CPU workers.
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
    // In rank order; spares, the last ones, run none yet.
    let programs = spec.programs().iter().enumerate();
    let programs = programs.flat_map(|(at, one)| (0..one.workers).map(move |_| Some(at)));
    slots
        .into_iter()
        .zip(programs.chain(std::iter::repeat(None)))
        .map(|((name, chosen), program)| {
            let overrides = matching(&name, chosen);
            Slot { overrides, name, chosen, program }
        })
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

/// Whether a name matches a pattern in which `*` matches any text.
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

/// Everything that a decision may depend on.
pub(super) struct Context<'a> {
    pub(super) topology: &'a Topology,
    pub(super) spec: &'a ClusterSpec,
    pub(super) caller: &'a CallerEnvironment,
    pub(super) engine: EngineKind,
    pub(super) selected: &'a Selected<'a>,
    pub(super) slots: &'a [Slot<'a>],
}

impl<'a> Context<'a> {
    /// How many workers start with the cluster: the first ones.
    pub(super) fn starting(&self) -> usize {
        let asked = self.spec.dask.start_workers.filter(|_| self.engine == EngineKind::Dask);
        asked.map_or(self.slots.len(), |count| (count as usize).min(self.slots.len()))
    }

    /// The resource that stands for a worker's kind: where there are both kinds and nobody has said
    /// which resources there are, and where tasks are placed by it. Other machines' workers may be
    /// of the other kind.
    pub(super) fn kind(&self, has_gpu: bool) -> Option<&'static str> {
        let with_gpu = self.slots.iter().filter(|slot| slot.chosen.is_some()).count();
        let both = (1..self.slots.len()).contains(&with_gpu);
        let asked = self.spec.dask.place_by_kind == Some(true);
        let tell = asked || both && self.spec.worker.resources.is_none();
        (self.engine == EngineKind::Dask && tell).then_some(if has_gpu { "GPU" } else { "CPU" })
    }

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
