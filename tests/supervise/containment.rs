//! Whatever is killed, and whatever the processes do: nothing of the cluster remains.

use crate::bench;
use std::time::{Duration, Instant};

use crate::bench::{Bench, launch, lives, marked};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const BOTH: [&str; 2] = ["with-control-groups", "without-control-groups"];

const BAD: [&str; 3] = ["ignore-term children=12 daemon ready", "daemon ready stop", "ready"];

/// Waits until nothing is left; returns how long that took.
fn gone(keeper: &bench::Keeper) -> Duration {
    let begin = Instant::now();
    while !marked(&keeper.run_directory).is_empty() {
        assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", marked(&keeper.run_directory));
        std::thread::sleep(Duration::from_millis(2));
    }
    begin.elapsed()
}

#[test]
fn a_killed_supervisor_leaves_nothing_daemons_included() {
    for containment in BOTH {
        let bench = Bench::new();
        let keeper = bench.keep(&launch("killed", &BAD), &[containment]);
        let state = keeper.state();
        assert_eq!(marked(&keeper.run_directory).len(), 3 + 12 + 2);
        keeper.signal(Signal::SIGKILL);
        let took = gone(&keeper);
        println!("{}: all gone {took:?} after SIGKILL of the supervisor", state.containment);
        let guardian = state.guardian_pid.expect("a guardian");
        while lives(guardian) {
            std::thread::sleep(Duration::from_millis(2));
        }
        // The directory is now stale, and the next cluster cleans it up.
        assert!(keeper.run_directory.exists());
        let again = bench.keep(&launch("killed", &["ready"]), &[containment]);
        assert!(again.first.starts_with("READY"), "{}", again.first);
    }
}

#[test]
fn a_killed_guardian_leaves_nothing_and_is_named_as_the_cause() {
    for containment in BOTH {
        let bench = Bench::new();
        let mut keeper = bench.keep(&launch("guard", &BAD), &[containment]);
        let guardian = keeper.state().guardian_pid.expect("a guardian");
        kill(Pid::from_raw(guardian.cast_signed()), Signal::SIGKILL).expect("it lives");
        let ended = keeper.word();
        assert!(ended.contains("the guardian process has ended"), "{ended}");
        println!("{containment}: all gone {:?} after the guardian", gone(&keeper));
    }
}

#[test]
fn a_stopped_guardian_does_not_keep_the_supervisor() {
    let bench = Bench::new();
    let mut quick = launch("stuck", &BAD);
    quick.supervision.grace = cuda_cluster::units::Span::millis(200);
    let mut keeper = bench.keep(&quick, &[]);
    let guardian = keeper.state().guardian_pid.expect("a guardian");
    kill(Pid::from_raw(guardian.cast_signed()), Signal::SIGSTOP).expect("it lives");
    keeper.signal(Signal::SIGTERM);
    keeper.signal(Signal::SIGTERM);
    std::thread::sleep(Duration::from_millis(100));
    keeper.signal(Signal::SIGTERM);
    let ended = keeper.word();
    assert!(ended.starts_with("ENDED Stopped"), "{ended}");
    gone(&keeper);
    // Killed by the process that gave it up; the kernel needs a moment to remove it.
    let begin = Instant::now();
    while lives(guardian) {
        assert!(begin.elapsed() < Duration::from_secs(30), "the guardian is left");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Supervisor and guardian die at the same instant: neither notices the other's end.
fn kill_both(keeper: &bench::Keeper) {
    let guardian = Pid::from_raw(keeper.state().guardian_pid.expect("a guardian").cast_signed());
    // The guardian goes first: the kernel would wake it when the supervisor's end orphans its
    // group.
    keeper.signal(Signal::SIGSTOP);
    kill(guardian, Signal::SIGKILL).expect("it lives");
    keeper.signal(Signal::SIGKILL);
}

/// The command line, with the bench's run directories.
fn cuda_cluster(bench: &Bench, arguments: &[&str]) -> std::process::Output {
    let mut command = std::process::Command::new(bench::helper());
    command.env("XDG_RUNTIME_DIR", bench.folder.path()).args(arguments);
    command.output().expect("it runs")
}

/// A bench whose run directories are where the command line looks for them.
fn findable() -> (Bench, Bench) {
    let outer = Bench::new();
    let mut folder = tempfile::Builder::new();
    folder.prefix("cuda-cluster").rand_bytes(0);
    let folder = folder.tempdir_in(outer.folder.path()).expect("a directory");
    (outer, Bench::over(folder))
}

#[test]
fn what_supervisor_and_guardian_leave_when_killed_at_once_is_swept_by_the_next_of_that_name() {
    for containment in BOTH {
        let bench = Bench::new();
        let keeper = bench.keep(&launch("both", &BAD), &[containment]);
        kill_both(&keeper);
        // The kernel kills the guardian's children, but not their descendants.
        assert!(!marked(&keeper.run_directory).is_empty(), "there is something to sweep");
        let again = bench.keep(&launch("both", &["ready"]), &[containment]);
        assert!(again.first.starts_with("READY"), "{}", again.first);
        assert_eq!(marked(&keeper.run_directory).len(), 1, "only the new one is there");
    }
}

#[test]
fn what_supervisor_and_guardian_leave_when_killed_at_once_is_swept_by_down() {
    for containment in BOTH {
        for arguments in [&["down", "--all"][..], &["down", "both"]] {
            let (outer, bench) = findable();
            let keeper = bench.keep(&launch("both", &BAD), &[containment]);
            kill_both(&keeper);
            assert!(!marked(&keeper.run_directory).is_empty(), "there is something to sweep");
            let down = cuda_cluster(&outer, arguments);
            assert!(down.status.success(), "{down:?}");
            gone(&keeper);
            assert!(keeper.run_directory.join("events.jsonl").exists(), "the story stays");
        }
    }
}

#[test]
fn down_with_kill_ends_what_a_stopped_supervisor_keeps_daemons_included() {
    for containment in BOTH {
        for stopped in ["the supervisor", "both"] {
            let (outer, bench) = findable();
            let keeper = bench.keep(&launch("stopped", &BAD), &[containment]);
            let guardian = keeper.state().guardian_pid.expect("a guardian");
            keeper.signal(Signal::SIGSTOP);
            if stopped == "both" {
                kill(Pid::from_raw(guardian.cast_signed()), Signal::SIGSTOP).expect("it lives");
            }
            let down = cuda_cluster(&outer, &["down", "--kill", "stopped"]);
            assert!(down.status.success(), "{down:?}");
            gone(&keeper);
            assert!(!lives(guardian) && !keeper.run_directory.exists());
        }
    }
}

#[test]
fn of_two_that_come_at_once_one_is_told_that_the_name_is_taken() {
    let bench = Bench::new();
    let launch = launch("twice", &["ready"]);
    let (first, second) = std::thread::scope(|scope| {
        let one = scope.spawn(|| bench.keep(&launch, &[]));
        let other = scope.spawn(|| bench.keep(&launch, &[]));
        (one.join().expect("kept"), other.join().expect("kept"))
    });
    let mut words = [first.first.clone(), second.first.clone()];
    words.sort();
    assert!(words[0].starts_with("READY"), "{words:?}");
    assert!(words[1].starts_with("REFUSED a cluster named twice is already running"), "{words:?}");
}
