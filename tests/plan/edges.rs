//! Choices at their edges: one more, one fewer, or the neighbour instead changes the plan.

use crate::compact::{caller, machine, planned, planned_by, spec};
use cuda_cluster::ids::NumaId;
use cuda_cluster::plan::{EnginePlan, Plan, PlanError, WorkerPlan, libucp_paths};
use cuda_cluster::topology::{Note, NumaNode, NvLink, NvLinkPeer, Topology, parse};

fn made(topology: &Topology, text: &str) -> Plan {
    planned(topology, &spec(text)).unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn read(text: &str) -> Topology {
    parse(text).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

fn noted(plan: &Plan, words: &str) -> bool {
    plan.notes.iter().any(|note| note.to_string().contains(words))
}

/// The names of the workers for which this holds.
fn which(plan: &Plan, holds: impl Fn(&WorkerPlan) -> bool) -> Vec<&str> {
    let chosen = plan.workers.iter().filter(|worker| holds(worker));
    chosen.map(|worker| worker.name.as_str()).collect()
}

#[test]
fn an_override_of_a_mig_instance_is_for_that_instance_of_that_gpu() {
    let asked = "overrides: [{match: {gpu: '1:1'}, threads: 3}]\n";
    let plan = made(&machine("dgx-a100-mig"), asked);
    let second = which(&plan, |worker| worker.threads == 3);
    assert_eq!(second.len(), 1, "{second:?}");
    let whole = made(&machine("dgx-a100-mig"), "gpus: ['1:1']\n");
    let chosen = plan.workers.iter().find(|worker| worker.name == second[0]).expect("it");
    assert_eq!(chosen.gpu, whole.workers[0].gpu);
}

#[test]
fn a_control_device_that_no_list_of_devices_has_is_noted() {
    let machine = machine("dgx-h100");
    let unused = |text: &str| noted(&made(&machine, text), "ucx.control_device: ignored");
    assert!(unused("ucx: {tcp: true, nvlink: false, infiniband: false, control_device: eth0}\n"));
    assert!(unused("engine: dask\nucx: {tcp: true, control_device: eth0}\n"));
    assert!(!unused("ucx: {infiniband: true, net_devices: auto, control_device: eth0}\n"));
    assert!(!unused("ucx: {tcp: true, net_devices: [eth0], control_device: eth0}\n"));
}

#[test]
fn an_override_finds_its_workers_by_place_and_by_node() {
    let topology = machine("dgx-h100");
    let gpu = &topology.gpus[2];
    let place = gpu.pci.expect("a place");
    let plan =
        made(&topology, &format!("overrides: [{{match: {{gpu: '{place}'}}, threads: 3}}]\n"));
    assert_eq!(which(&plan, |worker| worker.threads == 3), ["gpu2"]);
    let plan = made(&topology, "overrides: [{match: {numa: 1}, threads: 3}]\n");
    let there = |at: u32| topology.gpus[at as usize].numa == Some(NumaId(1));
    let there: Vec<String> = (0..8).filter(|at| there(*at)).map(|at| format!("gpu{at}")).collect();
    assert_eq!(which(&plan, |worker| worker.threads == 3), there);
    assert_eq!(there.len(), 4);
}

#[test]
fn a_proof_is_ignored_only_where_a_program_of_the_users_runs() {
    let topology = machine("rtx-4090-2");
    for (engine, ignored) in [("native", false), ("dask", false), ("command", true)] {
        let plan = made(&topology, &format!("engine: {engine}\nverify: true\n"));
        assert_eq!(noted(&plan, "verify: ignored"), ignored, "{engine}");
    }
}

#[test]
fn what_a_spec_asks_for_in_vain_is_noted_and_refused_under_strict() {
    let topology = machine("rtx-4090-2");
    let memory = topology.numa.iter().filter_map(|node| node.memory_bytes).sum::<u64>();
    let joining = |asked: &str| {
        format!("engine: dask\ndask: {{join: 'tcp://10.0.0.1:8786'}}\nscheduler: {{{asked}}}\n")
    };
    let halves = |less: u64| format!("memory: {{limit: {}}}\n", memory / 2 - less);
    for (text, words) in [
        (
            "overrides: [{match: {worker: gpu7}, threads: 3}]\n",
            Some("overrides[0]: no worker is meant"),
        ),
        ("overrides: [{match: {worker: gpu1}, threads: 3}]\n", None),
        ("engine: dask\ncommand: {argv: [a]}\n", Some("command.argv: ignored: the engine is dask")),
        ("native: {disk_limit: 1GB}\n", None),
        (
            "engine: dask\ndask: {join: 'tcp://10.0.0.1:8786', protocol: ucxx}\n",
            Some("dask.protocol: the workers' is ucxx"),
        ),
        ("engine: dask\ndask: {join: 'tcp://10.0.0.1:8786'}\n", None),
        ("engine: dask\ndask: {join: 'direct://10.0.0.1:8786'}\n", None),
        (
            "engine: dask\nucx: {version: 1.16}\n",
            Some("ucx.version: ignored: the protocol is tcp, without UCX"),
        ),
        ("engine: command\nthreads: 2\n", Some("threads: ignored")),
        ("engine: command\ndevice: {memory_limit: 1GB}\n", Some("device.memory_limit: ignored")),
        (
            "engine: command\nrmm: {pool_size: 1GB, maximum_pool_size: 2GB}\n",
            Some("rmm.maximum_pool_size: ignored"),
        ),
        (
            "engine: command\noverrides: [{match: {gpu: 0}, threads: 3}]\n",
            Some("overrides[0].threads: ignored"),
        ),
        (
            &joining("port: 9000"),
            Some("scheduler.port: ignored: the scheduler is another cluster's"),
        ),
        (&joining("file: /tmp/s.json"), Some("scheduler.file: ignored")),
        (&joining("dashboard_address: ':9'"), Some("scheduler.dashboard_address: ignored")),
        (&joining("host: 10.0.0.1"), None),
        (&joining("interface: lo"), None),
        (
            "engine: dask\ndask: {worker_names: gpu, adapt_minimum: 1}\n",
            Some("dask.worker_names: ignored: names by GPU need a fixed number of workers"),
        ),
        (
            "engine: dask\nworkers_per_gpu: 2\ndask: {worker_names: gpu}\n",
            Some("dask.worker_names: ignored: names by GPU are not unique where several workers"),
        ),
        ("engine: dask\ndask: {worker_names: gpu}\n", None),
        (&halves(0), None),
        ("memory: {limit: 100TB}\n", Some("memory.limit: the limits of 2 workers are")),
    ] {
        let plan = made(&topology, text);
        let strict = planned(&topology, &spec(&format!("{text}strict: true\n")));
        match words {
            Some(words) => {
                assert!(noted(&plan, words), "{text}: {:?}", plan.notes);
                let Err(PlanError::Strict { notes }) = strict else { panic!("{text}: {strict:?}") };
                assert!(notes.iter().any(|note| note.to_string().contains(words)), "{text}");
            }
            None => {
                let vain = ["ignored", "no worker is meant", "the workers' is", "together"];
                assert!(!vain.iter().any(|words| noted(&plan, words)), "{text}: {:?}", plan.notes);
            }
        }
    }
    let joined = made(&topology, "engine: dask\ndask: {join: 'ucxx://10.0.0.1:8786'}\n");
    let EnginePlan::Dask(dask) = joined.engine else { panic!("Dask") };
    assert_eq!(dask.protocol, "ucxx", "the scheduler's");
}

#[test]
fn who_reaches_a_scheduler_or_its_dashboard_is_told_and_is_no_objection() {
    let topology = machine("rtx-4090-2");
    let certificates = "tls: {ca_file: a, cert: b, key: c}\n";
    for (asked, about) in [
        ("", None),
        ("scheduler: {host: 127.0.0.1}\n", None),
        ("scheduler: {host: localhost}\n", None),
        ("scheduler: {host: '::1'}\n", None),
        ("scheduler: {interface: lo, dashboard_address: '127.0.0.1:1'}\n", None),
        ("scheduler: {host: 0.0.0.0}\n", Some("scheduler.host: Dask's tcp has no authentication")),
        ("scheduler: {host: '::'}\n", Some("whoever reaches [::] (every interface) can run code")),
        ("scheduler: {host: 10.0.0.5}\n", Some("whoever reaches 10.0.0.5 can run code")),
        ("scheduler: {interface: eth0}\n", Some("whoever reaches interface eth0 can run code")),
        (
            "scheduler: {dashboard_address: ':8787'}\n",
            Some("scheduler.dashboard_address: the dashboard has no authentication"),
        ),
        ("scheduler: {dashboard_address: ':8787', dashboard: false}\n", None),
        ("dask: {join: 'tcp://10.0.0.1:1'}\nscheduler: {host: 10.0.0.5}\n", None),
        (
            "dask: {protocol: direct}\nscheduler: {host: 0.0.0.0}\n",
            Some("scheduler.dashboard_address: the dashboard"),
        ),
        ("dask: {protocol: direct}\nscheduler: {host: 0.0.0.0, dashboard: false}\n", None),
    ] {
        let text = format!("engine: dask\nstrict: true\ndisplay_gpus: use\n{asked}");
        let mut plan = made(&topology, &text);
        // UCX's own listeners are another story.
        plan.notes.retain(|note| note.about != "UCX_TLS");
        match about {
            Some(about) => assert!(noted(&plan, about), "{asked}: {:?}", plan.notes),
            None => assert!(!noted(&plan, "authentication"), "{asked}: {:?}", plan.notes),
        }
        assert!(plan.notes.len() <= 1, "{asked}: {:?}", plan.notes);
    }
    let secured = made(
        &topology,
        &format!("engine: dask\n{certificates}scheduler: {{host: 0.0.0.0, dashboard: false}}\n"),
    );
    assert!(!noted(&secured, "authentication"), "{:?}", secured.notes);
    let over_ucx = made(&topology, "engine: dask\ndask: {protocol: ucxx}\n");
    assert!(noted(&over_ucx, "can run code as this user"), "{:?}", over_ucx.notes);
}

#[test]
fn a_limit_that_is_none_is_a_word_in_a_plan_and_was_null_before() {
    let plan =
        made(&machine("rtx-4090-2"), "ulimits: {memlock: unlimited, nofile: '9:unlimited'}\n");
    let text = serde_json::to_string(&plan).expect("JSON");
    for (written, before) in [
        (r#""memlock":"unlimited""#, r#""memlock":null"#),
        (r#""hard":"unlimited""#, r#""hard":null"#),
    ] {
        assert!(text.contains(written), "{written}: {text}");
        let read = |text: &str| Plan::parse(text).expect("a plan").supervision;
        assert_eq!(read(&text), plan.supervision);
        assert_eq!(read(&text.replace(written, before)), plan.supervision);
    }
    assert!(Plan::parse(&text.replace("unlimited", "endless")).is_err());
}

#[test]
fn the_workers_of_a_gpu_share_a_fraction_and_have_bytes_each() {
    let topology = machine("rtx-4090-2");
    let memory = topology.gpus[0].memory_bytes.expect("known");
    let two = |size: &str| {
        let text = format!(
            "engine: dask\nworkers_per_gpu: 2\ndevice: {{memory_limit: {size}}}\n\
             rmm: {{pool_size: {size}, maximum_pool_size: {size}}}\n"
        );
        let plan = made(&topology, &text);
        let rmm = plan.workers[0].rmm.as_ref().expect("a pool");
        let limit = plan.workers[0].device_memory_limit_bytes;
        [limit, rmm.pool_bytes, rmm.maximum_pool_bytes].map(|bytes| bytes.expect("a size"))
    };
    assert_eq!(two("0.5"), [memory / 4; 3]);
    assert_eq!(two("4GiB"), [4 << 30; 3]);
}

#[test]
fn what_the_workers_cannot_have_all_together_is_noted() {
    // Two GPUs of 24 GiB.
    let topology = machine("rtx-4090-2");
    let cpus = topology.cpus().expect("known").len();
    let twice = "workers_per_gpu: 2\n";
    let dask = format!("engine: dask\n{twice}");
    let threads = |each: usize| format!("threads: {each}\n");
    for (text, words) in [
        (
            format!("{twice}device: {{memory_limit: 20GiB}}\n"),
            Some(
                "device.memory_limit: on GPU 0, GPU 1 those of 2 workers are 40.0 GiB together, \
                 and the GPU has 24.0 GiB",
            ),
        ),
        (format!("{twice}device: {{memory_limit: 12GiB}}\n"), None),
        (format!("{twice}device: {{memory_limit: 1.0}}\n"), None),
        (
            format!("{dask}rmm: {{pool_size: 0.5, maximum_pool_size: 20GiB}}\n"),
            Some("rmm.maximum_pool_size: on GPU 0, GPU 1 those of 2 workers are 40.0 GiB"),
        ),
        (
            "engine: dask\nrmm: {pool_size: 0.5, maximum_pool_size: 30GiB}\n".to_owned(),
            Some("rmm.maximum_pool_size: on GPU 0, GPU 1 it is 30.0 GiB"),
        ),
        (
            format!("{dask}rmm: {{managed: true, pool_size: 1GiB, maximum_pool_size: 20GiB}}\n"),
            None,
        ),
        (format!("{dask}rmm: {{pool_size: 0.5, maximum_pool_size: 1.0}}\n"), None),
        (
            format!(
                "{twice}device: {{memory_limit: none}}\nrmm: {{pool_size: 1GiB, maximum_pool_size: 20GiB}}\n"
            ),
            Some("device.memory_limit: on GPU 0, GPU 1 those of 2 workers"),
        ),
        ("memory: {limit: 0.6}\n".to_owned(), Some("memory.limit: the limits of 2 workers are")),
        ("memory: {limit: 0.5}\n".to_owned(), None),
        (threads(2 * cpus), None),
        (threads(2 * cpus + 1), Some("threads: gpu0, gpu1 have ")),
        (format!("engine: command\n{}", threads(8 * cpus)), None),
    ] {
        let plan = made(&topology, &text);
        let said: Vec<String> = plan.notes.iter().map(ToString::to_string).collect();
        match words {
            Some(words) => {
                assert!(noted(&plan, words), "{text}: {said:#?}");
                let strict = planned(&topology, &spec(&format!("{text}strict: true\n")));
                assert!(matches!(strict, Err(PlanError::Strict { .. })), "{text}");
            }
            None => assert!(
                !["together", "it is never reached", "tasks wait"]
                    .iter()
                    .any(|words| noted(&plan, words)),
                "{text}: {said:#?}"
            ),
        }
    }
}

#[test]
fn strict_refuses_what_is_doubtful_and_keeps_the_notes_on_what_was_asked_for() {
    let base = |name: &str| {
        let mut topology = machine(name);
        // The built-in machines are files, whose own notes are objections.
        topology.notes.clear();
        topology
    };
    let (mut display, mut busy) = (base("dgx-1-v100"), base("dgx-1-v100"));
    display.gpus[7].display = Some(true);
    busy.gpus[7].processes = vec![77];
    let mig = base("dgx-a100-mig");
    let quiet = "ucx: {library: system}\n";
    let over_ucx = "engine: dask\nucx: {library: system, nvlink: true}\n";
    for (topology, text, words, is_refused) in [
        (&display, format!("{quiet}display_gpus: skip\n"), "GPU 7: left out", false),
        (&display, format!("{quiet}display_gpus: warn\n"), "GPU 7: it drives a display", true),
        (&display, quiet.to_owned(), "GPU 7: it drives a display", true),
        (&busy, format!("{quiet}busy_gpus: skip\n"), "GPU 7: left out", false),
        (&busy, quiet.to_owned(), "GPU 7: in use", true),
        (&mig, format!("{quiet}gpus: ['0:0', '0:1']\n"), "without CUDA IPC", false),
        (&mig, format!("{quiet}gpus: [0]\n"), "without CUDA IPC", true),
        (&mig, quiet.to_owned(), "without CUDA IPC", true),
        (&base("dgx-1-v100"), over_ucx.to_owned(), "UCX listens on TCP ports", false),
    ] {
        assert!(noted(&made(topology, &text), words), "{text}");
        match planned(topology, &spec(&format!("{text}strict: true\n"))) {
            Ok(plan) => assert!(!is_refused && noted(&plan, words), "{text}: {:?}", plan.notes),
            Err(PlanError::Strict { notes }) => {
                assert!(is_refused, "{text}: {notes:?}");
                assert!(notes.iter().any(|note| note.to_string().contains(words)), "{text}");
            }
            Err(error) => panic!("{text}: {error}"),
        }
    }
}

#[test]
fn two_gpus_with_links_to_an_unknown_end_may_be_joined() {
    let link =
        NvLink { link: 0, active: true, version: None, peer: NvLinkPeer::Unknown, gb_per_s: None };
    for (open, words) in [(1, "no two of the chosen GPUs"), (2, "does not tell whether")] {
        let mut topology = machine("rtx-4090-2");
        for gpu in &mut topology.gpus[..open] {
            gpu.nvlinks = vec![link.clone()];
        }
        let plan = made(&topology, "ucx: {nvlink: true}\n");
        assert!(noted(&plan, words), "{open}: {:?}", plan.notes);
    }
}

#[test]
fn what_is_usual_is_not_written_in_a_plan() {
    let topology = machine("rtx-4090-2");
    let written = |text: &str| serde_json::to_string_pretty(&made(&topology, text)).expect("JSON");
    assert!(!written("engine: dask\n").contains("worker_names"));
    assert!(written("engine: dask\ndask: {worker_names: gpu}\n").contains("worker_names"));
}

#[test]
fn a_plan_of_another_version_is_refused_with_its_number() {
    let text = serde_json::to_string_pretty(&made(&machine("rtx-4090-2"), "")).expect("JSON");
    for (version, words) in [("\"version\": 7,", "version 7 is not"), ("", "version none is not")] {
        let other = text.replacen("\"version\": 2,", version, 1);
        assert!(other != text, "the text has a version");
        let error = Plan::parse(&other).expect_err("refused").to_string();
        assert!(error.starts_with(words), "{error}");
    }
}

#[test]
fn the_libucp_that_a_user_writes_is_one_of_the_plans() {
    let asked = "worker: {env: {CUDA_CLUSTER_UCX: /mine/libucp.so.0}}\n";
    let plan = made(&machine("rtx-4090-2"), asked);
    assert!(libucp_paths(&plan).contains("/mine/libucp.so.0"), "{:?}", libucp_paths(&plan));
}

#[test]
fn memory_of_gpus_and_nodes_without_memory_are_no_host_memory() {
    let node = |id, bytes, gpu_memory| NumaNode {
        id: NumaId(id),
        package: Some(0),
        cpus: (id == 0).then(|| "0-3".parse().expect("CPUs")),
        memory_bytes: bytes,
        gpu_memory,
    };
    let bound = |numa: Vec<NumaNode>| {
        let mut topology = machine("rtx-4090-2");
        (topology.numa, topology.allowed) = (numa, None);
        for gpu in &mut topology.gpus {
            (gpu.numa, gpu.numa_set) = (Some(NumaId(1)), None);
        }
        let plan = made(&topology, "memory: {policy: bind}\n");
        plan.workers[0].binding.mems.as_ref().map(ToString::to_string)
    };
    let first = || node(0, Some(64 << 30), false);
    assert_eq!(bound(vec![first(), node(1, Some(64 << 30), false)]).as_deref(), Some("1"));
    assert_eq!(bound(vec![first(), node(1, None, false)]).as_deref(), Some("1"), "unknown");
    assert_eq!(bound(vec![first(), node(1, Some(0), false)]).as_deref(), Some("0"), "none");
    assert_eq!(
        bound(vec![first(), node(1, Some(64 << 30), true)]).as_deref(),
        Some("0"),
        "a GPU's"
    );
}

/// Machines with one NUMA node of four CPUs, which are four cores.
fn small(gpus: usize, rest: &str) -> Topology {
    let gpus: String =
        (0..gpus).map(|at| format!("  - {{index: {at}, numa: 0, cpus: 0-3}}\n")).collect();
    read(&format!(
        "version: 1\ncores: ['0', '1', '2', '3']\nnuma: [{{id: 0, cpus: 0-3}}]\ngpus:\n{gpus}{rest}"
    ))
}

#[test]
fn a_note_about_a_gpu_that_is_not_used_is_not_the_plans() {
    let mut machine = small(3, "");
    machine.notes.push(Note::new("GPU2", "its CPUs are not known"));
    machine.notes.push(Note::new("hwloc", "something of the whole machine"));
    let all = made(&machine, "");
    assert!(noted(&all, "its CPUs are not known"), "{:?}", all.notes);
    let two = made(&machine, "gpus: [0, 1]");
    assert!(!noted(&two, "its CPUs are not known"), "{:?}", two.notes);
    assert!(noted(&two, "of the whole machine"), "{:?}", two.notes);
}

#[test]
fn what_is_assumed_of_one_nic_is_noted_under_its_name() {
    let nics = |names: &[&str]| {
        let nics: String = names
            .iter()
            .map(|name| {
                format!(
                    "  - {{name: {name}, numa: 0, ports: [{{port: 1, link_layer: InfiniBand, \
                     rate_gbps: 100}}]}}\n"
                )
            })
            .collect();
        let asked = "ucx: {infiniband: true, net_devices: auto}\n";
        let plan = made(&small(1, &format!("nics:\n{nics}")), asked);
        let notes = plan.notes.iter().map(ToString::to_string);
        notes.filter(|note| note.contains("tells no state")).collect::<Vec<_>>()
    };
    assert_eq!(nics(&["mlx5_0"]), ["mlx5_0:1: the source tells no state: taken to be active"]);
    let two = nics(&["mlx5_0", "mlx5_1"]);
    assert_eq!(
        two,
        ["nics: the source tells no state (of mlx5_0:1, mlx5_1:1): taken to be active"]
    );
}

#[test]
fn the_only_gpu_gets_the_nearest_nic_whatever_its_name() {
    for near in 0..3 {
        let nic = |at: usize| {
            format!(
                "  - {{name: mlx5_{at}, numa: 0, ports: [{{port: 1, state: ACTIVE, link_layer: \
                 InfiniBand, rate_gbps: 100}}]}}\n"
            )
        };
        let link = |at: usize| {
            let kind = if at == near { "PIX" } else { "SYS" };
            format!("  - {{a: GPU0, b: NIC{at}, kind: {kind}}}\n")
        };
        let (nics, links): (String, String) =
            ((0..3).map(nic).collect(), (0..3).map(link).collect());
        let asked = "ucx: {infiniband: true, net_devices: auto}\n";
        let plan = made(&small(1, &format!("nics:\n{nics}links:\n{links}")), asked);
        assert_eq!(plan.workers[0].nics[0].to_string(), format!("mlx5_{near}:1"));
    }
}

#[test]
fn cores_are_split_among_those_that_split() {
    let asked = "cpus: split\noverrides: [{match: {worker: gpu1}, cpus: local}]\n";
    let plan = made(&small(3, ""), asked);
    let cpus: Vec<String> = plan
        .workers
        .iter()
        .map(|worker| worker.binding.cpus.as_ref().map_or_else(String::new, ToString::to_string))
        .collect();
    assert_eq!(cpus, ["0-1", "0-3", "2-3"]);
}

#[test]
fn a_worker_keeps_its_last_core() {
    let kept = |cores: u32| {
        let asked = spec(&format!("cpus: split\nscheduler_cores: {cores}\n"));
        planned_by(&small(2, ""), &asked, &caller())
    };
    let plan = kept(2).expect("one core for each worker");
    let scheduler = plan.scheduler.expect("a scheduler").binding.cpus.expect("cores");
    assert_eq!(scheduler.iter().count(), 2);
    assert!(matches!(kept(3), Err(PlanError::TooFewCores { .. })));
}

#[test]
fn a_template_that_divides_by_zero_is_refused() {
    let topology = machine("dgx-h100");
    for (expression, divides_by_zero) in
        [("gpu//1", false), ("gpu//0", true), ("gpu%1", false), ("gpu%0", true)]
    {
        let asked = format!("ucx: {{infiniband: true, net_devices: 'mlx5_{{{expression}}}:1'}}\n");
        match planned(&topology, &spec(&asked)) {
            Ok(_) => assert!(!divides_by_zero, "{expression}"),
            Err(error) => assert_eq!(
                error.to_string().contains("division by zero"),
                divides_by_zero,
                "{expression}: {error}"
            ),
        }
    }
}
