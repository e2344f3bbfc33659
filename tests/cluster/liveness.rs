//! READY means that everything answers: processes that are stopped, that hang, and that die while
//! the guardian is stopped.
#![allow(unsafe_code, reason = "one thread of a worker is stopped as a debugger does it")]

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::sandbox::{Sandbox, eventually};

const LONG: Duration = Duration::from_secs(60);

fn up(sandbox: &Sandbox, name: &str, flags: &[&str]) {
    let up = ["up", "--topology", "dgx-h100", "--simulate", "--n-workers", "2", "--detach"];
    let said = sandbox.run(&[&up[..], &["--name", name], flags].concat());
    assert_eq!(said.code, 0, "{said}");
}

fn down(sandbox: &Sandbox, name: &str) {
    let said = sandbox.run(&["down", name]);
    assert_eq!(said.code, 0, "{said}");
}

fn signal(pid: &Value, signal: Signal) {
    let pid = i32::try_from(pid.as_i64().expect("a pid")).expect("a pid");
    kill(Pid::from_raw(pid), signal).expect("it lives");
}

fn becomes(sandbox: &Sandbox, name: &str, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
    eventually(what, LONG, || holds(&sandbox.state(name)));
    sandbox.state(name)
}

fn is_ready(state: &Value) -> bool {
    state["state"] == "ready"
}

/// The status line of the answer to `GET /health`.
fn health(state: &Value) -> String {
    let socket = Path::new(state["run_directory"].as_str().expect("a path")).join("control.sock");
    let mut stream = UnixStream::connect(socket).expect("a supervisor");
    let ask = "GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    stream.write_all(ask.as_bytes()).expect("a listener");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    answer.lines().next().unwrap_or_default().to_owned()
}

#[test]
fn a_stopped_process_is_not_ready_until_it_goes_on() {
    let sandbox = Sandbox::new();
    up(&sandbox, "stops", &[]);
    let before = sandbox.state("stops");
    assert!(is_ready(&before) && health(&before).contains("200"), "{before}");
    for process in [&before["workers"][1], &before["scheduler"]] {
        signal(&process["pid"], Signal::SIGSTOP);
        let name = process["name"].as_str().expect("a name");
        let find = |state: &Value| {
            let of = if name == "scheduler" { &state["scheduler"] } else { &state["workers"][1] };
            of.clone()
        };
        let state = becomes(&sandbox, "stops", "it is seen", |state| !is_ready(state));
        assert_eq!(state["state"], "unresponsive", "nothing recovers by itself: {state}");
        assert_eq!(find(&state)["state"], "unresponsive", "{state}");
        let since = find(&state)["not_answering_since"].as_str().expect("a time").to_owned();
        assert!(health(&state).contains("503"), "{}", health(&state));
        let ps = sandbox.run(&["ps", "stops"]);
        assert!(ps.stdout.contains(&format!("not answering since {}", &since[11..19])), "{ps}");
        assert!(ps.stdout.starts_with("stops: not answering, "), "{ps}");
        signal(&process["pid"], Signal::SIGCONT);
        let state = becomes(&sandbox, "stops", "READY again", is_ready);
        assert_eq!(find(&state)["pid"], process["pid"], "the same process");
        assert!(find(&state)["not_answering_since"].is_null(), "{state}");
        let events = sandbox.run(&["events", "stops"]).stdout;
        for told in ["not answering since", "answers again, after"] {
            assert!(events.contains(&format!("{name}: {told}")), "{events}");
        }
    }
    down(&sandbox, "stops");
    sandbox.assert_nothing_is_left();
}

#[test]
fn what_asks_a_stopped_worker_for_something_ends_with_its_name() {
    let sandbox = Sandbox::new();
    up(&sandbox, "asked", &[]);
    signal(&sandbox.state("asked")["workers"][1]["pid"], Signal::SIGSTOP);
    for command in [
        &["bench", "links", "asked", "--size", "64KiB"][..],
        &["verify", "asked"],
        &["bench", "transpose", "asked", "--chunks", "4", "--runs", "1"],
    ] {
        let said = sandbox.run(command);
        assert_eq!(said.code, 1, "{command:?}: {said}");
        assert!(said.stderr.contains("gpu1"), "{command:?}: {said}");
        assert!(said.stderr.contains("answer") && said.stderr.contains("since"), "{said}");
        assert!(said.stderr.contains("hint: ") && said.stderr.contains("restart"), "{said}");
    }
    down(&sandbox, "asked");
    sandbox.assert_nothing_is_left();
}

/// One thread of a process, stopped as by a debugger until this is dropped.
struct Held(i32);

impl Held {
    /// `None` if this user may not trace other processes.
    fn thread(pid: &Value, name: &str) -> Option<Self> {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("threads").flatten();
        let is_it = |entry: &std::fs::DirEntry| {
            let comm = std::fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
            comm.trim() == name
        };
        let found = tasks.filter(is_it).find_map(|entry| entry.file_name().into_string().ok());
        let thread: i32 = found.expect("the thread").parse().expect("a number");
        // SAFETY: the calls take numbers only.
        unsafe {
            let null = std::ptr::null_mut::<libc::c_void>();
            if libc::ptrace(libc::PTRACE_SEIZE, thread, null, null) != 0 {
                return None;
            }
            assert_eq!(libc::ptrace(libc::PTRACE_INTERRUPT, thread, null, null), 0);
            assert_eq!(libc::waitpid(thread, std::ptr::null_mut(), libc::__WALL), thread);
        }
        Some(Self(thread))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let null = std::ptr::null_mut::<libc::c_void>();
        // SAFETY: the call takes numbers only.
        unsafe { libc::ptrace(libc::PTRACE_DETACH, self.0, null, null) };
    }
}

