//! A plan of another machine, made launchable on this one.
//!
//! Changes only what this machine does not have. The printed plan is the original one.
//!
//! *Invariant:* every CPU, memory node and network device of the result exists here.

use std::collections::{BTreeMap, BTreeSet};

use super::bootstrap;
use super::engine::EnginePlan;
use super::exposed::is_loopback;
use super::form::{Binding, Plan};
use super::memory::LEAST_HOST_LIMIT;
use super::variables::{NET_DEVICES, TLS, is_rdma, may_use_tcp};
use crate::cpuset::{CpuSet, NodeSet};
use crate::spec::MemoryPolicy;
use crate::topology::Note;
use crate::units::HumanBytes;

/// What this machine has, to which `adapt_to_here` adapts a plan.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Here {
    /// The CPUs that this process may use.
    pub cpus: CpuSet,
    /// The allowed NUMA nodes; empty if the kernel has none.
    pub mems: NodeSet,
    /// Network interfaces and RDMA ports (`lo`, `eth0`, `mlx5_0:1`).
    pub net_devices: BTreeSet<String>,
    /// Whether there is a GPU, and so whether UCX's CUDA transports can work.
    pub gpu: bool,
    /// Host memory that this process may use, in bytes; `None` if unknown.
    pub memory_bytes: Option<u64>,
}

/// The launchable version of a plan, and how it differs.
pub fn adapt_to_here(plan: &Plan, here: &Here) -> (Plan, Vec<Note>) {
    let mut adapted = plan.clone();
    let mut notes = Vec::new();
    bind_here(&mut adapted, here, &mut notes);
    bootstrap::fit(&mut adapted.workers);
    let rdma = here.net_devices.iter().any(|device| device.contains(':'));
    let mut dropped = Dropped::default();
    let scheduler = adapted.scheduler.iter_mut().map(|scheduler| &mut scheduler.env);
    let workers = adapted.workers.iter_mut().map(|worker| &mut worker.env);
    for env in scheduler.chain(workers).chain([&mut adapted.client_env]) {
        net_devices_here(env, here, &mut dropped);
        transports_here(env, here, rdma, &mut dropped);
    }
    dropped.say(&mut notes);
    listen_here(&mut adapted);
    limit_here(&mut adapted, here, &mut notes);
    for worker in &mut adapted.workers {
        worker.nics.retain(|nic| here.net_devices.contains(&nic.to_string()));
    }
    (adapted, notes)
}

/// Gives each process CPUs and memory nodes that exist.
fn bind_here(plan: &mut Plan, here: &Here, notes: &mut Vec<Note>) {
    let cpus: Vec<u32> = here.cpus.iter().collect();
    let mut spread = Vec::new();
    let mut lost_nodes = false;
    let scheduler = plan.scheduler.iter_mut().map(|s| ("scheduler".to_owned(), &mut s.binding));
    let workers = plan.workers.iter_mut().map(|w| (w.name.clone(), &mut w.binding));
    for (at, (name, binding)) in workers.chain(scheduler).enumerate() {
        let planned = binding.cpus.clone();
        if let Some(planned) = planned.filter(|planned| !planned.is_subset(&here.cpus)) {
            let shared = planned.intersection(&here.cpus);
            // Dealt in turn, so that the processes do not all sit on the first CPU.
            let in_turn = cpus.get(at % cpus.len().max(1)).copied();
            binding.cpus = match in_turn {
                _ if !shared.is_empty() => Some(shared),
                Some(cpu) => {
                    spread.push(name);
                    Some(std::iter::once(cpu).collect())
                }
                None => None,
            };
        }
        lost_nodes |= nodes_here(binding, here);
    }
    let planned_elsewhere = plan.workers.iter().any(|w| w.binding.cpus.is_some());
    if planned_elsewhere && (!spread.is_empty() || lost_nodes) {
        let mut text = format!("this machine has CPUs {}", here.cpus);
        if !spread.is_empty() {
            let verb = if spread.len() == 1 { "gets" } else { "get" };
            text.push_str(&format!("; {} {verb} one of them in turn", spread.join(", ")));
        }
        notes.push(Note::new("simulation", text));
    }
    if lost_nodes {
        let text = format!("this machine has NUMA nodes {}; other ones are left out", here.mems);
        notes.push(Note::new("simulation", text));
    }
}

