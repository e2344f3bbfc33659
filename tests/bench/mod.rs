//! A bench for the supervisor: launches `unruly` processes, in a directory for each test.
#![allow(dead_code, unreachable_pub, reason = "each test program uses a part of it")]

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use cuda_cluster::ids::ClusterName;
use cuda_cluster::os::run_directory::RunDirectory;
use cuda_cluster::plan::{EngineKind, Program, Supervision};
use cuda_cluster::supervise::{ClusterState, Launch, Options, ProcessSpec, ReadyWhen, Supervisor};
use cuda_cluster::units::Span;

/// The program with the hidden subcommands.
pub fn helper() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_cuda-cluster"))
}

/// The misbehaving program.
pub fn unruly() -> PathBuf {
    example("unruly")
}

/// A program that supervises one cluster in the foreground.
pub fn keeper() -> PathBuf {
    example("keeper")
}

/// A test program that is built as an example. `cargo test` builds all of them, but `cargo test
/// --test` none, so this builds them once; unless `scripts/test.sh` has, which compiles other
/// things meanwhile, for which Cargo would wait here.
pub fn example(name: &str) -> PathBuf {
    static BUILT: OnceLock<bool> = OnceLock::new();
    let built = BUILT.get_or_init(|| {
        if std::env::var_os("CUDA_CLUSTER_BUILT").is_some() {
            return true;
        }
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--quiet"]);
        build.args(
            ["unruly", "keeper", "writer", "stranger"].map(|name| ["--example", name]).concat(),
        );
        build.args((!cfg!(debug_assertions)).then_some("--release"));
        build.current_dir(env!("CARGO_MANIFEST_DIR"));
        build.status().is_ok_and(|status| status.success())
    });
    assert!(built, "the test programs can be built");
    helper().with_file_name("examples").join(name)
}

/// A directory for run directories, removed at the end of the test.
pub struct Bench {
    pub folder: tempfile::TempDir,
}

impl Drop for Bench {
    /// A guardian whose supervisor was killed may still write there, which would stop the removal.
    fn drop(&mut self) {
        for _ in 0..500 {
            match std::fs::remove_dir_all(self.folder.path()) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                _ => break,
            }
        }
    }
}

impl Bench {
    pub fn new() -> Self {
        Self::over(tempfile::Builder::new().prefix("cc-").tempdir().expect("a directory"))
    }

    /// A bench in an existing directory.
    pub fn over(folder: tempfile::TempDir) -> Self {
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

    /// Starts a supervisor in a process of its own and waits for its first line.
    pub fn keep(&self, launch: &Launch, arguments: &[&str]) -> Keeper {
        self.keep_from(&keeper(), launch, arguments)
    }

    /// The same, from the keeper's program under another name.
    pub fn keep_from(&self, program: &Path, launch: &Launch, arguments: &[&str]) -> Keeper {
        let paper = self.file(&format!("{}.json", launch.name));
        std::fs::write(&paper, serde_json::to_vec(launch).expect("a launch")).expect("written");
        let mut command = Command::new(program);
        command.arg(self.folder.path()).arg(&paper).args(arguments).stdout(Stdio::piped());
        let mut child = command.spawn().expect("a keeper");
        let words = BufReader::new(child.stdout.take().expect("its output"));
        let mut keeper = Keeper {
            child,
            words,
            first: String::new(),
            run_directory: self.folder.path().join(launch.name.as_str()),
        };
        keeper.first = keeper.word();
        keeper
    }
}

/// A supervisor in a process of its own.
pub struct Keeper {
    pub child: Child,
    words: BufReader<ChildStdout>,
    pub first: String,
    pub run_directory: PathBuf,
}

impl Keeper {
    /// The next line that it prints; empty after its end.
    pub fn word(&mut self) -> String {
        let mut line = String::new();
        self.words.read_line(&mut line).expect("readable");
        line.trim_end().to_owned()
    }

    /// The state that it printed when READY.
    pub fn state(&self) -> ClusterState {
        let json = self.first.strip_prefix("READY ").expect("READY");
        serde_json::from_str(json).expect("a state")
    }

    pub fn signal(&self, signal: nix::sys::signal::Signal) {
        let pid = nix::unistd::Pid::from_raw(self.child.id().cast_signed());
        nix::sys::signal::kill(pid, signal).expect("it lives");
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn options() -> Options {
    Options { helper: helper(), ..Options::default() }
}

pub fn named(name: &str) -> ClusterName {
    name.parse().expect("a name")
}

/// A worker that performs `steps`, separated by spaces.
pub fn worker(name: &str, steps: &str) -> ProcessSpec {
    let mut argv = vec![unruly().display().to_string()];
    argv.extend(steps.split_whitespace().map(str::to_owned));
    ProcessSpec {
        name: name.to_owned(),
        program: Program { argv, ..Program::default() },
        ready: ReadyWhen::Said,
        memory_limit_bytes: None,
        gpu: None,
        host: None,
        fork_server: None,
    }
}

/// Short delays, and time to start on a busy machine.
fn patient() -> Supervision {
    let mut policy = Supervision::default();
    policy.backoff = Span::millis(20);
    policy.backoff_max = Span::millis(400);
    policy.grace = Span::millis(1500);
    policy.ready_within = Span::secs(20);
    policy
}

/// A cluster of workers that perform these steps.
pub fn launch(name: &str, workers: &[&str]) -> Launch {
    let workers = workers.iter().enumerate();
    Launch {
        name: named(name),
        engine: EngineKind::Native,
        simulated: true,
        supervision: patient(),
        strict: false,
        scheduler: None,
        workers: workers.map(|(at, steps)| worker(&format!("gpu{at}"), steps)).collect(),
        hosts: Vec::new(),
        standby: 0,
        run_to_completion: false,
        scheduler_stays: false,
        workers_wait: false,
        output_dir: None,
        to_be_verified: false,
        first_alone: false,
        together: None,
        notes: Vec::new(),
    }
}

/// Process ids of everything with a mark below this run directory.
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

/// Waits until a condition holds, with a generous limit.
pub async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < Duration::from_secs(30), "{what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Waits until the state satisfies a condition.
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

/// One request on a Unix socket: status and body.
pub fn request(socket: &Path, method: &str, target: &str) -> std::io::Result<(u16, String)> {
    let mut stream = std::os::unix::net::UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    let head = format!("{method} {target} HTTP/1.1\r\nHost: local\r\nConnection: close\r\n\r\n");
    std::io::Write::write_all(&mut stream, head.as_bytes())?;
    let mut answer = String::new();
    std::io::Read::read_to_string(&mut stream, &mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
    Ok((status, body.to_owned()))
}

/// The state, from the control API.
pub fn told_state(run_directory: &Path) -> Option<ClusterState> {
    let (_, body) = request(&run_directory.join("control.sock"), "GET", "/v1/state").ok()?;
    serde_json::from_str(&body).ok()
}
