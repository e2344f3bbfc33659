//! Wrong inputs: each is refused with a sentence that says what, where, and what to do, and with
//! the documented exit code; nothing is left behind.
use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use nix::pty::openpty;

use crate::sandbox::{Said, Sandbox, eventually};
use crate::skip::skip;

const MACHINE: [&str; 3] = ["--topology", "dgx-h100", "--simulate"];

/// `cuda-cluster SUBCOMMAND` for the machine, with these flags.
fn with(sandbox: &Sandbox, subcommand: &str, flags: &[&str]) -> Said {
    sandbox.run(&[&[subcommand], &MACHINE[..], flags].concat())
}

/// Checks the answer to a wrong input.
fn assert_refused(said: &Said, code: i32, words: &[&str]) {
    assert_eq!(said.code, code, "{said}");
    assert!(said.stderr.contains("error: "), "{said}");
    for word in words {
        assert!(said.stderr.contains(word), "{word:?} is missing: {said}");
    }
}

const DIGITS: &str = "12345678901234567890123456";

#[test]
fn options_that_cannot_be_meant_are_refused() {
    let sandbox = Sandbox::new();
    for (flags, words) in [
        (
            &["--enable-nvlink", "--disable-nvlink"][..],
            &["--enable-nvlink", "--disable-nvlink"][..],
        ),
        (&["--disable-infiniband", "--enable-infiniband"], &["cannot be used with"]),
        (&["--dashboard", "--no-dashboard"], &["cannot be used with"]),
        (&["--host", "999.1.1.1"], &["--host: 999.1.1.1 is no IPv4 address", "hint: "]),
        (&["--host=-x"], &["--host: \"-x\" looks like an option", "hint: "]),
        (&["--contact-address", ""], &["--contact-address: it is empty"]),
        (&["--local-directory", ""], &["--local-directory: it is empty", "hint: "]),
        (&["--preload", ""], &["--preload: it is empty", "hint: "]),
        (&["--pid-file", ""], &["--pid-file: it is empty", "hint: "]),
        (&["--ucx", ""], &["--ucx: it is empty", "hint: "]),
        (&["--resources", "GPU=1,GPU=2"], &["--resources", "GPU is given twice"]),
        (&["--ucx-version", "999.999.999"], &["--ucx-version", "a UCX version, like 1.18"]),
        (
            &["--interface", "nosuch0"],
            &["--interface: there is no network interface nosuch0", "lo"],
        ),
        (&["--local-directory", "/proc/nope"], &["--local-directory: ", "/proc/nope", "hint: "]),
        (&["--pid-file", "/tmp"], &["--pid-file: /tmp cannot be written", "hint: "]),
        (&["--device-memory-limit", "1TB"], &["--device-memory-limit: ", "79.6 GiB", "hint: "]),
        (&["--memory-limit", "1"], &["--memory-limit: 1 byte is too few", "hint: "]),
        (&["--device-memory-limit", "80"], &["--device-memory-limit: 80 bytes are too few"]),
        (&["--memory-limit", DIGITS], &["--memory-limit", "below 16 EiB"]),
        (&["--n-workers", DIGITS], &["--n-workers", "too large; the most is 4294967295"]),
        (
            &["--threads-per-worker", "4294967295"],
            &["--threads-per-worker: 4294967295 threads are more than the 4194304", "hint: "],
        ),
        (&["--grace", DIGITS], &["--grace", "at most ten years"]),
        (&["--scheduler-port", DIGITS], &["--scheduler-port", "is not a port"]),
    ] {
        assert_refused(&with(&sandbox, "up", flags), 2, words);
    }
    let said = with(&sandbox, "run", &["--", ""]);
    assert_refused(&said, 2, &["there is no program in it", "hint: name the program to run"]);
    let said = sandbox.run(&["dashboard", "--listen", "/proc/nope/page.sock"]);
    assert_refused(&said, 1, &["cannot listen on /proc/nope/page.sock", "hint: name a new file"]);
    let said = sandbox.run(&["restart", "any", ""]);
    assert_refused(&said, 2, &["an empty word is the name of no process", "hint: "]);
    let dask = ["--engine", "dask", "--scheduler-file", "/tmp"];
    assert_refused(&with(&sandbox, "up", &dask), 2, &["--scheduler-file: /tmp cannot be written"]);
    // The second is nobody's (RFC 5737), and `.invalid` is no name (RFC 2606).
    for (flag, value, host) in [
        ("--host", "nosuch.invalid", "nosuch.invalid"),
        ("--host", "192.0.2.1", "192.0.2.1"),
        ("--dashboard-address", "192.0.2.1:8787", "192.0.2.1"),
    ] {
        let dask = ["--engine", "dask", flag, value];
        let words = format!("{flag}: nothing can listen at {host} here: ");
        assert_refused(&with(&sandbox, "up", &dask), 2, &[&words, "hint: name an address"]);
    }
    sandbox.assert_nothing_is_left();
}

