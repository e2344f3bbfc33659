//! Every option of dask-cuda: refused with a reason, or passed to the process that it is for.
//! `options` checks what arrives in a running worker.

use serde_json::{Value, json};

use super::python::{self, packages};
use super::{MACHINE, down, run_directory, up};
use crate::sandbox::Sandbox;

/// Flags, and words of the reason for refusing them.
const REFUSED: [(&[&str], &str); 21] = [
    (&["--rmm-managed-memory", "--enable-nvlink"], "cannot be shared over NVLink"),
    (&["--rmm-managed-memory", "--rmm-async"], "exclude each other"),
    (&["--rmm-release-threshold", "1GB"], "only the asynchronous allocator"),
    (&["--rmm-maximum-pool-size", "1GB"], "no pool whose size"),
    (&["--rmm-pool-size", "8GB", "--rmm-maximum-pool-size", "1GB"], "begins larger"),
    (&["--rmm-pool-size", "many"], "many"),
    (&["--set-rmm-allocator-for-libs", "numpy"], "numpy"),
    (&["--n-workers", "2", "--listen-address", "tcp://127.0.0.1:1"], "cannot serve 2 workers"),
    (&["--n-workers", "2", "--contact-address", "tcp://127.0.0.1:1"], "cannot serve 2 workers"),
    (&["--n-workers", "4", "--worker-port", "9000:9001"], "fewer ports"),
    (&["--threads-per-worker", "0"], "0 is too few"),
    (&["--nthreads", "0"], "0 is too few"),
    (&["--join", "-8786"], "does not begin with '-'"),
    (&["--host", "127.0.0.1", "--interface", "lo"], "already says where to listen"),
    (&["--tls-ca-file", "ca.pem"], "all three"),
    (&["--protocol", "tls"], "needs certificates"),
    (&["--protocol", "telegraph"], "telegraph"),
    (
        &["--protocol", "tcp", "--tls-ca-file", "a", "--tls-cert", "b", "--tls-key", "c"],
        "does not encrypt",
    ),
    (&["--host", "tcp://"], "neither a host nor a port"),
    (&["--dashboard-address", ":-4"], "neither a host nor a port"),
    (&["--memory-limit", "2.5"], "2.5"),
];

/// Flags, and where they are in the plan of a worker or of the engine.
fn accepted() -> Vec<(&'static [&'static str], &'static str, Value)> {
    vec![
        (&["--rmm-pool-size", "1GB"], "/workers/0/rmm/pool_bytes", json!(1_000_000_000)),
        (&["--rmm-pool-size", "0.5"], "/workers/0/rmm/pool_bytes", json!(42_949_672_960u64)),
        (
            &["--rmm-pool-size", "1GB", "--rmm-maximum-pool-size", "2GB"],
            "/workers/0/rmm/maximum_pool_bytes",
            json!(2_000_000_000),
        ),
        (&["--rmm-managed-memory"], "/workers/0/rmm/managed", json!(true)),
        (&["--rmm-async"], "/workers/0/rmm/asynchronous", json!(true)),
        (
            &["--rmm-async", "--rmm-release-threshold", "1GB"],
            "/workers/0/rmm/release_threshold_bytes",
            json!(1_000_000_000),
        ),
        (
            &["--rmm-pool-size", "1GB", "--rmm-log-directory", "/tmp/rmm"],
            "/workers/0/rmm/log_directory",
            json!("/tmp/rmm"),
        ),
        (
            &["--rmm-pool-size", "1GB", "--rmm-track-allocations"],
            "/workers/0/rmm/track_allocations",
            json!(true),
        ),
        (
            &["--rmm-pool-size", "1GB", "--set-rmm-allocator-for-libs", "cupy,torch"],
            "/workers/0/rmm/set_allocator_for",
            json!(["cupy", "torch"]),
        ),
        (&["--enable-cudf-spill"], "/engine/dask/cudf_spill", json!(0)),
        (&["--enable-cudf-spill", "--cudf-spill-stats", "2"], "/engine/dask/cudf_spill", json!(2)),
        (
            &["--device-memory-limit", "30GB"],
            "/workers/0/device_memory_limit_bytes",
            json!(30_000_000_000u64),
        ),
        (
            &["--device-memory-limit", "auto"],
            "/workers/0/device_memory_limit_bytes",
            json!(68_719_476_736u64),
        ),
        (&["--memory-limit", "none"], "/workers/0/memory_limit_bytes", Value::Null),
        (&["--interface", "lo"], "/engine/dask/interface", json!("lo")),
        (&["--no-dashboard"], "/engine/dask/dashboard", json!(false)),
        (&["--pid-file", "/tmp/pid"], "/supervision/pid_file", json!("/tmp/pid")),
        (
            &["--n-workers", "1", "--contact-address", "tcp://127.0.0.1:9"],
            "/engine/dask/contact_address",
            json!("tcp://127.0.0.1:9"),
        ),
        (&["--enable-tcp-over-ucx"], "/engine/dask/protocol", json!("ucxx")),
        (&["--ucx", "system"], "/engine/dask/protocol", json!("ucxx")),
        (&["--protocol", "ucx"], "/engine/dask/protocol", json!("ucx")),
    ]
}

