//! What should carry the data between two workers, by their plan.
//!
//! *Invariant:* workers of one plan share a machine, so a network is expected only where the plan
//! asks for a network's protocol.

use std::fmt;

use crate::peer::MemoryKind;
use cuda_cluster_model::plan::{DaskPlan, EnginePlan, Plan, WorkerPlan};
use cuda_cluster_model::spec::Origin;
use cuda_cluster_model::topology::Topology;

/// Transports that carry host memory between processes of one machine without a network: UCX's, and
/// the lanes of `direct://`.
const SHARED_MEMORY: [&str; 7] =
    ["posix", "sysv", "cma", "xpmem", "knem", "direct/copy", "direct/mapped"];

/// Smaller frames of `direct://` travel on its socket, which is as it should be.
const DIRECT_LARGE_BYTES: u64 = 64 << 10;

/// The key of Dask's configuration that has `direct://` send device memory through host memory.
const DIRECT_DEVICES: &str = "distributed.comm.direct.devices";

/// The socket of `direct://` between processes of one machine.
const DIRECT_SOCKET: &str = "direct/unix";

/// What should carry the data between two workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    /// Shared memory of the host.
    SharedMemory,
    /// Copies between GPUs, over NVLink or PCIe.
    CudaIpc,
    /// From GPU to GPU through host memory, because the plan or the GPUs don't allow `cuda_ipc`.
    Staging,
    /// The socket of a protocol of Dask that the plan asks for, by the name of its lane.
    Socket(&'static str),
    /// Whatever UCX finds: the user's list of transports leaves out shared memory.
    AnyLane,
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Expected::SharedMemory => "shared memory",
            Expected::CudaIpc => "cuda_ipc",
            Expected::Staging => "staging in shared memory",
            Expected::Socket(lane) => lane,
            Expected::AnyLane => "any lane",
        })
    }
}

impl Expected {
    /// What two workers of a plan, sender and receiver, should use for messages of this size.
    pub fn of(
        plan: &Plan,
        machine: Option<&Topology>,
        ends: [&str; 2],
        memory: MemoryKind,
        size: u64,
    ) -> Self {
        let worker = |name| plan.workers.iter().find(|worker| worker.name == name);
        let ends = ends.map(worker);
        let ucx = match (memory, ends) {
            (MemoryKind::Host, _) => Expected::SharedMemory,
            _ if plan.machine.simulated => Expected::SharedMemory,
            (MemoryKind::Device, [Some(from), Some(to)])
                if !is_planned(plan, from) || !is_possible(machine, from, to) =>
            {
                Expected::Staging
            }
            (MemoryKind::Device, _) => Expected::CudaIpc,
        };
        match &plan.engine {
            EnginePlan::Dask(dask) => Self::of_dask(dask, ends[0], ucx, size),
            _ => ucx,
        }
    }

    /// What Dask should use, where UCX would use `ucx` for that memory.
    fn of_dask(dask: &DaskPlan, from: Option<&WorkerPlan>, ucx: Self, size: u64) -> Self {
        match dask.protocol.as_str() {
            "tcp" => Expected::Socket("tcp"),
            "tls" => Expected::Socket("tls"),
            "direct" if ucx == Expected::SharedMemory && size < DIRECT_LARGE_BYTES => {
                Expected::Socket(DIRECT_SOCKET)
            }
            "direct" if ucx == Expected::CudaIpc && is_off(dask, DIRECT_DEVICES) => {
                Expected::Staging
            }
            "direct" => ucx,
            protocol if !protocol.starts_with("ucx") => Expected::AnyLane,
            _ if ucx == Expected::CudaIpc || from.is_none_or(permits_shared_memory) => ucx,
            _ => Expected::AnyLane,
        }
    }