#[test]
fn options_that_mean_nothing_to_the_engine_are_noted_and_refused_under_strict() {
    let sandbox = Sandbox::new();
    for option in [
        ["--host", "10.0.0.1"],
        ["--scheduler-file", "/tmp"],
        ["--scheduler-port", "8786"],
        ["--rmm-log-directory", "/proc/x"],
        ["--worker-port", "9000:9100"],
        ["--start-workers", "1"],
        ["--preload", "module"],
    ] {
        let said = with(&sandbox, "exec", &[&option[..], &["--rank", "0", "--", "true"]].concat());
        assert_eq!(said.code, 0, "{said}");
        assert!(said.stderr.contains(&format!("note: {}: ignored: ", option[0])), "{said}");
        let strict = with(&sandbox, "up", &[&option[..], &["--strict"]].concat());
        assert_refused(&strict, 2, &[&format!("{}: ignored: ", option[0])]);
    }
}

#[test]
fn errors_of_flags_speak_of_flags_and_errors_of_a_file_of_keys() {
    let sandbox = Sandbox::new();
    for (flags, words) in [
        (&["--threads-per-worker", "0"][..], &["error: --threads-per-worker: 0 is too few"][..]),
        (
            &["--scheduler-cores", "2"],
            &["error: --scheduler-cores: ", "hint: set --cpus split too"],
        ),
        (
            &["--rmm-managed-memory", "--enable-nvlink"],
            &[
                "error: --rmm-managed-memory: ",
                "hint: drop --rmm-managed-memory or --enable-nvlink",
            ],
        ),
        (&["--tls-cert", "x"], &["needs all three of --tls-ca-file, --tls-cert and --tls-key"]),
        (&["--n-workers", "99"], &["99 GPUs are asked for", "use --workers-per-gpu"]),
        (&["--strict", "--adapt-minimum", "1"], &["--adapt-minimum: ignored"]),
    ] {
        let said = with(&sandbox, "plan", flags);
        assert_refused(&said, 2, words);
        assert!(!said.stderr.contains("rmm.") && !said.stderr.contains("scheduler_"), "{said}");
    }
    let folder = tempfile::tempdir().expect("a directory");
    let file = folder.path().join("spec.yaml");
    std::fs::write(&file, "version: 1\nucx: {nvlink: true}\n").expect("written");
    let file = file.to_str().expect("text");
    let said = with(&sandbox, "plan", &["-f", file, "--rmm-managed-memory"]);
    assert_refused(
        &said,
        2,
        &["--rmm-managed-memory: ", "drop --rmm-managed-memory or 'ucx.nvlink'"],
    );
}

#[test]
fn small_fractions_are_fractions() {
    let sandbox = Sandbox::new();
    for (flag, fraction) in [
        ("--memory-limit", "0.00005"),
        ("--device-memory-limit", "0.00001"),
        ("--rmm-pool-size", "0.00001"),
    ] {
        let said = with(&sandbox, "plan", &[flag, fraction]);
        assert_eq!(said.code, 0, "{said}");
    }
    for flags in [
        ["--rmm-maximum-pool-size", "0.00002", "--rmm-pool-size", "0.00001"].as_slice(),
        &["--rmm-release-threshold", "0.00001", "--rmm-async"],
    ] {
        assert_eq!(with(&sandbox, "plan", flags).code, 0, "{flags:?}");
    }
}

