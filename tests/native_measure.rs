//! Measurements between the native engine's workers, asked for by a client.

#![cfg(feature = "cli")]
#![allow(unsafe_code)]

mod native;

use cuda_cluster::engine::links::trials::Measures as _;
use cuda_cluster::engine::native::client::Client;
use cuda_cluster::wire::native::{Measurement, Quantity};
use cuda_cluster::wire::peer::MemoryKind;
use native::Cluster;

fn measurement(from: &str, to: &str, what: Quantity, size: u64, messages: u32) -> Measurement {
    Measurement {
        from: from.to_owned(),
        to: to.to_owned(),
        memory: MemoryKind::Host,
        what,
        size,
        messages,
        rounds: 5,
        warmup: 1,
        cpus: None,
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

#[test]
fn bandwidth_and_latency_of_a_pair_are_measured_in_both_kinds_of_memory() {
    let mut cluster = Cluster::start(2);
    cluster.ready();
    runtime().block_on(async {
        let mut client = Client::connect(cluster.directory()).await.expect("a scheduler");
        for size in [0, 8, 4096, 64 << 10, 1 << 20] {
            for memory in [MemoryKind::Host, MemoryKind::Device] {
                let stream = measurement("gpu0", "gpu1", Quantity::Bandwidth, size, 50);
                let stream = Measurement { memory, ..stream };
                let result = client.measure(&[stream]).await.expect("a scheduler").remove(0);
                let samples = result.result.expect("both workers are there");
                assert_eq!(samples.rounds_ns.len(), 5);
                assert!(samples.rounds_ns.iter().all(|round| *round > 0));
                assert!(samples.lanes.contains(&"cma/memory".to_owned()), "{samples:?}");
            }
        }
        let ping = measurement("gpu1", "gpu0", Quantity::Latency, 8, 1);
        let ping = Measurement { rounds: 100, ..ping };
        let result = client.measure(&[ping]).await.expect("a scheduler").remove(0);
        assert_eq!(result.result.expect("both workers are there").rounds_ns.len(), 100);
    });
    cluster.stop();
}

#[test]
fn all_pairs_are_measured_at_the_same_time() {
    let mut cluster = Cluster::start(3);
    cluster.ready();
    let names = ["gpu0", "gpu1", "gpu2"];
    let pairs = names.iter().flat_map(|from| names.iter().map(move |to| (*from, *to)));
    let all: Vec<Measurement> = pairs
        .filter(|(from, to)| from != to)
        .map(|(from, to)| measurement(from, to, Quantity::Bandwidth, 1 << 16, 100))
        .collect();
    runtime().block_on(async {
        let mut client = Client::connect(cluster.directory()).await.expect("a scheduler");
        let results = client.measure(&all).await.expect("a scheduler");
        assert_eq!(results.len(), 6);
        for result in results {
            assert!(result.result.is_ok(), "{result:?}");
        }
        let workers = client.workers().await.expect("a scheduler");
        assert_eq!(workers.len(), 3);
        assert!(workers.iter().all(|worker| worker.peers.len() == 2));
    });
    cluster.stop();
}

#[test]
fn what_cannot_be_measured_says_why() {
    let mut cluster = Cluster::start(1);
    cluster.ready();
    runtime().block_on(async {
        let mut client = Client::connect(cluster.directory()).await.expect("a scheduler");
        for (from, to) in [("gpu0", "gpu9"), ("gpu9", "gpu0")] {
            let stream = measurement(from, to, Quantity::Bandwidth, 8, 1);
            let result = client.measure(&[stream]).await.expect("a scheduler").remove(0);
            let reason = result.result.expect_err("nobody is there");
            assert!(reason.contains("gpu9"), "{reason}");
        }
    });
    cluster.stop();
}

#[test]
fn a_peer_killed_in_the_middle_of_a_large_transfer_is_told_within_a_second() {
    let mut cluster = Cluster::start(4);
    cluster.ready();
    let directory = cluster.directory().to_owned();
    let measure = move |from: &'static str, to: &'static str, size, messages, rounds| {
        let directory = directory.clone();
        std::thread::spawn(move || {
            runtime().block_on(async {
                let mut client = Client::connect(&directory).await.expect("a scheduler");
                let stream = measurement(from, to, Quantity::Bandwidth, size, messages);
                let stream = Measurement { rounds, ..stream };
                let result = client.measure(&[stream]).await.expect("a scheduler").remove(0);
                (result.result, std::time::Instant::now())
            })
        })
    };
    // Long enough that the peer dies in the middle.
    let broken = measure("gpu0", "gpu1", 1 << 30, 1000, 1000);
    let other = measure("gpu2", "gpu3", 1 << 20, 200, 20);
    // Both sides have their memory, and the bytes are moving.
    while cluster.resident_bytes("gpu0").min(cluster.resident_bytes("gpu1")) < 1 << 30 {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    std::thread::sleep(std::time::Duration::from_millis(500));
    let killed = std::time::Instant::now();
    cluster.kill("gpu1");
    let (result, told) = broken.join().expect("no panic");
    let reason = result.expect_err("the peer is dead");
    println!("told {:?} after the kill: {reason}", told - killed);
    assert!(reason.contains("gpu1 was lost"), "{reason}");
    assert!(told - killed < std::time::Duration::from_secs(1), "{:?}", told - killed);
    let (result, _) = other.join().expect("no panic");
    assert_eq!(result.expect("its peers live").rounds_ns.len(), 20);
    cluster.spawn_worker("gpu1");
    cluster.wait_ready("gpu1");
    cluster.stop();
}
