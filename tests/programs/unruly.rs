//! A program that misbehaves on request: the processes of the supervisor's tests.
//!
//! `unruly STEP...` performs one step after the other, and then answers the supervisor's questions
//! forever:
//!
//! | step | does |
//! |---|---|
//! | `ready` | reports READY on the status pipe |
//! | `step=TEXT` | reports that a step of its start begins |
//! | `fail=TEXT` | reports that it cannot start, and ends with status 1 |
//! | `listen=PORT` | listens on a port of this machine from now on, or reports that it is taken, and ends |
//! | `print=TEXT` | prints a line |
//! | `flood=LINES` | prints that many lines |
//! | `chatter=MS` | from now on, prints a line at this interval |
//! | `sleep=MS` | waits |
//! | `exit=CODE` | ends |
//! | `abort` | ends by SIGABRT |
//! | `ignore-term` | ignores SIGTERM from now on |
//! | `stop` | stops itself (SIGSTOP) |
//! | `hang` | waits forever, and answers no question |
//! | `children=N` | starts N children that ignore SIGTERM and live forever |
//! | `daemon` | starts a grandchild in a session of its own, without its parents |
//! | `threads=N` | starts N threads that live forever |
//! | `allocate=MIB` | allocates that much memory, and writes to it |
//! | `affinity` | prints the CPUs that it had in a constructor, and those of all threads now |
//! | `once=FILE` | if FILE exists, skips the next step; otherwise creates it |
#![allow(
    unsafe_code,
    clippy::exit,
    clippy::print_stdout,
    reason = "it misbehaves, and by printing"
)]

use std::io::{Read, Write};
use std::os::fd::FromRawFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// CPUs allowed before `main`: one bit for each of the first 64.
static mut AT_BIRTH: u64 = 0;

extern "C" fn look_at_birth() {
    // SAFETY: this runs before `main`, on the only thread there is.
    unsafe { AT_BIRTH = allowed() };
}

#[used]
// SAFETY: the section holds functions without arguments that the loader calls before `main`.
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = look_at_birth;

fn allowed() -> u64 {
    let mut mask = [0u64; 16];
    // SAFETY: the kernel writes at most the size given.
    unsafe { libc::syscall(libc::SYS_sched_getaffinity, 0, size_of_val(&mask), mask.as_mut_ptr()) };
    mask[0]
}

fn main() {
    let mut skip = false;
    for step in std::env::args().skip(1) {
        if !std::mem::take(&mut skip) {
            skip = perform(&step);
        }
    }
    answer_for_ever();
}

/// Performs a step; returns whether to skip the next.
fn perform(step: &str) -> bool {
    let (verb, object) = step.split_once('=').unwrap_or((step, ""));
    let number = || object.parse::<u64>().expect("a number");
    match verb {
        "ready" => say("{\"status\":\"ready\"}"),
        "step" => say(&format!("{{\"status\":\"step\",\"step\":\"{object}\"}}")),
        "fail" => {
            say(&format!("{{\"status\":\"failed\",\"reason\":\"{object}\"}}"));
            std::process::exit(1);
        }
        "listen" => listen(object.parse().expect("a port")),
        "print" => println!("{object}"),
        "flood" => flood(number()),
        "chatter" => chatter(Duration::from_millis(number())),
        "sleep" => std::thread::sleep(Duration::from_millis(number())),
        "exit" => std::process::exit(object.parse().expect("a status")),
        "abort" => std::process::abort(),
        "ignore-term" => ignore_term(),
        // SAFETY: a signal to oneself.
        "stop" => drop(unsafe { libc::raise(libc::SIGSTOP) }),
        "hang" => wait_for_ever(),
        "children" => (0..number()).for_each(|_| {
            child(|| ());
        }),
        "daemon" => daemon(),
        "threads" => (0..number()).for_each(|_| drop(std::thread::spawn(wait_for_ever))),
        "allocate" => {
            let size = usize::try_from(number()).expect("a size") << 20;
            std::mem::forget(vec![1u8; size]);
        }
        "affinity" => print_affinity(),
        "once" => {
            let first = std::fs::OpenOptions::new().write(true).create_new(true).open(object);
            return first.is_err();
        }
        _ => panic!("no such step: {step}"),
    }
    false
}

fn wait_for_ever() {
    loop {
        std::thread::sleep(Duration::from_secs(3600));
    }
}

/// The status pipe, which stays open as long as this process lives.
fn status() -> Option<std::mem::ManuallyDrop<UnixStream>> {
    let number = std::env::var("CUDA_CLUSTER_STATUS_FD").ok()?.parse().expect("a number");
    // SAFETY: the shim left this descriptor open, and nobody closes it.
    Some(std::mem::ManuallyDrop::new(unsafe { UnixStream::from_raw_fd(number) }))
}

fn say(line: &str) {
    let Some(mut pipe) = status() else { return };
    // In one piece, because others may write too.
    pipe.write_all(format!("{line}\n").as_bytes()).expect("a supervisor that listens");
}

fn answer_for_ever() {
    if let Some(mut pipe) = status() {
        let mut questions = [0; 64];
        while matches!(pipe.read(&mut questions), Ok(1..)) {
            say("{\"status\":\"alive\"}");
        }
    }
    wait_for_ever();
}

fn flood(lines: u64) {
    let mut out = std::io::stdout().lock();
    for line in 0..lines {
        writeln!(out, "line {line}").expect("a reader");
    }
}

fn chatter(pause: Duration) {
    std::thread::spawn(move || {
        for line in 0.. {
            println!("chatter {line}");
            std::thread::sleep(pause);
        }
    });
}

fn listen(port: u16) {
    match std::net::TcpListener::bind(("127.0.0.1", port)) {
        Ok(listener) => std::mem::forget(listener),
        Err(error) => {
            say(&format!("{{\"status\":\"failed\",\"reason\":\"port {port}: {error}\"}}"));
            std::process::exit(1);
        }
    }
}

fn ignore_term() {
    // SAFETY: ignoring a signal installs no handler.
    unsafe { libc::signal(libc::SIGTERM, libc::SIG_IGN) };
}

/// Forks a child that does some work and then lives forever, ignoring SIGTERM.
fn child(work: impl FnOnce()) -> i32 {
    // SAFETY: the program forks only while it has one thread.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        ignore_term();
        work();
        wait_for_ever();
    }
    pid
}

fn daemon() {
    let parent = child(|| {
        // SAFETY: a call without arguments.
        unsafe { libc::setsid() };
        child(|| ());
        std::process::exit(0);
    });
    // SAFETY: the status is not wanted.
    unsafe { libc::waitpid(parent, std::ptr::null_mut(), 0) };
}

fn print_affinity() {
    // SAFETY: written once, before `main`.
    println!("at birth {:#x}", unsafe { AT_BIRTH });
    for thread in std::fs::read_dir("/proc/self/task").expect("this process") {
        let path = thread.expect("a thread").path().join("status");
        let status = std::fs::read_to_string(path).expect("its status");
        let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        println!("thread {}", allowed.expect("its CPUs").trim());
    }
}
