//! Objects of a client on their way to the workers and back: the bytes are the same whichever way
//! they take, and whoever dies meanwhile.

use crate::cluster;
use crate::skip;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::cluster::Cluster;
use cuda_cluster::cluster::{Client, ClientError, Remote};
use cuda_cluster::plan::{EnginePlan, NativePlan, Plan};
use cuda_cluster::wire::tasks::TaskError;

/// Names the run directory to the part of a test that runs in a process of its own.
const DIRECTORY: &str = "CUDA_CLUSTER_TEST_DIRECTORY";

fn start(plan: &Plan) -> (Cluster, Client) {
    let mut cluster = Cluster::start_plan(plan);
    cluster.ready();
    let client = Client::connect(cluster.directory()).expect("the scheduler answers");
    (cluster, client)
}

/// Sizes around the limits at which objects travel in another way.
const SIZES: [usize; 7] = [0, 10, 5000, (64 << 10) - 1, 64 << 10, 3_000_000, 9_000_001];

fn content(seed: usize, size: usize) -> Vec<u8> {
    (0..size).map(|at| ((at / 7 + seed * 31) % 251).to_le_bytes()[0]).collect()
}

/// Puts objects of all sizes, and compares what is gathered.
fn there_and_back(client: &Client) {
    let contents: Vec<Vec<u8>> =
        (0..3 * SIZES.len()).map(|at| content(at, SIZES[at % SIZES.len()])).collect();
    let put: Result<Vec<Remote>, _> = contents.iter().map(|bytes| client.put(bytes)).collect();
    let put = put.expect("there is room");
    let gathered = client.gather(&put).expect("all are there");
    assert!(gathered == contents, "other bytes came back");
    let again: Result<Vec<Vec<u8>>, _> = put.iter().map(Remote::bytes).collect();
    assert!(again.expect("they are still there") == contents, "other bytes came back, one by one");
}

#[test]
fn objects_of_all_sizes_come_back_in_order() {
    let (mut cluster, client) = start(&cluster::plan(2));
    there_and_back(&client);
    let same = client.put(&content(1, 100_000)).expect("put");
    let held: Result<Vec<Remote>, _> = (0..3).map(|_| client.hold(same.id())).collect();
    let gathered = client.gather(&held.expect("asked")).expect("there");
    assert!(gathered == vec![content(1, 100_000); 3], "the same object three times");
    assert!(client.gather(&[]).expect("nothing").is_empty());
    cluster.stop();
}

#[test]
fn objects_on_the_disk_are_gathered_with_those_in_memory() {
    let mut plan = cluster::plan(2);
    for worker in &mut plan.workers {
        worker.device_memory_limit_bytes = Some(10 << 20);
    }
    plan.engine = EnginePlan::Native(NativePlan {
        host_limit_bytes: Some(10 << 20),
        ..NativePlan::default()
    });
    let (mut cluster, client) = start(&plan);
    let contents: Vec<Vec<u8>> = (0..20).map(|at| content(at, 3_000_000)).collect();
    let put: Result<Vec<Remote>, _> = contents.iter().map(|bytes| client.put(bytes)).collect();
    let put = put.expect("there is a disk");
    let on_disk = |name| client.counters(name).expect("told").disk.objects;
    assert!(on_disk("gpu0") + on_disk("gpu1") > 0, "60 MB are in 40 MB of memory");
    assert!(client.gather(&put).expect("all are there") == contents, "other bytes came back");
    cluster.stop();
}

/// The kernel does not tell who is at the other end of a socket if that process is in another PID
/// namespace, as it is for a client outside a container. Then the bytes go over the socket.
#[test]
fn a_client_in_another_pid_namespace_gets_the_same_bytes() {
    if let Some(directory) = std::env::var_os(DIRECTORY) {
        let client = Client::connect(directory.as_ref()).expect("the scheduler answers");
        return there_and_back(&client);
    }
    let unshare = || {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--pid", "--fork", "--"]);
        command
    };
    if !unshare().arg("true").status().is_ok_and(|status| status.success()) {
        return skip::skip("namespaces", "this user cannot make a PID namespace");
    }
    let (mut cluster, _client) = start(&cluster::plan(2));
    let mut inside = unshare();
    inside.arg(std::env::current_exe().expect("this program"));
    inside.args(["--exact", "a_client_in_another_pid_namespace_gets_the_same_bytes"]);
    let output = inside.env(DIRECTORY, cluster.directory()).output().expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    cluster.stop();
}

#[test]
fn a_failed_object_ends_a_gather_while_another_is_computed() {
    let (mut cluster, client) = start(&cluster::plan(2));
    let large = client.put(&content(1, 1_000_000)).expect("put");
    let slow = client.submit("sleep", &600_000_000u64, &[]).expect("submitted");
    let bad = client.submit("no such function", &(), &[]).expect("submitted");
    let start = Instant::now();
    let error = client.gather(&[large, slow, bad]).expect_err("one of them fails");
    let is_it = matches!(error, ClientError::Task(TaskError::UnknownFunction { .. }));
    assert!(is_it, "{error}");
    assert!(start.elapsed() < cluster::PATIENCE, "it waited for the other");
    cluster.kill("gpu0");
    cluster.kill("gpu1");
    cluster.stop();
}

#[test]
fn a_worker_that_dies_during_a_gather_changes_no_byte() {
    let (mut cluster, client) = start(&cluster::plan(2));
    let chunks = (0..24u64).map(|row| (7u64, row * 512, 0u64, 512u64));
    let made = client.map("matrix.chunk", chunks).expect("submitted");
    let expected = client.gather(&made).expect("computed");
    assert_eq!(expected.iter().map(Vec::len).sum::<usize>(), 24 << 21);
    for victim in ["gpu0", "gpu1", "gpu0"] {
        std::thread::scope(|scope| {
            let gathering = scope.spawn(|| {
                for _ in 0..3 {
                    assert!(client.gather(&made).expect("computed again") == expected);
                }
            });
            std::thread::sleep(Duration::from_millis(20));
            cluster.kill(victim);
            cluster.restart_worker(victim);
            while !gathering.is_finished() {
                cluster.revive();
                std::thread::sleep(Duration::from_millis(20));
            }
        });
    }
    cluster.stop();
}
