//! The cost of the data plane's async API: two planes in this process, host memory.
//!
//! `cargo bench --bench plane` prints latencies. `cargo bench --bench plane -- cycles 100000`
//! closes and opens one plane's connections that often, and prints what this process holds before
//! and after.
#![allow(clippy::print_stdout, unsafe_code)]

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use cuda_cluster::native::plane::{Opening, Plane, Report, Target, TransferError};
use cuda_cluster::ucx::{Library, Setting, environment};
use cuda_cluster::wire::native::ToWorker;
use cuda_cluster::wire::peer::Member;
use cuda_cluster::wire::secret::Secret;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use tokio::sync::mpsc::UnboundedReceiver;

const MESSAGES: usize = 20_000;
const FIRSTS: usize = 100;
const IDLE: Duration = Duration::from_millis(50);
/// Connections opened to one peer; UCX can distinguish 65535.
const CYCLES_PER_PEER: usize = 60_000;

/// A plane, and what the others need to connect to it.
struct Side {
    plane: Plane,
    member: Member,
    address: Vec<u8>,
    reports: UnboundedReceiver<Report>,
}

impl Side {
    async fn open(number: u64) -> Self {
        let member = Member { name: format!("gpu{number}"), incarnation: 100 + number };
        let library = library();
        let settings = vec![Setting::new("NET_DEVICES", "lo")];
        let opening = Opening { library, settings, ..Opening::default() };
        stay_on(usize::try_from(number).expect("few"));
        let (plane, mut reports) =
            Plane::spawn(member.clone(), Secret::new([5; 32]), opening).expect("a thread");
        stay_on(0);
        let Some(Report::Open { address, library, .. }) = reports.recv().await else {
            panic!("{:?}", plane.stop())
        };
        println!("{}: UCX {library}", member.name);
        Self { plane, member, address, reports }
    }

    fn meets(&self, other: &Side) {
        let (member, address) = (other.member.clone(), other.address.clone());
        self.plane.notify(ToWorker::Peer { member, address });
    }

    fn loses(&self, other: &Side) {
        self.plane.notify(ToWorker::Lost { member: other.member.clone(), left: true });
    }

    async fn ready(&mut self) {
        loop {
            match self.reports.recv().await.expect("the plane lives") {
                Report::Ready(peers) => return println!("{}: {peers:?}", self.member.name),
                other => println!("{other:?}"),
            }
        }
    }
}

/// Binds this thread, and threads that it starts later, to one CPU, as workers are bound to theirs.
/// Two threads that poll on one CPU would only measure how they yield to each other.
fn stay_on(number: usize) {
    static USABLE: OnceLock<Vec<usize>> = OnceLock::new();
    let here = Pid::from_raw(0);
    let usable = USABLE.get_or_init(|| {
        let all = sched_getaffinity(here).expect("this thread's CPUs");
        (0..CpuSet::count()).filter(|cpu| all.is_set(*cpu).unwrap_or(false)).collect()
    });
    let mut own = CpuSet::new();
    own.set(usable[number % usable.len()]).expect("a CPU that there is");
    sched_setaffinity(here, &own).expect("one of its CPUs");
}

/// The libucp to use: `CUDA_CLUSTER_UCX`, or the dynamic loader's.
fn library() -> Option<PathBuf> {
    std::env::var_os("CUDA_CLUSTER_UCX").map(PathBuf::from)
}

async fn pair() -> (Side, Side) {
    let (a, mut others) = star(1).await;
    (a, others.remove(0))
}

/// A plane, and others that are connected to it alone.
async fn star(others: u64) -> (Side, Vec<Side>) {
    let mut middle = Side::open(0).await;
    let mut around = Vec::new();
    for number in 1..=others {
        around.push(Side::open(number).await);
    }
    let names = around.iter().map(|other| other.member.name.clone()).collect();
    middle.plane.notify(ToWorker::Expect { names });
    for other in &mut around {
        other.plane.notify(ToWorker::Expect { names: vec![middle.member.name.clone()] });
        middle.meets(other);
        other.meets(&middle);
        other.ready().await;
    }
    middle.ready().await;
    (middle, around)
}

/// The median, the mean, the 99th percentile and the maximum, in microseconds.
fn summary(mut samples: Vec<Duration>) -> String {
    samples.sort_unstable();
    let us = |duration: Duration| duration.as_secs_f64() * 1e6;
    let mean = samples.iter().sum::<Duration>() / u32::try_from(samples.len()).expect("few");
    let at = |share: usize| us(samples[(samples.len() - 1) * share / 100]);
    format!(
        "median {:.2} µs, mean {:.2}, 99% {:.2}, longest {:.2}",
        at(50),
        us(mean),
        at(99),
        at(100)
    )
}

/// The cost of waking without UCX or anything else: a thread on the peer's CPU that sleeps until a
/// byte arrives, and sends it back.
struct Bare {
    line: UnixStream,
}

