//! The 81 combinations of dask-cuda's transport flags, against its own table.

use crate::compact;
use std::collections::BTreeMap;

use crate::compact::{caller, machine};
use cuda_cluster::plan::{CallerEnvironment, Plan, plan};
use cuda_cluster::spec::{ClusterSpec, EngineKind, Request, UcxCompat};

const STATES: [Option<bool>; 3] = [None, Some(true), Some(false)];

/// A flag in the table: unset, on, off, or a set of these.
fn fits(cell: &str, flag: Option<bool>) -> bool {
    let word = match flag {
        None => "-",
        Some(true) => "on",
        Some(false) => "off",
    };
    cell == "any" || cell.split('/').any(|part| part == word)
}

/// dask-cuda's published table: tcp, infiniband, nvlink, UCX_TLS. The first row that matches
/// applies.
const TABLE: [(&str, &str, &str, Option<&str>); 12] = [
    ("-", "-", "-", None),
    ("off", "off", "off", None),
    ("on", "-/off", "-/off", Some("tcp,cuda_copy")),
    ("any", "-/off", "on", Some("tcp,cuda_copy,cuda_ipc")),
    ("any", "on", "-/off", Some("rc,tcp,cuda_copy")),
    ("any", "on", "on", Some("rc,tcp,cuda_copy,cuda_ipc")),
    ("-", "-", "off", Some("rc,tcp,cuda_copy")),
    ("-", "off", "-", Some("tcp,cuda_copy,cuda_ipc")),
    ("-", "off", "off", Some("tcp,cuda_copy")),
    ("off", "-", "-", Some("rc,tcp,cuda_copy,cuda_ipc")),
    ("off", "-", "off", Some("rc,tcp,cuda_copy")),
    ("off", "off", "-", Some("tcp,cuda_copy,cuda_ipc")),
];

fn expected(tcp: Option<bool>, ib: Option<bool>, nvlink: Option<bool>) -> Option<&'static str> {
    let row = TABLE.iter().find(|(a, b, c, _)| fits(a, tcp) && fits(b, ib) && fits(c, nvlink));
    row.unwrap_or_else(|| panic!("the table has no row for {tcp:?} {ib:?} {nvlink:?}")).3
}

fn combinations() -> impl Iterator<Item = [Option<bool>; 4]> {
    STATES.into_iter().flat_map(|tcp| {
        STATES.into_iter().flat_map(move |ib| {
            STATES.into_iter().flat_map(move |nvlink| {
                STATES.into_iter().map(move |rdmacm| [tcp, ib, nvlink, rdmacm])
            })
        })
    })
}

fn planned(flags: [Option<bool>; 4], compat: UcxCompat, caller: &CallerEnvironment) -> Plan {
    let [tcp, ib, nvlink, rdmacm] = flags;
    let mut spec = ClusterSpec::default();
    spec.engine = Some(EngineKind::Dask);
    spec.ucx.tcp = tcp;
    spec.ucx.infiniband = ib;
    spec.ucx.nvlink = nvlink;
    spec.ucx.rdmacm = rdmacm;
    spec.ucx.compat = Some(compat);
    let request = Request::of(spec).expect("right by itself");
    plan(&machine("dgx-1-v100"), &request, caller).expect("a plan")
}

fn ucx_of(env: &BTreeMap<String, String>) -> BTreeMap<&str, &str> {
    let ucx = env.iter().filter(|(name, _)| name.starts_with("UCX"));
    ucx.map(|(name, value)| (name.as_str(), value.as_str())).collect()
}

#[test]
fn each_of_the_81_combinations_gives_exactly_dask_cudas_environment() {
    let mut seen = 0;
    for flags in combinations() {
        let [tcp, ib, nvlink, rdmacm] = flags;
        let mut wanted = BTreeMap::new();
        if let Some(tls) = expected(tcp, ib, nvlink) {
            wanted.insert("UCX_TLS", tls);
            let priority = if rdmacm == Some(true) { "rdmacm" } else { "tcp" };
            wanted.insert("UCX_SOCKADDR_TLS_PRIORITY", priority);
        }
        let plan = planned(flags, UcxCompat::Dask, &caller());
        for worker in &plan.workers {
            assert_eq!(ucx_of(&worker.env), wanted, "{} for {flags:?}", worker.name);
        }
        let scheduler = plan.scheduler.expect("Dask has a scheduler");
        assert_eq!(ucx_of(&scheduler.env), wanted, "scheduler for {flags:?}");
        assert_eq!(ucx_of(&plan.client_env), wanted, "client for {flags:?}");
        seen += 1;
    }
    assert_eq!(seen, 81);
}