#[test]
fn texts_that_no_program_can_be_given_are_refused_whatever_their_key() {
    let sandbox = Sandbox::new();
    let file = tempfile::NamedTempFile::new().expect("a file");
    let path = file.path().to_str().expect("text");
    for (text, words) in [
        (
            "command: {argv: ['true', \"a\\0b\"]}",
            &["command.argv[1]: \"a\\0b\" has a NUL byte"][..],
        ),
        ("worker: {env: {A: \"a\\0b\"}}", &["worker.env.A: ", "NUL"]),
        ("dask: {preload: [\"a\\0b\"]}", &["dask.preload[0]: ", "NUL"]),
        ("dask: {config: {\"a\\0b\": 1}}", &["dask.config.a\\u{0}b: ", "NUL"]),
        ("worker: {resources: {\"a\\0b\": 1}}", &["worker.resources.a\\u{0}b: ", "NUL"]),
        ("worker: {local_directory: ''}", &["worker.local_directory: it is empty", "hint: "]),
        ("tls: {ca_file: '', cert: '', key: ''}", &["tls.ca_file: it is empty"]),
        ("dask: {python: ''}", &["dask.python: it is empty"]),
        ("rmm: {log_directory: ''}", &["rmm.log_directory: it is empty"]),
        ("topology: ''", &["topology: it is empty"]),
        ("workers: -0", &["workers: -0 is not a whole number"]),
        ("engine: []", &["engine: a list is not one of the words"]),
        ("\"a\\e[31mb\": 1", &[":2:1: a\\u{1b}[31mb: unknown key"]),
        ("name: ${LATIN}", &["name: the variable LATIN is not UTF-8", "hint: "]),
    ] {
        std::fs::write(file.path(), format!("version: 1\n{text}\n")).expect("written");
        for reader in [&["spec", "check"][..], &["plan", "-f"]] {
            let mut command = Command::new(env!("CARGO_BIN_EXE_cuda-cluster"));
            command.args(reader).arg(path).env("LATIN", OsStr::from_bytes(b"\xe9"));
            assert_refused(&sandbox.spawn_program(command).wait(), 2, words);
        }
    }
    let empty = "version: 1\nengine: command\nworker: {env: {A: ''}}\ncommand: {argv: [a, '']}\n";
    std::fs::write(file.path(), empty).expect("written");
    let said = with(&sandbox, "plan", &["-f", path]);
    assert_eq!(said.code, 0, "a program may be given these: {said}");
}

