//! More data than memory: both limits are tight, the process's own memory counts, and the rest goes
//! to the disk, whichever worker is killed meanwhile.

use crate::cluster;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::cluster::Cluster;
use crate::seeds::{random, seeds};
use cuda_cluster::cluster::Client;
use cuda_cluster::cluster::workloads::{Matrix, Merge};
use cuda_cluster::os::process;
use cuda_cluster::plan::{EnginePlan, NativePlan};

/// 26 MB in pieces of 131 kB.
const MATRIX: Matrix = Matrix { chunks: 14, size: 128, seed: 5 };

/// 9 MB in parts of 272 kB, and once more in pieces of 17 kB.
const MERGE: Merge = Merge { parts: 16, rows: 17_000, seed: 5 };

/// Device memory of each worker.
const DEVICE: u64 = 1 << 20;

/// The supervisor ends a worker whose resident memory is this share of its limit.
const ENDED_AT_PERCENT: u64 = 95;

/// Resident memory of a worker before it has data.
pub(crate) fn idle_bytes() -> u64 {
    let mut cluster = Cluster::start(2);
    cluster.ready();
    let living = cluster.living();
    let resident = living.iter().filter_map(|(_, pid)| process::resident_bytes(*pid));
    let most = resident.max().expect("two workers");
    cluster.stop();
    most
}

/// Two or three workers with little memory of both kinds, and a spill directory.
fn start(workers: usize, memory_limit: u64, directory: &Path) -> (Cluster, Client) {
    let mut plan = cluster::plan(workers);
    for worker in &mut plan.workers {
        worker.device_memory_limit_bytes = Some(DEVICE);
        worker.memory_limit_bytes = Some(memory_limit);
    }
    plan.engine = EnginePlan::Native(NativePlan {
        local_directory: Some(directory.to_owned()),
        ..NativePlan::default()
    });
    let mut cluster = Cluster::start_plan(&plan);
    cluster.ready();
    let client = Client::connect(cluster.directory()).expect("the scheduler answers");
    (cluster, client)
}

/// Measures the workers as the supervisor does, only more often.
struct Watch {
    over: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<(u64, u64)>,
    pids: Arc<std::sync::Mutex<Vec<u32>>>,
}

impl Watch {
    fn start(cluster: &mut Cluster, directory: &Path) -> Self {
        let directory = directory.display().to_string();
        let over = Arc::new(AtomicBool::new(false));
        let pids = Arc::new(std::sync::Mutex::new(Vec::new()));
        let (told, watched) = (Arc::clone(&over), Arc::clone(&pids));
        let thread = std::thread::spawn(move || {
            let (mut most, mut files) = (0, BTreeSet::new());
            while !told.load(Ordering::Relaxed) {
                for pid in watched.lock().expect("no panic").iter() {
                    most = most.max(process::resident_bytes(*pid).unwrap_or(0));
                    files.extend(unnamed_files(*pid, &directory));
                }
                std::thread::sleep(Duration::from_millis(10));
            }
            (most, files.len() as u64)
        });
        let watch = Self { over, thread, pids };
        watch.look(cluster);
        watch
    }

    /// Watches the processes that are alive now.
    fn look(&self, cluster: &mut Cluster) {
        let living = cluster.living().into_iter().map(|(_, pid)| pid).collect();
        *self.pids.lock().expect("no panic") = living;
    }

    /// The most resident memory of any worker, and the number of workers that had a spill file.
    fn stop(self) -> (u64, u64) {
        self.over.store(true, Ordering::Relaxed);
        self.thread.join().expect("no panic")
    }
}

/// Files without a name that a process holds open in a directory.
fn unnamed_files(pid: u32, directory: &str) -> Vec<String> {
    let open = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let targets = open.filter_map(|entry| fs::read_link(entry.path()).ok());
    let names = targets.map(|target| target.display().to_string());
    let unnamed = names.filter(|name| name.starts_with(directory) && name.ends_with("(deleted)"));
    unnamed.map(|name| format!("{pid} {name}")).collect()
}

/// The result of one seed.
struct Figures {
    most_bytes: u64,
    files: u64,
    recomputed: u64,
}