#[test]
fn a_worker_answers_with_its_event_loop_and_its_ucx_thread() {
    let sandbox = Sandbox::new();
    up(&sandbox, "hangs", &["--answer-within", "3s"]);
    let pid = sandbox.state("hangs")["workers"][0]["pid"].clone();
    let main = std::fs::read_to_string(format!("/proc/{pid}/comm")).expect("it lives");
    for thread in ["ucx", main.trim()] {
        let Some(held) = Held::thread(&pid, thread) else {
            let reason = "this user may not trace other processes (kernel.yama.ptrace_scope)";
            crate::skip::skip("ptrace", reason);
            break;
        };
        let state = becomes(&sandbox, "hangs", "it is noticed", |state| !is_ready(state));
        assert_eq!(state["workers"][0]["state"], "unresponsive", "{thread}: {state}");
        let events = sandbox.run(&["events", "hangs"]).stdout;
        assert!(events.contains("gpu0: not answering since"), "{events}");
        drop(held);
        becomes(&sandbox, "hangs", "READY again", is_ready);
    }
    down(&sandbox, "hangs");
    sandbox.assert_nothing_is_left();
}

#[test]
fn a_worker_that_does_not_answer_is_restarted_where_that_is_asked_for() {
    let sandbox = Sandbox::new();
    up(&sandbox, "again", &["--answer-within", "3s", "--unresponsive", "restart"]);
    let before = sandbox.state("again")["workers"][1]["pid"].clone();
    signal(&before, Signal::SIGSTOP);
    let state = becomes(&sandbox, "again", "a new process is READY", |state| {
        is_ready(state) && state["workers"][1]["pid"] != before
    });
    assert!(state["workers"][1]["restarts"].as_u64() >= Some(1), "{state}");
    let reason = state["workers"][1]["last_exit"]["reason"].as_str().expect("a reason");
    assert!(reason.starts_with("did not answer for 3s; it "), "{reason}");
    // Whoever waits for its results gets them from its successor.
    let said =
        sandbox.run(&["bench", "transpose", "again", "--chunks", "4", "--runs", "1", "--check"]);
    assert_eq!(said.code, 0, "{said}");
    down(&sandbox, "again");
}

#[test]
fn under_a_stopped_guardian_nothing_is_ready_and_a_death_is_told() {
    let sandbox = Sandbox::new();
    up(&sandbox, "alone", &["--answer-within", "3s"]);
    let before = sandbox.state("alone");
    let guardian = &before["guardian_pid"];
    signal(guardian, Signal::SIGSTOP);
    let state = becomes(&sandbox, "alone", "it is seen", |state| !is_ready(state));
    assert!(state["guardian_not_answering_since"].is_string(), "{state}");
    let ps = sandbox.run(&["ps", "alone"]);
    assert!(ps.stdout.contains(&format!("(process {guardian}) is not answering since")), "{ps}");
    signal(&before["workers"][1]["pid"], Signal::SIGKILL);
    becomes(&sandbox, "alone", "the death is seen", |state| {
        state["workers"][1]["state"] == "unresponsive"
    });
    let events = sandbox.run(&["events", "alone"]).stdout;
    assert!(events.contains("guardian: not answering since"), "{events}");
    assert!(events.contains("it has ended, and the guardian does not tell how"), "{events}");
    signal(guardian, Signal::SIGCONT);
    let state = becomes(&sandbox, "alone", "READY again", |state| {
        is_ready(state) && state["workers"][1]["pid"] != before["workers"][1]["pid"]
    });
    assert_eq!(state["workers"][1]["last_exit"]["signal"], 9, "{state}");
    assert!(state["guardian_not_answering_since"].is_null(), "{state}");
    down(&sandbox, "alone");
}

#[test]
fn of_any_program_only_its_being_stopped_is_seen() {
    let sandbox = Sandbox::new();
    let folder = tempfile::tempdir().expect("a directory");
    let spec = folder.path().join("spec.yaml").display().to_string();
    let text = "version: 1\nengine: command\ncommand: {argv: [sleep, '1000']}\n\
                supervision: {answer_within: 300ms}\n";
    std::fs::write(&spec, text).expect("written");
    up(&sandbox, "ranks", &["-f", &spec]);
    let pid = sandbox.state("ranks")["workers"][0]["pid"].clone();
    signal(&pid, Signal::SIGSTOP);
    let state = becomes(&sandbox, "ranks", "it is seen", |state| !is_ready(state));
    assert_eq!(state["workers"][0]["state"], "unresponsive", "{state}");
    signal(&pid, Signal::SIGCONT);
    becomes(&sandbox, "ranks", "READY again", is_ready);
    down(&sandbox, "ranks");
    sandbox.assert_nothing_is_left();
}

#[test]
fn who_answers_is_ready_all_the_time() {
    let sandbox = Sandbox::new();
    up(&sandbox, "calm", &["--answer-within", "10s"]);
    let said =
        sandbox.run(&["bench", "transpose", "calm", "--chunks", "4", "--runs", "1", "--check"]);
    assert_eq!(said.code, 0, "{said}");
    // Long enough for each process to have been asked.
    std::thread::sleep(Duration::from_secs(11));
    let events = sandbox.run(&["events", "calm"]).stdout;
    assert!(!events.contains("not answering"), "{events}");
    assert!(is_ready(&sandbox.state("calm")));
    down(&sandbox, "calm");
    sandbox.assert_nothing_is_left();
}