impl Bare {
    fn new() -> Self {
        let (line, mut other) = UnixStream::pair().expect("two sockets");
        std::thread::spawn(move || {
            stay_on(1);
            let mut byte = [0];
            while other.read_exact(&mut byte).is_ok() && other.write_all(&byte).is_ok() {}
        });
        Self { line }
    }

    fn wakes_and_is_woken(&self) -> Duration {
        let (mut line, mut byte) = (&self.line, [0]);
        let began = Instant::now();
        line.write_all(&byte).and_then(|()| line.read_exact(&mut byte)).expect("it lives");
        began.elapsed()
    }
}

async fn latencies() {
    let (a, b) = pair().await;
    b.plane.put("eight bytes", vec![7; 8]);
    let mut one_way = Vec::with_capacity(MESSAGES);
    for _ in 0..MESSAGES {
        let began = Instant::now();
        a.plane.echo("gpu1").await.expect("its peer lives");
        one_way.push(began.elapsed() / 2);
    }
    println!("async, one way:        {}", summary(one_way.split_off(MESSAGES / 10)));
    let mut fetches = Vec::with_capacity(MESSAGES);
    for _ in 0..MESSAGES {
        let began = Instant::now();
        let fetch = a.plane.get("gpu1", "eight bytes", Target::Host, false);
        fetch.await.expect("it is there");
        fetches.push(began.elapsed());
    }
    println!("async, fetch of 8 B:   {}", summary(fetches.split_off(MESSAGES / 10)));
    let (mut firsts, mut bare) = (Vec::with_capacity(FIRSTS), Vec::with_capacity(FIRSTS));
    let sleeper = Bare::new();
    for _ in 0..FIRSTS {
        tokio::time::sleep(IDLE).await;
        let began = Instant::now();
        a.plane.echo("gpu1").await.expect("its peer lives");
        firsts.push(began.elapsed() / 2);
        tokio::time::sleep(IDLE).await;
        bare.push(sleeper.wakes_and_is_woken() / 2);
    }
    println!("first after idle:      {}", summary(firsts));
    println!("  a thread wakes another, and it wakes back: {}", summary(bare));
    for side in [a, b] {
        side.plane.stop().expect("UCX worked to the end");
    }
}

/// What this process holds: open files, System V segments and files in /dev/shm together with the
/// mappings of its memory, resident bytes.
fn held() -> (usize, usize, u64) {
    let count = |path: &str| fs::read_dir(path).map_or(0, Iterator::count);
    let segments = fs::read_to_string("/proc/sysvipc/shm").unwrap_or_default();
    let segments = segments.lines().count().saturating_sub(1);
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes = resident.and_then(|text| text.split_whitespace().next()?.parse::<u64>().ok());
    let mappings = fs::read_to_string("/proc/self/maps").unwrap_or_default().lines().count();
    let shared = segments + count("/dev/shm") + mappings;
    (count("/proc/self/fd"), shared, kilobytes.unwrap_or(0) << 10)
}

async fn cycles(count: usize) {
    let (a, others) = star(count.div_ceil(CYCLES_PER_PEER).max(1) as u64).await;
    let mut before = held();
    let began = Instant::now();
    for cycle in 0..=count {
        let b = &others[cycle % others.len()];
        a.loses(b);
        b.loses(&a);
        // When they report this, both have forgotten the other.
        for (one, other) in [(&a, b), (b, &a)] {
            let answer = one.plane.echo(&other.member.name).await;
            assert!(matches!(answer, Err(TransferError::NoPeer { .. })), "{answer:?}");
        }
        a.meets(b);
        b.meets(&a);
        for (one, other) in [(&a, b), (b, &a)] {
            one.plane.echo(&other.member.name).await.expect("it is back");
        }
        // The first hundredth of the cycles fills UCX's pools.
        if cycle == count / 100 {
            before = held();
        }
        if cycle % (count / 10).max(1) == 0 {
            let (files, segments, resident) = held();
            println!(
                "{cycle:8} cycles: {files} files, {segments} segments and mappings, {:.1} MiB",
                resident as f64 / f64::from(1 << 20)
            );
        }
    }
    let after = held();
    let grown = after.2.saturating_sub(before.2);
    println!(
        "{count} cycles in {:.1} s: files {} to {}, segments and mappings {} to {}, {grown} bytes \
         more resident",
        began.elapsed().as_secs_f64(),
        before.0,
        after.0,
        before.1,
        after.1
    );
}

fn main() {
    for Setting { name, value } in environment::defaults(None) {
        // SAFETY: this process has one thread.
        unsafe { std::env::set_var(format!("UCX_{name}"), value) };
    }
    // The same library as the planes': a process cannot open two.
    if let Err(error) = Library::open(library().as_deref()) {
        return println!("nothing is measured: {error}");
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.expect("a runtime");
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().position(|argument| argument == "cycles") {
        Some(at) => {
            let count = arguments.get(at + 1).and_then(|count| count.parse().ok());
            runtime.block_on(cycles(count.unwrap_or(1000)));
        }
        None => runtime.block_on(latencies()),
    }
}
