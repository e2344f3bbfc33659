//! Every reason of a plan, as text that a person reviews; and what the size of a GPU or the number
//! of workers refuses.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::compact::{caller, caller_with, machine, planned, planned_by, spec};
use cuda_cluster::cpuset::CpuSet;
use cuda_cluster::ids::NumaId;
use cuda_cluster::plan::{CallerEnvironment, EnginePlan, InstalledUcx, Plan, libucp_paths};
use cuda_cluster::topology::{Allowed, Topology};

/// The reasons of the first and the last worker and of the scheduler. A line that the last worker
/// shares with the first is not repeated.
fn reasons(plan: &Plan) -> String {
    let mut text = String::new();
    let mut known: Vec<String> = Vec::new();
    let first = plan.workers.first().map(|worker| (worker.name.as_str(), &worker.why));
    let last = plan.workers.last().map(|worker| (worker.name.as_str(), &worker.why));
    let scheduler = plan.scheduler.as_ref().map(|scheduler| ("scheduler", &scheduler.why));
    for (process, why) in [first, last, scheduler].into_iter().flatten() {
        for why in why {
            let mut line = format!("{}: {}: {}", why.choice, why.chosen, why.reason);
            for rejected in &why.rejected {
                let _ = write!(line, "\n    not {}: {}", rejected.what, rejected.why);
            }
            if !known.contains(&line) {
                let _ = writeln!(text, "{process} {line}");
                known.push(line);
            }
        }
    }
    for note in &plan.notes {
        let _ = writeln!(text, "note {note}");
    }
    text
}