    /// The transports, or whole lanes, of which one must be there; `None` if any will do.
    pub fn transports(self) -> Option<Vec<&'static str>> {
        match self {
            Expected::SharedMemory | Expected::Staging => Some(SHARED_MEMORY.to_vec()),
            Expected::CudaIpc => Some(vec!["cuda_ipc"]),
            Expected::Socket(lane) => Some(vec![lane]),
            Expected::AnyLane => None,
        }
    }

    /// Whether one of these lanes is what is expected.
    pub(super) fn is_among(self, lanes: &[String]) -> bool {
        let Some(wanted) = self.transports() else { return !lanes.is_empty() };
        lanes.iter().any(|lane| {
            let transport = lane.split('/').next().unwrap_or_default();
            wanted.contains(&transport) || wanted.contains(&lane.as_str())
        })
    }

    /// Says that other lanes were used, and why: by what the receiver knows, or else by the plan.
    pub(super) fn downgrade(
        self,
        plan: &Plan,
        from: &str,
        lanes: &[String],
        known: Option<&str>,
    ) -> String {
        let used = if lanes.is_empty() { "no lane".to_owned() } else { lanes.join(" ") };
        let worker = plan.workers.iter().find(|worker| worker.name == from);
        let advice = match (self, worker) {
            (Expected::CudaIpc, Some(worker)) => match worker.env.get("UCX_TLS") {
                Some(list) if !permits_cuda_ipc(list) => ": unset it, or add cuda_ipc",
                _ => ": 'cuda-cluster doctor' says whether this UCX knows CUDA",
            },
            _ => "",
        };
        // Host memory goes over UCX only where UCX is the protocol.
        let by_ucx = self == Expected::CudaIpc || !is_direct(plan);
        let cause = known.map(str::to_owned).or_else(|| cause(worker.filter(|_| by_ucx)?));
        let cause = cause.map(|cause| format!(" because {cause}")).unwrap_or_default();
        format!("{self} expected, {used} used{cause}{advice}")
    }
}

/// What a worker's connections must use before it is READY in a cluster that is to be verified, as
/// far as the plan alone tells.
pub fn proven(plan: &Plan, worker: &WorkerPlan) -> Vec<Expected> {
    let of = |memory| Expected::of(plan, None, [worker.name.as_str(); 2], memory, u64::MAX);
    // Others show the lanes of device memory when such memory is moved.
    let shows = matches!(&plan.engine, EnginePlan::Dask(dask) if dask.protocol.starts_with("ucx"));
    let copies = shows && plan.requirements.nvlink && worker.gpu.is_some();
    let device = copies.then(|| of(MemoryKind::Device)).filter(|way| *way == Expected::CudaIpc);
    [Some(of(MemoryKind::Host)), device].into_iter().flatten().collect()
}

/// What the connection of two workers lacks: what should carry their data, if that is not among its
/// lanes. Judges device memory if both have GPUs that are not simulated, but not over `direct://`,
/// which shows its lanes only after some has been moved.
pub fn missing(
    plan: &Plan,
    machine: Option<&Topology>,
    from: &str,
    to: &str,
    lanes: &[String],
) -> Option<Expected> {
    let has_gpu = |name| {
        plan.workers.iter().any(|worker: &WorkerPlan| worker.name == name && worker.gpu.is_some())
    };
    let memory = match has_gpu(from) && has_gpu(to) && !is_direct(plan) {
        true => MemoryKind::Device,
        false => MemoryKind::Host,
    };
    let expected = Expected::of(plan, machine, [from, to], memory, u64::MAX);
    (!expected.is_among(lanes)).then_some(expected)
}

/// Whether Dask's workers communicate by `direct://`.
fn is_direct(plan: &Plan) -> bool {
    matches!(&plan.engine, EnginePlan::Dask(dask) if dask.protocol == "direct")
}

/// Whether Dask's configuration switches something off.
fn is_off(dask: &DaskPlan, key: &str) -> bool {
    dask.config.get(key).is_some_and(|value| value.eq_ignore_ascii_case("false"))
}