/// Our own lists: the table's transports, and those that same-node traffic needs.
#[test]
fn our_own_lists_are_the_tables_with_shared_memory() {
    for flags in combinations() {
        let [tcp, ib, nvlink, rdmacm] = flags;
        let plan = planned(flags, UcxCompat::None, &caller());
        let env = ucx_of(&plan.workers[0].env);
        let list = env["UCX_TLS"];
        if [tcp, ib, nvlink] == [None; 3] {
            assert_eq!(list, "^sysv", "everything else is left to UCX");
            continue;
        }
        let lanes: Vec<&str> = list.split(',').collect();
        for needed in ["cuda_copy", "posix", "cma", "self"] {
            assert!(lanes.contains(&needed), "{needed} is missing in {list} for {flags:?}");
        }
        // Dask sets up its connections over TCP, unless RDMA does it.
        let needs_tcp = tcp != Some(false) || rdmacm != Some(true);
        assert_eq!(lanes.contains(&"tcp"), needs_tcp, "{list} for {flags:?}");
        if let Some(table) = expected(tcp, ib, nvlink) {
            for lane in ["rc", "cuda_ipc"] {
                let wanted = table.split(',').any(|other| other == lane);
                assert_eq!(lanes.contains(&lane), wanted, "{lane} in {list} for {flags:?}");
            }
        }
        let priority = env.get("UCX_SOCKADDR_TLS_PRIORITY").copied();
        assert_eq!(priority, Some(if rdmacm == Some(true) { "rdmacm" } else { "tcp" }));
    }
}

/// Workers of the native engine share a machine: TCP is used only if asked for, System V segments
/// never, and the plan says who can connect to a listener.
#[test]
fn native_lists_have_tcp_only_where_it_is_asked_for() {
    for flags in combinations() {
        let [tcp, ib, nvlink, rdmacm] = flags;
        let mut spec = ClusterSpec::default();
        spec.engine = Some(EngineKind::Native);
        spec.ucx.tcp = tcp;
        spec.ucx.infiniband = ib;
        spec.ucx.nvlink = nvlink;
        spec.ucx.rdmacm = rdmacm;
        let request = Request::of(spec).expect("right by itself");
        let plan = plan(&machine("dgx-1-v100"), &request, &caller()).expect("a plan");
        let env = ucx_of(&plan.workers[0].env);
        let lanes: Vec<&str> = env["UCX_TLS"].split(',').collect();
        assert!(lanes.ends_with(&["posix", "cma", "self"]), "{lanes:?} for {flags:?}");
        assert_eq!(lanes.contains(&"tcp"), tcp == Some(true), "{lanes:?} for {flags:?}");
        assert!(ib.is_none_or(|ib| lanes.contains(&"rc") == ib), "{lanes:?} for {flags:?}");
        assert_eq!(lanes.contains(&"cuda_ipc"), {
            let rest_is_on = [tcp, ib, nvlink].iter().all(|flag| *flag != Some(true));
            nvlink.unwrap_or(rest_is_on)
        });
        let told = plan.notes.iter().any(|note| note.text.contains("without authentication"));
        assert_eq!(told, tcp == Some(true), "{flags:?}: {:?}", plan.notes);
        assert!(!env.contains_key("UCX_SYSV_ERROR_HANDLING"));
    }
}

#[test]
fn a_variable_that_the_caller_has_exported_wins_and_is_reported() {
    let caller = compact::caller_with("UCX_TLS", "tcp,sm,self,cuda_copy");
    let plan = planned([None, Some(true), Some(true), None], UcxCompat::None, &caller);
    for env in plan.workers.iter().map(|worker| &worker.env).chain([&plan.client_env]) {
        assert_eq!(env["UCX_TLS"], "tcp,sm,self,cuda_copy");
    }
    let origin = plan.origins.get("env.UCX_TLS").map(ToString::to_string);
    assert_eq!(origin.as_deref(), Some("environment"));
    let note = plan.notes.iter().find(|note| note.about == "UCX_TLS").expect("a note");
    assert!(note.text.contains("rc,tcp,cuda_copy,cuda_ipc,posix,cma,self"), "{note}");
}

