//! The workers: how many per GPU, their names, and what each of them gets.
//!
//! Puts the decisions of the other modules together. Decides only the GPU mask itself.
//!
//! *Invariant:* ranks are positions, names are unique, and a rotated mask begins with the worker's
//! own GPU.

use std::collections::BTreeMap;

use super::bootstrap;
use super::context::{Chosen, Context, Slot};
use super::error::PlanError;
use super::form::{Binding, RmmPlan, Why, WorkerGpu, WorkerPlan};
use super::gpus::VISIBLE;
use super::memory::{self, usual_limit};
use super::network::NicShare;
use super::shares::{Share, Shares};
use super::variables::{NET_DEVICES, Variables};
use crate::cpuset::NodeSet;
use crate::ids::NicPort;
use crate::spec::{EngineKind, MemoryPolicy, VisibleDevices};
use crate::topology::{Note, Topology};
use crate::units::Size;

/// Names the variable that says how CUDA counts devices.
pub const ORDER: &str = "CUDA_DEVICE_ORDER";
const IB_HCA: &str = "NCCL_IB_HCA";

/// Plans every worker.
pub(super) fn plan(
    context: &Context<'_>,
    nics: &[NicShare],
    shares: &Shares,
    variables: &Variables,
    notes: &mut Vec<Note>,
) -> Result<Vec<WorkerPlan>, PlanError> {
    let mems: Vec<(Option<NodeSet>, String)> =
        context.slots.iter().map(|slot| memory_nodes(context, slot, notes)).collect();
    let starting = context.starting();
    let sharers = |node: u32| {
        let on = |(nodes, _): &&(Option<NodeSet>, String)| {
            nodes.as_ref().is_some_and(|nodes| nodes.contains(node))
        };
        // Those that start later are not reckoned with, as in dask-cuda: most never start.
        mems[..starting].iter().filter(on).count().max(1)
    };
    let hca = nccl_hcas(context, nics, notes);
    (0u32..)
        .zip(context.slots)
        .enumerate()
        .map(|(at, (rank, slot))| {
            let mut worker = Worker { context, slot, why: Vec::new(), env: BTreeMap::new() };
            worker.gpu();
            worker.program();
            let (cpus, reason) = shares.workers[at].clone();
            worker.because("cpus", shown(cpus.as_ref()), reason);
            let (nodes, reason) = mems[at].clone();
            worker.because("mems", shown(nodes.as_ref()), reason);
            worker.why.push(nics[at].why.clone());
            let memory_limit_bytes = worker.memory_limit(nodes.as_ref(), &sharers);
            enough(context.engine, &slot.name, memory_limit_bytes)?;
            let rmm = worker.rmm(notes);
            let device_memory_limit_bytes = worker.device_memory_limit(rmm.as_ref());
            worker.ranks(at, &shares.workers);
            worker.environment(at, &nics[at], variables, hca.as_deref());
            let policy = context.spec.memory.policy.unwrap_or_default();
            let memory_policy = if nodes.is_some() { policy } else { MemoryPolicy::None };
            let threads = slot.overridden(|one| one.threads).or(context.spec.threads);
            // A program has the threads and the device memory that it takes.
            let threads = threads.filter(|_| context.engine != EngineKind::Command).unwrap_or(1);
            worker.resource(threads);
            Ok(WorkerPlan {
                name: slot.name.clone(),
                rank,
                program: slot.program.map(|at| context.spec.programs()[at].name.clone()),
                gpu: slot.chosen.map(worker_gpu),
                binding: Binding { cpus, mems: nodes, memory_policy },
                nics: nics[at].ports.clone(),
                threads,
                memory_limit_bytes,
                device_memory_limit_bytes,
                rmm,
                env: worker.env,
                why: worker.why,
            })
        })
        .collect()
}

/// Checks that a native worker's process fits its own memory limit.
fn enough(engine: EngineKind, worker: &str, limit: Option<u64>) -> Result<(), PlanError> {
    let too_little =
        limit.filter(|bytes| engine == EngineKind::Native && *bytes < memory::LEAST_HOST_LIMIT);
    match too_little {
        Some(limit_bytes) => Err(PlanError::MemoryLimit {
            worker: worker.to_owned(),
            limit_bytes,
            least_bytes: memory::LEAST_HOST_LIMIT,
        }),
        None => Ok(()),
    }
}

