//! A bench for the supervisor: launches of `unruly` processes, each test in a directory of its own.
#![allow(dead_code, unreachable_pub, reason = "each test program uses a part of it")]

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use cuda_cluster::ids::ClusterName;
use cuda_cluster::os::run_directory::RunDirectory;
use cuda_cluster::plan::{Binding, EngineKind, Supervision};
use cuda_cluster::supervise::{
    ClusterState, Launch, MARK_VARIABLE, Options, ProcessSpec, ReadyWhen, Supervisor,
};
use cuda_cluster::units::Span;

/// The program with the hidden subcommands.
pub fn helper() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_cuda-cluster"))
}

/// The misbehaving program; built if `cargo test` was asked for one test program only.
pub fn unruly() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| {
        let path = helper().with_file_name("examples").join("unruly");
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--quiet", "--example", "unruly"]);
        build.current_dir(env!("CARGO_MANIFEST_DIR"));
        let fresh = path.exists() || build.status().is_ok_and(|status| status.success());
        assert!(fresh, "the example `unruly` can be built");
        path
    })
}

/// A directory for run directories, removed when the test ends.
pub struct Bench {
    pub folder: tempfile::TempDir,
}

impl Bench {
    pub fn new() -> Self {
        let folder = tempfile::Builder::new().prefix("cc-").tempdir().expect("a directory");
        let mode = std::fs::Permissions::from_mode(0o700);
        std::fs::set_permissions(folder.path(), mode).expect("its mode");
        Self { folder }
    }

    pub fn acquire(&self, name: &str) -> RunDirectory {
        RunDirectory::acquire_below(self.folder.path(), &named(name)).expect("a run directory")
    }

    pub async fn start(&self, launch: Launch) -> Supervisor {
        let directory = self.acquire(launch.name.as_str());
        Supervisor::start(launch, directory, options()).await.expect("a supervisor")
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

pub fn options() -> Options {
    Options { helper: helper() }
}

pub fn named(name: &str) -> ClusterName {
    name.parse().expect("a name")
}

/// A worker that performs `steps`, parted by blanks.
pub fn worker(name: &str, steps: &str) -> ProcessSpec {
    let mut argv = vec![unruly().display().to_string()];
    argv.extend(steps.split_whitespace().map(str::to_owned));
    ProcessSpec {
        name: name.to_owned(),
        argv,
        env: BTreeMap::new(),
        env_remove: Vec::new(),
        directory: None,
        binding: Binding::default(),
        ready: ReadyWhen::Said,
        memory_limit_bytes: None,
        gpu: None,
    }
}

/// A cluster of workers that each perform the steps given.
pub fn launch(name: &str, workers: &[&str]) -> Launch {
    let workers = workers.iter().enumerate();
    Launch {
        name: named(name),
        engine: EngineKind::Native,
        simulated: true,
        supervision: Supervision {
            backoff: Span::millis(20),
            backoff_max: Span::millis(400),
            grace: Span::millis(1500),
            ready_within: Span::secs(20),
            ..Supervision::default()
        },
        strict: false,
        scheduler: None,
        workers: workers.map(|(at, steps)| worker(&format!("gpu{at}"), steps)).collect(),
        run_to_completion: false,
    }
}

/// Process ids of everything that carries a mark below this run directory.
pub fn marked(run_directory: &Path) -> Vec<u32> {
    let wanted = format!("CUDA_CLUSTER_RUN_DIR={}", run_directory.display());
    let entries = std::fs::read_dir("/proc").expect("proc").flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|pid| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|entry| entry == wanted.as_bytes())
    })
    .collect()
}

/// Waits until a condition holds, for a time that no working machine needs.
pub async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < Duration::from_secs(30), "{what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Waits until the state is as wanted.
pub async fn until(
    supervisor: &Supervisor,
    what: &str,
    wanted: impl FnMut(&ClusterState) -> bool,
) -> ClusterState {
    let mut state = supervisor.state();
    let reached = tokio::time::timeout(Duration::from_secs(30), state.wait_for(wanted)).await;
    match reached {
        Ok(Ok(state)) => state.clone(),
        Ok(Err(_)) => panic!("{what}: the supervisor has ended"),
        Err(_) => panic!("{what}: {:#?}", supervisor.state().borrow().clone()),
    }
}

/// Whether a process exists and is not a zombie.
pub fn lives(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| !stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('Z')))
}

/// The name of the variable that the tests must not inherit themselves.
pub const MARK: &str = MARK_VARIABLE;
