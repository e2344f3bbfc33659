//! Workers and the scheduler die or stop while links are measured: `verify` ends and tells what it
//! knows, and the cluster is whole again.

use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use cuda_cluster::supervise::{ClusterPhase, ClusterState, ProcessPhase};
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::bench::{lives, told_state};
use crate::place::{Place, signal, wait_for};
use crate::stream::Random;
use crate::{Tally, draw, faults, number, seed};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Nothing,
    EndOneAndKillAnother,
    KillTwoWorkers,
    KillScheduler,
    StopWorkerForAWhile,
}

const FAULTS: [Fault; 5] = [
    Fault::Nothing,
    Fault::EndOneAndKillAnother,
    Fault::KillTwoWorkers,
    Fault::KillScheduler,
    Fault::StopWorkerForAWhile,
];

const SPEC: &str = "version: 1
supervision: {limit: 100000, backoff: 1ms, backoff_max: 20ms, grace: 2s}
";

/// Longer than `verify` may take with so many workers.
const HANGS: Duration = Duration::from_secs(300);

fn settled(place: &Place, dead: &[u32]) -> ClusterState {
    place.wait_until(&format!("READY, without {dead:?}"), || {
        let state = told_state(&place.run_directory())?;
        let mut processes = state.scheduler.iter().chain(&state.workers);
        let whole = processes.all(|it| {
            it.state == ProcessPhase::Ready
                && it.pid.is_some_and(|pid| lives(pid) && !dead.contains(&pid))
        });
        (whole && state.state == ClusterPhase::Ready).then_some(state)
    })
}

/// What `verify` printed, its exit code, and how long it took.
fn told(place: &Place, mut verify: Child, begun: Instant) -> (Option<i32>, String, Duration) {
    while verify.try_wait().expect("a child").is_none() {
        assert!(begun.elapsed() < HANGS, "verify hangs: {}", place.post_mortem());
        std::thread::sleep(Duration::from_millis(5));
    }
    let took = begun.elapsed();
    let said = verify.wait_with_output().expect("its output");
    let text = [said.stdout, b"\n".to_vec(), said.stderr].concat();
    (said.status.code(), String::from_utf8_lossy(&text).into_owned(), took)
}

/// Strikes before `verify` is started, and while it measures.
fn strike(place: &Place, fault: Fault, workers: usize, random: &mut Random) -> Duration {
    let state = settled(place, &[]);
    let first = random.below(workers);
    let second = (first + 1 + random.below(workers - 1)) % workers;
    let [first, second] = [first, second].map(|at| state.workers[at].pid.expect("alive"));
    let scheduler = state.scheduler.as_ref().and_then(|it| it.pid).expect("alive");
    let mut pause = || {
        let most = 1 << random.below(11);
        std::thread::sleep(Duration::from_millis(random.below(most) as u64));
    };
    let mut dead = Vec::new();
    if fault == Fault::EndOneAndKillAnother {
        signal(first, Signal::SIGTERM);
        dead.push(first);
        pause();
    }
    let begun = Instant::now();
    let mut command = place.command(&["verify", "verify", "-o", "json"]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let verify = command.spawn().expect("it starts");
    pause();
    match fault {
        Fault::Nothing => {}
        Fault::EndOneAndKillAnother => {
            signal(second, Signal::SIGKILL);
            dead.push(second);
        }
        Fault::KillTwoWorkers => {
            for victim in [first, second] {
                signal(victim, Signal::SIGKILL);
                dead.push(victim);
            }
        }
        Fault::KillScheduler => {
            signal(scheduler, Signal::SIGKILL);
            dead.push(scheduler);
        }
        Fault::StopWorkerForAWhile => {
            signal(first, Signal::SIGSTOP);
            pause();
            signal(first, Signal::SIGCONT);
        }
    }
    let (code, text, took) = told(place, verify, begun);
    println!("verify: {fault:?}: code {code:?} after {took:.1?}");
    assert!(matches!(code, Some(0 | 1 | 4)), "{fault:?}: {code:?}: {text}");
    if code == Some(0) {
        let json = text.lines().take_while(|line| !line.is_empty()).collect::<String>();
        let json: Value = serde_json::from_str(&json).expect("JSON");
        assert_eq!(json["pairs"].as_array().map(Vec::len), Some(workers * (workers - 1)), "{text}");
    } else {
        assert!(fault != Fault::Nothing, "code {code:?} without a fault: {text}");
        assert!(text.contains("error: ") || text.contains("verdict"), "it says why: {text:?}");
    }
    settled(place, &dead);
    took
}

#[test]
fn verify_ends_whatever_dies_meanwhile() {
    let mut random = Random(seed());
    let mut tally = Tally::new("verify");
    let place = Place::new("verify");
    let workers = usize::try_from(number("CHAOS_WORKERS", 4)).expect("a number of workers");
    let spec = place.sandbox.runtime().join("spec.yaml");
    std::fs::write(&spec, SPEC).expect("written");
    let (spec, count) = (spec.display().to_string(), workers.to_string());
    let up = ["up", "-f", &spec, "--topology", "dgx-h100", "--simulate", "--n-workers", &count];
    let said = place.command(&[&up[..], &["--name", "verify", "--detach"]].concat()).status();
    assert!(said.as_ref().is_ok_and(|said| said.success()), "{said:?}");
    let mut slowest = Duration::ZERO;
    for _ in 0..faults(3) {
        let fault = draw(&FAULTS, &mut random);
        slowest = slowest.max(strike(&place, fault, workers, &mut random));
        tally.count(fault);
    }
    println!("verify: {workers} workers: the longest took {slowest:.1?}");
    let down = wait_for(|| place.command(&["down", "verify"]).status().ok());
    assert!(down.is_some_and(|said| said.success()), "{}", place.post_mortem());
    place.gone(&tally, None);
}
