//! What a plan is asked after it was made: who sits where, and how it differs from another.

use crate::compact::{machine, planned, spec};
use cuda_cluster::cpuset::CpuSet;
use cuda_cluster::ids::{GpuIndex, PciAddress};
use cuda_cluster::plan::{CallerEnvironment, EnginePlan, Plan, difference};
use cuda_cluster::spec::Request;
use cuda_cluster::topology::{Device, Gpu, LinkKind, Links, Topology};

fn plan(machine_name: &str, text: &str) -> Plan {
    planned(&machine(machine_name), &spec(text)).expect("a plan")
}

#[test]
fn equal_plans_do_not_differ() {
    for text in ["", "engine: dask\n", "ucx: {infiniband: true, net_devices: auto}\n"] {
        let once = plan("dgx-1-v100", text);
        assert_eq!(difference(&once, &once.clone()), Vec::<String>::new());
    }
}

#[test]
fn each_difference_names_the_process_and_the_value_before_and_after() {
    let (blue, red) = ("worker: {env: {COLOUR: blue}}\n", "worker: {env: {COLOUR: red}}\n");
    let cases = [
        ("", blue, "gpu1: COLOUR unset → blue"),
        (blue, red, "gpu0: COLOUR blue → red"),
        ("threads: 2\n", "threads: 3\n", "gpu0: threads 2 → 3"),
        (
            "memory: {limit: 1GiB}\n",
            "memory: {limit: 2GiB}\n",
            "gpu1: memory limit 1073741824 → 2147483648",
        ),
        (
            "device: {memory_limit: 1GiB}\n",
            "device: {memory_limit: 2GiB}\n",
            "gpu0: device memory limit 1073741824 → 2147483648",
        ),
        ("", "cpus: none\n", "gpu0: CPUs 0-31 → unset"),
        ("workers: 2\n", "workers: 1\n", "gpu1: would go"),
        ("workers: 1\n", "workers: 2\n", "gpu1: would be new"),
        ("", "engine: dask\n", "cluster: engine native → dask"),
        ("gpus: [0]\n", "gpus: [1]\n", "gpu0: would go"),
    ];
    for (now, then, line) in cases {
        let lines = difference(&plan("rtx-4090-2", now), &plan("rtx-4090-2", then));
        assert!(lines.iter().any(|found| found == line), "no {line:?} in {lines:#?}");
        let back = difference(&plan("rtx-4090-2", then), &plan("rtx-4090-2", now));
        assert!(!back.contains(&line.to_owned()), "{back:#?} is the way back");
    }
    let lines = difference(&plan("rtx-4090-2", "workers: 1\n"), &plan("l40s-8", "workers: 1\n"));
    assert!(lines.contains(&"cluster: machine rtx-4090-2 → l40s-8".to_owned()), "{lines:#?}");
}

#[test]
fn dasks_direct_protocol_has_ucx_for_device_memory_and_no_listener_of_it() {
    let flags = "ucx: {nvlink: true, infiniband: true, net_devices: auto}\n";
    let ours = plan("dgx-1-v100", &format!("engine: dask\ndask: {{protocol: direct}}\n{flags}"));
    let ucxx = plan("dgx-1-v100", &format!("engine: dask\n{flags}"));
    for (ours, ucxx) in ours.workers.iter().zip(&ucxx.workers) {
        let without_tcp = ucxx.env["UCX_TLS"].replace("tcp,", "");
        assert_eq!(ours.env["UCX_TLS"], without_tcp);
        assert!(ours.env["UCX_TLS"].contains("cuda_ipc"), "{:?}", ours.env);
        let ports =
            |env: &std::collections::BTreeMap<String, String>| env["UCX_NET_DEVICES"].clone();
        assert_eq!(ports(&ours.env), ports(&ucxx.env));
    }
    let listens = |plan: &Plan| {
        let why = &plan.scheduler.as_ref().expect("a scheduler").why;
        why.iter().any(|why| why.choice == "listens on")
    };
    assert!(listens(&ucxx) && !listens(&ours), "its sockets are those of the host it is given");
    // UCX has no listener either, but where device memory may go to a machine without RDMA.
    let on_network = "scheduler: {host: 0.0.0.0}\n";
    for (machine, more, list) in [
        ("dgx-1-v100", "", "^sysv,tcp"),
        ("rtx-4090-2", "", "^sysv,tcp"),
        ("dgx-1-v100", on_network, "^sysv,tcp"),
        ("rtx-4090-2", on_network, "^sysv"),
    ] {
        let plan = plan(machine, &format!("engine: dask\ndask: {{protocol: direct}}\n{more}"));
        assert_eq!(plan.workers[0].env["UCX_TLS"], list, "{machine} {more}");
        let warns = plan.notes.iter().any(|note| note.text.contains("UCX listens on TCP"));
        assert_eq!(warns, list == "^sysv", "{:?}", plan.notes);
    }
}

