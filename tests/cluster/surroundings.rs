//! What a machine does around a cluster: it kills for want of memory, sets the clock, makes the run
//! directory read-only, and gives process ids again.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use serde_json::Value;

use super::sandbox::{Said, Sandbox, eventually};
use super::skip::skip;

const LONG: Duration = Duration::from_secs(60);

const SPEC: &str = "version: 1
topology: dgx-h100
simulate: true
workers: 2
";

fn spec(sandbox: &Sandbox, more: &str) -> PathBuf {
    let path = sandbox.runtime().join("spec.yaml");
    fs::write(&path, format!("{SPEC}{more}")).expect("written");
    path
}

fn up(spec: &Path, name: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuda-cluster"));
    command.args(["up", "--detach", "--name", name, "-f"]).arg(spec);
    command
}

fn pid(process: &Value) -> u64 {
    process["pid"].as_u64().expect("a pid")
}

fn is_ready(state: &Value) -> bool {
    state["state"] == "ready"
}

/// Namespaces of a test's own, which end with it.
struct Namespaces {
    holder: Child,
    /// Who is inside, for `nsenter`.
    target: u32,
}

impl Namespaces {
    /// As `unshare` makes them; `None` where it may not.
    fn new(kinds: &[&str]) -> Option<Self> {
        let mut command = Command::new("unshare");
        // The first process of a pid namespace has to wait for orphans, as bash does.
        command.args(kinds).args(["bash", "-c", "echo; while read -r; do :; done"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut holder = command.spawn().ok()?;
        let mut line = [0];
        let out = holder.stdout.as_mut().expect("piped");
        if std::io::Read::read_exact(out, &mut line).is_err() {
            let _ = holder.wait();
            return None;
        }
        // With a pid namespace, `unshare` stays outside and has a child.
        let own = holder.id();
        let children = fs::read_to_string(format!("/proc/{own}/task/{own}/children"));
        let child =
            children.ok().and_then(|children| children.split_whitespace().next()?.parse().ok());
        Some(Self { holder, target: child.unwrap_or(own) })
    }

    fn enter(&self, sandbox: &Sandbox, command: &Command) -> Said {
        let mut inside = Command::new("nsenter");
        inside.args(["--mount", "--pid", "--target", &self.target.to_string(), "--"]);
        inside.arg(command.get_program()).args(command.get_args());
        sandbox.spawn_program(inside).wait()
    }

    fn run(&self, sandbox: &Sandbox, arguments: &[&str]) -> Said {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cuda-cluster"));
        self.enter(sandbox, command.args(arguments))
    }

    fn sh(&self, sandbox: &Sandbox, script: &str) -> Said {
        let said = self.enter(sandbox, Command::new("sh").args(["-c", script]));
        assert_eq!(said.code, 0, "{script}: {said}");
        said
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        drop(self.holder.stdin.take());
        let _ = self.holder.wait();
    }
}

fn root_only() -> bool {
    let is_root = nix::unistd::Uid::effective().is_root();
    if !is_root {
        skip("root", "only root can make these namespaces");
    }
    is_root
}

#[test]
fn a_cluster_keeps_no_descriptor_of_who_started_it() {
    let sandbox = Sandbox::new();
    let file = tempfile::NamedTempFile::new().expect("a file");
    // As flock(1) passes its lock on, and a build its pipes.
    fcntl(file.as_file(), FcntlArg::F_SETFD(FdFlag::empty())).expect("set");
    let up = ["up", "--gpus", "none", "--cpu-workers", "2", "--name", "alone", "--detach"];
    let said = sandbox.run(&up);
    assert_eq!(said.code, 0, "{said}");
    let path = file.path();
    let keepers = sandbox.pids().into_iter().filter(|pid| {
        let open = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        open.filter_map(|one| fs::read_link(one.path()).ok()).any(|target| target == path)
    });
    assert_eq!(keepers.collect::<Vec<_>>(), [0_u64; 0]);
    assert_eq!(sandbox.run(&["down", "alone"]).code, 0);
    sandbox.assert_nothing_is_left();
}

#[test]
fn a_cluster_whose_run_directory_becomes_read_only_fails_with_that_cause_and_goes() {
    if !root_only() {
        return;
    }
    let sandbox = Sandbox::new();
    let Some(inside) = Namespaces::new(&["--mount", "--propagation", "private"]) else {
        return skip("root", "no mount namespace can be made here");
    };
    let limited = "supervision: {limit: 2, backoff: 10ms, backoff_max: 10ms}\n";
    let said = inside.enter(&sandbox, &up(&spec(&sandbox, limited), "kept"));
    assert_eq!(said.code, 0, "{said}");
    let folder = sandbox.runtime().display();
    let script = format!("mount --bind {folder} {folder} && mount -o remount,ro,bind {folder}");
    inside.sh(&sandbox, &script);
    assert!(is_ready(&sandbox.state("kept")), "what runs goes on");
    sandbox.kill(pid(&sandbox.state("kept")["scheduler"]));
    eventually("it can't go on", LONG, || sandbox.try_state("kept").is_none());
    for arguments in [&["ps", "-a", "kept"][..], &["events", "kept"], &["down", "kept"]] {
        let said = inside.run(&sandbox, arguments);
        let told = format!("{}{}", said.stdout, said.stderr);
        assert!(told.contains("scheduler.sock: Read-only file system"), "{arguments:?}: {said}");
        assert!(!told.contains("without a word"), "{arguments:?}: {said}");
        assert_eq!(said.code, 0, "{said}");
    }
    let refused = inside.run(&sandbox, &["up", "--topology", "dgx-h100", "--simulate", "--detach"]);
    assert!(refused.stderr.contains("Read-only file system"), "{refused}");
    inside.sh(&sandbox, &format!("umount {folder}"));
    eventually("no process is left", LONG, || sandbox.pids().is_empty());
    let said = inside.enter(&sandbox, &up(&spec(&sandbox, ""), "kept"));
    assert_eq!(said.code, 0, "the name can be used again: {said}");
    assert_eq!(inside.run(&sandbox, &["down", "kept"]).code, 0);
    sandbox.assert_nothing_is_left();
}

#[test]
fn who_has_got_the_process_id_of_one_that_died_is_left_alone() {
    if !root_only() {
        return;
    }
    let sandbox = Sandbox::new();
    let kinds = ["--pid", "--fork", "--mount-proc", "--kill-child"];
    let Some(inside) = Namespaces::new(&kinds) else {
        return skip("root", "no pid namespace can be made here");
    };
    let state = || -> Value {
        let said = inside.run(&sandbox, &["ps", "pids", "-o", "json"]);
        serde_json::from_str(&said.stdout).unwrap_or_else(|_| panic!("{said}"))
    };
    // The kernel's next process id is the one after this, as soon as no process is of its group
    // any more.
    let taken = |pid: u64| {
        let script = format!(
            "for i in $(seq 200); do echo {} > /proc/sys/kernel/ns_last_pid; sleep 1000 <&- >&- 2>&- & \
             [ $! = {pid} ] && exit 0; kill $!; sleep 0.1; done; exit 1",
            pid - 1
        );
        inside.sh(&sandbox, &script);
    };
    let is_left_alone = |pid: u64| {
        let name = inside.sh(&sandbox, &format!("cat /proc/{pid}/comm")).stdout;
        assert_eq!(name.trim(), "sleep", "process {pid}");
    };
    let spec = spec(&sandbox, "");
    assert_eq!(inside.enter(&sandbox, &up(&spec, "pids")).code, 0);
    let worker = pid(&state()["workers"][0]);
    inside.sh(&sandbox, &format!("kill -KILL {worker}"));
    taken(worker);
    eventually("READY again", LONG, || is_ready(&state()));
    for arguments in [&["restart", "pids", "gpu0"][..], &["scale", "pids", "1"]] {
        assert_eq!(inside.run(&sandbox, arguments).code, 0);
        is_left_alone(worker);
    }
    let state = state();
    let own = ["supervisor_pid", "guardian_pid"].map(|key| state[key].as_u64().expect("a pid"));
    inside.sh(&sandbox, &format!("kill -KILL {} {}", own[0], own[1]));
    own.into_iter().for_each(taken);
    for arguments in [&["ps", "-a"][..], &["down", "pids"], &["down", "pids", "--kill"]] {
        assert_eq!(inside.run(&sandbox, arguments).code, 0, "{arguments:?}");
    }
    assert_eq!(inside.enter(&sandbox, &up(&spec, "pids")).code, 0);
    assert_eq!(inside.run(&sandbox, &["down", "--all"]).code, 0);
    own.into_iter().chain([worker]).for_each(is_left_alone);
    sandbox.assert_no_shared_memory_is_left();
}

/// A control group with this much memory, removed at the end.
struct Memory(PathBuf);

impl Memory {
    fn new(bytes: u64) -> Option<Self> {
        let name = format!("cct-{}", std::process::id());
        let version_1 = (Path::new("/sys/fs/cgroup/memory"), "memory.limit_in_bytes");
        let version_2 = (Path::new("/sys/fs/cgroup"), "memory.max");
        [version_1, version_2].into_iter().find_map(|(parent, limit)| {
            let group = Self(parent.join(&name));
            // Where it is not allowed, the file is missing, or the directory can't be made.
            fs::create_dir(&group.0).ok()?;
            let mut file = fs::OpenOptions::new().write(true).open(group.0.join(limit)).ok()?;
            file.write_all(bytes.to_string().as_bytes()).ok()?;
            Some(group)
        })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // The last of its processes may just be ending.
        for _ in 0..100 {
            if fs::remove_dir(&self.0).is_ok() {
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn who_is_killed_for_want_of_memory_is_started_again_and_nobody_else() {
    let Some(memory) = Memory::new(400 << 20) else {
        return skip("root", "no control group with a limit of memory can be made here");
    };
    let sandbox = Sandbox::new();
    let once = sandbox.runtime().join("once");
    // Of two workers the second takes all memory once, in search of a line.
    let script = format!(
        "[ \"$RANK\" = 0 ] || [ -e {0} ] || {{ touch {0}; exec tail /dev/zero; }}; \
         exec sleep 1000",
        once.display()
    );
    let argv = serde_json::json!(["sh", "-c", script]);
    let engine = format!("engine: command\ncommand: {{argv: {argv}}}\n");
    let inside = up(&spec(&sandbox, &engine), "hungry");
    let mut command = Command::new("sh");
    let join = format!("echo $$ > {}/cgroup.procs && exec \"$@\"", memory.0.display());
    command.args(["-c", &join, "sh"]).arg(inside.get_program()).args(inside.get_args());
    let said = sandbox.spawn_program(command).wait();
    assert_eq!(said.code, 0, "{said}");
    let before = sandbox.state("hungry");
    eventually("one is killed and started again", LONG, || {
        let state = sandbox.state("hungry");
        is_ready(&state) && state["workers"][1]["restarts"] == 1
    });
    let after = sandbox.state("hungry");
    assert_eq!(after["workers"][1]["last_exit"]["signal"], 9, "{after}");
    for key in ["supervisor_pid", "guardian_pid"] {
        assert_eq!(after[key], before[key], "{key}");
    }
    assert_eq!(pid(&after["workers"][0]), pid(&before["workers"][0]));
    assert_eq!(sandbox.run(&["down", "hungry"]).code, 0);
    sandbox.assert_only_the_causes_are_left("hungry");
}

#[test]
fn a_clock_that_is_set_changes_no_delay_and_no_order() {
    let sandbox = Sandbox::new();
    let (shim, shift) = (sandbox.runtime().join("clock.so"), sandbox.runtime().join("shift"));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cluster/clock.c");
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-o"]).arg(&shim).arg(source).arg("-ldl");
    if !cc.status().is_ok_and(|status| status.success()) {
        return skip("cc", "there is no C compiler for a clock that can be set");
    }
    // Never shorter: processes have mapped it.
    let set = |seconds: i64| {
        let file = fs::OpenOptions::new().write(true).create(true).truncate(false).open(&shift);
        file.and_then(|mut file| file.write_all(&seconds.to_ne_bytes())).expect("written");
    };
    let with_clock = |mut command: Command| {
        command.env("LD_PRELOAD", &shim).env("CLOCK_SHIFT", &shift);
        sandbox.spawn_program(command).wait()
    };
    let run = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cuda-cluster"));
        command.args(arguments);
        with_clock(command)
    };
    set(0);
    let said = with_clock(up(&spec(&sandbox, ""), "clock"));
    assert_eq!(said.code, 0, "{said}");
    for (hours, restarts) in [(1, 1), (-1, 2)] {
        set(hours * 3600);
        sandbox.kill(pid(&sandbox.state("clock")["workers"][0]));
        eventually("READY again", LONG, || {
            let state = sandbox.state("clock");
            is_ready(&state) && state["workers"][0]["restarts"] == restarts
        });
        let said = run(&["ps", "clock"]);
        let headline = said.stdout.lines().next().unwrap_or_default();
        assert!(headline.contains(", up ") && !headline.contains(" h "), "{said}");
        assert_eq!(run(&["verify", "clock", "--rounds", "1"]).code, 0);
    }
    let told = run(&["events", "clock", "--json"]).stdout;
    let times: Vec<String> = told
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).expect("JSON")["at"].to_string())
        .collect();
    assert!(times.len() > 10 && times.is_sorted(), "{times:?}");
    assert_eq!(run(&["down", "clock"]).code, 0);
    sandbox.assert_only_the_causes_are_left("clock");
}