/// One workload under limits, while workers are killed.
#[allow(clippy::print_stdout, reason = "figures of a long run")]
fn run(seed: u64, idle: u64) -> Figures {
    let mut state = seed;
    let workers = 2 + usize::try_from(seed / 2 % 2).expect("few");
    // Memory for data, and for what functions allocate; a share of the limit stays free.
    let room = (4 << 20) + random(&mut state) % (2 << 20);
    let memory_limit = (idle + room) * 100 / cuda_cluster::plan::HOST_FILL_PERCENT;
    let directory = tempfile::tempdir().expect("a directory");
    let (mut cluster, client) = start(workers, memory_limit, directory.path());
    let watch = Watch::start(&mut cluster, directory.path());
    let (working, spilled) = (client.clone(), Arc::new(AtomicU64::new(0)));
    let work = std::thread::spawn(move || match seed % 2 {
        0 => {
            let made = MATRIX.make(&working).expect("submitted");
            let sum = MATRIX.sum_with_transpose(&working, &made).expect("the disk has room");
            (sum, 0)
        }
        _ => {
            let made = MERGE.make(&working).expect("submitted");
            MERGE.join(&working, &made).expect("the disk has room")
        }
    });
    for _ in 0..2 {
        std::thread::sleep(Duration::from_millis(random(&mut state) % 400));
        let victim = format!("gpu{}", random(&mut state) % workers as u64);
        cluster.kill(&victim);
        cluster.restart_worker(&victim);
        watch.look(&mut cluster);
    }
    let start = Instant::now();
    while !work.is_finished() {
        assert!(start.elapsed() < Duration::from_secs(240), "seed {seed}: it does not end");
        cluster.revive();
        watch.look(&mut cluster);
        std::thread::sleep(Duration::from_millis(20));
    }
    let found = work.join().expect("no task fails for memory");
    let expected = if seed.is_multiple_of(2) { *SUM } else { *JOINED };
    assert_eq!(found, expected, "seed {seed}");
    for (name, _) in cluster.living() {
        let counters = client.counters(&name).expect("told");
        spilled.fetch_add(counters.disk.demoted_bytes, Ordering::Relaxed);
    }
    let recomputed = client.overview().expect("told").recomputed;
    cluster.stop();
    let (most_bytes, files) = watch.stop();
    let ended_at = memory_limit / 100 * ENDED_AT_PERCENT;
    assert!(most_bytes < ended_at, "seed {seed}: {most_bytes} of {memory_limit} bytes resident");
    assert!(files > 0, "seed {seed}: nothing went to the disk");
    let left = fs::read_dir(directory.path()).expect("readable").count();
    assert_eq!(left, 0, "seed {seed}: files are left");
    let spilled = spilled.load(Ordering::Relaxed);
    println!(
        "seed {seed}: {workers} workers, {most_bytes} of {memory_limit} bytes resident at most, \
         {spilled} went to the disk, {recomputed} tasks again"
    );
    Figures { most_bytes, files, recomputed }
}

static SUM: std::sync::LazyLock<(u64, u64)> =
    std::sync::LazyLock::new(|| (MATRIX.sum_with_transpose_here(), 0));
static JOINED: std::sync::LazyLock<(u64, u64)> = std::sync::LazyLock::new(|| MERGE.join_here());

#[test]
#[allow(clippy::print_stdout, reason = "figures of a long run")]
fn data_beyond_both_limits_go_to_the_disk_and_a_kill_changes_no_number() {
    let idle = idle_bytes();
    println!("an idle worker has {idle} bytes resident");
    let figures: Vec<Figures> = seeds(0..4).map(|seed| run(seed, idle)).collect();
    let most = figures.iter().map(|one| one.most_bytes).max().unwrap_or(0);
    let files: u64 = figures.iter().map(|one| one.files).sum();
    let recomputed: u64 = figures.iter().map(|one| one.recomputed).sum();
    println!(
        "{} seeds: at most {most} bytes resident, {files} files for objects, {recomputed} tasks \
         computed again",
        figures.len()
    );
}

/// The client learns which limit was reached, and how its memory is used.
#[test]
fn what_does_not_fit_the_memory_limit_fails_with_the_figures() {
    let idle = idle_bytes();
    let directory = tempfile::tempdir().expect("a directory");
    let limit = (idle + (8 << 20)) * 100 / cuda_cluster::plan::HOST_FILL_PERCENT;
    let mut plan = cluster::plan(1);
    plan.workers[0].memory_limit_bytes = Some(limit);
    plan.engine = EnginePlan::Native(NativePlan {
        local_directory: Some(directory.path().to_owned()),
        ..NativePlan::default()
    });
    let mut cluster = Cluster::start_plan(&plan);
    cluster.ready();
    let client = Client::connect(cluster.directory()).expect("the scheduler answers");
    let refused = client.put(&vec![7; 32 << 20]).expect_err("four times what there is");
    let why = refused.to_string();
    assert!(why.contains("no room for 33554432 bytes in host memory"), "{why}");
    assert!(why.contains(&format!("of the memory limit of {limit} bytes")), "{why}");
    // Anything that fits is accepted, again and again.
    for _ in 0..8 {
        let kept = client.put(&vec![7; 2 << 20]).expect("it fits");
        assert_eq!(kept.bytes().expect("it is there").len(), 2 << 20);
    }
    cluster.stop();
}

/// Freed memory that is kept for reuse takes no room from data, and gives way to it.
#[test]
fn freed_memory_makes_room_for_pieces_of_another_size() {
    let directory = tempfile::tempdir().expect("a directory");
    let limit = (idle_bytes() + (300 << 20)) * 100 / cuda_cluster::plan::HOST_FILL_PERCENT;
    let (mut cluster, client) = start(1, limit, directory.path());
    let watch = Watch::start(&mut cluster, directory.path());
    let host = |client: &Client| client.counters("gpu0").expect("told").host;
    for mebibytes in [40, 15, 60, 25] {
        // 240 of 300 MiB, with pieces that are not of the size of those before.
        let content = vec![7; mebibytes << 20];
        let put: Result<Vec<_>, _> = (0..240 / mebibytes).map(|_| client.put(&content)).collect();
        let put = put.expect("there is room");
        assert_eq!(host(&client).objects, put.len() as u64);
        drop(put);
        let start = Instant::now();
        while host(&client).objects > 0 {
            assert!(start.elapsed() < cluster::PATIENCE, "what was released is still there");
        }
    }
    assert_eq!(client.counters("gpu0").expect("told").disk.demoted_bytes, 0);
    let (most_bytes, files) = watch.stop();
    let ended_at = limit / 100 * ENDED_AT_PERCENT;
    assert!(most_bytes < ended_at, "{most_bytes} of {limit} bytes resident");
    assert_eq!(files, 0);
    cluster.stop();
}