fn made(topology: &Topology, text: &str, caller: &CallerEnvironment) -> Plan {
    planned_by(topology, &spec(text), caller).unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// Machine, spec: chosen so that together they show every kind of reason.
const SHOWN: &[(&str, &str)] = &[
    ("dgx-1-v100", "ucx: {nvlink: true, infiniband: true, net_devices: pin}\ncpus: split\n"),
    ("dgx-1-v100", "workers: 3\ncpu_workers: 1\nmemory: {policy: bind}\n"),
    ("dgx-h100", "ucx: {infiniband: true, net_devices: stripe}\nworkers_per_gpu: 2\n"),
    ("dgx-h100", "gpus: [7, 2]\nengine: dask\nrmm: {pool_size: 0.5}\nmemory: {limit: 0.1}\n"),
    (
        "dgx-h100",
        "engine: command\nucx: {infiniband: true, net_devices: auto}\nmemory: {limit: auto}\n",
    ),
    (
        "dgx-h100",
        "gpus: {count: 2, choose: first}\nmemory: {limit: none}\ndevice: {memory_limit: 10GB}\n",
    ),
    ("rtx-4090-2", "ucx: {tcp: true}\ndask: {protocol: ucx}\nengine: dask\n"),
    ("rtx-4090-2", "gpus: [1]\ncpus: none\nmemory: {policy: none}\n"),
    (
        "dgx-1-v100",
        "engine: command\ncpu_workers: 1\ncommand: {programs: [{name: trainer, workers: 4}, \
         {name: rollout, workers: 3}]}\n",
    ),
];

#[test]
fn every_kind_of_reason_is_as_reviewed() {
    let mut text = String::new();
    for (name, asked) in SHOWN {
        let plan = made(&machine(name), asked, &caller());
        let _ = writeln!(text, "==== {name}\n{asked}----\n{}", reasons(&plan));
    }
    insta::assert_snapshot!("reasons", text);
}

#[test]
fn the_settings_of_the_native_engine_are_as_reviewed() {
    let mut text = String::new();
    for (name, asked) in [
        ("rtx-4090-2", "cpu_workers: 1\n"),
        ("l40s-8", "gpus: [0, 1, 4]\n"),
        ("dgx-1-p100", "gpus: [0, 1, 4, 5]\n"),
        ("dgx-b200", "workers: 2\nworkers_per_gpu: 2\n"),
        ("dgx-a100-mig", "gpus: [\"0:0\", \"0:1\", 2, 3]\n"),
        ("dgx-1-v100", "workers: 2\nworker: {resources: {disk: 3}}\nnative: {disk_limit: 1GB}\n"),
    ] {
        let EnginePlan::Native(native) = made(&machine(name), asked, &caller()).engine else {
            panic!("the native engine is the default");
        };
        let _ = writeln!(text, "==== {name}\n{asked}----");
        for (from, to) in &native.gb_per_s {
            let ways: Vec<String> = to.iter().map(|(to, rate)| format!("{to} {rate}")).collect();
            let _ = writeln!(text, "{from} to: {}", ways.join(", "));
        }
        let _ = writeln!(text, "disk {:?}, {:?}", native.disk_limit_bytes, native.resources);
    }
    insta::assert_snapshot!("native-settings", text);
}

#[test]
fn the_reason_for_a_gpu_says_how_many_there_are() {
    let reason = |topology: &Topology, text: &str| {
        let plan = made(topology, text, &caller());
        plan.workers[0].why.iter().find(|why| why.choice == "gpu").map(|why| why.reason.clone())
    };
    let mut one = machine("rtx-4090-2");
    assert_eq!(reason(&one, "").as_deref(), Some("each of the machine's 2 GPUs gets a worker"));
    one.gpus.truncate(1);
    one.links = Default::default();
    assert_eq!(reason(&one, "").as_deref(), Some("the only GPU of the machine"));
    let mut busy = machine("rtx-4090-2");
    busy.gpus[0].processes = vec![77];
    assert_eq!(
        reason(&busy, "busy_gpus: skip\n").as_deref(),
        Some("the only one of the machine's 2 GPUs that can be used")
    );
}

#[test]
fn one_address_serves_one_worker_and_each_worker_needs_a_port() {
    let topology = machine("dgx-1-v100");
    let refused = |text: &str| planned(&topology, &spec(text)).expect_err(text).to_string();
    for key in ["listen_address", "contact_address"] {
        let asked = format!("engine: dask\nworker: {{{key}: 10.0.0.5}}\n");
        let error = refused(&asked);
        assert!(error.contains(&format!("worker.{key}")), "{error}");
        assert!(error.contains("one address cannot serve 8 workers"), "{error}");
        let one = planned(&topology, &spec(&format!("{asked}workers: 1\n")));
        assert!(one.is_ok(), "one worker may have it");
    }
    let ports = |range: &str| format!("engine: dask\nworker: {{ports: \"{range}\"}}\n");
    let error = refused(&ports("9000:9006"));
    assert!(error.contains("9000:9006 has fewer ports than there are workers (8)"), "{error}");
    for enough in ["9000:9007", "9000:9008", "0"] {
        assert!(planned(&topology, &spec(&ports(enough))).is_ok(), "{enough}");
    }
}

#[test]
fn sizes_may_fill_a_gpu_and_not_exceed_it() {
    let topology = machine("rtx-4090-2");
    let whole = topology.gpus[0].memory_bytes.expect("known");
    for (key, section) in [("memory_limit", "device"), ("pool_size", "engine: dask\nrmm")] {
        let asked = |bytes: u64| spec(&format!("{section}: {{{key}: {bytes}}}\n"));
        assert!(planned(&topology, &asked(whole)).is_ok(), "{key}: all of it");
        assert!(planned(&topology, &asked(whole - 1)).is_ok(), "{key}: less");
        let error = planned(&topology, &asked(whole + 1)).expect_err("more").to_string();
        assert!(error.contains(key) && error.contains("of the GPU of gpu0"), "{error}");
    }
    let managed = format!("engine: dask\nrmm: {{pool_size: {}, managed: true}}\n", whole + 1);
    assert!(planned(&topology, &spec(&managed)).is_ok(), "managed memory may be larger");
    let one =
        format!("overrides: [{{match: {{worker: gpu1}}, device_memory_limit: {}}}]\n", whole + 1);
    let error = planned(&topology, &spec(&one)).expect_err("more").to_string();
    assert!(error.contains("of the GPU of gpu1"), "{error}");
}

#[test]
fn limits_of_processes_are_those_that_were_asked_for() {
    let plan =
        made(&machine("rtx-4090-2"), "ulimits: {nofile: 4096, memlock: unlimited}\n", &caller());
    let limits: BTreeMap<&str, Option<u64>> = plan
        .supervision
        .ulimits
        .iter()
        .map(|(name, limit)| (name.as_str(), limit.soft()))
        .collect();
    assert_eq!(limits, BTreeMap::from([("nofile", Some(4096)), ("memlock", None)]));
    let none = made(&machine("rtx-4090-2"), "", &caller());
    assert!(none.supervision.ulimits.is_empty());
}

/// One GPU on the first of three NUMA nodes with four CPUs each. The first two nodes are one
/// package; the CPUs of the first are not allowed.
fn half_allowed() -> Topology {
    let mut topology = machine("dgx-h100");
    let set = |text: &str| text.parse::<CpuSet>().expect(text);
    topology.gpus.truncate(1);
    topology.links = Default::default();
    topology.numa.truncate(1);
    for (id, package, cpus) in [(1, 0, "4-7"), (2, 1, "8-11")] {
        let mut node = topology.numa[0].clone();
        (node.id, node.package, node.cpus) = (NumaId(id), Some(package), Some(set(cpus)));
        topology.numa.push(node);
    }
    (topology.numa[0].package, topology.numa[0].cpus) = (Some(0), Some(set("0-3")));
    topology.cores = Vec::new();
    topology.gpus[0].cpus = Some(set("0-3"));
    let mems = topology.numa.iter().map(|node| node.id.0).collect();
    topology.allowed = Some(Allowed { cpus: set("4-11"), mems });
    topology
}

#[test]
fn a_package_is_found_by_the_gpus_node_or_by_its_cpus() {
    let shown = |topology: &Topology| made(topology, "", &caller()).workers[0].binding.cpus.clone();
    let beside = Some("4-7".parse::<CpuSet>().expect("CPUs"));
    let mut topology = half_allowed();
    topology.gpus[0].numa = None;
    topology.gpus[0].numa_set = None;
    assert_eq!(shown(&topology), beside, "by its CPUs");
    topology.numa[0].cpus = None;
    topology.gpus[0].numa = Some(topology.numa[0].id);
    assert_eq!(shown(&topology), beside, "by its node");
    topology.gpus[0].numa = None;
    topology.gpus[0].numa_set = Some([topology.numa[0].id.0].into_iter().collect());
    assert_eq!(shown(&topology), beside, "by its nodes");
    topology.gpus[0].numa_set = None;
    let plan = made(&topology, "", &caller());
    assert_eq!(plan.workers[0].binding.cpus, topology.allowed.map(|allowed| allowed.cpus));
    assert!(plan.notes.iter().any(|note| note.to_string().contains("gets the allowed ones")));
}

#[test]
fn host_memory_is_shared_out_by_node_by_machine_or_by_the_cgroup() {
    let mut topology = machine("rtx-4090-2");
    let machine_bytes: u64 = topology.numa.iter().filter_map(|node| node.memory_bytes).sum();
    let limit = |topology: &Topology, text: &str, cgroup| {
        let mut caller = caller();
        caller.memory_limit_bytes = cgroup;
        made(topology, text, &caller).workers[0].memory_limit_bytes
    };
    let unbound = "memory: {policy: none}\n";
    let share = machine_bytes / 2;
    assert_eq!(limit(&topology, unbound, None), Some(share));
    assert_eq!(limit(&topology, unbound, Some(share)), Some(share / 2), "the cgroup has less");
    assert_eq!(limit(&topology, unbound, Some(4 * share)), Some(share), "the cgroup has more");
    let fraction = "memory: {policy: none, limit: 0.25}\n";
    assert_eq!(limit(&topology, fraction, None), Some(machine_bytes / 4));
    for node in &mut topology.numa {
        node.memory_bytes = None;
    }
    assert_eq!(limit(&topology, unbound, None), None);
    assert_eq!(limit(&topology, unbound, Some(share)), Some(share / 2), "only the cgroup is known");
    assert_eq!(limit(&topology, fraction, Some(share)), None);
}

fn installed(path: &str, cuda: bool, verbs: bool) -> InstalledUcx {
    let mut library = InstalledUcx::new(path, format!("the one of {path}"));
    (library.cuda, library.verbs) = (cuda, verbs);
    library
}

#[test]
fn the_paths_of_libucp_are_those_that_the_processes_are_told() {
    let libraries =
        vec![installed("/a/libucp.so.0", false, true), installed("/b/libucp.so.0", true, false)];
    let mut caller = caller();
    caller.ucx_libraries = Some(libraries);
    let topology = machine("rtx-4090-2");
    let native = made(&topology, "", &caller);
    assert_eq!(libucp_paths(&native).into_iter().collect::<Vec<_>>(), ["/b/libucp.so.0"]);
    let why = native.workers[0].why.iter().find(|why| why.choice == "ucx.library").expect("why");
    assert_eq!(why.rejected.len(), 1);
    assert_eq!(why.rejected[0].what, "/a/libucp.so.0");
    for engine in ["dask", "command"] {
        let plan = made(&topology, &format!("engine: {engine}\nucx: {{library: auto}}\n"), &caller);
        assert_eq!(libucp_paths(&plan).into_iter().collect::<Vec<_>>(), ["/b/libucp.so.0"]);
        let usual = made(&topology, &format!("engine: {engine}\n"), &caller);
        assert!(libucp_paths(&usual).is_empty(), "{engine}");
    }
    let mut none = caller;
    none.ucx_libraries = Some(vec![installed("/a/libucp.so.0", false, true)]);
    let told = |text: &str| {
        let plan = made(&topology, text, &none);
        plan.notes.iter().any(|note| note.to_string().contains("no libucp that knows CUDA"))
    };
    assert!(told(""));
    assert!(told("gpus: none\ncpu_workers: 2\nucx: {library: auto}\n"));
    assert!(!told("gpus: none\ncpu_workers: 2\n"));
    // Who has not looked is not told what is there.
    let unknown = CallerEnvironment::default();
    assert!(made(&machine("dgx-a100"), "strict: true\n", &unknown).notes.is_empty());
    let asked = made(&topology, "ucx: {library: auto}\n", &unknown);
    assert!(asked.notes.iter().any(|note| note.text.contains("is not known")), "{:?}", asked.notes);
}

#[test]
fn a_cuda_library_that_is_set_by_the_caller_stands() {
    let caller = caller_with("CUDA_CLUSTER_UCX", "/c/libucp.so.0");
    let plan = made(&machine("rtx-4090-2"), "", &caller);
    assert_eq!(libucp_paths(&plan).into_iter().collect::<Vec<_>>(), ["/c/libucp.so.0"]);
}

#[test]
fn dask_forks_unless_it_is_told_to_spawn() {
    let forks = |text: &str| match made(&machine("rtx-4090-2"), text, &caller()).engine {
        EnginePlan::Dask(dask) => dask.fork,
        engine => panic!("{engine:?}"),
    };
    assert!(forks("engine: dask\n"));
    assert!(forks("engine: dask\ndask: {start_method: fork}\n"));
    assert!(!forks("engine: dask\ndask: {start_method: spawn}\n"));
}

#[test]
fn workers_of_two_kinds_have_a_resource_each_by_which_tasks_can_ask_for_them() {
    let kinds = |text: &str| {
        let plan = made(&machine("dgx-h100"), &format!("engine: dask\n{text}"), &caller());
        let EnginePlan::Dask(dask) = &plan.engine else { panic!("Dask's") };
        let why = plan.workers.iter().flat_map(|worker| &worker.why);
        let why = why.filter(|why| why.choice == "resources");
        assert_eq!(why.count(), dask.resources_by_kind.len());
        let of = |(name, amounts): (&String, &BTreeMap<String, u32>)| {
            amounts.iter().map(|(kind, n)| format!("{name} {kind}={n}")).collect::<String>()
        };
        let all: Vec<String> = dask.resources_by_kind.iter().map(of).collect();
        (all.join(", "), plan.notes.iter().any(|note| note.about == "dask.place_by_kind"))
    };
    let none = (String::new(), false);
    let two = "gpus: [0]\ncpu_workers: 1\n";
    let threads = "threads: 2\noverrides: [{match: {worker: cpu0}, threads: 8}]\n";
    assert_eq!(kinds(two), ("cpu0 CPU=1, gpu0 GPU=1".to_owned(), false));
    assert_eq!(kinds(&format!("{two}{threads}")).0, "cpu0 CPU=8, gpu0 GPU=2");
    // What somebody has thought out stands.
    assert_eq!(kinds(&format!("{two}worker: {{resources: {{MEM: 1}}}}")), none);
    assert_eq!(kinds("gpus: [0]\n"), none);
    assert_eq!(kinds("gpus: none\ncpu_workers: 1\n"), none);
    // Workers of the other kind may join.
    let by_kind = "dask: {place_by_kind: true}\n";
    assert_eq!(kinds(&format!("gpus: [0]\n{by_kind}")), ("gpu0 GPU=1".to_owned(), false));
    let joins = "dask: {place_by_kind: true, join: 'tcp://10.0.0.1:8786'}\n";
    let cpu = "gpus: none\ncpu_workers: 1\n";
    assert_eq!(kinds(&format!("{cpu}{joins}")), ("cpu0 CPU=1".to_owned(), false));
    assert_eq!(kinds(&format!("{cpu}{by_kind}")), ("cpu0 CPU=1".to_owned(), true));
    let besides = format!("{two}{by_kind}worker: {{resources: {{MEM: 1}}}}");
    assert_eq!(kinds(&besides).0, "cpu0 CPU=1, gpu0 GPU=1");
}

#[test]
fn what_native_workers_read_of_a_plan_has_all_but_the_reasons_and_the_rates() {
    let whole = made(&machine("dgx-h100"), "workers_per_gpu: 16\n", &caller());
    let text = |plan: &Plan| serde_json::to_string(plan).expect("JSON");
    let lean = Plan::parse(&text(&whole.for_native_workers())).expect("a plan");
    assert!(text(&lean).len() * 5 < text(&whole).len());
    assert_eq!((lean.workers.len(), &lean.machine), (128, &whole.machine));
    for (worker, whole) in lean.workers.iter().zip(&whole.workers) {
        assert!(!whole.why.is_empty() && worker.why.is_empty());
        let mut again = worker.clone();
        again.why.clone_from(&whole.why);
        assert_eq!(again, *whole);
    }
    let (EnginePlan::Native(mut lean), EnginePlan::Native(whole)) = (lean.engine, whole.engine)
    else {
        panic!("the native engine");
    };
    assert!(!whole.gb_per_s.is_empty() && lean.gb_per_s.is_empty());
    lean.gb_per_s.clone_from(&whole.gb_per_s);
    assert_eq!(lean, whole);
}
