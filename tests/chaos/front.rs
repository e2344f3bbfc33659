//! Faults for foreground `up` in a terminal, from outside: terminals and readers that stall or go
//! away, clients that disconnect, and every process killed or stopped.

use std::io::Write;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use cuda_cluster::supervise::{ClusterPhase, ClusterState, ProcessPhase, ProcessState};
use nix::sys::signal::Signal;

use crate::bench::{lives, request, told_state};
use crate::place::{Place, ended, signal};
use crate::stream::Random;
use crate::terminal::Terminal;
use crate::{Tally, draw, faults, seed};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    KillWorker,
    KillTwoWorkers,
    KillScheduler,
    KillSchedulerAfterScaleDown,
    DeleteProgram,
    StopWorkerForAWhile,
    StopSchedulerForAWhile,
    StopGuardianForAWhile,
    StopSupervisorForAWhile,
    StopClientForAWhile,
    StopEverybodyForAWhile,
    StopWorkerUntilNoticed,
    StopSchedulerUntilNoticed,
    StopGuardianUntilNoticed,
    StopTerminal,
    ClientsThatCloseAtOnce,
    ClientsThatSendHalf,
    ClientsThatSendNoise,
    KillClients,
    FollowersThatStall,
    Restart,
    ScaleDownAndUp,
    // These end the cluster.
    HangUp,
    CtrlC,
    Terminate,
    TerminateTwice,
    Down,
    DownKill,
    KillClient,
    KillSupervisor,
    KillGuardian,
    KillSupervisorAndGuardian,
    KillEverybody,
    StopSupervisorAndKillClient,
    StopGuardianAndKillSupervisor,
    StopClientAndHangUp,
    StopWorkersAndTerminate,
    StopSupervisorAndDownKill,
    StopEverybodyAndDownKill,
    KillSupervisorAndDown,
}

const FAULTS: [Fault; 40] = [
    Fault::KillWorker,
    Fault::KillTwoWorkers,
    Fault::KillScheduler,
    Fault::KillSchedulerAfterScaleDown,
    Fault::DeleteProgram,
    Fault::StopWorkerForAWhile,
    Fault::StopSchedulerForAWhile,
    Fault::StopGuardianForAWhile,
    Fault::StopSupervisorForAWhile,
    Fault::StopClientForAWhile,
    Fault::StopEverybodyForAWhile,
    Fault::StopWorkerUntilNoticed,
    Fault::StopSchedulerUntilNoticed,
    Fault::StopGuardianUntilNoticed,
    Fault::StopTerminal,
    Fault::ClientsThatCloseAtOnce,
    Fault::ClientsThatSendHalf,
    Fault::ClientsThatSendNoise,
    Fault::KillClients,
    Fault::FollowersThatStall,
    Fault::Restart,
    Fault::ScaleDownAndUp,
    Fault::HangUp,
    Fault::CtrlC,
    Fault::Terminate,
    Fault::TerminateTwice,
    Fault::Down,
    Fault::DownKill,
    Fault::KillClient,
    Fault::KillSupervisor,
    Fault::KillGuardian,
    Fault::KillSupervisorAndGuardian,
    Fault::KillEverybody,
    Fault::StopSupervisorAndKillClient,
    Fault::StopGuardianAndKillSupervisor,
    Fault::StopClientAndHangUp,
    Fault::StopWorkersAndTerminate,
    Fault::StopSupervisorAndDownKill,
    Fault::StopEverybodyAndDownKill,
    Fault::KillSupervisorAndDown,
];

/// What a cluster's end must mean for the command in the terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    Code(i32),
    /// Any code.
    Ordinary,
    Failure,
    Killed,
}

const SPEC: &str = "version: 1
supervision: {limit: 100000, backoff: 1ms, backoff_max: 20ms, grace: 2s,
  answer_within: 4s}
";

fn processes(state: &ClusterState) -> impl Iterator<Item = &ProcessState> {
    state.scheduler.iter().chain(&state.workers)
}

/// One cluster under attack.
struct Front<'a> {
    place: &'a Place,
    terminal: Terminal,
    /// Whether the terminal is stopped.
    stopped: bool,
    up: Child,
    workers: usize,
    /// Clients that have stalled.
    followers: Vec<Child>,
    /// Connections that stay open.
    open: Vec<UnixStream>,
    /// Processes that must not appear again.
    dead: Vec<u32>,
}

impl Drop for Front<'_> {
    fn drop(&mut self) {
        self.leave();
        // A failed test must leave no process.
        let _ = self.up.kill();
        let _ = self.up.wait();
    }
}