#[test]
fn files_without_an_end_and_what_is_no_file_are_refused() {
    let sandbox = Sandbox::new();
    let folder = tempfile::tempdir().expect("a directory");
    let pipe = folder.path().join("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
    let (folder, pipe) = (folder.path().to_str().expect("text"), pipe.to_str().expect("text"));
    for (before, what) in [
        (&["plan", "-f"][..], "spec"),
        (&["spec", "check"], "spec"),
        (&["up", "--plan"], "plan"),
        (&["topo", "--topology"], "topology"),
        (&["up", "--simulate", "--topology"], "topology"),
    ] {
        for (path, cause) in [
            ("/dev/zero", "MiB, which is the limit"),
            (folder, "it is a directory"),
            ("/nowhere/at/all", "it does not exist"),
        ] {
            let said = sandbox.run(&[before, &[path]].concat());
            assert_refused(&said, 2, &[&format!("cannot read {what} {path}"), cause, "hint: "]);
        }
    }
    let said = sandbox.run(&["plan", "-f", pipe]);
    assert_refused(&said, 2, &[pipe, "nobody writes into this pipe", "hint: "]);
    // A pipe works as well as a file.
    let mut plan = Command::new("sh");
    let script = "(sleep 0.1; printf 'version: 1\\nname: piped\\n') > \"$1\" & exec \"$0\" plan \
                  --topology dgx-h100 -f \"$1\"";
    plan.args(["-c", script, env!("CARGO_BIN_EXE_cuda-cluster"), pipe]);
    let said = sandbox.spawn_program(plan).wait();
    assert!(said.code == 0 && said.stdout.contains("piped: 8 workers"), "{said}");
}

#[test]
fn what_nests_too_deeply_is_refused_with_its_place_by_whoever_reads_it() {
    let sandbox = Sandbox::new();
    let file = tempfile::NamedTempFile::new().expect("a file");
    let path = file.path().to_str().expect("text");
    let lines = |opens: &str| -> String {
        (2..700).map(|column| format!("{opens}\n{:column$}", "")).collect()
    };
    let yaml =
        ["- ".repeat(20_000), "? ".repeat(20_000), "[".repeat(20_000), lines("-"), lines("a:")];
    let yaml = yaml.map(|value| format!("version: 1\ngpus:\n {value}1\n"));
    // The reader of JSON may find a wrong type first.
    let json = format!("{{\"version\": 1,\n\"gpus\": {}", "[".repeat(20_000));
    let deep = &["it is nested too deeply"][..];
    let yaml = yaml.iter().map(|text| (text, deep, 3));
    for (text, words, line) in yaml.chain([(&json, &[][..], 2)]) {
        for reader in [
            &["plan", "-f"][..],
            &["spec", "check"],
            &["up", "--plan"],
            &["topo", "--topology"],
            &["up", "--simulate", "--topology"],
        ] {
            // A plan of another version is refused for that.
            let version = if reader[1] == "--plan" { 2 } else { 1 };
            let text = text.replacen("1", &version.to_string(), 1);
            std::fs::write(file.path(), text).expect("written");
            let said = sandbox.run(&[reader, &[path]].concat());
            assert_refused(&said, 2, words);
            // Forms with a line for each level are refused further below.
            let places = [line, 66].map(|line| [format!(":{line}:"), format!("line {line},")]);
            let place = places.iter().flatten().any(|place| said.stderr.contains(place));
            assert!(place, "{said}");
        }
    }
    sandbox.assert_nothing_is_left();
}

#[test]
fn specs_of_other_editors_are_read_or_refused_in_words() {
    let sandbox = Sandbox::new();
    let file = tempfile::NamedTempFile::new().expect("a file");
    let path = file.path().to_str().expect("text");
    let planned = |text: &[u8]| {
        std::fs::write(file.path(), text).expect("written");
        with(&sandbox, "plan", &["-f", path])
    };
    let said = planned(b"\xef\xbb\xbfversion: 1\nname: marked\n");
    assert!(said.code == 0 && said.stdout.contains("marked: 8 workers"), "{said}");
    let number = format!("version: 1\nworkers: {DIGITS}\n");
    for (text, words) in [
        (
            &b"version: 1\nucx:\n\tnvlink: true\n"[..],
            &[":3:1: a tab indents this line", "hint: "][..],
        ),
        (b"\xff\xfev\0e\0", &["UTF-16", "hint: "]),
        (b"version: 1\nname: caf\xe9\n", &["not UTF-8", "byte 21"]),
        (number.as_bytes(), &[":2:1: workers: ", "is not a whole number from 0 to 4294967295"]),
    ] {
        assert_refused(&planned(text), 2, words);
    }
}

/// The program with limits, as a user to whom limits apply.
fn limited(sandbox: &Sandbox, limit: &str, arguments: &[&str]) -> Said {
    let mut command = Command::new("prlimit");
    command.args([limit, "--core=0"]).current_dir("/");
    let program = Path::new(env!("CARGO_BIN_EXE_cuda-cluster"));
    if !nix::unistd::Uid::effective().is_root() {
        return sandbox
            .spawn_program({
                command.arg(program).args(arguments);
                command
            })
            .wait();
    }
    // The build directory may be closed to other users. Another process copies: a program that this
    // one holds open for writing is busy for as long as a child that another test has just forked.
    let copy = sandbox.runtime().join("program");
    let copied = Command::new("cp").args([program, &copy]).status().expect("cp runs");
    assert!(copied.success(), "{copied}");
    let owned_by = |uid| {
        let uid = Some(nix::unistd::Uid::from_raw(uid));
        nix::unistd::chown(sandbox.runtime(), uid, None).expect("its owner");
    };
    // A new user for each call: the limit counts everything of that user, even what is just ending.
    static CALLS: AtomicU32 = AtomicU32::new(0);
    let user = 70_000 + std::process::id() % 1000 * 32 + CALLS.fetch_add(1, Ordering::Relaxed);
    owned_by(user);
    command.args(["setpriv", &format!("--reuid={user}"), "--regid=65534", "--clear-groups"]);
    command.arg(&copy).args(arguments);
    let said = sandbox.spawn_program(command).wait();
    owned_by(0);
    std::fs::remove_file(&copy).expect("removed");
    said
}

#[test]
fn limits_that_leave_no_room_are_said_before_anything_starts() {
    let up = [&["up"], &MACHINE[..], &["--n-workers", "2", "--detach"]].concat();
    let run = [&["run"], &MACHINE[..], &["--n-workers", "2", "--", "true"]].concat();
    for arguments in [&up, &run] {
        let sandbox = Sandbox::new();
        let said = limited(&sandbox, "--nofile=20", arguments);
        assert_refused(&said, 1, &["open files", "the limit is 20", "hint: ", "ulimit -n"]);
    }
    // UCX and the event loop end a process that has no descriptors for them; UCX is in one of its own,
    // and its end is a finding.
    for limit in 5..=30 {
        let said = limited(&Sandbox::new(), &format!("--nofile={limit}"), &["doctor"]);
        let told = format!("{}{}", said.stdout, said.stderr);
        assert!([1, 4].contains(&said.code), "{limit}: {said}");
        let why = ["Too many open files", "ERROR        open-files"];
        assert!(why.iter().any(|why| told.contains(why)) && !told.contains("panicked"), "{said}");
    }
    let many = [&["up"], &MACHINE[..], &["--n-workers", "8", "--detach"]].concat();
    let sandbox = Sandbox::new();
    let said = limited(&sandbox, "--nproc=30", &many);
    assert_refused(
        &said,
        1,
        &["needs at least 48 threads", "the limit is 30", "hint: ", "ulimit -u"],
    );
    // With a low limit it may fail before it can count, but still with a sentence.
    for limit in 2..=8 {
        let sandbox = Sandbox::new();
        let said = limited(&sandbox, &format!("--nproc={limit}"), &up);
        assert_refused(&said, 1, &["hint: ", "ulimit -u"]);
        assert!(!said.stderr.contains("panicked"), "{said}");
    }
}

/// A control group for the test, in which at most so many processes and threads may be.
struct Group(PathBuf);

impl Group {
    fn new(limit: u32) -> Option<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("cuda-cluster-test-{}-{count}", std::process::id());
        let parents = ["/sys/fs/cgroup/pids", "/sys/fs/cgroup"].map(Path::new);
        let groups = parents.iter().filter(|parent| parent.is_dir()).map(|it| it.join(&name));
        groups.map(Self).find(|group| {
            std::fs::create_dir(&group.0).is_ok()
                && std::fs::write(group.0.join("pids.max"), limit.to_string()).is_ok()
        })
    }

    /// The program in this group.
    fn run(&self, sandbox: &Sandbox, arguments: &[&str]) -> Said {
        let mut command = Command::new("sh");
        command.args(["-c", "echo $$ > \"$0\"/cgroup.procs && exec \"$@\""]).arg(&self.0);
        command.arg(env!("CARGO_BIN_EXE_cuda-cluster")).args(arguments);
        sandbox.spawn_program(command).wait()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let empty = || std::fs::remove_dir(&self.0).is_ok() || !self.0.exists();
        eventually("nothing is left in the group", Duration::from_secs(30), empty);
    }
}