/// Whether a plan wants copies between GPUs. If the caller set the list of transports, a missing
/// `cuda_ipc` counts as a downgrade.
fn is_planned(plan: &Plan, worker: &WorkerPlan) -> bool {
    if plan.requirements.nvlink {
        return true;
    }
    // The user switched it off.
    if plan.origins.contains_key("ucx.nvlink") {
        return false;
    }
    let callers = plan.origins.get("env.UCX_TLS") == Some(&Origin::Environment);
    worker.env.get("UCX_TLS").is_none_or(|list| callers || permits_cuda_ipc(list))
}

/// Whether a list of transports includes `cuda_ipc`.
fn permits_cuda_ipc(list: &str) -> bool {
    let names =
        |list: &str| list.split(',').any(|name| ["cuda_ipc", "cuda"].contains(&name.trim()));
    match list.strip_prefix('^') {
        Some(without) => !names(without),
        None => names(list) || list.split(',').any(|name| name.trim() == "all"),
    }
}

/// Whether a worker's list of transports includes shared memory.
fn permits_shared_memory(worker: &WorkerPlan) -> bool {
    let list = worker.env.get("UCX_TLS").map_or("all", String::as_str);
    let names = |names: &[&str], list: &str| list.split(',').any(|one| names.contains(&one.trim()));
    match list.strip_prefix('^') {
        // A `^` list names the transports that are left out.
        Some(list) => !names(&["all", "sm", "shm", "mm", "posix"], list),
        None => names(&["all", "sm", "shm", "mm", "posix", "sysv"], list),
    }
}

/// Whether the driver lets one GPU read the other's memory, as far as known. MIG instances cannot.
/// Where it refuses that although NVLinks are up, something is broken: copies are expected there.
fn is_possible(machine: Option<&Topology>, from: &WorkerPlan, to: &WorkerPlan) -> bool {
    let (Some(a), Some(b)) = (&from.gpu, &to.gpu) else { return true };
    if a.mig.is_some() || b.mig.is_some() {
        return false;
    }
    if machine.is_some_and(|machine| machine.refuses_nvlink(a.index, b.index)) {
        return true;
    }
    let find = |index| machine?.gpus.iter().find(|gpu| gpu.index == index);
    let peers = find(a.index).and_then(|gpu| gpu.peers.as_ref());
    a.index == b.index || peers.is_none_or(|peers| peers.contains(&b.index))
}

/// Why copies between two workers' GPUs cannot be: the driver refuses them peer access, though
/// their NVLinks are up.
pub(super) fn broken_fabric(
    plan: &Plan,
    machine: Option<&Topology>,
    ends: [&str; 2],
) -> Option<&'static str> {
    let [a, b] = ends.map(|name| plan.workers.iter().find(|worker| worker.name == name));
    let (a, b) = (a?.gpu.as_ref()?.index, b?.gpu.as_ref()?.index);
    machine?.refuses_nvlink(a, b).then_some(
        "cuda_ipc expected, but the driver refuses peer access over NVLinks that are up, so every \
         byte is staged in host memory: is nvidia-fabricmanager well?",
    )
}

