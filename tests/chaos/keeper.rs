//! Faults for a supervisor embedded in a test program, with workers that misbehave: restarts are
//! counted correctly, and causes are recorded.

use std::collections::BTreeMap;
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cuda_cluster::supervise::{ClusterPhase, ClusterState, Launch, ProcessPhase, ProcessState};
use cuda_cluster::units::Span;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::bench::{Bench, Keeper, launch, lives, marked, request, told_state, worker};
use crate::place::wait_for;
use crate::stream::Random;
use crate::{Tally, draw, faults, seed};

const WORKERS: [&str; 5] = [
    "chatter=10 ready",
    "ignore-term children=24 daemon ready",
    "sleep=60 daemon ready",
    "children=3 ready",
    "ready",
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    KillWorker,
    KillSeveral,
    KillShim,
    KillScheduler,
    KillSchedulerAfterScaleDown,
    KillSupervisor,
    KillGuardian,
    StopWorkerAndRestartIt,
    StopSupervisorForAWhile,
    StopGuardianForAWhile,
    RestartByHand,
    ScaleDownAndUp,
    DeleteProgram,
    RemoveRunDirectory,
    FullDisk,
    SecondUp,
    CrashLoop,
    EarlyDeath,
    BusyPort,
    HangingStart,
    StopGracefully,
    StopTwice,
}

const FAULTS: [Fault; 22] = [
    Fault::KillWorker,
    Fault::KillSeveral,
    Fault::KillShim,
    Fault::KillScheduler,
    Fault::KillSchedulerAfterScaleDown,
    Fault::KillSupervisor,
    Fault::KillGuardian,
    Fault::StopWorkerAndRestartIt,
    Fault::StopSupervisorForAWhile,
    Fault::StopGuardianForAWhile,
    Fault::RestartByHand,
    Fault::ScaleDownAndUp,
    Fault::DeleteProgram,
    Fault::RemoveRunDirectory,
    Fault::FullDisk,
    Fault::SecondUp,
    Fault::CrashLoop,
    Fault::EarlyDeath,
    Fault::BusyPort,
    Fault::HangingStart,
    Fault::StopGracefully,
    Fault::StopTwice,
];

fn cluster() -> Launch {
    let mut launch = launch("chaos", &WORKERS);
    launch.scheduler = Some(worker("scheduler", "ready"));
    launch.supervision.backoff = Span::millis(5);
    launch.supervision.backoff_max = Span::millis(20);
    launch.supervision.limit = 10_000;
    launch.supervision.grace = Span::millis(300);
    launch
}

/// One cluster under attack, and the restart counts that it must have.
struct Round<'a> {
    bench: &'a Bench,
    keeper: Keeper,
    containment: &'static str,
    cgroup: Option<PathBuf>,
    expected: BTreeMap<String, u32>,
}

/// The supervisor's program under a name of its own, which a fault takes away.
fn own_program(bench: &Bench) -> PathBuf {
    let program = bench.file("program");
    let _ = fs::remove_file(&program);
    fs::hard_link(crate::bench::keeper(), &program)
        .or_else(|_| fs::copy(crate::bench::keeper(), &program).map(drop))
        .expect("a program");
    program
}

fn wait_until<T>(what: &str, look: impl FnMut() -> Option<T>) -> T {
    wait_for(look).unwrap_or_else(|| panic!("{what}"))
}

/// The state of a process, as the kernel abbreviates it.
fn state_of(pid: u32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.trim_start().chars().next()
}

fn signal(pid: u32, signal: Signal) {
    // It may be gone already.
    let _ = kill(Pid::from_raw(pid.cast_signed()), signal);
}

fn processes(state: &ClusterState) -> impl Iterator<Item = &ProcessState> {
    state.scheduler.iter().chain(&state.workers)
}

impl<'a> Round<'a> {
    fn begin(bench: &'a Bench, containment: &'static str) -> Self {
        let keeper = bench.keep_from(&own_program(bench), &cluster(), &[containment]);
        let state = keeper.state();
        let cgroup = fs::read_to_string(keeper.run_directory.join("cgroup")).ok();
        let cgroup = cgroup.map(|path| PathBuf::from(path.trim()));
        let expected = processes(&state).map(|process| (process.name.clone(), 0)).collect();
        Self { bench, keeper, containment, cgroup, expected }
    }

    fn socket(&self) -> PathBuf {
        self.keeper.run_directory.join("control.sock")
    }

    fn state(&self) -> ClusterState {
        wait_until("the control API answers", || told_state(&self.keeper.run_directory))
    }

    fn expect_restart(&mut self, name: &str) {
        *self.expected.get_mut(name).expect("a process") += 1;
    }