#[test]
fn a_list_that_leaves_a_connection_without_a_lane_is_noted() {
    for (list, missing) in [
        ("rc,cuda_copy", "no 'tcp'"),
        ("tcp,sm,self", "no 'cuda_copy'"),
        ("tcp,cuda_copy", "no shared memory"),
    ] {
        let plan = planned([None; 4], UcxCompat::None, &compact::caller_with("UCX_TLS", list));
        let notes: Vec<String> = plan.notes.iter().map(ToString::to_string).collect();
        assert!(notes.iter().any(|note| note.contains(missing)), "{list}: {notes:?}");
    }
    let plan = planned([None; 4], UcxCompat::None, &compact::caller_with("UCX_TLS", "^cuda_ipc"));
    let of_lanes = plan.notes.iter().filter(|note| note.text.contains("has no"));
    assert_eq!(of_lanes.count(), 0, "a list of what to leave out leaves lanes: {:?}", plan.notes);
}

#[test]
fn a_registration_cache_that_is_switched_off_is_noted() {
    for (name, value) in [("UCX_RCACHE_ENABLE", "n"), ("UCX_MEM_EVENTS", "no")] {
        let plan = planned([None; 4], UcxCompat::None, &compact::caller_with(name, value));
        let note = plan.notes.iter().find(|note| note.about == name).expect("a note");
        assert!(note.text.contains("unset it"), "{note}");
        let mut older = compact::caller_with(name, value);
        older.ucx_version = Some("1.13".parse().expect("a version"));
        let plan = planned([None; 4], UcxCompat::None, &older);
        assert!(plan.notes.iter().all(|note| note.about != name), "{:?}", plan.notes);
    }
    let plan =
        planned([None; 4], UcxCompat::None, &compact::caller_with("UCX_RCACHE_ENABLE", "try"));
    assert!(plan.notes.iter().all(|note| note.about != "UCX_RCACHE_ENABLE"), "{:?}", plan.notes);
}

#[test]
fn expandable_segments_are_noted_where_ucx_moves_pytorchs_memory() {
    let told = |spec: &str, name: &str, value: &str| {
        let caller = compact::caller_with(name, value);
        let (machine, spec) = (compact::machine("dgx-h100"), compact::spec(spec));
        let plan = compact::planned_by(&machine, &spec, &caller).expect("a plan");
        plan.notes.iter().any(|note| note.about == name && note.text.contains("no CUDA IPC"))
    };
    let (command, yes) = ("engine: command\n", "backend:native,expandable_segments:True");
    for name in ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"] {
        assert!(told(command, name, yes));
        assert!(!told(command, name, "expandable_segments:False"));
        assert!(!told("engine: native\n", name, yes), "its pool is the engine's");
    }
}

#[test]
fn ucx_is_told_how_fast_the_links_are_of_gpus_that_it_does_not_know() {
    let bandwidth = |machine: &str, major: u32, ucx: Option<&str>| {
        let mut machine = compact::machine(machine);
        for gpu in &mut machine.gpus {
            gpu.compute_capability.as_mut().expect("known").major = major;
        }
        let mut caller = compact::caller();
        caller.ucx_version = ucx.map(|version| version.parse().expect("a version"));
        let spec = compact::spec("engine: native\nucx: {nvlink: true}\n");
        let plan = compact::planned_by(&machine, &spec, &caller).expect("a plan");
        plan.workers[0].env.get("UCX_CUDA_IPC_BW").cloned()
    };
    assert_eq!(bandwidth("dgx-h100", 9, Some("1.21")), None, "UCX knows it");
    // 18 links of 40 GB/s each carry data, in the MiB/s that UCX reads.
    assert_eq!(bandwidth("dgx-b200", 10, Some("1.18")).as_deref(), Some("686646MBs"));
    assert_eq!(bandwidth("dgx-b200", 10, Some("1.21")), None);
    assert!(bandwidth("l40s-8", 12, Some("1.22")).is_some(), "faster than UCX believes");
    assert_eq!(bandwidth("l40s-8", 8, Some("1.22")), None);
}