/// The setting in a worker's plan that restricts its transports.
fn cause(worker: &WorkerPlan) -> Option<String> {
    let set = |name: &str| Some(format!("{name}={}", worker.env.get(name)?));
    // Without these, Dask's connections, which notice a lost peer, do without shared memory.
    let off = |name: &&str| worker.env.get(*name).is_some_and(|value| value == "n");
    let mut handling = ["UCX_POSIX_ERROR_HANDLING", "UCX_CMA_MEMORY_INVALIDATE"].into_iter();
    handling.find(off).and_then(set).or_else(|| set("UCX_TLS"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn lanes(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    fn plan(spec: Value) -> Plan {
        let gpu = |index| json!({ "index": index, "uuid": null, "name": "T", "pci": null, "memory_bytes": 1000 });
        let topology = Topology {
            gpus: serde_json::from_value(json!([gpu(0), gpu(1)])).expect("GPUs"),
            ..Default::default()
        };
        let spec = serde_json::from_value(spec).expect("a spec");
        let request = cuda_cluster_model::spec::Request::of(spec).expect("no contradictions");
        cuda_cluster_model::plan::plan(&topology, &request, &Default::default()).expect("a plan")
    }

    fn dask(protocol: &str) -> Plan {
        plan(json!({ "engine": "dask", "dask": { "protocol": protocol } }))
    }

    fn expected(plan: &Plan, memory: MemoryKind, size: u64) -> Expected {
        Expected::of(plan, None, ["gpu0", "gpu1"], memory, size)
    }

    #[test]
    fn dasks_workers_use_what_their_protocol_has() {
        use Expected::{AnyLane, SharedMemory, Socket, Staging};
        const LARGE: u64 = 1 << 20;
        let host = |plan: &Plan, size| expected(plan, MemoryKind::Host, size);
        assert_eq!(host(&dask("tcp"), LARGE), Socket("tcp"));
        assert_eq!(host(&dask("direct"), LARGE), SharedMemory);
        assert_eq!(host(&dask("direct"), 8), Socket("direct/unix"), "headers have no better way");
        assert_eq!(expected(&dask("direct"), MemoryKind::Device, 8), Expected::CudaIpc);
        let off = json!({ "protocol": "direct", "config": { DIRECT_DEVICES: "False" } });
        let off = plan(json!({ "engine": "dask", "dask": off }));
        assert_eq!(expected(&off, MemoryKind::Device, LARGE), Staging);
        assert_eq!(host(&dask("ucxx"), 8), SharedMemory);
        assert_eq!(expected(&dask("ucxx"), MemoryKind::Device, LARGE), Expected::CudaIpc);
        let mut without = dask("ucxx");
        for worker in &mut without.workers {
            worker.env.insert("UCX_TLS".to_owned(), "tcp,self".to_owned());
        }
        assert_eq!(host(&without, LARGE), AnyLane, "whoever leaves it out does not expect it");
        let native = plan(json!({ "ucx": { "env": { "UCX_TLS": "tcp,self" } } }));
        assert_eq!(host(&native, LARGE), SharedMemory, "but for the native engine");
    }

    #[test]
    fn a_socket_is_a_downgrade_of_shared_memory_and_tcp_of_no_network() {
        let lacks = |plan: &Plan, text| missing(plan, None, "gpu0", "gpu1", &lanes(text));
        let direct = dask("direct");
        assert_eq!(lacks(&direct, "direct/unix"), Some(Expected::SharedMemory));
        assert_eq!(lacks(&direct, "direct/tcp"), Some(Expected::SharedMemory));
        assert_eq!(lacks(&direct, "direct/copy direct/mapped"), None);
        assert_eq!(lacks(&dask("tcp"), "tcp"), None);
        let why = Expected::SharedMemory.downgrade(&direct, "gpu0", &lanes("direct/unix"), None);
        assert_eq!(why, "shared memory expected, direct/unix used");
        let known = Some("distributed.comm.direct.route is socket");
        let why = Expected::SharedMemory.downgrade(&direct, "gpu0", &lanes("direct/unix"), known);
        assert!(why.ends_with(" used because distributed.comm.direct.route is socket"), "{why}");
    }

    #[test]
    fn a_list_of_transports_permits_what_it_names_or_does_not_exclude() {
        for list in ["tcp,cuda_copy,cuda_ipc,sm", "all", "sm,cuda", "^ib"] {
            assert!(permits_cuda_ipc(list), "{list}");
        }
        for list in ["tcp,cuda_copy,sm,self", "^cuda_ipc", "^tcp,cuda"] {
            assert!(!permits_cuda_ipc(list), "{list}");
        }
    }

    #[test]
    fn shared_memory_is_any_transport_within_the_machine() {
        let expected = Expected::SharedMemory;
        assert!(expected.is_among(&lanes("posix/memory cma/memory")));
        assert!(expected.is_among(&lanes("tcp/lo sysv/memory")));
        assert!(!expected.is_among(&lanes("tcp/lo")));
        assert!(!expected.is_among(&[]));
        assert!(Expected::CudaIpc.is_among(&lanes("cuda_ipc/cuda")));
    }
}