impl<'a> Front<'a> {
    fn begin(place: &'a Place, random: &mut Random) -> Self {
        let spec = place.sandbox.runtime().join("spec.yaml");
        std::fs::write(&spec, SPEC).expect("written");
        let workers = 2 + random.below(3);
        let count = workers.to_string();
        let spec = spec.display().to_string();
        // A name of its own, which a fault takes away.
        let program = place.sandbox.runtime().join("program");
        let built = env!("CARGO_BIN_EXE_cuda-cluster");
        let _ = std::fs::remove_file(&program);
        std::fs::hard_link(built, &program)
            .or_else(|_| std::fs::copy(built, &program).map(drop))
            .expect("a program");
        let mut command = Command::new(&program);
        command.args([
            "up",
            "-f",
            &spec,
            "--topology",
            "dgx-h100",
            "--simulate",
            "--n-workers",
            &count,
            "--name",
            "front",
        ]);
        place.adopt(&mut command);
        let mut terminal = Terminal::open(false);
        let stopped = random.below(4) == 0;
        if stopped {
            terminal.stop();
        }
        let up = terminal.adopt(&command).spawn().expect("setsid starts it");
        let (followers, open, dead) = Default::default();
        let mut front = Self { place, terminal, stopped, up, workers, followers, open, dead };
        front.settle();
        front
    }

    fn told(&self) -> Option<ClusterState> {
        told_state(&self.place.run_directory())
    }

    fn state(&self) -> ClusterState {
        self.place.wait_until("the control API answers", || self.told())
    }

    /// Waits until the cluster is READY, and every process is what the state says.
    fn settle(&mut self) {
        let state = self.place.wait_until(&format!("READY, without {:?}", self.dead), || {
            let said = self.up.try_wait().expect("a child");
            assert!(said.is_none(), "up has ended ({said:?}): {}", self.seen());
            let state = told_state(&self.place.run_directory())?;
            let settled = processes(&state).filter(|it| it.state == ProcessPhase::Ready).count()
                == 1 + self.workers
                && processes(&state).all(|it| it.pid.is_none_or(|pid| !self.dead.contains(&pid)));
            (settled && state.state == ClusterPhase::Ready).then_some(state)
        });
        for process in processes(&state) {
            assert!(process.pid.is_some_and(lives), "a false READY: {process:?}");
            if process.restarts > 0 {
                assert!(process.last_exit.is_some(), "a cause is recorded: {process:?}");
            }
        }
        let mut wanted: Vec<u32> = processes(&state).filter_map(|process| process.pid).collect();
        wanted.extend([state.supervisor_pid, self.up.id()]);
        wanted.extend(state.guardian_pid);
        wanted.extend(self.followers.iter().map(Child::id));
        wanted.sort_unstable();
        self.place.wait_until(&format!("only its own processes: {wanted:?}"), || {
            let mut found = self.place.pids();
            found.sort_unstable();
            (found == wanted).then_some(())
        });
        self.dead.clear();
    }

    fn seen(&self) -> String {
        String::from_utf8_lossy(&self.terminal.seen()).into_owned()
    }

    /// Ends all clients and connections.
    fn leave(&mut self) {
        self.open.clear();
        for mut follower in self.followers.drain(..) {
            // It may have ended with its cluster.
            let _ = follower.kill();
            let _ = follower.wait();
        }
    }

    fn kill(&mut self, pid: Option<u32>) {
        let pid = pid.expect("alive");
        self.dead.push(pid);
        signal(pid, Signal::SIGKILL);
    }

    fn pause(random: &mut Random) {
        std::thread::sleep(Duration::from_millis(random.below(120) as u64));
    }

    /// Stops processes for a while, during which a worker may die.
    fn stop_for_a_while(&mut self, pids: &[Option<u32>], worker: Option<u32>, random: &mut Random) {
        for pid in pids.iter().flatten() {
            signal(*pid, Signal::SIGSTOP);
        }
        if random.below(2) == 0 {
            self.kill(worker);
        }
        Self::pause(random);
        for pid in pids.iter().flatten() {
            signal(*pid, Signal::SIGCONT);
        }
    }

    /// A stopped process is not READY, and is READY again once it continues.
    fn stop_until_noticed(&self, pid: u32) {
        signal(pid, Signal::SIGSTOP);
        self.place.wait_until("a false READY: it is stopped", || {
            let state = self.state();
            let mut stopped = processes(&state).filter(|process| process.pid == Some(pid));
            let noticed = stopped.all(|process| process.state == ProcessPhase::Unresponsive);
            (noticed && state.state != ClusterPhase::Ready).then_some(())
        });
        signal(pid, Signal::SIGCONT);
    }