#[test]
fn a_control_group_that_leaves_no_room_is_named_before_anything_starts() {
    let Some(group) = Group::new(40) else {
        return skip("root", "only root can limit a control group");
    };
    let sandbox = Sandbox::new();
    let many = [&["up"], &MACHINE[..], &["--n-workers", "8", "--detach"]].concat();
    let said = group.run(&sandbox, &many);
    let name = group.0.display().to_string();
    assert_refused(&said, 1, &["needs at least 48 threads", &name, "the limit is 40"]);
    assert_refused(&said, 1, &["hint: raise pids.max in ", "TasksMax of a systemd unit"]);
    sandbox.assert_nothing_is_left();
    drop(group);
    // With a low limit it may fail before it can count, but still with the limit's name.
    for limit in 1..=4 {
        let group = Group::new(limit).expect("as before");
        let said = group.run(&sandbox, &many);
        let name = group.0.display().to_string();
        assert_refused(&said, 1, &["hint: ", &name, "TasksMax"]);
        assert!(!said.stderr.contains("panicked"), "{said}");
    }
    sandbox.assert_nothing_is_left();
}

#[test]
fn files_that_may_not_grow_are_a_failure_with_the_limit_and_no_wrong_usage() {
    let up = [&["up"], &MACHINE[..], &["--n-workers", "2", "--detach"]].concat();
    let run = [&["run"], &MACHINE[..], &["--n-workers", "2", "--", "true"]].concat();
    for arguments in [&up, &run] {
        for limit in ["--fsize=0", "--fsize=1000"] {
            let sandbox = Sandbox::new();
            let mut command = Command::new("prlimit");
            command.arg(limit).arg(env!("CARGO_BIN_EXE_cuda-cluster")).args(arguments);
            let said = sandbox.spawn_program(command).wait();
            assert_refused(&said, 1, &["File too large", "hint: ", "ulimit -f"]);
        }
    }
    // Room for the files of ours, and not for UCX's shared memory.
    let sandbox = Sandbox::new();
    let mut command = Command::new("prlimit");
    command.arg("--fsize=100000").arg(env!("CARGO_BIN_EXE_cuda-cluster")).args(&up);
    let said = sandbox.spawn_program(command).wait();
    assert_refused(&said, 1, &["ended by signal 25 (SIGXFSZ): ", "ulimit -f"]);
}

