//! The native engine's processes, started by hand in the way the supervisor starts them.

use crate::cluster;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use crate::cluster::Cluster;
use cuda_cluster::cluster::workloads::Matrix;
use cuda_cluster::cluster::{Client, ClientError};
use cuda_cluster::wire::status::Status;
use nix::sys::signal::Signal;

#[test]
fn eight_workers_reach_each_other_over_shared_memory() {
    let mut cluster = Cluster::start(8);
    cluster.ready();
    println!("ready after {:?}", cluster.since_start());
    for worker in cluster.know_each_other() {
        for peer in &worker.peers {
            let has = |lane: &str| peer.lanes.iter().any(|l| l == lane);
            assert!(has("posix/memory") || has("sysv/memory"), "{peer:?}");
        }
    }
    cluster.stop();
}

#[test]
fn an_idle_cluster_uses_no_cpu() {
    let mut cluster = Cluster::start(8);
    cluster.ready();
    // Let work that the start leaves behind, such as timers of UCX, finish first.
    std::thread::sleep(Duration::from_millis(500));
    let before = cluster.cpu_time();
    let span = Duration::from_secs(3);
    std::thread::sleep(span);
    let used = cluster.cpu_time() - before;
    println!("idle: {used:?} of CPU in {span:?}");
    // One per cent of one CPU for nine processes.
    assert!(used <= span / 100, "{used:?}");
    cluster.stop();
}

#[test]
fn a_killed_worker_comes_back_as_a_new_process() {
    let mut cluster = Cluster::start(4);
    cluster.ready();
    cluster.kill("gpu2");
    cluster.spawn_worker("gpu2");
    let status = cluster.wait_ready("gpu2");
    let Status::Ready { peers, .. } = status else { panic!("{status:?}") };
    assert_eq!(peers.len(), 3);
    cluster.stop();
}

/// Of 17 workers and more, each connects to those 1, 2, 4, 8 … before it, and to others at the first
/// message: which one of them may be stopped.
#[test]
fn a_first_message_to_a_stopped_worker_waits_and_one_to_a_dead_worker_is_not_waited_for() {
    let mut cluster = Cluster::start(18);
    cluster.ready();
    let client = Client::connect(cluster.directory()).expect("the scheduler answers");
    let size = 64u64;
    for (seed, (holder, dies)) in [("gpu14", false), ("gpu11", true)].into_iter().enumerate() {
        let seed = seed as u64;
        let chunk = client.task("matrix.chunk").arguments(&(seed, 0u64, 0u64, size));
        let chunk = chunk.on(holder).submit().expect("submitted");
        chunk.wait_within(cluster::PATIENCE).expect("made");
        cluster.signal(holder, Signal::SIGSTOP);
        let sum = client.task("matrix.add_transposed_sum").arguments(&size);
        let sum = sum.inputs(&[&chunk, &chunk]).on("gpu17").submit().expect("submitted");
        let early = sum.wait_within(Duration::from_millis(500));
        assert!(matches!(early, Err(ClientError::TimedOut { .. })), "{early:?}");
        if dies {
            // What it had is made again, where it has to be.
            cluster.kill(holder);
            cluster.restart_worker(holder);
        } else {
            cluster.signal(holder, Signal::SIGCONT);
        }
        sum.wait_within(cluster::PATIENCE).expect("added");
        let expected = Matrix { chunks: 1, size, seed }.sum_with_transpose_here();
        assert_eq!(sum.value::<u64>().expect("a number"), expected);
    }
    cluster.stop();
}

#[test]
fn workers_end_when_the_scheduler_is_gone() {
    let mut cluster = Cluster::start(2);
    cluster.ready();
    cluster.kill("scheduler");
    for name in ["gpu0", "gpu1"] {
        let (code, log) = cluster.wait_end(name);
        assert_eq!(code, Some(1), "{log}");
        assert!(log.contains("the scheduler is gone"), "{log}");
    }
}

#[test]
fn nothing_is_left_in_shared_memory_after_a_kill() {
    let before = cluster::shared_memory();
    let mut cluster = Cluster::start(3);
    cluster.ready();
    for name in ["gpu0", "gpu1", "gpu2", "scheduler"] {
        cluster.kill(name);
    }
    // Entries of other tests' clusters disappear with those clusters.
    let left = || -> Vec<String> {
        cluster::shared_memory().into_iter().filter(|name| !before.contains(name)).collect()
    };
    let begin = Instant::now();
    while !left().is_empty() {
        assert!(begin.elapsed() < cluster::PATIENCE, "{:?}", left());
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_worker_with_another_secret_is_refused() {
    let mut cluster = Cluster::start(2);
    cluster.ready();
    cluster.write_secret(&"ab".repeat(32));
    cluster.spawn_worker("gpu7");
    let (code, log) = cluster.wait_end("gpu7");
    assert_eq!(code, Some(1), "{log}");
    assert!(matches!(cluster.last_status("gpu7"), Some(Status::Failed { .. })), "{log}");
    cluster.stop();
}

#[test]
fn silent_connections_keep_nobody_out() {
    let mut cluster = Cluster::start(2);
    cluster.ready();
    let silent = |process: &str| {
        let path = cluster.directory().join(format!("{process}.sock"));
        let connect = |_| UnixStream::connect(&path).expect("a socket");
        (0..300).map(connect).collect::<Vec<_>>()
    };
    let held = ["scheduler", "gpu0", "gpu1"].map(silent);
    let client = Client::connect(cluster.directory()).expect("a scheduler");
    let object = client.put(b"through both sockets").expect("a worker");
    assert_eq!(object.bytes().expect("a worker"), b"through both sockets");
    drop((held, object, client));
    cluster.stop();
}

#[test]
fn a_worker_without_libucp_says_what_to_install() {
    let mut cluster = Cluster::prepare(1);
    cluster.set("CUDA_CLUSTER_UCX", "/nowhere/libucp.so.0");
    cluster.spawn_all();
    let (code, log) = cluster.wait_end("gpu0");
    assert_eq!(code, Some(1), "{log}");
    let Some(Status::Failed { reason }) = cluster.last_status("gpu0") else { panic!("{log}") };
    assert!(reason.contains("/nowhere/libucp.so.0") && reason.contains("hint:"), "{reason}");
    cluster.signal("scheduler", Signal::SIGTERM);
}
