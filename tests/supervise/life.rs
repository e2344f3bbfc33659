//! The supervisor with real processes.

use crate::bench::{Bench, eventually, launch, lives, marked, until, worker};
use cuda_cluster::supervise::{
    ClusterPhase, Escalation, Options, Outcome, ProcessPhase, StartError, Supervisor,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_comes_up_and_goes_down_and_leaves_nothing() {
    let bench = Bench::new();
    let mut launch = launch("up", &["step=one print=hello ready", "ready"]);
    launch.scheduler = Some(worker("scheduler", "ready"));
    let supervisor = bench.start(launch).await;
    supervisor.ready().await.expect("READY");
    let state = supervisor.state().borrow().clone();
    assert_eq!(state.state, ClusterPhase::Ready);
    let pids: Vec<u32> =
        state.workers.iter().chain(&state.scheduler).filter_map(|p| p.pid).collect();
    assert_eq!(pids.len(), 3);
    assert!(pids.iter().all(|pid| lives(*pid)));

    supervisor.stop(Escalation::Graceful);
    assert_eq!(supervisor.wait().await, Outcome::Stopped { degraded: None });
    assert!(!pids.iter().any(|pid| lives(*pid)));
    assert!(!state.run_directory.exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guardian_that_was_killed_or_refuses_is_told_from_a_program_that_is_none() {
    let bench = Bench::new();
    for (script, error, hint) in [
        ("kill -9 $$", "was ended by signal 9 (SIGKILL) before it was ready", None),
        ("exit 0", "does not answer as guardian", Some("dispatch()")),
        (
            r#"printf '{"unable":{"reason":"adopting orphans: no"}}' >&3"#,
            "cannot watch over processes here: adopting orphans: no",
            Some("emulator"),
        ),
    ] {
        let helper = bench.file("helper");
        std::fs::write(&helper, format!("#!/bin/sh\n{script}\n")).expect("written");
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        std::fs::set_permissions(&helper, mode).expect("its mode");
        let directory = bench.acquire("none");
        let options = Options { helper, ..Options::default() };
        let refused = Supervisor::start(launch("none", &["ready"]), directory, options).await;
        let Err(StartError::Guardian(told)) = refused else { panic!("{refused:?}") };
        assert!(told.to_string().contains(error), "{told}");
        let hinted = told.hint();
        assert_eq!(hinted.is_some(), hint.is_some(), "{hinted:?}");
        assert!(hint.is_none_or(|hint| hinted.unwrap_or_default().contains(hint)));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_early_death_tears_everything_down_with_the_cause() {
    let bench = Bench::new();
    let supervisor = bench.start(launch("early", &["ready", "print=no-such-device exit=3"])).await;
    let cause = supervisor.ready().await.expect_err("not READY").expect("a cause");
    assert_eq!(cause.process.as_deref(), Some("gpu1"));
    assert_eq!(cause.text, "gpu1 ended with status 3");
    assert_eq!(cause.log_tail, ["no-such-device"]);
    let run_directory = supervisor.state().borrow().run_directory.clone();
    assert_eq!(supervisor.wait().await, Outcome::Failed(cause));
    assert_eq!(marked(&run_directory), [0; 0]);
    assert!(run_directory.join("logs/gpu1.log").exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_time_out_names_the_step_in_which_each_worker_hangs() {
    let bench = Bench::new();
    let mut launch =
        launch("late", &["ready", "print=no-locked-memory step=connecting-to-gpu0", ""]);
    launch.supervision.ready_within = cuda_cluster::units::Span::millis(700);
    let supervisor = bench.start(launch).await;
    let Outcome::NotReady(cause) = supervisor.wait().await else { panic!("not in time") };
    let expected =
        "not ready within 700ms: gpu1 (connecting-to-gpu0), gpu2 (bound, has said nothing since)";
    assert_eq!(cause.text, expected);
    assert_eq!(cause.process.as_deref(), Some("gpu1"));
    assert_eq!(cause.log_tail, ["no-locked-memory"], "what the first of them said");
    assert!(cause.to_string().contains("gpu1's log:\n  no-locked-memory"), "{cause}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_ignores_sigterm_forks_and_daemonises_is_gone_after_the_grace() {
    let bench = Bench::new();
    let bad =
        ["ignore-term children=20 daemon ready", "daemon ready stop", "children=3 daemon ready"];
    let supervisor = bench.start(launch("deaf", &bad)).await;
    supervisor.ready().await.expect("READY");
    let run_directory = supervisor.state().borrow().run_directory.clone();
    assert_eq!(marked(&run_directory).len(), 3 + 20 + 1 + 1 + 3 + 1);
    supervisor.stop(Escalation::Graceful);
    assert!(supervisor.wait().await.is_good());
    assert_eq!(marked(&run_directory), [0; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_worker_comes_back_and_what_it_started_is_gone() {
    let bench = Bench::new();
    let supervisor = bench.start(launch("back", &["ready", "children=4 daemon ready"])).await;
    supervisor.ready().await.expect("READY");
    let before = supervisor.state().borrow().clone();
    let pid = before.workers[1].pid.expect("alive");
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(pid.cast_signed()),
        nix::sys::signal::SIGKILL,
    )
    .expect("killed");
    let after = until(&supervisor, "it comes back", |state| {
        state.workers[1].restarts == 1 && state.state == ClusterPhase::Ready
    })
    .await;
    assert_eq!(after.workers[0].pid, before.workers[0].pid);
    let exit = after.workers[1].last_exit.as_ref().expect("an exit");
    assert_eq!(exit.reason, "was ended by signal 9 (SIGKILL)");
    eventually("the old children are gone", || marked(&after.run_directory).len() == 7).await;
    supervisor.stop(Escalation::Kill);
    supervisor.wait().await;
    assert_eq!(marked(&after.run_directory), [0; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_loop_ends_as_failed_and_degraded() {
    let bench = Bench::new();
    let again = bench.file("again");
    // READY the first time, and never again.
    let crash = format!("sleep=100 once={} ready sleep=50 exit=7", again.display());
    let mut launch = launch("loop", &["ready", &crash]);
    launch.supervision.limit = 3;
    let supervisor = bench.start(launch).await;
    supervisor.ready().await.expect("READY");
    let state = until(&supervisor, "degraded", |s| s.state == ClusterPhase::Degraded).await;
    assert_eq!(state.workers[1].state, ProcessPhase::Failed);
    // One more, because it had worked until then.
    assert_eq!(state.workers[1].restarts, 1 + 3);
    let cause = state.cause.expect("a cause");
    let text = "gpu1 ended with status 7, and it was restarted 3 times within 1m without becoming \
                READY";
    assert_eq!(cause.text, text);
    supervisor.stop(Escalation::Graceful);
    assert_eq!(supervisor.wait().await, Outcome::Stopped { degraded: Some(cause) });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropping_the_supervisor_leaves_no_process() {
    let bench = Bench::new();
    let supervisor = bench.start(launch("drop", &["children=3 daemon ready"])).await;
    supervisor.ready().await.expect("READY");
    let run_directory = supervisor.state().borrow().run_directory.clone();
    assert_eq!(marked(&run_directory).len(), 5);
    drop(supervisor);
    assert_eq!(marked(&run_directory), [0; 0]);
    eventually("its files are gone", || !run_directory.exists()).await;
}