/// Lets UCX listen on loopback, unless somebody asked for an address: all processes of a simulated
/// machine are on this one, and UCX's listeners on its network would be anybody's.
fn listen_here(plan: &mut Plan) {
    let local = match &plan.engine {
        EnginePlan::Native(_) => true,
        EnginePlan::Dask(dask) => {
            dask.join.is_none()
                && dask.interface.is_none()
                && dask.host.as_deref().is_none_or(is_loopback)
        }
        // Whoever runs a program says where it listens.
        EnginePlan::Command(_) => false,
    };
    if plan.ucx.is_none() || !local {
        return;
    }
    let scheduler = plan.scheduler.iter_mut().map(|scheduler| &mut scheduler.env);
    let workers = plan.workers.iter_mut().map(|worker| &mut worker.env);
    let all = scheduler.chain(workers).chain([&mut plan.client_env]);
    for env in all.filter(|env| may_use_tcp(env)) {
        env.entry(NET_DEVICES.to_owned()).or_insert_with(|| "lo".to_owned());
    }
}

/// Lowers the workers' memory limits in proportion where this machine has less than all of them
/// together. A limit beyond the memory would never be reached: nothing would go to the disk, and
/// the kernel would end a process instead.
fn limit_here(plan: &mut Plan, here: &Here, notes: &mut Vec<Note>) {
    let Some(memory) = here.memory_bytes else { return };
    let limits = || plan.workers.iter().filter_map(|worker| worker.memory_limit_bytes);
    let sum: u128 = limits().map(u128::from).sum();
    if sum <= u128::from(memory) {
        return;
    }
    let share = |limit: u64| {
        let share = u128::from(limit) * u128::from(memory) / sum;
        u64::try_from(share).unwrap_or(memory).max(LEAST_HOST_LIMIT.min(limit))
    };
    let (least, most) = (limits().min().unwrap_or(0), limits().max().unwrap_or(0));
    let text = match (least == most, limits().count()) {
        (_, 1) => format!("its worker's limit is {}", HumanBytes(share(most))),
        (true, _) => {
            format!(
                "each worker's limit is {} instead of {}",
                HumanBytes(share(most)),
                HumanBytes(most)
            )
        }
        (false, _) => {
            let (least, most) = (HumanBytes(share(least)), HumanBytes(share(most)));
            format!("the workers' limits are {least} to {most}")
        }
    };
    let memory = HumanBytes(memory);
    notes.push(Note::new("simulation", format!("this machine has {memory} of memory; {text}")));
    for worker in &mut plan.workers {
        worker.memory_limit_bytes = worker.memory_limit_bytes.map(share);
    }
}

/// Keeps the memory nodes that exist, and tells whether any were dropped.
fn nodes_here(binding: &mut Binding, here: &Here) -> bool {
    let Some(planned) = binding.mems.clone() else { return false };
    if planned.is_subset(&here.mems) {
        return false;
    }
    let shared = planned.intersection(&here.mems);
    if shared.is_empty() {
        binding.mems = None;
        binding.memory_policy = MemoryPolicy::None;
    } else {
        binding.mems = Some(shared);
    }
    true
}

/// What was removed from the environment; one note for each kind.
#[derive(Default)]
struct Dropped {
    devices: BTreeSet<String>,
    transports: BTreeSet<String>,
}

impl Dropped {
    fn say(&self, notes: &mut Vec<Note>) {
        for (what, names) in [("network device", &self.devices), ("transport", &self.transports)] {
            if !names.is_empty() {
                let list: Vec<&str> = names.iter().map(String::as_str).collect();
                let text = format!("this machine has no {what} {}", list.join(", "));
                notes.push(Note::new("simulation", text));
            }
        }
    }
}

