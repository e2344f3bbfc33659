//! Objects in host memory that another worker reads where they are: whoever dies, and whoever needs
//! the memory, no number changes and nothing is left.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::cluster::{self, Cluster, PATIENCE};
use crate::memory::idle_bytes;
use crate::seeds::{random, seeds};
use cuda_cluster::cluster::workloads::{Matrix, Merge};
use cuda_cluster::cluster::{Client, Remote};
use cuda_cluster::os::process;
use cuda_cluster::plan::{EnginePlan, HOST_FILL_PERCENT, NativePlan, Plan};

const MIB: u64 = 1 << 20;

/// 29 MB in pieces of 1.2 MB.
const MATRIX: Matrix = Matrix { chunks: 5, size: 384, seed: 5 };

/// 10 MB in parts of 1.2 MB.
const MERGE: Merge = Merge { parts: 4, rows: 76_000, seed: 5 };

/// Rows and columns of a chunk of 8 MiB.
const SIZE: u64 = 1 << 10;

/// Workers without GPUs, whose objects are in host memory.
fn plan(workers: usize) -> Plan {
    let mut plan = cluster::plan(workers);
    for worker in &mut plan.workers {
        worker.gpu = None;
    }
    plan
}

fn start(plan: &Plan) -> (Cluster, Client) {
    let mut cluster = Cluster::start_plan(plan);
    cluster.ready();
    let client = Client::connect(cluster.directory()).expect("the scheduler answers");
    (cluster, client)
}

/// Has a second worker fetch an object.
#[track_caller]
fn fetched(object: &Remote) {
    object.replicate(2).expect("there is room");
    eventually("there is one copy", || object.locations().expect("told").len() == 2);
}

/// A chunk on a worker.
fn chunk(client: &Client, seed: u64, worker: &str) -> Remote {
    let task = client.task("matrix.chunk").arguments(&(seed, 0u64, 0u64, SIZE)).on(worker);
    let chunk = task.submit().expect("submitted");
    chunk.wait_within(PATIENCE).expect("made");
    chunk
}

/// The sum over a chunk and its transpose, by a worker.
fn sum(client: &Client, chunk: &Remote, worker: &str) -> u64 {
    let task = client.task("matrix.add_transposed_sum").arguments(&SIZE);
    let task = task.inputs(&[chunk, chunk]).on(worker).submit().expect("submitted");
    task.wait_within(PATIENCE).expect("added");
    task.value().expect("a number")
}

fn sum_here(seed: u64) -> u64 {
    Matrix { chunks: 1, size: SIZE, seed }.sum_with_transpose_here()
}

/// What a process has mapped of its peers' memory, for reading.
fn views(pid: u32) -> Vec<String> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let of_peers = maps.lines().filter(|line| line.contains("memfd:cuda-cluster"));
    of_peers.filter(|line| line.contains(" r--s ")).map(str::to_owned).collect()
}

fn descriptors(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count)
}

fn pid(cluster: &mut Cluster, name: &str) -> u32 {
    let living = cluster.living();
    living.iter().find(|(living, _)| living == name).expect("it lives").1
}

#[track_caller]
fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_large_object_is_read_where_it_is_and_outlives_its_owner() {
    let (mut cluster, client) = start(&plan(2));
    let reader = pid(&mut cluster, "gpu1");
    // The connection to the owner stays, with a descriptor for its views.
    sum(&client, &chunk(&client, 1, "gpu0"), "gpu1");
    eventually("what is not used is still mapped", || views(reader).is_empty());
    let (before, resident) = (descriptors(reader), process::resident_bytes(reader));

    let object = chunk(&client, 7, "gpu0");
    fetched(&object);
    assert_eq!(views(reader).len(), 1, "{:?}", views(reader));
    let counted = ["gpu0", "gpu1"].map(|name| client.counters(name).expect("told").host.bytes);
    assert_eq!(counted, [8 * MIB; 2], "both account for it");
    assert_eq!(sum(&client, &object, "gpu1"), sum_here(7));

    cluster.kill("gpu0");
    eventually("its owner is still there", || object.locations().expect("told").len() == 1);
    assert_eq!(sum(&client, &object, "gpu1"), sum_here(7));
    assert_eq!(client.overview().expect("told").recomputed, 0);
    drop(object);
    eventually("a dead peer's memory is still mapped", || views(reader).is_empty());
    eventually("descriptors are left", || descriptors(reader) < before);
    let most = resident.expect("told") + MIB;
    eventually("its copy is still there", || process::resident_bytes(reader) < Some(most));
    cluster.stop();
}