    fn post(&self, target: &str) {
        let (status, body) = request(&self.socket(), "POST", target).expect("an answer");
        assert_eq!(status, 202, "{target}: {body}");
    }

    /// Waits until the cluster is READY again, with the expected restarts.
    fn settle(&self) {
        let state = wait_until(&format!("READY with {:?}", self.expected), || {
            let state = told_state(&self.keeper.run_directory)?;
            let counted =
                processes(&state).all(|process| self.expected[&process.name] == process.restarts);
            (state.state == ClusterPhase::Ready && counted).then_some(state)
        });
        for process in processes(&state) {
            assert_eq!(process.state, ProcessPhase::Ready, "{}", process.name);
            assert!(process.pid.is_some_and(lives), "a false READY: {process:?}");
            if process.restarts > 0 {
                let exit = process.last_exit.as_ref().expect("a cause is recorded");
                assert!(exit.exit.code.is_some() || exit.exit.signal.is_some(), "{exit:?}");
            }
        }
        wait_until(&format!("only its own processes: {state:#?}"), || {
            // Scheduler, workers, and their children: 24 + 1, 1, 3.
            let own = 6 + 24 + 1 + 1 + 3;
            (marked(&self.keeper.run_directory).len() == own).then_some(())
        });
    }

    /// Checks after the end that nothing is left.
    fn gone(&mut self, tally: &Tally) {
        let begin = Instant::now();
        let guardian = self.keeper.state().guardian_pid.expect("a guardian");
        wait_until("everything is gone", || {
            let left = marked(&self.keeper.run_directory);
            (left.is_empty() && !lives(guardian)).then_some(())
        });
        tally.ended_within(begin.elapsed());
        if let Some(cgroup) = &self.cgroup {
            wait_until("its control group is gone", || (!cgroup.exists()).then_some(()));
        }
    }

    fn begin_again(&mut self) {
        *self = Self::begin(self.bench, self.containment);
    }

    fn strike(&mut self, fault: Fault, random: &mut Random, tally: &Tally) {
        let state = self.state();
        let victim = state.workers[random.below(WORKERS.len())].clone();
        let pid = victim.pid.expect("alive");
        match fault {
            Fault::KillWorker => {
                signal(pid, Signal::SIGKILL);
                self.expect_restart(&victim.name);
            }
            Fault::KillSeveral => {
                let first = random.below(WORKERS.len() - 1);
                for worker in &state.workers[first..] {
                    signal(worker.pid.expect("alive"), Signal::SIGKILL);
                    self.expect_restart(&worker.name);
                }
            }
            Fault::KillShim => self.kill_shim(&state, &victim),
            Fault::KillScheduler => {
                let scheduler = state.scheduler.as_ref().and_then(|process| process.pid);
                signal(scheduler.expect("alive"), Signal::SIGKILL);
                self.expect_all();
            }
            Fault::KillSchedulerAfterScaleDown => {
                let workers = 1 + random.below(WORKERS.len() - 1);
                self.scale_down(workers);
                let scheduler = self.state().scheduler.and_then(|process| process.pid);
                signal(scheduler.expect("alive"), Signal::SIGKILL);
                self.expect_restart("scheduler");
                for worker in &state.workers[..workers] {
                    self.expect_restart(&worker.name);
                }
                wait_until("READY with fewer workers", || {
                    let state = told_state(&self.keeper.run_directory)?;
                    let counted = processes(&state)
                        .all(|process| self.expected[&process.name] == process.restarts);
                    (state.state == ClusterPhase::Ready && counted).then_some(())
                });
                self.post(&format!("/v1/scale?workers={}", WORKERS.len()));
            }
            Fault::KillSupervisor => {
                self.keeper.signal(Signal::SIGKILL);
                self.gone(tally);
                return self.begin_again();
            }
            Fault::KillGuardian => {
                signal(state.guardian_pid.expect("a guardian"), Signal::SIGKILL);
                let ended = self.keeper.word();
                assert!(ended.contains("the guardian process has ended"), "{ended}");
                self.gone(tally);
                return self.begin_again();
            }
            Fault::StopWorkerAndRestartIt => {
                signal(pid, Signal::SIGSTOP);
                self.post(&format!("/v1/restart/{}", victim.name));
                self.expect_restart(&victim.name);
            }
            Fault::StopSupervisorForAWhile => {
                self.keeper.signal(Signal::SIGSTOP);
                signal(pid, Signal::SIGKILL);
                std::thread::sleep(Duration::from_millis(30));
                self.keeper.signal(Signal::SIGCONT);
                self.expect_restart(&victim.name);
            }
            Fault::StopGuardianForAWhile => {
                let guardian = state.guardian_pid.expect("a guardian");
                signal(guardian, Signal::SIGSTOP);
                signal(pid, Signal::SIGKILL);
                std::thread::sleep(Duration::from_millis(30));
                signal(guardian, Signal::SIGCONT);
                self.expect_restart(&victim.name);
            }
            Fault::RestartByHand => {
                let all = random.below(4) == 0;
                let name = if all { "scheduler" } else { &victim.name };
                self.post(&format!("/v1/restart/{name}"));
                if all { self.expect_all() } else { self.expect_restart(name) }
            }
            Fault::ScaleDownAndUp => self.scale(1 + random.below(WORKERS.len() - 1)),
            Fault::DeleteProgram => {
                let program = self.bench.file("program");
                // It may have been deleted before.
                let _ = fs::remove_file(&program);
                if random.below(2) == 0 {
                    fs::write(&program, "another program").expect("written");
                }
                if random.below(4) == 0 {
                    let scheduler = state.scheduler.as_ref().and_then(|process| process.pid);
                    signal(scheduler.expect("alive"), Signal::SIGKILL);
                    self.expect_all();
                } else {
                    signal(pid, Signal::SIGKILL);
                    self.expect_restart(&victim.name);
                }
            }
            Fault::RemoveRunDirectory => {
                // A log may be recreated while it is being removed.
                wait_until("it is removed", || fs::remove_dir_all(&self.keeper.run_directory).ok());
                wait_until("it is made again", || told_state(&self.keeper.run_directory));
                self.settle();
                // The old directory has its control group's name only for cleaning up.
            }
            Fault::FullDisk => self.fill_the_disk(),
            Fault::SecondUp => {
                let second = self.bench.keep(&cluster(), &[self.containment]);
                assert!(second.first.contains("is already running"), "{}", second.first);
            }
            Fault::CrashLoop | Fault::EarlyDeath | Fault::BusyPort | Fault::HangingStart => {
                self.beside(fault);
            }
            Fault::StopGracefully | Fault::StopTwice => {
                self.keeper.signal(Signal::SIGTERM);
                if fault == Fault::StopTwice {
                    std::thread::sleep(Duration::from_millis(5));
                    signal(self.keeper.child.id(), Signal::SIGTERM);
                }
                let ended = self.keeper.word();
                assert_eq!(ended, "ENDED Stopped { degraded: None }");
                self.gone(tally);
                return self.begin_again();
            }
        }
        self.settle();
    }

