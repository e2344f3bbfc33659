//! Restarts: how fast, how often, for which reason, and what is kept about a death.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::bench::{Bench, launch, options, until, worker};
use cuda_cluster::supervise::gpu::{GpuHolder, GpuWatch};
use cuda_cluster::supervise::record::GpuError;
use cuda_cluster::supervise::record::What;
use cuda_cluster::supervise::{
    ClusterPhase, ClusterState, Escalation, Outcome, ProcessGpu, ProcessPhase, Supervisor,
};
use cuda_cluster::units::Span;
use cuda_cluster::wire::process::Exit;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

fn kill_worker(state: &ClusterState, number: usize) {
    let pid = state.workers[number].pid.expect("alive");
    kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL).expect("killed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_waits_as_long_as_the_backoff_says_and_for_nothing_else() {
    let bench = Bench::new();
    let mut quick = launch("quick", &["ready"]);
    quick.supervision.backoff = Span::millis(1);
    quick.supervision.backoff_max = Span::millis(1);
    quick.supervision.limit = 100;
    let supervisor = bench.start(quick).await;
    let mut events = supervisor.events();
    supervisor.ready().await.expect("READY");
    for restarts in 1..=11 {
        kill_worker(&supervisor.state().borrow().clone(), 0);
        let back =
            |s: &ClusterState| s.workers[0].restarts == restarts && s.state == ClusterPhase::Ready;
        until(&supervisor, "it comes back", back).await;
    }
    let mut gaps = Vec::new();
    while let Ok(record) = events.try_recv() {
        match record.what {
            What::Restarting { in_ms, .. } => gaps.push(in_ms),
            // The only other reason to wait.
            What::Note { text } => panic!("something else was waited for: {text}"),
            _ => {}
        }
    }
    assert_eq!(gaps, [[0].as_slice(), &[1; 10]].concat(), "at once, then after the backoff");
    supervisor.stop(Escalation::Graceful);
    // Eleven deaths are kept as crash bundles, and therefore the directory is too.
    assert!(supervisor.wait().await.is_good());
    assert_eq!(std::fs::read_dir(bench.file("quick/crashes")).expect("bundles").count(), 11);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_loop_has_growing_gaps_and_ends_as_failed() {
    let bench = Bench::new();
    let again = bench.file("again");
    // READY the first time, and never again.
    let crash = format!("sleep=200 once={} ready sleep=200 print=bang exit=7", again.display());
    let mut looping = launch("loop", &["ready", &crash]);
    looping.supervision.backoff = Span::millis(50);
    looping.supervision.limit = 4;
    let supervisor = bench.start(looping).await;
    let mut events = supervisor.events();
    supervisor.ready().await.expect("READY");
    let state = until(&supervisor, "degraded", |s| s.state == ClusterPhase::Degraded).await;
    assert_eq!(state.workers[1].state, ProcessPhase::Failed);
    assert_eq!(state.workers[1].restarts, 1 + 4);
    let mut gaps = Vec::new();
    while let Ok(record) = events.try_recv() {
        if let What::Restarting { in_ms, .. } = record.what {
            gaps.push(in_ms);
        }
    }
    println!("gaps before restarts: {gaps:?} ms");
    assert_eq!(gaps.len(), 1 + 4);
    assert!(gaps.windows(2).all(|pair| pair[0] < pair[1]), "{gaps:?}");
    let cause = state.cause.expect("a cause");
    let text = "gpu1 ended with status 7, and it was restarted 4 times within 1m without becoming \
                READY";
    assert_eq!(cause.text, text);
    assert_eq!(cause.log_tail.last().map(String::as_str), Some("bang"));
    supervisor.stop(Escalation::Graceful);
    assert_eq!(supervisor.wait().await, Outcome::Stopped { degraded: Some(cause) });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_at_95_percent_of_its_memory_is_restarted_with_the_reason() {
    let bench = Bench::new();
    let full = bench.file("full");
    let steps = format!("ready once={} allocate=200 sleep=10", full.display());
    let mut greedy = launch("greedy", &[&steps]);
    greedy.workers[0].memory_limit_bytes = Some(100 << 20);
    let supervisor = bench.start(greedy).await;
    supervisor.ready().await.expect("READY");
    let back = |s: &ClusterState| s.workers[0].restarts == 1 && s.state == ClusterPhase::Ready;
    let state = until(&supervisor, "it was restarted", back).await;
    let exit = state.workers[0].last_exit.as_ref().expect("an exit");
    assert!(exit.reason.starts_with("reached 95 % of its memory limit of 100 MiB ("));
    assert!(exit.reason.contains("in use); it was ended by signal 9"), "{}", exit.reason);
    drop(supervisor);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_below_95_percent_of_its_memory_is_left_alone() {
    let bench = Bench::new();
    // Resident is somewhat more. 95 % of 95 % would be 361 MiB.
    let mut large = launch("large", &["ready allocate=365 sleep=600"]);
    large.workers[0].memory_limit_bytes = Some(400 << 20);
    let supervisor = bench.start(large).await;
    supervisor.ready().await.expect("READY");
    let full = |s: &ClusterState| {
        let resident = s.workers[0].pid.and_then(cuda_cluster::os::process::resident_bytes);
        s.workers[0].restarts > 0 || resident.is_some_and(|bytes| bytes >= 365 << 20)
    };
    let begun = Instant::now();
    while !full(&supervisor.state().borrow()) {
        assert!(begun.elapsed() < Duration::from_secs(60), "it takes its memory");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // At most a tenth of a second passes between two looks at so full a process.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let worker = supervisor.state().borrow().workers[0].clone();
    assert_eq!((worker.restarts, worker.last_exit), (0, None));
    drop(supervisor);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_bundle_tells_all_but_secrets() {
    let bench = Bench::new();
    let again = bench.file("again");
    let steps = format!("print=hello once={} abort ready", again.display());
    let mut crashing = launch("bundle", &["ready", &steps]);
    std::fs::write(&again, "").expect("written");
    crashing.workers[1].program.env.insert("MY_TOKEN".to_owned(), "hunter2".to_owned());
    crashing.workers[1].program.env.insert("UCX_TLS".to_owned(), "sm,self".to_owned());
    crashing.workers[1].program.binding.cpus = Some("0".parse().expect("a set"));
    let supervisor = bench.start(crashing).await;
    supervisor.ready().await.expect("READY");
    std::fs::remove_file(&again).expect("removed");
    kill_worker(&supervisor.state().borrow().clone(), 1);
    // The second start finds no file, creates it, and aborts; the third does not.
    let back = |s: &ClusterState| s.workers[1].restarts == 2 && s.state == ClusterPhase::Ready;
    until(&supervisor, "it came back twice", back).await;
    let written = |s: &ClusterState| {
        s.workers[1].last_exit.as_ref().is_some_and(|exit| exit.bundle.is_some())
    };
    let state = until(&supervisor, "a bundle", written).await;
    let exit = state.workers[1].last_exit.clone().expect("an exit");
    assert_eq!(exit.exit.signal, Some(6));
    let bundle = exit.bundle.expect("a bundle");
    let crash = std::fs::read_to_string(bundle.join("crash.json")).expect("written");
    assert!(!crash.contains("hunter2"));
    let crash: serde_json::Value = serde_json::from_str(&crash).expect("JSON");
    assert_eq!(crash["environment"]["MY_TOKEN"], "***");
    assert_eq!(crash["environment"]["UCX_TLS"], "sm,self");
    assert_eq!(crash["process"]["last_exit"]["signal"], 6);
    assert_eq!(crash["process"]["cpus"], "0");
    let log = std::fs::read_to_string(bundle.join("log.txt")).expect("written");
    assert!(log.contains("hello"), "{log}");
    drop(supervisor);
}

/// A GPU whose memory a dead process holds for some polls, and that may be lost.
#[derive(Debug)]
struct Gpu {
    held_for: AtomicU32,
    lost: bool,
}

impl GpuWatch for Gpu {
    fn holders(&self, _: &ProcessGpu) -> Result<Vec<GpuHolder>, String> {
        let left = self.held_for.load(Ordering::SeqCst);
        self.held_for.store(left.saturating_sub(1), Ordering::SeqCst);
        let holder =
            GpuHolder { pid: 4_000_000, name: Some("python".to_owned()), bytes: Some(1 << 30) };
        Ok(if left > 0 { vec![holder] } else { Vec::new() })
    }

    fn lost(&self, gpu: &ProcessGpu) -> Option<String> {
        self.lost.then(|| format!("GPU {} has fallen off the bus (Xid 79)", gpu.index))
    }

    fn errors_since(&self, _: &ProcessGpu, _: std::time::SystemTime) -> Vec<GpuError> {
        vec![GpuError { xid: 79, text: "GPU has fallen off the bus".to_owned() }]
    }
}

async fn on(bench: &Bench, name: &str, gpu: Arc<Gpu>) -> Supervisor {
    let mut launch = launch(name, &["ready", "ready"]);
    launch.simulated = false;
    launch.supervision.gpu_free_within = Span::millis(400);
    launch.workers[0].gpu = Some(ProcessGpu { index: 3, uuid: None, pci: None });
    let mut options = options();
    options.gpus = Some(gpu);
    let supervisor = Supervisor::start(launch, bench.acquire(name), options).await;
    let supervisor = supervisor.expect("a supervisor");
    supervisor.ready().await.expect("READY");
    supervisor
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_workers_gpu_is_waited_for_but_not_for_ever() {
    let bench = Bench::new();
    let gpu = Arc::new(Gpu { held_for: AtomicU32::new(0), lost: false });
    let supervisor = on(&bench, "gpu", Arc::clone(&gpu)).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    let mut events = supervisor.events();
    gpu.held_for.store(1_000_000, Ordering::SeqCst);
    let begin = Instant::now();
    kill_worker(&supervisor.state().borrow().clone(), 0);
    let back = |s: &ClusterState| s.workers[0].restarts == 1 && s.state == ClusterPhase::Ready;
    until(&supervisor, "it comes back", back).await;
    assert!(begin.elapsed() >= Duration::from_millis(400));
    let mut notes = Vec::new();
    while let Ok(record) = events.try_recv() {
        if let What::Note { text } = record.what {
            notes.push(text);
        }
    }
    let expected =
        "GPU 3's memory is still held by process 4000000 (python) with 1.0 GiB after 400ms";
    // Meanwhile the bundle of the death, with what the GPU reported, is written.
    assert!(notes.iter().any(|note| note == expected), "{notes:?}");
    drop(supervisor);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_gpu_is_not_tried_again_and_its_error_is_kept() {
    let bench = Bench::new();
    let gpu = Arc::new(Gpu { held_for: AtomicU32::new(0), lost: true });
    let supervisor = on(&bench, "lost", gpu).await;
    kill_worker(&supervisor.state().borrow().clone(), 0);
    let state = until(&supervisor, "degraded", |s| s.state == ClusterPhase::Degraded).await;
    let cause = state.cause.expect("a cause");
    assert_eq!(cause.text, "gpu0 cannot be started again: GPU 3 has fallen off the bus (Xid 79)");
    assert_eq!(state.workers[0].restarts, 0);
    let written = |s: &ClusterState| {
        s.workers[0].last_exit.as_ref().is_some_and(|exit| exit.bundle.is_some())
    };
    let state = until(&supervisor, "a bundle", written).await;
    let bundle = state.workers[0].last_exit.as_ref().and_then(|exit| exit.bundle.clone());
    let crash = std::fs::read_to_string(bundle.expect("a bundle").join("crash.json"));
    assert!(crash.expect("written").contains("\"xid\": 79"));
    drop(supervisor);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_ends_with_its_last_rank_and_is_failed_by_its_first() {
    let bench = Bench::new();
    let mut run = launch("run", &["sleep=20", "sleep=50"]);
    run.run_to_completion = true;
    for (number, rank) in run.workers.iter_mut().enumerate() {
        let steps = format!("sleep={} exit=0", 20 * (number + 1));
        *rank = worker(&rank.name.clone(), &steps);
        rank.ready = cuda_cluster::supervise::ReadyWhen::Executed;
    }
    let supervisor = bench.start(run.clone()).await;
    assert_eq!(supervisor.wait().await, Outcome::Finished);

    run.workers[1].program.argv.pop();
    run.workers[1].program.argv.push("exit=42".to_owned());
    run.workers[0].program.argv = worker("gpu0", "sleep=60000").program.argv;
    let supervisor = bench.start(run).await;
    let Outcome::Failed(cause) = supervisor.wait().await else { panic!("it failed") };
    assert_eq!((cause.process.as_deref(), cause.exit), (Some("gpu1"), Some(Exit::status(42))));
}