/// A worker that can take no more descriptors copies what it fetches, and keeps what it reads.
#[test]
fn a_reader_without_descriptors_harms_nothing_that_it_reads() {
    let (mut cluster, client) = start(&plan(2));
    let reader = pid(&mut cluster, "gpu1");
    let first = chunk(&client, 1, "gpu0");
    fetched(&first);
    // The peer's memory is mapped; it comes with a descriptor all the same.
    let pid = nix::unistd::Pid::from_raw(reader.try_into().expect("a process"));
    let most = descriptors(reader) as u64;
    let before = limit_descriptors(pid, most);
    for seed in 2..6 {
        assert_eq!(sum(&client, &chunk(&client, seed, "gpu0"), "gpu1"), sum_here(seed));
    }
    // What the owner frees and writes again is not what is still read.
    cluster.kill("gpu0");
    limit_descriptors(pid, before);
    assert_eq!(sum(&client, &first, "gpu1"), sum_here(1));
    cluster.restart_worker("gpu0");
    assert_eq!(sum(&client, &chunk(&client, 9, "gpu0"), "gpu1"), sum_here(9));
    cluster.stop();
}

/// Sets the limit of a process: what it was before.
#[allow(unsafe_code)]
fn limit_descriptors(pid: nix::unistd::Pid, most: u64) -> u64 {
    let mut before = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: both are limits.
    let told = unsafe {
        libc::prlimit(pid.as_raw(), libc::RLIMIT_NOFILE, std::ptr::null(), &raw mut before)
    };
    assert_eq!(told, 0);
    let now = libc::rlimit { rlim_cur: most, ..before };
    // SAFETY: as above.
    let set = unsafe {
        libc::prlimit(pid.as_raw(), libc::RLIMIT_NOFILE, &raw const now, std::ptr::null_mut())
    };
    assert_eq!(set, 0);
    before.rlim_cur
}

/// More views of one owner than both sockets have room to speak of, all recalled and ended at once.
#[test]
fn hundreds_of_views_end_while_hundreds_are_recalled() {
    const SMALL: u64 = 363;
    let idle = idle_bytes();
    let directory = tempfile::tempdir().expect("a directory");
    let mut plan = plan(2);
    plan.workers[0].memory_limit_bytes = Some((idle + 200 * MIB) * 100 / HOST_FILL_PERCENT);
    plan.engine = native(directory.path());
    let (mut cluster, client) = start(&plan);
    let make = |seed: u64| {
        let task = client.task("matrix.chunk").arguments(&(seed, 0u64, 0u64, SMALL)).on("gpu0");
        task.submit().expect("submitted")
    };
    for _ in 0..2 {
        let objects: Vec<Remote> = (0..800).map(make).collect();
        client.wait_within(&objects, PATIENCE).expect("made");
        for object in &objects {
            object.replicate(2).expect("there is room");
        }
        let there = |object: &Remote| object.locations().expect("told").len() == 2;
        eventually("there is one copy", || objects.iter().all(there));
    }
    assert_eq!(sum(&client, &chunk(&client, 3, "gpu0"), "gpu1"), sum_here(3));
    cluster.stop();
}

#[test]
fn a_readers_death_gives_the_memory_back() {
    let (mut cluster, client) = start(&plan(2));
    let owner = pid(&mut cluster, "gpu0");
    for seed in 0..3 {
        let object = chunk(&client, seed, "gpu0");
        assert_eq!(sum(&client, &object, "gpu1"), sum_here(seed));
        assert!(!views(pid(&mut cluster, "gpu1")).is_empty());
        cluster.signal("gpu1", nix::sys::signal::Signal::SIGSTOP);
        cluster.kill("gpu1");
        drop(object);
        cluster.restart_worker("gpu1");
    }
    // What is free is kept for a while, and what would still be lent would not go.
    eventually("memory is left", || shared_bytes(owner) == 0);
    cluster.stop();
}

/// Resident bytes of what a process shares with its peers.
fn shared_bytes(pid: u32) -> u64 {
    let smaps = fs::read_to_string(format!("/proc/{pid}/smaps")).expect("its memory");
    let mut lines = smaps.lines();
    let mut sum = 0;
    while let Some(line) = lines.next() {
        if line.contains("memfd:cuda-cluster") {
            let resident = lines.find(|line| line.starts_with("Rss:")).expect("a figure");
            let kib = resident.split_whitespace().nth(1).expect("a figure");
            sum += kib.parse::<u64>().expect("a number") << 10;
        }
    }
    sum
}

