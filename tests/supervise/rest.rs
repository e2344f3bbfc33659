//! Up and down many times, and idle: what remains, and what it costs.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::bench::{Bench, launch, marked};
use cuda_cluster::supervise::Escalation;

fn entries(folder: &str) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_clusters_of_eight_leave_nothing() {
    let clusters = if cfg!(debug_assertions) { 10 } else { 50 };
    let clusters =
        std::env::var("REST_CLUSTERS").map_or(clusters, |n| n.parse().expect("a number"));
    let bench = Bench::new();
    let descriptors = || entries("/proc/self/fd").len();
    let begin = Instant::now();
    let mut before = 0;
    for turn in 0..clusters {
        let launch = launch("many", &["children=1 daemon ready"; 8]);
        let supervisor = bench.start(launch).await;
        supervisor.ready().await.expect("READY");
        let state = supervisor.state().borrow().clone();
        let cgroup = std::fs::read_to_string(state.run_directory.join("cgroup"));
        supervisor.stop(Escalation::Kill);
        assert!(supervisor.wait().await.is_good());
        assert_eq!(marked(&state.run_directory), [0; 0]);
        assert!(!cgroup.is_ok_and(|path| Path::new(path.trim()).exists()));
        assert_eq!(entries(&bench.folder.path().display().to_string()), [""; 0]);
        if turn == 0 {
            before = descriptors();
        }
    }
    println!("{clusters} clusters of 8 up and down in {:?}", begin.elapsed());
    // Tests beside this one have some for a while.
    let end = Instant::now() + Duration::from_secs(60);
    while descriptors() > before {
        assert!(Instant::now() < end, "descriptors do not grow");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[test]
fn at_rest_a_supervisor_is_small_and_sleeps() {
    let bench = Bench::new();
    let keeper = bench.keep(&launch("rest", &["ready"; 8]), &[]);
    let guardian = keeper.state().guardian_pid.expect("a guardian");
    std::thread::sleep(Duration::from_millis(500));
    for (name, pid) in [("supervisor", keeper.child.id()), ("guardian", guardian)] {
        let resident = look(pid).0;
        let wakes = fewest_wakes(pid);
        println!("{name}: {resident} KiB resident, {wakes} wake-ups in 2 s");
        assert_eq!(wakes, 0);
        let debug = if cfg!(debug_assertions) { 3 } else { 1 };
        assert!(resident < debug * 10 * 1024, "{resident} KiB");
    }
}

/// Wake-ups in two seconds, once it is idle; a busy machine may need a while for that.
fn fewest_wakes(pid: u32) -> u64 {
    let wakes = || {
        let before = look(pid).1;
        std::thread::sleep(Duration::from_secs(2));
        look(pid).1 - before
    };
    (0..10).map(|_| wakes()).find(|wakes| *wakes == 0).unwrap_or_else(wakes)
}

/// Resident memory in KiB, and how often the process's threads have slept and woken.
fn look(pid: u32) -> (u64, u64) {
    let field = |text: &str, name: &str| -> u64 {
        let line = text.lines().find_map(|line| line.strip_prefix(name)).expect("a field");
        line.trim().trim_end_matches(" kB").parse().expect("a number")
    };
    let read = |path: String| std::fs::read_to_string(path).expect("it lives");
    let tasks = entries(&format!("/proc/{pid}/task"));
    let switches = tasks.iter().map(|task| {
        field(&read(format!("/proc/{pid}/task/{task}/status")), "voluntary_ctxt_switches:")
    });
    (field(&read(format!("/proc/{pid}/status")), "VmRSS:"), switches.sum())
}
