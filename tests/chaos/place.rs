//! The place of a chaos test: a sandbox, and the conditions that must hold in it.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use cuda_cluster::os::shared_memory;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::sandbox::Sandbox;
use crate::{LONG, Tally};

/// A sandbox for clusters of one name.
pub(crate) struct Place {
    pub(crate) sandbox: Sandbox,
    name: &'static str,
}

impl Place {
    pub(crate) fn new(name: &'static str) -> Self {
        Self { sandbox: Sandbox::new(), name }
    }

    pub(crate) fn run_directory(&self) -> PathBuf {
        self.sandbox.runtime().join("cuda-cluster").join(self.name)
    }

    /// A command of the program, not started yet, with its output discarded.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cuda-cluster"));
        command.args(arguments);
        self.adopt(&mut command);
        command
    }

    /// Makes a program run in this place.
    pub(crate) fn adopt(&self, command: &mut Command) {
        command.env("XDG_RUNTIME_DIR", self.sandbox.runtime());
        for variable in ["CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "RANK", "SLURM_LOCALID"] {
            command.env_remove(variable);
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    }

    pub(crate) fn pids(&self) -> Vec<u32> {
        self.sandbox.pids().iter().filter_map(|pid| u32::try_from(*pid).ok()).collect()
    }

    /// Waits for something; if it does not happen, reports the state of everything.
    pub(crate) fn wait_until<T>(&self, what: &str, look: impl FnMut() -> Option<T>) -> T {
        wait_for(look).unwrap_or_else(|| panic!("{what}\n{}", self.post_mortem()))
    }

    /// Waits until no process of a cluster is left.
    pub(crate) fn no_process(&self, tally: &Tally) {
        let begun = Instant::now();
        self.wait_until("no process is left", || self.pids().is_empty().then_some(()));
        tally.ended_within(begun.elapsed());
    }

    /// Waits until nothing of a cluster is left, except what tells why it ended.
    pub(crate) fn gone(&self, tally: &Tally, cgroup: Option<&Path>) {
        self.no_process(tally);
        let prefix = shared_memory::prefix(&self.sandbox.runtime().join("cuda-cluster"));
        self.wait_until("no shared memory is left", || {
            let mut entries = std::fs::read_dir("/dev/shm").expect("shared memory").flatten();
            let left =
                entries.any(|entry| entry.file_name().to_string_lossy().starts_with(&prefix));
            (!left).then_some(())
        });
        if let Some(cgroup) = cgroup {
            self.wait_until("its control group is gone", || (!cgroup.exists()).then_some(()));
        }
    }

    /// The control group of the running cluster, if it has one.
    pub(crate) fn cgroup(&self) -> Option<PathBuf> {
        let path = std::fs::read_to_string(self.run_directory().join("cgroup")).ok()?;
        Some(PathBuf::from(path.trim()))
    }

    /// Everything known about a cluster that is not as it should be.
    pub(crate) fn post_mortem(&self) -> String {
        let mut text = String::new();
        for pid in self.pids() {
            let read = |what| std::fs::read(format!("/proc/{pid}/{what}")).unwrap_or_default();
            let line = String::from_utf8_lossy(&read("cmdline")).replace('\0', " ");
            let status = String::from_utf8_lossy(&read("status")).into_owned();
            let state = status.lines().find(|line| line.starts_with("State")).unwrap_or_default();
            text += &format!("process {pid}: {state}: {line:.120}\n");
        }
        let directory = self.run_directory();
        let mut files = vec![directory.join("events.jsonl")];
        let logs = std::fs::read_dir(directory.join("logs")).into_iter().flatten().flatten();
        files.extend(logs.map(|entry| entry.path()));
        for file in files {
            let content = std::fs::read(&file).unwrap_or_default();
            let content = String::from_utf8_lossy(&content).into_owned();
            let lines: Vec<&str> = content.lines().collect();
            let last = lines[lines.len().saturating_sub(25)..].join("\n");
            text += &format!("--- {}\n{last:.6000}\n", file.display());
        }
        text
    }
}

/// Waits for something, with a generous limit.
pub(crate) fn wait_for<T>(mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let begun = Instant::now();
    loop {
        let found = look();
        if found.is_some() || begun.elapsed() > LONG {
            return found;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits for a child's end.
pub(crate) fn ended(child: &mut Child) -> Option<ExitStatus> {
    wait_for(|| child.try_wait().expect("a child"))
}

pub(crate) fn signal(pid: u32, signal: Signal) {
    // It may be gone already.
    let _ = kill(Pid::from_raw(pid.cast_signed()), signal);
}