fn shown<T: ToString>(value: Option<&T>) -> String {
    value.map_or_else(|| "untouched".to_owned(), T::to_string)
}

fn worker_gpu(chosen: Chosen<'_>) -> WorkerGpu {
    WorkerGpu {
        index: chosen.gpu.index,
        uuid: chosen.mig.map(|(_, i)| i.uuid.clone()).or_else(|| chosen.gpu.uuid.clone()),
        pci: chosen.gpu.pci,
        memory_bytes: chosen.memory_bytes(),
        mig: chosen.mig.map(|(_, instance)| instance.profile.clone()),
    }
}

fn memory_nodes(
    context: &Context<'_>,
    slot: &Slot<'_>,
    notes: &mut Vec<Note>,
) -> (Option<NodeSet>, String) {
    let asked = context.spec.memory.policy;
    if asked == Some(MemoryPolicy::None) {
        return (None, "no memory policy is asked for".to_owned());
    }
    if let Some(inherited) = &context.caller.memory_policy {
        if asked.is_none() {
            return (None, format!("the caller's own memory policy ({inherited}) stands"));
        }
        let text = format!("asked for, so it replaces the caller's own policy ({inherited})");
        notes.push(Note::new("memory.policy", text));
    }
    match slot.chosen {
        Some(chosen) => memory::nodes_near(context.topology, chosen.gpu, notes),
        None => (None, "it has no GPU that memory could be near to".to_owned()),
    }
}

/// Variables that the engine's processes need on any machine.
pub(super) fn engine_environment(context: &Context<'_>) -> BTreeMap<String, String> {
    // distributed's own pre-spawn environment (facts §3): freed memory goes back soon, and
    // libraries do not start a thread for every CPU in every worker.
    let of_dask = [
        ("MALLOC_TRIM_THRESHOLD_", "65536"),
        ("OMP_NUM_THREADS", "1"),
        ("MKL_NUM_THREADS", "1"),
        ("OPENBLAS_NUM_THREADS", "1"),
        // RAPIDS libraries must not create a CUDA context on import.
        ("RAPIDS_NO_INITIALIZE", "True"),
    ];
    let is_ours = |name: &str| !context.caller.variables.contains_key(name);
    match context.engine {
        EngineKind::Dask => of_dask
            .into_iter()
            .filter(|(name, _)| is_ours(name))
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect(),
        EngineKind::Native | EngineKind::Command => BTreeMap::new(),
    }
}

/// The mask for processes other than workers: every chosen GPU, in order.
pub(super) fn visible_to_all(context: &Context<'_>) -> BTreeMap<String, String> {
    let names = mask_names(context);
    BTreeMap::from([
        (ORDER.to_owned(), "PCI_BUS_ID".to_owned()),
        (VISIBLE.to_owned(), names.join(",")),
    ])
}

/// The chosen whole GPUs as the mask names them; the first MIG instance where there are no others.
fn mask_names(context: &Context<'_>) -> Vec<String> {
    let chosen = &context.selected.chosen;
    let whole: Vec<String> =
        chosen.iter().filter(|c| c.mig.is_none()).map(|c| mask_name(context, *c)).collect();
    if whole.is_empty() {
        chosen.first().map(|chosen| mask_name(context, *chosen)).into_iter().collect()
    } else {
        whole
    }
}

/// How CUDA is told of a GPU. Its own numbers leave out a GPU that is lost, those in MIG mode, and
/// what an MPS server hides (NVIDIA's MIG and MPS guides), so the GPU's UUID is better where there
/// is one. But programs of users, and dask-cuda's, read the list as numbers: they get those where
/// CUDA counts as NVML does, as far as is known.
fn mask_name(context: &Context<'_>, chosen: Chosen<'_>) -> String {
    let numbers = match context.engine {
        EngineKind::Native => false,
        EngineKind::Dask => counts_as_nvml(context.topology),
        EngineKind::Command => true,
    };
    match (chosen.mig, &chosen.gpu.uuid) {
        (Some((_, instance)), _) => instance.uuid.to_string(),
        (None, Some(uuid)) if context.selected.by_uuid => uuid.to_string(),
        (None, Some(uuid)) if !numbers && !uuid.is_zeroed() => uuid.to_string(),
        (None, _) => chosen.gpu.index.to_string(),
    }
}