fn net_devices_here(env: &mut BTreeMap<String, String>, here: &Here, dropped: &mut Dropped) {
    let Some(value) = env.get_mut(NET_DEVICES) else { return };
    let (kept, lost): (Vec<&str>, Vec<&str>) =
        value.split(',').partition(|name| *name == "all" || here.net_devices.contains(*name));
    if lost.is_empty() {
        return;
    }
    dropped.devices.extend(lost.into_iter().map(str::to_owned));
    // UCX needs a device for connection setup; every machine has loopback.
    *value = if kept.is_empty() { "lo".to_owned() } else { kept.join(",") };
}

fn transports_here(
    env: &mut BTreeMap<String, String>,
    here: &Here,
    rdma: bool,
    dropped: &mut Dropped,
) {
    let Some(value) = env.get_mut(TLS).filter(|value| !value.starts_with('^')) else { return };
    let exists = |lane: &&str| {
        let over_cuda = lane.starts_with("cuda") || *lane == "gdr_copy";
        (here.gpu || !over_cuda) && (rdma || !is_rdma(lane))
    };
    let (kept, lost): (Vec<&str>, Vec<&str>) = value.split(',').partition(exists);
    if lost.is_empty() {
        return;
    }
    dropped.transports.extend(lost.into_iter().map(str::to_owned));
    *value = if kept.is_empty() { "posix,cma,self".to_owned() } else { kept.join(",") };
    // Connection setup cannot use RDMA where there is no RDMA hardware.
    let priority = env.get_mut("UCX_SOCKADDR_TLS_PRIORITY").filter(|_| !rdma);
    if let Some(priority) = priority {
        "tcp".clone_into(priority);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{CallerEnvironment, plan};
    use crate::spec::{ClusterSpec, Request};
    use crate::topology;

    /// A small machine: two CPUs, one node, no NIC, no GPU.
    fn small() -> Here {
        Here {
            cpus: "0-1".parse().expect("CPUs"),
            mems: "0".parse().expect("nodes"),
            net_devices: ["lo", "eth0"].map(str::to_owned).into(),
            gpu: false,
            memory_bytes: None,
        }
    }

    fn planned(text: &str) -> Plan {
        let machine = topology::parse(topology::builtin("dgx-h100").expect("built in"));
        let spec: ClusterSpec = crate::spec::parse(text, "test").expect("right");
        let request = Request::of(spec).expect("right");
        let caller = CallerEnvironment::default();
        plan(&machine.expect("a machine"), &request, &caller).expect("a plan")
    }

    #[test]
    fn a_large_machines_plan_becomes_launchable_here() {
        let plan = planned(
            "version: 1\ncpus: split\nmemory: {policy: bind}\nucx: {nvlink: true, infiniband: true}\n",
        );
        let (here, notes) = adapt_to_here(&plan, &small());
        let cpus: Vec<String> = here
            .workers
            .iter()
            .filter_map(|w| w.binding.cpus.as_ref())
            .map(|c| c.to_string())
            .collect();
        // GPU 0 keeps what exists of its share; the others are dealt both CPUs in turn.
        assert_eq!(cpus, ["0-1", "1", "0", "1", "0", "1", "0", "1"]);
        for worker in &here.workers {
            assert_eq!(worker.env["UCX_NET_DEVICES"], "lo");
            assert_eq!(worker.env["UCX_TLS"], "posix,cma,self");
            assert!(worker.nics.is_empty());
            assert!(worker.binding.mems.as_ref().is_none_or(|mems| mems.to_string() == "0"));
        }
        assert_eq!(here.workers[7].binding.memory_policy, MemoryPolicy::None);
        assert_eq!(here.client_env["UCX_NET_DEVICES"], "lo");
        let text: Vec<String> = notes.iter().map(ToString::to_string).collect();
        for part in
            ["CPUs 0-1", "NUMA nodes 0", "no network device mlx5_0:1", "no transport cuda_copy"]
        {
            assert!(
                text.iter().any(|note| note.contains(part)),
                "{part:?} is missing in {text:#?}"
            );
        }
    }

    #[test]
    fn a_plan_that_fits_is_left_as_it_is() {
        let plan = planned("version: 1\nucx: {nvlink: true, infiniband: true}\n");
        let mut net_devices: BTreeSet<String> =
            plan.workers.iter().flat_map(|w| &w.nics).map(ToString::to_string).collect();
        net_devices.insert("lo".to_owned());
        let all = Here {
            cpus: "0-223".parse().expect("CPUs"),
            mems: "0-1".parse().expect("nodes"),
            net_devices,
            gpu: true,
            memory_bytes: Some(4 << 40),
        };
        assert_eq!(adapt_to_here(&plan, &all), (plan, Vec::new()));
    }

    #[test]
    fn memory_limits_are_shares_of_what_this_machine_has() {
        let plan = planned("version: 1\n");
        let limit = plan.workers[0].memory_limit_bytes.expect("limited");
        assert_eq!(limit, 256 << 30);
        let at = |memory_bytes| Here { memory_bytes: Some(memory_bytes), ..small() };
        let (here, notes) = adapt_to_here(&plan, &at(24 << 30));
        assert!(here.workers.iter().all(|worker| worker.memory_limit_bytes == Some(3 << 30)));
        let text = "simulation: this machine has 24.0 GiB of memory; each worker's limit is 3.0 GiB \
                    instead of 256.0 GiB";
        assert!(notes.iter().any(|note| note.to_string() == text), "{notes:#?}");
        // No worker can live with less than this.
        let (here, _) = adapt_to_here(&plan, &at(8 << 20));
        assert_eq!(here.workers[0].memory_limit_bytes, Some(LEAST_HOST_LIMIT));
        let (here, _) = adapt_to_here(&plan, &at(8 * limit));
        assert_eq!(here.workers[0].memory_limit_bytes, Some(limit));
    }

    #[test]
    fn listeners_of_a_simulated_machine_are_on_loopback_unless_an_address_is_asked_for() {
        let devices = |text: &str| {
            let (here, _) = adapt_to_here(&planned(text), &small());
            let scheduler = here.scheduler.map(|scheduler| scheduler.env);
            let all = scheduler.into_iter().chain(here.workers.into_iter().map(|w| w.env));
            let devices = all.chain([here.client_env]).map(|env| env.get(NET_DEVICES).cloned());
            let distinct: BTreeSet<Option<String>> = devices.collect();
            distinct.into_iter().map(Option::unwrap_or_default).collect::<Vec<_>>().join(" and ")
        };
        assert_eq!(devices("version: 1\n"), "", "nothing listens");
        for local in [
            "version: 1\nucx: {tcp: true}\n",
            "version: 1\nucx: {tcp: true, infiniband: true}\n",
            "version: 1\nucx: {tcp: true, infiniband: true, net_devices: none}\n",
            "version: 1\nengine: dask\ndask: {protocol: ucxx}\n",
            "version: 1\nengine: dask\nucx: {infiniband: true}\n",
        ] {
            assert_eq!(devices(local), "lo", "{local}");
        }
        let dask = "version: 1\nengine: dask\ndask: {protocol: ucxx}\n";
        assert_eq!(devices(&format!("{dask}scheduler: {{interface: eth0}}\n")), "");
        assert_eq!(devices("version: 1\nengine: dask\ndask: {protocol: tcp}\n"), "");
        let program = "version: 1\nengine: command\nsimulate: true\nucx: {infiniband: true}\n";
        assert_eq!(devices(program), "lo", "what the plan itself names");
    }

    #[test]
    fn a_plan_without_bindings_stays_without() {
        let (here, notes) =
            adapt_to_here(&planned("version: 1\ncpus: none\nmemory: {policy: none}\n"), &small());
        assert!(here.workers.iter().all(|worker| worker.binding
            == Binding { memory_policy: MemoryPolicy::None, ..Binding::default() }));
        let text: Vec<String> = notes.iter().map(ToString::to_string).collect();
        assert_eq!(text, ["simulation: this machine has no transport cuda_copy, cuda_ipc"]);
    }
}