fn planned(flags: &[&str]) -> crate::sandbox::Said {
    let fixed = ["plan", MACHINE[0], MACHINE[1], "--engine", "dask", "-o", "json"];
    Sandbox::new().run(&[&fixed[..], flags].concat())
}

#[test]
fn what_dask_cuda_refuses_is_refused_with_the_reason() {
    for (flags, words) in REFUSED {
        let said = planned(flags);
        assert_eq!(said.code, 2, "{flags:?}: {said}");
        assert!(said.stderr.contains(words), "{flags:?}: {said}");
    }
}

#[test]
fn what_dask_cuda_takes_stands_in_the_plan() {
    for (flags, place, expected) in accepted() {
        let said = planned(flags);
        assert_eq!(said.code, 0, "{flags:?}: {said}");
        let plan: Value = serde_json::from_str(&said.stdout).expect("JSON");
        assert_eq!(*plan.pointer(place).unwrap_or(&Value::Null), expected, "{flags:?} at {place}");
    }
}

/// The last step to dask-cuda, which needs no GPU.
#[test]
fn dask_cudas_plugins_are_told_what_was_asked_for() {
    if !packages() {
        return;
    }
    let found = python::ask(
        "from cuda_cluster_dask import gpu\n\
         import json\n\
         rmm = dict(pool_bytes=1, maximum_pool_bytes=2, managed=False, asynchronous=True,\n\
                    release_threshold_bytes=3, log_directory='/l', track_allocations=True,\n\
                    set_allocator_for=['cupy'])\n\
         pool, spill = gpu.plugins({'rmm': rmm, 'cudf_spill': 4})\n\
         print(json.dumps([vars(pool), vars(spill)], default=str))",
    );
    let [pool, spill] = &found.as_array().expect("two plugins")[..] else { panic!("{found}") };
    for (field, expected) in [
        ("initial_pool_size", json!(1)),
        ("maximum_pool_size", json!(2)),
        ("managed_memory", json!(false)),
        ("async_alloc", json!(true)),
        ("release_threshold", json!(3)),
        ("logging", json!(true)),
        ("log_directory", json!("/l")),
        ("rmm_track_allocations", json!(true)),
        ("external_lib_list", json!(["cupy"])),
    ] {
        assert_eq!(pool[field], expected, "{field} in {pool}");
    }
    assert_eq!((&spill["spill"], &spill["spill_stats"]), (&json!(true), &json!(4)), "{spill}");
}

#[test]
fn one_worker_listens_and_is_reached_where_it_was_told_and_the_process_id_is_written() {
    if !packages() {
        return;
    }
    let sandbox = Sandbox::new();
    let folder = tempfile::tempdir().expect("a directory");
    let pid_file = folder.path().join("pid");
    let port = free_port();
    let listen = format!("tcp://0.0.0.0:{port}");
    let contact = format!("tcp://127.0.0.1:{port}");
    let flags = [
        "--n-workers",
        "1",
        "--host",
        "127.0.0.1",
        "--no-dashboard",
        "--listen-address",
        &listen,
        "--contact-address",
        &contact,
        "--pid-file",
        &pid_file.display().to_string(),
    ];
    let cluster = up(&sandbox, "alone", &flags);
    let found = cluster.tell("look");
    assert_eq!(found["workers"]["gpu0"]["address"], contact.as_str(), "{found}");
    let pid = std::fs::read_to_string(&pid_file).expect("the pid file");
    assert_eq!(pid.trim(), sandbox.state("alone")["supervisor_pid"].to_string());
    down(&sandbox, "alone");
    assert!(!pid_file.exists(), "the pid file goes with the supervisor");
}

#[test]
fn tls_is_spoken_by_all_and_handed_to_clients() {
    if !packages() {
        return;
    }
    let sandbox = Sandbox::new();
    let folder = tempfile::tempdir().expect("a directory");
    let file = |name: &str| folder.path().join(name).display().to_string();
    let (key, cert) = (file("key.pem"), file("cert.pem"));
    let made = std::process::Command::new("openssl")
        .args(["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=story"])
        .args(["-keyout", &key, "-out", &cert])
        .output();
    if !made.is_ok_and(|made| made.status.success()) {
        crate::skip::skip("openssl", "there is no openssl to make a certificate with");
        return;
    }
    let flags =
        ["--n-workers", "2", "--tls-ca-file", &cert, "--tls-cert", &cert, "--tls-key", &key];
    let cluster = up(&sandbox, "tls", &flags);
    let found = cluster.tell("look");
    let scheduler = found["scheduler"].as_str().expect("an address");
    assert!(scheduler.starts_with("tls://"), "{found}");
    for inside in found["workers"].as_object().expect("workers").values() {
        assert!(inside["address"].as_str().is_some_and(|text| text.starts_with("tls://")));
    }
    let env = std::fs::read_to_string(run_directory(&sandbox, "tls").join("client.env"));
    assert!(env.expect("client.env").contains("DASK_DISTRIBUTED__COMM__TLS__CA_FILE"));
    down(&sandbox, "tls");
}

fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("its address").port()
}