/// Whether no GPU is known that CUDA leaves out and NVML counts.
fn counts_as_nvml(topology: &Topology) -> bool {
    let mut gpus = (0u32..).zip(&topology.gpus);
    gpus.all(|(at, gpu)| gpu.index.0 == at && gpu.mig_mode != Some(true))
}

/// `NCCL_IB_HCA` for programs that may use NCCL: every planned NIC, the same for all ranks.
///
/// NCCL compares the NICs of all ranks of a machine and picks the nearest itself; ranks that see
/// different lists disagree about the machine. `=` asks for exact names.
fn nccl_hcas(context: &Context<'_>, nics: &[NicShare], notes: &mut Vec<Note>) -> Option<String> {
    if context.engine != EngineKind::Command {
        return None;
    }
    let mut ports: Vec<&NicPort> = Vec::new();
    for port in nics.iter().flat_map(|share| &share.ports) {
        // The name of a column is not the name of a device.
        if port.port.is_some() && !ports.contains(&port) {
            ports.push(port);
        }
    }
    let names: Vec<String> = ports.iter().map(ToString::to_string).collect();
    let ours = (!names.is_empty()).then(|| format!("={}", names.join(",")));
    let caller = context.caller.variables.get(IB_HCA);
    if let (Some(caller), Some(ours)) = (caller, &ours)
        && caller != ours
    {
        let text = format!("{caller:?} from the caller's environment stands instead of {ours:?}");
        notes.push(Note::new(IB_HCA, text));
    }
    if caller.is_some() { None } else { ours }
}

/// A worker while its plan is being put together.
struct Worker<'a> {
    context: &'a Context<'a>,
    slot: &'a Slot<'a>,
    why: Vec<Why>,
    env: BTreeMap<String, String>,
}