    fn expect_all(&mut self) {
        self.expected.values_mut().for_each(|restarts| *restarts += 1);
    }

    /// Kills a worker, and then the shim that would have become the next one.
    fn kill_shim(&mut self, state: &ClusterState, victim: &ProcessState) {
        let guardian = state.guardian_pid.expect("a guardian");
        signal(victim.pid.expect("alive"), Signal::SIGKILL);
        self.expect_restart(&victim.name);
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_millis(120) {
            let children = format!("/proc/{guardian}/task/{guardian}/children");
            let children = fs::read_to_string(children).unwrap_or_default();
            for child in children.split_whitespace() {
                let line = fs::read_to_string(format!("/proc/{child}/cmdline")).unwrap_or_default();
                if line.split('\0').nth(1) == Some("__shim") {
                    let child: u32 = child.parse().expect("a process id");
                    signal(child, Signal::SIGSTOP);
                    // It may be executing the worker just now; its death counts once it is stopped.
                    let is_stopped = wait_for(|| match state_of(child) {
                        Some('T') => Some(true),
                        Some('Z') | None => Some(false),
                        Some(_) => None,
                    });
                    signal(child, Signal::SIGKILL);
                    if is_stopped.expect("it stops or is gone") {
                        self.expect_restart(&victim.name);
                    }
                    return;
                }
            }
        }
    }

    /// A worker that is started again because it is needed again does not count as restarted.
    fn scale(&self, workers: usize) {
        self.scale_down(workers);
        self.post(&format!("/v1/scale?workers={}", WORKERS.len()));
    }

    fn scale_down(&self, workers: usize) {
        self.post(&format!("/v1/scale?workers={workers}"));
        wait_until("fewer workers", || {
            let state = self.state();
            let rest = &state.workers[workers..];
            rest.iter().all(|worker| worker.state == ProcessPhase::Stopped).then_some(())
        });
        assert_eq!(self.state().state, ClusterPhase::Ready);
    }