#[test]
fn a_place_where_no_run_directory_can_be_is_told_with_the_variable_that_says_so() {
    for place in ["/nonexistent/place", "/etc/passwd", "/proc"] {
        let mut up = Command::new(env!("CARGO_BIN_EXE_cuda-cluster"));
        up.args(["up", "--detach"]).args(MACHINE).env("XDG_RUNTIME_DIR", place);
        let output = up.stdin(Stdio::null()).output().expect("it runs");
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{told}");
        assert!(told.contains("error: cannot create "), "{told}");
        assert!(told.contains("hint: set XDG_RUNTIME_DIR"), "{told}");
    }
}

#[test]
fn a_full_disk_is_a_failure_and_no_wrong_usage() {
    let sandbox = Sandbox::new();
    let mut plan = Command::new(env!("CARGO_BIN_EXE_cuda-cluster"));
    plan.arg("plan").args(MACHINE).stdin(Stdio::null()).stderr(Stdio::piped());
    let full = File::options().write(true).open("/dev/full").expect("/dev/full");
    let output = plan.stdout(full).output().expect("it runs");
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("hint: free some space"));
    for asked in ["--version", "--help"] {
        let full = File::options().write(true).open("/dev/full").expect("/dev/full");
        let mut program = Command::new(env!("CARGO_BIN_EXE_cuda-cluster"));
        let output = program.arg(asked).stdout(full).stderr(Stdio::null()).status();
        assert_eq!(output.expect("it runs").code(), Some(1), "{asked}");
    }

    if !nix::unistd::Uid::effective().is_root() {
        return skip("root", "only root can mount a small disk");
    }
    // In a mount namespace of its own, which ends with its processes.
    let script = "mount -t tmpfs -o size=8k,mode=700 tmpfs \"$XDG_RUNTIME_DIR\" && exec \"$@\"";
    for more in [&["up", "--detach"][..], &["up"], &["run"]] {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", script, "sh"]).arg(env!("CARGO_BIN_EXE_cuda-cluster"));
        command.args(more).args(MACHINE).args(["--n-workers", "2"]);
        if more == ["run"] {
            command.args(["--", "true"]);
        }
        let said = sandbox.spawn_program(command).wait();
        assert_refused(&said, 1, &["No space left on device", "hint: ", "XDG_RUNTIME_DIR"]);
    }
    sandbox.assert_nothing_is_left();
}

#[test]
fn arguments_that_are_not_text_reach_the_program_as_they_are() {
    let sandbox = Sandbox::new();
    let odd = OsStr::from_bytes(b"caf\xe9 \xff\xf4\x8f\xbf\xbf");
    for (subcommand, rank) in [("run", None), ("exec", Some("--rank=0"))] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cuda-cluster"));
        command.arg(subcommand).args(MACHINE).args(["--n-workers", "1"]).args(rank);
        let script = "printf %s \"$1\" | od -An -tx1";
        command.args(["--", "sh", "-c", script, "sh"]).arg(odd);
        let said = sandbox.spawn_program(command).wait();
        assert_eq!(said.code, 0, "{said}");
        assert_eq!(said.stdout.trim(), "63 61 66 e9 20 ff f4 8f bf bf", "{said}");
    }
    let mut wrong = Command::new(env!("CARGO_BIN_EXE_cuda-cluster"));
    wrong.arg(odd);
    assert_refused(&sandbox.spawn_program(wrong).wait(), 2, &["unrecognized subcommand"]);
}

