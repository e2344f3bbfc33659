//! A store beyond its limits, while workers are killed and stopped: results are right, whatever the
//! cluster had to move to the disk.

use std::process::{Child, Stdio};
use std::time::Duration;

use cuda_cluster::supervise::{ClusterPhase, ClusterState};
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::bench::told_state;
use crate::place::{Place, ended, signal, wait_for};
use crate::stream::Random;
use crate::{Tally, draw, faults, seed};

#[derive(Clone, Copy, Debug)]
enum Fault {
    Nothing,
    KillWorker,
    KillTwoWorkers,
    KillClient,
    StopWorkerForAWhile,
    StopEveryWorkerForAWhile,
    StopSchedulerForAWhile,
}

const FAULTS: [Fault; 7] = [
    Fault::Nothing,
    Fault::KillWorker,
    Fault::KillTwoWorkers,
    Fault::KillClient,
    Fault::StopWorkerForAWhile,
    Fault::StopEveryWorkerForAWhile,
    Fault::StopSchedulerForAWhile,
];

const SPEC: &str = "version: 1
supervision: {limit: 100000, backoff: 1ms, backoff_max: 20ms, grace: 2s}
";

/// A cluster whose limits are far below the data.
struct Tight<'a> {
    place: &'a Place,
    workers: usize,
}

impl<'a> Tight<'a> {
    fn begin(place: &'a Place, random: &mut Random) -> Self {
        let at = |name: &str| place.sandbox.runtime().join(name).display().to_string();
        let (spec, disk) = (at("spec.yaml"), at("disk"));
        std::fs::write(&spec, SPEC).expect("written");
        let workers = 2 + random.below(2);
        let device = ["20MB", "40MB", "100MB"][random.below(3)];
        let host = ["300MB", "400MB", "600MB"][random.below(3)];
        let count = workers.to_string();
        let flags = ["up", "-f", &spec, "--topology", "dgx-h100", "--simulate", "--name", "memory"];
        let limits = ["--memory-limit", host, "--device-memory-limit", device];
        let place_of = ["--local-directory", &disk, "--n-workers", &count, "--detach"];
        let mut up = place.command(&[&flags[..], &limits, &place_of].concat());
        let said = up.stderr(Stdio::inherit()).status().expect("it runs");
        assert!(said.success(), "{said}: {limits:?}");
        println!("memory: {workers} workers, {host} of host memory, {device} of device memory");
        Self { place, workers }
    }

    fn state(&self) -> ClusterState {
        self.place.wait_until("the control API answers", || told_state(&self.place.run_directory()))
    }

    /// More bytes than the devices have, and often more than the host may have.
    fn work(&self, random: &mut Random) -> Child {
        let key = (random.bits() >> 33).to_string();
        let (chunks, size) = ((4 + random.below(10)).to_string(), "512");
        let (parts, rows) = ((2 + random.below(6)).to_string(), "200000");
        let workload = match random.below(2) {
            0 => ["bench", "transpose", "--chunks", &chunks, "--chunk-size", size],
            _ => ["bench", "merge", "--parts", &parts, "--rows", rows],
        };
        let flags = ["memory", "--runs", "1", "--check", "-o", "json", "--seed", &key];
        println!("memory: {workload:?}");
        let mut command = self.place.command(&[&workload[..], &flags].concat());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts")
    }

    fn strike(&self, fault: Fault, client: &mut Child, random: &mut Random) {
        std::thread::sleep(Duration::from_millis(random.below(1500) as u64));
        let state = self.state();
        let from = random.below(self.workers);
        let pid = |at: usize| state.workers[(from + at) % self.workers].pid;
        let stop = |pids: Vec<u32>, random: &mut Random| {
            pids.iter().for_each(|pid| signal(*pid, Signal::SIGSTOP));
            std::thread::sleep(Duration::from_millis(random.below(1000) as u64));
            pids.iter().for_each(|pid| signal(*pid, Signal::SIGCONT));
        };
        match fault {
            Fault::Nothing => {}
            Fault::KillWorker => pid(0).into_iter().for_each(|pid| signal(pid, Signal::SIGKILL)),
            Fault::KillTwoWorkers => {
                let both = [pid(0), pid(1)];
                both.iter().flatten().for_each(|pid| signal(*pid, Signal::SIGKILL));
            }
            Fault::KillClient => signal(client.id(), Signal::SIGKILL),
            Fault::StopWorkerForAWhile => stop(pid(0).into_iter().collect(), random),
            Fault::StopEveryWorkerForAWhile => {
                stop((0..self.workers).filter_map(pid).collect(), random);
            }
            Fault::StopSchedulerForAWhile => {
                stop(state.scheduler.iter().filter_map(|it| it.pid).collect(), random);
            }
        }
    }

    /// Checks that the result is right, and the cluster READY again.
    fn judge(&self, fault: Fault, mut client: Child) {
        let mut words = [client.stdout.take().map(read), client.stderr.take().map(read)];
        let said = (0..5).find_map(|_| ended(&mut client));
        let said = said.unwrap_or_else(|| panic!("bench stays: {}", self.place.post_mortem()));
        let mut text = |at: usize| {
            let reader = words[at].take().expect("piped");
            reader.join().expect("no panic")
        };
        let (told, errors) = (text(0), text(1));
        if !matches!(fault, Fault::KillClient) {
            assert!(said.success(), "{fault:?}: {said}: {errors}\n{}", self.place.post_mortem());
            let told: Value = serde_json::from_str(&told).expect("JSON");
            assert_eq!(told["same_as_in_one_process"], true, "a wrong result: {told}");
        }
        let ready = wait_for(|| {
            let state = self.state();
            let alive = state.workers.iter().all(|it| it.pid.is_some_and(crate::bench::lives));
            (state.state == ClusterPhase::Ready && alive).then_some(())
        });
        assert!(ready.is_some(), "READY again: {}", self.place.post_mortem());
    }
}

fn read(mut pipe: impl std::io::Read + Send + 'static) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut text = String::new();
        pipe.read_to_string(&mut text).expect("text");
        text
    })
}

impl Drop for Tight<'_> {
    fn drop(&mut self) {
        // A failed test must leave no process; the sandbox kills the rest.
        let _ = self.place.command(&["down", "memory", "--kill"]).status();
    }
}

#[test]
fn results_are_right_whatever_had_to_go_to_the_disk() {
    let mut random = Random(seed());
    let mut tally = Tally::new("memory");
    let place = Place::new("memory");
    let mut tight = Tight::begin(&place, &mut random);
    for turn in 0..faults(1) {
        if turn > 0 && random.below(8) == 0 {
            drop(tight);
            place.gone(&tally, None);
            tight = Tight::begin(&place, &mut random);
        }
        let fault = draw(&FAULTS, &mut random);
        println!("memory {turn}: {fault:?}");
        let mut client = tight.work(&mut random);
        tight.strike(fault, &mut client, &mut random);
        tight.judge(fault, client);
        tally.count(fault);
    }
    drop(tight);
    place.gone(&tally, None);
}
