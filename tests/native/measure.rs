//! Measurements between the native engine's workers, asked for by a client.

use std::time::Duration;

use crate::cluster::Cluster;
use cuda_cluster::native::client::Client;
use cuda_cluster::wire::links::trials::Measures as _;
use cuda_cluster::wire::native::{Measurement, Quantity};
use cuda_cluster::wire::peer::MemoryKind;
use nix::sys::signal::Signal;

/// Longer than any measurement of these tests takes.
const LONG: Duration = Duration::from_secs(300);

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
                let result = client.measure(&[stream], LONG).await.expect("a scheduler").remove(0);
                let samples = result.result.expect("both workers are there");
                assert_eq!(samples.rounds_ns.len(), 5);
                assert!(samples.rounds_ns.iter().all(|round| *round > 0));
                assert!(samples.lanes.contains(&"cma/memory".to_owned()), "{samples:?}");
            }
        }
        let ping = measurement("gpu1", "gpu0", Quantity::Latency, 8, 1);
        let ping = Measurement { rounds: 100, ..ping };
        let result = client.measure(&[ping], LONG).await.expect("a scheduler").remove(0);
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
        let results = client.measure(&all, LONG).await.expect("a scheduler");
        assert_eq!(results.len(), 6);
        for result in results {
            assert!(result.result.is_ok(), "{result:?}");
        }
    });
    cluster.know_each_other();
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
            let result = client.measure(&[stream], LONG).await.expect("a scheduler").remove(0);
            let reason = result.result.expect_err("nobody is there");
            assert!(reason.contains("gpu9"), "{reason}");
        }
    });
    cluster.stop();
}

#[test]
fn a_peer_killed_in_the_middle_of_a_large_transfer_is_told_before_the_time_is_over() {
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
                let result = client.measure(&[stream], LONG).await.expect("a scheduler").remove(0);
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
    assert!(told - killed < LONG, "the measurement's own limit ended it");
    let (result, _) = other.join().expect("no panic");
    assert_eq!(result.expect("its peers live").rounds_ns.len(), 20);
    cluster.spawn_worker("gpu1");
    cluster.wait_ready("gpu1");
    cluster.stop();
}

#[test]
fn a_measurement_without_a_result_ends_with_the_pair_that_hangs() {
    let mut cluster = Cluster::start(2);
    cluster.ready();
    for (stopped, from, to) in [("gpu1", "gpu0", "gpu1"), ("gpu0", "gpu0", "gpu1")] {
        cluster.signal(stopped, Signal::SIGSTOP);
        runtime().block_on(async {
            let mut client = Client::connect(cluster.directory()).await.expect("a scheduler");
            let stream = measurement(from, to, Quantity::Bandwidth, 8, 1);
            let within = Duration::from_millis(300);
            let error = client.measure(&[stream], within).await.expect_err("it is stopped");
            assert!(error.to_string().contains("no result for gpu0 to gpu1 within"), "{error}");
            assert!(error.hint().is_some_and(|hint| hint.contains("ps")), "{error}");
        });
        cluster.signal(stopped, Signal::SIGCONT);
    }
    cluster.stop();
}

/// A worker that is killed while it writes into a peer's queue blocks it.
#[test]
fn a_worker_whose_queue_is_blocked_while_it_measures_ends() {
    let mut cluster = Cluster::start(3);
    cluster.ready();
    let directory = cluster.directory().to_owned();
    let measured = std::thread::spawn(move || {
        runtime().block_on(async {
            let mut client = Client::connect(&directory).await.expect("a scheduler");
            let ping = measurement("gpu0", "gpu1", Quantity::Latency, 8, 1);
            let pings = Measurement { rounds: 10_000_000, ..ping };
            client.measure(&[pings], LONG).await.expect("a scheduler").remove(0).result
        })
    });
    cluster.block_queue("gpu0");
    let (code, log) = cluster.wait_end("gpu0");
    assert_eq!(code, Some(1), "{log}");
    let reason = measured.join().expect("no panic").expect_err("its sender is gone");
    assert!(reason.contains("gpu0 was lost"), "{reason}");
    cluster.restart_worker("gpu0");
    cluster.stop();
}
