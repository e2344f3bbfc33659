//! The benchmarks' workloads, compared with the same computation in one process: with several
//! numbers of workers, with too little memory, and with workers that are killed.

use crate::cluster;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::cluster::Cluster;
use crate::seeds::{random, seeds};
use cuda_cluster::cluster::workloads::{Matrix, Merge};
use cuda_cluster::cluster::{Client, ClientError};
use cuda_cluster::native::tasks::replay;
use cuda_cluster::plan::{EnginePlan, NativePlan, Plan};
use cuda_cluster::wire::tasks::TaskError;

const MATRIX: Matrix = Matrix { chunks: 10, size: 64, seed: 5 };
/// Enough parts that a tenth of the data, shared by three workers, has room for what one task needs
/// at a time: a part and its pieces.
const MERGE: Merge = Merge { parts: 32, rows: 3000, seed: 5 };

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
        let (mut cluster, client) = start(&cluster::plan(workers));
        assert_eq!((transpose(&client), merge(&client)), expected, "{workers} workers");
        cluster.stop();
    }
}

/// A plan whose workers together have this fraction of the data as device memory, the same again as
/// host memory, and the rest on disk.
fn cramped(workers: usize, bytes: u64) -> Plan {
    let mut plan = cluster::plan(workers);
    let share = bytes / workers as u64;
    for worker in &mut plan.workers {
        worker.device_memory_limit_bytes = Some(share);
    }
    plan.engine =
        EnginePlan::Native(NativePlan { host_limit_bytes: Some(share), ..NativePlan::default() });
    plan
}

#[test]
fn a_tenth_of_the_memory_gives_the_same_numbers() {
    for workers in [1, 2, 3] {
        let (mut cluster, client) = start(&cramped(workers, MATRIX.bytes() / 10));
        assert_eq!(transpose(&client), MATRIX.sum_with_transpose_here());
        let spilled = to_disk(&client);
        println!("transpose, {workers}: {spilled} of {} bytes went to disk", MATRIX.bytes());
        assert!(spilled > MATRIX.bytes() / 4, "{spilled}");
        cluster.stop();

        let (mut cluster, client) = start(&cramped(workers, MERGE.bytes() / 10));
        assert_eq!(merge(&client), MERGE.join_here());
        let spilled = to_disk(&client);
        println!("merge, {workers}: {spilled} of {} bytes went to disk", MERGE.bytes());
        assert!(spilled > MERGE.bytes() / 4, "{spilled}");
        cluster.stop();
    }
}

/// Bytes that all workers have written to their files.
fn to_disk(client: &Client) -> u64 {
    let workers = client.overview().expect("told").workers;
    let written = |name: &str| client.counters(name).expect("told").disk.demoted_bytes;
    workers.iter().map(|worker| written(&worker.name)).sum()
}

/// Runs both workloads repeatedly while workers are killed and restarted.
struct Killing {
    seed: u64,
    workers: usize,
    /// Data of which the devices can hold a tenth; `None` if they can hold everything.
    cramped: Option<u64>,
}

impl Killing {
    /// One to four workers, with much memory or little.
    fn of(seed: u64) -> Self {
        let (little, few) = (seed % 2 == 1, seed / 2 + 2);
        // At most three workers share the little memory, otherwise one task would not fit.
        let workers = 1 + few % if little { 3 } else { 4 };
        let cramped = little.then(|| MATRIX.bytes().max(MERGE.bytes()));
        Self { seed, workers: usize::try_from(workers).expect("few"), cramped }
    }

    /// The number of tasks that were computed again.
    #[allow(clippy::print_stdout, reason = "which seed a failed test was at")]
    fn run(&self, expected: (u64, (u64, u64))) -> u64 {
        let Self { seed, workers, cramped: data } = *self;
        let plan = data.map_or_else(|| cluster::plan(workers), |data| cramped(workers, data / 10));
        let (mut cluster, client) = start(&plan);
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
        let mut state = seed;
        for _ in 0..3 {
            std::thread::sleep(Duration::from_millis(random(&mut state) % 1000));
            let victim = format!("gpu{}", random(&mut state) % workers as u64);
            cluster.kill(&victim);
            cluster.restart_worker(&victim);
        }
        over.store(true, Ordering::Relaxed);
        while !work.is_finished() {
            cluster.revive();
            std::thread::sleep(Duration::from_millis(20));
        }
        let rounds = work.join().expect("the same numbers, whoever is killed");
        let again = client.overview().expect("told").recomputed;
        let memory = if data.is_some() { "little" } else { "much" };
        println!("seed {seed}: {workers} workers, {memory} memory, {rounds} rounds, {again} again");
        cluster.stop();
        again
    }
}

#[test]
fn a_worker_killed_at_any_moment_changes_no_number() {
    let expected = (MATRIX.sum_with_transpose_here(), MERGE.join_here());
    let recomputed: u64 = seeds(0..3).map(|seed| Killing::of(seed).run(expected)).sum();
    println!("{recomputed} tasks computed again");
    assert!(recomputed > 0, "no kill cost anything");
}

/// What a client stores and fetches while workers die comes back intact, or is reported lost.
#[test]
fn what_is_given_while_workers_die_comes_back_whole() {
    let (mut cluster, client) = start(&cluster::plan(2));
    let over = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&over);
    let work = std::thread::spawn(move || {
        let (mut whole, mut lost) = (0, 0);
        while !told.load(Ordering::Relaxed) || whole == 0 {
            let content: Vec<u8> = (0..200_000u32).map(|n| n.to_le_bytes()[whole % 2]).collect();
            match client.put(&content).and_then(|remote| remote.bytes()) {
                Ok(bytes) => {
                    assert!(bytes == content, "other bytes came back");
                    whole += 1;
                }
                Err(ClientError::Task(TaskError::Lost { .. })) => lost += 1,
                // For a moment there was no worker to take it.
                Err(ClientError::Task(TaskError::Refused { .. })) => lost += 1,
                Err(error) => panic!("{error}: {error:?}"),
            }
        }
        (whole, lost)
    });
    for victim in ["gpu0", "gpu1", "gpu0"] {
        std::thread::sleep(Duration::from_millis(200));
        cluster.kill(victim);
        cluster.restart_worker(victim);
    }
    over.store(true, Ordering::Relaxed);
    while !work.is_finished() {
        cluster.revive();
        std::thread::sleep(Duration::from_millis(20));
    }
    let (whole, lost) = work.join().expect("whole, or lost");
    println!("{whole} came back whole, {lost} were lost");
    cluster.stop();
}

/// A scheduler that gets the events of another makes the same decisions.
#[test]
fn a_recorded_run_is_replayed_decision_by_decision() {
    let log = tempfile::tempdir().expect("a directory");
    let path = log.path().join("events");
    let mut plan = cluster::plan(3);
    plan.engine = EnginePlan::Native(NativePlan {
        record_events: Some(path.clone()),
        ..NativePlan::default()
    });
    let (mut cluster, client) = start(&plan);
    assert_eq!(merge(&client), MERGE.join_here());
    let working = client.clone();
    let work = std::thread::spawn(move || transpose(&working));
    cluster.kill("gpu1");
    cluster.restart_worker("gpu1");
    assert_eq!(work.join().expect("it works on"), MATRIX.sum_with_transpose_here());
    cluster.stop();
    let replayed = replay(&path).expect("a log");
    println!("{replayed:?}");
    assert!(replayed.events > 3000, "{replayed:?}");
    assert_eq!(replayed.differs_at, None);
}