#[test]
fn the_schedulers_variables_are_the_schedulers_alone_and_explained() {
    for engine in ["native", "dask"] {
        let text = format!("engine: {engine}\nscheduler: {{env: {{LEVEL: 1.10}}}}\n");
        let plan = plan("dgx-1-v100", &text);
        let scheduler = plan.scheduler.as_ref().expect("a scheduler");
        assert_eq!(scheduler.env["LEVEL"], "1.10", "{engine}");
        assert!(scheduler.why.iter().any(|why| why.choice == "env.LEVEL"), "{engine}");
        let others = plan.workers.iter().map(|worker| &worker.env).chain([&plan.client_env]);
        assert!(others.into_iter().all(|env| !env.contains_key("LEVEL")), "{engine}");
    }
    for wrong in ["UCX_TLS: tcp", "CUDA_VISIBLE_DEVICES: 1"] {
        let text = format!("version: 1\nscheduler: {{env: {{{wrong}}}}}\n");
        let error = cuda_cluster::spec::parse(&text, "test").expect_err(wrong).to_string();
        assert!(error.contains("scheduler.env."), "{error}");
    }
}

#[test]
fn dasks_protocol_is_direct_by_default_where_its_python_has_that() {
    let protocol = |text: &str, has: bool| {
        let request = Request::of(spec(text)).expect("no contradictions");
        let mut caller = CallerEnvironment::default();
        caller.dask_has_direct = has;
        let plan = cuda_cluster::plan::plan(&machine("dgx-1-v100"), &request, &caller);
        let EnginePlan::Dask(dask) = plan.expect("a plan").engine else { panic!("not Dask's") };
        dask.protocol
    };
    let dask = |more: &str| format!("engine: dask\n{more}");
    assert_eq!(protocol(&dask(""), true), "direct");
    assert_eq!(protocol(&dask(""), false), "tcp");
    for (more, expected) in [
        ("dask: {protocol: tcp}\n", "tcp"),
        ("dask: {python: /opt/another}\n", "tcp"),
        ("dask: {join: \"tcp://10.0.0.1:8786\"}\n", "tcp"),
        ("dask: {join: scheduler.json}\n", "tcp"),
        ("scheduler: {host: 10.0.0.1}\n", "tcp"),
        ("scheduler: {interface: eth0}\n", "tcp"),
        ("topology: dgx-h100\n", "tcp"),
        ("ucx: {nvlink: true}\n", "ucxx"),
        ("tls: {ca_file: ca, cert: c, key: k}\n", "tls"),
    ] {
        assert_eq!(protocol(&dask(more), true), expected, "{more}");
    }
}

#[test]
fn a_plans_workers_are_the_occupants_of_their_gpus_cpus_and_nics() {
    let plan = plan("dgx-1-v100", "ucx: {infiniband: true, net_devices: auto}\n");
    let occupants = plan.occupants();
    assert_eq!(occupants.len(), 8);
    for (worker, occupant) in plan.workers.iter().zip(&occupants) {
        assert_eq!(occupant.name, worker.name);
        assert_eq!(occupant.gpu, worker.gpu.as_ref().map(|gpu| gpu.index));
    }
    let last = &occupants[7];
    assert_eq!((last.name.as_str(), last.gpu), ("gpu7", Some(GpuIndex(7))));
    assert_eq!(last.cpus, Some("20-39,60-79".parse::<CpuSet>().expect("CPUs")));
    assert_eq!(last.nics, ["mlx5_3"]);
}