    /// Makes every write fail as on a full disk.
    fn fill_the_disk(&self) {
        let log = self.keeper.run_directory.join("logs/gpu0.log");
        let aside = log.with_extension("aside");
        wait_until("what was lost is said", || {
            fs::remove_file(&log).ok()?;
            std::os::unix::fs::symlink("/dev/full", &aside).expect("a link");
            fs::rename(&aside, &log).expect("put in place");
            // On a busy machine its worker may print nothing for longer; then try once more.
            std::thread::sleep(Duration::from_millis(50));
            fs::remove_file(&log).expect("the link");
            let begin = Instant::now();
            while begin.elapsed() < Duration::from_secs(2) {
                let text = fs::read_to_string(&log).unwrap_or_default();
                if text.contains("bytes of output could not be written here]") {
                    return Some(());
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            None
        });
    }

    /// Starts another cluster beside this one, which fails in its own way.
    fn beside(&self, fault: Fault) {
        let mut other = launch("beside", &["daemon ready", "ready"]);
        other.supervision.grace = Span::millis(200);
        match fault {
            Fault::BusyPort => {
                let holder = TcpListener::bind("127.0.0.1:0").expect("a port");
                let port = holder.local_addr().expect("its address").port();
                let steps = format!("listen={port} ready");
                other.workers[1] = worker("gpu1", &steps);
                let mut keeper = self.bench.keep(&other, &[self.containment]);
                let cause = format!("gpu1 could not start: port {port}: Address already in use");
                assert!(keeper.first.contains(&cause), "{}", keeper.first);
                keeper.word();
                self.nothing_left(&keeper.run_directory);
            }
            Fault::EarlyDeath => {
                other.workers[1] = worker("gpu1", "print=boom sleep=20 exit=3");
                let mut keeper = self.bench.keep(&other, &[self.containment]);
                assert!(keeper.first.contains("gpu1 ended with status 3"), "{}", keeper.first);
                assert!(keeper.first.contains("boom"), "{}", keeper.first);
                keeper.word();
                self.nothing_left(&keeper.run_directory);
            }
            Fault::HangingStart => {
                other.workers[1] = worker("gpu1", "step=looking-for-peers");
                other.supervision.ready_within = Span::secs(3);
                let keeper = self.bench.keep(&other, &[self.containment]);
                // On a busy machine it may not have reached the step.
                assert!(keeper.first.contains("gpu1 ("), "{}", keeper.first);
                self.nothing_left(&keeper.run_directory);
            }
            _ => {
                let again = self.bench.file("beside-again");
                let _ = fs::remove_file(&again);
                let stayed = self.bench.file("beside-stayed");
                let _ = fs::remove_file(&stayed);
                // Its first run lasts until all are READY; later ones never become READY.
                let crash = format!(
                    "once={} ready once={} sleep=3600000 exit=9",
                    again.display(),
                    stayed.display()
                );
                other.workers[1] = worker("gpu1", &crash);
                other.supervision.limit = 2;
                other.supervision.backoff = Span::millis(5);
                let mut keeper = self.bench.keep(&other, &[self.containment]);
                // Its next lives end at once, even if the first has not come to that step.
                fs::write(&again, "").and_then(|()| fs::write(&stayed, "")).expect("written");
                signal(keeper.state().workers[1].pid.expect("alive"), Signal::SIGKILL);
                let mut last = None;
                let state = wait_for(|| {
                    last = told_state(&keeper.run_directory).or(last.take());
                    last.clone().filter(|state| state.state == ClusterPhase::Degraded)
                });
                let state = state.unwrap_or_else(|| panic!("degraded: {last:#?}"));
                assert_eq!(state.workers[1].restarts, 1 + 2);
                assert_eq!(state.workers[1].state, ProcessPhase::Failed);
                assert!(state.cause.is_some_and(|cause| cause.text.contains("restarted 2 times")));
                keeper.signal(Signal::SIGTERM);
                let ended = keeper.word();
                assert!(ended.starts_with("ENDED Stopped { degraded: Some("), "{ended}");
                self.nothing_left(&keeper.run_directory);
            }
        }
    }

    fn nothing_left(&self, run_directory: &Path) {
        wait_until("nothing is left", || marked(run_directory).is_empty().then_some(()));
    }
}

#[test]
fn whatever_fails_the_cluster_is_whole_or_gone() {
    let mut random = Random(seed());
    let mut tally = Tally::new("keeper");
    let benches = [Bench::new(), Bench::new()];
    let containments = ["with-control-groups", "without-control-groups"];
    let mut rounds: Vec<Round<'_>> = benches
        .iter()
        .zip(containments)
        .map(|(bench, containment)| Round::begin(bench, containment))
        .collect();
    rounds.iter().for_each(Round::settle);
    for turn in 0..faults(38) {
        let fault = draw(&FAULTS, &mut random);
        let round = random.below(rounds.len());
        println!("keeper {turn}: {fault:?} {}", containments[round]);
        rounds[round].strike(fault, &mut random, &tally);
        tally.count(fault);
    }
    for mut round in rounds {
        round.keeper.signal(Signal::SIGTERM);
        assert_eq!(round.keeper.word(), "ENDED Stopped { degraded: None }");
        round.gone(&tally);
    }
}
