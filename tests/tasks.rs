//! Objects and tasks on real processes: a client, a scheduler, and workers.
#![allow(unsafe_code)]

mod native;

use cuda_cluster::cluster::{Client, ClientError, Remote};
use cuda_cluster::wire::tasks::TaskError;
use native::Cluster;

fn cluster(workers: usize) -> (Cluster, Client) {
    let mut cluster = Cluster::start(workers);
    cluster.ready();
    let client = Client::connect(cluster.directory()).expect("the scheduler answers");
    (cluster, client)
}

#[test]
fn thousands_of_tasks_complete_and_leave_nothing_behind() {
    let (mut cluster, client) = cluster(2);
    let tasks = client.map("noop", 0..5000u32).expect("submitted");
    client.wait(&tasks).expect("done");
    let finished: u64 =
        client.overview().expect("told").workers.iter().map(|worker| worker.finished).sum();
    assert_eq!(finished, 5000);
    drop(tasks);
    let start = std::time::Instant::now();
    while client.overview().expect("told").tasks > 0 {
        assert!(start.elapsed() < native::PATIENCE, "released tasks are remembered");
    }
    cluster.stop();
}

#[test]
fn chains_and_fans_compute_what_they_should() {
    let (mut cluster, client) = cluster(3);
    let one = client.put(&[1]).expect("put");
    let mut chain = one;
    for _ in 0..200 {
        chain = client.submit("sum", &(), &[&chain, &chain]).expect("submitted");
    }
    // Two to the power of 200, in 64 bits.
    assert_eq!(chain.value::<u64>().expect("computed"), 0);
    let leaves: Vec<Remote> = (0..100u8).map(|n| client.put(&[n]).expect("put")).collect();
    let all: Vec<&Remote> = leaves.iter().collect();
    let sum = client.submit("sum", &(), &all).expect("submitted");
    assert_eq!(sum.value::<u64>().expect("computed"), 4950);
    cluster.stop();
}

#[test]
fn large_objects_go_round_and_come_back() {
    let (mut cluster, client) = cluster(2);
    let content: Vec<u8> = (0..3_000_000u32).map(|n| n.to_le_bytes()[0]).collect();
    let put = client.put(&content).expect("put");
    assert_eq!(put.bytes().expect("there"), content);
    put.replicate(2).expect("asked");
    let start = std::time::Instant::now();
    while put.places().expect("there").len() < 2 {
        assert!(start.elapsed() < native::PATIENCE, "no copy is made");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let links = client.overview().expect("told").links;
    assert_eq!(links.iter().map(|link| link.bytes).sum::<u64>(), 3_000_000, "{links:?}");
    cluster.stop();
}

#[test]
fn an_error_names_its_worker_and_reaches_what_depends_on_it() {
    let (mut cluster, client) = cluster(2);
    let put = client.put(&[0xff; 3]).expect("put");
    let bad = client.task("sum").inputs(&[&put]).on("gpu1").submit().expect("submitted");
    let after = client.submit("sum", &(), &[&bad]).expect("submitted");
    for remote in [&bad, &after] {
        let Err(ClientError::Task(TaskError::Failed { task, worker, .. })) = remote.wait() else {
            panic!("{:?}", remote.wait())
        };
        assert_eq!((task, worker.as_str()), (bad.id(), "gpu1"));
    }
    let unknown = client.submit("no such thing", &(), &[]).expect("submitted");
    let error = unknown.wait().expect_err("there is none").to_string();
    assert!(error.contains("no function \"no such thing\""), "{error}");
    cluster.stop();
}

#[test]
fn a_cancelled_task_and_its_dependents_do_not_run() {
    let (mut cluster, client) = cluster(1);
    let slow = client.submit("sleep", &300_000u64, &[]).expect("submitted");
    let next = client.submit("sleep", &1u64, &[&slow]).expect("submitted");
    let last = client.submit("sleep", &1u64, &[&next]).expect("submitted");
    next.cancel().expect("asked");
    for remote in [&next, &last] {
        let error = remote.wait().expect_err("cancelled");
        assert!(matches!(error, ClientError::Task(TaskError::Cancelled { .. })), "{error}");
    }
    slow.wait().expect("it runs on");
    assert!(client.explain(slow.id()).expect("told").contains("gpu0 was chosen"));
    cluster.stop();
}

#[test]
fn results_come_as_they_are_completed() {
    let (mut cluster, client) = cluster(2);
    let slow = client.submit("sleep", &400_000u64, &[]).expect("submitted");
    let fast = client.submit("noop", &(), &[]).expect("submitted");
    let order = [fast.id(), slow.id()];
    let came: Vec<_> = client.as_completed(vec![slow, fast]).map(|remote| remote.id()).collect();
    assert_eq!(came, order);
    cluster.stop();
}

#[test]
fn a_client_that_goes_away_releases_what_it_held() {
    let (mut cluster, client) = cluster(2);
    let other = Client::connect(cluster.directory()).expect("connected");
    let kept = other.put(&[7; 100_000]).expect("put");
    let shared = client.hold(kept.id()).expect("asked");
    assert_eq!(shared.bytes().expect("held").len(), 100_000);
    let tasks = other.map("noop", 0..100u32).expect("submitted");
    other.wait(&tasks).expect("done");
    // The connection ends without a word.
    drop((kept, tasks, other));
    assert_eq!(shared.bytes().expect("still held").len(), 100_000);
    let start = std::time::Instant::now();
    while client.overview().expect("told").objects > 1 {
        assert!(start.elapsed() < native::PATIENCE, "what it held is remembered");
    }
    cluster.stop();
}

#[test]
fn a_stranger_is_refused() {
    let (mut cluster, _client) = cluster(1);
    cluster.write_secret(&"cd".repeat(32));
    let refused = Client::connect(cluster.directory());
    assert!(matches!(refused, Err(ClientError::Stranger { .. })), "{refused:?}");
    cluster.stop();
}