/// The owner gets its memory back from a reader that keeps the object, and that reads it meanwhile.
#[test]
fn an_owner_that_needs_its_memory_gets_it_and_the_reader_keeps_the_bytes() {
    let idle = idle_bytes();
    let directory = tempfile::tempdir().expect("a directory");
    let limit = (idle + 48 * MIB) * 100 / HOST_FILL_PERCENT;
    let mut plan = plan(2);
    plan.workers[0].memory_limit_bytes = Some(limit);
    plan.engine = native(directory.path());
    let (mut cluster, client) = start(&plan);
    let owner = pid(&mut cluster, "gpu0");
    let mut objects = Vec::new();
    for seed in 0..16 {
        let object = chunk(&client, seed, "gpu0");
        fetched(&object);
        objects.push(object);
        // It reads an old one while that one may be recalled.
        assert_eq!(sum(&client, &objects[0], "gpu1"), sum_here(0));
        let resident = process::resident_bytes(owner).expect("told");
        assert!(resident < limit / 100 * 95, "{resident} of {limit} bytes");
    }
    let counters = client.counters("gpu0").expect("told");
    assert!(counters.disk.demoted_bytes >= 64 * MIB, "{counters:?}");
    assert_eq!(client.counters("gpu1").expect("told").host.bytes, 128 * MIB);
    for (seed, object) in objects.iter().enumerate() {
        for worker in ["gpu1", "gpu0"] {
            assert_eq!(sum(&client, object, worker), sum_here(seed as u64), "{seed} on {worker}");
        }
    }
    cluster.stop();
}

fn native(directory: &Path) -> EnginePlan {
    let local_directory = Some(directory.to_owned());
    EnginePlan::Native(NativePlan { local_directory, ..NativePlan::default() })
}

/// Two to four workers, with much memory or little, of which three are killed: most peers whose
/// memory was mapped at once.
#[allow(clippy::print_stdout, reason = "figures of a long run")]
fn run(seed: u64, idle: u64) -> usize {
    let mut state = seed;
    let workers = 2 + seed / 4 % 3;
    let directory = tempfile::tempdir().expect("a directory");
    let mut plan = plan(usize::try_from(workers).expect("few"));
    let is_tight = seed % 4 >= 2;
    if is_tight {
        let room = 12 * MIB + random(&mut state) % (8 * MIB);
        for worker in &mut plan.workers {
            worker.memory_limit_bytes = Some((idle + room) * 100 / HOST_FILL_PERCENT);
        }
    }
    plan.engine = native(directory.path());
    let (mut cluster, client) = start(&plan);
    let (working, over) = (client.clone(), Arc::new(AtomicBool::new(false)));
    let told = Arc::clone(&over);
    let work = std::thread::spawn(move || {
        let mut rounds = 0;
        while !told.load(Ordering::Relaxed) {
            let found = match seed % 2 {
                0 => {
                    let made = MATRIX.make(&working).expect("submitted");
                    (MATRIX.sum_with_transpose(&working, &made).expect("the disk has room"), 0)
                }
                _ => {
                    let made = MERGE.make(&working).expect("submitted");
                    MERGE.join(&working, &made).expect("the disk has room")
                }
            };
            let expected = if seed.is_multiple_of(2) { *SUM } else { *JOINED };
            assert_eq!(found, expected, "seed {seed}");
            rounds += 1;
        }
        rounds
    });
    let mut seen = 0;
    for _ in 0..3 {
        let until = Instant::now() + Duration::from_millis(random(&mut state) % 400);
        while Instant::now() < until {
            seen = seen.max(cluster.living().iter().map(|(_, pid)| views(*pid).len()).sum());
            std::thread::sleep(Duration::from_millis(5));
        }
        let victim = format!("gpu{}", random(&mut state) % workers);
        cluster.kill(&victim);
        cluster.restart_worker(&victim);
    }
    over.store(true, Ordering::Relaxed);
    let start = Instant::now();
    while !work.is_finished() {
        assert!(start.elapsed() < Duration::from_secs(240), "seed {seed}: it does not end");
        cluster.revive();
        std::thread::sleep(Duration::from_millis(10));
    }
    let rounds = work.join().expect("the same numbers, whoever is killed");
    let living = cluster.living();
    let disk = |(name, _): &(String, u32)| client.counters(name).expect("told").disk;
    let spilled: u64 = living.iter().map(|worker| disk(worker).demoted_bytes).sum();
    let again = client.overview().expect("told").recomputed;
    cluster.stop();
    println!(
        "seed {seed}: {workers} workers, {rounds} rounds, {spilled} bytes to the disk, {again} tasks \
         again, {seen} peers read"
    );
    seen
}

static SUM: std::sync::LazyLock<(u64, u64)> =
    std::sync::LazyLock::new(|| (MATRIX.sum_with_transpose_here(), 0));
static JOINED: std::sync::LazyLock<(u64, u64)> = std::sync::LazyLock::new(|| MERGE.join_here());

#[test]
fn kills_and_spilling_change_no_number_of_objects_that_others_read() {
    let idle = idle_bytes();
    let seen: usize = seeds(0..4).map(|seed| run(seed, idle)).sum();
    assert!(seen > 0, "nothing was read in place");
}
