//! Starts a scheduler and workers by hand in the way the supervisor does: environment, run
//! directory, status pipe.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, PipeReader};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use cuda_cluster::native::client::Client;
use cuda_cluster::plan::Plan;
use cuda_cluster::wire::native::WorkerLanes;
use cuda_cluster::wire::status::{self, Status};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, SysconfVar, sysconf};

/// Longest wait for anything; a test that waits longer has failed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// One process of the cluster.
pub(crate) struct Process {
    pub(crate) name: String,
    child: Child,
    statuses: Receiver<Status>,
    seen: Vec<Status>,
    log: PathBuf,
}

impl Process {
    pub(crate) fn ready_status(&self) -> Option<&Status> {
        self.seen.iter().find(|status| matches!(status, Status::Ready { .. }))
    }

    fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    fn wait_ready(&mut self) -> Status {
        if let Some(status) = self.ready_within(PATIENCE) {
            return status;
        }
        panic!("{} did not get ready: {:?}\n{}", self.name, self.seen, self.log());
    }

    fn ready_within(&mut self, limit: Duration) -> Option<Status> {
        let start = Instant::now();
        while start.elapsed() < limit {
            match self.statuses.recv_timeout(Duration::from_millis(100)) {
                Ok(status) => {
                    self.seen.push(status.clone());
                    if matches!(status, Status::Ready { .. }) {
                        return Some(status);
                    }
                }
                Err(_) if self.child.try_wait().ok().flatten().is_some() => break,
                Err(_) => {}
            }
        }
        None
    }
}

/// A cluster of the native engine without a supervisor.
pub(crate) struct Cluster {
    directory: tempfile::TempDir,
    workers: usize,
    variables: BTreeMap<String, String>,
    processes: Vec<Process>,
    started: Instant,
}

impl Cluster {
    /// Starts the processes.
    pub(crate) fn start(workers: usize) -> Self {
        let mut cluster = Self::prepare(workers);
        cluster.spawn_all();
        cluster
    }

    /// Starts the processes of a plan.
    pub(crate) fn start_plan(plan: &Plan) -> Self {
        let mut cluster = Self::prepare_plan(plan);
        cluster.spawn_all();
        cluster
    }

    /// Writes the run directory only.
    pub(crate) fn prepare(workers: usize) -> Self {
        Self::prepare_plan(&plan(workers))
    }