impl Worker<'_> {
    fn because(&mut self, choice: &str, chosen: impl Into<String>, reason: impl Into<String>) {
        self.why.push(Why {
            choice: choice.to_owned(),
            chosen: chosen.into(),
            reason: reason.into(),
            rejected: Vec::new(),
        });
    }

    fn gpu(&mut self) {
        let selected = self.context.selected;
        let (chosen, reason) = match self.slot.chosen {
            None => ("none".to_owned(), "a worker for the CPUs alone".to_owned()),
            Some(chosen) => {
                let mut text = format!("GPU {}", chosen.gpu.index);
                if let Some((_, instance)) = chosen.mig {
                    text.push_str(&format!(", MIG {}", instance.profile));
                }
                (text, selected.reason.clone())
            }
        };
        let rejected =
            if self.slot.chosen.is_some() { selected.rejected.clone() } else { Vec::new() };
        self.why.push(Why { choice: "gpu".to_owned(), chosen, reason, rejected });
    }

    /// Which of several programs it runs, and why with this GPU.
    fn program(&mut self) {
        let Some(at) = self.slot.program else { return };
        let program = &self.context.spec.programs()[at];
        let group = self.context.selected.groups.get(at).filter(|_| self.slot.chosen.is_some());
        let reason = group.map_or("a rank for the CPUs alone", String::as_str);
        let chosen = format!("{}, with {} ranks", program.name, program.workers);
        self.because("program", chosen, reason);
    }

    fn memory_limit(
        &mut self,
        nodes: Option<&NodeSet>,
        sharers: &dyn Fn(u32) -> usize,
    ) -> Option<u64> {
        let context = self.context;
        let limit = self.slot.overridden(|one| one.memory_limit).or(context.spec.memory.limit);
        let (bytes, mut reason) = memory::host_limit(
            context.topology,
            nodes,
            sharers,
            context.starting(),
            context.caller.memory_limit_bytes,
            limit.unwrap_or_else(|| usual_limit(context.engine)),
        );
        if let Some(bytes) = bytes.filter(|_| context.engine == EngineKind::Native) {
            reason.push_str(&memory::host_division(bytes));
        }
        self.because("memory_limit", bytes_shown(bytes), reason);
        bytes
    }

    fn device_memory_limit(&mut self, rmm: Option<&RmmPlan>) -> Option<u64> {
        let chosen = self.slot.chosen?;
        let spec = self.context.spec;
        let overridden = self.slot.overridden(|one| one.device_memory_limit);
        let limit = overridden.or(spec.device.memory_limit);
        let limit = limit.filter(|_| self.context.engine != EngineKind::Command);
        let limit = limit.unwrap_or_else(|| usual_limit(self.context.engine));
        let workers = spec.workers_per_gpu.unwrap_or(1);
        let (mut bytes, mut reason) = memory::device_limit(chosen.memory_bytes(), workers, limit);
        let native = self.context.engine == EngineKind::Native;
        let pool = rmm.filter(|_| native).and_then(|rmm| rmm.maximum_pool_bytes);
        if let Some(pool) = pool.filter(|pool| bytes.is_none_or(|bytes| *pool < bytes)) {
            bytes = Some(pool);
            "the most that its pool may hold ('rmm.maximum_pool_size')".clone_into(&mut reason);
        }
        self.because("device_memory_limit", bytes_shown(bytes), reason);
        bytes
    }

    fn rmm(&self, notes: &mut Vec<Note>) -> Option<RmmPlan> {
        // A program allocates by itself.
        let chosen = self.slot.chosen.filter(|_| self.context.engine != EngineKind::Command)?;
        let spec = &self.context.spec.rmm;
        let pool = self.slot.overridden(|one| one.rmm_pool_size).or(spec.pool_size);
        let workers = u64::from(self.context.spec.workers_per_gpu.unwrap_or(1));
        let whole = chosen.memory_bytes().map(|bytes| bytes / workers);
        let mut bytes = |key: &str, size: Option<Size>| match (size?, whole) {
            (Size::Bytes(bytes), _) => Some(bytes),
            (size, Some(whole)) => Some(size.of(whole)),
            (size, None) => {
                let text = format!("{size} of a memory whose size is unknown: left out");
                notes.push(Note::new(format!("rmm.{key}"), text));
                None
            }
        };
        let sizes = RmmPlan {
            pool_bytes: bytes("pool_size", pool),
            maximum_pool_bytes: bytes("maximum_pool_size", spec.maximum_pool_size),
            ..RmmPlan::default()
        };
        let plan = match self.context.engine {
            EngineKind::Native | EngineKind::Command => sizes,
            EngineKind::Dask => RmmPlan {
                release_threshold_bytes: bytes("release_threshold", spec.release_threshold),
                managed: spec.managed.unwrap_or(false),
                asynchronous: spec.asynchronous.unwrap_or(false),
                log_directory: spec.log_directory.clone(),
                track_allocations: spec.track_allocations.unwrap_or(false),
                set_allocator_for: spec.set_allocator_for.clone().unwrap_or_default(),
                ..sizes
            },
        };
        self.warn_of_slow_ipc(&plan, whole, notes);
        (plan != RmmPlan::default()).then_some(plan)
    }

    /// Pools near the whole device make CUDA IPC handles pathologically slow on Hopper
    /// (rapidsmpf#206: 112 s at 0.85 of the device against 7 s at 0.5).
    fn warn_of_slow_ipc(&self, plan: &RmmPlan, whole: Option<u64>, notes: &mut Vec<Note>) {
        let hopper = self.slot.chosen.is_some_and(|chosen| {
            chosen.gpu.compute_capability.is_some_and(|capability| capability.major >= 9)
        });
        let large = plan
            .pool_bytes
            .zip(whole)
            .is_some_and(|(pool, whole)| pool as f64 > 0.8 * whole as f64);
        if hopper && large && self.context.spec.ucx.nvlink != Some(false) {
            let text = "a pool above 0.8 of the device makes CUDA IPC slow to set up on this \
                        generation; 0.5 was 16 times faster";
            notes.push(Note::new("rmm.pool_size", text));
        }
    }

    /// The resource for its kind, by which tasks can ask for it.
    fn resource(&mut self, threads: u32) {
        let Some(kind) = self.context.kind(self.slot.chosen.is_some()) else { return };
        let reason = match self.context.spec.dask.place_by_kind {
            Some(true) => {
                "as many as threads; 'dask.place_by_kind' gives tasks to a kind of worker"
            }
            _ => {
                "as many as threads: there are GPU and CPU workers, and a task can ask for a kind by \
                 dask.annotate(resources=…)"
            }
        };
        self.because("resources", format!("{kind}={threads}"), reason);
    }

    /// What it is told of the other ranks.
    fn ranks(&mut self, at: usize, shares: &[Share]) {
        let (env, why) = bootstrap::of_rank(self.context, at, shares);
        self.env.extend(env);
        self.why.extend(why);
    }

    fn environment(
        &mut self,
        at: usize,
        nics: &NicShare,
        variables: &Variables,
        hca: Option<&str>,
    ) {
        self.visible_devices(at);
        self.env.extend(engine_environment(self.context));
        self.env.extend(variables.env.clone());
        self.why.extend(variables.why.clone());
        if let Some(devices) = &nics.devices {
            self.env.insert(NET_DEVICES.to_owned(), devices.clone());
            self.because(
                &format!("env.{NET_DEVICES}"),
                devices.clone(),
                if nics.ports.is_empty() {
                    nics.why.reason.clone()
                } else {
                    "the NIC's port, then the device over which connections are set up".to_owned()
                },
            );
        } else {
            self.env.remove(NET_DEVICES);
        }
        if let Some(hca) = hca {
            self.env.insert(IB_HCA.to_owned(), hca.to_owned());
            self.because(
                &format!("env.{IB_HCA}"),
                hca,
                "every planned NIC by its exact name, the same for all ranks, because NCCL compares \
                 them; it picks the nearest itself",
            );
        }
        for (name, value) in self.context.spec.worker.env.iter().flatten() {
            self.env.insert(name.clone(), value.clone());
            self.because(&format!("env.{name}"), value, "set by 'worker.env'");
        }
        let slot = self.slot;
        for (name, value) in slot.overriding_env() {
            self.env.insert(name.clone(), value.clone());
            self.because(&format!("env.{name}"), value, "set by an override");
        }
    }

    /// Which GPUs the process sees: its own first, unless the program selects by number itself.
    fn visible_devices(&mut self, at: usize) {
        self.env.insert(ORDER.to_owned(), "PCI_BUS_ID".to_owned());
        let choice = format!("env.{VISIBLE}");
        let Some(chosen) = self.slot.chosen else {
            self.env.insert(VISIBLE.to_owned(), String::new());
            self.because(&choice, "no device", "a worker for the CPUs alone");
            return;
        };
        let own = mask_name(self.context, chosen);
        if chosen.mig.is_some() {
            self.env.insert(VISIBLE.to_owned(), own.clone());
            self.because(&choice, own, "CUDA gives a process one MIG instance; it has no CUDA IPC");
            return;
        }
        let (value, reason) = self.mask(own, at);
        self.env.insert(VISIBLE.to_owned(), value.clone());
        self.because(&choice, value, reason);
    }

    fn mask(&self, own: String, at: usize) -> (String, &'static str) {
        let mut names = mask_names(self.context);
        let each = self.context.spec.workers_per_gpu.unwrap_or(1);
        let command = self.context.spec.command.visible_devices;
        // A rank's number is that of its device only if there is one rank per device.
        let by_number = each == 1 && names.get(at) == Some(&own);
        let way = match (self.context.engine, command) {
            (EngineKind::Command, Some(way)) => way,
            (EngineKind::Command, None) if by_number => VisibleDevices::All,
            _ => VisibleDevices::Rotated,
        };
        match way {
            VisibleDevices::All => {
                (names.join(","), "every GPU in order: the program selects its own by LOCAL_RANK")
            }
            VisibleDevices::Own => (own, "its own GPU alone, as asked for: no CUDA IPC to peers"),
            VisibleDevices::Rotated if names.len() == 1 => (own, "its own GPU, the only one"),
            VisibleDevices::Rotated => {
                let first = names.iter().position(|name| *name == own).unwrap_or(0);
                names.rotate_left(first);
                (names.join(","), "its own GPU first; the peers stay visible, as CUDA IPC needs")
            }
        }
    }
}

fn bytes_shown(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "none".to_owned(), |n| crate::units::HumanBytes(n).to_string())
}