    /// Every socket of the cluster, in random order.
    fn sockets(&self, random: &mut Random) -> Vec<std::path::PathBuf> {
        let entries = std::fs::read_dir(self.place.run_directory()).expect("a run directory");
        let mut found: Vec<_> = entries
            .flatten()
            .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_socket()))
            .map(|entry| entry.path())
            .collect();
        assert!(found.len() >= 2, "control and scheduler: {found:?}");
        found.sort();
        let by = random.below(found.len());
        found.rotate_left(by);
        found
    }

    /// Connects to every socket, sends something, and stays or leaves.
    fn disturb(
        &mut self,
        count: usize,
        stay: bool,
        random: &mut Random,
        words: impl Fn(&mut Random) -> Vec<u8>,
    ) {
        for socket in self.sockets(random) {
            for _ in 0..count {
                // If its process is just restarting, it does not answer.
                let Ok(mut stream) = UnixStream::connect(&socket) else { continue };
                stream.set_write_timeout(Some(Duration::from_secs(5))).expect("a time");
                let _ = stream.write_all(&words(random));
                if stay {
                    self.open.push(stream);
                }
            }
        }
    }

    fn strike(&mut self, fault: Fault, random: &mut Random, tally: &Tally) {
        let state = self.state();
        let victim = random.below(self.workers);
        let pid = state.workers[victim].pid;
        let other = state.workers[(victim + 1) % self.workers].pid;
        let scheduler = state.scheduler.as_ref().and_then(|process| process.pid);
        let (supervisor, guardian) = (Some(state.supervisor_pid), state.guardian_pid);
        let client = Some(self.up.id());
        match fault {
            Fault::KillWorker => self.kill(pid),
            Fault::KillTwoWorkers => {
                self.kill(pid);
                self.kill(other);
            }
            Fault::KillScheduler => self.kill(scheduler),
            Fault::StopWorkerForAWhile => self.stop_for_a_while(&[pid], other, random),
            Fault::StopSchedulerForAWhile => self.stop_for_a_while(&[scheduler], pid, random),
            Fault::StopGuardianForAWhile => self.stop_for_a_while(&[guardian], pid, random),
            Fault::StopSupervisorForAWhile => self.stop_for_a_while(&[supervisor], pid, random),
            Fault::StopClientForAWhile => self.stop_for_a_while(&[client], pid, random),
            Fault::StopEverybodyForAWhile => {
                let all = [client, guardian, pid, supervisor, other, scheduler];
                self.stop_for_a_while(&all, pid, random);
            }
            Fault::StopWorkerUntilNoticed => self.stop_until_noticed(pid.expect("alive")),
            Fault::StopSchedulerUntilNoticed => self.stop_until_noticed(scheduler.expect("alive")),
            Fault::StopGuardianUntilNoticed => self.stop_until_noticed(guardian.expect("alive")),
            Fault::StopTerminal => {
                self.stopped = !self.stopped;
                if self.stopped {
                    self.terminal.stop()
                } else {
                    self.terminal.resume()
                }
                self.kill(pid);
            }
            Fault::ClientsThatCloseAtOnce => {
                self.disturb(100, false, random, |_| {
                    b"GET /v1/plan HTTP/1.1\r\nHost: x\r\n\r\n".to_vec()
                });
            }
            Fault::ClientsThatSendHalf => {
                let request = b"GET /v1/state HTTP/1.1\r\nHost: x\r\n\r\n";
                let stay = random.below(2) == 0;
                self.disturb(10, stay, random, |random| {
                    request[..random.below(request.len())].to_vec()
                });
            }
            Fault::ClientsThatSendNoise => {
                let stay = random.below(2) == 0;
                self.disturb(10, stay, random, |random| {
                    // Sometimes begin with a plausible length.
                    let length = random.below(300);
                    let mut noise = match random.below(2) {
                        0 => Vec::new(),
                        _ => u32::try_from(length).expect("short").to_le_bytes().to_vec(),
                    };
                    noise.extend((0..length).map(|_| random.bits().to_le_bytes()[0]));
                    noise
                });
            }
            Fault::KillClients => self.kill_clients(random),
            Fault::FollowersThatStall => {
                if self.followers.len() > 4 {
                    self.leave();
                }
                for arguments in [["events", "front", "-f"], ["logs", "front", "-f"]] {
                    let mut follower = self.place.command(&arguments);
                    follower.stdout(Stdio::piped());
                    self.followers.push(follower.spawn().expect("it starts"));
                }
                self.kill(pid);
            }
            Fault::Restart => {
                let name =
                    if random.below(4) == 0 { "scheduler" } else { &state.workers[victim].name };
                self.post(&format!("/v1/restart/{name}"));
                self.dead.extend(if name == "scheduler" { scheduler } else { pid });
            }
            Fault::KillSchedulerAfterScaleDown => {
                let fewer = 1 + random.below(self.workers - 1);
                self.post(&format!("/v1/scale?workers={fewer}"));
                if random.below(2) == 0 {
                    Self::pause(random);
                }
                self.kill(scheduler);
                self.place.wait_until("READY with fewer workers", || {
                    let state = self.told()?;
                    let pid = state.scheduler.as_ref()?.pid?;
                    let ready = processes(&state).filter(|it| it.state == ProcessPhase::Ready);
                    let is_whole = state.state == ClusterPhase::Ready && ready.count() == 1 + fewer;
                    (is_whole && !self.dead.contains(&pid)).then_some(())
                });
                self.post(&format!("/v1/scale?workers={}", self.workers));
            }
            Fault::DeleteProgram => {
                let program = self.place.sandbox.runtime().join("program");
                // It may have been deleted before.
                let _ = std::fs::remove_file(&program);
                if random.below(2) == 0 {
                    std::fs::write(&program, "another program").expect("written");
                }
                self.kill(if random.below(2) == 0 { scheduler } else { pid });
            }
            Fault::ScaleDownAndUp => {
                self.post("/v1/scale?workers=1");
                if random.below(2) == 0 {
                    Self::pause(random);
                }
                self.post(&format!("/v1/scale?workers={}", self.workers));
            }
            _ => {
                self.end(fault, &state, random, tally);
                *self = Self::begin(self.place, random);
                return;
            }
        }
        self.settle();
        if random.below(4) == 0 {
            self.look(random);
        }
    }

    fn post(&self, target: &str) {
        let socket = self.place.run_directory().join("control.sock");
        let (status, body) = request(&socket, "POST", target).expect("an answer");
        assert_eq!(status, 202, "{target}: {body}");
    }

    /// `ps` answers, whatever has stalled.
    fn look(&self, random: &mut Random) {
        let mut flags = vec!["ps", "front", "-o", "json"];
        flags.truncate([2, 4][random.below(2)]);
        let mut ps = self.place.command(&flags).spawn().expect("it starts");
        let said = ended(&mut ps).unwrap_or_else(|| panic!("ps: {}", self.place.post_mortem()));
        assert!(said.success(), "ps: {said}");
    }

    /// Kills clients at a random moment.
    fn kill_clients(&self, random: &mut Random) {
        let worker = self.state().workers[0].name.clone();
        let all = [
            &["ps", "front"][..],
            &["ps", "front", "-o", "wide"],
            &["events", "front", "-f"],
            &["logs", "front", &worker, "-f"],
            &["env", "front"],
            &["verify", "front"],
        ];
        for _ in 0..4 {
            let arguments = all[random.below(all.len())];
            let mut command = self.place.command(arguments);
            let mut client = command.stdout(Stdio::piped()).spawn().expect("it starts");
            Self::pause(random);
            // It may have ended already.
            let _ = client.kill();
            let _ = client.wait();
        }
    }

    fn down(&self, arguments: &[&str]) {
        let mut down = self.place.command(arguments).spawn().expect("it starts");
        let said = ended(&mut down);
        let post_mortem = self.place.post_mortem();
        assert!(said.is_some_and(|it| it.success()), "{arguments:?}: {said:?}: {post_mortem}");
    }

    /// Ends the cluster in one of many ways, and checks that nothing is left.
    fn end(&mut self, fault: Fault, state: &ClusterState, random: &mut Random, tally: &Tally) {
        let cgroup = self.place.cgroup();
        let (supervisor, guardian) =
            (state.supervisor_pid, state.guardian_pid.expect("a guardian"));
        let client = self.up.id();
        let ending = match fault {
            Fault::CtrlC => {
                self.terminal.interrupt();
                Ending::Code(128 + 2)
            }
            Fault::Terminate => {
                signal(client, Signal::SIGTERM);
                Ending::Code(128 + 15)
            }
            Fault::TerminateTwice => {
                signal(client, Signal::SIGTERM);
                Self::pause(random);
                signal(client, Signal::SIGTERM);
                Ending::Code(128 + 15)
            }
            Fault::StopWorkersAndTerminate => {
                for worker in &state.workers {
                    signal(worker.pid.expect("alive"), Signal::SIGSTOP);
                }
                signal(client, Signal::SIGTERM);
                Ending::Code(128 + 15)
            }
            Fault::Down => {
                self.down(&["down", "front"]);
                Ending::Code(0)
            }
            Fault::DownKill => {
                // A supervisor that is too busy to answer is killed too.
                self.down(&["down", "front", "--kill"]);
                Ending::Ordinary
            }
            Fault::StopSupervisorAndDownKill | Fault::StopEverybodyAndDownKill => {
                signal(supervisor, Signal::SIGSTOP);
                if fault == Fault::StopEverybodyAndDownKill {
                    let rest = processes(state).filter_map(|process| process.pid);
                    rest.chain([guardian]).for_each(|pid| signal(pid, Signal::SIGSTOP));
                }
                self.down(&["down", "front", "--kill"]);
                Ending::Failure
            }
            Fault::KillSupervisorAndDown => {
                signal(supervisor, Signal::SIGKILL);
                self.down(&["down", "front"]);
                Ending::Failure
            }
            Fault::HangUp => {
                let terminal = std::mem::replace(&mut self.terminal, Terminal::open(false));
                terminal.hang_up();
                Ending::Code(128 + 1)
            }
            Fault::StopClientAndHangUp => {
                signal(client, Signal::SIGSTOP);
                Self::pause(random);
                let terminal = std::mem::replace(&mut self.terminal, Terminal::open(false));
                // The kernel wakes the leader of a session that loses its terminal.
                terminal.hang_up();
                Ending::Code(128 + 1)
            }
            Fault::KillClient => {
                signal(client, Signal::SIGKILL);
                Ending::Killed
            }
            Fault::KillSupervisor => {
                signal(supervisor, Signal::SIGKILL);
                Ending::Failure
            }
            Fault::KillGuardian => {
                signal(guardian, Signal::SIGKILL);
                Ending::Failure
            }
            Fault::KillSupervisorAndGuardian => {
                signal(supervisor, Signal::SIGKILL);
                signal(guardian, Signal::SIGKILL);
                Ending::Failure
            }
            Fault::KillEverybody => {
                for pid in [client, guardian, supervisor] {
                    signal(pid, Signal::SIGKILL);
                }
                Ending::Killed
            }
            Fault::StopSupervisorAndKillClient => {
                signal(supervisor, Signal::SIGSTOP);
                signal(client, Signal::SIGKILL);
                Self::pause(random);
                signal(supervisor, Signal::SIGCONT);
                Ending::Killed
            }
            Fault::StopGuardianAndKillSupervisor => {
                signal(guardian, Signal::SIGSTOP);
                signal(supervisor, Signal::SIGKILL);
                Self::pause(random);
                signal(guardian, Signal::SIGCONT);
                Ending::Failure
            }
            _ => unreachable!("{fault:?} ends nothing"),
        };
        if self.stopped && matches!(ending, Ending::Code(0) | Ending::Ordinary | Ending::Failure) {
            // Its output waits for the reader, unless a signal ends it.
            self.terminal.resume();
        }
        let said = ended(&mut self.up);
        let said = said.unwrap_or_else(|| panic!("up stays: {}", self.place.post_mortem()));
        let as_expected = match ending {
            Ending::Code(code) => said.code() == Some(code),
            Ending::Ordinary => said.code().is_some(),
            Ending::Failure => said.code().is_some_and(|code| code != 0),
            Ending::Killed => said.code().is_none(),
        };
        assert!(as_expected, "{fault:?}: {ending:?}, but {said}: {}", self.seen());
        self.leave();
        let nobody = matches!(fault, Fault::KillSupervisorAndGuardian | Fault::KillEverybody);
        if nobody && random.below(2) == 0 {
            // Only processes are cleaned up now; the next cluster of that name does the rest.
            return self.place.no_process(tally);
        } else if nobody {
            self.down(&["down", "--all"]);
        }
        self.place.gone(tally, cgroup.as_deref());
    }
}

#[test]
fn whatever_happens_to_a_cluster_in_a_terminal_it_is_whole_or_gone() {
    let mut random = Random(seed());
    let mut tally = Tally::new("front");
    let place = Place::new("front");
    let mut front = Front::begin(&place, &mut random);
    for turn in 0..faults(14) {
        let fault = draw(&FAULTS, &mut random);
        println!(
            "front {turn}: {fault:?}{}",
            if front.stopped { ", terminal stopped" } else { "" }
        );
        front.strike(fault, &mut random, &tally);
        tally.count(fault);
    }
    let state = front.state();
    front.end(Fault::Terminate, &state, &mut random, &tally);
}
