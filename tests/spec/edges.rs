//! For each rule of a spec the last text that is accepted and the first that is not, which differ in
//! one thing.

use cuda_cluster::spec;

fn parsed(text: &str) -> Result<spec::ClusterSpec, spec::SpecError> {
    spec::parse(&format!("version: 1\n{text}\n"), "test")
}

/// The key that is refused; accepted; refused.
const EDGES: &[(&str, &str, &str)] = &[
    ("workers", "workers: 1", "workers: 0"),
    ("threads", "threads: 1", "threads: 0"),
    ("workers_per_gpu", "workers_per_gpu: 1", "workers_per_gpu: 0"),
    ("workers_per_gpu", "workers_per_gpu: 64", "workers_per_gpu: 65"),
    ("cpu_workers", "cpu_workers: 1024", "cpu_workers: 1025"),
    ("scheduler_cores", "cpus: split\nscheduler_cores: 1", "scheduler_cores: 1"),
    ("scheduler_cores", "cpus: local", "cpus: local\nscheduler_cores: 1"),
    ("gpus", "gpus: none\ncpu_workers: 1", "gpus: none\ncpu_workers: 0"),
    ("gpus", "gpus: none\ncpu_workers: 1", "gpus: none"),
    ("workers", "gpus: none\ncpu_workers: 1", "gpus: none\ncpu_workers: 1\nworkers: 1"),
    ("gpus.count", "gpus: {count: 1}", "gpus: {count: 0}"),
    ("workers", "gpus: {count: 1}", "gpus: {count: 1}\nworkers: 1"),
    ("gpus", "gpus: [0, 1]", "gpus: [0, 0]"),
    ("gpus", "gpus: [0, 1, 2]", "gpus: [0, 1, 0]"),
    ("workers", "gpus: [0, 1]\nworkers: 2", "gpus: [0, 1]\nworkers: 3"),
    ("gpus", "gpus: 3-3", "gpus: 3-2"),
    ("gpus", "gpus: [1023]", "gpus: [1024]"),
    ("gpus", "gpus: '1023'", "gpus: '1024'"),
    ("rmm.managed", "rmm: {managed: true}", "rmm: {managed: true}\nucx: {nvlink: true}"),
    (
        "rmm.managed",
        "rmm: {managed: false}\nucx: {nvlink: true}",
        "rmm: {managed: true}\nucx: {nvlink: true}",
    ),
    (
        "rmm.managed",
        "rmm: {managed: true}\nucx: {nvlink: false, tcp: true}",
        "rmm: {managed: true}\nucx: {nvlink: true, tcp: true}",
    ),
    ("rmm.managed", "rmm: {managed: true, async: false}", "rmm: {managed: true, async: true}"),
    ("rmm.managed", "rmm: {managed: false, async: true}", "rmm: {managed: true, async: true}"),
    (
        "rmm.release_threshold",
        "rmm: {async: true, release_threshold: 1GB}",
        "rmm: {async: false, release_threshold: 1GB}",
    ),
    (
        "rmm.maximum_pool_size",
        "rmm: {pool_size: 1GB, maximum_pool_size: 1GB}",
        "rmm: {maximum_pool_size: 1GB}",
    ),
    (
        "rmm.maximum_pool_size",
        "rmm: {pool_size: 1GB, maximum_pool_size: 1GB}",
        "rmm: {pool_size: 1000000001, maximum_pool_size: 1GB}",
    ),
    (
        "rmm.maximum_pool_size",
        "rmm: {pool_size: 0.5, maximum_pool_size: 0.5}",
        "rmm: {pool_size: 0.6, maximum_pool_size: 0.5}",
    ),
    (
        "rmm.set_allocator_for",
        "rmm: {set_allocator_for: [cupy]}",
        "rmm: {set_allocator_for: [cup]}",
    ),
    ("dask.protocol", "dask: {protocol: tcp}", "dask: {protocol: tpc}"),
    ("tls", "tls: {ca_file: a, cert: b, key: c}", "tls: {ca_file: a, cert: b}"),
    ("tls", "tls: {ca_file: a, cert: b, key: c}", "tls: {ca_file: a}"),
    (
        "tls",
        "tls: {ca_file: a, cert: b, key: c}\nucx: {nvlink: false}",
        "tls: {ca_file: a, cert: b, key: c}\nucx: {nvlink: true}",
    ),
    (
        "tls",
        "tls: {ca_file: a, cert: b, key: c}\ndask: {protocol: tls}",
        "tls: {ca_file: a, cert: b, key: c}\ndask: {protocol: ucxx}",
    ),
    (
        "tls",
        "tls: {ca_file: a, cert: b, key: c}\ndask: {protocol: tls}",
        "tls: {ca_file: a, cert: b, key: c}\ndask: {protocol: direct}",
    ),
    (
        "dask.protocol",
        "dask: {protocol: ucxx}\nucx: {infiniband: true}",
        "dask: {protocol: tcp}\nucx: {infiniband: true}",
    ),
    (
        "dask.protocol",
        "dask: {protocol: direct}\nucx: {rdmacm: false}",
        "dask: {protocol: direct}\nucx: {rdmacm: true}",
    ),
    (
        "dask.protocol",
        "dask: {protocol: tcp}\nucx: {tcp: false}",
        "dask: {protocol: tcp}\nucx: {tcp: true}",
    ),
    ("dask.protocol", "dask: {protocol: tcp}", "dask: {protocol: tcp}\nucx: {library: auto}"),
    (
        "dask.protocol",
        "dask: {protocol: tls}\ntls: {ca_file: a, cert: b, key: c}",
        "dask: {protocol: tls}",
    ),
    (
        "ucx.env.UCX_NET_DEVICES",
        "ucx: {net_devices: none, env: {UCX_NET_DEVICES: a}}",
        "ucx: {net_devices: auto, env: {UCX_NET_DEVICES: a}}",
    ),
    ("ucx.env.UCX_TLS", "ucx: {env: {UCX_TLS: rc}}", "ucx: {tcp: false, env: {UCX_TLS: rc}}"),
    (
        "ucx.env.UCX_TLS",
        "ucx: {infiniband: true, env: {UCX_RNDV_THRESH: '1'}}",
        "ucx: {infiniband: true, env: {UCX_TLS: rc}}",
    ),
    (
        "scheduler.interface",
        "scheduler: {interface: eth0}",
        "scheduler: {interface: eth0, host: 10.0.0.1}",
    ),
    ("dask.hosts[0]", "engine: dask\ndask: {hosts: [a]}", "engine: dask\ndask: {hosts: [-a]}"),
    (
        "dask.hosts[0]",
        "engine: dask\ndask: {hosts: ['a:65535']}",
        "engine: dask\ndask: {hosts: ['a:65536']}",
    ),
    ("dask.hosts[1]", "engine: dask\ndask: {hosts: [a, b]}", "engine: dask\ndask: {hosts: [a, a]}"),
    ("dask.hosts[0]", "engine: dask\ndask: {hosts: [a]}", "engine: dask\ndask: {hosts: ['a;b']}"),
    ("dask.hosts", "engine: dask\ndask: {hosts: [a]}", "dask: {hosts: [a]}"),
    ("dask.hosts", "engine: dask\ndask: {join: b}", "engine: dask\ndask: {hosts: [a], join: b}"),
    (
        "dask.adapt_minimum",
        "engine: dask\ndask: {adapt_minimum: 1}",
        "engine: dask\ndask: {hosts: [a], adapt_minimum: 1}",
    ),
    ("dask.ssh", "engine: dask\ndask: {ssh: [ssh]}", "engine: dask\ndask: {ssh: []}"),
    (
        "dask.hosts_program",
        "engine: dask\ndask: {hosts_program: a}",
        "engine: dask\ndask: {hosts_program: -a}",
    ),
    (
        "worker.contact_address",
        "workers: 1\nengine: dask\nworker: {contact_address: 'tcp://10.0.0.1:1'}",
        "workers: 1\nengine: dask\ndask: {hosts: [a]}\nworker: {contact_address: 'tcp://10.0.0.1:1'}",
    ),
    ("dask.join", "dask: {join: a}", "dask: {join: -a}"),
    ("dask.join", "dask: {join: './gpu1:8786'}", "dask: {join: 'gpu1:8786'}"),
    ("dask.join", "dask: {join: 'tcp://gpu1:8786'}", "dask: {join: 'http://gpu1:8786'}"),
    ("dask.join", "dask: {join: 'tcp://[::1]:8786'}", "dask: {join: 'tcp://::1:8786'}"),
    ("dask.join", "dask: {join: 'direct://a:65535'}", "dask: {join: 'direct://a:65536'}"),
    ("dask.join", "dask: {join: 'ws://a/b'}", "dask: {join: 'tls://:8786'}"),
    ("dask.join", "dask: {join: 'ucxx://a:1/'}", "dask: {join: 'ucxx://a:0'}"),
    (
        "worker.listen_address",
        "workers: 1\nworker: {listen_address: 'tcp://10.0.0.1:1'}",
        "workers: 2\nworker: {listen_address: 'tcp://10.0.0.1:1'}",
    ),
    (
        "worker.contact_address",
        "gpus: [0]\nworker: {contact_address: 'tcp://10.0.0.1:1'}",
        "gpus: [0, 1]\nworker: {contact_address: 'tcp://10.0.0.1:1'}",
    ),
    ("worker.ports", "workers: 2\nworker: {ports: '1:2'}", "workers: 3\nworker: {ports: '1:2'}"),
    ("worker.ports", "workers: 3\nworker: {ports: 0}", "workers: 3\nworker: {ports: 7}"),
    (
        "worker.ports",
        "workers: 1\ncpu_workers: 1\nworker: {ports: '1:2'}",
        "workers: 1\ncpu_workers: 2\nworker: {ports: '1:2'}",
    ),
    (
        "worker.ports",
        "workers: 1\nworkers_per_gpu: 2\nworker: {ports: '1:2'}",
        "workers: 1\nworkers_per_gpu: 3\nworker: {ports: '1:2'}",
    ),
    (
        "worker.ports",
        "gpus: {count: 2}\nworker: {ports: '1:2'}",
        "gpus: {count: 3}\nworker: {ports: '1:2'}",
    ),
    (
        "worker.ports",
        "gpus: none\ncpu_workers: 2\nworker: {ports: '1:2'}",
        "gpus: none\ncpu_workers: 3\nworker: {ports: '1:2'}",
    ),
    ("worker.ports", "worker: {ports: '7:7'}", "worker: {ports: '8:7'}"),
    ("worker.ports", "worker: {ports: '0:0'}", "worker: {ports: '0:7'}"),
    ("worker.ports", "worker: {ports: '65535'}", "worker: {ports: '65536'}"),
    ("dask.start_method", "dask: {start_method: fork}", "dask: {start_method: frok}"),
    ("dask.adapt_minimum", "dask: {adapt_minimum: 1}", "dask: {adapt_minimum: 1, join: a}"),
    (
        "dask.adapt_minimum",
        "workers: 2\ndask: {adapt_minimum: 2}",
        "workers: 2\ndask: {adapt_minimum: 3}",
    ),
    ("dask.start_workers", "dask: {start_workers: 1}", "dask: {start_workers: 0}"),
    ("dask.worker_name", "dask: {worker_name: a, join: b}", "dask: {worker_name: a}"),
    (
        "supervision.backoff",
        "supervision: {backoff: 2s, backoff_max: 2s}",
        "supervision: {backoff: 3s, backoff_max: 2s}",
    ),
    (
        "supervision.answer_within",
        "supervision: {answer_within: 100ms}",
        "supervision: {answer_within: 99ms}",
    ),
    ("worker.resources", "worker: {resources: {A: 0}}", "worker: {resources: {A: -1}}"),
    ("worker.resources", "worker: {resources: {A: 1}}", "worker: {resources: {A: 1.5}}"),
    ("worker.resources", "worker: {resources: {A: 999999}}", "worker: {resources: {A: 1e18}}"),
    (
        "worker.resources",
        "engine: dask\nworker: {resources: {A: 1.5}}",
        "engine: native\nworker: {resources: {A: 1.5}}",
    ),
    (
        "worker.resources",
        "worker: {resources: {MEM: 1}}\ndask: {place_by_kind: true}",
        "worker: {resources: {GPU: 1}}\ndask: {place_by_kind: true}",
    ),
    ("native.disk_limit", "native: {disk_limit: 1GB}", "native: {disk_limit: 0.5}"),
    ("logs.rotate_at", "logs: {rotate_at: 1GB}", "logs: {rotate_at: 0.5}"),
    ("logs.rotate_at", "logs: {rotate_at: 1_000}", "logs: {rotate_at: 1GB/day}"),
    ("command.argv", "command: {argv: [a]}", "command: {argv: []}"),
    ("worker.env", "worker: {env: {A1_: b}}", "worker: {env: {1A: b}}"),
    ("worker.env", "worker: {env: {A: b}}", "worker: {env: {A-B: b}}"),
    ("worker.env", "worker: {env: {A: b}}", "worker: {env: {'': b}}"),
    ("worker.env", "worker: {env: {UCXPY_A: b}}", "worker: {env: {UCX_A: b}}"),
    ("worker.env", "worker: {env: {CUDA_A: b}}", "worker: {env: {CUDA_VISIBLE_DEVICES: b}}"),
    ("ucx.env", "ucx: {env: {UCX_A: b}}", "ucx: {env: {UXC_A: b}}"),
    ("ucx.env", "ucx: {env: {UCXPY_A: b}}", "ucx: {env: {UCXPYA: b}}"),
    (
        "overrides[0].match",
        "overrides: [{match: {numa: 0}, threads: 1}]",
        "overrides: [{match: {}, threads: 1}]",
    ),
    (
        "overrides[0].threads",
        "overrides: [{match: {numa: 0}, threads: 1}]",
        "overrides: [{match: {numa: 0}, threads: 0}]",
    ),
    (
        "overrides[0].cpus",
        "cpus: split\noverrides: [{match: {numa: 0}, cpus: none}]",
        "cpus: split\noverrides: [{match: {numa: 0}, cpus: split}]",
    ),
    (
        "overrides[0].env",
        "overrides: [{match: {numa: 0}, env: {A: b}}]",
        "overrides: [{match: {numa: 0}, env: {CUDA_DEVICE_ORDER: b}}]",
    ),
    (
        "overrides[1].memory_limit",
        "overrides: [{match: {numa: 0}, threads: 1}, {match: {numa: 1}, memory_limit: 16MiB}]",
        "overrides: [{match: {numa: 0}, threads: 1}, {match: {numa: 1}, memory_limit: 15MiB}]",
    ),
    ("memory.limit", "memory: {limit: 16777216}", "memory: {limit: 16777215}"),
    ("device.memory_limit", "device: {memory_limit: 65536}", "device: {memory_limit: 65535}"),
    ("memory.limit", "memory: {limit: 0.5}", "memory: {limit: 1}"),
    ("scheduler.host", "scheduler: {host: 10.0.0.255}", "scheduler: {host: 10.0.0.256}"),
    ("scheduler.host", "scheduler: {host: a.b}", "scheduler: {host: 1.2}"),
    ("scheduler.host", "scheduler: {host: a-b}", "scheduler: {host: -b}"),
    ("scheduler.host", "scheduler: {host: a}", "scheduler: {host: 'a b'}"),
    ("scheduler.host", "scheduler: {host: a}", "scheduler: {host: ''}"),
    ("scheduler.host", "scheduler: {host: a}", "scheduler: {host: \"a\\x01\"}"),
    ("ucx.net_devices", "ucx: {net_devices: 'mlx5_0:1'}", "ucx: {net_devices: 'mlx5_0;1'}"),
    ("ucx.net_devices", "ucx: {net_devices: stripes1}", "ucx: {net_devices: strip}"),
    ("ucx.net_devices", "ucx: {net_devices: 'a,b'}", "ucx: {net_devices: 'a,,b'}"),
];

