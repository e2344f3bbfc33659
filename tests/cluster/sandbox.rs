//! A sandbox for a test that runs the binary: run directories, and checks for leftovers.

use std::fmt;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use cuda_cluster::os::shared_memory;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

/// A directory for run directories and everything that is started with it.
pub(crate) struct Sandbox {
    runtime: tempfile::TempDir,
}

/// The output of a command.
#[derive(Debug)]
pub(crate) struct Said {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl fmt::Display for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "exit {}\n--- stdout\n{}\n--- stderr\n{}", self.code, self.stdout, self.stderr)
    }
}

impl Sandbox {
    pub(crate) fn new() -> Self {
        // Short, because socket paths have a limit.
        let runtime =
            tempfile::Builder::new().prefix("cct").tempdir_in("/tmp").expect("a directory");
        let mode = std::fs::Permissions::from_mode(0o700);
        std::fs::set_permissions(runtime.path(), mode).expect("its mode");
        Self { runtime }
    }

    /// Where run directories are.
    pub(crate) fn runtime(&self) -> &Path {
        self.runtime.path()
    }

    /// Runs a command to its end.
    pub(crate) fn run(&self, arguments: &[&str]) -> Said {
        self.spawn(arguments).wait()
    }

    /// Starts a command.
    pub(crate) fn spawn(&self, arguments: &[&str]) -> Running {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cuda-cluster"));
        command.args(arguments);
        self.spawn_program(command)
    }

    /// Starts any program in this sandbox.
    pub(crate) fn spawn_program(&self, mut command: Command) -> Running {
        command
            .env("XDG_RUNTIME_DIR", self.runtime.path())
            .env_remove("CUDA_VISIBLE_DEVICES")
            .env_remove("LOCAL_RANK")
            .env_remove("SLURM_LOCALID")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        Running { child: command.spawn().expect("the program starts"), begun: Vec::new() }
    }

    /// `ps -o json` of a running cluster.
    pub(crate) fn state(&self, name: &str) -> Value {
        let said = self.run(&["ps", name, "-o", "json"]);
        assert_eq!(said.code, 0, "{said}");
        serde_json::from_str(&said.stdout).expect("ps prints JSON")
    }

    /// `ps -o json` of a cluster, if it runs already.
    pub(crate) fn try_state(&self, name: &str) -> Option<Value> {
        let said = self.run(&["ps", name, "-o", "json"]);
        serde_json::from_str(&said.stdout).ok().filter(|_| said.code == 0)
    }

    /// SIGKILL to a process of this sandbox.
    pub(crate) fn kill(&self, pid: u64) {
        self.signal(pid, Signal::SIGKILL);
    }

    /// A signal to a process of this sandbox.
    pub(crate) fn signal(&self, pid: u64, signal: Signal) {
        assert!(self.pids().contains(&pid), "process {pid} is of this sandbox");
        let pid = Pid::from_raw(i32::try_from(pid).expect("a pid"));
        kill(pid, signal).expect("it lives");
    }

    /// The directory of run directories.
    pub(crate) fn base(&self) -> PathBuf {
        self.runtime.path().join("cuda-cluster")
    }

    /// Processes that have this sandbox in their environment, without zombies.
    pub(crate) fn pids(&self) -> Vec<u64> {
        let mark = self.runtime.path().display().to_string();
        let mut found = Vec::new();
        for entry in std::fs::read_dir("/proc").expect("proc").flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            let environment = std::fs::read(entry.path().join("environ")).unwrap_or_default();
            if String::from_utf8_lossy(&environment).contains(&mark) {
                found.push(pid);
            }
        }
        found
    }

    /// Checks that no process is left, and of the run directory only what tells why one died.
    pub(crate) fn assert_only_the_causes_are_left(&self, name: &str) {
        eventually("no process of the sandbox", Duration::from_secs(20), || self.pids().is_empty());
        let directory = self.runtime.path().join("cuda-cluster").join(name);
        assert!(directory.join("crashes").is_dir() && directory.join("logs").is_dir());
        self.assert_no_shared_memory_is_left();
        for gone in ["control.sock", "secret", "scheduler.sock"] {
            assert!(!directory.join(gone).exists(), "{gone} is left");
        }
    }

    /// Checks that no shared memory is left without a process.
    pub(crate) fn assert_no_shared_memory_is_left(&self) {
        let prefix = shared_memory::prefix(&self.runtime.path().join("cuda-cluster"));
        eventually("no shared memory of the sandbox", Duration::from_secs(30), || {
            let mut entries = std::fs::read_dir("/dev/shm").expect("shared memory").flatten();
            !entries.any(|entry| entry.file_name().to_string_lossy().starts_with(&prefix))
        });
    }

    /// Checks that no process, no run directory and no shared memory is left.
    pub(crate) fn assert_nothing_is_left(&self) {
        eventually("no process of the sandbox", Duration::from_secs(20), || self.pids().is_empty());
        self.assert_no_shared_memory_is_left();
        let base = self.runtime.path().join("cuda-cluster");
        let left: Vec<_> = std::fs::read_dir(&base).into_iter().flatten().flatten().collect();
        let state =
            |left: &std::fs::DirEntry| std::fs::read_to_string(left.path().join("state.json"));
        let states: Vec<_> = left.iter().map(state).collect();
        assert!(left.is_empty(), "left in the run directory: {left:?}, {states:?}");
    }
}

impl Drop for Sandbox {
    /// A failed test must not leave its processes behind.
    fn drop(&mut self) {
        for pid in self.pids() {
            if let Ok(pid) = i32::try_from(pid) {
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
        }
    }
}

/// A running command.
pub(crate) struct Running {
    child: Child,
    /// The output that was read already.
    begun: Vec<u8>,
}

impl Running {
    pub(crate) fn pid(&self) -> u64 {
        u64::from(self.child.id())
    }

    /// Sends it a signal.
    pub(crate) fn signal(&mut self, signal: Signal) {
        let pid = Pid::from_raw(i32::try_from(self.child.id()).expect("a pid"));
        kill(pid, signal).expect("it lives");
    }

    /// Waits until it has printed a line.
    pub(crate) fn wait_for_a_line(&mut self) {
        let stdout = self.child.stdout.as_mut().expect("piped");
        while self.begun.last() != Some(&b'\n') {
            let mut byte = [0];
            stdout.read_exact(&mut byte).expect("a line");
            self.begun.extend(byte);
        }
    }

    /// The first line that it prints, without its line feed.
    pub(crate) fn first_line(&mut self) -> String {
        self.wait_for_a_line();
        String::from_utf8_lossy(&self.begun).trim_end().to_owned()
    }

    /// Waits for its end.
    pub(crate) fn wait(mut self) -> Said {
        let mut stdout = String::from_utf8(self.begun).expect("text");
        let mut stderr = String::new();
        let mut err = self.child.stderr.take().expect("piped");
        // Both pipes are read at the same time, so that neither fills up.
        let reader = std::thread::spawn(move || {
            let _ = err.read_to_string(&mut stderr);
            stderr
        });
        let _ = self.child.stdout.take().expect("piped").read_to_string(&mut stdout);
        let status = self.child.wait().expect("it ends");
        let stderr = reader.join().expect("the reader ends");
        let signal = std::os::unix::process::ExitStatusExt::signal(&status);
        let code = status.code().unwrap_or_else(|| -signal.unwrap_or(0));
        Said { code, stdout, stderr }
    }
}

/// Waits until something holds.
///
/// # Panics
/// If it does not within the time.
pub(crate) fn eventually(what: &str, within: Duration, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < within, "not within {within:?}: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