    fn prepare_plan(plan: &Plan) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let cluster = Self {
            directory,
            workers: plan.workers.len(),
            variables: BTreeMap::new(),
            processes: Vec::new(),
            started: Instant::now(),
        };
        let plan = serde_json::to_string(plan).expect("a plan is JSON");
        for file in ["plan.json", "workers-plan.json"] {
            fs::write(cluster.directory.path().join(file), &plan).expect("a file");
        }
        cluster.write_secret(&"0123456789abcdef".repeat(4));
        cluster
    }

    /// Adds a variable to the environment of processes that are started later.
    pub(crate) fn set(&mut self, name: &str, value: &str) {
        self.variables.insert(name.to_owned(), value.to_owned());
    }

    pub(crate) fn write_secret(&self, secret: &str) {
        fs::write(self.directory.path().join("secret"), secret).expect("a file");
    }

    pub(crate) fn directory(&self) -> &std::path::Path {
        self.directory.path()
    }

    pub(crate) fn spawn_all(&mut self) {
        self.started = Instant::now();
        self.spawn("scheduler", "__scheduler");
        self.wait_ready("scheduler");
        for rank in 0..self.workers {
            self.spawn_worker(&format!("gpu{rank}"));
        }
    }

    pub(crate) fn spawn_worker(&mut self, name: &str) {
        self.spawn(name, "__worker");
    }

    fn spawn(&mut self, name: &str, command: &str) {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        let log = self.directory.path().join(format!("{name}.log"));
        let file = fs::OpenOptions::new().create(true).append(true).open(&log).expect("a file");
        // The child's number for its end of the pipe; no other descriptor has one so high.
        let fd = 200;
        let mut started = Command::new(env!("CARGO_BIN_EXE_cuda-cluster"));
        started
            .arg(command)
            .env("CUDA_CLUSTER_RUN_DIR", self.directory.path())
            .env("CUDA_CLUSTER_PROCESS", name)
            .env("CUDA_CLUSTER_STATUS_FD", fd.to_string())
            // Cargo sets it to the libucp that ucx1-sys built; users have their system's.
            .env_remove("LD_LIBRARY_PATH")
            .envs(&self.variables)
            .stdout(file.try_clone().expect("a second handle"))
            .stderr(file);
        let number = writer.as_raw_fd();
        let place = move || {
            // SAFETY: `number` is open in the child, which has one thread, until it executes.
            if unsafe { libc::dup2(number, fd) } < 0 {
                return Err(std::io::Error::last_os_error());
            }
            Ok(())
        };
        // SAFETY: the closure only calls `dup2`.
        let child = unsafe { started.pre_exec(place) }.spawn().expect("the binary starts");
        self.processes.push(Process {
            name: name.to_owned(),
            child,
            statuses: listen(reader),
            seen: Vec::new(),
            log,
        });
    }

    /// Waits until every worker is ready.
    pub(crate) fn ready(&mut self) {
        for process in &mut self.processes {
            if process.ready_status().is_none() {
                process.wait_ready();
            }
        }
    }

    pub(crate) fn since_start(&self) -> Duration {
        self.started.elapsed()
    }

    fn process(&mut self, name: &str) -> &mut Process {
        // The latest with this name.
        self.processes.iter_mut().rev().find(|p| p.name == name).expect("such a process")
    }

    pub(crate) fn pid(&mut self, name: &str) -> Pid {
        Pid::from_raw(i32::try_from(self.process(name).child.id()).expect("a pid"))
    }

    /// The living worker processes, with their names.
    pub(crate) fn living(&mut self) -> Vec<(String, u32)> {
        let workers = self.processes.iter_mut().filter(|process| process.name != "scheduler");
        workers
            .filter_map(|process| {
                let lives = process.child.try_wait().is_ok_and(|ended| ended.is_none());
                lives.then(|| (process.name.clone(), process.child.id()))
            })
            .collect()
    }

    /// Resident memory of a process.
    pub(crate) fn resident_bytes(&mut self, name: &str) -> u64 {
        let statm = fs::read_to_string(format!("/proc/{}/statm", self.pid(name)));
        let pages = statm.expect("the process is there");
        let pages = pages.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok());
        let page = sysconf(SysconfVar::PAGE_SIZE).expect("a number").expect("a page has a size");
        pages.expect("a number") * page.unsigned_abs()
    }

    pub(crate) fn wait_ready(&mut self, name: &str) -> Status {
        self.process(name).wait_ready()
    }

    /// Starts a worker again, repeatedly if it ends before it is ready, as the supervisor does. If
    /// it hangs, its stack traces are printed.
    #[allow(clippy::print_stdout, reason = "nothing else is left of a process that hung")]
    pub(crate) fn restart_worker(&mut self, name: &str) {
        self.spawn_worker(name);
        let start = Instant::now();
        let mut ready = self.process(name).ready_within(Duration::from_secs(1)).is_some();
        while !ready && start.elapsed() < PATIENCE {
            // A peer may have ended because only a new process could reconnect.
            self.revive();
            ready = self.process(name).ready_within(Duration::from_secs(1)).is_some();
        }
        if !ready {
            let pid = self.pid(name).to_string();
            let mut debugger = Command::new("gdb");
            debugger.args(["-p", &pid, "-batch", "-ex", "thread apply all bt 24"]);
            let stacks = debugger.output();
            let stacks = stacks.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
            println!("{name} did not get ready:\n{}", self.log(name));
            println!("{}", stacks.unwrap_or_default());
            self.kill(name);
            self.spawn_worker(name);
            self.wait_ready(name);
        }
    }

    /// Restarts workers that have ended on their own.
    #[allow(clippy::print_stdout, reason = "why they ended")]
    pub(crate) fn revive(&mut self) {
        for name in (0..self.workers).map(|rank| format!("gpu{rank}")) {
            let ended = self.process(&name).child.try_wait().is_ok_and(|ended| ended.is_some());
            if ended {
                println!("{name} has ended by itself:\n{}", self.log(&name));
                self.spawn_worker(&name);
            }
        }
    }

    pub(crate) fn last_status(&mut self, name: &str) -> Option<Status> {
        let process = self.process(name);
        while let Ok(status) = process.statuses.recv_timeout(PATIENCE) {
            process.seen.push(status);
        }
        process.seen.last().cloned()
    }

    pub(crate) fn log(&mut self, name: &str) -> String {
        self.process(name).log()
    }

    pub(crate) fn signal(&mut self, name: &str, signal: Signal) {
        let pid = self.pid(name);
        kill(pid, signal).expect("the process is there");
    }

    /// Waits until the scheduler knows the lanes between all workers.
    pub(crate) fn know_each_other(&self) -> Vec<WorkerLanes> {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let start = Instant::now();
        loop {
            let lanes = runtime.block_on(async {
                let mut client = Client::connect(self.directory()).await.expect("a scheduler");
                client.workers().await.expect("a scheduler")
            });
            let complete = |worker: &WorkerLanes| worker.peers.len() + 1 == self.workers;
            if lanes.len() == self.workers && lanes.iter().all(complete) {
                return lanes;
            }
            assert!(start.elapsed() < PATIENCE, "{lanes:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Reserves a place in the queue through which peers write to a worker, and leaves it empty, as
    /// a peer does that is killed in between: UCX's `uct_mm_fifo_ctl_t` (mm_iface.h) begins with the
    /// number of reserved places, followed by the length and the name of a socket, and two cache
    /// lines later by the owner's process id.
    pub(crate) fn block_queue(&mut self, name: &str) {
        let pid = self.pid(name).as_raw();
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("its memory");
        let memory = fs::File::options().read(true).write(true).open(format!("/proc/{pid}/mem"));
        let memory = memory.expect("a child's memory");
        for line in maps.lines().filter(|line| line.contains("rw-s") && line.contains("posix")) {
            let (begin, rest) = line.split_once('-').expect("a range");
            let end = rest.split(' ').next().expect("a range");
            let place = |text: &str| u64::from_str_radix(text, 16).expect("an address");
            for at in (place(begin)..place(end) - 192).step_by(64) {
                let mut head = [0; 140];
                if memory.read_exact_at(&mut head, at).is_err() {
                    break;
                }
                let length = u32::from_ne_bytes([head[8], head[9], head[10], head[11]]);
                let owner = i32::from_ne_bytes([head[136], head[137], head[138], head[139]]);
                let is_socket = head[12..15] == [1, 0, 0] && (3..=110).contains(&length);
                if is_socket && owner == pid {
                    let reserved = u64::from_ne_bytes(head[..8].try_into().expect("eight bytes"));
                    // More than peers can have written since the head was read.
                    memory.write_all_at(&(reserved + 16).to_ne_bytes(), at).expect("written");
                    return;
                }
            }
        }
        panic!("{name} has no queue in shared memory:\n{maps}");
    }

    /// Kills a process and waits for its end.
    pub(crate) fn kill(&mut self, name: &str) {
        let child = &mut self.process(name).child;
        child.kill().expect("the process is there");
        child.wait().expect("it is our child");
    }

    /// Waits for a process to end on its own; returns its exit code and its log.
    pub(crate) fn wait_end(&mut self, name: &str) -> (Option<i32>, String) {
        let process = self.process(name);
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            if let Some(status) = process.child.try_wait().expect("it is our child") {
                return (status.code(), process.log());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("{} does not end\n{}", process.name, process.log());
    }

    /// Ends everything as the supervisor does, and checks that it ends properly.
    pub(crate) fn stop(&mut self) {
        let names: Vec<String> = self.processes.iter().rev().map(|p| p.name.clone()).collect();
        let names: Vec<String> = names
            .into_iter()
            .filter(|name| self.process(name).child.try_wait().is_ok_and(|ended| ended.is_none()))
            .collect();
        for name in &names {
            self.signal(name, Signal::SIGTERM);
        }
        for name in names {
            let (code, log) = self.wait_end(&name);
            assert_eq!(code, Some(0), "{name}\n{log}");
        }
    }

    /// CPU time of all processes so far.
    pub(crate) fn cpu_time(&self) -> Duration {
        let ticks: u64 = self
            .processes
            .iter()
            .map(|process| {
                let stat = fs::read_to_string(format!("/proc/{}/stat", process.child.id()))
                    .expect("the process is there");
                // Fields 14 and 15, counted after the command's closing parenthesis (field 2).
                let rest = stat.rsplit_once(')').expect("a command").1;
                let fields: Vec<&str> = rest.split_whitespace().collect();
                fields[11].parse::<u64>().expect("ticks")
                    + fields[12].parse::<u64>().expect("ticks")
            })
            .sum();
        // USER_HZ is 100 on every Linux that Rust runs on.
        Duration::from_millis(ticks * 10)
    }
}

impl Drop for Cluster {
    #[allow(clippy::print_stdout, reason = "what a failed test shows")]
    fn drop(&mut self) {
        if std::thread::panicking() {
            for process in &self.processes {
                println!("--- {} ({})\n{}", process.name, process.child.id(), process.log());
            }
        }
        for process in &mut self.processes {
            // It may have ended already.
            let _ = process.child.kill();
            let _ = process.child.wait();
        }
    }
}

fn listen(reader: PipeReader) -> Receiver<Status> {
    let (sender, statuses) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(reader).lines() {
            let Ok(line) = line else { return };
            let status = status::decode(&line).expect("a status line");
            if sender.send(status).is_err() {
                return;
            }
        }
    });
    statuses
}

/// A plan for simulated GPUs and nothing else.
pub(crate) fn plan(workers: usize) -> Plan {
    let worker = |rank: usize| {
        serde_json::json!({
            "name": format!("gpu{rank}"), "rank": rank,
            "gpu": {"index": rank, "uuid": null, "pci": null, "memory_bytes": 1u64 << 33},
            "cpus": null, "mems": null, "nics": [], "threads": 1,
            "memory_limit_bytes": null, "device_memory_limit_bytes": null, "env": {}, "why": [],
        })
    };
    let plan = serde_json::json!({
        "version": 2, "name": "test", "engine": {"native": {}},
        "machine": {"name": "test", "source": null, "simulated": true},
        "scheduler": {"cpus": null, "mems": null, "env": {}},
        "workers": (0..workers).map(worker).collect::<Vec<_>>(),
        "client_env": {},
        "requirements": {"nvlink": false, "strict": false, "verify": false},
        "supervision": cuda_cluster::plan::Supervision::default(),
        "origins": {}, "notes": [],
    });
    serde_json::from_value(plan).expect("a plan")
}

/// Entries in shared memory: POSIX files of UCX, System V segments.
pub(crate) fn shared_memory() -> Vec<String> {
    let posix = fs::read_dir("/dev/shm")
        .expect("shared memory")
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| name.starts_with("ucx"));
    let segments = fs::read_to_string("/proc/sysvipc/shm").unwrap_or_default();
    // Field 2 is the identifier.
    let system_v = segments
        .lines()
        .skip(1)
        .filter_map(|line| line.split_whitespace().nth(1))
        .map(|id| format!("sysv {id}"));
    posix.chain(system_v).collect()
}