/// More GPUs than every set of them can be looked at: those with an odd number are joined by
/// NVLinks, the more the higher both numbers are; the others are far from everything.
fn many() -> Topology {
    let gpu = |index: u32| Gpu {
        index: GpuIndex(index),
        pci: Some(PciAddress {
            domain: 0,
            bus: 16 + u8::try_from(index).expect("few GPUs"),
            device: 0,
            function: 0,
        }),
        memory_bytes: Some(16 << 30),
        ..Gpu::default()
    };
    let mut links = Links::default();
    for (a, b) in (0..20u32).flat_map(|a| (a + 1..20).map(move |b| (a, b))) {
        let kind = if a % 2 == 1 && b % 2 == 1 {
            LinkKind::Nv(if a.min(b) < 10 { 1 } else { 2 })
        } else {
            LinkKind::Sys
        };
        links.set(Device::Gpu(GpuIndex(a)), Device::Gpu(GpuIndex(b)), kind);
    }
    Topology { version: 1, gpus: (0..20).map(gpu).collect(), links, ..Topology::default() }
}

#[test]
fn of_very_many_gpus_a_set_is_grown_that_is_connected_well() {
    for (count, expected) in [(3, vec![11, 13, 15]), (5, vec![11, 13, 15, 17, 19])] {
        let text = format!("gpus: {{count: {count}, choose: best-connected}}\n");
        let plan = planned(&many(), &spec(&text)).expect("a plan");
        let chosen: Vec<u32> =
            plan.workers.iter().filter_map(|w| w.gpu.as_ref()).map(|gpu| gpu.index.0).collect();
        assert_eq!(chosen, expected);
        let note = plan.notes.iter().find(|note| note.text.contains("chosen step by step"));
        assert!(note.is_some_and(|note| note.text.contains("20 GPUs")), "{:?}", plan.notes);
    }
}

#[test]
fn native_workers_have_a_pool_in_rmms_words_and_spill_at_its_maximum() {
    let text = "rmm: {pool_size: 0.25, maximum_pool_size: 8GiB}\n";
    let plan = plan("rtx-4090-2", text);
    let worker = &plan.workers[0];
    let rmm = worker.rmm.as_ref().expect("a pool");
    let whole = worker.gpu.as_ref().and_then(|gpu| gpu.memory_bytes).expect("known");
    assert_eq!(rmm.pool_bytes, Some(whole / 4));
    assert_eq!(rmm.maximum_pool_bytes, Some(8 << 30));
    assert_eq!(worker.device_memory_limit_bytes, Some(8 << 30), "below 0.8 of the device");
    let why = worker.why.iter().find(|why| why.choice == "device_memory_limit").expect("a reason");
    assert!(why.reason.contains("rmm.maximum_pool_size"), "{why:?}");
    assert!(plan.notes.iter().all(|note| !note.about.starts_with("rmm")), "nothing is ignored");
}

#[test]
fn sizes_of_a_pool_that_cannot_be_are_refused_with_their_key() {
    let refused = |text: &str| {
        let error = planned(&machine("rtx-4090-2"), &spec(text)).expect_err(text);
        error.to_string()
    };
    let large = refused("rmm: {pool_size: 30GiB}\n");
    assert!(large.contains("rmm.pool_size") && large.contains("more than the 24.0 GiB"), "{large}");
    let shared = refused("workers_per_gpu: 2\nrmm: {pool_size: 16GiB}\n");
    assert!(shared.contains("16.0 GiB for each of 2 workers are more"), "{shared}");
    let text = "rmm: {pool_size: 1GiB, maximum_pool_size: 2GiB}\noverrides:\n- match: {worker: gpu1}\n  \
                rmm_pool_size: 3GiB\n";
    let override_ = refused(text);
    assert!(override_.contains("less than the initial size of gpu1's pool"), "{override_}");
}

#[test]
fn what_a_native_pool_does_not_have_is_noted() {
    let plan = plan("rtx-4090-2", "rmm: {pool_size: 1GiB, managed: true}\n");
    let notes: Vec<String> = plan.notes.iter().map(ToString::to_string).collect();
    let expected = "rmm.managed: ignored: the native engine's pool of device memory has only sizes";
    assert!(notes.iter().any(|note| note == expected), "{notes:#?}");
    assert!(!notes.iter().any(|note| note.starts_with("rmm.pool_size")), "{notes:#?}");
}