#[test]
fn exec_hands_on_what_slurm_tells() {
    let sandbox = Sandbox::new();
    let slurm = "SLURM_LOCALID=3 SLURM_PROCID=11 SLURM_NTASKS=16 SLURM_TASKS_PER_NODE=8(x2) \
                 SLURM_NODEID=1 SLURM_JOB_NODELIST=gpu[07-08] SLURM_JOB_ID=1";
    let script = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT";
    // Without this process's environment, which may come from a launcher.
    let mut command = Command::new("env");
    command.arg("-i").args(slurm.split_whitespace()).arg(env!("CARGO_BIN_EXE_cuda-cluster"));
    command.arg("exec").args(MACHINE).args(["--", "/bin/sh", "-c", script]);
    let said = sandbox.spawn_program(command).wait();
    assert_eq!(said.stdout.trim(), "11/16 3/8 gpu07:20016", "{said}");
}

/// Runs a command with its output on a terminal; returns what the terminal received.
fn on_a_terminal(sandbox: &Sandbox, arguments: &[&str]) -> Vec<u8> {
    let terminal = openpty(None, None).expect("a terminal");
    let end = || Stdio::from(terminal.slave.try_clone().expect("a descriptor"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuda-cluster"));
    command.args(arguments).env("XDG_RUNTIME_DIR", sandbox.runtime()).env_remove("NO_COLOR");
    command.env("TERM", "xterm-256color").stdin(Stdio::null()).stdout(end()).stderr(end());
    let mut running = command.spawn().expect("it starts");
    drop(command);
    drop(terminal.slave);
    let mut shown = Vec::new();
    // Reading a terminal fails once its last writer has gone.
    let _ = File::from(terminal.master).read_to_end(&mut shown);
    running.wait().expect("it ends");
    shown
}

/// Sequences that a terminal would obey.
const NASTY: &str = "\x1b]0;title\x07\x1b[2J\x1b[6n\x1b[31mred\x1b[0m";

/// The same, with only the colour obeyed.
const SHOWN: &str = "\\x1b]0;title\\x07\\x1b[2J\\x1b[6n\x1b[31mred\x1b[0m";

#[test]
fn a_terminal_gets_no_control_sequences_of_others_but_colours() {
    let sandbox = Sandbox::new();
    let file = tempfile::NamedTempFile::new().expect("a file");
    let path = file.path().to_str().expect("text");
    let machine = sandbox.run(&["topo", "--topology", "dgx-h100", "-o", "yaml"]).stdout;
    let name = serde_json::to_string(NASTY).expect("JSON");
    let named = machine.replace("name: dgx-h100", &format!("name: {name}"));
    assert_ne!(named, machine, "the machine has a name");
    std::fs::write(file.path(), named).expect("written");
    let shown = on_a_terminal(&sandbox, &["plan", "--topology", path]);
    let shown = String::from_utf8_lossy(&shown);
    assert!(shown.contains(SHOWN) && !shown.contains("\x1b]0"), "{shown:?}");

    let logged = [
        &["--n-workers", "2", "--name", "nasty", "--prefix", "--"][..],
        &[
            "sh",
            "-c",
            "printf '%s\\n' \"$1\"; [ $RANK = 1 ] && exit 3; exec sleep 100",
            "sh",
            NASTY,
        ],
    ]
    .concat();
    let run = [&["run"], &MACHINE[..], &logged].concat();
    let shown = String::from_utf8_lossy(&on_a_terminal(&sandbox, &run)).into_owned();
    assert!(shown.contains(&format!("] {SHOWN}")) && !shown.contains("\x1b]0"), "{shown:?}");
    // A run that failed keeps its logs.
    let logs = on_a_terminal(&sandbox, &["logs", "nasty"]);
    let logs = String::from_utf8_lossy(&logs);
    assert!(logs.contains(SHOWN) && !logs.contains("\x1b]0"), "{logs:?}");
    // If the output is not a terminal, it gets the bytes as they are.
    let piped = sandbox.run(&["logs", "nasty"]);
    assert!(piped.stdout.contains(NASTY), "{piped}");
}