#[test]
fn one_step_beyond_the_last_text_that_is_accepted_is_refused_under_its_key() {
    for (key, accepted, refused) in EDGES {
        if let Err(error) = parsed(accepted) {
            panic!("{accepted}: {error}");
        }
        let error = match parsed(refused) {
            Ok(_) => panic!("{refused}: accepted"),
            Err(error) => error.to_string(),
        };
        assert!(error.contains(key), "{refused}: {error}");
    }
}

#[test]
fn names_are_as_long_as_they_may_be() {
    let names = |length: usize| parsed(&format!("ucx: {{net_devices: '{}'}}", "a".repeat(length)));
    assert!(names(64).is_ok());
    assert!(names(65).is_err());
}

#[test]
fn the_words_for_nics_are_no_names_of_nics() {
    use cuda_cluster::spec::NetDevices;
    let chosen = |text: &str| {
        let spec = parsed(&format!("ucx: {{net_devices: {text}}}")).expect(text);
        spec.ucx.net_devices.expect("chosen")
    };
    assert_eq!(chosen("auto"), NetDevices::Auto);
    assert_eq!(chosen("none"), NetDevices::None);
    assert_eq!(chosen("pin"), NetDevices::Pin);
    assert_eq!(chosen("stripe"), NetDevices::Stripe);
    assert_eq!(chosen("mlx5_0"), NetDevices::List(vec!["mlx5_0".to_owned()]));
}
