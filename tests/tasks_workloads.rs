//! The benchmarks' workloads against the same computation in one process: for several numbers of
//! workers, with too little memory, and with workers that are killed.
#![allow(unsafe_code)]

mod native;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cuda_cluster::cluster::Client;
use cuda_cluster::cluster::workloads::{Matrix, Merge};
use cuda_cluster::plan::Plan;
use native::Cluster;

const MATRIX: Matrix = Matrix { chunks: 10, size: 64, seed: 5 };
const MERGE: Merge = Merge { parts: 6, rows: 5000, seed: 5 };

fn start(plan: &Plan) -> (Cluster, Client) {
    let mut cluster = Cluster::start_plan(plan);
    cluster.ready();
    let client = Client::connect(cluster.directory()).expect("the scheduler answers");
    (cluster, client)
}

fn transpose(client: &Client) -> u64 {
    let made = MATRIX.make(client).expect("submitted");
    MATRIX.sum_with_transpose(client, &made).expect("computed")
}

fn merge(client: &Client) -> (u64, u64) {
    let made = MERGE.make(client).expect("submitted");
    MERGE.join(client, &made).expect("computed")
}

#[test]
fn any_number_of_workers_gives_the_numbers_of_one_process() {
    let expected = (MATRIX.sum_with_transpose_here(), MERGE.join_here());
    assert!(expected.1.0 > 10_000, "the tables have keys in common");
    for workers in [1, 2, 3, 5] {
        let (mut cluster, client) = start(&native::plan(workers));
        assert_eq!((transpose(&client), merge(&client)), expected, "{workers} workers");
        cluster.stop();
    }
}

/// A plan whose workers have, all together, this part of the data as device memory, as much again
/// as host memory, and the rest on disk.
fn cramped(workers: usize, bytes: u64) -> Plan {
    let mut plan = native::plan(workers);
    for worker in &mut plan.workers {
        let share = bytes / workers as u64;
        worker.device_memory_limit_bytes = Some(share);
        worker.memory_limit_bytes = Some(share);
    }
    plan
}

#[test]
fn a_tenth_of_the_memory_gives_the_same_numbers() {
    let (mut cluster, client) = start(&cramped(2, MATRIX.bytes() / 10));
    assert_eq!(transpose(&client), MATRIX.sum_with_transpose_here());
    let spilled: u64 = ["gpu0", "gpu1"]
        .map(|worker| client.counters(worker).expect("told").disk.demoted_bytes)
        .iter()
        .sum();
    println!("transpose: {spilled} of {} bytes went to disk", MATRIX.bytes());
    assert!(spilled > MATRIX.bytes() / 4, "{spilled}");
    cluster.stop();

    let (mut cluster, client) = start(&cramped(2, MERGE.bytes() / 10 + 400_000));
    assert_eq!(merge(&client), MERGE.join_here());
    let counters = client.counters("gpu0").expect("told");
    println!("merge: {counters:?}");
    assert!(counters.disk.demoted_bytes > 0, "{counters:?}");
    cluster.stop();
}

/// SplitMix64, so that a failure can be had again from its seed.
fn random(seed: &mut u64) -> u64 {
    *seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *seed;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Works on both workloads for as long as it takes to kill a worker and have it back; seeds from
/// `CUDA_CLUSTER_SEEDS` (`3..60`), else a few.
#[test]
fn a_worker_killed_at_any_moment_changes_no_number() {
    let expected = (MATRIX.sum_with_transpose_here(), MERGE.join_here());
    let seeds = std::env::var("CUDA_CLUSTER_SEEDS").ok().and_then(|range| {
        let (first, last) = range.split_once("..")?;
        Some(first.parse().ok()?..last.parse().ok()?)
    });
    let (mut kills, mut recomputed) = (0, 0);
    for seed in seeds.unwrap_or(0..2u64) {
        let mut state = seed;
        let (mut cluster, client) = start(&native::plan(3));
        let (working, over) = (client.clone(), Arc::new(AtomicBool::new(false)));
        let told = Arc::clone(&over);
        let work = std::thread::spawn(move || {
            let mut rounds = 0;
            while !told.load(Ordering::Relaxed) {
                assert_eq!((transpose(&working), merge(&working)), expected, "seed {seed}");
                rounds += 1;
            }
            rounds
        });
        for _ in 0..3 {
            std::thread::sleep(Duration::from_millis(random(&mut state) % 300));
            let victim = format!("gpu{}", random(&mut state) % 3);
            cluster.kill(&victim);
            cluster.spawn_worker(&victim);
            cluster.wait_ready(&victim);
            kills += 1;
        }
        over.store(true, Ordering::Relaxed);
        let rounds = work.join().expect("the same numbers, whoever is killed");
        let again = client.overview().expect("told").recomputed;
        println!("seed {seed}: {rounds} rounds, {again} tasks computed again");
        recomputed += again;
        cluster.stop();
    }
    println!("{kills} kills, {recomputed} tasks computed again");
    assert!(recomputed > 0, "no kill cost anything");
}

/// How long a merge takes on four workers in two pairs: within a pair a link is ten times as fast.
fn merge_over_slow_links(placement: &str) -> Duration {
    let mut plan = native::plan(4);
    let bandwidth = |a: usize, b: usize| if a / 2 == b / 2 { 5e6 } else { 5e5 };
    let links: BTreeMap<String, BTreeMap<String, f64>> = (0..4)
        .map(|to| {
            let from = (0..4).filter(|from| *from != to);
            let links = from.map(|from| (format!("gpu{from}"), bandwidth(from, to)));
            (format!("gpu{to}"), links.collect())
        })
        .collect();
    plan.engine_options = serde_json::json!({"simulated_links": links, "placement": placement});
    let (mut cluster, client) = start(&plan);
    // Not a multiple of the workers, or taking turns would be local by accident.
    let large = Merge { parts: 11, rows: 20_000, seed: 9 };
    let expected = large.join_here();
    let mut took = Duration::ZERO;
    // The first run teaches the scheduler what the links can do; its copies are gone after it.
    for _ in 0..2 {
        let made = large.make(&client).expect("submitted");
        client.wait(&made).expect("made");
        let start = Instant::now();
        assert_eq!(large.join(&client, &made).expect("computed"), expected);
        took = start.elapsed();
    }
    cluster.stop();
    took
}

/// Simulated links sleep for a second or so, so that the difference is no matter of luck.
#[test]
fn placement_by_learned_bandwidth_beats_round_robin() {
    let learned = merge_over_slow_links("estimated-finish");
    let in_turn = merge_over_slow_links("round-robin");
    println!("merge: {learned:?} by learned bandwidth, {in_turn:?} in turn");
    assert!(learned < in_turn, "{learned:?} by learned bandwidth, {in_turn:?} in turn");
}
